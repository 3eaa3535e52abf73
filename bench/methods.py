"""The rows of the paper's table (bench/reproduce.py): what each trains with, and its run file at a scale."""

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.arms import ARMS, Settings, published_compression
from bench.report import RESULTS, load_preset
from bench.texts import Text
from dilocox.node.clock import Line, Site, Step, model_payload_bytes, ring
from dilocox.node.plan import PAPER, PAPER_STEPS
from dilocox.protocol.arrays import GROUP
from dilocox.protocol.manifest import Compression, Manifest
from dilocox.protocol.tensors import parameter_count

__all__ = ["DRAWN_SHARE", "METHOD", "METHODS", "TUNED", "TUNED_OTHER", "Kind", "Method", "Scale", "chosen", "toml", "won"]

Kind = Literal["swarm", "allreduce", "cocktail"]

FOLDER = Path(__file__).parents[1] / "docs" / "results"
TUNED, TUNED_OTHER = "reproduce-settings", "reproduce-settings-other"
"""Files of settings: of the page's scale, and of the last other one."""
OURS_STEPS = 156
"""H of ours, four rounds in the run: more bytes in each, as many in all, and less often what each costs whatever its bytes."""
OURS_INNER: Settings = {"training": {"muon_momentum": 0.9}}
OURS: Settings = {**OURS_INNER, "rounds": {"lead_weight": 1.0}}
"""Chosen, with OURS_STEPS, by some ten runs of the arithmetic (the table's seed and losses) before rows were tuned alike."""
DRAWN_SHARE = 0.2
"""Of what CocktailSGD draws, that it sends: with a tenth drawn and Int4 its published 117 times less (ICML 2023)."""
LEAST_WARMUPS = 10
"""A preset's warm-up, which is made for long runs, takes no larger part of this one."""
EVALUATIONS = 3
"""Of a swarm's run, at least."""


@dataclass(frozen=True)
class Method:
    name: str
    kind: Kind
    arm: str
    """Of bench/arms.py: whose settings, and those that won its sweep, it takes."""
    note: str
    settings: Settings = field(default_factory=dict)
    like: str = ""
    """The row whose settings it takes; empty: it is tuned itself."""
    timed_like: str = ""
    """The row whose steps last as long; empty: it is timed itself."""
    reference: str = "AllReduce"
    """The row with the same inner optimizer that exchanges all in every step."""
    inner_steps: int = PAPER_STEPS
    """H."""
    published: bool = True
    """Else it trains on while its commit is late, and sends as many bytes for an inner step as DiLoCoX."""

    @property
    def tuned_as(self) -> str:
        return self.like or self.name


METHODS = (
    Method("AllReduce", "allreduce", "AllReduce", "torch DDP over gloo, gradients in 16 bits, AdamW"),
    Method(
        "AllReduce (Muon)",
        "allreduce",
        "AllReduce, Muon",
        "the same with Muon; timed as AllReduce",
        settings=OURS_INNER,
        timed_like="AllReduce",
        reference="AllReduce (Muon)",
    ),
    Method(
        "CocktailSGD",
        "cocktail",
        "CocktailSGD",
        "timed with its overlap of one step; its losses without that delay, which favours it",
    ),
    Method(
        "OpenDiLoCo", "swarm", "OpenDiLoCo", "its rule on our exchange: synchronous, 16 bits; in the paper it could not run"
    ),
    Method(
        "DiLoCoX",
        "swarm",
        "DiLoCoX",
        "as published: low rank and Int4, one round late; the next phase starts from the delayed state",
    ),
    Method(
        "DiLoCoX (other restart)",
        "swarm",
        "DiLoCoX",
        "the paper's restart is not known for sure: here a phase goes on from its own work",
        settings={"rounds": {"overlap": "rebase", "lead_weight": 1.0}},
    ),
    Method("DiLoCoX without overlap", "swarm", "DiLoCoX without overlap", "the paper's ablation"),
    Method(
        "DiLoCoX without compression",
        "swarm",
        "DiLoCoX without compression",
        "the paper's ablation, in 16 bits",
        settings={"compression": {"codec": "fp16"}},
        like="DiLoCoX",
    ),
    Method(
        "ours",
        "swarm",
        "ours",
        "Muon, sparse 2 bits as equal bytes allow, rebase with the whole lead, rounds of 156 steps",
        OURS,
        reference="AllReduce (Muon)",
        inner_steps=OURS_STEPS,
        published=False,
    ),
)
METHOD = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Scale:
    """What all rows share."""

    preset: str
    """Empty: the toy of bench/arms.py."""
    clusters: int
    steps: int
    """Inner steps of every cluster."""
    timed: int
    step_seconds: float
    line: float | None
    """Bits per second; None: by the paper's ratio."""
    text: Text

    @property
    def tuned_for(self) -> dict[str, Any]:
        """What settings are chosen for, of whatever length a run is. A step's seconds are in it where the line's speed is: by the
        paper's ratio the line goes with them, and commits come after nearly as many steps."""
        said = {"preset": self.preset, "clusters": self.clusters, "line": self.line, "text": self.text.digest}
        return said if self.line is None else {**said, "step_seconds": self.step_seconds}

    @property
    def model(self) -> Manifest:
        return load_preset(self.preset) if self.preset else ARMS[0].manifest({}, self.steps, 0, self.text)

    def bits_per_second(self) -> float:
        """On which a ring of 16-bit gradients takes as many steps' time as in the published run."""
        if self.line is not None:
            return self.line
        parameters = parameter_count(self.model.model)
        site = Site(parameters, Step(self.step_seconds), 0.0, self.clusters, Line.both_ways(1.0))
        return ring(site).line_seconds / (self.step_seconds * ring(PAPER).line_seconds / PAPER.step.seconds)

    def manifest(self, method: Method, settings: Settings | None = None) -> Manifest:
        """`settings`: instead of those that are chosen."""
        arm = next(arm for arm in ARMS if arm.name == method.arm)
        merged = arm.manifest(won(method.arm), self.steps, 0, self.text).model_dump(exclude_none=True)
        if self.preset:
            merged["model"] = {**self.model.model.model_dump(exclude_none=True), "stages": 1}
            size = self.model.training
            merged["training"] |= {
                "batch_size": size.batch_size,
                "microbatches": size.microbatches,
                "warmup_steps": min(size.warmup_steps, self.steps // LEAST_WARMUPS),
            }
        merged["data"]["evaluation_sequences"] = 64
        merged["rounds"] |= self.rounds(method)
        for each in (method.settings, chosen(self, method) if settings is None else settings):
            for name, section in each.items():
                merged[name] |= section
        run = Manifest.model_validate(merged)
        return run.model_copy(update={"compression": self.compression(run, method)})

    def rounds(self, method: Method) -> dict[str, Any]:
        count = max(1, self.steps // method.inner_steps)
        return {
            "inner_steps": method.inner_steps,
            "max_inner_steps": (1 if method.published else 3) * method.inner_steps,  # the published methods wait
            "count": 10 * count,  # it is stopped once its last loss is measured
            "evaluate_every": max(1, count // EVALUATIONS),
            "start_clusters": self.clusters,
            "min_clusters": self.clusters,
            "deadline_seconds": 3600,
            "vote_seconds": 1800,
            "liveness_seconds": 120,
            "snapshot_every": 1000,
        }

    def compression(self, run: Manifest, method: Method) -> Compression:
        if run.compression.codec == "lowrank-int4":
            return published_compression(run.model)
        return run.compression if method.published else of_equal_bytes(run, method.inner_steps)


def of_equal_bytes(run: Manifest, inner_steps: int) -> Compression:
    """Sparse payloads with as many values as make DiLoCoX's bytes per inner step."""
    budget = model_payload_bytes(run.model, published_compression(run.model)) * inner_steps / PAPER_STEPS

    def keeping(k: int) -> Compression:
        return run.compression.model_copy(update={"k": k})

    fitting = bisect_right(range(1, GROUP), budget, key=lambda k: model_payload_bytes(run.model, keeping(k)))
    return keeping(max(1, fitting))


def won(arm: str) -> Settings:
    """The arm's sweep of bench.convergence, as docs/results has it."""
    arms = json.loads((FOLDER / "convergence.json").read_text())["results"]["arms"]
    return next(each["choice"] for each in arms if each["arm"] == arm)


def chosen(scale: Scale, method: Method) -> Settings:
    """The best of what `--tune` tried at such a scale; nothing where it has not looked yet."""
    for path in (RESULTS / f"{TUNED}.json", RESULTS / f"{TUNED_OTHER}.json", FOLDER / f"{TUNED}.json"):
        if path.exists():
            found = json.loads(path.read_text())["results"]
            if scale.tuned_for.items() <= found["scale"].items():
                best: Settings = found["rows"].get(method.tuned_as, {}).get("chosen", {})
                return best
    return {}


def toml(run: Manifest) -> str:
    """A run file, whose owner is to be filled in."""
    lines = []
    for name, section in run.model_dump(mode="json", exclude_none=True).items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        else:
            lines.insert(0, f"{name} = {json.dumps(section)}")
    return "\n".join(lines).replace(f'owner = "{run.run.owner}"', 'owner = "{owner}"') + "\n"
