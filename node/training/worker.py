"""A stage worker: one process per device, started by the daemon (../workers.py) and commanded by it (link.py).

The main thread trains. A local phase belongs to a round; the committed state Θ(head) is what commits 0 … head-1 made.

    end of a phase    counted and step >= H and Θ(round) in place and nothing running in the background:
                      feedback takes the phase's work, the codec encodes it in the background, the next phase begins
    a commit          is applied to Θ in the background, then to the live parameters between two inner steps (rebase)
    uncounted phase   a cluster that is not on the roster of `round` trains to warm up its inner optimizer until that round closes,
                      then drops that work and begins the next round from Θ

All workers of a cluster act at the same inner step: what each is ready for rides as flags on the gradient-norm all-reduce.
"""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from dilocox.node.outer import checkpoint
from dilocox.node.outer.background import Background
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.outer.state import StageState
from dilocox.node.training.data import load_dataset
from dilocox.node.training.link import DaemonLink
from dilocox.node.training.pipeline import split_stages
from dilocox.node.training.rendezvous import join_generation
from dilocox.node.training.trainer import Trainer
from dilocox.node.worker_settings import WorkerSettings
from dilocox.protocol import chain
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import DilocoxError, LocalError
from dilocox.protocol.ledger import Lease
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.transport.blobs import BlobStore, digest_of
from dilocox.transport.parent_pipe import exit_with_parent

__all__ = ["Worker"]

REPORT_SECONDS = 0.5
"""Steps are reported at most this often."""
SUSPENDED = 20.0
"""A step that takes so many times the fastest was suspended (a lid, a stopped process): that is not training time."""
WAIT_SECONDS = 0.02
"""How long a waiting worker sleeps between looking for commands; bounds the time a commit lies unapplied."""


@dataclass(frozen=True)
class Prepared:
    """A commit whose result stands in Θ, waiting for the step at which all workers move onto it."""

    commit: Statement
    digests: list[wire.StageState]


@dataclass
class Phase:
    """The running local phase."""

    round: int
    step: int = 0
    loss: float = 0.0
    """Sum over steps."""
    seconds: float = 0.0
    """Spent in its steps."""


class Worker:
    def __init__(self, settings: WorkerSettings, manifest: Manifest, rank: int, workers: int, link: DaemonLink) -> None:
        self.settings, self.manifest, self.rank, self.link = settings, manifest, rank, link
        self.device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if settings.devices == "cuda" else "cpu")
        self.stages = split_stages(range(manifest.model.stages), workers)[rank]
        self.trainer = Trainer(manifest, self.stages, rank, workers, self.device)
        self.dataset = load_dataset(manifest, settings.data)
        self.store = BlobStore(settings.blobs)
        self.background = Background(settings.codec_cpus)
        self.head = chain.initial_head()
        """Implied by the commits applied: head.round is the round that Θ starts, 0 before the genesis commit."""
        self.digests: list[wire.StageState] = []
        """Of Θ(head), per stage of this worker."""
        self.pending: dict[int, bytes] = {}
        """Digests of our payloads in flight, by stage; empty when none is."""
        self.pending_round = 0
        self.pending_keep = 0
        """What the codec kept in them."""
        self.phase = Phase(round=1)
        self.samples_read = 0
        self.joined = 0
        """The `joined` of the lease that samples_read counts in."""
        self._commits: deque[Statement] = deque()
        self._preparing: Future[Prepared] | None = None
        self._last: tuple[list[wire.StageState], Statement, int] | None = None
        """The state before the last commit, that commit, and what the codec kept: what a recheck replays."""
        self._stopping = False
        self._time_is_up = False
        """The first worker's clock says that a time-boxed phase is over; all workers know it from the last step."""
        self._fastest_step = math.inf
        self._reported_at = 0.0
        self._total_steps = 0
        self._warm_samples = int.from_bytes(sha256(settings.cluster.encode())[:6], "big")

    # Starting

    def start(self) -> None:
        """Say what could be resumed, load what the daemon chooses, replay commits onto it."""
        found = {stage: checkpoint.boundaries(self.settings.stages, stage) for stage in self.stages}
        common = sorted(set.intersection(*(set(rounds) for rounds in found.values())))
        resumable = [boundary_event({stage: found[stage][round] for stage in self.stages}) for round in common]
        hello = pb.Hello(rank=self.rank, pid=os.getpid(), stages=self.stages, boundaries=resumable, device=str(self.device))
        self.link.send(pb.WorkerEvent(hello=hello))
        command = self.link.wait_command()
        if command.HasField("stop"):
            self._stopping = True
            return
        self._load(command.start)
        for raw in command.start.commits:
            commit = self._open(raw)
            self._finish(self._prepare(commit), replaying=True)
        self._report_ready()
        if self.pending_round:  # still in flight: announce the same bytes again
            metas = {s: checkpoint.boundaries(self.settings.stages, s)[self.pending_round] for s in self.stages}
            self.link.send(pb.WorkerEvent(boundary=boundary_event(metas)))

    def _load(self, start: pb.Start) -> None:
        if start.opening_commit:
            self.head = chain.advance(self.manifest, self._open(start.opening_commit))
        if start.origin == pb.Start.ORIGIN_INITIAL:
            self.trainer.load_initial()
            self.digests = self._store_states()
        else:
            wanted = {item.stage: item.digest for item in start.states}
            for state in self.trainer.states:
                state.load_state(self.store.view(wanted[state.stage]))
            self.digests = [item for item in start.states if item.stage in self.stages]
            self.trainer.reset_to_committed()
        self.phase = Phase(max(1, self.head.round))
        self._follow_lease()
        if start.origin == pb.Start.ORIGIN_BOUNDARY:
            self._load_boundary(start.boundary)
            if start.boundary < start.round:
                self._skip_ahead(self._open(start.boundary_commit))

    def _load_boundary(self, boundary: int) -> None:
        for state, stage in self.trainer.pairs():
            meta = checkpoint.boundaries(self.settings.stages, state.stage)[boundary]
            tensors = checkpoint.load_private(self.settings.stages, state.stage, boundary)
            self.trainer.load_private(state, stage, tensors)
            checkpoint.load_feedback(self.settings.stages, state, boundary)
            self.pending[state.stage] = bytes.fromhex(meta.payload)
            self.pending_round, self.pending_keep = boundary, meta.keep
            self.trainer.optimizer.steps = meta.optimizer_steps
            self.samples_read, self.joined = meta.samples_read, meta.joined
        self.phase = Phase(boundary + 1)

    def _skip_ahead(self, boundary_commit: Statement) -> None:
        """The state loaded is newer than the boundary: keep the inner optimizer and what was not sent or not counted."""
        self.trainer.reset_to_committed()  # at a boundary live = anchor: there is no lead to keep
        if not self._counts_us(boundary_commit.body):
            for state in self.trainer.states:
                self._return_payload(state)
        self.pending, self.pending_round = {}, 0
        self.phase = Phase(self.head.round)
        self._follow_lease()

    def _counts_us(self, body: wire.Commit) -> bool:
        return self.settings.cluster in {item.cluster for item in body.counted}

    def _return_payload(self, state: StageState) -> None:
        state.return_to_feedback(self.store.view(self.pending[state.stage]), self.pending_keep)

    def _open(self, raw: bytes) -> Statement:
        return open_envelope(raw, self.manifest.run_id, (wire.KIND_COMMIT,))

    def _store_states(self) -> list[wire.StageState]:
        """Make Θ and momentum durable as blobs; their digests, per stage."""
        return [
            wire.StageState(stage=state.stage, digest=self.store.put([state.state_bytes()])) for state in self.trainer.states
        ]

    # The loop

    def run(self) -> None:
        while not self._stopping:
            self._take_commands()
            ready, idle, stop = self._wait_turn() if self._must_wait() else self._train_step()
            if stop:
                return
            if ready and self._may_apply():
                self._apply()
            elif self._phase_over(ready) and idle:
                self._end_phase()

    @property
    def _finished(self) -> bool:
        return self.phase.round > self.manifest.rounds.count

    def _counted(self, head: chain.Head) -> bool:
        return self.settings.cluster in head.roster

    def _lease(self) -> Lease:
        return self.head.ledger.leases.get(self.settings.cluster, Lease())

    def _must_wait(self) -> bool:
        """Derived from what all workers share, so all of them wait or none."""
        synchronous = self.manifest.overlap(self.phase.round - 1) == "none" and bool(self.pending_round)
        full = self.phase.step >= self.manifest.rounds.max_inner_steps
        return self.head.round == 0 or self._finished or synchronous or full or self._positions() is None

    def _positions(self) -> list[int] | None:
        batch = self.manifest.training.batch_size
        if self._counted(self.head):
            return self._lease().positions(self.samples_read, batch)
        first = self._warm_samples + self.phase.step * batch  # an uncounted phase: any samples will do
        return list(range(first, first + batch))

    def _take_commands(self) -> None:
        while command := self.link.next_command():
            match command.WhichOneof("command"):
                case "apply":
                    self._commits.append(self._open(command.apply.commit))
                case "recheck":
                    if command.recheck.round == self.head.round and self._last is not None:
                        self.background.submit(partial(self._recheck, self.head.round, self.digests, *self._last))
                case "stop":
                    self._stopping = True
        if self._preparing is None and self._commits:
            commit = self._commits.popleft()
            self._preparing = self.background.submit(lambda: self._prepare(commit))

    def _flags(self) -> list[float]:
        ready = self._preparing is not None and self._preparing.done()
        return [float(ready), float(self.background.idle), float(self._stopping), float(self._time_ran_out())]

    def _time_ran_out(self) -> bool:
        seconds = self.manifest.rounds.round_seconds
        if seconds is None or self.rank or not self.phase.step:
            return False
        return self.phase.seconds >= seconds

    def _agree(self, sums: Sequence[float]) -> tuple[bool, bool, bool]:
        workers = self.trainer.workers
        self._time_is_up = sums[3] > 0
        return sums[0] == workers, sums[1] == workers, sums[2] > 0

    def _wait_turn(self) -> tuple[bool, bool, bool]:
        self.link.wake.wait(WAIT_SECONDS)
        self.link.wake.clear()
        self._take_commands()
        self._report_step(self.phase.loss / max(1, self.phase.step), 0.0, waiting=True)
        return self._agree(self.trainer.all_sum(self._flags()))

    def _train_step(self) -> tuple[bool, bool, bool]:
        started = time.monotonic()
        positions = self._positions()
        assert positions is not None
        result = self.trainer.step(*self.dataset.batch(positions), flags=self._flags())
        if self._counted(self.head):
            self.samples_read += len(positions)
        self.phase.step += 1
        self._total_steps += 1
        self.phase.loss += result.loss
        seconds = time.monotonic() - started
        self._fastest_step = min(self._fastest_step, seconds)
        self.phase.seconds += min(seconds, SUSPENDED * self._fastest_step)
        self._report_step(result.loss, seconds, waiting=False)
        return self._agree(result.flags)

    # Ending a phase

    def _phase_over(self, ready: bool) -> bool:
        enough = self._enough_steps() and not self._finished
        travelled_beside = self.manifest.overlap(self.phase.round - 1) == "delayed"
        if travelled_beside and self.head.round == self.phase.round - 1 and ready:
            return enough and self._counted(self._prepared_head())
        return enough and self.head.round == self.phase.round and self._counted(self.head)

    def _enough_steps(self) -> bool:
        if self.manifest.rounds.round_seconds is not None:
            return self._time_is_up and self.phase.step > 0
        known = self.head.round == self.phase.round  # the commit that opened the round says its H
        return self.phase.step >= (self.head.inner_steps if known else self.manifest.inner_steps(self.phase.round))

    def _prepared_head(self) -> chain.Head:
        assert self._preparing is not None
        return chain.advance(self.manifest, self._preparing.result().commit)

    def _end_phase(self) -> None:
        """Hand the phase's work to the codec and begin the next one without a pause."""
        phase = self.phase
        self.trainer.end_phase()
        if self.head.round < phase.round:  # only with delayed overlap: the commit that travelled beside this phase
            self._apply(keep_lead=False)
        if self.manifest.overlap(phase.round) == "delayed":
            self.trainer.rebase(keep_lead=False)
        lease = self._lease()
        meta = BoundaryMeta(
            round=phase.round,
            inner_steps=phase.step,
            tokens=phase.step * self.manifest.tokens_per_step,
            loss=phase.loss / phase.step,
            samples_read=min(self.samples_read, lease.end),
            joined=self.joined,
            optimizer_steps=self.trainer.optimizer.steps,
            base_state="",
            payload="",
            payload_size=0,
            norm=0.0,
            effective_rank=0.0,
            error=0.0,
            keep=self.head.keep,
        )
        for state, stage in self.trainer.pairs():
            tensors = self.trainer.private_tensors(stage)
            checkpoint.save_private(self.settings.stages, state.stage, phase.round, tensors)
        self.pending_round, self.pending_keep = phase.round, self.head.keep
        medians = {item.stage: item.norm for item in self.head.median_norms}
        bases = {item.stage: item.digest for item in self.digests}
        self.background.submit(lambda: self._encode(meta, medians, bases))
        self.phase = Phase(phase.round + 1)
        if self.manifest.rounds.round_seconds is not None:  # slow and fast boxes follow one learning rate schedule
            self.trainer.optimizer.steps = self.manifest.nominal_steps(self.phase.round)

    def _encode(self, meta: BoundaryMeta, medians: dict[int, float], bases: dict[int, bytes]) -> None:
        """In the background: encode, make durable, announce."""
        metas = {}
        for state in self.trainer.states:
            encoded = state.encode(medians.get(state.stage), meta.keep)
            digest = self.store.put([encoded.raw])
            checkpoint.save_feedback(self.settings.stages, state, meta.round)
            stage_meta = replace(
                meta,
                base_state=bases[state.stage].hex(),
                payload=digest.hex(),
                payload_size=len(encoded.raw),
                norm=encoded.norm,
                effective_rank=encoded.effective_rank,
                error=encoded.error,
            )
            checkpoint.seal_boundary(self.settings.stages, state.stage, stage_meta)
            self.pending[state.stage] = digest
            metas[state.stage] = stage_meta
        self.link.send(pb.WorkerEvent(boundary=boundary_event(metas)))

    # Applying a commit

    def _prepare(self, commit: Statement) -> Prepared:
        """In the background: Θ, momentum and feedback as the commit says; state blobs on disk. Live parameters are not touched."""
        body: wire.Commit = commit.body
        if body.round != self.head.round:
            raise LocalError(f"commit {body.round} does not follow the state before round {self.head.round}")
        returned = bool(self.pending) and body.round == self.pending_round and not self._counts_us(body)
        for state in self.trainer.states:
            if returned:
                self._return_payload(state)
            self._apply_to(state, body, self.head.keep)
        return Prepared(commit, self._store_states() if body.counted else self.digests)

    def _apply_to(self, state: StageState, body: wire.Commit, keep: int) -> None:
        """`keep`: of the round that the commit closes."""
        payloads = [self.store.view(item.payloads[state.stage].digest) for item in body.counted]
        state.apply(payloads, [item.tokens for item in body.counted], body.round, keep)

    def _may_apply(self) -> bool:
        """Delayed overlap holds a commit back until the phase beside which it travelled is over."""
        assert self._preparing is not None
        number = self._preparing.result().commit.body.round
        beside = self.manifest.overlap(number) == "delayed" and number < self.phase.round and not self._finished
        return not (beside and self._phase_work_counts())

    def _phase_work_counts(self) -> bool:
        return self._counted(self._prepared_head())

    def _apply(self, keep_lead: bool = True) -> None:
        assert self._preparing is not None
        prepared, self._preparing = self._preparing.result(), None
        self._finish(prepared, keep_lead=keep_lead)
        self._report_ready()

    def _finish(self, prepared: Prepared, keep_lead: bool = True, replaying: bool = False) -> None:
        """Between two inner steps: the live parameters move onto the new Θ."""
        body: wire.Commit = prepared.commit.body
        warmed_up = not self._counted(self.head) and self.head.round == self.phase.round
        self._last = (self.digests, prepared.commit, self.head.keep)
        self.head = chain.advance(self.manifest, prepared.commit)
        self.digests = prepared.digests
        self.trainer.rebase(keep_lead=keep_lead and not warmed_up)
        if body.round == self.pending_round:
            self.pending, self.pending_round = {}, 0
        if self.head.round > self.phase.round or (replaying and not self.pending):
            self.phase = Phase(self.head.round)
        self._follow_lease()

    def _follow_lease(self) -> None:
        cluster = self.head.roster.get(self.settings.cluster)
        if cluster is not None and cluster.joined != self.joined:
            self.joined, self.samples_read = cluster.joined, self._lease().counted
        self.samples_read = max(self.samples_read, self._lease().counted)

    def _recheck(
        self, round: int, reported: list[wire.StageState], before: list[wire.StageState], last: Statement, keep: int
    ) -> None:
        """In the background: what the last commit makes of the state on disk. Bits that rotted in memory show here."""
        digests = []
        for stage, item in zip(self.stages, before, strict=True):
            replayed = StageState(self.manifest, stage)
            view = self.store.view(item.digest)
            if digest_of([view]) != item.digest:
                raise LocalError(f"the state before round {round - 1} rotted on disk")
            replayed.load_state(view)
            self._apply_to(replayed, last.body, keep)
            digests.append(wire.StageState(stage=stage, digest=digest_of([replayed.state_bytes()])))
        result = pb.Rechecked(round=round, states=digests, report_agrees=digests == reported)
        self.link.send(pb.WorkerEvent(rechecked=result))

    # Reporting

    def _report_ready(self) -> None:
        every = self.manifest.rounds.evaluate_every
        done = self.head.round - 1
        due = bool(every) and done > 0 and (done % every == 0 or done == self.manifest.rounds.count)
        loss = self.trainer.evaluate_committed(self.dataset) if due else 0.0
        ready = pb.Ready(
            round=self.head.round,
            states=self.digests,
            evaluated=due and self.trainer.pipeline.last,
            evaluation_loss=loss,
            applied_at_step=self.phase.step,
        )
        self.link.send(pb.WorkerEvent(ready=ready))

    def _report_step(self, loss: float, seconds: float, waiting: bool) -> None:
        now = time.monotonic()
        if self.rank or now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        step = pb.Step(
            round=self.phase.round,
            step=self.phase.step,
            loss=loss,
            seconds=seconds,
            tokens=self.manifest.tokens_per_step,
            waiting=waiting,
            total_steps=self._total_steps,
            clock_seconds=now,
            codec_cpu_seconds=self.background.cpu_seconds,
        )
        self.link.send(pb.WorkerEvent(step=step))


def boundary_event(metas: dict[int, BoundaryMeta]) -> pb.Boundary:
    """What is announced, from the checkpoints of one worker's stages."""
    meta = next(iter(metas.values()))
    return pb.Boundary(
        round=meta.round,
        inner_steps=meta.inner_steps,
        tokens=meta.tokens,
        loss=meta.loss,
        samples_read=meta.samples_read,
        payloads=[
            wire.StagePayload(
                stage=stage,
                base_state=bytes.fromhex(item.base_state),
                digest=bytes.fromhex(item.payload),
                size=item.payload_size,
                norm=item.norm,
                effective_rank=item.effective_rank,
                error=item.error,
            )
            for stage, item in sorted(metas.items())
        ],
    )


def main() -> None:
    exit_with_parent()
    settings = WorkerSettings.from_environment()
    torch.set_num_threads(settings.threads)
    link = DaemonLink(settings.socket)
    try:
        join_generation("nccl" if settings.devices == "cuda" else "gloo")
        manifest = Manifest.from_canonical(settings.manifest.read_bytes())
        worker = Worker(settings, manifest, dist.get_rank(), dist.get_world_size(), link)
        worker.start()
        worker.run()
    except Exception as error:
        ours = isinstance(error, DilocoxError)
        link.send(pb.WorkerEvent(failed=str(error) if ours else f"{type(error).__name__}: {error}"))
        link.close()
        if not ours:
            raise
        sys.exit(1)
    link.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
