"""Streaming DiLoCo (arXiv 2501.18512) on the product's outer state and codecs: the model in fragments, each exchanged at
its turn.

    fragments  layers in strides, as published; the embedding belongs to the first, the last norm and the head to the last
    a turn     every H steps for each fragment, H / fragments after the turn of the previous fragment; all at once at the end
    arrival    after the transfer, by the site's clock, one exchange after the other; at the latest at the fragment's next
               turn, for which clusters wait
    then       as published, the live fragment becomes a mean of itself and Θ; or (`mixed` is None) the product's rebase: Θ
               and the training since the turn
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bench.lab import CPU, Point
from bench.texts import stdlib
from dilocox.node.outer.state import EncodedStage, StageState, rebase, start_phase
from dilocox.node.planning.time_model import Method, Site, exchange_seconds
from dilocox.node.training.model.data import load_dataset
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import EMBEDDING, TensorSpec, stage_tensors

__all__ = ["Streaming", "fragment_of", "turns"]

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def fragment_of(spec: TensorSpec, fragments: int) -> int:
    layer = LAYER.match(spec.name)
    if layer is not None:
        return int(layer[1]) % fragments
    return 0 if spec.name == EMBEDDING else fragments - 1


def turns(step: int, inner_steps: int, fragments: int, total_steps: int) -> Iterator[int]:
    """Yield the fragments whose turn it is after `step` steps of a run, whose last turns coincide."""
    if step == total_steps:
        yield from range(fragments)
        return
    for fragment in range(fragments):
        last = fragments - 1 - fragment
        is_turn = (step + last * inner_steps // fragments) % inner_steps == 0
        if is_turn and step <= total_steps - inner_steps:
            yield fragment


@dataclass
class InFlight:
    payloads: Sequence[EncodedStage]
    arrives: float


@dataclass
class Streaming:
    run: Manifest
    clusters: int
    fragments: int
    mixed: float | None
    """Share of the live fragment that stays when Θ arrives."""
    site: Site | None = None
    """Site whose clock gives an exchange its time; None: it takes none."""
    evaluate_every: int = 1
    """Steps."""
    data: Path | None = None
    states_are: type[StageState] = StageState
    """Stage state of a cluster: the product's, or one that encodes as another method does."""
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dataset = load_dataset(self.run, self.data or stdlib().folder)
        self.trainers = [Trainer(self.run, Mesh(device=CPU)) for _ in range(self.clusters)]
        for trainer in self.trainers:
            trainer.load_initial()
        self.states = [self._fragments(trainer) for trainer in self.trainers]
        self.in_flight: dict[int, InFlight] = {}
        self.now = self.free = 0.0
        """Seconds: now, and the time at which the link is free again."""
        self.wire_bytes = 0
        self.error = 0.0

    def _fragments(self, trainer: Trainer) -> list[StageState]:
        """Return the fragments of one stage that contains the whole model."""
        specs = stage_tensors(self.run.model, 0)
        made = []
        for fragment in range(self.fragments):
            state = self.states_are(self.run, 0, [spec for spec in specs if fragment_of(spec, self.fragments) == fragment])
            begun = dict(self._named(trainer))
            for spec, view in state.views(state.parameters):
                view.copy_(begun[spec.name])
            state.anchor.copy_(state.parameters)
            made.append(state)
        return made

    def _named(self, trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
        (stage,) = (stage for _, stage in trainer.pairs())
        yield from zip((spec.name for spec in stage.specs), trainer.live(stage), strict=True)

    def live(self, cluster: int, fragment: int) -> list[Tensor]:
        """Return a cluster's live parameters of a fragment."""
        named = dict(self._named(self.trainers[cluster]))
        return [named[spec.name] for spec in self.states[cluster][fragment].specs]

    def train(self) -> Self:
        """Train for the run's total steps."""
        total, batch = self.run.training.total_steps, self.run.training.batch_size
        for step in range(1, total + 1):
            for cluster, trainer in enumerate(self.trainers):
                first = ((step - 1) * self.clusters + cluster) * batch
                trainer.step(*self.dataset.batch(list(range(first, first + batch))))
            self.now += self.site.step.seconds if self.site is not None else 1.0
            self.land()
            for fragment in turns(step, self.run.rounds.inner_steps, self.fragments, total):
                self._wait_for(fragment)
                self.send(fragment)
            self.land()
            if step % self.evaluate_every == 0 and step < total:
                self.measure(step)
        for fragment in sorted(self.in_flight, key=lambda each: self.in_flight[each].arrives):
            self._wait_for(fragment)
        self.measure(total)
        return self

    def _wait_for(self, fragment: int) -> None:
        if fragment in self.in_flight:
            self.now = max(self.now, self.in_flight[fragment].arrives)
            self.land()

    def land(self) -> None:
        """Apply all exchanges that have arrived."""
        for fragment in [each for each, moved in self.in_flight.items() if moved.arrives <= self.now]:
            payloads = [memoryview(sent.raw) for sent in self.in_flight.pop(fragment).payloads]
            for cluster, states in enumerate(self.states):
                self._take(states[fragment], self.live(cluster, fragment), payloads)

    def _take(self, state: StageState, live: Sequence[Tensor], payloads: Sequence[memoryview]) -> None:
        state.apply(payloads, [1] * len(payloads))
        if self.mixed is None:
            rebase(state, live)
            return
        for (_, theta), mine in zip(state.views(state.parameters), live, strict=True):
            mine.mul_(self.mixed).add_(theta, alpha=1 - self.mixed)
        state.anchor.copy_(state.parameters)

    def send(self, fragment: int) -> None:
        """Start the exchange of every cluster's training of the fragment since its last turn."""
        payloads = []
        for cluster, states in enumerate(self.states):
            start_phase(states[fragment], self.live(cluster, fragment))
            payloads.append(states[fragment].encode())
        size = max(len(sent.raw) for sent in payloads)
        self.wire_bytes += size
        self.error = sum(sent.error for sent in payloads) / len(payloads)
        self.free = max(self.free, self.now) + self._seconds(size)
        self.in_flight[fragment] = InFlight(payloads, self.free)

    def _seconds(self, size: int) -> float:
        h = self.run.rounds.inner_steps
        return exchange_seconds(self.site, Method("", size, h, h)) if self.site is not None else 0.0

    def evaluate(self) -> float:
        """Return the held-out loss of Θ."""
        trainer = self.trainers[0]
        thetas = {spec.name: view for state in self.states[0] for spec, view in state.views(state.parameters)}
        for state in trainer.states:
            for spec, view in state.views(state.parameters):
                view.copy_(thetas[spec.name])
        return self.evaluate_committed(trainer)

    def evaluate_committed(self, trainer: Trainer) -> float:
        return trainer.evaluate_committed(self.dataset)

    def measure(self, step: int) -> None:
        loss = self.evaluate()
        tokens = step * self.clusters * self.run.tokens_per_step
        self.points.append(Point(step, tokens, self.wire_bytes, loss, self.error, seconds=self.now if self.site else 0.0))

    def state(self) -> Tensor:
        """Return Θ, fragment after fragment."""
        return torch.cat([state.parameters for state in self.states[0]])
