"""Tests of a run's data, which a node fetches from any peer before its workers start, or else reports the reason."""

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dilocox.node.data import build as builder
from dilocox.node.data import supply
from dilocox.node.data.supply import Supply
from dilocox.node.data.verify import check_corpus
from dilocox.node.exchange.downloader import FetchStatistics
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.corpus import Corpus, order_of, samples_in
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in
from tests.corpora import corpus_of, words
from tests.helpers import PATIENCE_SECONDS, manifest, until


class Peers:
    """Exchange whose peers have the blobs of `served`, for one requested peer; the network takes no time."""

    def __init__(self, served: Path, into: BlobStore) -> None:
        self.served, self.into = BlobStore(served), into
        self.holders: set[str] = {"coordinator"}
        self.asked: list[tuple[bytes, int]] = []

    def statistics(self) -> FetchStatistics:
        return FetchStatistics(0, 0, 0, 0, 0)

    async def fetch(self, digest: bytes, providers: Iterable[str], max_size: int) -> None:
        if self.into.sound(digest):
            return
        self.asked.append((digest, max_size))
        if not self.holders & set(providers) or digest not in self.served:
            raise RemoteError(pb.REASON_UNAVAILABLE, "this peer does not have that blob")
        assert self.served.size(digest) <= max_size
        self.into.put([self.served.view(digest)])


class Place:
    def __init__(self, folder: Path, run: Manifest, served: Path) -> None:
        self.run, self.store = run, BlobStore(folder)
        self.peers = Peers(served, self.store)
        self.providers = ["coordinator"]
        self.told: list[str] = []
        self.supply = Supply(run, self.store, self.peers, lambda: self.providers, self._tell)  # type: ignore[arg-type]

    async def have(self) -> None:
        """Fetch everything, as a reader of an epoch from its first position."""
        corpus = await self.supply.begin()
        spans = [(0, sum(samples_in(self.run, shard) for shard in corpus.training))]
        following = asyncio.create_task(self.supply.follow(corpus, lambda: spans, lambda: False))
        there = asyncio.create_task(self._until(corpus))
        await asyncio.wait([following, there], return_when=asyncio.FIRST_COMPLETED)
        for task in (following, there):
            if not task.cancel():
                await task

    async def _until(self, corpus: Corpus) -> None:
        await until(lambda: all(self.store.verify(digest) for digest, _ in corpus.blobs))

    def _tell(self, status: Status) -> None:
        assert status.name == "synchronising"
        self.told.append(status.why)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(supply, "LOOK_SECONDS", 0.001)


async def test_everything_is_fetched_once_and_each_blob_within_its_size(tmp_path: Path):
    text = corpus_of(tmp_path / "served", words(200, 20))
    run = manifest(data=text.settings)
    place = Place(tmp_path / "here", run, text.folder)
    await place.have()
    check_corpus(run, tmp_path / "here")
    sizes = dict(place.peers.asked)
    assert len(sizes) == len(place.peers.asked) == 3
    assert sizes.pop(bytes.fromhex(text.digest)) == limits.CORPUS_BYTES
    assert all(most == place.store.size(digest) for digest, most in sizes.items())
    assert any("of" in line and "MB" in line for line in place.told)
    await place.have()
    assert len(place.peers.asked) == 3, "a restart finds it"


async def test_what_is_damaged_here_is_fetched_again(tmp_path: Path):
    text = corpus_of(tmp_path / "served", words(200, 20))
    shutil.copytree(text.folder, tmp_path / "here")
    run = manifest(data=text.settings)
    store = BlobStore(tmp_path / "here")
    for digest in store.digests():
        store.path(digest).write_bytes(store.path(digest).read_bytes()[:-1])
    place = Place(tmp_path / "here", run, text.folder)
    await place.have()
    check_corpus(run, tmp_path / "here")


async def test_who_comes_later_is_asked_too(tmp_path: Path):
    text = corpus_of(tmp_path / "served", words(200, 20))
    place = Place(tmp_path / "here", manifest(data=text.settings), text.folder)
    place.peers.holders = {"a peer"}
    having = asyncio.create_task(place.have())
    await until(lambda: len(place.peers.asked) >= 3)
    assert "no peer serves the run's data yet" in place.told[-1] or "no peer serves" in place.told[-2]
    place.providers.append("a peer")
    await having


async def test_a_digest_that_names_no_corpus_is_the_owners_mistake(tmp_path: Path):
    served = BlobStore(tmp_path / "served")
    digest = served.put([b"a letter"])
    place = Place(tmp_path / "here", manifest(data={"name": "x", "digest": digest.hex()}), tmp_path / "served")
    with pytest.raises(ConfigError, match=f"{digest.hex()} is not a corpus"):
        await place.have()


async def test_nothing_is_fetched_onto_a_disk_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = corpus_of(tmp_path / "served", words(200, 20))
    place = Place(tmp_path / "here", manifest(data=text.settings), text.folder)
    free = [1000, 1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free.pop(0) if free else 1 << 40))
    await place.have()
    assert sum("0 MB more than the 0 MB free" in line for line in place.told) == 2
    assert not free


async def test_a_shard_that_is_not_what_the_corpus_says_is_refused(tmp_path: Path):
    text = corpus_of(tmp_path / "served", words(200, 20))
    store = BlobStore(text.folder)
    corpus = corpus_in(store, bytes.fromhex(text.digest))
    assert corpus is not None
    lying = corpus.model_copy(update={"vocabulary_size": 100})
    run = manifest(data={"name": "served", "digest": store.put([lying.canonical_bytes()]).hex()})
    place = Place(tmp_path / "here", run, text.folder)
    with pytest.raises(ConfigError, match=r"not as their corpus states: .* of 100"):
        await place.have()


async def test_data_that_do_not_fit_the_model_are_refused_before_a_shard_is_fetched(tmp_path: Path):
    text = corpus_of(tmp_path / "served", words(200, 20))
    place = Place(tmp_path / "here", manifest(data=text.settings, model={"vocab_size": 255}), text.folder)
    with pytest.raises(ConfigError, match=r"256 tokens, but model\.config\.vocab_size is 255"):
        await place.have()
    assert len(place.peers.asked) == 1


class Following:
    """Reader of the samples in `spans`, for a run of many small data shards."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool = False) -> None:
        monkeypatch.setattr(builder, "SHARD_BYTES", 2048)
        text = corpus_of(tmp_path / "served", words(200, 20))
        run = manifest(data=text.settings)
        self.place = Place(tmp_path / "here", run, text.folder)
        if named:
            shutil.copytree(text.folder, tmp_path / "here", dirs_exist_ok=True)
            self.place.store = BlobStore(tmp_path / "here", ours=False)
            self.place.peers.into = self.place.store
            self.place.supply = Supply(run, self.place.store, self.place.peers, list, lambda status: None, named=True)  # type: ignore[arg-type]
        self.spans: list[tuple[int, int]] = []
        self.waiting = False

    async def begin(self) -> "asyncio.Task[None]":
        self.corpus = await self.place.supply.begin()
        self.order = order_of(self.place.run, self.corpus)
        return asyncio.create_task(self.place.supply.follow(self.corpus, lambda: list(self.spans), lambda: self.waiting))

    def path(self, position: int) -> Path:
        """Return the path of its data shard."""
        return self.place.store.path(bytes.fromhex(self.corpus.training[self.order.stretch(position)[0]].digest))

    def here(self) -> set[Path]:
        return {path for shard in self.corpus.training if (path := self.place.store.path(bytes.fromhex(shard.digest))).exists()}


async def test_a_shard_comes_before_it_is_read_and_no_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = Following(tmp_path, monkeypatch)
    following = await reader.begin()
    assert reader.here() == set()
    end = reader.order.stretch(0)[1]
    later = reader.order.stretch(end)[1]
    reader.spans = [(0, end)]
    await until(lambda: reader.path(0).exists())
    reader.spans = [(end, end + 1), (later - 1, later)]
    await until(lambda: reader.path(end).exists())
    assert reader.here() == {reader.path(0), reader.path(end)}
    assert len(reader.corpus.training) > 2
    reader.path(0).unlink()  # a worker that is a commit behind still reads there
    await until(lambda: reader.path(0).exists())
    following.cancel()


async def test_a_shard_that_nobody_serves_keeps_no_other_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = Following(tmp_path, monkeypatch)
    following = await reader.begin()
    end = reader.order.stretch(0)[1]
    reader.place.peers.served.path(bytes.fromhex(reader.path(0).name)).unlink()
    reader.spans = [(0, end)]
    asked = len(reader.place.peers.asked)
    await until(lambda: len(reader.place.peers.asked) > asked + 3)
    reader.spans = [(end, end + 1)]
    await until(lambda: reader.path(end).exists())
    following.cancel()


def read_if_there(path: Path) -> bytes:
    """Return the bytes; empty while the file is set aside."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


async def test_what_workers_wait_for_though_it_is_here_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = Following(tmp_path, monkeypatch)
    following = await reader.begin()
    reader.spans = [(0, 1)]
    await until(lambda: reader.path(0).exists())
    right = reader.path(0).read_bytes()
    (tmp_path / "rotten").write_bytes(right[::-1])
    (tmp_path / "rotten").replace(reader.path(0))  # at once: its first check may still read it
    reader.waiting = True
    await until(lambda: read_if_there(reader.path(0)) == right)
    following.cancel()


async def test_nothing_is_put_into_a_folder_that_the_operator_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = Following(tmp_path, monkeypatch, named=True)
    following = await reader.begin()
    reader.spans = [(0, 1)]
    before = sorted((tmp_path / "here").iterdir())
    damaged = reader.path(0)
    damaged.write_bytes(damaged.read_bytes()[::-1])
    reader.waiting = True
    with pytest.raises(ConfigError, match=f"{damaged.name} of the run's data in {tmp_path}.* is missing or damaged"):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await following
    assert sorted((tmp_path / "here").iterdir()) == before
    assert reader.place.peers.asked == []
