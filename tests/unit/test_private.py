"""Tests of private data: those that a cluster brings, those that it reads, and those that no other peer receives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.node.data.tokenizers import open_encoder, train_tokenizer
from dilocox.node.data.verify import check_own, must_bring_own
from dilocox.node.training.model.data import load_dataset, load_private
from dilocox.node.workers.environment import WorkerSettings
from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.head import Cluster, initial_head
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.member import phase
from dilocox.protocol.run.corpus import Corpus, check_fits, order_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import ExposedCorpus, corpus_in, last_built
from tests.corpora import corpus_of, words
from tests.helpers import manifest

ME = "me"


def private_run(**sections: dict[str, Any]) -> Manifest:
    return manifest(**{**sections, "data": {"private": True, **sections.get("data", {})}})


def corpus_at(folder: Path) -> Corpus:
    corpus = corpus_in(BlobStore(folder, ours=False), last_built(folder))
    assert corpus is not None
    return corpus


def test_who_must_bring_own_data_and_who_must_not(tmp_path: Path):
    must_bring_own(private_run(), tmp_path)
    must_bring_own(manifest(), None)
    with pytest.raises(ConfigError, match="pass --private DIR"):
        must_bring_own(private_run(), None)
    with pytest.raises(ConfigError, match="remove --private"):
        must_bring_own(manifest(), tmp_path)


def test_own_data_speak_the_run_s_tokens_and_are_enough_and_whole(tmp_path: Path):
    shared, own = corpus_of(tmp_path / "shared", words(40, 60)), corpus_of(tmp_path / "own", words(40, 60, 1))
    check_own(private_run(), corpus_at(shared.folder), own.folder, last_built(own.folder))
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(words(40, 60), 300))
    another = corpus_of(tmp_path / "another", words(40, 60, 1), open_encoder(str(tmp_path / "tokenizer.json")))
    with pytest.raises(ConfigError, match="build them with the run's tokenizer"):
        check_own(private_run(), corpus_at(shared.folder), another.folder, last_built(another.folder))
    with pytest.raises(ConfigError, match="a batch of 4096"):
        check_own(private_run(training={"batch_size": 4096}), corpus_at(shared.folder), own.folder, last_built(own.folder))
    with pytest.raises(ConfigError, match="no corpus"):
        check_own(private_run(), corpus_at(shared.folder), tmp_path, last_built(tmp_path))
    shard = own.folder / corpus_at(own.folder).training[0].digest
    found = shard if shard.exists() else next(own.folder.rglob(shard.name))
    found.write_bytes(found.read_bytes()[:-1] + b"\1")
    with pytest.raises(ConfigError, match="missing or damaged"):
        check_own(private_run(), corpus_at(shared.folder), own.folder, last_built(own.folder))


def test_the_shared_text_need_not_be_enough_to_train_on_unless_scores_are_measured_on_it(tmp_path: Path):
    little = corpus_at(corpus_of(tmp_path / "little", words(12, 12), held_out_every=2).folder)
    many = {"training": {"batch_size": 4096}}
    check_fits(private_run(**many), little)
    for run in (manifest(**many), private_run(**many, scoring={"voters": 3})):
        with pytest.raises(ConfigError, match="to train on"):
            check_fits(run, little)


def at(run: Manifest, samples_read: int = 100) -> phase.PhaseState:
    """Return a phase of a cluster on the roster, with a lease of 32 samples from 10,000 on, of which 100 were counted
    earlier."""
    head = replace(
        initial_head(""),
        round=2,
        digest=b"head",
        roster={ME: Cluster(ME, (), joined=1)},
        ledger=Ledger(99_999, (), {ME: Lease(100, ((10_000, 10_032),))}),
        inner_steps=8,
    )
    return replace(phase.begin(run, ME, head), joined=1, samples_read=samples_read)


def test_a_cluster_counts_its_own_samples_as_far_as_its_lease_allows():
    assert phase.upcoming(at(manifest(), samples_read=104), trained=False) == [10_004, 10_005, 10_006, 10_007]
    first, *others = phase.upcoming(at(private_run(), samples_read=104), trained=False)
    assert others == [first + 1, first + 2, first + 3]
    assert phase.upcoming(at(private_run(), samples_read=108), trained=False)[0] == first + 4
    again = replace(at(private_run(), samples_read=104), joined=7)
    assert phase.upcoming(again, trained=False)[0] != first, "who comes back does not read the same again"
    assert phase.upcoming(at(private_run(), samples_read=132), trained=False) == [], "its lease ends"


def test_nothing_of_the_run_s_data_is_read_ahead_but_to_score_on():
    head = at(private_run()).head
    assert phase.reading(manifest(), ME, head) == ((10_000, 10_032),)
    assert phase.reading(private_run(), ME, head) == ()
    assert phase.reading(private_run(scoring={"voters": 3}), ME, head) == ((10_000, 10_032),)


def test_a_cluster_reads_its_own_text_in_an_order_of_its_own(tmp_path: Path):
    shared, own = corpus_of(tmp_path / "shared", words(40, 60)), corpus_of(tmp_path / "own", ["z" * n for n in range(200, 240)])
    run = private_run(data=shared.settings)
    text, dataset = load_private(run, own.folder, last_built(own.folder), ME), load_dataset(run, shared.folder)
    inputs, _ = text.batch(range(8))
    assert set(inputs.unique().tolist()) <= {0, ord("z")}
    assert not set(dataset.evaluation()[0].unique().tolist()) <= {0, ord("z")}, "all evaluate on what they share"
    orders = [order_of(run, corpus_at(shared.folder), name) for name in ("", ME, "another")]
    reads = [[order.find(position) for position in range(order.total)] for order in orders]
    assert len({tuple(read) for read in reads}) == 3
    assert len({tuple(sorted(read)) for read in reads}) == 1, "each sample once in an epoch"
    assert torch.equal(text.batch([3])[0], load_private(run, own.folder, last_built(own.folder), ME).batch([3])[0])


def test_what_is_served_of_a_run_is_what_its_corpus_names(tmp_path: Path):
    """Check it even if private and shared corpora were built in one folder."""
    folder = tmp_path / "both"
    shared = bytes.fromhex(corpus_of(folder, words(40, 60)).digest)
    common = corpus_at(folder)
    corpus_of(folder, words(40, 60, 1))
    private, shelf = corpus_at(folder), ExposedCorpus(BlobStore(folder, ours=False), shared)
    assert all(shelf.holds(bytes.fromhex(shard.digest)) for shard in common.training)
    assert not any(shelf.holds(bytes.fromhex(shard.digest)) for shard in (*private.training, *private.held_out))
    assert not shelf.holds(last_built(folder))


def test_workers_are_told_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    for private in (None, Path("/own data")):
        settings = WorkerSettings(
            "s", Path("a"), Path("b"), Path("c"), "cluster", "cpu", 1, 1, (), Path("d"), 0.0, private=private
        )
        for name, value in settings.environment().items():
            monkeypatch.setenv(name, value)
        assert WorkerSettings.from_environment() == settings
