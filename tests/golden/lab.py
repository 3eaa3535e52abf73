"""Clusters in one process, exchanging through function calls: the product's trainer, codec and outer loop without its network."""

from dataclasses import dataclass, field

import torch

from node.training.data import Dataset, load_dataset
from node.training.trainer import Trainer
from protocol.manifest import Manifest

CPU = torch.device("cpu")


@dataclass
class Lab:
    run: Manifest
    clusters: int
    arrive_at: int = 0
    """Inner step of the next phase at which a commit arrives; for overlap none it has no meaning."""
    losses: list[float] = field(default_factory=list)
    """Held-out loss of the committed model after each applied commit."""

    def __post_init__(self) -> None:
        stages = range(self.run.model.stages)
        self.trainers = [Trainer(self.run, stages, 0, 1, CPU) for _ in range(self.clusters)]
        for trainer in self.trainers:
            trainer.load_initial()
        self.dataset: Dataset = load_dataset(self.run)
        self.position = 0
        self.in_flight: list[list[bytes]] | None = None

    def train(self, steps: int) -> None:
        batch = self.run.training.batch_size
        for _ in range(steps):
            for trainer in self.trainers:
                positions = list(range(self.position, self.position + batch))
                self.position += batch
                trainer.step(*self.dataset.batch(positions))

    def end_phase(self) -> None:
        for trainer in self.trainers:
            trainer.end_phase()

    def encode(self) -> None:
        self.in_flight = [[state.encode(None).raw for state in trainer.states] for trainer in self.trainers]

    def commit(self, keep_lead: bool = True) -> None:
        assert self.in_flight is not None
        for trainer in self.trainers:
            for index, state in enumerate(trainer.states):
                payloads = [memoryview(payload[index]) for payload in self.in_flight]
                state.apply(payloads, [1] * len(payloads))
            trainer.rebase(keep_lead)
        self.in_flight = None
        self.losses.append(self.trainers[0].evaluate_committed(self.dataset))

    def rounds(self) -> "Lab":
        """The whole run under the manifest's overlap rule."""
        steps = self.run.rounds.inner_steps
        overlap = self.run.rounds.overlap
        for _ in range(self.run.rounds.count):
            if overlap == "rebase" and self.in_flight is not None:
                self.train(self.arrive_at)
                self.commit()
                self.train(steps - self.arrive_at)
            else:
                self.train(steps)
            self.end_phase()
            if overlap == "delayed":
                if self.in_flight is not None:
                    self.commit(keep_lead=False)
                for trainer in self.trainers:
                    trainer.rebase(keep_lead=False)
            self.encode()
            if overlap == "none":
                self.commit()
        if self.in_flight is not None:
            self.commit()
        return self

    def state(self) -> torch.Tensor:
        return torch.cat([state.committed.flatten() for state in self.trainers[0].states])
