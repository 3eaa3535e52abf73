"""Bias: a steady pull in one direction over rounds, which single-round scores miss.

If all clusters train on samples drawn alike, a contribution differs from the others by chance: differently in each
round. A cluster that pulls the model somewhere does so steadily, or its pulls cancel. A mean less 1.5 standard
deviations (ALIE, Baruch et al. 2019) lowers the loss and points the way of the others, and its difference is the same
in every round. So a voter adds up each author's differences, round by round, and finds harm if that sum grows much
faster than the median's. Without memory no rule stops such an attack (Karimireddy et al. 2021, "Learning from History
for Byzantine Robust Optimization").

A contribution is compared by its sketch: sums of its coordinates with random signs that only the voter knows, which
nearly preserve lengths and cosines (a count sketch, Charikar et al. 2002). First the unapplied part of the author's
last contribution is subtracted: the author sends it again. The difference is what remains without the parts along the
mean of the others and along the means of the last rounds. So a cluster that only goes farther or less far on the common
way does not differ. Each round's difference has length 1. A pull that is small relative to chance is not detected, nor
an occasional one.
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
"""Weight of earlier rounds, for each new one."""
LEAST_ROUNDS = 8
"""Rounds before an author is judged."""
MEANS = 8
"""Rounds whose means define the common way."""
LITTLE = 0.1
"""Smallest unapplied part that is visible in the next contribution."""
GROWN = 1.15
"""Growth of a contribution that follows an uncounted one and contains it again: root 2 once, root 3/2 twice. After that
its author is off the roster."""
STEADY = 2.25
"""Ratio to the median author's strength from which an author pulls steadily; docs/results/poisoning.md has its effect."""
NOISE = 1e-9
"""Rounding error, relative to a length."""
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bias:
    """Bias of one author, as one voter knows it."""

    total: Vector
    """(SKETCH,): differences of its rounds, added up with DECAY."""
    rounds: int

    @property
    def strength(self) -> float:
        """Return 1 if rounds have nothing in common, up to (1 + DECAY) / (1 - DECAY) if they differ in the same way."""
        by_chance = (1 - DECAY ** (2 * self.rounds)) / (1 - DECAY**2)
        return float(self.total @ self.total) / by_chance


@dataclass(frozen=True)
class Memory:
    """Memory of one voter."""

    authors: Mapping[str, Bias] = field(default_factory=dict)
    """Authors, the last measured one last."""
    means: tuple[Vector, ...] = ()
    """(SKETCH,) each: of the contributions of a round, the newest last."""
    last: Mapping[str, Vector] = field(default_factory=dict)
    """Sketches of the last round."""
    cut: Mapping[str, float] = field(default_factory=dict)
    """Unapplied fraction of each author that the last commit counts. Of all other authors everything is unapplied."""


NOTHING = Bias(np.zeros(SKETCH), 0)


def after(manifest: Manifest, memory: Memory, me: str, scores: Mapping[str, Score]) -> Memory:
    """Add a voter's measurements of a round, by author; it has little effect with fewer than two others. If there are too
    many authors, the one measured longest ago is forgotten. `closed` adds the effect of commits."""
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
    """Add the effect of the round's commit. `cut`: the unapplied fraction of each counted author."""
    return replace(memory, cut=cut)


def biased(manifest: Manifest, memory: Memory, me: str, scores: Mapping[str, Score]) -> frozenset[str]:
    """Return the measured authors that pull steadily: at least STEADY times as strongly as the median of them and this
    voter; of two the stronger is the median. Empty with fewer than three known long enough: of two, either may differ."""
    known = memory.authors
    long = {author for author in (me, *scores) if author in known and known[author].rounds >= LEAST_ROUNDS}
    if len(long) < 3 or manifest.data.private:
        return frozenset()
    median = sorted(known[author].strength for author in long)[len(long) // 2]
    return frozenset(author for author in long - {me} if known[author].strength >= STEADY * median)


def _sketches(me: str, scores: Mapping[str, Score]) -> dict[str, Vector]:
    """Return the comparable sketches, by author; each score has the same sketch of our contribution."""
    own: Sequence[float] = next((score.own for score in scores.values()), ())
    told = {me: own, **{author: score.sketch for author, score in scores.items()}}
    arrays = {author: np.asarray(each, dtype=np.float64) for author, each in told.items() if len(each) == SKETCH}
    return {author: each for author, each in arrays.items() if math.isfinite(np.linalg.norm(each)) and each.any()}


def _new(memory: Memory, author: str, sketch: Vector) -> Vector | None:
    """Return the new part of a contribution; None if it is unknown."""
    cut, last = memory.cut.get(author), memory.last.get(author)
    if last is None:
        return sketch if cut is not None and cut <= LITTLE else None
    if cut is None:  # everything was unapplied, and repeating it makes it longer
        cut = float(np.linalg.norm(sketch) >= GROWN * np.linalg.norm(last))
    return sketch - cut * last


def _bounded(sketches: Mapping[str, Vector]) -> dict[str, Vector]:
    """Return the sketches, none longer than the median (of two the longer): a loud author does not define the common way."""
    length = {author: size for author, each in sketches.items() if (size := float(np.linalg.norm(each)))}
    median = sorted(length.values())[len(length) // 2] if length else 0.0
    return {author: sketches[author] * min(1.0, median / size) for author, size in length.items()}


def _differences(told: Mapping[str, Vector], usual: Collection[str], means: Sequence[Vector]) -> dict[str, Vector]:
    """Return the differences, of length 1, from the mean of the other `usual` authors; none for authors that do not
    differ."""
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
