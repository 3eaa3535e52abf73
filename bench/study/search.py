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
"""Most further draws of a reference."""
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
    """Loss on the tuning set, in the short run."""
    tried: int
    at_edge: bool
    """True if one of its rates is the largest or smallest tried: then a better one may be beyond."""


def shorts(cell: Cell, arm: str, text: Text, choices: Sequence[Choice]) -> list[Trial]:
    return [Trial(cell.shorter(), arm, choice, 0, text) for choice in choices]


def draws(cell: Cell, arm: str, text: Text, budget: Budget) -> list[Trial]:
    return shorts(cell, arm, text, [drawn(index, ARMS[arm].slow) for index in range(budget.trials)])


def next_trials(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Return the trials that can be run now: draws, then further ones of a reference or a single cluster, then the best
    with every seed. None: it is finished."""
    trials = draws(cell, arm, text, budget)
    if missing := [trial for trial in trials if known(trial) is None]:
        return missing
    further = _further(cell, arm, text, budget, known)
    if missing := [trial for trial in further if known(trial) is None]:
        return missing
    return [trial for trial in finals(cell, arm, text, budget, known) if known(trial) is None]


def next_of(cell: Cell, arm: str, text: Text, budget: Budget, known: Known, parts: bool) -> list[Trial]:
    """Return the next trials. `parts`: whether those follow the arm itself."""
    return next_trials(cell, arm, text, budget, known) or (next_parts(cell, arm, text, budget, known) if parts else [])


def next_parts(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Return the missing trials for the parts of a finished arm's gap."""
    if not ARMS[arm].hides:
        return []
    return [trial for part in PARTS for trial in finals(cell, arm, text, budget, known, part) if known(trial) is None]


def finals(cell: Cell, arm: str, text: Text, budget: Budget, known: Known, part: Part = "") -> list[Trial]:
    """Return the trials that report a tuned arm."""
    best = tuned(cell, arm, text, budget, known)
    return [Trial(cell, arm, best.choice, seed, text, part) for seed in range(budget.seeds)]


def tuned(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> Tuned:
    """Return the best of the tried settings: all trials were run."""
    trials = draws(cell, arm, text, budget)
    trials += _further(cell, arm, text, budget, known)
    losses = [_loss(known(trial)) for trial in trials]
    best = min(range(len(trials)), key=lambda index: losses[index])
    edge = beyond(arm, [trial.choice for trial in trials], trials[best].choice) is not None
    return Tuned(trials[best].choice, losses[best], len(trials), edge)


def _loss(result: Found | None) -> float:
    return result.tuning if result is not None else float("inf")


def _further(cell: Cell, arm: str, text: Text, budget: Budget, known: Known) -> list[Trial]:
    """Return draws beyond the edge for references of gaps, and for single clusters, up to the first missing one."""
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
    """Return the next rate beyond the best, if that is the largest or the smallest tried."""
    if best not in (max(tried), min(tried)):
        return None
    return best * (EDGE if best == max(tried) else 1 / EDGE)
