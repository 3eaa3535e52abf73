"""How rows of the paper's table are tuned: as many settings for each, by the arithmetic alone, on what the table does not report.

What a row is (its H, lead and codec) is not tuned here: bench/methods.py says how ours came to them.

    settings   the rates of bench/arms.py (of ours, the best of its draws in bench.study), draws that are the same for all rows,
               and further ones while a rate of the best is the largest or the smallest that was tried
    measured   the loss at a run's end, of another seed than the table's and of held-out sequences that are none of the table's
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
from dilocox.node.clock import Line, Site, Step
from dilocox.node.training.data import Dataset
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.tensors import parameter_count
from dilocox.transport.files import write_atomically

__all__ = ["DRAWS", "RANGES", "SEED", "Trial", "aside", "beyond", "drawn", "merged", "trial", "trials", "tune", "with_aside"]

KEPT = RESULTS / "reproduce" / "tuning"

FIXED_SECONDS = 1.5
"""Of a round, whatever its bytes, by which commits come while rows are tuned: what swarms of these rows took beyond their bytes on
this line, about. What is reported is measured on swarms."""
DRAWS = 4
FURTHER = 4
"""How often a rate is moved on, at most, while the best is at an edge of what was tried."""
SEED = 1
RANGES = (*STUDIED[:2], (0.4, 2.0))
"""The study's, but for the outer rate / (1 - momentum): DiLoCoX as published has won sweeps at 0.5, below the study's."""


def drawn() -> list[Settings]:
    """A Latin hypercube: of each range as many equal parts as draws, each once. What a row has no use for does not matter to it."""
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
    """Of another seed, and with as many held-out sequences again, which lie between those that it has (`aside`)."""
    doubled = {"data": {"seed": SEED, "evaluation_sequences": 2 * run.data.evaluation_sequences}}
    return merged(run, doubled, {"model": {"seed": SEED}})


def aside(run: Manifest, dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Raises ConfigError where the corpus has too little held-out text."""
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
    """By `with_aside`."""
    clusters: int
    site: Site
    """By whose clock commits of a swarm come."""
    share: float
    """Of what CocktailSGD draws, that it sends."""
    data: Path
    settings: Settings
    """That are tried."""

    @property
    def key(self) -> str:
        """The digest of all that it depends on."""
        said = [self.kind, self.clusters, sorted(asdict(self.site).items()), self.share, SEED]
        return sha256(repr(said).encode(), self.run.canonical_bytes()).hex()[:24]

    def loss(self) -> float:
        """Nats per token at the run's end; infinite where the model gives no numbers any more."""
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
    """The settings that won the sweep, and the draws."""
    return [trial(scale, method, settings) for settings in (won(method.arm), *drawn())]


def trial(scale: Scale, method: Method, settings: Settings) -> Trial:
    parameters = parameter_count(scale.model.model)
    site = Site(parameters, Step(scale.step_seconds), 0.0, scale.clusters, Line.both_ways(scale.bits_per_second()))
    site = replace(site, fixed_seconds=FIXED_SECONDS)
    count: Settings = {"rounds": {"count": max(1, scale.steps // method.inner_steps)}}
    run = with_aside(merged(scale.manifest(method, settings), count))
    return Trial(method.name, method.kind, run, scale.clusters, site, DRAWN_SHARE, scale.text.folder, settings)


def beyond(tried: Sequence[Trial], best: Trial) -> Settings | None:
    """The best settings with the first rate moved on that is the largest or the smallest of those that were tried: of the inner
    ones that its optimizer has, and of who has rounds the outer one, at rate / (1 - momentum)."""
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
    """How far the outer optimizer follows what stays."""
    return run.outer.learning_rate / (1 - run.outer.momentum)


def tune(scale: Scale, whole: bool) -> None:
    """Try as many settings for every row, and further ones while the best lies at an edge; keep the best of each. `whole`: at the
    page's scale."""
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
