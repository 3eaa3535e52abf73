"""Analysis of a cell's runs: losses with intervals, gaps to the reference with the same inner optimizer, and the winner.

Runs of two arms with the same seed have the same start and read the same samples. So the difference of their losses is
taken seed by seed.
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
"""Student's t for a two-sided 95% interval, by the number of runs."""


@dataclass(frozen=True)
class Row:
    """An arm in a cell."""

    arm: str
    tuned: Tuned
    runs: Sequence[Found]
    gap: float | None = None
    """Gap to the reference with the same inner optimizer, as a share of its loss."""
    gap_half_width: float | None = None
    behind: float | None = None
    """Gap to the arm with rounds that ended lowest, as a share of its loss; None without such an arm."""
    behind_half_width: float | None = None
    parts: Mapping[Part, float] = field(default_factory=dict)
    """Measured parts of the gap; `""`: late commits."""

    @property
    def loss(self) -> float:
        return statistics.fmean(run.test for run in self.runs)

    @property
    def half_width(self) -> float:
        return interval([run.test for run in self.runs])


def interval(values: Sequence[float]) -> float:
    """Return half of the 95% interval of the mean; not finite for one value, which has no interval."""
    if len(values) < 2:
        return math.inf
    return T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def above(runs: Sequence[Found], others: Sequence[Found]) -> tuple[float, float]:
    """Return the mean excess of the first runs over the others, as a share of their loss, and half of the 95% interval,
    seed by seed."""
    mean = statistics.fmean(run.test for run in runs) / statistics.fmean(run.test for run in others) - 1
    return mean, interval([run.test / other.test - 1 for run, other in zip(runs, others, strict=True)])


def rows(cell: Cell, arms: Sequence[str], text: Text, budget: Budget, known: Known) -> list[Row]:
    """Return rows of the finished arms, the best loss first; gaps if their references are finished."""
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
    """Return the losses in the order of PARTS, up to the first missing run; empty if only the whole arm was run."""
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
    """Return the best arm with rounds."""
    return next((row for row in found if ARMS[row.arm].has_rounds), None)
