"""Tuning of an arm in a cell: the next trials, computed from finished runs. This module runs nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.study.design import ARMS, PARTS, SEEDS, TRIALS, Cell, Choice, Inner, Part, Trial, drawn
from bench.study.trial import Found
from bench.texts import Text

__all__ = [
    "EDGE",
    "MOST_EDGES",
    "Budget",
    "Tuned",
    "beyond",
    "finals",
    "moved_on",
    "next_of",
    "next_parts",
    "next_trials",
    "tuned",
]

EDGE = math.sqrt(2)
"""Factor that moves a best rate further while it is the largest or smallest tried."""
MOST_EDGES = 8
"""Further draws of what others are held against, at most."""
MUON_RATES = ("learning_rate", "muon_learning_rate")
RATES: dict[Inner, Sequence[str]] = {"adamw": ("learning_rate",), "muon": MUON_RATES, "muon 0.9": MUON_RATES}

Known = Callable[[Trial], Found | None]


@dataclass(frozen=True)
class Budget:
    """Equal for all arms."""

    trials: int = TRIALS
    seeds: int = SEEDS


@dataclass(frozen=True)
class Tuned:
    choice: Choice
    tuning: float
    """Its loss on the tuning set, in the short run."""
    tried: int
    at_edge: bool
    """Whether a rate of it is the largest or smallest that was tried: then a better one may lie beyond."""


def shorts(cell: Cell, arm: str, text: Text, choices: Sequence[Choice]) -> list[Trial]:
    return [Trial(cell.shorter(), arm, choice, 0, text) for choice in choices]


def draws(cell: Cell, arm: str, text: Text, budget: Budget) -> list[Trial]:
    return shorts(cell, arm, text, [drawn(index, ARMS[arm].slow) for index in range(budget.trials)])


def next_trials(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Those that can be run now: draws, then further ones of a reference or of who is alone, then the best with every seed. None:
    it is finished."""
    trials = draws(cell, arm, text, budget)
    if missing := [trial for trial in trials if known(trial) is None]:
        return missing
    further = _further(cell, arm, text, budget, known)
    if missing := [trial for trial in further if known(trial) is None]:
        return missing
    return [trial for trial in finals(cell, arm, text, budget, known) if known(trial) is None]


def next_of(cell: Cell, arm: str, text: Text, budget: Budget, known: Known, parts: bool) -> list[Trial]:
    """`parts`: whether those come after the arm itself."""
    return next_trials(cell, arm, text, budget, known) or (next_parts(cell, arm, text, budget, known) if parts else [])


def next_parts(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Those that say what the gap of a finished arm is made of, and were not run yet."""
    if not ARMS[arm].hides:
        return []
    return [trial for part in PARTS for trial in finals(cell, arm, text, budget, known, part) if known(trial) is None]


def finals(cell: Cell, arm: str, text: Text, budget: Budget, known: Known, part: Part = "") -> list[Trial]:
    """Return the trials that report a tuned arm."""
    best = tuned(cell, arm, text, budget, known)
    return [Trial(cell, arm, best.choice, seed, text, part) for seed in range(budget.seeds)]


def tuned(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> Tuned:
    """The best of what was tried: all of it was run."""
    trials = draws(cell, arm, text, budget)
    trials += _further(cell, arm, text, budget, known)
    losses = [_loss(known(trial)) for trial in trials]
    best = min(range(len(trials)), key=lambda index: losses[index])
    edge = beyond(arm, [trial.choice for trial in trials], trials[best].choice) is not None
    return Tuned(trials[best].choice, losses[best], len(trials), edge)


def _loss(result: Found | None) -> float:
    return result.tuning if result is not None else float("inf")


def _further(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Draws beyond the edge of what gaps are measured by, and of who is alone, up to the first that was not run yet."""
    if ARMS[arm].uses_line:
        return []
    first = draws(cell, arm, text, budget)
    further: list[Trial] = []
    while len(further) < MOST_EDGES:
        tried = [*first, *further]
        if any(known(trial) is None for trial in tried):
            break
        best = min(tried, key=lambda trial: _loss(known(trial)))
        choice = beyond(arm, [trial.choice for trial in tried], best.choice)
        if choice is None:
            break
        further += shorts(cell, arm, text, [choice])
    return further


def beyond(arm: str, tried: Sequence[Choice], best: Choice) -> Choice | None:
    """Return a choice with the first rate moved further that is the largest or smallest tried; for arms with rounds the
    outer rate, too."""
    for rate in (*RATES[ARMS[arm].inner], *(["steady_rate"] if ARMS[arm].has_rounds else [])):
        values = [getattr(choice, rate) for choice in tried]
        if (moved := moved_on(values, getattr(best, rate))) is not None:
            return replace(best, **{rate: moved})
    return None


def moved_on(tried: Sequence[float], best: float) -> float | None:
    """A rate to be tried beyond the best, where that is the largest or the smallest that was tried."""
    if best not in (max(tried), min(tried)):
        return None
    return best * (EDGE if best == max(tried) else 1 / EDGE)
