"""Tests of a node that is drawn for an audit: the peers it asks, its time limit, and its verdict."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dilocox.node.audit.auditor import Auditor, AuditPlaces, in_a_process
from dilocox.node.audit.messages import Found, Task
from dilocox.node.training.worker.audit import carry_out, threads_of
from dilocox.node.workers.devices import Devices, available_bytes
from dilocox.protocol import events
from dilocox.protocol.checks import audit_rules as auditing
from dilocox.protocol.checks.audits import Audited, audits_of
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import phase_bytes
from dilocox.protocol.wire.messages import Statement, canonical
from dilocox.transport.store.blobs import BlobStore
from tests.corpora import corpus_of, words
from tests.helpers import Family, Table, identity, manifest, until

FOUR = range(4)
ME = 0


@dataclass
class Chain:
    """Chain of a table, up to a reader's last commit."""

    table: Table
    parties: list[str] = field(default_factory=list)
    opened: int = 0
    """Open round, if it is later than the table's."""

    @property
    def head(self) -> Head:
        return replace(self.table.head, round=max(self.opened, self.table.head.round))

    open_ms: int = 10
    """Duration of a round that the table has not closed."""

    def commit(self, number: int) -> Statement | None:
        if number < len(self.table.commits):
            return self.table.commits[number]
        body = pb.Commit(open_ms=self.open_ms)
        return Statement(pb.KIND_COMMIT, "", body, pb.Envelope()) if number < self.opened else None


@dataclass
class State:
    connected: bool = True


@dataclass
class Us:
    manifest: Manifest
    identity: Identity
    chain: Chain
    state: State = field(default_factory=State)
    said: list[Audited] = field(default_factory=list)
    told: list[events.Event] = field(default_factory=list)

    def feed(self, event: Audited) -> None:
        self.said.append(event)

    def emit(self, event: events.Event) -> None:
        self.told.append(event)


@dataclass
class Fetches:
    """Fetches from the store of the author."""

    source: BlobStore
    target: BlobStore
    serves: Callable[[], bool] = lambda: True
    asked: set[str] = field(default_factory=set)

    async def fetch(self, digest: bytes, providers: Iterable[str], max_size: int = 0, stage: int | None = None) -> None:
        self.asked |= set(providers)
        if not self.serves() or digest not in self.source or self.source.size(digest) > max_size:
            raise RemoteError(pb.REASON_UNAVAILABLE, "nobody serves it")
        self.target.put([self.source.read(digest)])


@dataclass
class World:
    us: Us
    theirs: BlobStore
    """Blobs that authors serve."""
    places: AuditPlaces
    fetches: Fetches
    tasks: list[Task] = field(default_factory=list)
    found: str | None = "AUDIT_EQUAL"

    async def compute(self, task: Task, home: Path) -> Found:
        self.tasks.append(task)
        if self.found is None:
            raise LocalError("it cannot")
        return Found(self.found, 0.0)

    def auditor(self, free: int | None = None, compute: Callable[[Task, Path], Awaitable[Found]] | None = None) -> Auditor:
        nothing = Fetches(self.theirs, self.places.data, lambda: False)
        how = compute or self.compute
        machine = Devices(1)
        return Auditor(self.us, machine, self.places, self.fetches, nothing, how, lambda: free, look_seconds=0.001)  # type: ignore[arg-type]

    @property
    def mine(self) -> list[auditing.Audit]:
        head = self.us.chain.head
        return auditing.duties(audits_of(head), head.round, self.us.identity.peer)

    def verdicts(self) -> list[str]:
        return [auditing.verdict_name(each.result.verdict) for each in self.us.said]

    def whys(self) -> list[str]:
        return [event.why for event in self.us.told if isinstance(event, events.Audited)]

    async def runs(self, condition: Callable[[], object], free: int | None = None) -> None:
        task = asyncio.create_task(self.auditor(free).run())
        try:
            await until(lambda: condition() or task.done())
            assert not task.done(), task.result()
        finally:
            task.cancel()


def marks_of(run: Manifest, store: BlobStore, body: pb.Contribution, short_by: int = 0) -> bytes:
    random, muon = np.random.default_rng(body.samples_read), run.training.optimizer == "muon"
    sizes = [phase_bytes(run.model, muon, stage) // 4 - short_by for stage in range(run.model.stages)]
    first, batch = body.samples_read - body.inner_steps * run.training.batch_size, run.training.batch_size
    marks = [
        pb.Mark(
            step=step,
            samples_read=first + step * batch,
            optimizer_steps=step,
            states=[store.put([random.standard_normal(size).astype(np.float32).data]) for size in sizes],
        )
        for step in (0, body.inner_steps)
    ]
    return store.put([canonical(pb.Marks(marks=marks, machine="cpu", threads=1, workers=1))])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return made(tmp_path)


def made(folder: Path, marks: Callable[[Manifest, BlobStore, pb.Contribution], bytes] = marks_of) -> World:
    """Make a world in which four clusters' first round is counted, and all of it is audited."""
    text = corpus_of(folder / "words", words(60, 60))
    run = manifest(
        data=text.settings,
        audit={"segments": 3, "share": 1.0},
        rounds={"count": 40, "start_clusters": 4},
    )
    table, theirs = Table(run).genesis(FOUR), BlobStore(folder / "theirs")
    for number in FOUR:
        body = table.contribution(number).body
        table.submit(table.contribution(number, audit=marks(run, theirs, body)))
    table.vote(FOUR)
    assert table.counted() == [0, 1, 2, 3]
    (folder / "manifest.json").write_bytes(run.canonical_bytes())
    states = BlobStore(folder / "states")
    places = AuditPlaces(folder, folder / "manifest.json", BlobStore(text.folder, ours=False), theirs, states, named=True)
    return World(Us(run, identity(ME), Chain(table)), theirs, places, Fetches(theirs, states))


async def test_who_is_drawn_asks_the_author_for_both_states_and_says_what_came_of_them(world: World):
    await world.runs(lambda: len(world.us.said) == 3)
    assert {each.audit.cluster for each in world.us.said} == {identity(number).peer for number in FOUR if number != ME}
    assert world.verdicts() == ["equal"] * 3
    assert world.fetches.asked == {audit.cluster for audit in world.mine}
    leases = {m.cluster: m.lease[0].start for m in world.us.chain.table.commits[0].body.roster}
    assert {task.positions[0] for task in world.tasks} == {leases[each.audit.cluster] for each in world.us.said}
    assert all(len(task.positions) == 4 * 4 and task.optimizer_steps == 0 for task in world.tasks)
    assert not world.places.states.digests(), "nothing is left"


async def test_what_is_not_served_for_a_whole_round_is_said_when_it_is_due(world: World):
    world.fetches.serves = lambda: False
    early: list[int] = []

    def goes_on() -> bool:
        if len(world.fetches.asked) == 3 and world.us.chain.opened < 3:
            early.append(len(world.us.said))
            world.us.chain.opened = 3 if len(early) > 20 else 2
        return len(world.us.said) == 3

    await world.runs(goes_on)
    assert set(early) == {0}, "it may still come"
    assert set(world.verdicts()) == {"unserved"}


async def test_who_began_too_late_blames_nobody(world: World):
    world.us.chain.opened = 3
    world.fetches.serves = lambda: False
    rounds = iter(range(1000))

    def goes_on() -> bool:
        if next(rounds) > 20:
            world.us.chain.opened = 4
        return len(world.whys()) == 3

    await world.runs(goes_on)
    assert not world.us.said
    assert all("ended first" in why for why in world.whys())


@pytest.mark.parametrize("open_ms", [10, 3_600_000], ids=["it did not hear the coordinator", "it came late in the round"])
async def test_who_was_away_itself_blames_nobody(world: World, open_ms: int):
    world.us.state.connected, world.us.chain.open_ms = open_ms > 10, open_ms
    world.fetches.serves = lambda: False
    rounds = iter(range(1000))

    def goes_on() -> bool:
        if next(rounds) > 50:
            world.us.chain.opened = 3
        return len(world.us.told) == 3

    await world.runs(goes_on)
    assert not world.us.said
    assert all("most of round 2" in why for why in world.whys())


async def test_states_stay_until_the_last_audit_of_them_ends(tmp_path: Path):
    """Check shared states: authors may name the same ones, and the end of an audit deletes none that another needs."""
    copied: dict[str, list[list[bytes]]] = {}

    def same(run: Manifest, store: BlobStore, body: pb.Contribution) -> bytes:
        marks = pb.Marks.FromString(store.read(marks_of(run, store, body)))
        states = copied.setdefault("first", [list(mark.states) for mark in marks.marks])
        for mark, digests in zip(marks.marks, states, strict=True):
            mark.states[:] = digests
        return store.put([canonical(marks)])

    world = made(tmp_path, same)
    there: list[bool] = []

    async def compute(task: Task, home: Path) -> Found:
        await until(lambda: len(world.us.said) == len(there))
        there.append(all(bytes.fromhex(digest) in world.places.states for digest in (*task.first, *task.last)))
        return Found("AUDIT_EQUAL", 0.0)

    task = asyncio.create_task(world.auditor(compute=compute).run())
    await until(lambda: len(world.us.told) == 3 or task.done())
    await until(lambda: not world.places.states.digests() or task.done())
    task.cancel()
    assert there == [True, True, True]


async def test_where_the_disk_has_no_room_for_two_states_nothing_is_fetched(world: World, monkeypatch: pytest.MonkeyPatch):
    """Check that free disk space excludes the unwritten bytes of other downloads."""
    two = 2 * sum(phase_bytes(world.us.manifest.model, False, stage) for stage in range(world.us.manifest.model.stages))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2 * two - 1))
    gate = asyncio.Event()
    blocked: list[int] = []
    fetch = world.fetches.fetch

    async def slow(digest: bytes, providers: Iterable[str], max_size: int = 0, stage: int | None = None) -> None:
        if stage is not None:
            await gate.wait()
        await fetch(digest, providers, max_size, stage)

    monkeypatch.setattr(world.fetches, "fetch", slow)

    def two_have_no_room() -> bool:
        blocked.append(len(world.us.told))
        if len(blocked) > 50:
            gate.set()
        return len(world.us.told) == 3

    await world.runs(two_have_no_room)
    assert blocked[50] == 2
    assert [f"two states need {two:,} bytes of disk, but {two - 1:,} are free"] * 2 == [why for why in world.whys() if why]


async def test_marks_of_no_phase_and_states_of_another_size_are_malformed(tmp_path: Path):
    def shorter(run: Manifest, store: BlobStore, body: pb.Contribution) -> bytes:
        return marks_of(run, store, body, short_by=1)

    def of_another(run: Manifest, store: BlobStore, body: pb.Contribution) -> bytes:
        other = pb.Contribution.FromString(body.SerializeToString())
        other.samples_read += 4
        return marks_of(run, store, other)

    for number, marks in enumerate((shorter, of_another)):
        world = made(tmp_path / str(number), marks)
        await world.runs(lambda world=world: len(world.us.said) == 3)  # type: ignore[misc]
        assert set(world.verdicts()) == {"malformed"}


async def test_what_this_machine_cannot_do_it_says_nothing_of(world: World):
    world.found = None
    await world.runs(lambda: len(world.whys()) == 3)
    assert not world.us.said
    assert set(world.whys()) == {"it cannot"}


async def test_where_memory_is_lacking_nothing_is_computed(world: World):
    await world.runs(lambda: len(world.whys()) == 3, free=1000)
    assert not world.tasks
    assert not world.us.said
    assert all("1,000 are free" in why for why in world.whys())


async def test_computing_never_overlaps(world: World):
    running, most = 0, 0

    async def compute(task: Task, home: Path) -> Found:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return Found("AUDIT_NEAR", 0.01)

    task = asyncio.create_task(world.auditor(compute=compute).run())
    await until(lambda: len(world.us.said) == 3)
    task.cancel()
    assert most == 1
    assert world.us.told[0].line().endswith("near (distance 0.01)")


def test_memory_is_known_where_the_system_says_it():
    assert available_bytes() is None or available_bytes() > 0  # type: ignore[operator]


def task_of(world: World, folder: Path) -> Task:
    """Return the task of the first audit, as the daemon passes it on."""

    async def story() -> Task:
        await world.runs(lambda: world.tasks)
        return world.tasks[0]

    task = asyncio.run(story())
    for digest in (*task.first, *task.last):  # the daemon removed them when it was done
        world.places.states.put([world.theirs.read(bytes.fromhex(digest))])
    return Task(**json.loads(json.dumps(asdict(task))))


def test_the_process_looks_at_what_it_is_given(world: World, tmp_path: Path, process_group: None):
    """Check random states, which are no phase: random moments count negative steps."""
    assert carry_out(task_of(world, tmp_path)) == Found("AUDIT_MALFORMED", 0.0)


@pytest.mark.parametrize("threads", [0, 1 << 31])
def test_the_threads_that_somebody_says_end_no_process(world: World, tmp_path: Path, threads: int):
    task = replace(task_of(world, tmp_path), threads=threads)
    assert threads_of(task) == 1
    assert threads_of(replace(task, threads=1)) == 1
    assert threads_of(replace(task, threads=os.cpu_count() or 1)) == (os.cpu_count() or 1)


def test_a_state_that_nobody_can_go_on_from_is_found_before(world: World, tmp_path: Path, process_group: None):
    run, task = world.us.manifest, task_of(world, tmp_path)
    good = [torch.zeros(phase_bytes(run.model, False, stage) // 4) for stage in range(run.model.stages)]
    digests = [world.places.states.put([flat.numpy().data]).hex() for flat in good]
    zeros = replace(task, first=digests, last=digests)
    assert carry_out(zeros).verdict == "AUDIT_DIFFERS", "zeros are a state: training goes on from them"
    good[0][3] = float("nan")
    broken = [world.places.states.put([flat.numpy().data]).hex() for flat in good]
    assert carry_out(replace(zeros, first=broken)).verdict == "AUDIT_MALFORMED"
    assert carry_out(replace(zeros, last=broken)).verdict == "AUDIT_MALFORMED"


WHAT = Task("", "", "", "", [], [], 0, [], False, "", 1, 1)


@pytest.mark.parametrize("wrong", ["its log", "its program"])
async def test_a_process_that_cannot_start_leaves_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str):
    if wrong == "its log":
        (tmp_path / "audits.log").mkdir()
    else:
        monkeypatch.setattr("dilocox.node.audit.auditor.sys.executable", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match=r"audits\.log|nowhere"):
        await in_a_process(WHAT, tmp_path)
    assert not list(tmp_path.glob("parent-*"))
    opened = {os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)}
    assert not any(str(tmp_path) in each for each in opened)


async def test_a_process_that_is_ended_takes_along_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family = Family(tmp_path)
    monkeypatch.setattr("dilocox.node.audit.auditor.sys.executable", str(family.program))
    auditing = asyncio.create_task(in_a_process(WHAT, tmp_path))
    await until(family.began)
    auditing.cancel()
    await asyncio.gather(auditing, return_exceptions=True)
    assert not await asyncio.to_thread(family.left)
