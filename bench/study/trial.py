"""One training run of the study, in a process of its own, and where its result is kept."""

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.report import RESULTS
from bench.study.design import HALF, Trial
from dilocox.transport.files import write_atomically

__all__ = ["Found", "Point", "digests", "found", "run_all"]

RUNS = RESULTS / "study"
KEPT = Path(__file__).parents[2] / "docs" / "results" / "study-runs.json"
"""What was run before, by others too: `python -m bench.docs` writes it."""

DIVERGED = 1e3
"""Nats: of a model that gives no numbers any more."""


@dataclass(frozen=True)
class Point:
    seconds: float
    """By the clock: a step is one."""
    tokens: int
    test: float


@dataclass(frozen=True)
class Found:
    tuning: float
    """Loss of the committed model on the tuning set, nats per token; DIVERGED where that is no number."""
    test: float
    steps: int
    """Inner steps of each cluster."""
    seconds: float
    """Until the last commit is applied, by the clock."""
    bits: float
    """Sent for each parameter and inner step."""
    inner_steps: int
    """H; 0 where there are no rounds."""
    arrival_step: int
    error: float
    """Of the last payloads, relative."""
    curve: list[Point]
    took: float
    """Seconds of this machine."""

    @classmethod
    def of(cls, said: dict[str, Any]) -> "Found":
        return cls(**{**said, "curve": [Point(**point) for point in said["curve"]]})


def found(trial: Trial, folder: Path = RUNS) -> Found | None:
    """What came of it, where it was run."""
    path = folder / f"{trial.key}.json"
    if path.exists():
        return Found.of(json.loads(path.read_text())["found"])
    said = kept().get(trial.key)
    return Found.of(said["found"]) if said is not None else None


@cache
def kept() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return known


def run_all(trials: Iterable[Trial], processes: int, until: float, folder: Path = RUNS) -> Iterator[Trial]:
    """Those that were not run yet, as they finish; none is begun after `until`, by the monotonic clock."""
    waiting = {trial.key: trial for trial in trials if found(trial, folder) is None}
    if not waiting or time.monotonic() >= until:
        return
    with get_context("spawn").Pool(processes) as pool:
        for done in pool.imap_unordered(_run_before, [(trial, until, folder) for trial in waiting.values()]):
            if done is not None:
                yield done


def _run_before(job: tuple[Trial, float, Path]) -> Trial | None:
    trial, until, folder = job
    if time.monotonic() >= until:
        return None
    result = {**trial.facts(), "found": asdict(train(trial))}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{trial.key}.json", json.dumps(result).encode())
    return trial


def train(trial: Trial) -> Found:
    from bench.lab import process_group_of_one
    from bench.study.runners import runner_of

    process_group_of_one()
    started = time.monotonic()
    measured = runner_of(trial)(trial)
    losses = {name: measured[name] if math.isfinite(measured[name]) else DIVERGED for name in ("tuning", "test")}
    curve = [Point(**point) for point in measured["curve"] if math.isfinite(point["test"])]
    return Found(**{**measured, **losses, "curve": curve}, took=time.monotonic() - started)


def digests(trial: Trial) -> dict[str, str]:
    """Of the tuning and the test set: SHA-256 over their tokens."""
    from bench.study.runners import halves
    from dilocox.node.training.data import load_dataset
    from dilocox.protocol.crypto import sha256

    sets = halves(load_dataset(trial.run, trial.text.folder), HALF)
    return {
        name: sha256(inputs.numpy().tobytes(), targets.numpy().tobytes()).hex()
        for name, (inputs, targets) in zip(("tuning", "test"), sets, strict=True)
    }
