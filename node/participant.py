"""Drives the member machine (protocol/member.py): what a node does in a run. Holds no decision of the protocol.

Five loops share this object, all on the event loop, none of them heavy:

    watch     commits, contributions and ballots from the coordinator
    offer     our statements, until the coordinator holds them
    workers   generations of stage workers and what they say
    feed      commits, in order, to the workers, each as soon as its payloads are in the blob store
    beat      heartbeats

Everything a restart needs is in the blob store, the chain file, our own statements and the workers' boundary checkpoints.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from dilocox.node.attest.prover import Prover
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.crew import Crew, Phase, Progress, Ready
from dilocox.node.exchange import Exchange
from dilocox.node.own import OwnStatements
from dilocox.node.starts import BOUNDARIES_KEPT, Starts, state_blob
from dilocox.node.workers import WorkerPool
from dilocox.protocol import events, member
from dilocox.protocol.chain import taken
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.member import MemberState, Status
from dilocox.protocol.messages import Statement, canonical, open_envelope, seal
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.tasks import Tasks

__all__ = ["Participant"]

log = logging.getLogger(__name__)

OFFER_SECONDS = 3.0
"""What the coordinator does not hold is offered again after this."""
HEARTBEAT_SHARE = 0.25
"""Of the liveness window: three heartbeats may be lost …"""
HEARTBEAT_SECONDS = 2.0
"""… and never rarer than this, for the people who watch."""
EVENTS_KEPT = 1000
GENERATION_PAUSE_SECONDS = 1.0
FAILED_GENERATIONS = 5
"""So many launches in a row without one phase: something here is broken, and a person should look."""


class Participant:
    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        store: BlobStore,
        chain: ChainFile,
        own: OwnStatements,
        coordinator: CoordinatorLink,
        exchange: Exchange,
        pool: WorkerPool,
        tasks: Tasks,
        prover: Prover | None,
    ) -> None:
        """`prover`: where the run asks for evidence."""
        self.identity, self.manifest, self.store, self.chain = identity, manifest, store, chain
        self._own, self._coordinator, self.exchange, self._pool, self._tasks = own, coordinator, exchange, pool, tasks
        self.prover = prover
        self._starts = Starts(manifest, chain, store, exchange)
        self._crew = Crew(pool.workers)
        self.standing = ""
        """Why the round is open, as the coordinator says."""
        self.events: deque[events.Event] = deque(maxlen=EVENTS_KEPT)
        self.event_count = 0
        self._grew = asyncio.Event()
        """Set when the chain has a commit more."""
        self._speak = asyncio.Event()
        """Set when there may be something to offer."""
        self._vote_timer: asyncio.TimerHandle | None = None
        self._judging: dict[bytes, asyncio.Task[None]] = {}
        """Of the open round; begun when a contribution is seen, so that fetching hides behind training."""
        self._fed = 0
        """The next commit for the workers."""
        self._feeding: asyncio.Task[None] | None = None
        self._boundary_blobs: dict[int, set[bytes]] = {}
        """Payloads and base states that a restart would announce again, by round."""
        self._kept: set[bytes] = set()
        """Blobs that were once worth keeping: only these are ever removed while workers write."""
        self._avoid_boundaries = False
        self._failed_generations = 0
        self._busy: Status | None = Status("starting", "starting the stage workers")
        """What the daemon does before the workers train."""
        self._shown = Status("", "")
        self.state: MemberState = member.start(manifest, identity.peer, chain.head)
        for statement in own.all():
            self.feed(member.Signed(statement))

    @property
    def progress(self) -> Progress:
        return self._crew.progress

    @property
    def status(self) -> Status:
        return member.status(self.state, self._busy or self._crew.status())

    # The machine

    def feed(self, event: member.Input) -> None:
        self.state, effects = member.step(self.state, event, time.monotonic())
        for effect in effects:
            match effect:
                case member.Sign(kind, body):
                    self._tasks.start(self._sign(seal(self.identity, kind, self.manifest.run_id, body)), "sign")
                case member.Judge(contribution):
                    judging = self._judge(contribution, self.state.root or b"", self.state.head.rank_or_k)
                    self._judging[contribution.digest] = self._tasks.start(judging, f"judge {short(contribution.peer)}")
                case member.Recheck(round):
                    log.warning("the state before round %d differs from others'; replaying the commit before it", round)
                    self._pool.command(worker.WorkerCommand(recheck=worker.Recheck(round=round)))
                case member.Resynchronise(round, detail):
                    self.emit(events.Diverged(round, detail))
                    self._avoid_boundaries = True
                    self._pool.end_generation()
                case member.Halt(why):
                    raise LocalError(why)
                case member.Emit(told):
                    self.emit(told)
        self._arm_vote_timer()
        self._speak.set()
        self._show()

    def _arm_vote_timer(self) -> None:
        due = member.next_deadline(self.state)
        if self._vote_timer is not None:
            self._vote_timer.cancel()
            self._vote_timer = None
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._vote_timer = asyncio.get_running_loop().call_later(delay, lambda: self.feed(member.Tick()))

    async def _sign(self, statement: Statement[Any]) -> None:
        """On disk before it is said."""
        await asyncio.to_thread(self._own.keep, statement)
        self.feed(member.Signed(statement))

    async def _judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> None:
        verdict = await self.exchange.judge(contribution, base, rank_or_k)
        self.feed(member.Judged(contribution.digest, verdict))

    # What people see

    def emit(self, event: events.Event) -> None:
        self.events.append(event)
        self.event_count += 1
        log.info("%s", event.line())

    def _show(self) -> None:
        status = self.status
        if status != self._shown:
            self._shown = status
            self.emit(events.StateChanged(status.name, status.why))

    def _become(self, name: str, why: str) -> None:
        self._busy = Status(name, why)
        self._show()

    def counted_history(self, rounds: int = 3) -> list[bool]:
        """Whether we were counted, newest last."""
        history = []
        for number in range(max(1, self.chain.length - rounds), self.chain.length):
            commit = self.chain.commit(number)
            if commit is not None and commit.body.counted:
                history.append(self.identity.peer in {item.cluster for item in taken(commit.body)})
        return history

    # The coordinator

    async def watch(self) -> None:
        async for event in self._coordinator.watch(lambda: self.chain.length, self._heartbeat, self._away):
            match event.WhichOneof("event"):
                case "standing":
                    self._stands(event.standing)
                case "statement":
                    await self._statement(event.statement)
                case "disagreement":
                    if self.identity.peer in event.disagreement.clusters:
                        self.feed(member.Differs(event.disagreement.round))

    def _away(self) -> None:
        self.feed(member.Away())

    def _stands(self, standing: services.Standing) -> None:
        """The first event of a stream; a coordinator that knows less than we do gets back what it signed."""
        self.standing = standing.why
        if not self.state.connected:
            self.feed(member.Connected())
        if standing.round < self.chain.length:
            self._tasks.start(self._give_back(standing.round), "give back")

    async def _give_back(self, first: int) -> None:
        for number in range(first, self.chain.length):
            raw = self.chain.raw(number)
            assert raw is not None
            await self._coordinator.submit_once(pb.Envelope.FromString(raw))

    async def _statement(self, envelope: pb.Envelope) -> None:
        try:
            if envelope.kind == pb.KIND_COMMIT:
                await self._commit(envelope)
            else:
                kinds = (pb.KIND_BALLOT, pb.KIND_CONTRIBUTION)
                self.feed(member.Seen(open_envelope(envelope, self.manifest.run_id, kinds)))
        except RemoteError as error:
            log.warning("the coordinator sent something that does not hold: %s", error)

    async def _commit(self, envelope: pb.Envelope) -> None:
        sent = open_envelope(envelope, self.manifest.run_id, (pb.KIND_COMMIT,))
        if sent.body.round < self.chain.head.round:
            known = self.chain.commit(sent.body.round)
            if known is not None and known.digest != sent.digest and sent.peer == self.chain.coordinator:
                raise LocalError(
                    f"the coordinator signed two different commits for round {sent.body.round}: it cannot be trusted"
                )
            return
        commit = await asyncio.to_thread(self.chain.append, envelope)
        for task in self._judging.values():
            task.cancel()
        self._judging.clear()
        self.feed(member.Committed(commit, self.chain.head))
        self._grew.set()

    async def offer(self) -> None:
        """Say what the coordinator does not hold, now and again."""
        while True:
            self._speak.clear()
            for statement in member.offers(self.state):
                reply = await self._coordinator.submit_once(statement.envelope)
                if reply is None:
                    break
                if reply.outcome == services.SubmitReply.OUTCOME_REJECT:
                    log.warning("the coordinator rejected our %s: %s", type(statement.body).__name__.lower(), reply.detail)
                outcome = self._coordinator.outcome(reply)
                self.feed(member.Answered(statement, outcome, reply.reason, reply.detail))
                self._speak.clear()
            try:
                async with asyncio.timeout(OFFER_SECONDS):
                    await self._speak.wait()
            except TimeoutError:
                pass

    def _heartbeat(self) -> Statement[pb.Heartbeat]:
        progress = self.progress
        body = pb.Heartbeat(
            sequence=self._own.next_sequence(),
            round=progress.round,
            step=progress.step,
            loss=progress.loss,
            head=self.chain.head.digest,
            tokens_per_second=progress.tokens_per_second,
        )
        return seal(self.identity, pb.KIND_HEARTBEAT, self.manifest.run_id, body)

    async def beat(self) -> None:
        while True:
            await self._coordinator.submit_once(self._heartbeat().envelope)
            await asyncio.sleep(min(HEARTBEAT_SECONDS, HEARTBEAT_SHARE * self.manifest.rounds.liveness_seconds))

    async def prove(self) -> None:
        """Stay attested; what the machine claims with waits for it."""
        assert self.prover is not None
        self._tasks.start(self.prover.stay_attested(self._coordinator), "attest")
        said = ""
        while True:
            await self.prover.changed.wait()
            self.prover.changed.clear()
            standing = self.prover.standing
            if standing.code and standing.code != said:
                self.emit(events.AttestationRefused(standing.code, standing.reason))
            said = standing.code
            self.feed(member.Attestation(standing.attested, standing.reason))

    async def leave(self, seconds: float) -> None:
        """Say goodbye (for at most `seconds`), then end the workers."""
        self.feed(member.LeaveRun())
        try:
            async with asyncio.timeout(seconds):
                while self.state.own.get(pb.KIND_LEAVE) is None or member.offers(self.state):
                    for statement in member.offers(self.state):
                        reply = await self._coordinator.submit_once(statement.envelope)
                        if reply is not None:
                            self.feed(member.Answered(statement, self._coordinator.outcome(reply), reply.reason, reply.detail))
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        await self._pool.stop()

    # The workers

    async def run_workers(self) -> None:
        """Generations, one after the other, until cancelled or the run cannot go on here."""
        while not self.state.leaving:
            self._crew.begin()
            generation = self._tasks.start(self._pool.run_generation(), "workers")
            why = await self._follow_generation()
            await generation
            if self._feeding is not None:
                self._feeding.cancel()
                self._feeding = None
            if self.state.leaving:
                return
            self._failed_generations += 1
            if self._failed_generations >= FAILED_GENERATIONS:
                raise LocalError(f"the stage workers failed {FAILED_GENERATIONS} times in a row: {why or 'see workers.log'}")
            self.emit(events.WorkersEnded(why or "a process died"))
            self._become("restarting", "starting the stage workers again")
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _follow_generation(self) -> str:
        """What the workers of one generation say, until it ends; why it failed, where they could tell."""
        why = ""
        watchdog = self._tasks.start(self._watch_workers(), "watchdog")
        while (item := await self._pool.events.get()) is not None:
            rank, event = item
            match event.WhichOneof("event"):
                case "hello":
                    if self._crew.hello(rank, event.hello):
                        self._remember_boundaries()
                        self._feeding = self._tasks.start(self._feed(), "feed")
                case "ready":
                    if (ready := self._crew.ready(rank, event.ready)) is not None:
                        await self._ready(ready)
                case "boundary":
                    if (phase := self._crew.phase(rank, event.boundary)) is not None:
                        await self._phase_ended(phase)
                case "step":
                    self._busy = None
                    self._crew.step(event.step)
                    self._show()
                case "rechecked":
                    if (digests := self._crew.rechecked(rank, event.rechecked)) is not None:
                        root = await asyncio.to_thread(self.store.put, [state_blob(digests)])
                        self.feed(member.Rechecked(event.rechecked.round, root))
                case "failed":
                    why = event.failed
                    log.error("a stage worker failed: %s", why)
                    self._pool.end_generation()
        watchdog.cancel()
        return why

    async def _watch_workers(self) -> None:
        """Workers that stand still are ended: the next generation resumes."""
        while True:
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)
            if self._crew.stuck():
                log.error("the stage workers stand still in step %d; starting them again", self.progress.step)
                self._pool.end_generation()
                return

    async def _ready(self, ready: Ready) -> None:
        """All workers hold the state before a round."""
        root = await asyncio.to_thread(self.store.put, [state_blob(ready.digests)])
        self.progress.states[ready.round], self.progress.roots[ready.round] = ready.digests, root
        self.progress.forget(keep_states=3 * self.manifest.rounds.snapshot_every)
        applied = self.chain.commit(ready.round - 1) if ready.round else None
        if applied is not None and applied.body.round:
            self.progress.applied_at[ready.round - 1] = ready.applied_at_step
            counted = {item.cluster for item in taken(applied.body)}
            mine = self.identity.peer in counted
            self.emit(events.CommitApplied(ready.round - 1, mine, len(counted), ready.applied_at_step, root.hex()[:12]))
        self.feed(member.StateReady(ready.round, root, ready.evaluation_loss))
        await self._retain()

    async def _phase_ended(self, phase: Phase) -> None:
        """A phase's payloads are durable in every worker: put their leaves beside them, and contribute."""
        first = phase.first
        leaves = pb.Leaves(leaves=[pb.Leaf(stage=p.stage, digest=p.digest, size=p.size, norms=p.norms) for p in phase.payloads])
        digest = await asyncio.to_thread(self.store.put, [canonical(leaves)])
        base = await asyncio.to_thread(self.store.put, [state_blob({p.stage: p.base_state for p in phase.payloads})])
        self._boundary_blobs[first.round] = {digest, base, *blobs_of(phase.payloads)}
        self._failed_generations = 0
        self._avoid_boundaries = False
        size = sum(payload.size for payload in phase.payloads)
        self.emit(events.PhaseEnded(first.round, first.inner_steps, first.loss, size))
        self.feed(
            member.PhaseEnded(
                round=first.round,
                base=base,
                inner_steps=first.inner_steps,
                tokens=first.tokens,
                loss=first.loss,
                samples_read=first.samples_read,
                leaves=digest,
                size=size,
                norm=norm_code(phase.norm),
                effective_rank=phase.effective_rank,
                error=phase.error,
            )
        )

    # Starting a generation and feeding it

    async def _feed(self) -> None:
        """Choose where the workers start, have the bytes they need, then hand them every commit in order."""
        start = await self._choose_start()
        self._fed = start.round + len(start.commits)  # the chain may have grown meanwhile
        self._pool.command(worker.WorkerCommand(start=start))
        log.info(
            "workers start from %s of round %d, replaying %d commits",
            worker.Start.Origin.Name(start.origin).removeprefix("ORIGIN_").lower(),
            start.round,
            len(start.commits),
        )
        while True:
            commit = self.chain.commit(self._fed)
            if commit is None:
                self._grew.clear()
                await self._grew.wait()
            elif commit.body.closing:
                return
            else:
                self._pool.command(worker.WorkerCommand(apply=await self._take_forever(commit)))
                self._fed += 1

    async def _take_forever(self, commit: Statement[pb.Commit]) -> worker.Apply:
        while True:
            try:
                return await self.exchange.take(commit)
            except RemoteError as error:
                log.warning("round %d: a counted payload is not to be had yet: %s", commit.body.round, error)
                await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _choose_start(self) -> worker.Start:
        while True:
            hellos = list(self._crew.hellos.values())
            for candidate in await asyncio.to_thread(self._starts.candidates, hellos, self._avoid_boundaries):
                try:
                    return await self._starts.complete(candidate, lambda why: self._become("synchronising", why))
                except RemoteError as error:
                    log.warning("cannot start from round %d: %s", candidate.start.round, error)
            self._become("synchronising", "no peer serves the state yet; trying again")
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    # Housekeeping

    def _remember_boundaries(self) -> None:
        """The workers write nothing yet: forget what an earlier process left behind, but not what it could resume."""
        for hello in self._crew.hellos.values():
            for boundary in hello.boundaries:
                self._boundary_blobs.setdefault(boundary.round, set()).update(blobs_of(boundary.payloads))
        self.store.sweep(self._worth_keeping())

    def _worth_keeping(self) -> set[bytes]:
        """Blobs somebody may still ask for, or a restart needs."""
        for round in sorted(self._boundary_blobs)[:-BOUNDARIES_KEPT]:
            del self._boundary_blobs[round]
        keep = {digest for blobs in self._boundary_blobs.values() for digest in blobs}
        own = self.state.own.get(pb.KIND_CONTRIBUTION)
        for contribution in [*self.state.seen.values(), *([own] if own else [])]:
            keep |= {contribution.body.leaves, *self._starts.payloads_of(contribution.body)}
        return keep | self._starts.worth_keeping(self.progress.states, self.progress.roots)

    async def _retain(self) -> None:
        """Remove blobs that were worth keeping and no longer are."""
        keep = self._worth_keeping()
        for digest in self._kept - keep:
            await asyncio.to_thread(self.store.remove, digest)
        self._kept = keep


def blobs_of(payloads: Iterable[worker.StagePayload]) -> set[bytes]:
    return {digest for payload in payloads for digest in (payload.digest, payload.base_state)}
