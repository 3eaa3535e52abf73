"""Training runs of the study, one in a separate process or an arm's together on a device, and the store of their results."""

import gc
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.report import RESULTS
from bench.study.design import HALF, Trial
from dilocox.transport.store.files import write_atomically

__all__ = ["RUNS", "Found", "Point", "digests", "found", "keep", "run_all", "train_together"]

RUNS = RESULTS / "study"
KEPT = Path(__file__).parents[2] / "docs" / "results" / "study-runs.json"
"""Results of earlier runs, of other machines too, as `python -m bench.docs` writes them."""

DIVERGED = 1e3
"""Nats: of a model that gives no numbers any more."""


@dataclass(frozen=True)
class Point:
    seconds: float
    """Time by the clock, in steps."""
    tokens: int
    test: float


@dataclass(frozen=True)
class Found:
    tuning: float
    """Loss of the committed model on the tuning set, nats per token; DIVERGED if that is no number."""
    test: float
    steps: int
    """Inner steps of each cluster."""
    seconds: float
    """Seconds until the last commit is applied, by the clock."""
    bits: float
    """Sent for each parameter and inner step."""
    inner_steps: int
    """H; 0 without rounds."""
    arrival_step: int
    error: float
    """Relative error of the last payloads."""
    curve: list[Point]
    took: float
    """Seconds of this machine; of runs that were trained together, the share of each."""
    device: str = "cpu"

    @classmethod
    def of(cls, said: dict[str, Any]) -> "Found":
        return cls(**{**said, "curve": [Point(**point) for point in said["curve"]]})


def found(trial: Trial, folder: Path = RUNS) -> Found | None:
    """Return the result of a trial, if it was run."""
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
    """Run the trials without a result; yield them as they finish. None starts after `until`, by the monotonic clock."""
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
    keep(trial, train(trial), folder)
    return trial


def keep(trial: Trial, result: Found, folder: Path = RUNS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{trial.key}.json", json.dumps({**trial.facts(), "found": asdict(result)}).encode())


def train(trial: Trial) -> Found:
    from bench.lab import process_group_of_one
    from bench.study.runners import measured

    process_group_of_one()
    started = time.monotonic()
    return found_in(measured(trial), time.monotonic() - started)


def train_together(trials: Sequence[Trial], device: str) -> list[Found]:
    """Train all trials of one arm in one cell, on one device."""
    import torch

    from bench.lab import process_group_of_one
    from bench.study.runners import measured_together

    process_group_of_one()
    started = time.monotonic()
    measured = measured_together(trials, torch.device(device))
    gc.collect()  # stacks of models, which refer to themselves, before the next ones are made
    took = (time.monotonic() - started) / len(trials)
    return [found_in(each, took, device) for each in measured]


def found_in(measured: dict[str, Any], took: float, device: str = "cpu") -> Found:
    """Return the result. `measured`: of a runner."""
    losses = {name: measured[name] if math.isfinite(measured[name]) else DIVERGED for name in ("tuning", "test")}
    curve = [Point(**point) for point in measured["curve"] if math.isfinite(point["test"])]
    return Found(**{**measured, **losses, "curve": curve}, took=took, device=device)


def digests(trial: Trial) -> dict[str, str]:
    """Return the SHA-256 of the tuning and the test set, over their tokens."""
    from bench.study.runners import halves
    from dilocox.node.training.model.data import load_dataset
    from dilocox.protocol.crypto import sha256

    sets = halves(load_dataset(trial.run, trial.text.folder), HALF)
    return {
        name: sha256(inputs.numpy().tobytes(), targets.numpy().tobytes()).hex()
        for name, (inputs, targets) in zip(("tuning", "test"), sets, strict=True)
    }
