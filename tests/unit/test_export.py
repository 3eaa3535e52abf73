"""What is exported is what was committed, and transformers loads all of it: weights, special tokens, tokenizer, generation."""

import errno
import json
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

from bench.texts import Text
from dilocox.cli.main import app
from dilocox.cli.model import export
from dilocox.cli.model.export import Chosen, Exported, write_held
from dilocox.cli.progress import Working, working
from dilocox.node.data.tokenizers import byte_tokenizer, open_encoder, train_tokenizer
from dilocox.node.outer.tensor_file import save_tensors
from dilocox.node.training.hf.export import Vocabulary, export_model
from dilocox.node.training.hf.generate import generate_text
from dilocox.node.training.hf.hf_import import Weights, read_model
from dilocox.node.training.model.model import FAMILIES, build_chain
from dilocox.node.training.model.trainer import initial_state
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.corpus import Corpus
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.files import find_chains
from dilocox.views.model_card import model_card
from tests.corpora import corpus_of, words
from tests.helpers import Table, digest, identity, manifest

SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {**SCALING, "original_max_position_embeddings": 16},
        "max_position_embeddings": 128,
        "attention_bias": True,
    },
    "mistral": {"sliding_window": 64, "max_position_embeddings": 128, "head_dim": 24},
    "qwen2": {"rms_norm_eps": 1e-5},
    "qwen3": {"head_dim": 8, "rope_parameters": {"rope_theta": 1e6}},
}


def exported(tmp_path: Path, run: Manifest, tokenizer: str, end: int) -> tuple[Path, BlobStore, list[bytes]]:
    store, folder = BlobStore(tmp_path / "blobs"), tmp_path / "model"
    digests = [store.put([initial_state(run, stage).state_bytes()]) for stage in range(run.model.stages)]
    seen: list[int] = []
    export_model(run, digests, store, folder, Vocabulary(tokenizer.encode(), end), "# A card", seen.append)
    assert seen == list(range(run.model.stages))
    return folder, store, digests


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_and_computes_what_was_committed(family: str, tmp_path: Path):
    run = manifest(model={"model_type": family, "stages": 3, **MODELS[family]})
    folder, _, _ = exported(tmp_path, run, byte_tokenizer(), 0)
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "config.json").stat().st_mode}, "one reads all"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == FAMILIES[family].prefix + "ForCausalLM"
    assert theirs.dtype == torch.float32
    chain = build_chain(run.model, [0, 1, 2], torch.device("cpu"))
    for number, stage in enumerate(chain):
        state = initial_state(run, number)
        for (_, theta), parameter in zip(state.views(state.parameters), stage.tensors(), strict=True):
            parameter.data.copy_(theta)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(chain(tokens), theirs(tokens, use_cache=False).logits, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_imported_as_it_was(family: str, tmp_path: Path):
    run = manifest(model={"model_type": family, **MODELS[family]})
    folder, store, digests = exported(tmp_path, run, byte_tokenizer(), 0)
    fields, tied = read_model(folder)
    assert not tied
    again = type(run.model).model_validate({"config": fields, "sequence_length": 16, "stages": 2})
    assert again == run.model
    root = Weights(folder, again, tied).put_into(store)
    assert store.stage_digests(root) == digests


def test_special_tokens_are_those_of_the_data(tmp_path: Path):
    tokenizer = train_tokenizer(words(50, 20), 300)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    end = open_encoder(str(tmp_path / "tokenizer.json")).end_token
    folder, _, _ = exported(tmp_path, manifest(model={"vocab_size": 320, "model_type": "qwen3"}), tokenizer, end)
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, end, None)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == end
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.eos_token_id, loaded.bos_token) == ("<|endoftext|>", end, None)
    assert (folder / "tokenizer.json").read_text() == tokenizer, "its digest is the data's"
    text = " ".join(words(1, 30, seed=3))
    assert loaded(text)["input_ids"] == open_encoder(str(tmp_path / "tokenizer.json")).encode([text])[0].tolist()


def test_auto_tokenizer_of_qwen2_finds_the_same_tokens_in_plain_text(tmp_path: Path):
    """It has its own class for that family, whatever the files say: hence what the card says of it."""
    folder, _, _ = exported(tmp_path, manifest(), byte_tokenizer(), 0)
    text = "def main() -> None:\n    print('Zürich')\n"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == list(text.encode())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_byte_tokens_are_the_bytes(family: str, tmp_path: Path):
    folder, _, _ = exported(tmp_path, manifest(model={"model_type": family}), byte_tokenizer(), 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, 0)
    characters = [*range(1, 0xD800), *range(0xE000, 0x110000)]
    anything = "".join(map(chr, random.Random(0).choices(characters, k=2000)))
    every_byte = "".join(map(chr, range(1, 0x800)))
    for text in ("", " two  blanks\n\tand a line\r\n", "Zürich 🏔 ĀĠ", every_byte, anything):
        ids = tokenizer(text)["input_ids"]
        assert bytes(ids) == text.encode() == bytes(open_encoder("bytes").encode([text])[0])
        assert tokenizer.decode(ids) == text
    assert tokenizer("a\0b")["input_ids"] == [97, 98], "which no document holds"
    assert tokenizer.decode([97, 0], skip_special_tokens=True) == "a"


class Run:
    """A chain of three rounds in a node's folder, with the state that it agreed on."""

    def __init__(self, home: Path, text: Text) -> None:
        self.home, self.text = home, text
        self.run = manifest(data=text.settings)
        self.table = Table(self.run).genesis().train(3)
        folder = home / "runs" / self.run.run_id.hex()[:16]
        folder.mkdir(parents=True)
        chain = ChainFile(folder / "chain.db", self.run)
        for commit in self.table.commits:
            chain.append(commit.envelope)
        chain.close()
        self.store = BlobStore(folder / "blobs")


def test_the_card_says_what_the_chain_proves():
    run = manifest(model={"initial": digest("imported").hex()})
    table = Table(run).genesis().train(4)
    root = table.commits[3].body.state
    card = model_card(run, iter(table.commits), 3)
    each = table.commits[1].body.counted[0].weight
    for said in (run.run_id.hex(), run.data.digest, run.model.initial, root.hex(), "2 of 5 that were counted"):
        assert str(said) in card
    for number in range(3):
        assert f"| `{identity(number).peer}` | {2 * each:,} |" in card
    assert f"{6 * each:,} tokens" in card
    later = model_card(run, iter(table.commits), 4)
    assert f"| `{identity(0).peer}` | {3 * each:,} |" in later
    assert "## Its tokenizer" in later, "of qwen2"


def test_generate_continues_a_text_from_a_folder(tmp_path: Path):
    folder, _, _ = exported(tmp_path, manifest(model={"max_position_embeddings": 64}), byte_tokenizer(), 0)

    def generate(*options: str) -> str:
        result = CliRunner().invoke(app, ["generate", str(folder), "--prompt", "def ", "--tokens", "8", "--json", *options])
        assert result.exit_code == 0, result.output
        text: str = json.loads(result.stdout)["text"]
        return text

    assert generate("--seed", "1") == generate("--seed", "1")
    assert len({generate("--seed", str(seed)) for seed in range(4)}) > 1
    assert len({generate("--seed", str(seed), "--temperature", "0") for seed in range(2)}) == 1


def test_generate_runs_nothing_that_a_folder_brings_along(tmp_path: Path):
    folder, _, _ = exported(tmp_path, manifest(model={"max_position_embeddings": 64}), byte_tokenizer(), 0)
    for part in folder.glob("*.safetensors*"):
        part.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded by transformers"):
        generate_text(folder, "def ", 1, 0, 0)
    config = json.loads((folder / "config.json").read_text())
    brought = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}}
    (folder / "config.json").write_text(json.dumps({**config, **brought}))
    (folder / "theirs.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match="cannot be loaded by transformers"):
        generate_text(folder, "def ", 1, 0, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model-00001-of-00002.safetensors", b"short"),
        ("model-00002-of-00002.safetensors", b"\xff" * 5000),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b"[1]"),
        ("config.json", b"nope"),
        ("tokenizer.json", b"nope"),
    ],
)
def test_a_damaged_folder_is_a_sentence(tmp_path: Path, name: str, content: bytes):
    folder, _, _ = exported(tmp_path, manifest(model={"stages": 2}), byte_tokenizer(), 0)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be loaded by transformers|is damaged"):
        generate_text(folder, "x", 1, 0.0, 0)


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path):
    folder, _, _ = exported(tmp_path, manifest(model={"stages": 2}), byte_tokenizer(), 0)
    part = folder / "model-00002-of-00002.safetensors"
    tensors, said = load_file(part), json.loads((folder / "config.json").read_text())
    save_tensors({name: each for name, each in tensors.items() if name != "model.norm.weight"}, part, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its weights lack model\.norm\.weight"):
        generate_text(folder, "x", 1, 0.0, 0)
    save_tensors(tensors, part, {"format": "pt"})
    generate_text(folder, "x", 1, 0.0, 0)
    (folder / "config.json").write_text(json.dumps({**said, "hidden_size": 4096, "head_dim": 4096}))
    with pytest.raises(ConfigError, match=r"config\.json says [\d,]+ parameters"):
        generate_text(folder, "x", 1, 0.0, 0)


def test_a_folder_that_may_not_be_read_is_said_to_be_one(tmp_path: Path):
    folder, _, _ = exported(tmp_path, manifest(model={"stages": 2}), byte_tokenizer(), 0)
    weights = folder / "model-00001-of-00002.safetensors"
    weights.unlink()
    weights.symlink_to(weights.name)  # so that also root may not
    with pytest.raises(ConfigError, match="symbolic links"):
        generate_text(folder, "x", 1, 0.0, 0)


def test_generate_says_what_it_needs(tmp_path: Path):
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x", "--home", str(tmp_path)])
    assert result.exit_code == 2


def test_an_export_goes_into_no_folder_that_holds_something(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "out"), "--home", str(tmp_path)])
    assert result.exit_code == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a full disk, or Ctrl-C, leaves half is in nobody's way: the same words work again."""

    def half(folder: Path, *rest: object) -> Exported:
        folder.mkdir(parents=True)
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def whole(folder: Path, *rest: object) -> Exported:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        return Exported(3, None)

    target = tmp_path / "models" / "mine"
    command = ["export", str(target), "--home", str(tmp_path)]
    monkeypatch.setattr(export, "write_model", half)
    assert isinstance(CliRunner().invoke(app, command).exception, OSError)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(export, "write_model", whole)
    assert CliRunner().invoke(app, command).exit_code == 0
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]
    (volume := tmp_path / "volume").mkdir()
    assert CliRunner().invoke(app, ["export", str(volume), "--home", str(tmp_path)]).exit_code == 0
    assert (volume / "config.json").exists()


def test_a_state_that_is_given_up_while_it_is_read_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A node that trains on keeps a state for two rounds: the newest one is asked for again."""
    node = Run(tmp_path / "home", corpus_of(tmp_path / "text", words(200, 20)))
    (chain,) = find_chains(node.home)
    asked: list[int | None] = []

    def gone(chain: ChainFile, store: BlobStore, round: int | None, adapter: bool, bar: Working) -> Chosen:
        asked.append(round)
        if len(asked) == 3:
            raise ConfigError("the third time")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(store.path(bytes(32))))

    monkeypatch.setattr(export, "choose", gone)
    for round, sentence in ((None, "the third time"), (5, "retry")):
        with pytest.raises(LocalError, match=sentence), working("x") as bar:
            write_held(tmp_path / "out", chain, round, {"text": node.text.folder}, bar)
    assert asked == [None, None, None, 5]


def test_what_the_system_refuses_is_its_own_word(tmp_path: Path):
    """Of safetensors it is a sentence with a number, which would be a traceback."""
    tensors, limits = {"x": torch.zeros(1 << 18)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(FileNotFoundError):
        save_tensors(tensors, tmp_path / "none" / "x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="x") as told:
            save_tensors(tensors, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(tmp_path / "x"))
    save_tensors(tensors, tmp_path / "x", {"format": "pt"})
    assert torch.equal(load_file(tmp_path / "x")["x"], tensors["x"])


def test_nobody_else_writes_tensors():
    """Every file of them is written where the system's word is kept."""
    rooms = (Path(export.__file__).parents[2] / room for room in ("node", "transport", "views", "cli"))
    found = {path.name for room in rooms for path in room.rglob("*.py") if "save_file" in path.read_text()}
    assert found == {"tensor_file.py"}


def test_an_export_without_its_tokenizer_says_where_to_look(tmp_path: Path):
    node = Run(tmp_path / "home", corpus_of(tmp_path / "text", words(200, 20)))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "out"), "--home", str(node.home)])
    assert node.text.digest in str(result.exception)
    named = ["--data", f"text={node.text.folder}"]
    result = CliRunner().invoke(app, ["export", str(tmp_path / "out"), "--home", str(node.home), *named])
    assert isinstance(result.exception, ConfigError), "it goes on to look for the state, and finds none"
    assert "no agreed state on this disk" in str(result.exception)
    assert Corpus.from_canonical(BlobStore(node.text.folder).read(bytes.fromhex(node.text.digest))).tokenizer == "bytes"
