"""A worker's part in scoring: candidates are made beside training, the loss is measured by all workers at one inner step.

A candidate is Θ with one contribution alone applied to it, without earlier momentum: lr * (1 + momentum) of it. Of our own
contribution only the direction is kept, to see whether another's points away from it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.node.outer.state import StageState
from dilocox.node.training.data import Dataset
from dilocox.node.training.trainer import Commit, Take, Trainer
from dilocox.protocol.errors import DilocoxError
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.scoring import Score

__all__ = ["Candidate", "Scores", "make_candidate", "measure"]

log = logging.getLogger(__name__)

Payload = Callable[[bytes], memoryview]
DOT_ELEMENTS = 1 << 22
"""At a time, in float64."""


@dataclass(frozen=True)
class Candidate:
    parameters: list[Tensor]
    """Flat, by state of this worker."""
    products: tuple[float, float, float]
    """Over this worker's stages: of its step and ours, of its with itself, of ours with itself."""
    ours: list[Tensor]
    """Our own step, flat by state: the same for all candidates of a round."""


def alone(state: StageState, asked: pb.Score, payloads: Sequence[bytes], clip: int, rank_or_k: int, read: Payload) -> Tensor:
    """Θ of a stage, flat, with this contribution alone applied to it."""
    copy = StageState(state.manifest, state.stage, state.specs, state.passage)
    copy.parameters.copy_(state.parameters)
    Commit(asked.round, rank_or_k, [Take("", 1, payloads, clip)]).apply_to(copy, read)
    return copy.parameters.clone()  # without the momentum that lies beside it


def make_candidate(
    trainer: Trainer, asked: pb.Score, rank_or_k: int, read: Payload, ours: list[Tensor] | None = None
) -> Candidate:
    """In the background. `rank_or_k`: of the round's codec; `ours`: our own step, where an earlier candidate has it."""
    if ours is None:
        ours = [alone(s, asked, asked.own, 0, rank_or_k, read).sub_(s.parameters) for s in trainer.states]
    parameters, products = [], [0.0, 0.0, 0.0]
    for state, own in zip(trainer.states, ours, strict=True):
        theirs = alone(state, asked, asked.payloads, asked.clip, rank_or_k, read)
        for theta, mine, other in zip(*(flat.split(DOT_ELEMENTS) for flat in (state.parameters, own, theirs)), strict=True):
            m, step = mine.double(), other.double() - theta.double()
            for index, (left, right) in enumerate(((step, m), (step, step), (m, m))):
                products[index] += float(torch.dot(left, right))
        parameters.append(theirs)
    return Candidate(parameters, (products[0], products[1], products[2]), ours)


def measure(trainer: Trainer, candidate: Candidate, before: float | None, samples: tuple[Tensor, Tensor]) -> Score:
    """All workers call it at the same step. `before`: the loss of Θ on these samples, where it is known."""
    if before is None:
        with trainer.weights(trainer.committed):
            before = trainer.evaluate(*samples)
    with trainer.weights(candidate.parameters):
        after = trainer.evaluate(*samples)
    product, theirs, ours = trainer.mesh.all_sum(list(candidate.products))
    return Score(before, after, product / (theirs * ours) ** 0.5 if theirs and ours else 0.0)


class Scores:
    """What is to be scored in the open round, one after the other, in the order in which every worker was asked."""

    def __init__(
        self, trainer: Trainer, dataset: Dataset, submit: Callable[[Callable[[], Candidate]], Future[Candidate]]
    ) -> None:
        """`submit`: to what runs beside training, and no phase waits for."""
        self._trainer, self._dataset, self._submit = trainer, dataset, submit
        self._asked: deque[pb.Score] = deque()
        self._making: Future[Candidate] | None = None
        self._before: float | None = None
        """Loss of Θ on the round's samples, once it was measured."""
        self._ours: list[Tensor] | None = None
        """Our step of the round, once a candidate was made."""
        self._began, self._spent = time.monotonic(), 0.0

    def ask(self, asked: pb.Score) -> None:
        self._asked.append(asked)

    def close(self) -> None:
        """The round is closed: what was not scored is not needed any more."""
        self._asked.clear()
        self._making, self._before, self._ours = None, None, None
        self._began, self._spent = time.monotonic(), 0.0

    def prepare(self, rank_or_k: int, read: Payload) -> None:
        """Have the next candidate made."""
        if self._asked and self._making is None:
            asked, ours = self._asked[0], self._ours
            self._making = self._submit(lambda: make_candidate(self._trainer, asked, rank_or_k, read, ours))

    @property
    def samples_here(self) -> bool:
        """Whether the samples are, on which the next one is measured."""
        return bool(self._asked) and self._dataset.here(list(self._asked[0].positions))

    @property
    def ready(self) -> bool:
        """Whether the next one can be measured here; the first worker's clock says whether there is time for it."""
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
        self._before, self._ours = score.before, candidate.ours
        self._spent += time.monotonic() - began
        return pb.Scored(
            round=asked.round, contribution=asked.contribution, before=score.before, after=score.after, cosine=score.cosine
        )


def _result(making: Future[Candidate]) -> Candidate | None:
    """None where a payload is not here: its stage has just moved to this box, or its round was closed meanwhile."""
    try:
        return making.result()
    except (OSError, DilocoxError) as error:
        log.warning("a contribution cannot be scored: %s", error)
        return None
