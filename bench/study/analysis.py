"""What the runs of a cell say: losses with intervals, gaps to the reference with the same inner optimizer, and who won."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.study.design import ARMS, REFERENCES, Cell, Trial
from bench.study.search import Budget, Known, Tuned, next_trials, tuned
from bench.study.trial import Found
from bench.texts import Text

__all__ = ["T95", "Row", "interval", "rows", "winner"]

T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95% interval of so many runs."""


@dataclass(frozen=True)
class Row:
    """An arm in a cell."""

    arm: str
    tuned: Tuned
    runs: Sequence[Found]
    gap: float | None = None
    """Over the reference with the same inner optimizer, as a share of its loss."""

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


def rows(cell: Cell, arms: Sequence[str], text: Text, budget: Budget, known: Known) -> list[Row]:
    """Of the arms that are finished, the best loss first; gaps where their references are."""
    finished = {arm: _row(cell, arm, text, budget, known) for arm in arms if not next_trials(cell, arm, text, budget, known)}
    found = []
    for arm, row in finished.items():
        reference = finished.get(REFERENCES[ARMS[arm].inner])
        gap = row.loss / reference.loss - 1 if reference is not None else None
        found.append(Row(arm, row.tuned, row.runs, gap))
    return sorted(found, key=lambda row: row.loss)


def _row(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> Row:
    best = tuned(cell, arm, text, budget, known)
    runs = [known(Trial(cell, arm, best.choice, seed, text)) for seed in range(budget.seeds)]
    return Row(arm, best, [run for run in runs if run is not None])


def winner(found: Sequence[Row]) -> Row | None:
    """Of the arms that have rounds."""
    return next((row for row in found if not ARMS[row.arm].is_reference), None)
