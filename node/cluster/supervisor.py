"""Worker supervisor: runs worker groups one after the other; it chooses their start, and delivers commits and reports.

Reports of workers become inputs of the member machine; blobs that no peer can need any more are deleted.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dilocox.node.cluster.cluster_hosts import ClusterHosts
from dilocox.node.context.run_context import RunContext
from dilocox.node.member.checks import scored
from dilocox.node.member.driver import MemberPort
from dilocox.node.state.resume_points import ResumePlanner, state_blob
from dilocox.node.state.retention import BlobRetention, blobs_of
from dilocox.node.workers.progress import ClusterProgress, Phase, Ready
from dilocox.protocol import events
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import several
from dilocox.protocol.member import member_io
from dilocox.protocol.member.member_io import Verdict
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import Statement, canonical
from dilocox.transport.process.disk_pressure import probe
from dilocox.transport.store.blobs import digest_of

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account

__all__ = ["WorkerSupervisor", "contributions_of"]

log = logging.getLogger(__name__)

GENERATION_PAUSE_SECONDS = 1.0
AROUND_SECONDS = 60.0
"""Time without a provider after which a payload is skipped by a restart, which costs about as much."""
FAILED_GENERATIONS = 5
"""So many launches in a row without one phase: something here is broken, and a person should look."""


class WorkerSupervisor:
    def __init__(
        self,
        context: RunContext,
        member: MemberPort,
        team: ClusterHosts,
        starts: ResumePlanner,
        keeping: BlobRetention,
        crew: ClusterProgress,
        account: "Account | None" = None,
    ) -> None:
        """Supervise the workers. `member`: receives their reports. `account`: privacy account of the private data."""
        self._manifest, self._me, self._chain, self._store = context.manifest, context.me, context.chain, context.store
        self._tasks, self._member, self._team, self._starts = context.tasks, member, team, starts
        self._keeping, self._crew, self._account = keeping, crew, account
        self._signs = secrets.randbits(63) | 1
        """Seed of the sketches of contributions: an author that knew it could hide an effect from them."""
        self.progress = crew.progress
        self._grew = asyncio.Event()
        """Event, set when the chain has a new commit."""
        self._fed = 0
        """The next commit for the workers."""
        self._feeding: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None
        """Task that searches relays for the payloads of the open round."""
        self._avoid_boundaries = False
        self._ending = ""
        """Reason for stopping the worker group."""
        self._failed = True
        """True if it failed: it ended without a command, or was stuck."""
        self._failed_generations = 0

    def chain_grew(self) -> None:
        self._grew.set()
        self._stop_finding()

    def _stop_finding(self) -> None:
        """The round is closed, or who worked for it has ended."""
        if self._finding is not None:
            self._finding.cancel()
            self._finding = None

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Download and check the payloads of a contribution, until cancelled; `base`: this node's state root."""
        self._keeping.judged(contribution.body)
        return await self._team.judge(contribution, base, rank_or_k)

    def score(self, asked: member_io.Measure) -> None:
        """Let the workers score a contribution when they can. Workers without a start receive the request when they have
        the state."""
        if not self._crew.started:
            return
        try:
            payloads, own = (
                [leaf.digest for leaf in read_leaves(self._manifest, self._store.read(each.body.leaves))]
                for each in (asked.contribution, asked.own)
            )
        except (FileNotFoundError, RemoteError) as error:  # its round is over, or the disk is damaged: no opinion
            log.warning("a contribution cannot be scored: %s", error)
            return
        self._team.score(
            worker.Score(
                round=asked.own.body.round,
                contribution=asked.contribution.digest,
                clip=asked.clip,
                payloads=payloads,
                own=own,
                positions=asked.positions,
                signs=0 if self._manifest.data.private else self._signs,
            )
        )

    def recheck(self, round: int) -> None:
        """Have the last commit replayed from disk, where workers have started."""
        if self._crew.started:
            self._team.recheck(round)

    def resynchronise(self) -> None:
        """Start again from a state that the run agreed on."""
        self._avoid_boundaries = True
        self._end_generation("their state differed from the run's", failed=False)

    def _end_generation(self, why: str, failed: bool = True) -> None:
        """Stop the worker group; later reports are ignored."""
        self._ending, self._failed = why, failed
        self._team.end_generation()

    def _feed(self, fact: member_io.Input) -> None:
        """Feed a report to the member machine, unless the worker group was stopped."""
        if not self._ending:
            self._member.feed(fact)

    async def stop(self) -> None:
        await self._team.stop()

    async def run(self) -> None:
        """Run worker groups, until cancelled or the run cannot continue here."""
        while not self._member.state.leaving:
            self._crew.begin()
            generation = self._tasks.start(self._team.run_generation(), "workers")
            why = await self._follow_generation()
            await generation
            self._stop_finding()
            if self._feeding is not None:
                self._feeding.cancel()
                self._feeding = None
            if self._member.state.leaving:
                return
            why, failed = why or self._team.box_went, self._failed and not self._team.box_went
            if failed:
                await asyncio.to_thread(probe, self._store.folder)  # a full disk is not the workers' fault
            self._failed_generations += failed
            if self._failed_generations >= FAILED_GENERATIONS:
                raise LocalError(f"the stage workers ended {FAILED_GENERATIONS} times in a row: {why or 'see workers.log'}")
            self._member.emit(events.WorkersEnded(why or "a process died"))
            self._member.show(Status("restarting", "restarting the stage workers"))
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _follow_generation(self) -> str:
        """Follow one worker group until it ends. Return why it failed, if the workers reported it."""
        self._ending, self._failed = "", True
        watchdog = self._tasks.start(self._watch_workers(), "watchdog")
        while (item := await self._team.events.get()) is not None:
            self._crew.expect(self._team.workers)
            if self._ending:
                continue
            rank, event = item
            match event.WhichOneof("event"):
                case "hello":
                    whole = self._crew.hello(rank, event.hello)
                    self._member.show(None)
                    if whole:
                        await self._enter_what_was_kept(event.hello)
                        await self._keeping.begin(list(self._crew.hellos.values()))
                        self._feeding = self._tasks.start(self._hand_out(), "send the start and the commits")
                case "ready":
                    if (ready := self._crew.ready(rank, event.ready)) is not None:
                        await self._ready(ready)
                case "boundary":
                    if (phase := self._crew.phase(rank, event.boundary)) is not None:
                        await self._phase_ended(phase)
                case "step":
                    self._crew.step(event.step)
                    self._team.step(event.step)
                    self._member.show(None)
                case "rechecked":
                    if (digests := self._crew.rechecked(rank, event.rechecked)) is not None:
                        root = await asyncio.to_thread(self._store.put, [state_blob(digests)])
                        self._feed(member_io.Rechecked(event.rechecked.round, root))
                case "scored":
                    self._feed(scored(event.scored))
                case "failed":
                    log.error("a stage worker failed: %s", event.failed)
                    self._end_generation(event.failed)
        watchdog.cancel()
        return self._ending

    async def _watch_workers(self) -> None:
        """Stop stuck workers: the next worker group resumes."""
        while True:
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)
            self._crew.expect(self._team.workers)
            self._crew.computes(await asyncio.to_thread(self._team.processor_ticks))
            if self._crew.stuck():
                log.error("the stage workers made no progress in step %d; restarting them", self._crew.progress.step)
                self._end_generation("they made no progress")
                return

    async def _ready(self, ready: Ready) -> None:
        """Handle the report that all workers have the state before a round."""
        states = state_blob(ready.digests)
        root = await asyncio.to_thread(self._store.put, [states])
        self._team.ready(ready.round, states)
        self._crew.progress.states[ready.round], self._crew.progress.roots[ready.round] = ready.digests, root
        self._crew.progress.forget(keep_states=3 * self._manifest.rounds.snapshot_every)
        applied = self._chain.commit(ready.round - 1) if ready.round else None
        if applied is not None and applied.body.round:
            self._crew.progress.applied_at[ready.round - 1] = ready.applied_at_step
            counted = {item.cluster for item in taken(applied.body)}
            mine = self._me in counted
            self._member.emit(events.CommitApplied(ready.round - 1, mine, len(counted), ready.applied_at_step, root.hex()[:12]))
        self._feed(member_io.StateReady(ready.round, root, ready.evaluation_loss))
        await self._keeping.retain()

    async def _enter_what_was_kept(self, hello: worker.Hello) -> None:
        """Enter checkpoints of an earlier incarnation into the account, if it ended before it did so: their work is in the
        error feedback. Raises LocalError if that work is of another corpus."""
        if self._account is None:
            return
        for boundary in hello.boundaries:
            work = digest_of([canonical(Phase(boundary, list(boundary.payloads), []).work)])
            await asyncio.to_thread(self._account.enter, work, boundary.steps_within, boundary.noise, boundary.corpus)

    async def _phase_ended(self, phase: Phase) -> None:
        """A phase's payloads are stored in every worker: put their leaves beside them, and contribute."""
        first, audit = phase.first, b""
        digest = await asyncio.to_thread(self._store.put, [canonical(phase.leaves)])
        if (marks := phase.marks) is not None:
            audit = await asyncio.to_thread(self._store.put, [canonical(marks)])
            self._keeping.marks(first.round, marks, audit)
        base = await asyncio.to_thread(self._store.put, [state_blob({p.stage: p.base_state for p in phase.payloads})])
        self._keeping.boundary(first.round, {digest, base, *blobs_of(phase.payloads)}, first.complete)
        if not self._ending:
            self._failed_generations = 0
            self._avoid_boundaries = False
        shares = await self._team.work_root(digest, phase.leaves.leaves)
        ended = phase.ended(base, digest, audit, shares, self.progress.tells_loss)
        self._member.emit(events.PhaseEnded(first.round, first.inner_steps, first.loss, ended.size))
        if self._account is not None and not await asyncio.to_thread(
            self._account.enter, digest_of([canonical(phase.work)]), first.steps_within, first.noise, first.corpus
        ):
            log.warning(
                "round %d is not contributed, because it would exceed the privacy budget: %s",
                first.round,
                self._account.sentence,
            )
            return
        if self._team.serves_its_own():
            self._feed(ended)
            if not self._ending and self._team.regroups():  # what it made is announced
                self._end_generation("another host joined this cluster", failed=False)
        else:
            self._finding = self._tasks.start(self._contribute_by_holders(ended, phase.payloads), "find relays")

    async def _contribute_by_holders(self, ended: member_io.PhaseEnded, payloads: Sequence[worker.StagePayload]) -> None:
        """Contribute for a cluster with unreachable hosts: upload the payloads to relays, then announce them."""
        try:
            self._feed(replace(ended, holders=await self._team.held(ended.leaves, payloads)))
        except RemoteError as error:  # the box that went takes its generation along; the next announces the phase again
            log.warning("round %d: no relay stores this node's payloads: %s", ended.round, error)

    # Starting a generation and feeding it

    async def _hand_out(self) -> None:
        """Choose where the workers start, have the bytes they need, then hand them every commit in order."""
        start, replays = await self._choose_start()
        self._fed = start.round + len(replays)  # the chain may have grown meanwhile
        self._crew.start(start.round, len(replays))
        self._team.start(start, replays)
        self._member.show(None)
        origin = worker.Start.Origin.Name(start.origin).removeprefix("ORIGIN_").lower()
        kept = f" with earlier payloads of {several(len(start.kept.payloads), 'stage')}" if start.HasField("kept") else ""
        replayed = several(len(replays), "commit")
        log.info("workers start from %s of round %d%s, replaying %s", origin, start.round, kept, replayed)
        while True:
            commit = self._chain.commit(self._fed)
            if commit is None:
                self._grew.clear()
                await self._grew.wait()
            elif commit.body.closing:
                return
            elif (apply := await self._await_apply(commit)) is None:
                self._end_generation(
                    f"no peer serves the payloads that round {commit.body.round} counted, and the run has continued",
                    failed=False,
                )
                return
            else:
                self._team.apply(self._fed, apply)
                self._fed += 1

    async def _await_apply(self, commit: Statement[pb.Commit]) -> worker.Apply | None:
        """Return what a commit counts, as soon as a peer serves it; None if none does, and a later agreed state replaces
        it."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            try:
                return await self._team.take(commit)
            except RemoteError as error:
                log.warning("round %d: cannot fetch a counted payload yet: %s", commit.body.round, error)
                if clock() - began >= AROUND_SECONDS and self._starts.goes_around(commit.body.round):
                    return None
                await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _choose_start(self) -> tuple[worker.Start, list[worker.Apply]]:
        await self._decided(list(self._crew.hellos.values()))
        while True:
            hellos = list(self._crew.hellos.values())
            for candidate in await asyncio.to_thread(self._starts.candidates, hellos, self._avoid_boundaries):
                try:
                    start = await self._starts.complete(candidate)
                    return start, await self._team.have(start, lambda why: self._member.show(Status("synchronising", why)))
                except RemoteError as error:
                    log.warning("cannot start from round %d: %s", candidate.start.round, error)
            self._member.show(Status("synchronising", "no peer serves the state yet; retrying"))
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _decided(self, hellos: list[worker.Hello]) -> None:
        """Wait, for a limited time, for the commit of a round in which stages moved: it decides their error feedback."""
        clock = asyncio.get_running_loop().time
        ends = clock() + AROUND_SECONDS
        while not self._avoid_boundaries and clock() < ends and self._starts.undecided(hellos):
            self._member.show(Status("synchronising", "waiting until the round that these stages trained for is closed"))
            self._grew.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(GENERATION_PAUSE_SECONDS):
                    await self._grew.wait()


def contributions_of(state: MemberState) -> Iterator[pb.Contribution]:
    """Yield the contributions to the open round, ours too."""
    own = state.open.own.get(pb.KIND_CONTRIBUTION)
    for contribution in [*state.open.seen.values(), *([own] if own else [])]:
        yield contribution.body
