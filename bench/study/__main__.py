"""`python -m bench.study`: the registered comparison of algorithms (bench/study/design.py defines arms and method).

The bench stores every finished run here, and `python -m bench.docs` writes it to docs/results/study-runs.json. A later
call continues from both. `--minutes` limits one call. `--check` exits with 1 if a bar is missed, or unknown.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.report import bench_parser, judge, write
from bench.study.analysis import Row, rows
from bench.study.design import ARMS, CELLS, REFERENCES, Cell, Trial, drawn
from bench.study.report import default, missed, row_facts, show
from bench.study.search import Budget, next_of
from bench.study.together import Job, fits, run_arms
from bench.study.trial import digests, found, run_all
from bench.texts import Text, text_of

__all__ = ["main"]


ON_DEVICE = 4
"""Arms at a time: a single one does not use a GPU while it encodes."""


@dataclass(frozen=True)
class Plan:
    """Cells and arms of one call."""

    cells: Sequence[Cell]
    arms: Sequence[str]
    budget: Budget
    text: Text
    parts: bool = False
    """True: the parts of gaps are run, too."""

    def rows(self, cell: Cell) -> list[Row]:
        return rows(cell, self.arms, self.text, self.budget, found)

    def next_trials(self, cell: Cell, arm: str) -> list[Trial]:
        return next_of(cell, arm, self.text, self.budget, found, self.parts)


def quick(text: Text) -> Plan:
    cell = Cell("small", 2, 48, 0.09)
    return Plan([cell], [REFERENCES[ARMS[default(cell)].inner], default(cell)], Budget(2, 2), text, parts=True)


def main() -> None:
    parser = bench_parser("bench.study", __doc__, "two arms in a cell of 48 steps: a minute")
    parser.add_argument("--cells", help="numbers of cells, as they are printed, separated by commas; default all")
    parser.add_argument("--arms", help="names separated by semicolons; default all")
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also what gaps of hidden exchanges are made of: six runs more",
    )
    parser.add_argument("--list", action="store_true", help="run nothing: what there is, and what is finished")
    parser.add_argument("--data", metavar="NAME=DIR", help="a corpus of `dilocox data build` (default: the standard library)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: all runs of an arm are trained together there; arms that cannot are left out",
    )
    parser.add_argument(
        "--processes", type=int, help=f"runs at a time, or arms on a GPU (default: one for each core, or {ON_DEVICE} arms)"
    )
    options = parser.parse_args()
    text = text_of(options.data)
    chosen = Plan(chosen_cells(options, parser), chosen_arms(options, parser), Budget(), text, options.parts)
    if options.quick and (options.cells or options.arms or options.parts):
        parser.error("--quick has a cell and arms of its own")
    plan = quick(text) if options.quick else chosen
    whole = not (options.cells or options.arms or options.data)
    stopped: Sequence[str] = ()
    if not options.list:
        until = time.monotonic() + 60 * options.minutes
        if options.device == "cpu":
            run(plan, options.processes or os.cpu_count() or 1, until)
        else:
            stopped = run_on(plan, options.device, options.processes or ON_DEVICE, until)
    by_cell = {cell: plan.rows(cell) for cell in plan.cells}
    report(plan, by_cell)
    if not options.list:
        keep("study" if whole else "study-other", plan, by_cell, options.quick)
    if stopped:
        parser.exit(1, "\n".join(stopped) + "\n")
    if not options.quick:
        judge(missed(by_cell), options.check)


def chosen_cells(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Sequence[Cell]:
    try:
        return [dict(enumerate(CELLS))[int(number)] for number in options.cells.split(",")] if options.cells else CELLS
    except (ValueError, KeyError):
        parser.error(f"--cells {options.cells}: numbers up to {len(CELLS) - 1}, separated by commas")


def chosen_arms(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Sequence[str]:
    arms = [arm.strip() for arm in options.arms.split(";")] if options.arms else list(ARMS)
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"no arm {'; '.join(unknown)}; arms: {'; '.join(ARMS)}")
    return arms


def run(plan: Plan, processes: int, until: float) -> None:
    """Run arm after arm in cell after cell: first its tuning, then the reported runs."""
    for cell, arm in itertools.product(plan.cells, plan.arms):
        while time.monotonic() < until and (trials := plan.next_trials(cell, arm)):
            for count, trial in enumerate(run_all(trials, processes, until), 1):
                say(trial, count, len(trials))


def run_on(plan: Plan, device: str, processes: int, until: float) -> list[str]:
    """Run the same with several arms together on a device; runs that cells share run once. Return a sentence for each
    failed arm."""
    pairs = itertools.product(plan.cells, filter(fits, plan.arms))
    jobs = [Job(cell, arm, plan.text, plan.budget, plan.parts, device, until) for cell, arm in pairs]
    stopped: list[str] = []
    by_keys = {tuple(trial.key for trial in job.next_trials()): job for job in jobs}
    for ran in run_arms([job for keys, job in by_keys.items() if keys], processes):
        for count, trial in enumerate(ran.trials, 1):
            say(trial, count, len(ran.trials))
        if ran.failed:
            stopped.append(f"{ran.job.cell.name}  {ran.job.arm} stopped: {ran.failed}")
    return stopped


def say(trial: Trial, count: int, of: int) -> None:
    result = found(trial)
    assert result is not None
    part = f", up to: {trial.part}" if trial.part else ""
    where = f"{count}/{of}  {trial.cell.name}  {trial.arm}, seed {trial.seed}{part}"
    print(f"{where}: test {result.test:.4f}, tuning {result.tuning:.4f}  ({result.took:.0f} s)", flush=True)


def report(plan: Plan, by_cell: dict[Cell, list[Row]]) -> None:
    for cell, of_cell in by_cell.items():
        number = f"{CELLS.index(cell)}: " if cell in CELLS else ""
        print(f"\n{number}{cell.name}; {len(of_cell)} of {len(plan.arms)} arms are finished")
        if of_cell:
            show(of_cell)


def keep(name: str, plan: Plan, by_cell: dict[Cell, list[Row]], quick: bool) -> None:
    """Write the page's data if the call covers all cells and arms; otherwise write beside them."""
    sets = digests(Trial(plan.cells[0], plan.arms[0], drawn(0), 0, plan.text))
    cells = [
        {"name": cell.name, "cell": asdict(cell), "rows": [row_facts(row) for row in of_cell]}
        for cell, of_cell in by_cell.items()
    ]
    write(name, {"text": plan.text.settings, "sets": sets, "budget": asdict(plan.budget), "cells": cells}, quick)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that started runs end, too
    main()
