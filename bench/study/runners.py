"""How an arm trains: the lab with rounds, fragments at their turns, or gradients in every step; measured on two held-out sets."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.baselines import AllReduce, CocktailSGD
from bench.lab import Lab
from bench.streaming import Streaming
from bench.study.design import HALF, Trial
from dilocox.node.training.data import Dataset
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.tensors import parameter_count

__all__ = ["halves", "runner_of"]

Batch = tuple[Tensor, Tensor]
POINTS = 12
"""At which the loss is measured, about."""


def halves(dataset: Dataset, size: int) -> tuple[Batch, Batch]:
    """(tuning, test): the held-out samples lie in the order of the text, so at most one document is in both.

    Raises ConfigError where the corpus has too little held-out text.
    """
    inputs, targets = dataset.evaluation()
    if len(inputs) < 2 * size:
        raise ConfigError(f"the corpus holds out {len(inputs)} sequences, and the study takes {2 * size}: two sets of {size}")
    return (inputs[:size], targets[:size]), (inputs[-size:], targets[-size:])


def both(trainer: Trainer, dataset: Dataset) -> tuple[float, float]:
    """Losses of the live parameters, (tuning, test)."""
    tuning, test = halves(dataset, HALF)
    return trainer.evaluate(*tuning), trainer.evaluate(*test)


class Measured(Lab):
    """Its points hold the loss on the test set; `tuning` that of the last on the other one."""

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


def run_rounds(trial: Trial) -> dict[str, Any]:
    rounds = trial.run.rounds
    lab = Measured(
        trial.run,
        trial.cell.clusters,
        site=trial.site if trial.is_timed else None,
        evaluate_every=max(1, rounds.count // POINTS),
        data=trial.text.folder,
    ).rounds()
    return _found(lab, trial, rounds.inner_steps, trial.clock.arrival_step if trial.is_timed else 0)


def run_steps(trial: Trial) -> dict[str, Any]:
    """On the mean gradient of all clusters, or of the one that is alone."""
    every = max(1, trial.cell.steps // POINTS)
    return _found(MeasuredReference(trial.run, trial.clusters, every, data=trial.text.folder).train(), trial, 0, 0)


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
    """Its exchange lasts a step and is hidden behind the next, as published; losses are without that delay, which favours it."""
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
    ).train()
    return _found(streaming, trial, trial.run.rounds.inner_steps, trial.clock.arrival_step if trial.is_timed else 0)
