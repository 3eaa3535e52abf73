"""Progress of a cluster, from the reports of the workers of one worker group."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dilocox.node.workers.audit_checkpoints import merged
from dilocox.protocol.member.member_io import PhaseEnded
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.pb import worker_pb2 as pb

__all__ = ["ClusterProgress", "Phase", "Progress", "Ready"]

ROUNDS_SHOWN = 1000
"""Rounds whose timings `status` shows."""
STUCK_STEPS = 100.0
"""Number of usual steps without a report, after which a worker group that has trained counts as stuck. Before its first
step it is stuck if it neither reports nor uses the processor, although it could."""
STUCK_SECONDS = 60.0
"""Shortest time before a worker group counts as stuck: a busy machine may pause for a while."""
STEPS_REMEMBERED = 101
"""Steps in their median: a step that a sleeping machine stretched does not matter."""


@dataclass
class Progress:
    """Last reports of the workers."""

    round: int = 0
    step: int = 0
    loss: float = 0.0
    """Loss of the last step."""
    tells_loss: bool = True
    """True if the loss may be published: it depends on the training data."""
    step_seconds: float = 0.0
    waiting: str = ""
    """Reason of a wait; empty while training."""
    tokens_per_second: float = 0.0
    tokens: int = 0
    total_steps: int = 0
    """Inner steps since the workers started …"""
    clock_seconds: float = 0.0
    """First worker's monotonic clock after the steps."""
    codec_cpu_seconds: float = 0.0
    applied_at: dict[int, int] = field(default_factory=dict)
    """Inner step at which each commit was applied."""
    states: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Digest per stage of the state before each round, of the last rounds."""
    roots: dict[int, bytes] = field(default_factory=dict)
    """State root before each round."""
    inner_steps: dict[int, int] = field(default_factory=dict)
    """Inner steps of each phase."""

    @property
    def told_loss(self) -> float:
        """Return the published loss; 0: none."""
        return self.loss if self.tells_loss else 0.0

    def stand_still(self) -> None:
        """No worker trains."""
        self.tokens_per_second = 0.0

    def forget(self, keep_states: int) -> None:
        """Bound what is remembered, whatever the length of the run."""
        few, many = (self.states, self.roots), (self.applied_at, self.inner_steps)
        for history, keep in (*((each, keep_states) for each in few), *((each, ROUNDS_SHOWN) for each in many)):
            for round in sorted(history)[:-keep]:
                del history[round]


@dataclass(frozen=True)
class Ready:
    """Report: all workers have loaded the state before a round."""

    round: int
    digests: dict[int, bytes]
    """Digests by stage."""
    evaluation_loss: float | None
    applied_at_step: int


@dataclass(frozen=True)
class Phase:
    """A phase ended, and its payloads are stored in every worker."""

    first: pb.Boundary
    payloads: list[pb.StagePayload]
    """Payloads in stage order."""
    parts: list[tuple[list[int], wire.Marks]]
    """Stages of each worker, with its part of the audit checkpoints."""

    @property
    def leaves(self) -> wire.Leaves:
        """Return the payload index that announces its payloads."""
        return self._leaves([payload.shares for payload in self.payloads])

    @property
    def work(self) -> wire.Leaves:
        """Return the payload index without the roster's shards: the same after every restart."""
        return self._leaves([b""] * len(self.payloads))

    def _leaves(self, shares: Sequence[bytes]) -> wire.Leaves:
        """`shares`: roots over those of each payload."""
        return wire.Leaves(
            leaves=[
                wire.Leaf(stage=p.stage, digest=p.digest, size=p.size, norms=p.norms, shares=root)
                for p, root in zip(self.payloads, shares, strict=True)
            ]
        )

    def ended(self, base: bytes, leaves: bytes, audit: bytes = b"", shares: bytes = b"", tells_loss: bool = True) -> PhaseEnded:
        """Return the input of the member machine. `base`: root of the state that it started from; then the digests of the
        payload index and of the audit checkpoints, and the root over the shards, if the run has them."""
        return PhaseEnded(
            round=self.first.round,
            base=base,
            inner_steps=self.first.inner_steps,
            tokens=self.first.tokens,
            loss=self.first.loss if tells_loss else 0.0,
            samples_read=self.first.samples_read,
            leaves=leaves,
            size=sum(payload.size for payload in self.payloads),
            norm=norm_code(self.norm),
            effective_rank=self.effective_rank,
            error=self.error,
            audit=audit,
            shares=shares,
        )

    @property
    def marks(self) -> wire.Marks | None:
        """Return the audit checkpoints; None in a run without audits."""
        return merged(self.parts) if self.first.HasField("marks") else None

    @property
    def norm(self) -> float:
        return math.hypot(*(payload.norm for payload in self.payloads))

    @property
    def effective_rank(self) -> float:
        return sum(payload.effective_rank for payload in self.payloads) / len(self.payloads)

    @property
    def error(self) -> float:
        return sum(payload.error for payload in self.payloads) / len(self.payloads)


class ClusterProgress:
    def __init__(self, clock: Callable[[], float] = time.monotonic, tells_loss: bool = True) -> None:
        """`tells_loss`: to peers."""
        self._clock, self._workers = clock, 0
        self.progress = Progress(tells_loss=tells_loss)
        self.begin()

    def begin(self) -> None:
        """Begin a worker group, without any report."""
        self.hellos: dict[int, pb.Hello] = {}
        self._readies: dict[int, dict[int, pb.Ready]] = {}
        self._phases: dict[int, dict[int, pb.Boundary]] = {}
        self._rechecks: dict[int, dict[int, pb.Rechecked]] = {}
        self.stepped = False
        self.started = False
        """True once they received their start: until then they wait for this daemon."""
        self._first, self._replays, self._reached = 0, 0, 0
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        """Seconds of the last ones."""
        self._computed = -1
        self._heard_at = self._clock()

    def expect(self, workers: int) -> None:
        """Wait for so many workers in this generation."""
        self._workers = workers

    def hello(self, rank: int, hello: pb.Hello) -> bool:
        """Whether all are here."""
        self.hellos[rank] = hello
        return len(self.hellos) == self._workers

    def start(self, round: int, replays: int) -> None:
        """Note their start: the state before that round, and so many commits after it."""
        self.started, self._first, self._replays, self._reached = True, round, replays, round

    def _speakers(self) -> int:
        """Return the number of ranks with outer state: those of the first copy. All others only train."""
        return self._workers - sum(each.copy > 0 for each in self.hellos.values())

    def step(self, step: pb.Step) -> None:
        progress = self.progress
        self.stepped, self._heard_at = True, self._clock()
        progress.round, progress.step, progress.waiting = step.round, step.step, step.why
        progress.total_steps, progress.clock_seconds = step.total_steps, step.clock_seconds
        progress.codec_cpu_seconds = step.codec_cpu_seconds
        if step.seconds:
            self._steps.append(step.seconds)
            progress.loss, progress.step_seconds = step.loss, step.seconds
            progress.tokens_per_second = step.tokens / step.seconds

    def computes(self, ticks: int) -> None:
        """Note the processor time of all workers so far. Before their first step it shows that they work."""
        ours = len(self.hellos) == self._workers and not self.started
        if not self._steps and (ours or ticks > self._computed):
            self._heard_at = self._clock()
        self._computed = ticks

    def stuck(self) -> bool:
        """Return whether they pause for much longer than a step takes."""
        usual = statistics.median(self._steps) if self._steps else 0.0
        return self._clock() - self._heard_at > max(STUCK_SECONDS, STUCK_STEPS * usual)

    def status(self) -> Status | None:
        """Return their status; None before the first is up."""
        if not self.stepped:
            return Status("starting", self._before_the_first_step()) if self.hellos else None
        return Status("waiting", self.progress.waiting) if self.progress.waiting else Status("training", "on the roster")

    def _before_the_first_step(self) -> str:
        if len(self.hellos) < self._workers:
            return f"{len(self.hellos)} of {self._workers} stage workers are up"
        if not self.started:
            return "the stage workers are up; what they start from is looked for"
        if (done := self._reached - self._first) < self._replays:
            return f"the stage workers apply the commits since: {done} of {self._replays}"
        return "the stage workers take their first step"

    def ready(self, rank: int, ready: pb.Ready) -> Ready | None:
        parts = self._readies.setdefault(ready.round, {})
        parts[rank] = ready
        self._heard_at = self._clock()
        if len(parts) < self._speakers():
            return None
        del self._readies[ready.round]
        self._reached = max(self._reached, ready.round)
        digests = {state.stage: state.digest for part in parts.values() for state in part.states}
        losses = [part.evaluation_loss for part in parts.values() if part.evaluated]
        return Ready(ready.round, digests, losses[0] if losses else None, ready.applied_at_step)

    def phase(self, rank: int, boundary: pb.Boundary) -> Phase | None:
        parts = self._phases.setdefault(boundary.round, {})
        parts[rank] = boundary
        if len(parts) < self._speakers():
            return None
        del self._phases[boundary.round]
        payloads = sorted((p for part in parts.values() for p in part.payloads), key=lambda payload: int(payload.stage))
        self.progress.tokens += boundary.tokens
        self.progress.inner_steps[boundary.round] = boundary.inner_steps
        marks = [([payload.stage for payload in part.payloads], part.marks) for part in parts.values()]
        return Phase(boundary, payloads, marks)

    def rechecked(self, rank: int, result: pb.Rechecked) -> dict[int, bytes] | None:
        """Digests by stage of the replayed state."""
        parts = self._rechecks.setdefault(result.round, {})
        parts[rank] = result
        if len(parts) < self._speakers():
            return None
        del self._rechecks[result.round]
        return {state.stage: state.digest for part in parts.values() for state in part.states}
