"""Arms on one device: each in a process, and its runs together, wave after wave, until it is finished."""

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from bench.study.design import ARMS, COCKTAIL, Cell, Trial
from bench.study.search import Budget, next_of
from bench.study.trial import RUNS, Found, found, keep, train_together
from bench.texts import Text

__all__ = ["Job", "Ran", "fits", "run_arms", "run_job"]


@dataclass(frozen=True)
class Job:
    """Remaining work of an arm in a cell."""

    cell: Cell
    arm: str
    text: Text
    budget: Budget
    parts: bool
    device: str
    until: float
    """Time after which no wave starts, by the monotonic clock."""
    folder: Path = RUNS

    def next_trials(self) -> list[Trial]:
        """Return the next trials of one shape and one kind."""
        return next_of(self.cell, self.arm, self.text, self.budget, self.known, self.parts)

    def known(self, trial: Trial) -> Found | None:
        return found(trial, self.folder)


def fits(arm: str) -> bool:
    """Return whether its runs can be trained together; those with fragments, or compressed gradients, cannot."""
    return ARMS[arm].fragments == 1 and ARMS[arm].codec != COCKTAIL


@dataclass(frozen=True)
class Ran:
    """Finished part of a job."""

    job: Job
    trials: Sequence[Trial]
    failed: str = ""
    """Error that stopped it; other jobs continue."""


def run_arms(jobs: Sequence[Job], processes: int) -> Iterator[Ran]:
    """Yield the arms as they finish."""
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_job, jobs)


def run_job(job: Job) -> Ran:
    """Run a job in this process."""
    done: list[Trial] = []
    try:
        while time.monotonic() < job.until and (trials := job.next_trials()):
            for trial, result in zip(trials, train_together(trials, job.device), strict=True):
                keep(trial, result, job.folder)
            done += trials
    except Exception as error:
        traceback.print_exc()
        return Ran(job, done, repr(error.__cause__ or error))
    return Ran(job, done)
