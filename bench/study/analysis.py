"""What the runs of a cell say: losses with intervals, gaps to the reference with the same inner optimizer, and who won.

Runs of two arms with the same seed begin alike and read the same samples: what one ends above the other is taken seed by seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.study.design import ARMS, PARTS, REFERENCES, Cell, Part
from bench.study.search import Budget, Known, Tuned, finals, next_trials, tuned
from bench.study.trial import Found
from bench.texts import Text

__all__ = ["T95", "Row", "above", "interval", "rows", "winner"]

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for a two-sided 95% interval of so many runs."""


@dataclass(frozen=True)
class Row:
    """An arm in a cell."""

    arm: str
    tuned: Tuned
    runs: Sequence[Found]
    gap: float | None = None
    """Over the reference with the same inner optimizer, as a share of its loss."""
    gap_half_width: float | None = None
    behind: float | None = None
    """Over the arm with rounds that ended lowest, as a share of its loss; None of what has none."""
    behind_half_width: float | None = None
    parts: Mapping[Part, float] = field(default_factory=dict)
    """Of the gap, as far as they were measured; `""`: commits that come late."""

    @property
    def loss(self) -> float:
        return statistics.fmean(run.test for run in self.runs)

    @property
    def half_width(self) -> float:
        return interval([run.test for run in self.runs])


def interval(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean; not finite for one value, of which nothing is known."""
    if len(values) < 2:
        return math.inf
    return T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def above(runs: Sequence[Found], others: Sequence[Found]) -> tuple[float, float]:
    """By how much the first end above the others, as a share of their loss, and half of the 95% interval, seed by seed."""
    mean = statistics.fmean(run.test for run in runs) / statistics.fmean(run.test for run in others) - 1
    return mean, interval([run.test / other.test - 1 for run, other in zip(runs, others, strict=True)])


def rows(cell: Cell, arms: Sequence[str], text: Text, budget: Budget, known: Known) -> list[Row]:
    """Of the arms that are finished, the best loss first; gaps where their references are."""
    looked_at = {*arms, *(REFERENCES[ARMS[arm].inner] for arm in arms)}
    finished = {
        arm: _row(cell, arm, text, budget, known)
        for arm in sorted(looked_at)
        if not next_trials(cell, arm, text, budget, known)
    }
    found = []
    for arm, row in finished.items():
        if arm not in arms:
            continue
        reference = finished.get(REFERENCES[ARMS[arm].inner])
        gap, width = above(row.runs, reference.runs) if reference is not None else (None, None)
        losses = _losses_of_parts(cell, arm, text, budget, known) if reference is not None else []
        before = [reference.loss, *losses[:-1]] if reference is not None else []
        parts = {part: (loss - less) / before[0] for part, loss, less in zip(PARTS, losses, before, strict=False)}
        found.append(Row(arm, row.tuned, row.runs, gap, width, parts=parts))
    return _held_against_the_lowest(sorted(found, key=lambda row: row.loss))


def _held_against_the_lowest(found: Sequence[Row]) -> list[Row]:
    first = winner(found)
    if first is None:
        return list(found)
    behind = [above(row.runs, first.runs) if ARMS[row.arm].has_rounds else (None, None) for row in found]
    return [replace(row, behind=by, behind_half_width=width) for row, (by, width) in zip(found, behind, strict=True)]


def _losses_of_parts(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[float]:
    """In the order of PARTS, up to the first that was not run yet; empty where nothing but the whole arm was."""
    if not ARMS[arm].hides:
        return []
    losses = []
    for part in PARTS:
        runs = [known(trial) for trial in finals(cell, arm, text, budget, known, part)]
        if None in runs:
            break
        losses.append(statistics.fmean(run.test for run in runs if run is not None))
    return losses


def _row(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> Row:
    best = tuned(cell, arm, text, budget, known)
    runs = [known(trial) for trial in finals(cell, arm, text, budget, known)]
    return Row(arm, best, [run for run in runs if run is not None])


def winner(found: Sequence[Row]) -> Row | None:
    """Of the arms that have rounds."""
    return next((row for row in found if ARMS[row.arm].has_rounds), None)
