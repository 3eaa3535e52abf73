"""The boxes of a cluster as one, for its lead: what is asked of the cluster is asked of each. Most clusters have one box."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.context.run_context import RunContext
from dilocox.node.hosts.lead import LeadService, RemoteBox
from dilocox.node.member.driver import MemberPort
from dilocox.node.planning.layouts import Choice, choose
from dilocox.node.state.resume_points import without_commits
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, listed, stretches
from dilocox.node.workers.pool import LOOPBACK, STOP_SECONDS, Launch, WorkerPool
from dilocox.protocol import limits
from dilocox.protocol.consensus.head import HostRange
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.member.member import consent
from dilocox.protocol.member.member_io import Laid, Verdict, Whole
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import Statement

__all__ = ["ClusterHosts", "ClusterSettings"]

log = logging.getLogger(__name__)

END_SECONDS = 30.0
"""Timeout of a host whose workers were killed: after it the host counts as gone."""


@dataclass(frozen=True)
class Layout:
    """Layout of a cluster: stages by host."""

    peers: tuple[str, ...]
    """The lead first."""
    choice: Choice

    @property
    def tiling(self) -> Placement:
        return self.choice.best.placement

    def hosts(self, stages: int) -> tuple[HostRange, ...]:
        """Return the hosts of a run with so many stages, without hosts that have no work."""
        shares = [(peer, self.tiling.stages(box, stages)) for box, peer in enumerate(self.peers)]
        hosts = [HostRange(peer, part.start, len(part)) for peer, share in shares for part in stretches(share)]
        return tuple(sorted(hosts, key=lambda host: host.first_stage))


class RoomError(LocalError):
    """A box has too little memory for its share."""

    def __init__(self, why: str, peer: str) -> None:
        super().__init__(why)
        self.peer = peer


class RelaidError(Exception):
    """The stages lie on other boxes now."""


@dataclass(frozen=True)
class ClusterSettings:
    others: int = 0
    """Hosts beside the lead host."""
    interface: str = LOOPBACK
    """Network interface for tensors between workers of several hosts."""
    patience: float = 0.0
    """Seconds to wait for a missing host, before the others take over its stages."""


class ClusterHosts:
    """`events` yields what the workers of all boxes say, in order per worker; None when the generation has ended."""

    def __init__(
        self,
        context: RunContext,
        member: MemberPort,
        machine: Devices,
        pool: WorkerPool,
        own: OwnHost,
        lead: LeadService,
        settings: ClusterSettings = ClusterSettings(),
    ) -> None:
        """Control the hosts of a cluster. `member`: receives the layout, and whether all its hosts are up. `machine`: this
        host."""
        self._manifest, self._me, self._member = context.manifest, context.me, member
        self._machine, self._pool, self._own, self._lead = machine, pool, own, lead
        self._others, self._interface, self._patience = settings.others, settings.interface, settings.patience
        self._heard = lead.heard
        self.events = lead.heard.queue
        self._generation = 0
        self._hosting: list[RemoteBox] = []
        """Other boxes that have workers of this generation."""
        self._hosts: tuple[HostRange, ...] = ()
        """Hosts of the last layout, also while one is missing."""
        self._boxes_here = 0
        """Number of hosts of the last layout, this one included."""
        self._laid_out_for: list[Devices] = []
        """Their devices."""
        self._formed = False
        """All boxes were here once."""
        self._prepared: dict[str, int] = {}
        """Request that each host answered when it was ready for the newest start."""
        self._consented: pb.Claim | None = None
        self._given_up = asyncio.Event()
        self._stopping = False
        self.box_went = ""
        """Why the last generation ended, where that was another box's doing: nothing is wrong here."""

    @property
    def workers(self) -> int:
        """Return the number of workers in this worker group."""
        return self._heard.workers

    async def watch_hosts(self) -> None:
        """Feed the machine whether all hosts of the stages are here, whenever one comes or goes; until cancelled."""
        while True:
            moved = self._lead.moved.next
            self._look()
            await moved.wait()

    async def watch_claim(self) -> None:
        """Have the other hosts claim what the machine claims, until cancelled."""
        while True:
            changed = self._member.changes.next
            self.consent(self._member.state)
            await changed.wait()

    # Generations

    async def run_generation(self) -> None:
        """Launch on every box, and return when the generation has ended on all of them."""
        self._generation = self._heard.begin()
        self._stopping = False
        self._given_up.clear()
        self._hosting, self.box_went = [], ""
        self._look()
        try:
            followers = await self._gathered()
            if followers is not None:
                await self._run(followers)
        finally:
            self._heard.end()

    async def _gathered(self) -> list[RemoteBox] | None:
        """Return the follower hosts; None if the worker group is not needed any more."""
        began = time.monotonic()
        while not self._given_up.is_set():
            here = sorted(self._lead.followers.values(), key=lambda follower: follower.peer)
            if len(here) >= self._others:
                self._formed = True
                if not self._laid_out_for or self._with_room(here) == here:  # the first time it raises
                    return here
            left = began + self._patience - time.monotonic() if self._formed else None
            why = f"{len(here) + 1} of {self._others + 1} boxes of our cluster are here"
            if left is not None and left <= 0:
                fitting = self._with_room(here)
                if fitting is not None:
                    log.warning("%d of %d boxes are here: they share out the stages", len(fitting) + 1, self._others + 1)
                    return fitting
                left, why = None, f"{why}, and the model does not fit"
            self._member.show(Status("forming", why))
            self._lead.changed.clear()
            await self._first(self._lead.changed.wait(), self._given_up.wait(), seconds=left)
        return None

    @staticmethod
    async def _first(*waiting: Any, seconds: float | None = None) -> None:
        tasks = [asyncio.ensure_future(each) for each in waiting]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _look(self) -> None:
        if self._others:
            here = self._formed and all(peer in self._lead.followers for peer in self._others_hosting())
            self._member.feed(Whole(here))

    def _others_hosting(self) -> list[str]:
        return list(dict.fromkeys(host.peer for host in self._hosts if host.peer != self._me))

    async def _run(self, followers: list[RemoteBox]) -> None:
        layout, stages = self._lay_out(followers), self._manifest.model.stages
        tiling = layout.tiling
        self._heard.launch(tiling.workers)
        self._boxes_here = len(layout.peers)
        self._hosting = [follower for box, follower in enumerate(followers, 1) if tiling.lengths[box]]
        self._hosts, self._laid_out_for = layout.hosts(stages), self._machines(followers)
        self._lead.changed.set()  # who waits for a verdict asks those who host the stages now
        self._look()
        self._own.host(tiling.stages(0, stages))
        self._member.feed(Laid(self._hosts if self._hosting else ()))
        self._log(layout)
        forwarding = asyncio.create_task(self._forward())
        with ExitStack() as store:
            launch = self._launch(tiling, store)
            parts = [asyncio.create_task(self._pool.run_generation(launch))]
            for box, follower in enumerate(followers, 1):
                if follower in self._hosting:
                    self._launch_on(follower, tiling, box)
                    parts.append(asyncio.create_task(follower.ended(self._generation)))
            given_up = asyncio.create_task(self._given_up.wait())
            try:
                await asyncio.wait({*parts, given_up}, return_when=asyncio.FIRST_COMPLETED)
                theirs = not parts[0].done() and not self._given_up.is_set()
                if self._stopping and not self._given_up.is_set():
                    await asyncio.wait(parts, timeout=STOP_SECONDS)
            finally:
                given_up.cancel()
                self.end_generation()
                _, hanging = await asyncio.wait(parts, timeout=END_SECONDS)
                for follower in self._hosting if hanging else ():
                    log.error("box %s does not end its workers; going on without it", short(follower.peer))
                    follower.leave()
                await asyncio.wait(parts)
                self._lead.meet_at(None)
                await forwarding
        self._say_why(theirs)
        parts[0].result()

    def _say_why(self, theirs: bool) -> None:
        """`theirs`: the workers of another box ended first."""
        gone = [follower for follower in self._hosting if follower.gone.is_set()]
        if gone:
            self.box_went = f"box {short(gone[0].peer)} of our cluster went"
        elif self._heard.failure:
            self.box_went = self._heard.failure
        elif theirs:
            self.box_went = "the workers of another box ended: see workers.log there"
        if self._boxes_here <= self._others and not self._heard.phases:
            self._formed = False  # the others cannot do it, it seems: wait for all of them

    def _launch(self, tiling: Placement, store: ExitStack) -> Launch:
        if not self._hosting:
            return Launch(tiling.ranks(0), tiling.workers, tiling.copies, tiling.microbatches, tiling.recompute)
        listening = store.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        self._lead.meet_at(port)
        return Launch(
            tiling.ranks(0),
            tiling.workers,
            tiling.copies,
            tiling.microbatches,
            tiling.recompute,
            port,
            listening,
            self._interface,
        )

    def _launch_on(self, follower: RemoteBox, tiling: Placement, box: int) -> None:
        launch = boxes.LaunchBox(
            generation=self._generation,
            ranks=tiling.ranks(box),
            workers=tiling.workers,
            copies=tiling.copies,
            microbatches=tiling.microbatches,
            recompute=tiling.recompute,
            stages=tiling.stages(box, self._manifest.model.stages),
        )
        follower.send(launch=launch)
        if self._consented is not None:
            follower.send(consent=self._consented)

    def _log(self, layout: Layout) -> None:
        tiling = layout.tiling
        for sentence in layout.choice.sentences():
            log.info("%s", sentence)
        for box, peer in enumerate(layout.peers):
            if len(layout.peers) > 1 and (hosted := tiling.stages(box, self._manifest.model.stages)):
                log.info("box %s hosts stages %s", peer, listed(hosted))
        if layout.choice.idle:
            log.warning("%s", layout.choice.why_idle)

    async def _forward(self) -> None:
        """Forward the messages of this host's workers, with only those checkpoints that its disk can resume."""
        while (item := await self._pool.events.get()) is not None:
            rank, event = item
            if event.HasField("hello"):
                event = worker.WorkerEvent(hello=await self._own.sound(event.hello))
            if event.HasField("boundary"):
                event = worker.WorkerEvent(boundary=await self._own.with_roots(event.boundary))
            self._heard.put(rank, event)

    def start(self, start: worker.Start, replays: Sequence[worker.Apply]) -> None:
        """Every worker starts so, and replays these; every box has what it needs for it."""
        self._pool.command(worker.WorkerCommand(start=start))
        for apply in replays:
            self._pool.command(worker.WorkerCommand(apply=apply))
        for follower in self._hosting:
            follower.send(begin=self._prepared[follower.peer])

    def apply(self, round: int, apply: worker.Apply) -> None:
        """Every worker applies this round's commit, which every box has taken."""
        self._pool.command(worker.WorkerCommand(apply=apply))
        for follower in self._hosting:
            follower.send(apply=round)

    def recheck(self, round: int) -> None:
        """Every worker replays the last commit from disk."""
        command = worker.WorkerCommand(recheck=worker.Recheck(round=round))
        self._pool.command(command)
        for follower in self._hosting:
            follower.send(worker=command)

    async def work_root(self, leaves: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Return the root over the shards of the announced payloads; empty in a run without shards."""
        return await self._own.work_root(leaves, announced)

    def score(self, asked: worker.Score) -> None:
        """Every worker scores this, when all can."""
        command = worker.WorkerCommand(score=asked)
        self._pool.command(command)
        for follower in self._hosting:
            follower.send(worker=command)

    def end_generation(self) -> None:
        """Make every process of this generation exit at once, on every box."""
        self._given_up.set()
        self._pool.end_generation()
        for follower in self._hosting:
            follower.send(end=self._generation)

    def regroups(self) -> bool:
        """Return whether the current hosts would have another layout."""
        here = sorted(self._lead.followers.values(), key=lambda follower: follower.peer)
        if len(here) < self._boxes_here or self._machines(here) == self._laid_out_for:
            return False
        with suppress(RoomError):  # a host came back with less memory
            return self._lay_out(here).hosts(self._manifest.model.stages) != self._hosts
        return False

    def _with_room(self, followers: Sequence[RemoteBox]) -> list[RemoteBox] | None:
        """Return the hosts that have space for their part; None if this host has none."""
        left = list(followers)
        while True:
            try:
                self._lay_out(left)
                return left
            except RoomError as error:
                log.warning("%s", error)
                if error.peer == self._me:
                    return None
                left = [follower for follower in left if follower.peer != error.peer]

    def _lay_out(self, followers: Sequence[RemoteBox]) -> Layout:
        """Raises RoomError where these boxes have too little memory."""
        peers = (self._me, *(follower.peer for follower in followers))
        choice = choose(self._manifest, self._machines(followers))
        if not choice.lacking:
            return Layout(peers, choice)
        least = choice.lacking[0]
        box = "this box" if peers[least.box] == self._me else f"box {short(peers[least.box])}"
        why = f"the model does not fit: {least.sentence(box)}. More devices or boxes would hold less each."
        raise RoomError(why, peers[least.box])

    def _machines(self, followers: Sequence[RemoteBox]) -> list[Devices]:
        return [self._machine, *(follower.machine for follower in followers)]

    def processor_ticks(self) -> int:
        """Processor time of this generation so far, in clock ticks. Blocking."""
        return self._pool.processor_ticks() + sum(follower.ticks for follower in self._hosting)

    async def stop(self) -> None:
        """Let the workers finish their step, then make sure nothing is left."""
        self._stopping = True
        if not self.workers:
            self._given_up.set()
        for follower in self._hosting:
            follower.send(worker=worker.WorkerCommand(stop=worker.Stop()))
        await self._pool.stop()
        self.end_generation()

    # Work of every host for its stages

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Judge a contribution, until cancelled. A rejection by one host rejects it. A missing host judges when it is
        back."""
        asked = boxes.AskJudge(contribution=contribution.envelope, base=base, rank_or_k=rank_or_k)
        while True:
            hosts = self._hosts
            with suppress(RelaidError):
                own = self._own.judge(contribution, base, rank_or_k)
                verdicts = await _together(own, *(self._verdict(peer, asked, hosts) for peer in self._others_hosting()))
                if hosts == self._hosts:
                    return next((verdict for verdict in verdicts if verdict[0]), (pb.REASON_UNSPECIFIED, 0))

    async def _verdict(self, peer: str, asked: boxes.AskJudge, hosts: tuple[HostRange, ...]) -> Verdict:
        while True:
            if hosts != self._hosts:
                raise RelaidError
            follower = self._lead.followers.get(peer)
            if follower is not None and not follower.gone.is_set():
                with suppress(RemoteError):
                    answer = await follower.ask(judge=asked)
                    return answer.reason, answer.stage
                continue
            self._lead.changed.clear()
            await self._lead.changed.wait()

    async def take(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Every box has what the commit counts of its stages. Raises RemoteError when it is not to be had."""
        own = self._own.take(commit)
        apply, *_ = await _together(own, *(self._done(f, take=commit.body.round) for f in self._hosting))
        return apply

    async def have(self, start: worker.Start, say: Callable[[str], None]) -> list[worker.Apply]:
        """Every box has what the start needs of its stages; the commits that it replays. Raises RemoteError when one has not."""
        asked = boxes.AskStart(start=without_commits(start))
        hosting = self._hosting
        replays, *answers = await _together(
            self._own.have(start, say), *(self._done(follower, start=asked) for follower in hosting)
        )
        self._prepared = {follower.peer: answer.ask for follower, answer in zip(hosting, answers, strict=True)}
        return replays

    def serves_its_own(self) -> bool:
        """Whether others are to have our payloads from every box itself."""
        return self._own.serves_its_own() and all(follower.serves for follower in self._hosting)

    async def held(self, leaves: bytes, payloads: Sequence[worker.StagePayload]) -> tuple[str, ...]:
        """Upload payloads of unreachable hosts to relays; return those. Raises RemoteError if a host is lost."""
        finding: list[Awaitable[Sequence[str]]] = []
        if not self._own.serves_its_own():
            finding.append(self._own.find_relays([leaves, *self._of_box(self._me, payloads)]))
        for follower in self._hosting:
            if not follower.serves:
                finding.append(self._kept_for(follower, self._of_box(follower.peer, payloads)))
        named = Counter(name for names in await _together(*finding) for name in names)
        return tuple(name for name, _ in named.most_common(limits.HOLDERS))

    def _of_box(self, peer: str, payloads: Sequence[worker.StagePayload]) -> list[bytes]:
        ours = [range(host.first_stage, host.first_stage + host.stage_count) for host in self._hosts if host.peer == peer]
        return [payload.digest for payload in payloads if any(payload.stage in stages for stages in ours)]

    async def _kept_for(self, follower: RemoteBox, blobs: Sequence[bytes]) -> Sequence[str]:
        answer = await self._done(follower, keep=boxes.AskKeep(blobs=blobs))
        return list(answer.holders)

    @staticmethod
    async def _done(follower: RemoteBox, **what: Any) -> Any:
        answer = await follower.ask(**what)
        if answer.reason:
            raise RemoteError(answer.reason, answer.detail)
        return answer

    # Commands to every host

    def consent(self, state: MemberState) -> None:
        """The other boxes are to claim what we claim."""
        claim = consent(state)
        if claim is not None and claim != self._consented:
            for follower in self._hosting:
                follower.send(consent=claim)
        self._consented = claim

    def ready(self, round: int, states: bytes) -> None:
        """Tell the hosts that the cluster has this state (its list of digests) before a round."""
        for follower in self._hosting:
            follower.send(ready=boxes.ClusterReady(round=round, states=pb.StageStates.FromString(states)))

    def step(self, step: worker.Step) -> None:
        for follower in self._hosting:
            follower.send(step=step)


async def _together(*work: Awaitable[Any]) -> list[Any]:
    """All results; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
