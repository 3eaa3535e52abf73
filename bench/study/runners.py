"""Training of an arm: the lab with rounds, fragments at their turns, or gradients in every step; measured on two held-out
sets.

One run uses a processor, or many runs of an arm share one device (bench/study/crowd.py).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.baselines import AllReduce, CocktailSGD
from bench.lab import Lab
from bench.streaming import Streaming
from bench.study.crowd import Crowd
from bench.study.design import HALF, Trial
from dilocox.node.training.model.data import Dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.errors import ConfigError, Diverged
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count

__all__ = ["halves", "measured", "measured_together", "runner_of"]

Batch = tuple[Tensor, Tensor]
POINTS = 12
"""Approximate number of points at which the loss is measured."""


def halves(dataset: Dataset, size: int) -> tuple[Batch, Batch]:
    """Return (tuning, test): the held-out samples are in the order of the text, so at most one document is in both.

    Raises ConfigError if the corpus has too little held-out text.
    """
    inputs, targets = dataset.evaluation()
    if len(inputs) < 2 * size:
        raise ConfigError(f"the corpus holds out {len(inputs)} sequences, and the study takes {2 * size}: two sets of {size}")
    return (inputs[:size], targets[:size]), (inputs[-size:], targets[-size:])


def both(trainer: Trainer, dataset: Dataset) -> tuple[float, float]:
    """Return losses of the live parameters, (tuning, test)."""
    on_cpu = trainer.device.type == "cpu"
    batch = trainer.manifest.training.batch_size if on_cpu else HALF
    tuning, test = (
        trainer.pipeline.evaluate(*half, batch, trainer.manifest.model.config.hidden_size) for half in halves(dataset, HALF)
    )
    return tuning, test


class Measured(Lab):
    """Lab whose points have the loss on the test set; `tuning` has the last point's loss on the other set."""

    tuning = float("inf")

    def evaluate(self) -> float:
        trainer = self.trainers[0]
        with trainer.weights(trainer.committed):
            self.tuning, test = both(trainer, self.dataset)
        return test


class MeasuredReference(AllReduce):
    tuning = float("inf")

    def evaluate(self) -> float:
        self.tuning, test = both(self.trainer, self.dataset)
        return test


class MeasuredCocktail(MeasuredReference, CocktailSGD):
    pass


@dataclass
class Crowded(Measured):
    """Measured lab of a crowd, which takes its steps with those of other runs."""

    crowd: Crowd = field(kw_only=True)

    def beginner(self) -> Trainer:
        trainer = super().beginner()
        self.crowd.join(trainer)
        return trainer

    def step(self, trainer: Trainer, inputs: Tensor, targets: Tensor) -> None:
        self.crowd.ask(trainer, inputs, targets)

    def finish_steps(self) -> None:
        self.crowd.finish(self.trainers)


class CrowdedReference(MeasuredReference):
    """Reference of a crowd."""

    def __init__(self, *arguments: Any, crowd: Crowd, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.crowd = crowd
        crowd.join(self.trainer)

    def update(self, batches: Sequence[Batch]) -> int:
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        self.crowd.ask(self.trainer, inputs, targets)
        return self.gradient_bytes

    def evaluate(self) -> float:
        self.crowd.finish([self.trainer])
        return super().evaluate()


class MeasuredStreaming(Streaming):
    tuning = float("inf")

    def evaluate_committed(self, trainer: Trainer) -> float:
        with trainer.weights(trainer.committed):
            self.tuning, test = both(trainer, self.dataset)
        return test


Trained = Measured | MeasuredReference | MeasuredCocktail | MeasuredStreaming


def runner_of(trial: Trial) -> Callable[[Trial], dict[str, Any]]:
    arm = trial.definition
    if not arm.has_rounds:
        return run_cocktail if arm.uses_line else run_steps
    return run_rounds if arm.fragments == 1 else run_streaming


def measured(trial: Trial) -> dict[str, Any]:
    """Run one trial in this process."""
    return _or_diverged(trial, runner_of(trial))


def _or_diverged(trial: Trial, runner: Callable[[Trial], dict[str, Any]]) -> dict[str, Any]:
    """Return the runner's result; a diverged run has a loss that is no number."""
    try:
        return runner(trial)
    except Diverged as error:
        print(f"{trial.cell.name}  {trial.arm}, seed {trial.seed}: {error}", flush=True)
        lost = dict.fromkeys(("tuning", "test"), math.inf)
        return {**lost, **dict.fromkeys(("steps", "inner_steps", "arrival_step", "seconds", "bits", "error"), 0), "curve": []}


def measured_together(trials: Sequence[Trial], device: torch.device) -> list[dict[str, Any]]:
    """Run trials of one arm in one cell on one device; the arm has rounds, or takes every step on the mean gradient."""
    first = trials[0]
    each = first.clusters if first.definition.has_rounds else 1
    """Models of a run: a reference has one, which reads what all clusters read."""
    sequences = first.run.training.batch_size * first.clusters // each
    crowd = Crowd(as_on_processors(first.run), each * len(trials), len(trials), sequences, device)

    def lab_of(run: Manifest, clusters: int, **named: Any) -> Crowded:
        return Crowded(as_on_processors(run), clusters, device=device, crowd=crowd, **named)

    def reference_of(run: Manifest, clusters: int, every: int, **named: Any) -> CrowdedReference:
        return CrowdedReference(as_on_processors(run), clusters, every, device=device, crowd=crowd, **named)

    def runner(trial: Trial) -> dict[str, Any]:
        return run_rounds(trial, lab_of) if trial.definition.has_rounds else run_steps(trial, reference_of)

    def train(trial: Trial) -> dict[str, Any]:
        with crowd.run():
            return _or_diverged(trial, runner)

    with ThreadPoolExecutor(len(trials)) as pool:
        return list(pool.map(train, trials))


def as_on_processors(run: Manifest) -> Manifest:
    """Return the run in float32 on any device: "auto" would be bfloat16 on a GPU."""
    return run.model_copy(update={"training": run.training.model_copy(update={"precision": "float32"})})


def run_rounds(trial: Trial, lab_of: Callable[..., Measured] = Measured) -> dict[str, Any]:
    rounds = trial.run.rounds
    lab = lab_of(
        trial.run,
        trial.cell.clusters,
        site=trial.site if trial.is_timed else None,
        evaluate_every=max(1, rounds.count // POINTS),
        data=trial.text.folder,
        states=trial.states,
    ).rounds()
    return _found(lab, trial, rounds.inner_steps, trial.clock.arrival_step if trial.is_timed else 0)


def run_steps(trial: Trial, reference_of: Callable[..., MeasuredReference] = MeasuredReference) -> dict[str, Any]:
    """Run steps on the mean gradient of all clusters, or of a single one."""
    every = max(1, trial.cell.steps // POINTS)
    return _found(reference_of(trial.run, trial.clusters, every, data=trial.text.folder).train(), trial, 0, 0)


def _found(trained: Trained, trial: Trial, inner_steps: int, arrival_step: int) -> dict[str, Any]:
    points, last = trained.points, trained.points[-1]
    steps = round(last.tokens / trial.run.tokens_per_step / trial.clusters)
    return {
        "tuning": trained.tuning,
        "test": last.loss,
        "steps": steps,
        "seconds": last.seconds or float(steps),
        "bits": 8 * last.wire_bytes / parameter_count(trial.run.model) / steps,
        "inner_steps": inner_steps,
        "arrival_step": arrival_step,
        "error": last.error,
        "curve": [{"seconds": p.seconds or float(p.steps), "tokens": p.tokens, "test": p.loss} for p in points],
    }


def run_cocktail(trial: Trial) -> dict[str, Any]:
    """Run CocktailSGD. Its exchange lasts a step and is hidden behind the next, as published; losses omit that delay, to
    its advantage."""
    every = max(1, trial.run.training.total_steps // POINTS)
    cocktail = MeasuredCocktail(trial.run, trial.cell.clusters, trial.share, every, data=trial.text.folder).train()
    return _found(cocktail, trial, 0, 0)


def run_streaming(trial: Trial) -> dict[str, Any]:
    arm = trial.definition
    streaming = MeasuredStreaming(
        trial.run,
        trial.cell.clusters,
        arm.fragments,
        arm.mixed,
        site=trial.site if trial.is_timed else None,
        evaluate_every=max(1, trial.run.training.total_steps // POINTS),
        data=trial.text.folder,
        states_are=trial.states,
    ).train()
    return _found(streaming, trial, trial.run.rounds.inner_steps, trial.clock.arrival_step if trial.is_timed else 0)
