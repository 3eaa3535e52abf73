"""Worker: one process per device, started by the daemon (../workers.py), with commands over gRPC (link.py).

The main thread trains; encoding, checkpoints and commits run in the background. The phase machine (protocol/member/phase.py)
decides what happens when, and every rank of the cluster has a copy. The flags on which they agree travel with the
gradient-norm all-reduce, so all act at the same inner step. This file carries out its actions.
"""

import math
import os
import sys
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dilocox.node.outer.background import Background
from dilocox.node.outer.checkpoint import BoundaryMeta, complete_age
from dilocox.node.outer.state_device import passage_of
from dilocox.node.training.model.data import load_dataset, load_private
from dilocox.node.training.model.dp_gradients import Drawn, Noise
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.rendezvous import join_generation
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.audit_checkpoints import Marks
from dilocox.node.training.worker.commit_applier import Commits, Prepared
from dilocox.node.training.worker.daemon_client import DaemonLink
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.node.training.worker.resume import Resume, boundary_event
from dilocox.node.training.worker.throttle import Pace
from dilocox.node.workers.environment import WorkerSettings
from dilocox.node.workers.placement import placed
from dilocox.protocol import limits
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import DilocoxError, Diverged
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import Apply, Encode, End, Flags, Score, Stop, Train, Turn, Wait
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.process.parent_pipe import exit_with_parent
from dilocox.transport.store.blobs import BlobStore

if TYPE_CHECKING:
    from dilocox.node.training.worker.scores import Scores

__all__ = ["Worker"]

REPORT_SECONDS = 0.5
"""Steps are reported at most this often."""
SUSPENDED = 20.0
"""A step that takes so many times the fastest was suspended (a lid, a stopped process): that is not training time."""
WAIT_SECONDS = 0.02
"""Sleep of a waiting worker between checks for commands; it bounds the delay of a commit."""


class Worker:
    def __init__(self, settings: WorkerSettings, manifest: Manifest, rank: int, workers: int, link: DaemonLink) -> None:
        self.settings, self.manifest, self.rank, self.link = settings, manifest, rank, link
        self.device = own_device(settings)
        self.mesh = Mesh(rank, workers, settings.copies, self.device)
        noise = Noise(settings.clip, settings.noise) if settings.noise else None
        run = placed(manifest, settings.microbatches, settings.recompute)
        self.trainer = Trainer(run, self.mesh, noise, passage_of(settings.outer_state, self.device))
        self.dataset = load_dataset(manifest, settings.data)
        """Samples for evaluation and scores."""
        own = bytes.fromhex(settings.private_digest)
        text = load_private(manifest, settings.private, own, settings.cluster) if settings.private else self.dataset
        self.text = Drawn(text) if noise is not None else text
        """Samples on which this cluster trains."""
        self.store = BlobStore(settings.blobs)
        self.background = Background(settings.codec_cpus, self.device)
        self.commits = Commits(manifest, self.trainer, self.store)
        self.boundaries = Boundaries(settings.stages, settings.cluster, self.trainer, self.store)
        age = max((complete_age(settings.stages, state.stage) for state in self.trainer.states), default=0.0)
        self._checkpoint_at = time.monotonic() + max(0.0, settings.checkpoint_seconds - age)
        """Time from which on the next checkpoint is complete."""
        self.scores = self._make_scores() if manifest.scoring.voters else None
        self.marks = Marks(self.trainer, self.store, self.background.aside)
        self.state = phase.begin(manifest, settings.cluster)
        """Changes between two turns only; background jobs take what they need of it with them."""
        self._arrived: deque[pb.Apply] = deque()
        self._preparing: Future[Prepared] | None = None
        self._stopping = False
        self._pace = Pace(settings.step_seconds, link.wake)
        self._loss = self._seconds = 0.0
        self._tokens = 0
        """Sums over the steps of the phase."""
        self._total_steps = self._steps_told = 0
        """Inner steps of this incarnation, and those already in a checkpoint."""
        self._fastest_step = math.inf
        self._reported_at = 0.0

    def _make_scores(self) -> "Scores":
        from dilocox.node.training.worker.scores import Scores

        return Scores(self.trainer, self.dataset, self.background.aside)

    def start(self) -> None:
        """Say what could be resumed, load what the daemon chooses, announce again what is in flight."""
        resume = Resume(self.manifest, self.settings.cluster, self.settings.stages, self.trainer, self.commits, self.store)
        hello = pb.Hello(
            rank=self.rank,
            pid=os.getpid(),
            stages=self.trainer.stages,
            boundaries=resume.offers(),
            device=str(self.device),
            copy=self.mesh.copy,
        )
        self.link.send(pb.WorkerEvent(hello=hello))
        command = self.link.wait_command()
        if command.HasField("stop"):
            self._stopping = True
            return
        state = resume.load(command.start, self.link.wait_command)
        if state is None:
            self._stopping = True
            return
        self.state = state
        self._report_ready(self.state.head, 0)
        if self.state.in_flight and self.mesh.leads:
            self.link.send(pb.WorkerEvent(boundary=resume.announcement(self.state.in_flight)))

    def run(self) -> None:
        """Run until some rank must stop."""
        action: phase.Action = Stop() if self._stopping else Wait("it looks for the samples of its first batch")
        while not isinstance(action, Stop):
            self._take_commands()
            turn = self._train(action) if isinstance(action, Train) else self._wait(action)
            with self._pace.no_rest():
                action = self._act(turn)
        self.background.close()
        self.boundaries.close()

    def _take_commands(self) -> bool:
        """Take commands. Return whether one was to stop."""
        while command := self.link.next_command():
            match command.WhichOneof("command"):
                case "apply":
                    self._arrived.append(command.apply)
                    if self.scores is not None:
                        self.scores.close()
                case "score" if self.scores is not None:
                    self.scores.ask(command.score)
                case "recheck":
                    self._recheck(command.recheck.round)
                case "stop":
                    self._stopping = True
        if self._preparing is None and self._arrived:
            commit, state = self._arrived.popleft(), self.state
            self._preparing = self.background.submit(lambda: self.commits.prepare(state, commit))
        if self._preparing is None and self.scores is not None:
            self.scores.prepare(self.state.head.rank_or_k, self.store.view)
        return self._stopping

    def _recheck(self, round: int) -> None:
        last, reported = self.commits.last, self.commits.digests
        if round != self.state.head.round or last is None or not self.mesh.leads:
            return
        self.background.submit(lambda: self.link.send(pb.WorkerEvent(rechecked=self.commits.recheck(round, last, reported))))

    # Turns

    def _train(self, action: Train) -> Turn:
        self._pace.rest(self._take_commands)
        self.marks.before_step(self.state)
        started = time.monotonic()
        result = self.trainer.step(
            *self.text.batch(action.positions), self._flags_after_gradients, before_update=self.boundaries.wait
        )
        if not result.loss <= limits.LOSS:  # nor where it is no number: no peer takes such a heartbeat, or contribution
            raise Diverged(f"the loss is {result.loss:g} nats per token")
        seconds = max(time.monotonic() - started, self._pace.step_seconds)
        self._fastest_step = min(self._fastest_step, seconds)
        self._seconds += min(seconds, SUSPENDED * self._fastest_step)
        self._loss += result.loss
        self._tokens += result.tokens
        self._total_steps += 1
        self._report_step(self.state.steps + 1, result.loss, seconds)
        return phase.agree(result.flags, self.mesh.workers, True, self._next_head)

    def _wait(self, action: phase.Action) -> Turn:
        assert isinstance(action, Wait)
        self.link.wake.wait(WAIT_SECONDS)
        self.link.wake.clear()
        self._take_commands()
        self._report_step(self.state.steps, self._loss / max(1, self.state.steps), 0.0, action.why)
        return phase.agree(self.mesh.all_sum(self._flags(trained=False)), self.mesh.workers, False, self._next_head)

    def _flags_after_gradients(self) -> list[float]:
        """A step may be long: a commit that came while gradients were computed is prepared beside the next one's."""
        self._take_commands()
        return self._flags(trained=True)

    def _flags(self, trained: bool) -> list[float]:
        prepared = self._preparing is not None and self._preparing.done()
        box = self.manifest.rounds.round_seconds
        time_is_up = self.rank == 0 and box is not None and self._seconds >= box
        lacking = not self.text.here(phase.upcoming(self.state, trained))
        busy = not self.background.idle
        scorable = self._preparing is None and self.scores is not None and self.scores.ready
        due = self.rank == 0 and time.monotonic() >= self._checkpoint_at
        return Flags(self._preparing is not None, prepared, busy, self._stopping, time_is_up, lacking, scorable, due).numbers()

    def _next_head(self) -> Head:
        assert self._preparing is not None
        return self._preparing.result().head

    def _act(self, turn: Turn) -> phase.Action:
        """Carry out what follows from the turn; the action that is left to do until the next one."""
        before = self.state
        self.state, actions = phase.step(before, turn)
        steps, read = before.steps + turn.trained, phase.samples_read(before, turn.trained)
        for action in actions:
            match action:
                case Apply():
                    self.marks.before_commit(steps, read)
                    self._apply(action.keep_private, steps)
                case End():
                    self.marks.end(steps, read)
                    self.trainer.end_phase(action.round, action.restart)
                case Encode():
                    self._start_encoding(action)
                case Score():
                    self._score()
        if self.state.round != before.round:
            self._loss = self._seconds = 0.0
            self._tokens = 0
        return actions[-1]

    def _apply(self, keep_private: bool, steps: int) -> None:
        assert self._preparing is not None
        prepared, self._preparing = self._preparing.result(), None
        self.commits.finish(prepared, keep_private)
        stages = [state.stage for state in self.trainer.states]
        self.boundaries.sync_payloads(take.payloads[stage] for take in prepared.commit.takes for stage in stages)
        self._report_ready(prepared.head, steps)

    def _score(self) -> None:
        assert self.scores is not None, "a run that scores"
        scored = self.scores.measure()
        if scored is not None and not self.rank:
            self.link.send(pb.WorkerEvent(scored=scored))

    def _start_encoding(self, ended: Encode) -> None:
        """The boundary: what a restart needs is written in the background, from copies taken while the next step computes its
        gradients. The first copy's is everybody's."""
        if not self.mesh.leads:
            return
        meta = BoundaryMeta(
            round=ended.round,
            inner_steps=ended.inner_steps,
            tokens=self._tokens,
            loss=self._loss / ended.inner_steps,
            samples_read=ended.samples_read,
            joined=ended.joined,
            optimizer_steps=self.trainer.optimizer.steps,
            rank_or_k=ended.rank_or_k,
            head=ended.head.hex(),
            steps_within=self._total_steps - self._steps_told,
            noise=self.settings.noise,
            corpus=self.settings.private_digest,
        )
        self._steps_told = self._total_steps
        bases = {item.stage: item.digest for item in self.commits.digests}
        if ended.complete:
            self._checkpoint_at = time.monotonic() + self.settings.checkpoint_seconds
        write = self.boundaries.begin(meta, bases, self.marks.collect(), due=ended.complete)
        self.background.submit(lambda: self._announce(write()))

    def _announce(self, metas: dict[int, BoundaryMeta]) -> None:
        self.commits.payloads.update({stage: bytes.fromhex(meta.payload) for stage, meta in metas.items()})
        self.link.send(pb.WorkerEvent(boundary=boundary_event(metas)))

    # Reporting

    def _report_ready(self, head: Head, steps: int) -> None:
        every = self.manifest.rounds.evaluate_every
        due = bool(every) and head.trained > 0 and (head.trained % every == 0 or head.closing(self.manifest))
        loss = self.trainer.evaluate_committed(self.dataset) if due else 0.0
        if not self.mesh.leads:
            return
        ready = pb.Ready(
            round=head.round,
            states=self.commits.digests,
            evaluated=due and self.trainer.pipeline.last,
            evaluation_loss=loss,
            applied_at_step=steps,
        )
        self.link.send(pb.WorkerEvent(ready=ready))

    def _report_step(self, steps: int, loss: float, seconds: float, why: str = "") -> None:
        now = time.monotonic()
        if self.rank or now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        step = pb.Step(
            round=self.state.round,
            step=steps,
            loss=loss,
            seconds=seconds,
            tokens=self.manifest.tokens_per_step,
            waiting=bool(why),
            total_steps=self._total_steps,
            clock_seconds=now,
            codec_cpu_seconds=self.background.cpu_seconds,
            why=why,
        )
        self.link.send(pb.WorkerEvent(step=step))


def own_device(settings: WorkerSettings) -> torch.device:
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if settings.devices == "cuda" else "cpu")


def main() -> None:
    exit_with_parent()
    settings = WorkerSettings.from_environment()
    torch.set_num_threads(settings.threads)
    link = DaemonLink(settings.socket)
    try:
        device = own_device(settings)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        join_generation(device)
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
