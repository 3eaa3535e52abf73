"""Tests of an archive's writer, killed at any instant: the archive opens at a complete head, and continues from there."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.consensus import chain, terms
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine as rounds
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.archive.archive import Archive
from dilocox.transport.archive.chain import archived_manifest, commits_of, in_common
from dilocox.transport.archive.sealing import PLAIN, Sealed, Sealing
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.archived import OWNER, RealTable, archiving, check_whole, names_of, real_run
from tests.helpers import COORDINATOR, identity


class Killed(RemoteError):
    """Error after the kill, for any later call."""


class Memory:
    """Objects in memory; after a number of changes no more are made."""

    url = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.changes, self.dies_after, self.phase = 0, 1 << 60, 0
        self._lock = threading.Lock()

    def _change(self) -> None:
        if self.changes >= self.dies_after:
            raise Killed(pb.REASON_UNAVAILABLE, "killed")
        self.changes += 1

    def get(self, name: str, most: int) -> bytes:
        try:
            return self.objects[name]
        except KeyError as error:
            raise FileNotFoundError(name) from error

    def put(self, name: str, data: bytes) -> None:
        with self._lock:
            self._change()
            self.objects[name] = data

    def put_new(self, name: str, data: bytes) -> bool:
        with self._lock:
            self._change()
            return self.objects.setdefault(name, data) is data

    def sizes(self, folder: str) -> dict[str, int]:
        with self._lock:
            below = f"{folder}/" if folder else ""
            return {name.removeprefix(below): len(data) for name, data in self.objects.items() if name.startswith(below)}

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def delete(self, name: str) -> None:
        with self._lock:
            self._change()
            self.objects.pop(name, None)


@dataclass(repr=False)
class Story:
    """Run as it was at each update of its archive."""

    run: Manifest
    store: BlobStore
    chains: list[ChainFile]
    commits: list[list[Statement]]
    stages: list[list[bytes]]
    """Stages of all states of the run."""

    def __repr__(self) -> str:
        return "the story"


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Return the story: the run grows three times. Then its owner names another chain, which continues from a state in the
    archive."""
    folder = tmp_path_factory.mktemp("story")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHUNK_BYTES", 128)  # states and shards of several chunks
        store = BlobStore(folder / "blobs")
        run = real_run(store)
        table = RealTable(run, store)
        table.genesis()
        chains: list[ChainFile] = []
        commits: list[list[Statement]] = []

        def stand() -> None:
            chains.append(table.file(folder / f"{len(chains)}.db"))
            commits.append(list(table.commits))

        for more in (2, 4, 5):
            table.train(more)
            stand()
        stands, root = 7, table.commits[7].body.state
        del table.commits[stands:]
        before = initial_head(COORDINATOR.peer)
        for commit in table.commits:
            before, _ = chain.extend(run, before, commit.envelope)
        body = pb.Appointment(term=1, coordinator=identity(50).peer, round=stands, head=before.digest, state=root)
        word = seal(OWNER, pb.KIND_APPOINTMENT, run.run_id, body).envelope
        table.state, table.pen = rounds.start(run, terms.appoint(run, before, word), table.now), identity(50)
        table.train(4)
        stand()
        roots = {commit.body.state for each in commits for commit in each if commit.body.state}
        yield Story(run, store, chains, commits, [store.stage_digests(root) for root in roots])
        for file in chains:
            file.close()


async def archived(story: Story, memory: Memory, sealing: Sealing, keep: int | None, payloads: bool, phases: list[int]) -> None:
    """Archive the story, in a new process for each phase. Raises Killed."""
    for phase in phases:
        memory.phase = phase
        archive = Archive(memory, sealing, story.run.run_id)
        archiver = archiving(story.run, archive, story.chains[phase], story.store, 2, keep, payloads)
        looks = [await archiver.archive_once() for _ in range(2)]
        await archiver.carrier.data([])
        archiver.has_data = True
        looks.append(await archiver.archive_once())
        if memory.changes >= memory.dies_after:
            raise Killed(pb.REASON_UNAVAILABLE, "killed")
        assert looks[-1] == ""


PHASES = [0, 1, 2, 3]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    thousandth=st.integers(0, 999),
    late=st.booleans(),
    sealed=st.booleans(),
    keep=st.sampled_from([None, 1, 2]),
    payloads=st.booleans(),
)
def test_killed_at_any_instant_it_opens_whole_and_goes_on(
    story: Story, thousandth: int, late: bool, sealed: bool, keep: int | None, payloads: bool
):
    sealing = Sealed(b"k" * 32, story.run.run_id) if sealed else PLAIN
    unhurt = Memory()
    asyncio.run(archived(story, unhurt, sealing, keep, payloads, PHASES))
    memory = Memory()
    memory.dies_after = thousandth * unhurt.changes // 1000
    with pytest.raises(Killed):
        asyncio.run(archived(story, memory, sealing, keep, payloads, PHASES))
    memory.dies_after = 1 << 60
    archive = Archive(memory, sealing, story.run.run_id)
    possible = story.commits[max(0, memory.phase - 1) : memory.phase + 1]
    assert any(_whole(archive, story.run, commits) for commits in possible)
    # At the restart the run may have advanced: then no peer serves the blobs that it was about to archive.
    asyncio.run(archived(story, memory, sealing, keep, payloads, PHASES[memory.phase + late :] or PHASES[-1:]))
    head = check_whole(archive, story.run, story.commits[-1])
    assert head is not None
    assert head.length == len(story.commits[-1])
    assert head.data
    assert len(head.snapshots) == (keep or len(head.snapshots))
    assert bool(head.payloads) == payloads
    named = {archive.folder(digest) for digest in names_of(archive, story.run, head)}
    states = {archive.folder(stage) for stages in story.stages for stage in stages}
    there = {name.rpartition("/")[0] for name in memory.objects if name.startswith("blobs/")}
    assert there >= named
    assert not (there - named) & states, "what is large is not left behind"


def _whole(archive: Archive, run: Manifest, commits: list[Statement]) -> bool:
    """Return whether the archive is of this chain, or empty. Fails if a blob of a head is missing."""
    try:
        check_whole(archive, run, commits)
    except AssertionError:
        return False
    return True


def test_nothing_else_goes(story: Story):
    """Check that an archive beside other objects removes none of them, whatever their names."""
    memory = Memory()
    others = {"blobs/mine": b"1", "heads/mine": b"2", "heads/7": b"3", "photos/000001": b"4"}
    memory.objects.update(others)
    asyncio.run(archived(story, memory, PLAIN, 1, True, PHASES))
    blob = next(name for name in memory.objects if name.endswith("/index"))
    memory.objects[blob.replace("index", "index.txt")] = b"5"
    Archive(memory, PLAIN, story.run.run_id).drop(bytes.fromhex(blob.split("/")[1]))
    assert {name: memory.objects.get(name) for name in others} == others
    assert memory.objects[blob.replace("index", "index.txt")] == b"5"
    assert blob not in memory.objects


def test_an_archive_that_is_complete_is_not_written_again(story: Story):
    memory = Memory()
    asyncio.run(archived(story, memory, PLAIN, None, True, [0, 1]))
    before = memory.changes
    asyncio.run(archived(story, memory, PLAIN, None, True, [1]))
    assert memory.changes == before


@pytest.fixture(scope="module")
def full(story: Story) -> dict[str, bytes]:
    """Return the objects of an archive that has everything."""
    memory = Memory()
    asyncio.run(archived(story, memory, PLAIN, None, True, PHASES))
    return memory.objects


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), junk=st.binary(max_size=60), at=st.integers(0, 200))
def test_whatever_lies_there_is_right_or_refused(
    story: Story, full: dict[str, bytes], data: st.DataObject, junk: bytes, at: int, tmp_path_factory: pytest.TempPathFactory
):
    """Check a writer of the storage: it can delete, and change nothing; nor can it make a reader take more than the bounds
    allow."""
    memory = Memory()
    memory.objects = dict(full)
    name = data.draw(st.sampled_from(sorted(full)))
    memory.objects[name] = full[name][:at] + junk + full[name][at + len(junk) :]
    archive = Archive(memory, PLAIN, story.run.run_id)
    try:
        head = archive.head()
        if head is not None:
            archived_manifest(archive, head)
            list(commits_of(archive, head))
            in_common(archive, head, story.chains[-1])
    except RemoteError:
        pass
    if name.startswith("blobs/"):
        store, blob = BlobStore(tmp_path_factory.getbasetemp() / "fuzzed"), bytes.fromhex(name.split("/")[1])
        store.remove(blob)
        try:
            archive.fetch(blob, store, limits.BLOB_BYTES)
        except RemoteError:
            assert blob not in store
        else:
            assert store.verify(blob)
