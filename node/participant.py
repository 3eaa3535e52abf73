"""What a node does in a run: follow the chain, feed its workers, announce, fetch, vote, report. The protocol's client half.

Four loops share this object, all on the event loop, none of them heavy:

    watch     commits, contributions and ballots from the coordinator
    feed      commits, in order, to the workers, each as soon as its payloads are in the blob store
    workers   generations of stage workers and what they say
    beat      heartbeats

Everything a restart needs is in the blob store, the chain file and the workers' boundary checkpoints.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dilocox.node.attest.prover import Prover
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.exchange import Exchange, Verdict
from dilocox.node.starts import BOUNDARIES_KEPT, Starts
from dilocox.node.workers import WorkerPool
from dilocox.protocol import events, rules
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError, reason_name
from dilocox.protocol.ids import short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.tasks import Tasks

__all__ = ["Participant"]

log = logging.getLogger(__name__)

VOTE_SHARE = 0.8
"""Share of the vote deadline after which a voter stops fetching and says what it has."""
HEARTBEAT_SHARE = 0.25
"""Of the liveness window: three heartbeats may be lost …"""
HEARTBEAT_SECONDS = 2.0
"""… and never rarer than this, for the people who watch."""
EVENTS_KEPT = 1000
ROUNDS_SHOWN = 1000
"""Rounds whose timings `status` still tells."""
GENERATION_PAUSE_SECONDS = 1.0
FAILED_GENERATIONS = 5
"""So many launches in a row without one phase: something here is broken, and a person should look."""


@dataclass
class Progress:
    """What the workers last said."""

    round: int = 0
    step: int = 0
    loss: float = 0.0
    step_seconds: float = 0.0
    waiting: bool = False
    tokens_per_second: float = 0.0
    tokens: int = 0
    total_steps: int = 0
    """Inner steps since the workers started …"""
    clock_seconds: float = 0.0
    """… and the first worker's monotonic clock after them."""
    codec_cpu_seconds: float = 0.0
    applied_at: dict[int, int] = field(default_factory=dict)
    """Inner step at which each commit was applied."""
    states: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Digest per stage of the state before each round, of the last rounds."""
    inner_steps: dict[int, int] = field(default_factory=dict)
    """Inner steps of each phase."""

    def forget(self, keep_states: int) -> None:
        """Bound what is remembered, whatever the length of the run."""
        for history, keep in ((self.states, keep_states), (self.applied_at, ROUNDS_SHOWN), (self.inner_steps, ROUNDS_SHOWN)):
            for round in sorted(history)[:-keep]:
                del history[round]


class Participant:
    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        store: BlobStore,
        chain: ChainFile,
        coordinator: CoordinatorLink,
        exchange: Exchange,
        pool: WorkerPool,
        tasks: Tasks,
        prover: Prover | None,
    ) -> None:
        """`prover`: where the run asks for evidence."""
        self.identity, self.manifest, self.store, self.chain = identity, manifest, store, chain
        self._coordinator, self.exchange, self._pool, self._tasks = coordinator, exchange, pool, tasks
        self.prover = prover
        self._starts = Starts(manifest, chain, store, exchange)
        self.state = "joining"
        self.why = "starting the stage workers"
        self.progress = Progress()
        self.presence = services.PresenceList()
        self.events: deque[events.Event] = deque(maxlen=EVENTS_KEPT)
        self.event_count = 0
        self._grew = asyncio.Event()
        """Set when the chain has a commit more."""
        self._fed = 0
        """The next commit for the workers."""
        self._hellos: dict[int, worker.Hello] = {}
        self._readies: dict[int, dict[int, worker.Ready]] = {}
        self._boundaries: dict[int, dict[int, worker.Boundary]] = {}
        self._rechecks: dict[int, dict[int, worker.Rechecked]] = {}
        self._seen: dict[bytes, Statement] = {}
        """Contributions of the open round, by digest."""
        self._ballot: Statement | None = None
        self._judgements: dict[bytes, asyncio.Task[Verdict]] = {}
        """Of the open round, by contribution; begun when the contribution is seen, so that fetching hides behind training."""
        self._voted = False
        self._feeding: asyncio.Task[None] | None = None
        self._own: Statement | None = None
        """Our newest contribution."""
        self._boundary_blobs: dict[int, set[bytes]] = {}
        """Payloads and base states that a restart would announce again, by round."""
        self._kept: set[bytes] = set()
        """Blobs that were once worth keeping: only these are ever removed while workers write."""
        self._avoid_boundaries = False
        self._failed_generations = 0
        self._disputed = 0
        """The round whose reports we last replayed for."""
        self._unclaimed: tuple[int, list[pb.StageState]] | None = None
        """The state to claim a place with as soon as we are attested, and the round it starts."""
        self._leaving = False

    # What people see

    def emit(self, event: events.Event) -> None:
        self.events.append(event)
        self.event_count += 1
        log.info("%s", event.line())

    def _become(self, state: str, why: str) -> None:
        if (state, why) != (self.state, self.why):
            self.state, self.why = state, why
            self.emit(events.StateChanged(state, why))

    def counted_history(self, rounds: int = 3) -> list[bool]:
        """Whether we were counted, newest last."""
        history = []
        for number in range(max(1, self.chain.length - rounds), self.chain.length):
            commit = self.chain.commit(number)
            if commit is not None and not commit.body.closing:
                history.append(self.identity.peer in {item.cluster for item in commit.body.counted})
        return history

    # The chain

    async def watch(self) -> None:
        async for event in self._coordinator.watch(lambda: self.chain.length):
            match event.WhichOneof("event"):
                case "statement":
                    self._statement(event.statement)
                case "presence":
                    self.presence = event.presence
                case "disagreement":
                    self._disagreement(event.disagreement)

    def _statement(self, envelope: pb.Envelope) -> None:
        try:
            if envelope.kind == pb.KIND_COMMIT:
                self._commit(envelope)
                return
            kinds = (pb.KIND_BALLOT, pb.KIND_CONTRIBUTION, pb.KIND_RECEIPT)
            statement = open_envelope(envelope, self.manifest.run_id, kinds)
        except RemoteError as error:
            log.warning("the coordinator sent something that does not hold: %s", error)
            return
        if statement.kind == pb.KIND_CONTRIBUTION and statement.body.round == self.chain.head.round:
            self._seen[statement.digest] = statement
        elif statement.kind == pb.KIND_BALLOT and statement.peer == self.chain.coordinator:
            self._ballot = statement
        self._vote_when_possible()

    def _commit(self, envelope: pb.Envelope) -> None:
        sent = open_envelope(envelope, self.manifest.run_id, (pb.KIND_COMMIT,))
        if sent.body.round < self.chain.head.round:
            known = self.chain.commit(sent.body.round)
            if known is not None and known.digest != sent.digest and sent.peer == self.chain.coordinator:
                raise LocalError(
                    f"the coordinator signed two different commits for round {sent.body.round}: it cannot be trusted"
                )
            return
        commit = self.chain.append(envelope)
        self._seen.clear()
        self._ballot, self._voted = None, False
        for task in self._judgements.values():
            task.cancel()
        self._judgements.clear()
        self._grew.set()
        for item in commit.body.excluded:
            if item.peer == self.identity.peer:
                self.emit(events.NotCounted(commit.body.round, item.reason, item.detail))
                if item.reason == pb.REASON_WRONG_BASE and commit.body.round in self.progress.states:
                    self._resynchronise(commit.body.round, "the others counted each other and not us")
        if self.chain.head.finished:
            self.emit(events.RunFinished(commit.body.round - 1))

    def _disagreement(self, disagreement: services.Disagreement) -> None:
        if self.identity.peer in disagreement.peers and disagreement.round != self._disputed:
            self._disputed = disagreement.round
            log.warning("state reports for round %d differ; replaying the commit before it", disagreement.round)
            self._pool.command(worker.WorkerCommand(recheck=worker.Recheck(round=disagreement.round)))

    def _resynchronise(self, round: int, detail: str) -> None:
        """Start the workers again from a state that the run agreed on."""
        self.emit(events.Diverged(round, detail))
        self._avoid_boundaries = True
        self._pool.end_generation()

    # The workers

    async def run_workers(self) -> None:
        """Generations, one after the other, until cancelled or the run cannot go on here."""
        while not self._leaving:
            self._hellos.clear()
            self._readies.clear()
            self._boundaries.clear()
            self._rechecks.clear()
            generation = self._tasks.start(self._pool.run_generation(), "workers")
            why = await self._follow_generation()
            await generation
            if self._feeding is not None:
                self._feeding.cancel()
                self._feeding = None
            if self._leaving:
                return
            self._failed_generations += 1
            if self._failed_generations >= FAILED_GENERATIONS:
                raise LocalError(f"the stage workers failed {FAILED_GENERATIONS} times in a row: {why}. See workers.log.")
            self.emit(events.WorkersEnded(why))
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    async def _follow_generation(self) -> str:
        why = "a process died"
        while (item := await self._pool.events.get()) is not None:
            rank, event = item
            match event.WhichOneof("event"):
                case "hello":
                    self._hellos[rank] = event.hello
                    if len(self._hellos) == self._pool.workers:
                        self._remember_boundaries()
                        self._feeding = self._tasks.start(self._feed(), "feed")
                case "ready":
                    await self._ready(rank, event.ready)
                case "boundary":
                    self._boundary(rank, event.boundary)
                case "step":
                    self._step(event.step)
                case "rechecked":
                    self._rechecked(rank, event.rechecked)
                case "failed":
                    why = event.failed
                    log.error("a stage worker failed: %s", why)
                    self._pool.end_generation()
        return why

    def _step(self, step: worker.Step) -> None:
        progress = self.progress
        progress.round, progress.step, progress.waiting = step.round, step.step, step.waiting
        progress.total_steps, progress.clock_seconds = step.total_steps, step.clock_seconds
        progress.codec_cpu_seconds = step.codec_cpu_seconds
        if step.seconds:
            progress.loss, progress.step_seconds = step.loss, step.seconds
            progress.tokens_per_second = step.tokens / step.seconds
        if self.chain.head.finished:
            self._become("finished", "the run is finished; serving its state")
        elif self.chain.head.round == 0:
            self._become("joining", f"waiting for {self.manifest.start_clusters} clusters")
        elif not self._on_roster():
            self._become("warming up", "not on the roster yet; this phase is not counted")
        elif step.waiting:
            self._become("waiting", "for the commit of the round in flight")
        else:
            self._become("training", "on the roster")

    def _on_roster(self) -> bool:
        return self.identity.peer in self.chain.head.roster

    async def _ready(self, rank: int, ready: worker.Ready) -> None:
        """All workers hold the state before a round: report it, or claim a place with it."""
        parts = self._readies.setdefault(ready.round, {})
        parts[rank] = ready
        if len(parts) < self._pool.workers:
            return
        del self._readies[ready.round]
        states = [state for _, part in sorted(parts.items()) for state in part.states]
        self.progress.states[ready.round] = {state.stage: state.digest for state in states}
        self.progress.forget(keep_states=3 * self.manifest.rounds.snapshot_every)
        applied = self.chain.commit(ready.round - 1) if ready.round else None
        if applied is not None and applied.body.round:
            self.progress.applied_at[ready.round - 1] = ready.applied_at_step
            counted = {item.cluster for item in applied.body.counted}
            last = states[-1].digest.hex()[:8]
            mine = self.identity.peer in counted
            event = events.CommitApplied(ready.round - 1, mine, len(counted), ready.applied_at_step, last)
            self.emit(event)
        await self._retain()
        if ready.round in (0, self.chain.head.round):
            if self._on_roster():
                self._report(ready.round, states, [part for part in parts.values() if part.evaluated])
            else:
                self._claim(states)
        self._vote_when_possible()

    def _report(self, round: int, states: list[pb.StageState], evaluated: list[worker.Ready]) -> None:
        report = pb.StateReport(round=round, head=self.chain.head.digest, states=states)
        if evaluated:
            report.evaluated, report.evaluation_loss = True, evaluated[0].evaluation_loss
        self._send(pb.KIND_STATE_REPORT, report)

    async def prove(self) -> None:
        """Stay attested; claim a place as soon as we are."""
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
            if standing.attested and self._unclaimed is not None and self._unclaimed[0] == self.chain.head.round:
                self._claim(self._unclaimed[1])

    def _claim(self, states: list[pb.StageState]) -> None:
        if self.prover is not None and not self.prover.standing.attested:
            self._unclaimed = (self.chain.head.round, states)
            self._become("refused", f"not attested: {self.prover.standing.reason}")
            return
        self._unclaimed = None
        claim = pb.Claim(
            round=max(1, self.chain.head.round),
            head=self.chain.head.digest,
            cluster=self.identity.peer,
            first_stage=0,
            stage_count=self.manifest.model.stages,
            states=states,
        )
        self._send(pb.KIND_CLAIM, claim)

    def _rechecked(self, rank: int, result: worker.Rechecked) -> None:
        if not result.report_agrees:
            self._resynchronise(result.round, "replaying the last commit from disk gives another state than memory holds")
            return
        parts = self._rechecks.setdefault(result.round, {})
        parts[rank] = result
        if len(parts) == self._pool.workers and result.round == self.chain.head.round:
            states = [state for _, part in sorted(parts.items()) for state in part.states]
            report = pb.StateReport(round=result.round, head=self.chain.head.digest, states=states, replayed=True)
            self._send(pb.KIND_STATE_REPORT, report)
            self._rechecks.clear()

    def _boundary(self, rank: int, boundary: worker.Boundary) -> None:
        """A phase's payloads are durable in every worker: announce them."""
        parts = self._boundaries.setdefault(boundary.round, {})
        parts[rank] = boundary
        if len(parts) < self._pool.workers:
            return
        del self._boundaries[boundary.round]
        self._boundary_blobs[boundary.round] = blobs_of(parts.values())
        self._failed_generations = 0
        self._avoid_boundaries = False
        payloads = [payload for _, part in sorted(parts.items()) for payload in part.payloads]
        size = sum(payload.size for payload in payloads)
        self.emit(events.PhaseEnded(boundary.round, boundary.inner_steps, boundary.loss, size))
        self.progress.tokens += boundary.tokens
        self.progress.inner_steps[boundary.round] = boundary.inner_steps
        self._contribute(boundary, payloads)

    def _contribute(self, boundary: worker.Boundary, payloads: list[pb.StagePayload]) -> None:
        opened_by = self.chain.commit(boundary.round - 1)
        assert opened_by is not None, "a phase ends only after the commit before it was applied"
        contribution = pb.Contribution(
            round=boundary.round,
            head=opened_by.digest,
            cluster=self.identity.peer,
            inner_steps=boundary.inner_steps,
            tokens=boundary.tokens,
            loss=boundary.loss,
            samples_read=boundary.samples_read,
            payloads=payloads,
            attestation=attestation_of(opened_by.body, self.identity.peer),
        )
        self._own = self._send(pb.KIND_CONTRIBUTION, contribution)

    def _send(self, kind: pb.Kind, body: object) -> Statement:
        statement = seal(self.identity, kind, self.manifest.run_id, body)
        self._tasks.start(self._submit(statement), f"submit {pb.Kind.Name(kind)}")
        return statement

    async def _submit(self, statement: Statement) -> None:
        reply = await self._coordinator.submit(statement)
        if reply.outcome == services.SubmitReply.OUTCOME_REJECT:
            log.warning("the coordinator rejected our %s: %s", type(statement.body).__name__.lower(), reply.detail)
            if statement.kind == pb.KIND_CLAIM:
                self._become("refused", f"{reason_name(reply.reason)}: {reply.detail}")

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
                await self._have_payloads(commit)
                raw = commit.envelope.SerializeToString()
                self._pool.command(worker.WorkerCommand(apply=worker.Apply(commit=raw)))
                self._fed += 1

    async def _choose_start(self) -> worker.Start:
        while True:
            hellos = list(self._hellos.values())
            for start in await asyncio.to_thread(self._starts.candidates, hellos, self._avoid_boundaries):
                try:
                    return await self._starts.complete(start, self._become)
                except RemoteError as error:
                    log.warning("cannot start from round %d: %s", start.round, error)
            self._become("synchronising", "no peer serves the state yet; trying again")
            await asyncio.sleep(GENERATION_PAUSE_SECONDS)

    def _remember_boundaries(self) -> None:
        """The workers write nothing yet: forget what an earlier process left behind, but not what it could resume."""
        for hello in self._hellos.values():
            for boundary in hello.boundaries:
                self._boundary_blobs.setdefault(boundary.round, set()).update(blobs_of([boundary]))
        self.store.sweep(self._worth_keeping())

    async def _have_payloads(self, commit: Statement) -> None:
        wanted = [
            self.exchange.fetch_forever(payload.digest, list(item.holders))
            for item in commit.body.counted
            for payload in item.payloads
        ]
        await asyncio.gather(*wanted)

    # Voting

    def _vote_when_possible(self) -> None:
        """Check what has been announced; vote once ballot, contributions and our own state before the round are here."""
        ballot, head, own = self._ballot, self.chain.head, self._own
        bases = self.progress.states.get(head.round)
        if own is None or own.body.round != head.round or bases is None:
            return
        medians = {item.stage: item.norm for item in head.median_norms}
        for digest, contribution in self._seen.items():
            if contribution.peer != self.identity.peer and digest not in self._judgements:
                judging = self.exchange.judge(contribution, bases, medians, head.keep)
                self._judgements[digest] = self._tasks.start(judging, f"judge {short(contribution.peer)}")
        if ballot is None or self._voted or ballot.body.head != head.digest:
            return
        listed = set(ballot.body.contributions)
        if own.digest in listed and listed <= {*self._seen, own.digest}:
            self._voted = True
            chosen = {digest: self._judgements[digest] for digest in listed if digest in self._judgements}
            self._tasks.start(self._vote(chosen), "vote")

    async def _vote(self, judging: Mapping[bytes, "asyncio.Task[Verdict]"]) -> None:
        head = self.chain.head
        history = []
        for number in range(max(1, head.round - rules.DEADLINE_HISTORY), head.round):
            commit = self.chain.commit(number)
            if commit is not None and commit.body.ballot_at_ms:
                history.append((commit.body.closed_at_ms - commit.body.ballot_at_ms) / 1000)
        seconds = VOTE_SHARE * rules.deadline_seconds(history, self.manifest.rounds.vote_seconds)
        if judging:
            await asyncio.wait(judging.values(), timeout=seconds)
        if head.round != self.chain.head.round:
            return
        verdicts = []
        for digest, task in sorted(judging.items()):
            reason, stage = task.result() if task.done() else (pb.REASON_UNAVAILABLE, 0)
            verdicts.append(pb.ContributionVerdict(contribution=digest, reason=reason, stage=stage))
        self._send(pb.KIND_RECEIPT, pb.Receipt(round=head.round, head=head.digest, verdicts=verdicts))

    # Housekeeping

    def _worth_keeping(self) -> set[bytes]:
        """Blobs somebody may still ask for, or a restart needs."""
        for round in sorted(self._boundary_blobs)[:-BOUNDARIES_KEPT]:
            del self._boundary_blobs[round]
        keep = {payload.digest for c in self._seen.values() for payload in c.body.payloads}
        keep |= {digest for blobs in self._boundary_blobs.values() for digest in blobs}
        return keep | self._starts.worth_keeping(self.progress.states)

    async def _retain(self) -> None:
        """Remove blobs that were worth keeping and no longer are."""
        keep = self._worth_keeping()
        for digest in self._kept - keep:
            await asyncio.to_thread(self.store.remove, digest)
        self._kept = keep

    async def beat(self) -> None:
        sequence = int(time.time() * 1000)
        while True:
            sequence += 1
            progress = self.progress
            body = pb.Heartbeat(
                sequence=sequence,
                round=progress.round,
                step=progress.step,
                loss=progress.loss,
                head=self.chain.head.digest,
                tokens_per_second=progress.tokens_per_second,
            )
            statement = seal(self.identity, pb.KIND_HEARTBEAT, self.manifest.run_id, body)
            await self._coordinator.try_submit(statement)
            await asyncio.sleep(min(HEARTBEAT_SECONDS, HEARTBEAT_SHARE * self.manifest.rounds.liveness_seconds))

    async def leave(self, seconds: float) -> None:
        """Say goodbye (for at most `seconds`), then end the workers."""
        self._leaving = True
        self._become("leaving", "asked to stop")
        try:
            async with asyncio.timeout(seconds):
                leave = pb.Leave(head=self.chain.head.digest)
                await self._coordinator.submit(seal(self.identity, pb.KIND_LEAVE, self.manifest.run_id, leave))
        except TimeoutError:
            pass
        await self._pool.stop()


def attestation_of(commit: pb.Commit, peer: str) -> bytes:
    """Nonce of what admits the peer to the roster that the commit names; empty where the run asks for nothing."""
    hosts = (host for member in commit.roster for host in member.hosts)
    return next((host.attestation.nonce for host in hosts if host.peer == peer), b"")


def blobs_of(boundaries: Iterable[worker.Boundary]) -> set[bytes]:
    return {digest for b in boundaries for payload in b.payloads for digest in (payload.digest, payload.base_state)}
