"""A run reads the corpus that its manifest names by digest, and nothing else on any disk."""

import errno
import fcntl
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner, Result

from dilocox.cli.main import app
from dilocox.node.data import build as builder
from dilocox.node.data import shards
from dilocox.node.data.build import build
from dilocox.node.data.finding import Found, find_files
from dilocox.node.data.sources import documents
from dilocox.node.data.tokenizers import open_encoder, train_tokenizer
from dilocox.node.data.verify import check_corpus, check_whole
from dilocox.node.training.model.data import SHARDS_MAPPED, load_dataset
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.run.corpus import Corpus, Order, Shard, check_fits, order_of, permute, token_bytes
from dilocox.protocol.run.manifest import Data, Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import (
    ExposedCorpus,
    corpus_in,
    lacking,
    last_built,
    library,
    named_store,
    parse_folders,
)
from dilocox.transport.store.data_directory import DataDirectory
from tests.corpora import corpus_of, words
from tests.e2e.conftest import RUN
from tests.helpers import Table, manifest, until

RUNNER = CliRunner()


def opened(folder: Path) -> Corpus:
    corpus = corpus_in(BlobStore(folder), last_built(folder))
    assert corpus is not None
    return corpus


def texts_of(folder: Path, held_out: bool = False) -> list[str]:
    """Return the documents of a corpus of bytes."""
    corpus, store = opened(folder), BlobStore(folder)
    shards = corpus.held_out if held_out else corpus.training
    raw = b"".join(bytes(store.view(bytes.fromhex(shard.digest))) for shard in shards)
    return [text.decode() for text in raw.split(b"\0")[:-1]]


# Built corpora


def test_the_same_sources_make_the_same_corpus_wherever_they_lie(tmp_path: Path):
    documents = words(200, 20)
    made = [corpus_of(tmp_path / name, documents) for name in ("a", "b")]
    assert made[0].digest == made[1].digest
    assert corpus_of(tmp_path / "c", documents, held_out_every=9).digest != made[0].digest
    assert sorted(texts_of(tmp_path / "a") + texts_of(tmp_path / "a", held_out=True)) == sorted(documents)


def test_copies_of_a_document_lie_on_one_side(tmp_path: Path):
    documents = words(64, 5)
    corpus_of(tmp_path / "c", documents * 3)
    trained, held_out = texts_of(tmp_path / "c"), texts_of(tmp_path / "c", held_out=True)
    assert set(trained) | set(held_out) == set(documents)
    assert not set(trained) & set(held_out)
    assert held_out


def test_many_shards_in_little_memory_hold_every_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = words(500, 20)
    monkeypatch.setattr(builder, "SHARD_BYTES", 4096)
    monkeypatch.setattr(shards, "BUFFERED_BYTES", 2000)
    monkeypatch.setattr(builder, "BATCH_CHARACTERS", 700)
    corpus_of(tmp_path / "c", documents)
    corpus = opened(tmp_path / "c")
    assert len(corpus.training) > 10
    assert corpus.documents + corpus.held_out_documents == 500
    assert sorted(texts_of(tmp_path / "c") + texts_of(tmp_path / "c", held_out=True)) == sorted(documents)
    sizes = [shard.tokens for shard in corpus.training]
    assert max(sizes) < 4 * min(sizes), "dealt by their hashes"


def test_every_kind_of_file_gives_its_documents(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "sources"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.txt").write_bytes(b"plain\r\ntext\n")
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "packed", "n": 1}) + "\n\n" + json.dumps({"text": None}) + "\n")
    table = arrow.table({"n": [1, 2, 3], "text": ["first row", "second row", None]})
    parquet.write_table(table, folder / "c.parquet")
    with arrow.OSFile(str(folder / "d.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 1))
    with arrow.OSFile(str(folder / "e.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.slice(1, 1))
    (folder / "cache-1.arrow").write_text("what `datasets` keeps for itself")
    (folder / "picture.png").write_text("no text")
    found = [text for path in find_files([str(folder)]) for text, _ in documents(path, "text")]
    assert found == ["packed", "first row", "second row", "first row", "plain\r\ntext\n", "second row"]


def test_a_long_text_is_cut_at_line_ends(tmp_path: Path):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40_000)) + "x" * 200_000)
    pieces = [text for text, _ in documents(path, "text")]
    assert "".join(pieces) == path.read_text()
    assert len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces[:5])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}\n', r"line 2: no text in 'text'.*--field.*body"),
        ("a.jsonl", '{"text": "x"}\nnonsense\n', "line 2: not JSON"),
        ("a.jsonl", '["x"]\n', "line 1: no text"),
        ("a.parquet", "nonsense", "a.parquet: "),
        ("a.arrow", "nonsense", "a.arrow: "),
        ("a.txt.gz", "nonsense", "a.txt.gz: "),
        ("a.txt", "", "0 documents to train on"),
        ("a.txt", " \n", "0 documents to train on"),
    ],
)
def test_a_source_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str, sentence: str):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        build(tmp_path / "c", [path], open_encoder("bytes"))
    assert not (tmp_path / "c" / "digest").exists()
    assert not (tmp_path / "c" / ".building").exists()


def test_sources_that_are_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="no file or folder"):
        find_files([str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="has no file"):
        find_files([str(tmp_path)])


def test_what_may_not_be_read_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    (tmp_path / "deep").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "b.txt")  # root may read all
    with pytest.raises(PermissionError, match=r"b\.txt"):
        find_files([str(tmp_path)])
    scan = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "deep":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="deep"):
        find_files([str(tmp_path)])


def test_a_build_writes_only_where_a_build_wrote_before_or_nothing_lies(tmp_path: Path):
    (tmp_path / "mine").write_text("a letter")
    (tmp_path / "source.txt").write_text("text\n" * 10)
    with pytest.raises(ConfigError, match="--to"):
        build(tmp_path, [tmp_path / "source.txt"], open_encoder("bytes"))
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "source.txt"}


def test_what_was_built_before_stays_beside_what_is_built_now(tmp_path: Path):
    first, second = (corpus_of(tmp_path / "c", words(100, 9, seed)) for seed in (1, 2))
    store = BlobStore(tmp_path / "c")
    for text in (first, second):
        corpus = corpus_in(store, bytes.fromhex(text.digest))
        assert corpus is not None
        assert lacking(store, corpus) == []
    assert last_built(tmp_path / "c").hex() == second.digest


def test_two_builds_in_one_folder_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    corpus_of(tmp_path / "c", words(100, 9))

    def again(read: int) -> None:
        corpus_of(tmp_path / "c", words(100, 9))

    with pytest.raises(LocalError, match="another build"):
        build(tmp_path / "c", [tmp_path / "c.jsonl"], open_encoder("bytes"), follow=again)


def test_who_waits_for_another_build_makes_its_own_when_that_is_over(tmp_path: Path):
    corpus_of(tmp_path / "c", words(200, 20))
    made: list[tuple[bytes, Corpus]] = []
    waiting = threading.Thread(
        target=lambda: made.append(build(tmp_path / "c", [tmp_path / "c.jsonl"], open_encoder("bytes"), wait=True))
    )
    with (tmp_path / "c" / builder.LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert not made
    waiting.join()
    assert made[0][0] == last_built(tmp_path / "c")


def test_a_killed_build_leaves_what_was_there_and_the_next_one_builds(tmp_path: Path):
    text = corpus_of(tmp_path / "c", words(100, 9))
    script = (
        "import os, pathlib, signal, sys; from dilocox.node.data.build import build;"
        "from dilocox.node.data.tokenizers import open_encoder;"
        "build(pathlib.Path(sys.argv[1]), [pathlib.Path(sys.argv[2])], open_encoder('bytes'), held_out_every=3,"
        " follow=lambda read: os.kill(os.getpid(), signal.SIGKILL))"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "c"), str(tmp_path / "c.jsonl")]
    assert subprocess.run(command).returncode == -9
    assert (tmp_path / "c" / ".building").is_dir()
    check_corpus(manifest(data=text.settings), tmp_path / "c")
    assert corpus_of(tmp_path / "c", words(100, 9)).digest == text.digest
    assert not (tmp_path / "c" / ".building").exists()


# Tokenizers


def test_a_trained_tokenizer_gives_back_the_text_and_ends_documents(tmp_path: Path):
    from tokenizers import Tokenizer

    documents = [*words(300, 30), "Größe 漢字 \t\n"]
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(documents, 300))
    encoder = open_encoder(str(tmp_path))
    assert encoder.vocabulary_size == 300
    text = corpus_of(tmp_path / "c", documents, encoder)
    corpus = opened(tmp_path / "c")
    store = BlobStore(tmp_path / "c")
    assert corpus.token_bytes == 2
    assert bytes(store.view(bytes.fromhex(corpus.tokenizer))) == path.read_bytes()
    tokenizer = Tokenizer.from_file(str(path))
    decoded = []
    for shard in (*corpus.training, *corpus.held_out):
        tokens = np.frombuffer(store.view(bytes.fromhex(shard.digest)), "<u2")
        ends = np.flatnonzero(tokens == corpus.end_token)
        decoded += [tokenizer.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]]
    assert sorted(decoded) == sorted(documents)
    with pytest.raises(ConfigError, match=r"300 tokens.*vocab_size is 256"):
        check_fits(manifest(data=text.settings), corpus)


def test_a_build_that_found_no_room_can_be_tried_again(tmp_path: Path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".lock").touch()  # as after a full disk
    assert corpus_of(tmp_path / "c", words(100, 9)).digest


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json: "):
        open_encoder(str(tmp_path / "bad.json"))
    (tmp_path / "good.json").write_text(train_tokenizer(words(9, 9), 300))
    with pytest.raises(ConfigError, match="--end-token"):
        open_encoder(str(tmp_path / "good.json"), "<end>")
    with pytest.raises(ConfigError, match="remove --end-token"):
        open_encoder("bytes", "<end>")
    monkeypatch.setattr(limits, "TOKENIZER_BYTES", 1 << 20)
    (tmp_path / "long.json").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(ConfigError, match="1 MiB"):
        open_encoder(str(tmp_path / "long.json"))
    with pytest.raises(ConfigError, match="is a device"):
        open_encoder("/dev/zero")
    says = json.loads((tmp_path / "good.json").read_text())
    says["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "xxxx"}
    (tmp_path / "bad.json").write_text(json.dumps(says))
    with pytest.raises(ConfigError, match="`tokenizers`"):
        open_encoder(str(tmp_path / "bad.json")).encode(["Once upon a time"])


ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot|>")


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({}, 0),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "config.json": {"eos_token_id": 302}}, 301),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eot|>"}}}, 302),
        ({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": {"eos_token": "<|eot|>"}}, 302),
        ({"tokenizer_config.json": {"eos_token": "<none>"}, "generation_config.json": {"eos_token_id": [9999, 302, 0]}}, 302),
        ({"generation_config.json": {"eos_token_id": 301}, "config.json": {"eos_token_id": 302}}, 301),
        ({"config.json": {"eos_token_id": 302}}, 302),
        ({"config.json": {"eos_token_id": True}, "tokenizer_config.json": []}, 0),
    ],
)
def test_the_model_s_own_end_token_wins_over_the_usual_ones(said: dict[str, Any], end: int, tmp_path: Path):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(train_tokenizer(words(50, 9), 301))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ENDS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in said.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer.get_vocab_size() == 303
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert open_encoder(str(place)).end_token == end
        assert open_encoder(str(place), "<|eot|>").end_token == 302
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert open_encoder(str(tmp_path / "other.json")).end_token == 0, "what lies beside another file is not of it"


def test_a_tokenizer_of_no_text_is_refused_and_one_of_little_text_says_how_small_it_is(tmp_path: Path):
    def trained(text: str) -> Result:
        (tmp_path / "text.txt").write_text(text)
        arguments = [str(tmp_path / "out.json"), str(tmp_path / "text.txt"), "--vocabulary", "30000"]
        return CliRunner().invoke(app, ["data", "train-tokenizer", *arguments])

    empty = trained(" \n")
    assert isinstance(empty.exception, ConfigError)
    assert not (tmp_path / "out.json").exists()
    little = trained("one two one two")
    assert little.exit_code == 0
    size = open_encoder(str(tmp_path / "out.json")).vocabulary_size
    assert f"the text has pairs for {size} tokens only" in little.stderr
    assert size < 300


@settings(deadline=None)
@given(st.integers(1, 1 << 32))
def test_a_token_fits_its_bytes(vocabulary: int):
    assert vocabulary - 1 < 1 << 8 * token_bytes(vocabulary)


# The order


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.integers(0, 1 << 40))
def test_an_epoch_reads_every_sample_once_a_shard_at_a_time(samples: list[int], seed: int):
    order = Order(samples, seed)
    for epoch in (0, 1, 7):
        found = [order.find(epoch * order.total + index) for index in range(order.total)]
        assert sorted(found) == [(shard, sample) for shard, count in enumerate(samples) for sample in range(count)]
        changes = sum(before[0] != after[0] for before, after in itertools.pairwise(found))
        assert changes == sum(map(bool, samples)) - 1
        first, end = epoch * order.total, epoch * order.total + len(found)
        assert list(order.shards(first, end)) == [shard for shard, _ in itertools.groupby(found, key=lambda each: each[0])]
    assert list(order.shards(3, 3)) == []


def test_the_order_is_a_permutation_that_changes_every_epoch_and_in_every_shard():
    for count in (1, 2, 3, 17, 256, 1000):
        orders = [[permute(i, count, 5, epoch, lane) for i in range(count)] for epoch, lane in ((0, 0), (1, 0), (0, 1))]
        assert all(sorted(order) == list(range(count)) for order in orders)
        assert count < 5 or len({tuple(order) for order in orders}) == 3


def test_samples_are_what_the_shards_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "SHARD_BYTES", 2048)
    text = corpus_of(tmp_path / "c", words(200, 20))
    run = manifest(data={**text.settings, "evaluation_sequences": 1000})
    data = load_dataset(run, text.folder)
    corpus, width, store = opened(text.folder), run.model.sequence_length + 1, BlobStore(text.folder)
    assert len(corpus.training) > 1

    def samples(shards: tuple[Shard, ...]) -> list[bytes]:
        held = [store.view(bytes.fromhex(shard.digest)) for shard in shards]
        return [bytes(view[at : at + width]) for view in held for at in range(0, len(view) - width + 1, width)]

    def read(pair: tuple[Tensor, Tensor]) -> list[bytes]:
        return [bytes([*row.tolist(), int(last)]) for row, last in zip(pair[0], pair[1][:, -1], strict=True)]

    assert sorted(read(data.batch(range(data.sequences)))) == sorted(samples(corpus.training))
    assert read(data.evaluation()) == samples(corpus.held_out)


async def test_samples_are_here_when_their_shards_are_and_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "SHARD_BYTES", 2048)
    text = corpus_of(tmp_path / "c", words(200, 20))
    run, corpus, store = manifest(data=text.settings), opened(text.folder), BlobStore(text.folder)
    order = order_of(run, corpus)
    (first, end), (second, _) = order.stretch(0), order.stretch(order.stretch(0)[1])
    paths = [store.path(bytes.fromhex(corpus.training[shard].digest)) for shard in (first, second)]
    held = [path.read_bytes() for path in paths]
    paths[0].unlink()
    paths[1].write_bytes(held[1][::-1])
    data = load_dataset(run, text.folder)

    assert data.here([])
    assert not data.here([0, end - 1])
    paths[0].write_bytes(held[0])
    await until(lambda: data.here([0, end - 1]))
    assert not any(data.here([end - 1, end]) for _ in range(100)), "looked at, and found damaged"
    assert paths[1].read_bytes() == held[1][::-1], "and left where it lies: others read it too"
    paths[1].write_bytes(held[1])
    await until(lambda: data.here([end - 1, end]))
    data.batch(range(end + 1))


def test_more_shards_than_descriptors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "SHARD_BYTES", 300)
    text = corpus_of(tmp_path / "c", words(400, 20), held_out_every=2)
    corpus = opened(text.folder)
    assert min(len(corpus.training), len(corpus.held_out)) > 2 * SHARDS_MAPPED
    data = load_dataset(manifest(data={**text.settings, "evaluation_sequences": 1000}), text.folder)
    before = len(os.listdir("/proc/self/fd"))
    pairs = [data.batch(range(data.sequences)), data.evaluation()]
    assert len(os.listdir("/proc/self/fd")) <= before + SHARDS_MAPPED
    assert all(len(pair[0]) > 2 * SHARDS_MAPPED for pair in pairs)


# Readable corpora of a run


@pytest.mark.parametrize("name", ["", ".", "..", "~", "a b", "a/../b", "ä", "a:b", "a=b", "*", "a\n", "/etc", "../x", "a" * 65])
def test_a_name_is_a_name(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match="name"):
        Data(name=name, digest="00" * 32)
    with pytest.raises(ConfigError, match="--data"):
        parse_folders([f"{name}={tmp_path}"])


@pytest.mark.parametrize(
    "digest", ["", "/etc/passwd", "../" * 21 + "x", "00" * 31, "00" * 33, "0G" * 32, "AB" * 32, "00" * 31 + "0\n"]
)
def test_a_digest_is_a_digest(digest: str):
    with pytest.raises(ValueError, match="digest"):
        Data(name="x", digest=digest)


@pytest.mark.parametrize("key", ["source", "tokenizer", "path", "folder", "url"])
def test_a_run_has_no_other_word_for_where_data_lie(key: str):
    with pytest.raises(ValueError, match=key):
        Data.model_validate({"name": "x", "digest": "00" * 32, key: "/etc/passwd"})


def test_a_corpus_has_no_word_for_a_path(tmp_path: Path):
    text = corpus_of(tmp_path / "c", words(100, 9))
    raw: dict[str, Any] = json.loads(opened(text.folder).canonical_bytes())
    changes: list[dict[str, Any]] = [
        {"tokenizer": "/etc/passwd"},
        {"training": [{"digest": "../../secret", "tokens": 1}]},
        {"training": []},
        {"path": "/etc"},
        {"end_token": 256},
        {"vocabulary_size": 0},
        {"held_out_every": 1},
        {"version": 2},
    ]
    for change in changes:
        with pytest.raises(RemoteError, match=r"^malformed: .*corpus"):
            Corpus.from_canonical(json.dumps({**raw, **change}, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(RemoteError, match=r"^malformed: .*canonical"):
        Corpus.from_canonical(json.dumps(raw).encode())


def test_folders_that_are_not_there_or_named_twice_are_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    places = [f"{tmp_path}/{name}" for name in ("none", "file", "loop", "x" * 5000, "\ud800", "a\0b")]
    for wrong in (["c"], ["c="], [f"c={tmp_path}", f"c={tmp_path}"], *([f"c={place}"] for place in places)):
        with pytest.raises(ConfigError, match="--data c") as refused:
            parse_folders(wrong)
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(("data", "sentence"), [("none", "no corpus of this name.*data build none"), ("../x", "write NAME")])
def test_a_corpus_that_is_not_there_is_named_as_the_operator_named_it(
    data: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    done = RUNNER.invoke(app, ["init", str(tmp_path / "run.toml"), "--data", data])
    assert isinstance(done.exception, ConfigError)
    assert re.search(f"--data {re.escape(data)}: .*{sentence}", str(done.exception))


def test_a_named_folder_is_used_only_with_the_very_corpus(tmp_path: Path):
    mine, other = (corpus_of(tmp_path / name, words(100, 9, seed)) for seed, name in enumerate(("mine", "other")))
    data = Data.model_validate({**mine.settings, "name": "text"})
    assert named_store(data, {}) is None
    found = named_store(data, {"text": mine.folder})
    assert found is not None
    assert found.folder == mine.folder
    with pytest.raises(ConfigError, match=rf"{mine.digest}.*{other.folder}.*--data text=DIR"):
        named_store(data, {"text": other.folder})


def test_a_damaged_folder_is_refused_before_anything_is_trained(tmp_path: Path):
    text = corpus_of(tmp_path / "c", words(100, 9))
    shard = tmp_path / "c" / opened(tmp_path / "c").training[0].digest
    raw = bytearray(shard.read_bytes())
    raw[5] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"1 files of the corpus in .* are missing or damaged"):
        check_corpus(manifest(data=text.settings), tmp_path / "c")
    result = RUNNER.invoke(app, ["data", "show", str(tmp_path / "c")])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match="does not lie in"):
        load_dataset(manifest(), tmp_path / "c")


def test_too_little_text_is_said_with_its_numbers(tmp_path: Path):
    text = corpus_of(tmp_path / "c", words(20, 2))
    with pytest.raises(ConfigError, match=r"sequences of 129 tokens to train on.*need 4 and 1"):
        load_dataset(manifest(data=text.settings, model={"sequence_length": 128}), text.folder)


# The commands


def test_build_init_and_show(tmp_path: Path):
    source = tmp_path / "source.txt"
    source.write_text("\n".join(words(3000, 30)))
    corpus = tmp_path / "corpus"
    made = RUNNER.invoke(app, ["data", "build", "mine", str(source), "--to", str(corpus), "--held-out-every", "3", "--json"])
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert facts["digest"] == last_built(corpus).hex()
    assert (
        facts["tokens"] + facts["held_out_tokens"] == source.stat().st_size + facts["documents"] + facts["held_out_documents"]
    )
    shown = RUNNER.invoke(app, ["data", "show", str(corpus)])
    assert facts["digest"] in shown.stdout
    run = tmp_path / "run.toml"
    result = RUNNER.invoke(app, ["init", str(run), "--data", f"mine={corpus}"])
    assert result.exit_code == 0, result.output
    assert f'digest = "{facts["digest"]}"' in run.read_text()
    assert f"--data mine={corpus}" in result.output


def test_init_names_the_standard_library_by_digest(tmp_path: Path):
    result = RUNNER.invoke(app, ["init", str(tmp_path / "run.toml")])
    assert result.exit_code == 0, result.output
    again = RUNNER.invoke(app, ["init", str(tmp_path / "again.toml")])
    assert again.exit_code == 0
    first, second = (Manifest.from_toml((tmp_path / name).read_text()) for name in ("run.toml", "again.toml"))
    assert first.data == second.data
    assert first.data.digest == last_built(library("stdlib")).hex()


def test_a_testnet_asks_for_the_data_before_it_starts_anything(tmp_path: Path):
    run = RUN.replace("[data]\n", f'[data]\nname = "t"\ndigest = "{"00" * 32}"\n')
    (tmp_path / "run.toml").write_text(run.replace("{owner}", "00" * 32).replace("{count}", "9"))
    (tmp_path / "run.key").write_text("00" * 32)
    arguments = ["testnet", "up", "--folder", str(tmp_path / "t"), "--run", str(tmp_path / "run.toml")]
    result = RUNNER.invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "--data t=DIR" in str(result.exception)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(("change", "sentence"), [({"tokens": -1}, "does not have"), ({"vocabulary_size": 100}, "of 100")])
def test_a_corpus_that_lies_about_its_shards_is_refused(tmp_path: Path, change: dict[str, int], sentence: str):
    text = corpus_of(tmp_path / "c", words(200, 20))
    store, corpus = BlobStore(text.folder), opened(text.folder)
    shard = corpus.training[0]
    shards = (shard.model_copy(update={"tokens": shard.tokens + change.get("tokens", 0)}),)
    lying = corpus.model_copy(update={"training": shards, "vocabulary_size": change.get("vocabulary_size", 256)})
    with pytest.raises(ConfigError, match=f"not as their corpus states.*{sentence}"):
        check_whole(store, store.put([lying.canonical_bytes()]))


def test_a_node_serves_what_its_run_names_and_nothing_else_of_the_folder(tmp_path: Path):
    ours = corpus_of(tmp_path / "c", words(200, 20))
    other = corpus_of(tmp_path / "c", words(200, 20, seed=1))
    store = BlobStore(tmp_path / "c")
    shelf = ExposedCorpus(store, bytes.fromhex(ours.digest))
    corpora = [corpus_in(store, bytes.fromhex(text.digest)) for text in (ours, other)]
    named, private = ({digest for digest, _ in corpus.blobs} for corpus in corpora if corpus is not None)
    assert all(shelf.holds(digest) for digest in {*named, bytes.fromhex(ours.digest)})
    assert not any(shelf.holds(digest) for digest in {*private, bytes.fromhex(other.digest)})
    assert not ExposedCorpus(BlobStore(tmp_path / "empty"), bytes.fromhex(ours.digest)).holds(next(iter(named)))


def test_the_commands_of_the_documentation_make_a_run_of_ones_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEXTS").mkdir()
    for number in range(9):
        (tmp_path / "TEXTS" / f"{number}.txt").write_text("\n".join(words(1500, 30, number)))
    (tmp_path / "TEXTS" / "picture.png").write_bytes(bytes(9))
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text()
    commands = [
        line.split("#")[0].split()[1:] for line in page.splitlines() if line.startswith(("dilocox data", "dilocox init"))
    ]
    assert [command[:2] for command in commands[:3]] == [["data", "train-tokenizer"], ["data", "build"], ["data", "show"]]
    for command in commands:
        result = RUNNER.invoke(app, ["300" if word == "32768" else word for word in command])
        assert result.exit_code == 0, (command, result.output, result.exception)
        assert "TEXTS/" not in command or "left out: 1 .png" in result.output
    run = Manifest.from_toml((tmp_path / "my-run.toml").read_text())
    assert run.model.config.vocab_size == 320
    check_corpus(run, library("mytext"))


def test_what_a_text_spells_ends_no_document(tmp_path: Path):
    (tmp_path / "t.json").write_text(train_tokenizer(words(50, 9), 300))
    encoder = open_encoder(str(tmp_path / "t.json"))
    (tokens,) = encoder.encode(["a<|endoftext|>b"])
    assert encoder.end_token not in tokens.tolist()


def test_half_a_surrogate_pair_is_no_reason_to_end(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x \\ud83d y"}\n')
    assert [text for text, _ in documents(path, "text")] == ["x ? y"]


def test_what_is_no_text_is_refused_and_a_file_twice_is_read_once(tmp_path: Path):
    (tmp_path / "a.zst").write_bytes(bytes(range(256)))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"a\0b")
    for name in ("a.zst", "b.txt"):
        with pytest.raises(ConfigError, match="not UTF-8 text"):
            list(documents(tmp_path / name, "text"))
    with pytest.raises(ConfigError, match="NUL bytes"):
        list(documents(tmp_path / "c.txt", "text"))
    found = Found()
    files = find_files([str(tmp_path / "b.txt"), str(tmp_path), str(tmp_path / "b.txt")], found)
    assert files == [tmp_path / "b.txt", tmp_path / "c.txt"]
    assert found.left_out == {".zst": ["a.zst"]}


def test_other_names_than_the_runs_are_refused(tmp_path: Path):
    text = corpus_of(tmp_path / "c", words(100, 9))
    with pytest.raises(ConfigError, match=r"named c, not k: .*--data c=DIR"):
        named_store(Data.model_validate(text.settings), {"k": tmp_path})


@pytest.mark.parametrize("digest", ["", "00", "precious", "00" * 32])
def test_a_folder_with_a_file_called_digest_is_not_a_builds(tmp_path: Path, digest: str):
    folder = tmp_path / "mine"
    (folder / ".building").mkdir(parents=True)
    (folder / "digest").write_text(digest)
    (folder / ".lock").write_text("")
    with pytest.raises(ConfigError, match="--to"):
        corpus_of(folder, words(100, 9))
    assert (folder / "digest").read_text() == digest
    assert (folder / ".building").is_dir()
    if len(digest) < 64:
        with pytest.raises(ConfigError, match="no corpus"):
            last_built(folder)


def test_data_of_finished_runs_are_freed_and_nothing_else(tmp_path: Path):
    """Reproduce a fault: no command ever removed them."""
    ended, going, stray = (corpus_of(tmp_path / name, words(40, 20, seed)) for seed, name in enumerate(("e", "g", "s")))
    home = tmp_path / "node"
    store = BlobStore(home / "data")
    blobs: dict[str, set[bytes]] = {}
    for text in (ended, going, stray):
        blobs[text.digest] = BlobStore(text.folder).digests()
        for digest in blobs[text.digest]:
            store.put([BlobStore(text.folder).view(digest)])
    mine = home / "data" / "notes.txt"
    mine.write_text("not a blob")
    for text, rounds in ((ended, 1), (going, 9)):
        run = manifest(run={"name": text.name}, data=text.settings | {"evaluation_sequences": 1}, rounds={"count": rounds})
        folder = home / "runs" / run.run_id.hex()[:16]
        folder.mkdir(parents=True)
        kept = ChainFile(folder / "chain.db", run)
        table = Table(run).genesis().train(1)
        for number in range(3):
            table.submit(table.report(number))
        for commit in table.commits:
            kept.append(commit.envelope)
        assert kept.head.finished == (text is ended)
        kept.close()

    def free(*options: str, says: str | None = None) -> Result:
        return RUNNER.invoke(app, ["data", "free", "--home", str(home), *options], input=says)

    asked = free()
    assert asked.exit_code == 2
    assert "nothing was deleted" in asked.stderr
    with pytest.MonkeyPatch.context() as terminal:
        terminal.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
        asked = free("--json", says="n\n")
    assert asked.exit_code == 2
    assert "Delete" in asked.stderr
    assert "Delete" not in asked.stdout, "where JSON goes"
    assert store.digests() == set.union(*blobs.values())
    with closing(DataDirectory(home)):
        assert "another daemon" in str(free("--yes").exception or free("--yes").stderr)
    before = sum(path.stat().st_size for path in (home / "data").iterdir())
    result = free("--yes", "--json")
    assert result.exit_code == 0, result.output
    assert store.digests() == blobs[going.digest]
    assert mine.exists()
    after = sum(path.stat().st_size for path in (home / "data").iterdir())
    assert json.loads(result.stdout)["freed_bytes"] == before - after > 0
    store.remove(bytes.fromhex(going.digest))
    some = next(iter(store.digests()))
    assert free("--yes").exit_code == 0
    assert some in store.digests(), "a run that goes on lacks its corpus' document: it may need any of it"
