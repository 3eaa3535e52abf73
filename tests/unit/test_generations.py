"""Tests of worker groups, without workers: the state that they start from, and their end."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.cluster import supervisor
from dilocox.node.cluster.cluster_hosts import ClusterHosts
from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.cluster.supervisor import WorkerSupervisor, contributions_of
from dilocox.node.context.run_context import RunContext
from dilocox.node.data.privacy_budget import Account
from dilocox.node.hosts.lead import LeadService
from dilocox.node.state.resume_points import Candidate, ResumePlanner
from dilocox.node.state.retention import BlobRetention
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.hosted_stages import HostedStages
from dilocox.node.workers.pool import Launch
from dilocox.node.workers.progress import ClusterProgress
from dilocox.protocol import events
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.messages import Statement, canonical, seal
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.helpers import Table, identity, manifest, until
from tests.ports import Port

RUN = manifest(rounds={"count": 30})


class Pool:
    """Worker pool of one worker with given messages."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[int, worker.WorkerEvent] | None] = asyncio.Queue()
        self.commands: list[worker.WorkerCommand] = []
        self.boundaries: list[worker.Boundary] = []
        self.generations = 0
        self.ticks = itertools.count()
        self.ended = asyncio.Event()

    async def run_generation(self, launch: Launch) -> None:
        self.generations += 1
        self.ended.clear()
        self.say(hello=worker.Hello(rank=0, stages=[0, 1], boundaries=self.boundaries))
        await self.ended.wait()
        self.events.put_nowait(None)

    def say(self, **event: object) -> None:
        self.events.put_nowait((0, worker.WorkerEvent(**event)))  # type: ignore[arg-type]

    def processor_ticks(self) -> int:
        return next(self.ticks)

    def end_generation(self) -> None:
        self.ended.set()

    def command(self, command: worker.WorkerCommand) -> None:
        self.commands.append(command)

    @property
    def starts(self) -> list[worker.Start]:
        return [command.start for command in self.commands if command.HasField("start")]


class Peers:
    """Peers that serve no state, and the payloads of the rounds that are not `missing`."""

    def __init__(self) -> None:
        self.missing: set[int] = set()
        self.asked: list[int] = []

    async def take(self, commit: Statement[pb.Commit]) -> worker.Apply:
        self.asked.append(commit.body.round)
        if commit.body.round in self.missing:
            raise RemoteError(pb.REASON_UNAVAILABLE, "no known peer has it")
        return worker.Apply(commit=commit.envelope.SerializeToString())

    def added(self, boundary: worker.Boundary) -> worker.Boundary:
        return boundary

    def of_work(self, leaves: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        return b""

    def forgotten(self) -> set[bytes]:
        return set()

    def blobs(self) -> set[bytes]:
        return set()

    def serves_its_own(self) -> bool:
        return True

    async def fetch(self, *arguments: object, **named: object) -> None:
        raise RemoteError(pb.REASON_UNAVAILABLE, "no known peer has it")

    async def judge(self, *arguments: object) -> member_io.Verdict:
        return pb.REASON_NORM_TOO_LARGE, 0


class Node:
    def __init__(self, folder: Path, account: Account | None = None, boundaries: Sequence[worker.Boundary] = ()) -> None:
        self.table = Table(RUN).genesis()
        self.chain = ChainFile(folder / "chain.db", RUN)
        self.pool, self.peers, self.tasks = Pool(), Peers(), Tasks()
        self.pool.boundaries = list(boundaries)
        self.store = BlobStore(folder / "blobs")
        me = identity(0).peer
        state = member.start(RUN, me, self.table.head)
        peers: Any = self.peers
        peers.store = self.store
        hosted = HostedStages(range(2))
        starts = ResumePlanner(RUN, self.chain, peers, peers, hosted)
        own = OwnHost(hosted, peers, peers, starts, peers, peers)
        lead = LeadService(CallerAuth(RUN.run_id, b""), set())
        context = RunContext(identity(0), self.chain, self.store, self.tasks)
        self.port = Port(state)
        team = ClusterHosts(context, self.port, Devices(1), self.pool, own, lead)  # type: ignore[arg-type]
        crew = ClusterProgress(tells_loss=account is None or not account.budget.bounds)
        keeping = BlobRetention(self.store, peers, starts, crew.progress, lambda: contributions_of(state), me)
        self.generations = WorkerSupervisor(context, self.port, team, starts, keeping, crew, account)
        self.grow(0)
        self.tasks.start(self.generations.run(), "generations")

    def grow(self, rounds: int) -> None:
        self.table.train(rounds)
        for commit in self.table.commits[self.chain.length :]:
            self.chain.append(commit.envelope)
        self.generations.chain_grew()


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "GENERATION_PAUSE_SECONDS", 0.01)
    node = Node(tmp_path)
    yield node
    await node.tasks.close()
    node.chain.close()


async def test_commits_are_handed_out_in_order(node: Node):
    await until(lambda: node.pool.starts)
    node.grow(3)
    await until(lambda: node.peers.asked[-1:] == [3])
    assert node.pool.generations == 1
    assert node.peers.asked == [0, 1, 2, 3]


async def test_a_payload_that_nobody_serves_is_waited_for_until_the_run_agreed_on_what_it_led_to(
    node: Node, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "AROUND_SECONDS", 0.0)
    await until(lambda: node.pool.starts)
    node.peers.missing = {1}
    node.grow(1)
    await until(lambda: node.peers.asked.count(1) >= 3)
    assert not node.pool.ended.is_set(), "nobody knows yet what it leads to"
    fetched: list[int] = []

    async def stages_of(round: int, root: bytes) -> list[bytes]:
        commit = node.chain.commit(round)
        assert commit is not None
        assert root == commit.body.state
        fetched.append(round)
        return [node.store.put([b"stage"])] * 2

    monkeypatch.setattr(
        "dilocox.node.state.resume_points.ResumePlanner.stages_of", lambda self, *arguments: stages_of(*arguments)
    )
    node.grow(1)
    await until(lambda: len(node.pool.starts) == 2)
    start = node.pool.starts[1]
    assert (start.origin, start.round, fetched) == (worker.Start.ORIGIN_SNAPSHOT, 2, [2])
    ended = [event for event in node.port.emitted if isinstance(event, events.WorkersEnded)]
    assert [event.line() for event in ended if "round 1 counted" in event.line()]


async def test_a_short_outage_is_waited_out_and_going_around_is_no_failure(node: Node, monkeypatch: pytest.MonkeyPatch):
    await until(lambda: node.pool.starts)
    node.peers.missing = {1}
    node.grow(2)
    await until(lambda: node.peers.asked.count(1) >= 3)
    assert not node.pool.ended.is_set(), "it may come back"
    node.peers.missing = set()
    await until(lambda: node.peers.asked[-1:] == [2])
    assert node.pool.generations == 1
    for _ in range(supervisor.FAILED_GENERATIONS + 2):
        before = node.pool.generations
        node.generations.resynchronise()
        await until(lambda before=before: node.pool.generations > before and len(node.pool.starts) > before)  # type: ignore[misc]


async def test_who_has_not_started_is_asked_nothing_before_its_start(node: Node, monkeypatch: pytest.MonkeyPatch):
    """Check the order: a worker takes its first command for its start, and early members would score what later ones never
    received."""
    await until(lambda: node.pool.starts)
    norms = [bytes(len(stage_tensors(RUN.model, stage))) for stage in range(RUN.model.stages)]
    said = pb.Leaves(leaves=[pb.Leaf(stage=stage, digest=bytes(32), size=1, norms=each) for stage, each in enumerate(norms)])
    body = pb.Contribution(round=1, leaves=node.store.put([canonical(said)]))
    theirs = seal(identity(0), pb.KIND_CONTRIBUTION, RUN.run_id, body)
    chosen, go_on = asyncio.Event(), asyncio.Event()
    complete = ResumePlanner.complete

    async def late(self: ResumePlanner, candidate: Candidate) -> worker.Start:
        chosen.set()
        await go_on.wait()
        return await complete(self, candidate)

    monkeypatch.setattr(ResumePlanner, "complete", late)
    node.generations.resynchronise()
    await until(chosen.is_set)
    node.store.put([canonical(said)])  # a new worker group forgets unannounced blobs
    asked = member_io.Measure(theirs, theirs, 0, (1, 2))
    node.generations.score(asked)
    node.generations.recheck(1)
    go_on.set()
    await until(lambda: len(node.pool.starts) == 2)
    node.generations.score(asked)
    kinds = [command.WhichOneof("command") for command in node.pool.commands]
    assert [kind for kind in kinds if kind != "apply"] == ["start", "start", "score"]


async def test_what_a_generation_says_after_it_was_ended_is_not_heard(node: Node):
    await until(lambda: node.pool.starts)
    node.pool.say(ready=worker.Ready(round=1, states=[worker.StageState(stage=s, digest=bytes(32)) for s in range(2)]))
    await until(lambda: any(isinstance(fact, member_io.StateReady) for fact in node.port.fed))
    node.generations.resynchronise()
    node.pool.say(ready=worker.Ready(round=2, states=[worker.StageState(stage=s, digest=bytes(32)) for s in range(2)]))
    await until(lambda: len(node.pool.starts) == 2)
    assert [fact.round for fact in node.port.fed if isinstance(fact, member_io.StateReady)] == [1]


async def test_what_was_judged_and_not_counted_goes(node: Node):
    await until(lambda: node.pool.starts)
    leaves = node.store.put([b"leaves"])
    contribution = node.table.contribution(2, leaves=leaves)
    assert await node.generations.judge(contribution, b"base", 4) == (pb.REASON_NORM_TOO_LARGE, 0)
    node.grow(1)
    node.pool.say(ready=worker.Ready(round=2, states=[worker.StageState(stage=s, digest=bytes(32)) for s in range(2)]))
    await until(lambda: leaves not in node.store)


async def test_what_a_resumption_needs_stays_beside_boundaries_of_a_chain_that_was_given_up(node: Node):
    await until(lambda: node.pool.starts)
    node.grow(2)
    opening = node.chain.commit(1)
    assert opening is not None
    payloads = [node.store.put([b"payload %d" % number]) for number in range(3)]
    node.pool.boundaries = [
        worker.Boundary(round=round, head=head, payloads=[worker.StagePayload(stage=0, digest=payload, base_state=payload)])
        for round, head, payload in zip((2, 19, 20), (opening.digest, bytes(32), bytes(32)), payloads, strict=True)
    ]
    node.generations.resynchronise()
    await until(lambda: len(node.pool.starts) == 2)
    assert node.store.digests() == {payloads[0]}


async def test_where_stages_moved_the_commit_of_the_phase_is_waited_for(node: Node):
    """Check that error feedback excludes the committed part of the announced payload."""
    await until(lambda: node.pool.starts)
    node.grow(2)
    opening = node.chain.commit(node.chain.head.round - 1)
    assert opening is not None
    payloads = [worker.StagePayload(stage=0, digest=node.store.put([b"payload"]))]
    node.pool.boundaries = [worker.Boundary(round=node.chain.head.round, head=opening.digest, payloads=payloads)]
    node.pool.end_generation()
    await until(lambda: any(told is not None and "is closed" in told.why for told in node.port.shown))
    assert len(node.pool.starts) == 1
    node.grow(1)
    await until(lambda: len(node.pool.starts) == 2)
