"""Tuning of the paper's table: as many settings for each row, by the arithmetic alone, on sets that the table does not
report.

A row's H, local mix and codec are not tuned here: bench/methods.py describes their choice.

    settings   the rates of bench/arms.py (for ours, the best draw of bench.study), draws that are equal for all rows,
               and further draws while the best has the largest or the smallest tried rate
    measured   the loss at a run's end, with another seed than the table's and without the table's held-out sequences
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from torch import Tensor

from bench.arms import Settings
from bench.baselines import AllReduce, CocktailSGD
from bench.lab import Lab, process_group_of_one
from bench.methods import DRAWN_SHARE, METHODS, TUNED, TUNED_OTHER, Kind, Method, Scale, won
from bench.report import RESULTS, write
from bench.sections import merge
from bench.study.design import MOMENTA
from bench.study.design import RANGES as STUDIED
from bench.study.search import moved_on
from dilocox.node.planning.time_model import Line, Site, Step
from dilocox.node.training.model.data import Dataset
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count
from dilocox.transport.store.files import write_atomically

__all__ = ["DRAWS", "RANGES", "SEED", "Trial", "aside", "beyond", "drawn", "merged", "trial", "trials", "tune", "with_aside"]

KEPT = RESULTS / "reproduce" / "tuning"

FIXED_SECONDS = 1.5
"""Seconds of a round beyond its bytes, with which commits arrive during tuning: approximately those of these rows' swarms
on this link. The reported values are measured on swarms."""
DRAWS = 4
FURTHER = 4
"""Most times that a rate moves further while the best is at an edge of the tried range."""
SEED = 1
RANGES = (*STUDIED[:2], (0.4, 2.0))
"""The study's, but for the outer rate / (1 - momentum): DiLoCoX as published has won sweeps at 0.5, below the study's."""


def drawn() -> list[Settings]:
    """Return a Latin hypercube: each range has as many equal parts as draws, each used once. A row ignores the values that
    it does not need."""
    source = random.Random("the paper's table")
    columns = []
    for low, high in RANGES:
        parts = source.sample(range(DRAWS), DRAWS)
        columns.append([low * (high / low) ** ((part + source.random()) / DRAWS) for part in parts])
    momenta = source.sample(MOMENTA, DRAWS)
    return [
        {
            "training": {"learning_rate": round(inner, 5), "muon_learning_rate": round(muon, 4)},
            "outer": {"learning_rate": round(steady * (1 - momentum), 3), "momentum": momentum},
        }
        for inner, muon, steady, momentum in zip(*columns, momenta, strict=True)
    ]


def merged(run: Manifest, *settings: Settings) -> Manifest:
    values = run.model_dump()
    for each in settings:
        merge(values, each)
    return Manifest.model_validate(values)


def with_aside(run: Manifest) -> Manifest:
    """Return the run with another seed, and twice the held-out sequences: the new half alternates with the table's
    (`aside`)."""
    doubled = {"data": {"seed": SEED, "evaluation_sequences": 2 * run.data.evaluation_sequences}}
    return merged(run, doubled, {"model": {"seed": SEED}})


def aside(run: Manifest, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return the held-out sequences for tuning. Raises ConfigError if the corpus has too little held-out text."""
    inputs, targets = dataset.evaluation()
    if (wanted := run.data.evaluation_sequences) != len(inputs):
        raise ConfigError(
            f"the corpus holds out {len(inputs)} sequences, and tuning takes {wanted}: half of them are the table's"
        )
    return inputs[1::2], targets[1::2]


class AsideLab(Lab):
    def evaluate(self) -> float:
        trainer = self.trainers[0]
        with trainer.weights(trainer.committed):
            return trainer.evaluate(*aside(self.run, self.dataset))


class AsideAllReduce(AllReduce):
    def evaluate(self) -> float:
        return self.trainer.evaluate(*aside(self.run, self.dataset))


class AsideCocktail(AsideAllReduce, CocktailSGD):
    pass


@dataclass(frozen=True)
class Trial:
    row: str
    kind: Kind
    run: Manifest
    """Run from `with_aside`."""
    clusters: int
    site: Site
    """Site whose clock times the commits of a swarm."""
    share: float
    """Share of CocktailSGD's drawn values that it sends."""
    data: Path
    settings: Settings
    """Tried settings."""

    @property
    def key(self) -> str:
        """Return the digest of everything that it depends on."""
        said = [self.kind, self.clusters, sorted(asdict(self.site).items()), self.share, SEED]
        return sha256(repr(said).encode(), self.run.canonical_bytes()).hex()[:24]

    def loss(self) -> float:
        """Return the nats per token at the run's end; infinite if the model's outputs are no numbers."""
        process_group_of_one()
        steps = self.run.training.total_steps
        trained: Lab | AllReduce
        match self.kind:
            case "swarm":
                rounds = self.run.rounds.count
                trained = AsideLab(self.run, self.clusters, site=self.site, evaluate_every=rounds, data=self.data).rounds()
            case "allreduce":
                trained = AsideAllReduce(self.run, self.clusters, steps, data=self.data).train()
            case "cocktail":
                trained = AsideCocktail(self.run, self.clusters, self.share, steps, data=self.data).train()
        loss = float(trained.points[-1].loss)
        return loss if math.isfinite(loss) else math.inf


def trials(scale: Scale, method: Method) -> list[Trial]:
    """Return the settings that won the sweep, and the draws."""
    return [trial(scale, method, settings) for settings in (won(method.arm), *drawn())]


def trial(scale: Scale, method: Method, settings: Settings) -> Trial:
    parameters = parameter_count(scale.model.model)
    site = Site(parameters, Step(scale.step_seconds), 0.0, scale.clusters, Line.both_ways(scale.bits_per_second()))
    site = replace(site, fixed_seconds=FIXED_SECONDS)
    count: Settings = {"rounds": {"count": max(1, scale.steps // method.inner_steps)}}
    run = with_aside(merged(scale.manifest(method, settings), count))
    return Trial(method.name, method.kind, run, scale.clusters, site, DRAWN_SHARE, scale.text.folder, settings)


def beyond(tried: Sequence[Trial], best: Trial) -> Settings | None:
    """Return the best settings with the first rate moved further that is the largest or the smallest tried. Rates are the
    inner ones of its optimizer, and with rounds the outer one, at rate / (1 - momentum)."""
    inner: list[str] = ["learning_rate", "muon_learning_rate"][: 1 + (best.run.training.optimizer == "muon")]
    for key in inner:
        moved = moved_on([getattr(each.run.training, key) for each in tried], getattr(best.run.training, key))
        if moved is not None:
            return {**best.settings, "training": {**best.settings["training"], key: round(moved, 5)}}
    if best.kind == "swarm" and (moved := moved_on([steady(each.run) for each in tried], steady(best.run))) is not None:
        momentum = best.run.outer.momentum
        return {**best.settings, "outer": {"learning_rate": round(moved * (1 - momentum), 3), "momentum": momentum}}
    return None


def steady(run: Manifest) -> float:
    """Return how far the outer optimizer follows a constant direction."""
    return run.outer.learning_rate / (1 - run.outer.momentum)


def tune(scale: Scale, whole: bool) -> None:
    """Try as many settings for every row, and further ones while the best is at an edge; store the best of each. `whole`:
    at the page's scale."""
    methods = {method.name: method for method in METHODS if not method.like}
    rows = {name: trials(scale, method) for name, method in methods.items()}
    losses: dict[str, float] = {}
    waiting = [each for of_row in rows.values() for each in of_row]
    with get_context("spawn").Pool() as pool:
        while waiting:
            for done, loss in pool.imap_unordered(_tried, waiting):
                losses[done.key] = loss
                print(f"{done.row}: {json.dumps(done.settings)}: {loss:.4f}", flush=True)
            waiting = []
            for name, of_row in rows.items():
                settings = beyond(of_row, best_of(of_row, losses))
                if settings is not None and len(of_row) <= DRAWS + FURTHER:
                    waiting.append(trial(scale, methods[name], settings))
                    of_row.append(waiting[-1])
    kept = {
        name: {
            "chosen": best_of(of_row, losses).settings,
            "tried": [{"settings": each.settings, "loss": losses[each.key]} for each in of_row],
        }
        for name, of_row in rows.items()
    }
    facts = {**scale.tuned_for, "step_seconds": scale.step_seconds}
    print(f"wrote {write(TUNED if whole else TUNED_OTHER, {'scale': facts, 'rows': kept})}")


def best_of(tried: Sequence[Trial], losses: Mapping[str, float]) -> Trial:
    return min(tried, key=lambda each: losses[each.key])


def _tried(one: Trial) -> tuple[Trial, float]:
    path = KEPT / f"{one.key}.json"
    if path.exists():
        return one, float(json.loads(path.read_text()))
    loss = one.loss()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(loss).encode())
    return one, loss
