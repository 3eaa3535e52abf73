"""Clusters in one process, one after the other, exchanging through function calls: the product's trainer, codecs and outer loop
without its network and clock. What a network would do is said in steps: when a commit arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dilocox.node.data_folders import Folders
from dilocox.node.training.data import Dataset, load_dataset
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.adaptive import next_keep
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["Lab", "Point", "process_group_of_one"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Point:
    """One applied commit."""

    steps: int
    """Inner steps that a full-speed cluster has done."""
    tokens: int
    """Read by all clusters."""
    wire_bytes: int
    """Sent by one cluster since the start."""
    loss: float
    """Held-out loss of the committed model, nats per token."""
    error: float
    """Mean relative error of the payloads in the commit."""
    keep: int = 0
    """What their codec kept: rank or k."""


def process_group_of_one() -> None:
    """What a pipeline of one worker needs, in a process that trains on one thread."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]


Arrival = Callable[[int, int], int]
"""(payload bytes, inner steps of the round) -> the step of the next phase at which the commit arrives."""


@dataclass
class Lab:
    run: Manifest
    clusters: int
    arrive_at: int | Arrival = 0
    """Inner step of the next phase at which a commit arrives; means nothing where a round waits for its commit."""
    speeds: Sequence[float] = ()
    """Relative speed of each cluster, the fastest 1: a slower one takes that share of the steps. Default: all equal."""
    device: torch.device = CPU
    evaluate_every: int = 1
    data: Folders = field(default_factory=dict)
    """Where the run's data folders lie here."""
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = range(self.run.model.stages)
        self.trainers = [Trainer(self.run, stages, 0, 1, self.device) for _ in range(self.clusters)]
        for trainer in self.trainers:
            trainer.load_initial()
        self.dataset: Dataset = load_dataset(self.run, self.data)
        self.position = self.steps = self.wire_bytes = self.commits = 0
        self.in_flight: list[list[bytes]] | None = None
        self.phase_tokens = [0] * self.clusters
        self.weights: list[int] = []
        self.errors: list[float] = []
        self.keep = self.run.compression.keep
        self.measured: list[pb.Counted] = []

    @property
    def losses(self) -> list[float]:
        """Held-out loss of the committed model after each evaluated commit."""
        return [point.loss for point in self.points]

    def train(self, steps: int) -> None:
        batch = self.run.training.batch_size
        for _ in range(steps):
            self.steps += 1
            for index, trainer in enumerate(self.trainers):
                speed = self.speeds[index] if self.speeds else 1.0
                if int(self.steps * speed) == int((self.steps - 1) * speed):
                    continue  # a slower cluster is still at its last step
                positions = list(range(self.position, self.position + batch))
                self.position += batch
                self.phase_tokens[index] += batch * self.run.model.sequence_length
                trainer.step(*self.dataset.batch(positions))

    def end_phase(self) -> None:
        for trainer in self.trainers:
            trainer.end_phase()
        self.weights, self.phase_tokens = self.phase_tokens, [0] * self.clusters

    def encode(self) -> None:
        encoded = [[state.encode(None, self.keep) for state in trainer.states] for trainer in self.trainers]
        self.measured = [
            pb.Counted(payloads=[pb.StagePayload(effective_rank=s.effective_rank, error=s.error) for s in stages])
            for stages in encoded
        ]
        self.in_flight = [[stage.raw for stage in stages] for stages in encoded]
        self.errors = [stage.error for stages in encoded for stage in stages]
        self.wire_bytes += self.payload_bytes

    @property
    def payload_bytes(self) -> int:
        """Of the largest cluster's payloads in flight."""
        return max(sum(len(raw) for raw in stages) for stages in self.in_flight or [[]])

    def commit(self, keep_lead: bool = True) -> None:
        """Apply the payloads in flight everywhere; decide what the codec keeps next."""
        assert self.in_flight is not None
        for trainer in self.trainers:
            for index, state in enumerate(trainer.states):
                payloads = [memoryview(payload[index]) for payload in self.in_flight]
                state.apply(payloads, self.weights, self.commits + 1, self.keep)
            trainer.rebase(keep_lead)
        self.in_flight = None
        self.commits += 1
        keep, self.keep = self.keep, next_keep(self.run, self.keep, self.measured)
        if self.commits % self.evaluate_every == 0:
            self.measure(keep)

    def measure(self, keep: int = 0) -> None:
        loss = self.trainers[0].evaluate_committed(self.dataset)
        tokens = self.position * self.run.model.sequence_length
        error = sum(self.errors) / max(1, len(self.errors))
        self.points.append(Point(self.steps, tokens, self.wire_bytes, loss, error, keep))

    def rounds(self) -> "Lab":
        """The whole run under the manifest's overlap rules."""
        for number in range(1, self.run.rounds.count + 1):
            steps = self.run.inner_steps(number)
            if self.run.overlap(number - 1) == "rebase" and self.in_flight is not None:
                arrival = self.arrive_at if isinstance(self.arrive_at, int) else self.arrive_at(self.payload_bytes, steps)
                self.train(arrival)
                self.commit()
                self.train(max(0, steps - arrival))
            else:
                self.train(steps)
            self.end_phase()
            if self.run.overlap(number) == "delayed":
                if self.in_flight is not None:
                    self.commit(keep_lead=False)
                for trainer in self.trainers:
                    trainer.rebase(keep_lead=False)
            self.encode()
            if self.run.overlap(number) == "none":
                self.commit()
        if self.in_flight is not None:
            self.commit()
        if not self.points or self.points[-1].steps < self.steps or self.commits % self.evaluate_every:
            self.measure()
        return self

    def state(self) -> torch.Tensor:
        return torch.cat([state.committed.flatten() for state in self.trainers[0].states])
