"""Scores, the worker's side: candidates are made in the background; all workers measure the loss at one inner step.

A candidate is Θ with one contribution applied alone, without earlier momentum: lr * (1 + momentum) of it. Of our own
contribution only the direction is stored, to detect one that points away from it. Of both there is a sketch, on
request: it shows the daemon what a contribution has in common with its author's earlier ones (the bias check).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dilocox.node.outer.state import StageState
from dilocox.node.training.model.data import Dataset
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.protocol.checks.bias_rules import SKETCH
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.errors import DilocoxError
from dilocox.protocol.norms import clip_factor
from dilocox.protocol.pb import worker_pb2 as pb

__all__ = ["TILE", "Candidate", "Scores", "Sketch", "make_candidate", "measure"]

log = logging.getLogger(__name__)

Payload = Callable[[bytes], memoryview]
DOT_ELEMENTS = 1 << 22
"""Elements at a time, in float64."""
TILE = 1 << 20
"""Period of a sketch's signs; a multiple of SKETCH."""


@dataclass(frozen=True)
class Own:
    """Contribution of this cluster: the same for all candidates of a round."""

    steps: list[Tensor]
    """Flat, by state of this worker."""
    sketch: Tensor
    """Sketch over this worker's stages: (SKETCH,) float64, or (0,)."""


@dataclass(frozen=True)
class Candidate:
    parameters: list[Tensor]
    """Flat, by state of this worker."""
    products: tuple[float, float, float]
    """Inner products over this worker's stages: its step with ours, with itself, and ours with itself."""
    sketch: Tensor
    """Sketch of its step without clips; see `Own.sketch`."""
    own: Own


class Sketch:
    """Sketch of the steps of one stage, chunk by chunk in order; each but the last has a multiple of SKETCH elements."""

    def __init__(self, signs: int, stage: int) -> None:
        """`signs`: what they are drawn from; 0: nothing is wanted."""
        self.total = torch.zeros(SKETCH if signs else 0, dtype=torch.float64)
        self._random = np.random.Generator(np.random.Philox(key=[signs, stage]))
        self._signs = signs
        self._seen, self._shift, self._flip = 0, 0, 1

    def add(self, chunk: Tensor) -> None:
        """`chunk`: float64, on any device."""
        if not len(self.total):
            return
        tile = _tile(self._signs, chunk.device)
        while len(chunk):
            place = self._seen % TILE
            if not place:
                self._shift, flip = (int(drawn) for drawn in self._random.integers((TILE, 2)))  # each period has other signs
                self._flip = 1 - 2 * flip
            part, chunk = chunk[: TILE - place], chunk[TILE - place :]
            signs = tile[self._shift + place :][: len(part)]
            self.total += self._flip * pad(part * signs, (0, -len(part) % SKETCH)).view(-1, SKETCH).sum(0).cpu()
            self._seen += len(part)


@lru_cache(maxsize=1)
def _tile(signs: int, device: torch.device) -> Tensor:
    """Those of a tile, twice: a stretch of them may begin anywhere."""
    random = np.random.Generator(np.random.Philox(key=[signs, 0]))
    drawn = torch.from_numpy(random.integers(0, 2, TILE, dtype=np.int8)).to(device, torch.float32).mul_(2).sub_(1)
    return torch.cat([drawn, drawn])


def alone(state: StageState, asked: pb.Score, payloads: Sequence[bytes], clip: int, rank_or_k: int, read: Payload) -> Tensor:
    """Θ of a stage, flat, with this contribution alone applied to it."""
    copy = StageState(state.manifest, state.stage, state.specs, state.passage)
    copy.parameters.copy_(state.parameters)
    Commit(asked.round, rank_or_k, [Take("", 1, payloads, clip)]).apply_to(copy, read)
    return copy.parameters.clone()  # without its momentum


def make_candidate(trainer: Trainer, asked: pb.Score, rank_or_k: int, read: Payload, own: Own | None = None) -> Candidate:
    """Make a candidate, in the background. `rank_or_k`: of the round's codec; `own`: from an earlier candidate of the
    round."""
    own = own or _own(trainer, asked, rank_or_k, read)
    parameters, products, sketch = [], [0.0, 0.0, 0.0], torch.zeros_like(own.sketch)
    for state, mine in zip(trainer.states, own.steps, strict=True):
        theirs, of_stage = alone(state, asked, asked.payloads, asked.clip, rank_or_k, read), Sketch(asked.signs, state.stage)
        for theta, part, other in zip(*(flat.split(DOT_ELEMENTS) for flat in (state.parameters, mine, theirs)), strict=True):
            m, step = part.double(), other.double() - theta.double()
            for index, (left, right) in enumerate(((step, m), (step, step), (m, m))):
                products[index] += float(torch.dot(left, right))
            of_stage.add(step)
        sketch += of_stage.total / clip_factor(asked.clip)
        parameters.append(theirs)
    return Candidate(parameters, (products[0], products[1], products[2]), sketch, own)


def _own(trainer: Trainer, asked: pb.Score, rank_or_k: int, read: Payload) -> Own:
    steps, sketch = [], torch.zeros(SKETCH if asked.signs else 0, dtype=torch.float64)
    for state in trainer.states:
        of_stage = Sketch(asked.signs, state.stage)
        step = alone(state, asked, asked.own, 0, rank_or_k, read).sub_(state.parameters)
        for part in step.split(DOT_ELEMENTS):
            of_stage.add(part.double())
        steps.append(step)
        sketch += of_stage.total
    return Own(steps, sketch)


def measure(trainer: Trainer, candidate: Candidate, before: float | None, samples: tuple[Tensor, Tensor]) -> Score:
    """All workers call it at the same step. `before`: the loss of Θ on these samples, where it is known."""
    if before is None:
        with trainer.weights(trainer.committed):
            before = trainer.evaluate(*samples)
    with trainer.weights(candidate.parameters):
        after = trainer.evaluate(*samples)
    sketches = torch.stack([candidate.sketch, candidate.own.sketch])
    product, theirs, ours, *told = trainer.mesh.all_sum([*candidate.products, *sketches.flatten().tolist()])
    cosine = product / (theirs * ours) ** 0.5 if theirs and ours else 0.0
    half = len(told) // 2
    return Score(before, after, cosine, tuple(told[:half]), tuple(told[half:]))


class Scores:
    """Queue of scores in the open round, in the order of requests, which is the same for every worker."""

    def __init__(
        self, trainer: Trainer, dataset: Dataset, submit: Callable[[Callable[[], Candidate]], Future[Candidate]]
    ) -> None:
        """`submit`: to what runs beside training, and no phase waits for."""
        self._trainer, self._dataset, self._submit = trainer, dataset, submit
        self._asked: deque[pb.Score] = deque()
        self._making: Future[Candidate] | None = None
        self._before: float | None = None
        """Loss of Θ on the round's samples, once it was measured."""
        self._own: Own | None = None
        """Contribution of this cluster, once the round has a candidate."""
        self._began, self._spent = time.monotonic(), 0.0

    def ask(self, asked: pb.Score) -> None:
        self._asked.append(asked)

    def close(self) -> None:
        """The round is closed: what was not scored is not needed any more."""
        self._asked.clear()
        self._making, self._before, self._own = None, None, None
        self._began, self._spent = time.monotonic(), 0.0

    def prepare(self, rank_or_k: int, read: Payload) -> None:
        """Have the next candidate made."""
        if self._asked and self._making is None:
            asked, own = self._asked[0], self._own
            self._making = self._submit(lambda: make_candidate(self._trainer, asked, rank_or_k, read, own))

    @property
    def samples_here(self) -> bool:
        """Whether the samples are, on which the next one is measured."""
        return bool(self._asked) and self._dataset.here(list(self._asked[0].positions))

    @property
    def ready(self) -> bool:
        """Return whether the next one can be measured here; the first worker's clock decides whether there is time."""
        if self._making is None or not self._making.done() or not self.samples_here:
            return False
        elapsed = time.monotonic() - self._began
        return self._trainer.mesh.rank > 0 or self._spent <= self._trainer.manifest.scoring.share * elapsed

    def measure(self) -> pb.Scored | None:
        """The next one, with all workers; None where one of them could not make the candidate: that is no opinion."""
        assert self._making is not None
        began, asked, candidate = time.monotonic(), self._asked.popleft(), _result(self._making)
        self._making = None
        lacking = self._trainer.mesh.all_sum([float(candidate is None)])[0]
        if candidate is None or lacking:
            return None
        score = measure(self._trainer, candidate, self._before, self._dataset.batch(list(asked.positions)))
        self._before, self._own = score.before, candidate.own
        self._spent += time.monotonic() - began
        return pb.Scored(
            round=asked.round,
            contribution=asked.contribution,
            before=score.before,
            after=score.after,
            cosine=score.cosine,
            sketch=score.sketch,
            own=score.own,
        )


def _result(making: Future[Candidate]) -> Candidate | None:
    """Return the candidate; None if a payload is missing: its stage has moved to this host, or its round closed."""
    try:
        return making.result()
    except (OSError, DilocoxError) as error:
        log.warning("a contribution cannot be scored: %s", error)
        return None
