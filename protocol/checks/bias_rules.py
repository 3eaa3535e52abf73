"""Who pulls the same way round after round, which no score of one round shows.

Where everybody trains on samples that were drawn alike, a contribution differs from the others by chance: another way in each
round. Who pulls the model somewhere does it steadily, or the pulls cancel. A mean less 1.5 standard deviations (ALIE, Baruch et al.
2019) lowers the loss and points the way of the others as honest work does, and what it differs by is the same for ever. So a voter
adds up what each author's contributions differ by, round by round, and finds harm where that grows much faster than the median's:
without memory no rule holds against such an attack (Karimireddy et al. 2021, "Learning from History for Byzantine Robust
Optimization").

A contribution is known by its sketch: sums of its coordinates with signs that the voter drew at random and tells nobody, which
keep lengths and cosines nearly (a count sketch, Charikar et al. 2002). What its author was owed of the one before, because that was
clipped or did not count, is taken away first: it says the same twice. It differs by what is left of it without what lies along the
mean of the others, and along the means of the last rounds: who only goes farther on the way of all, or less far, does not differ.
Each round's difference has length 1. A pull that is small beside what chance makes of a contribution is not seen, nor one that
comes now and then.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dilocox.protocol import limits
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.run.manifest import Manifest

__all__ = ["LEAST_ROUNDS", "SKETCH", "Bias", "Memory", "Vector", "after", "biased", "closed"]

SKETCH = 512
"""Numbers of a sketch: squared lengths within some 6% for two of three."""
DECAY = 0.9
"""Of what earlier rounds showed, with each new one."""
LEAST_ROUNDS = 8
"""Before these nobody is judged."""
MEANS = 8
"""Rounds whose means are the way of all."""
LITTLE = 0.1
"""Of a contribution: what is owed of it shows in the next one no more than chance does."""
GROWN = 1.15
"""Times the length of a contribution that did not count, which the next one has at least that says it again: root 2 once, root 3/2
twice. Then its author is off the roster."""
STEADY = 2.25
"""Times the median author's strength from which an author pulls steadily: docs/results/poisoning.md says what it catches."""
NOISE = 1e-9
"""Of a length: what rounding makes."""
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bias:
    """Of one author, as one voter knows it."""

    total: Vector
    """(SKETCH,): differences of its rounds, added up with DECAY."""
    rounds: int

    @property
    def strength(self) -> float:
        """1 where rounds have nothing in common, up to (1 + DECAY) / (1 - DECAY) where they differ the same way."""
        by_chance = (1 - DECAY ** (2 * self.rounds)) / (1 - DECAY**2)
        return float(self.total @ self.total) / by_chance


@dataclass(frozen=True)
class Memory:
    """What one voter knows of earlier rounds."""

    authors: Mapping[str, Bias] = field(default_factory=dict)
    """Who was measured last comes last."""
    means: tuple[Vector, ...] = ()
    """(SKETCH,) each: of the contributions of a round, the newest last."""
    last: Mapping[str, Vector] = field(default_factory=dict)
    """Sketches of the last round."""
    cut: Mapping[str, float] = field(default_factory=dict)
    """By whom the last commit counts: the share of what it said that it is owed, and says again. Who is not here is owed all."""


NOTHING = Bias(np.zeros(SKETCH), 0)


def after(manifest: Manifest, memory: Memory, me: str, scores: Mapping[str, Score]) -> Memory:
    """With what the voter `me` measured in a round, by author: little where that is less than two others. Who was measured longest
    ago is forgotten when they are too many. What commits make of it: `closed`."""
    said = _sketches(me, scores)
    told = _bounded({author: each for author, sketch in said.items() if (each := _new(memory, author, sketch)) is not None})
    if len(told) < 3:
        return replace(memory, last=said)
    usual = told.keys() - biased(manifest, memory, me, scores)
    found = {
        author: Bias(DECAY * was.total + difference, was.rounds + 1)
        for author, difference in _differences(told, usual, memory.means).items()
        for was in (memory.authors.get(author, NOTHING),)
    }
    others = {author: known for author, known in memory.authors.items() if author not in found}
    authors = dict([*others.items(), *found.items()][-limits.CLUSTERS :])
    mean = np.mean([told[author] for author in usual], axis=0)
    return Memory(authors, (*memory.means, mean)[-MEANS:], said)


def closed(memory: Memory, cut: Mapping[str, float]) -> Memory:
    """By the round's commit. `cut`: of whom it counts, the share of each that it cuts off."""
    return replace(memory, cut=cut)


def biased(manifest: Manifest, memory: Memory, me: str, scores: Mapping[str, Score]) -> frozenset[str]:
    """Of the authors that the voter `me` measured, who pulls steadily: STEADY times as strongly as the median of them and
    of us, or more; of two the stronger is the median. Nobody where fewer than three are known for long enough: of two nobody can
    tell which of them differs."""
    known = memory.authors
    long = {author for author in (me, *scores) if author in known and known[author].rounds >= LEAST_ROUNDS}
    if len(long) < 3 or manifest.data.private:
        return frozenset()
    median = sorted(known[author].strength for author in long)[len(long) // 2]
    return frozenset(author for author in long - {me} if known[author].strength >= STEADY * median)


def _sketches(me: str, scores: Mapping[str, Score]) -> dict[str, Vector]:
    """By author, of all that can be compared; each score has the same one of our own contribution."""
    own: Sequence[float] = next((score.own for score in scores.values()), ())
    told = {me: own, **{author: score.sketch for author, score in scores.items()}}
    arrays = {author: np.asarray(each, dtype=np.float64) for author, each in told.items() if len(each) == SKETCH}
    return {author: each for author, each in arrays.items() if math.isfinite(np.linalg.norm(each)) and each.any()}


def _new(memory: Memory, author: str, sketch: Vector) -> Vector | None:
    """What it does not say again; None where that is not known."""
    cut, last = memory.cut.get(author), memory.last.get(author)
    if last is None:
        return sketch if cut is not None and cut <= LITTLE else None
    if cut is None:  # it is owed all of it, and who says that again says more than before
        cut = float(np.linalg.norm(sketch) >= GROWN * np.linalg.norm(last))
    return sketch - cut * last


def _bounded(sketches: Mapping[str, Vector]) -> dict[str, Vector]:
    """None is longer than the median, of an even number the longer one of two: who is loud is not the way of all."""
    length = {author: size for author, each in sketches.items() if (size := float(np.linalg.norm(each)))}
    median = sorted(length.values())[len(length) // 2] if length else 0.0
    return {author: sketches[author] * min(1.0, median / size) for author, size in length.items()}


def _differences(told: Mapping[str, Vector], usual: Collection[str], means: Sequence[Vector]) -> dict[str, Vector]:
    """Of length 1, from the mean of those `usual` ones who are others; nothing of who does not differ."""
    together = np.sum([told[author] for author in usual], axis=0)
    found: dict[str, Vector] = {}
    for author, sketch in told.items():
        way = _basis([together - sketch if author in usual else together, *means])
        difference = sketch - way @ (way.T @ sketch)
        size = float(np.linalg.norm(difference))
        if size > NOISE * float(np.linalg.norm(sketch)):
            found[author] = difference / size
    return found


def _basis(vectors: Sequence[Vector]) -> Vector:
    """(SKETCH, directions), orthonormal: of all that they span."""
    rows = np.stack([vector / (float(np.linalg.norm(vector)) or 1.0) for vector in vectors])
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    return np.ascontiguousarray(directions[sizes > NOISE].T)
