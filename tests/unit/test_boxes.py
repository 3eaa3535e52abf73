"""Tests of a lead host and the follower hosts of its cluster, over real connections; their workers only send a test's
messages."""

import asyncio
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from dilocox.node.cluster import follower
from dilocox.node.cluster.cluster_hosts import ClusterHosts, ClusterSettings
from dilocox.node.cluster.follower import Follower
from dilocox.node.context.run_context import RunContext
from dilocox.node.exchange.relays import Relays
from dilocox.node.hosts import host_stream
from dilocox.node.hosts.cluster_link import ClusterLink, address_on, exposed, load_or_create_secret, proof
from dilocox.node.hosts.lead import BoxAdmission, RemoteBox
from dilocox.node.hosts.lead_connection import LeadConnection, hello_of
from dilocox.node.planning.layouts import choose, layouts
from dilocox.node.planning.memory_model import fullest_device, host_bytes, lacks, stage_bytes
from dilocox.node.state.retention import BlobRetention
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.pool import Launch
from dilocox.node.workers.progress import ClusterProgress
from dilocox.protocol.consensus.head import HostRange, initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import status
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import boxes_pb2_grpc as rpc
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import canonical, seal
from tests.helpers import COORDINATOR, Table, digest, identity, manifest, until
from tests.peers import Peer, meeting
from tests.ports import Port

RUN = manifest(training={"microbatches": 4})
SECRET = bytes(range(32))
INTERFACE = "eth7"
ACCEPTED = pb.REASON_UNSPECIFIED, 0


class Pool:
    """Workers that say hello and do nothing, until they are ended."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[int, worker.WorkerEvent] | None] = asyncio.Queue()
        self.launches: list[Launch] = []
        self.commands: list[worker.WorkerCommand] = []
        self._ended = asyncio.Event()

    async def run_generation(self, launch: Launch) -> None:
        self._ended.clear()
        self.launches.append(launch)
        for rank in launch.ranks:
            self.say(rank, hello=worker.Hello(rank=rank))
        try:
            await self._ended.wait()
        finally:
            self.events.put_nowait(None)

    def say(self, rank: int, **event: Any) -> None:
        self.events.put_nowait((rank, worker.WorkerEvent(**event)))

    def command(self, command: worker.WorkerCommand) -> None:
        self.commands.append(command)

    def end_generation(self) -> None:
        self._ended.set()

    def processor_ticks(self) -> int:
        return 7

    async def stop(self) -> None:
        self.end_generation()


TWO_DEVICES = Devices(2)


class Cluster:
    """Cluster in which peer 0 leads, with two devices; peer 1 is its follower host, with two more."""

    def __init__(
        self, lead: Peer, box: Peer, patience: float = 3600.0, machine: Devices = TWO_DEVICES, run: Manifest = RUN
    ) -> None:
        self.lead, self.peer = lead, box
        self.pools = Pool(), Pool()
        me = identity(0).peer
        lead.lead.admit(BoxAdmission(run.run_id, me, SECRET, cuda=False, most=1))
        pools: list[Any] = list(self.pools)
        self.port, self.box_port = Port(state_of(run, 0)), Port(state_of(run, 1))
        settings = ClusterSettings(1, INTERFACE, patience)
        self.team = ClusterHosts(context_of(lead), self.port, machine, pools[0], lead.own_host, lead.lead, settings)
        lead.tasks.start(self.team.watch_hosts(), "hosts")
        link, crew = link_to(lead, run=run), ClusterProgress()
        line = LeadConnection(link, box.channels, hello_of(link, identity(1).peer, Devices(2)))
        starts = box.exchange.starts(box.chain)
        keeping = BlobRetention(box.store, box.relay_store, starts, crew.progress, lambda: (), me)
        self.box = Follower(context_of(box), self.box_port, line, pools[1], box.own_host, keeping, crew, INTERFACE)
        self.following = box.tasks.start(self.box.run(), "box")

    async def runs(self) -> "asyncio.Task[None]":
        """Start a worker group with workers of both hosts."""
        before = [len(pool.launches) for pool in self.pools]
        generation = self.lead.tasks.start(self.team.run_generation(), "generation")
        await until(lambda: [len(pool.launches) for pool in self.pools] == [number + 1 for number in before])
        return generation


def state_of(run: Manifest, number: int) -> MemberState:
    return member.start(run, identity(number).peer, initial_head(COORDINATOR.peer))


def context_of(peer: Peer) -> RunContext:
    return RunContext(identity(peer.number), peer.chain, peer.store, peer.tasks)


def team_of(peer: Peer, machine: Devices, pool: Any) -> ClusterHosts:
    """Return the team of a cluster with one host."""
    return ClusterHosts(context_of(peer), Port(state_of(peer.chain.manifest, 0)), machine, pool, peer.own_host, peer.lead)


def link_to(lead: Peer, secret: bytes = SECRET, run: Manifest = RUN) -> ClusterLink:
    to = JoinLink(run.run_id, identity(0).peer, lead.record.address, sha256(lead.record.certificate))
    return ClusterLink(secret, to, to)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend time limits, so that no host seems absent on a busy machine."""
    monkeypatch.setattr(host_stream, "SILENT_LOOKS", 1 << 30)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[list[Peer]]:
    commits = list(Table(RUN).genesis().train(2).commits)
    async with meeting(tmp_path, RUN, commits, commits) as peers:
        yield peers


@pytest.fixture
async def cluster(two: list[Peer]) -> Cluster:
    return Cluster(two[0], two[1])


async def test_a_generation_spans_the_boxes(cluster: Cluster):
    generation = await cluster.runs()
    ours, theirs = (pool.launches[0] for pool in cluster.pools)
    assert (list(ours.ranks), ours.workers, ours.copies, ours.interface) == ([0, 2], 4, 2, INTERFACE)
    assert (list(theirs.ranks), theirs.workers, theirs.copies, theirs.interface) == ([1, 3], 4, 2, INTERFACE)
    assert cluster.port.laid == [(HostRange(identity(0).peer, 0, 1), HostRange(identity(1).peer, 1, 1))]
    assert [cluster.lead.exchange.hosted.stages, cluster.peer.exchange.hosted.stages] == [frozenset({0}), frozenset({1})]
    said = [await cluster.team.events.get() for _ in range(4)]
    assert sorted(item[0] for item in said if item) == [0, 1, 2, 3]
    await until(lambda: cluster.team.processor_ticks() == 14)
    cluster.team.end_generation()
    await generation
    assert await cluster.team.events.get() is None


async def test_boxes_of_a_looped_pipeline_host_a_stretch_in_every_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    run = manifest(model={"stages": 5}, training={"microbatches": 4, "schedule": "interleaved"})
    commits = list(Table(run).genesis().train(2).commits)
    async with meeting(tmp_path, run, commits, commits) as peers:
        cluster = Cluster(peers[0], peers[1], run=run)
        generation = await cluster.runs()
        ours, theirs = (identity(number).peer for number in range(2))
        laid = (HostRange(ours, 0, 2), HostRange(theirs, 2, 1), HostRange(ours, 3, 1), HostRange(theirs, 4, 1))
        assert cluster.port.laid == [laid], "in stage order"
        assert [peer.exchange.hosted.stages for peer in peers] == [frozenset({0, 1, 3}), frozenset({2, 4})]
        assert f"box {ours} hosts stages 0-1, 3-3" in caplog.text
        assert not cluster.team.regroups()
        cluster.team.end_generation()
        await generation


@pytest.mark.parametrize("who", [0, 1])
async def test_a_generation_that_ends_on_one_box_ends_on_both(cluster: Cluster, who: int):
    for _ in range(2):
        generation = await cluster.runs()
        cluster.pools[who].end_generation()
        await generation


async def test_a_generation_that_is_ended_before_a_box_came_to_start_it_is_not_started(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    await until(lambda: cluster.lead.lead.followers)
    remote, pool = cluster.lead.lead.followers[identity(1).peer], cluster.pools[1]

    def launch(number: int) -> None:
        remote.send(launch=boxes.LaunchBox(generation=number, ranks=[0], workers=1, copies=1, stages=[0]))

    launch(1)
    await until(lambda: len(pool.launches) == 1)
    with monkeypatch.context() as workers:
        workers.setattr(pool, "end_generation", lambda: None)  # they take their time
        launch(2)
        remote.send(end=2)
        await remote.ask(judge=boxes.AskJudge(contribution=pb.Envelope()))  # answered after it: it is refused
    pool.end_generation()
    await remote.ended(2)
    assert len(pool.launches) == 1
    launch(3)
    await until(lambda: len(pool.launches) == 2)


async def test_a_lead_that_closes_ends_its_streams(cluster: Cluster):
    await until(lambda: cluster.lead.lead.followers)
    await cluster.lead.lead.close()
    assert not cluster.lead.lead.followers


async def test_devices_that_have_nothing_to_do_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    run = manifest(model={"stages": 3}, training={"microbatches": 2})
    async with meeting(tmp_path, run, list(Table(run).genesis().commits)) as (peer,):
        pool = Pool()
        team = team_of(peer, Devices(3), pool)
        generation = peer.tasks.start(team.run_generation(), "generation")
        await until(lambda: pool.launches)
        assert "placement: 2 copies, microbatches of 2 sequences" in caplog.text
        assert "idle: 1 of 3 devices" in caplog.text
        team.end_generation()
        await generation


async def test_a_box_that_cannot_be_dialled_has_others_keep_its_stages(tmp_path: Path):
    async with meeting(tmp_path, RUN, *[list(Table(RUN).genesis().train(2).commits)] * 3) as (lead, box, other):
        arguments = box.chain, box.store, box.everybody, box.channels, lambda: False
        hidden = replace(box, relays=Relays(identity(1), *arguments, cluster=identity(0).peer))
        cluster = Cluster(lead, hidden)
        assert cluster.team.serves_its_own()
        generation = await cluster.runs()
        for _ in range(4):  # the events before the workers' hello
            await cluster.team.events.get()
        await until(lambda: not lead.lead.followers[identity(1).peer].serves)
        assert not cluster.team.serves_its_own()
        leaves, ours = lead.store.put([b"leaves"]), lead.store.put([b"ours"])
        theirs = box.store.put([b"theirs"])
        payloads = [worker.StagePayload(stage=0, digest=ours), worker.StagePayload(stage=1, digest=theirs)]
        assert await cluster.team.held(leaves, payloads) == (identity(2).peer,), (
            "and not the lead: its cluster's boxes have one line"
        )
        assert [blob in other.store for blob in (leaves, ours, theirs)] == [False, False, True]
        lead.relays.dialable = lambda: False
        assert set(await cluster.team.held(leaves, payloads)) == {identity(1).peer, identity(2).peer}
        assert all(blob in other.store for blob in (leaves, ours))
        cluster.team.end_generation()
        await generation


async def test_a_box_that_goes_ends_the_generation_and_comes_back(cluster: Cluster):
    generation = await cluster.runs()
    assert cluster.port.whole[-1]
    cluster.following.cancel()
    await generation
    assert not cluster.port.whole[-1]
    assert "went" in cluster.team.box_went, "nothing is wrong with our own workers"
    again = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    await until(lambda: cluster.port.shown)
    told = status(member.start(RUN, identity(0).peer, initial_head(COORDINATOR.peer)), cluster.port.shown[-1])
    assert told.why == "1 of 2 boxes of our cluster are here", "and not that the run waits for clusters"
    cluster.following = cluster.peer.tasks.start(cluster.box.run(), "box")
    await until(lambda: len(cluster.pools[1].launches) == 2)
    assert cluster.port.whole[-1]
    assert len(cluster.port.laid[-1]) == 2
    cluster.team.end_generation()
    await again


async def test_who_waits_no_longer_shares_out_the_stages_and_takes_the_box_back(two: list[Peer]):
    cluster = Cluster(two[0], two[1], patience=0.0)
    generation = await cluster.runs()
    cluster.following.cancel()
    await generation
    generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    await until(lambda: len(cluster.pools[0].launches) == 2)
    assert cluster.port.laid[-1] == ()
    assert cluster.lead.exchange.hosted.stages == {0, 1}
    assert cluster.port.whole[-1], "nothing is wanting"
    assert not cluster.team.regroups()
    cluster.peer.tasks.start(cluster.box.run(), "box")
    await until(cluster.team.regroups)
    cluster.team.end_generation()
    await generation
    await cluster.runs()
    assert len(cluster.port.laid[-1]) == 2


async def test_a_box_whose_workers_ended_for_want_of_room_waits_for_room(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Check it, because otherwise its lead host would start them repeatedly, and each time they would end."""
    looked: list[Path] = []

    def full(folder: Path) -> None:
        looked.append(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(follower, "probe", full)
    generation = await cluster.runs()
    cluster.team.end_generation()
    await generation
    generation = await cluster.runs()
    assert not looked, "the lead had ended the one before"
    cluster.pools[1].end_generation()
    with pytest.raises(OSError, match="No space left"):
        await cluster.peer.tasks.wait()
    assert looked == [cluster.peer.store.folder]
    await generation


def needed(devices: int, boxes: int) -> int:
    """Return the least bytes of memory with which `boxes` hosts with CPU workers fit our run."""
    hosts = [Devices(devices, host_bytes=1)] * boxes
    return min(max(lack.needs for lack in lacks(RUN, each.placement, hosts)) for each in layouts(RUN, hosts))


@pytest.mark.parametrize(
    ("address", "warned"), [("192.168.3.4", False), ("127.0.0.1", False), ("100.64.0.7", False), ("8.8.4.4", True)]
)
def test_an_interface_that_the_world_reaches_is_warned_of(address: str, warned: bool):
    assert (f"wg0 has the public address {address}" in exposed("wg0", address)) == warned


async def test_a_box_that_cannot_hold_the_model_says_so_before_anything_starts(two: list[Peer]):
    lead, pool = two[0], Pool()
    has = needed(1, 1) - 1
    small = Devices(1, host_bytes=has)
    team = team_of(lead, small, pool)
    generation = lead.tasks.start(team.run_generation(), "generation")
    await until(lambda: pool.launches or generation.done())
    team.end_generation()
    with pytest.raises(LocalError, match=f"this box would hold {(has + 1) / 1e9:,.1f} GB in its memory and has"):
        await generation
    assert await team.events.get() is None
    assert not pool.launches


def test_cpus_share_what_their_box_has():
    tiling = choose(RUN, [Devices(2)]).best.placement
    each = RUN.training.microbatches // tiling.copies
    fixed = sum(stage_bytes(RUN, [stage], half=False).total for stage in range(RUN.model.stages))
    least = tiling.copies * fixed + host_bytes(RUN, range(RUN.model.stages))
    most = least + tiling.workers * fullest_device(RUN, tiling.length, each, half=False).activations
    assert least < max(lack.needs for lack in lacks(RUN, tiling, [Devices(2, host_bytes=1)])) <= most


def test_gpus_hold_their_worker_and_their_box_the_outer_state():
    tiling = choose(RUN, [Devices(2)]).best.placement
    gpu = fullest_device(RUN, tiling.length, RUN.training.microbatches // tiling.copies, half=True).total
    box = host_bytes(RUN, range(RUN.model.stages))
    for device, host, where in ((gpu, box, []), (gpu - 1, box, ["on a GPU"]), (gpu, box - 1, ["in its memory"]), (0, 0, [])):
        found = lacks(RUN, tiling, [Devices(2, cuda=True, device_bytes=device, host_bytes=host)])
        assert [lack.where for lack in found] == where


async def test_a_box_that_stays_away_is_waited_for_where_the_others_have_no_room(two: list[Peer]):
    room = needed(2, 1) - 1
    assert room > needed(2, 2)
    cluster = Cluster(two[0], two[1], patience=0.0, machine=Devices(2, host_bytes=room))
    generation = await cluster.runs()
    cluster.following.cancel()
    await generation
    generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    await until(lambda: any(told and "does not fit" in told.why for told in cluster.port.shown))
    assert len(cluster.pools[0].launches) == 1
    cluster.peer.tasks.start(cluster.box.run(), "box")
    await until(lambda: len(cluster.pools[1].launches) == 2)
    cluster.team.end_generation()
    await generation


async def test_a_box_that_comes_back_with_less_memory_is_done_without(two: list[Peer]):
    """Reproduce a fault: such a host ended the daemon of its lead host, which had space for all stages."""
    cluster = Cluster(two[0], two[1], patience=0.0, machine=Devices(2, host_bytes=needed(2, 1)))
    generation = await cluster.runs()
    remote = cluster.lead.lead.followers[identity(1).peer]
    remote.machine = replace(remote.machine, host_bytes=1)
    assert not cluster.team.regroups()
    cluster.team.end_generation()
    await generation
    pools = cluster.pools

    async def begun(launches: int) -> "asyncio.Task[None]":
        generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
        await until(lambda: generation.done() or len(pools[0].launches) == launches)
        assert not generation.done(), "its lead goes on"
        return generation

    for launches in (2, 3):  # also after a worker group that failed
        generation = await begun(launches)
        assert cluster.port.laid[-1] == ()
        assert len(cluster.pools[1].launches) == 1
        cluster.team.end_generation()
        await generation


async def test_a_box_that_says_nothing_is_gone(two: list[Peer], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_stream, "SILENT_LOOKS", 2)
    lead, box = two
    lead.lead.admit(BoxAdmission(RUN.run_id, identity(0).peer, SECRET, cuda=False, most=1))
    stub: Any = rpc.LeadStub(box.channels.channel(lead.record))
    shown = proof(SECRET, RUN.run_id, identity(0).peer, identity(1).peer)

    async def mute() -> AsyncIterator[boxes.BoxEvent]:
        yield boxes.BoxEvent(hello=boxes.BoxHello(proof=shown, devices=1))
        await asyncio.Event().wait()

    call = stub.Follow(mute())
    await until(lambda: identity(1).peer in lead.lead.followers)
    follower = lead.lead.followers[identity(1).peer]
    await until(follower.gone.is_set)
    assert not lead.lead.followers
    with pytest.raises(RemoteError, match=r"^unavailable: .*away"):
        await follower.ask(take=1)
    call.cancel()


async def test_every_box_judges_and_one_refusal_refuses(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[bytes, int]] = []

    def judging(verdict: member_io.Verdict) -> Any:
        async def judge(contribution: Any, base: bytes, rank_or_k: int) -> member_io.Verdict:
            asked.append((base, rank_or_k))
            return verdict

        return judge

    table = Table(RUN).genesis().train(2)
    contribution = table.contribution(2)
    await cluster.runs()
    for ours, theirs in ((ACCEPTED, ACCEPTED), (ACCEPTED, (pb.REASON_NORM_MISMATCH, 1)), ((pb.REASON_WRONG_BASE, 0), ACCEPTED)):
        monkeypatch.setattr(cluster.lead.exchange.checker, "judge", judging(ours))
        monkeypatch.setattr(cluster.peer.exchange.checker, "judge", judging(theirs))
        verdict = await cluster.team.judge(contribution, b"base", 4)
        assert verdict == next((each for each in (ours, theirs) if each[0]), ACCEPTED)
    assert set(asked) == {(b"base", 4)}
    assert len(asked) == 6


async def test_a_verdict_waits_for_a_box_that_is_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    judged = asyncio.Event()

    async def accept(*_: Any) -> member_io.Verdict:
        judged.set()
        return ACCEPTED

    async def refuse(*_: Any) -> member_io.Verdict:
        return pb.REASON_NORM_MISMATCH, 1

    monkeypatch.setattr(cluster.lead.exchange.checker, "judge", accept)
    monkeypatch.setattr(cluster.peer.exchange.checker, "judge", refuse)
    generation = await cluster.runs()
    cluster.following.cancel()
    await generation
    verdict = asyncio.create_task(cluster.team.judge(Table(RUN).genesis().contribution(2), b"base", 4))
    await judged.wait()
    assert not verdict.done(), "nothing is known of its stages"
    cluster.peer.tasks.start(cluster.box.run(), "box")
    assert await verdict == (pb.REASON_NORM_MISMATCH, 1)


async def test_what_nobody_waits_for_any_more_is_dropped_on_the_box(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Reproduce a fault: a contribution without its author was fetched for ever, until eight of them blocked all
    downloads."""
    seen: list[str] = []

    async def judge(*_: Any) -> member_io.Verdict:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")
        raise AssertionError

    monkeypatch.setattr(cluster.lead.exchange.checker, "judge", judge)
    monkeypatch.setattr(cluster.peer.exchange.checker, "judge", judge)
    await cluster.runs()
    verdict = asyncio.create_task(cluster.team.judge(Table(RUN).genesis().contribution(2), b"base", 4))
    await until(lambda: seen == ["begun"] * 2)
    verdict.cancel()
    await until(lambda: seen[2:] == ["ended"] * 2)


async def test_what_was_asked_before_a_stream_broke_does_not_keep_what_is_asked_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Reproduce a fault: each stream numbers its requests from one, so the late end of an old request removed the new
    request's number."""
    seen, thread_ends, asks, real = list[str](), asyncio.Event(), 0, RemoteBox.ask

    async def ask(box: RemoteBox, **what: Any) -> boxes.BoxAnswer:
        nonlocal asks
        asks += 1
        assert asks < 100, "again and again, and nothing else goes on meanwhile"
        return await real(box, **what)

    async def judge(*_: Any) -> member_io.Verdict:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("told")
            if len(seen) == 2:
                await thread_ends.wait()
            seen.append("ended")
        raise AssertionError

    async def wait(*_: Any) -> member_io.Verdict:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(RemoteBox, "ask", ask)
    monkeypatch.setattr(cluster.lead.exchange.checker, "judge", wait)
    monkeypatch.setattr(cluster.peer.exchange.checker, "judge", judge)
    await cluster.runs()
    verdict = asyncio.create_task(cluster.team.judge(Table(RUN).genesis().contribution(2), b"base", 4))
    await until(lambda: seen == ["begun"])
    cluster.lead.lead.followers[identity(1).peer].leave()
    await until(lambda: "told" in seen or verdict.done())
    assert not verdict.done()
    asyncio.get_running_loop().call_later(0.2, thread_ends.set)
    await until(lambda: seen.count("begun") == 2)
    await thread_ends.wait()
    verdict.cancel()
    await asyncio.gather(verdict, return_exceptions=True)
    await cluster.lead.lead.followers[identity(1).peer].ask(keep=boxes.AskKeep())  # earlier messages arrived before this one
    assert seen.count("ended") == 2


async def test_what_is_judged_while_the_stages_move_is_judged_where_they_are(two: list[Peer], monkeypatch: pytest.MonkeyPatch):
    asked: list[frozenset[int]] = []

    async def judge(*_: Any) -> member_io.Verdict:
        asked.append(two[0].exchange.hosted.stages)
        return ACCEPTED

    cluster = Cluster(two[0], two[1], patience=0.0)
    monkeypatch.setattr(two[0].exchange.checker, "judge", judge)
    generation = await cluster.runs()
    cluster.following.cancel()
    await generation
    verdict = asyncio.create_task(cluster.team.judge(Table(RUN).genesis().contribution(2), b"base", 4))
    await until(lambda: asked)
    generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    assert await verdict == ACCEPTED
    assert asked == [frozenset({0}), frozenset({0, 1})]
    cluster.team.end_generation()
    await generation


async def test_who_shares_out_in_vain_waits_for_all_again(two: list[Peer]):
    cluster = Cluster(two[0], two[1], patience=0.0)
    generation = await cluster.runs()
    cluster.following.cancel()
    await generation
    generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    await until(lambda: len(cluster.pools[0].launches) == 2)
    cluster.pools[0].end_generation()
    await generation
    assert not cluster.team.box_went, "it was our own workers"
    generation = cluster.lead.tasks.start(cluster.team.run_generation(), "generation")
    await until(lambda: not cluster.port.whole[-1])
    cluster.peer.tasks.start(cluster.box.run(), "box")
    await until(lambda: len(cluster.pools[1].launches) == 2)
    cluster.team.end_generation()
    await generation


async def test_a_failure_on_another_box_is_not_ours(cluster: Cluster):
    generation = await cluster.runs()
    cluster.pools[1].say(1, failed="its disk is full")
    await until(lambda: cluster.lead.lead.heard.failure)
    cluster.team.end_generation()
    await generation
    assert "its disk is full" in cluster.team.box_went


async def test_strangers_who_do_not_say_who_they_are_are_few(two: list[Peer]):
    lead, stranger = two
    lead.lead.admit(BoxAdmission(RUN.run_id, identity(0).peer, SECRET, cuda=False, most=1))
    stub: Any = rpc.LeadStub(stranger.channels.channel(lead.record))

    async def mute() -> AsyncIterator[boxes.BoxEvent]:
        await asyncio.Event().wait()
        yield boxes.BoxEvent()

    calls = [stub.Follow(mute()) for _ in range(6)]
    reading = [asyncio.create_task(anext(aiter(call))) for call in calls]
    done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
    error = done.pop().exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    await asyncio.wait(reading)


async def test_a_box_that_does_not_reach_the_coordinator_says_so(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dilocox.node.cluster.follower.CHAIN_SECONDS", 0.01)
    await cluster.runs()
    await until(lambda: cluster.lead.lead.followers)
    remote = cluster.lead.lead.followers[identity(1).peer]
    answer = await remote.ask(take=99)
    assert answer.reason == pb.REASON_UNAVAILABLE
    assert "no commit" in answer.detail


async def test_every_box_has_what_a_commit_counts_before_it_is_applied(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    commit = cluster.lead.chain.commit(1)
    assert commit is not None
    apply = worker.Apply(commit=commit.envelope.SerializeToString())

    async def take(_: Any) -> worker.Apply:
        return apply

    async def lack(_: Any) -> worker.Apply:
        raise RemoteError(pb.REASON_UNAVAILABLE, "nobody serves stage 1")

    monkeypatch.setattr(cluster.lead.exchange.applies, "take", take)
    monkeypatch.setattr(cluster.peer.exchange.applies, "take", lack)
    await cluster.runs()
    with pytest.raises(RemoteError, match="nobody serves stage 1"):
        await cluster.team.take(commit)
    monkeypatch.setattr(cluster.peer.exchange.applies, "take", take)
    assert await cluster.team.take(commit) == apply
    start = worker.Start(origin=worker.Start.ORIGIN_BOUNDARY, round=2, boundary=1, replays=1)
    starts = cluster.lead.exchange.starts(cluster.lead.chain)
    await starts.with_commits(start)
    assert start.opening_commit == cluster.lead.chain.raw(1)
    assert start.boundary_commit.takes
    assert await cluster.team.have(start, lambda why: None) == [apply]
    cluster.team.start(start, [apply])
    cluster.team.apply(1, apply)
    cluster.team.recheck(2)
    told = [command.WhichOneof("command") for command in cluster.pools[0].commands]
    assert told == ["start", "apply", "apply", "recheck"]
    await until(lambda: len(cluster.pools[1].commands) == len(told))
    assert cluster.pools[1].commands == cluster.pools[0].commands, "each box's commits come from its own chain"


async def test_a_box_is_told_the_state_the_step_and_what_to_agree_to(cluster: Cluster):
    await cluster.runs()
    await until(lambda: cluster.team.events.qsize() == 4)
    states = canonical(pb.StageStates(digests=[sha256(b"one"), sha256(b"two")]))
    cluster.team.ready(3, states)
    cluster.team.step(worker.Step(round=3, step=9, loss=2.5, seconds=0.1, tokens=10))
    await until(lambda: cluster.box.progress.roots)
    root = cluster.box.progress.roots[3]
    assert cluster.peer.store.stage_digests(root) == [sha256(b"one"), sha256(b"two")]
    assert cluster.box.progress.step == 9
    state = member.start(RUN, identity(0).peer, Table(RUN).head)
    state, _ = member.step(state, member_io.StateReady(0, b"r" * 32, None), 0)
    state, (sign,) = member.step(state, member_io.Laid(cluster.port.laid[-1]), 0)
    assert isinstance(sign, member_io.Sign)
    state, _ = member.step(state, member_io.Signed(seal(identity(0), sign.kind, RUN.run_id, sign.body)), 0)
    cluster.team.consent(state)
    cluster.team.consent(state)
    cluster.team.step(worker.Step(round=3, step=10, loss=2.5, seconds=0.1, tokens=10))
    await until(lambda: cluster.box.progress.step == 10)
    (asked,) = cluster.box_port.fed
    assert isinstance(asked, member_io.Asked)
    assert asked.claim == member.consent(state)


async def test_a_box_s_workers_reach_the_first_one_through_the_daemons(cluster: Cluster):
    ended = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()
        await writer.wait_closed()
        ended.set()

    generation = await cluster.runs()
    port = cluster.pools[1].launches[0].store_port
    assert cluster.pools[0].launches[0].store is not None
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    cluster.lead.lead.meet_at(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"
    cluster.team.end_generation()
    await generation
    stub: Any = rpc.LeadStub(cluster.peer.channels.channel(cluster.lead.record))
    assert "no such worker group" in await refusal(stub.Meet, boxes.Bytes())
    writer.close()
    await writer.wait_closed()
    await ended.wait()
    server.close()


async def refusal(method: Any, message: Any) -> str:
    """Return the error that rejects such a stream. gRPC's client may notice the end before it has read the error: then try
    once more."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(method(iter([message]))))
        if caught.value.code() is not grpc.StatusCode.INTERNAL:
            return caught.value.details() or ""


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"proof": proof(bytes(32), RUN.run_id, identity(0).peer, identity(1).peer)}, "of another cluster"),
    ({"proof": proof(SECRET, RUN.run_id, identity(0).peer, identity(2).peer)}, "of another cluster"),
    ({"proof": b""}, "of another cluster"),
    ({"cuda": True}, "GPUs"),
    ({"devices": 0}, "not 0"),
    ({"devices": 1 << 20}, "1 to 1024 devices"),
    ({"corpus": b"another"}, "the lead host has none"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
async def test_who_is_not_of_the_cluster_is_refused(two: list[Peer], changes: dict[str, Any], why: str):
    lead, stranger = two
    stub: Any = rpc.LeadStub(stranger.channels.channel(lead.record))
    shown = proof(SECRET, RUN.run_id, identity(0).peer, identity(1).peer)
    hello = boxes.BoxHello(**{"proof": shown, "devices": 2, **changes})
    assert "not the lead host" in await refusal(stub.Follow, boxes.BoxEvent(hello=hello))
    lead.lead.admit(BoxAdmission(RUN.run_id, identity(0).peer, SECRET, cuda=False, most=1))
    assert why in await refusal(stub.Follow, boxes.BoxEvent(hello=hello))
    assert not lead.lead.followers
    lead.lead.meet_at(1)
    assert "no such worker group" in await refusal(stub.Meet, boxes.Bytes())


def test_the_boxes_of_a_cluster_train_on_the_same_private_data():
    admission = BoxAdmission(RUN.run_id, "lead", SECRET, cuda=False, most=1, corpus=digest("ours", 1))
    hello: dict[str, Any] = {"proof": proof(SECRET, RUN.run_id, "lead", "box"), "devices": 1}
    assert not admission.refusal("box", boxes.BoxHello(**hello, corpus=digest("ours", 1)))
    for other in (b"", digest("ours", 2)):
        why = admission.refusal("box", boxes.BoxHello(**hello, corpus=other))
        assert digest("ours", 1).hex()[:12] in why


async def test_a_cluster_has_as_many_boxes_as_its_lead_said(cluster: Cluster):
    await until(lambda: cluster.lead.lead.followers)
    cluster.lead.lead.followers["another"] = RemoteBox("another", boxes.BoxHello(devices=1), lambda said: None)
    stub: Any = rpc.LeadStub(cluster.peer.channels.channel(cluster.lead.record))
    hello = boxes.BoxHello(proof=proof(SECRET, RUN.run_id, identity(0).peer, identity(1).peer), devices=1)
    assert "--cluster-boxes" in await refusal(stub.Follow, boxes.BoxEvent(hello=hello))


def test_a_cluster_link_is_read_as_it_was_written(tmp_path: Path):
    join = JoinLink(RUN.run_id, identity(1).peer, "10.0.0.1:4000", sha256(b"one"), ("/ip4/10.0.0.1/tcp/1",))
    lead = JoinLink(RUN.run_id, identity(0).peer, "10.0.0.2:4000", sha256(b"two"))
    link = ClusterLink(SECRET, lead, join)
    assert ClusterLink.parse(f"{link}\n") == link
    other = JoinLink(sha256(b"another run"), identity(0).peer, "10.0.0.2:4000", sha256(b"two"))
    for text in ("", str(join), str(link).replace(SECRET.hex(), "xy"), str(ClusterLink(SECRET[:4], lead, join))):
        with pytest.raises(ConfigError, match="cluster link"):
            ClusterLink.parse(text)
    with pytest.raises(ConfigError, match="do not match"):
        ClusterLink.parse(str(ClusterLink(SECRET, other, join)))
    secret = load_or_create_secret(tmp_path / "cluster.secret")
    assert load_or_create_secret(tmp_path / "cluster.secret") == secret != load_or_create_secret(tmp_path / "other")
    assert (tmp_path / "cluster.secret").stat().st_mode & 0o077 == 0


def test_the_address_is_the_interface_s():
    assert address_on("lo") == "127.0.0.1"
    with pytest.raises(LocalError, match=r"This machine has .*lo"):
        address_on("nosuch0")
