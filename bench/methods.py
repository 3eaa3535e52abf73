"""The rows of the paper's table (bench/reproduce.py): what each trains with, and its run file at a scale."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.arms import ARMS, Settings, published_compression
from bench.report import RESULTS, load_preset
from bench.sections import toml_value
from bench.study.design import Cell, Choice
from bench.study.report import DENSE
from bench.texts import Text
from dilocox.node.planning.plan import PAPER, PAPER_STEPS
from dilocox.node.planning.time_model import Line, Site, Step, ring
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count

__all__ = [
    "DRAWN_SHARE",
    "METHOD",
    "METHODS",
    "STUDIED_CELL",
    "TUNED",
    "TUNED_OTHER",
    "Kind",
    "Method",
    "Scale",
    "chosen",
    "toml",
    "won",
]

Kind = Literal["swarm", "allreduce", "cocktail"]

FOLDER = Path(__file__).parents[1] / "docs" / "results"
TUNED, TUNED_OTHER = "reproduce-settings", "reproduce-settings-other"
"""Files of settings: of the page's scale, and of the last other one."""
OURS_STEPS = 156
"""H of ours, four rounds in the run. It sends no more bytes for a step than DiLoCoX, and pays the fixed cost of a round
less often. Some ten runs of the arithmetic (the table's seed and losses) chose it before rows were tuned alike."""
SHORT = load_preset("tiny")
"""Preset with equally short runs: ours takes its settings."""
OURS_INNER: Settings = {"training": SHORT.training.model_dump(include={"optimizer", "muon_momentum"})}
OURS: Settings = {
    **OURS_INNER,
    "compression": SHORT.compression.model_dump(),
    "rounds": SHORT.rounds.model_dump(include={"overlap", "lead_weight"}),
}
TOY = ARMS["AllReduce"]
STUDIED_CELL = Cell("large", 4, 1200, 0.016)
"""Cell of bench.study with an equally large model, and the nearest bits and length. Our row is its arm DENSE."""
DRAWN_SHARE = 0.2
"""Share of CocktailSGD's drawn values that it sends: a tenth drawn and Int4 give its published 117 times fewer bytes (ICML
2023)."""
LEAST_WARMUPS = 10
"""A preset's warm-up, which is made for long runs, takes no larger part of this one."""
EVALUATIONS = 3
"""Least evaluations in a swarm's run."""


@dataclass(frozen=True)
class Method:
    name: str
    kind: Kind
    arm: str
    """Arm of bench/arms.py or of the study: the winner of its sweep is tried first. An arm of bench/arms.py also defines
    the row."""
    note: str
    settings: Settings = field(default_factory=dict)
    like: str = ""
    """Row whose settings it takes; empty: it is tuned itself."""
    timed_like: str = ""
    """Row whose steps last as long; empty: it is timed itself."""
    reference: str = "AllReduce"
    """The row with the same inner optimizer that exchanges all in every step."""
    inner_steps: int = PAPER_STEPS
    """H."""
    published: bool = True
    """False: it trains on while its commit is late."""

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
        "OpenDiLoCo", "swarm", "OpenDiLoCo", "its rule on our exchange: synchronous, 32 bits; in the paper it could not run"
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
        "the paper's ablation, in 32 bits",
        settings={"compression": {"codec": "fp32"}},
        like="DiLoCoX",
    ),
    Method(
        "ours",
        "swarm",
        DENSE,
        f"as presets for short runs: Muon, all values in 2 bits, rebase with the whole lead; rounds of {OURS_STEPS} steps",
        OURS,
        reference="AllReduce (Muon)",
        inner_steps=OURS_STEPS,
        published=False,
    ),
)
METHOD = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Scale:
    """Scale that all rows share."""

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
        """Return the values that settings are chosen for, for a run of any length. A step's seconds count only if the
        link's bandwidth is fixed. At the paper's ratio it follows them, and commits arrive after nearly as many steps."""
        said = {"preset": self.preset, "clusters": self.clusters, "line": self.line, "text": self.text.digest}
        return said if self.line is None else {**said, "step_seconds": self.step_seconds}

    @property
    def model(self) -> Manifest:
        return load_preset(self.preset) if self.preset else TOY.manifest({}, self.steps, 0, self.text)

    def bits_per_second(self) -> float:
        """Return the bandwidth at which a ring of 16-bit gradients takes as many steps' time as in the published run."""
        if self.line is not None:
            return self.line
        parameters = parameter_count(self.model.model)
        site = Site(parameters, Step(self.step_seconds), 0.0, self.clusters, Line.both_ways(1.0))
        return ring(site).line_seconds / (self.step_seconds * ring(PAPER).line_seconds / PAPER.step.seconds)

    def manifest(self, method: Method, settings: Settings | None = None) -> Manifest:
        """Return the manifest. `settings`: in place of the chosen ones."""
        merged = ARMS.get(method.arm, TOY).manifest(won(method.arm), self.steps, 0, self.text).model_dump(exclude_none=True)
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
        low_rank = run.compression.codec == "lowrank-int4"
        return run.model_copy(update={"compression": published_compression(run.model)}) if low_rank else run

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


def won(arm: str) -> Settings:
    """Return the best settings of the arm's sweep, or of its draws in the study's cell, as docs/results has them."""
    if arm == DENSE:
        cells = json.loads((FOLDER / "study.json").read_text())["results"]["cells"]
        rows = next(cell["rows"] for cell in cells if cell["name"] == STUDIED_CELL.name)
        return Choice(**next(row["tuned"]["choice"] for row in rows if row["arm"] == arm)).settings()
    return ARMS[arm].rates


def chosen(scale: Scale, method: Method) -> Settings:
    """Return the best settings that `--tune` tried at this scale; empty without a search."""
    for path in (RESULTS / f"{TUNED}.json", RESULTS / f"{TUNED_OTHER}.json", FOLDER / f"{TUNED}.json"):
        if path.exists():
            found = json.loads(path.read_text())["results"]
            if scale.tuned_for.items() <= found["scale"].items():
                best: Settings = found["rows"].get(method.tuned_as, {}).get("chosen", {})
                return best
    return {}


def toml(run: Manifest) -> str:
    """Return a run file with an empty owner."""
    lines = []
    for name, section in run.model_dump(mode="json", exclude_none=True).items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in section.items())]
        else:
            lines.insert(0, f"{name} = {json.dumps(section)}")
    return "\n".join(lines).replace(f'owner = "{run.run.owner}"', 'owner = "{owner}"') + "\n"
