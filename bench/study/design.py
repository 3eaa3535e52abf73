"""Design of the study, written before its runs; docs/results.md describes the earlier exploration.

    factors    inner optimizer x codec x overlap; H is no factor: it follows from the codec and the allowed bytes of a step
    cells      size of the model, clusters, length, bytes, text. All arms of a cell have equal time by the clock
               (time_model.py) of a site in the published run's proportions, rounded to whole rounds, give or take one half.
               They send at most as many bits for each inner step. The last exchange of overlapped arms is added to the time.
               Exact payloads send more, if two rounds would exceed a cell: tables list the time and the bits of each arm
    tuning     as many random settings for every arm, from a seed and the same ranges: inner rates, outer rate and momentum.
               The outer rate is drawn as lr / (1 - momentum), the distance that a steady gradient moves. Each is a short run
               (in the shortest cells a whole one); the best by the tuning set is run at full length with every seed. Arms
               with slow inner rates draw as often, from separate ranges
    reference  AllReduce with the same inner optimizer and as many steps as overlapped arms take; it draws further
               until the best is inside the tried range
    alone      one cluster without exchange, as many steps, tuned like a reference: the result that a swarm must improve on
    parts      parts of an overlapped arm's gap, at its best setting: as many phases of equal length with exact payloads that
               take no time, then with the arm's payloads, then the arm itself
    reported   the loss of the committed model on the test set, which no choice used: mean and 95% interval of the seeds

The two sets are the halves of the corpus' held-out documents.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from bench.arms import published_compression
from bench.baselines import CocktailSGD
from bench.encoders import ForgetfulState, SparseLoCoState
from bench.report import load_preset
from bench.sections import model_section
from bench.texts import Text
from dilocox.node.outer.state import StageState
from dilocox.node.planning.plan import like_the_paper
from dilocox.node.planning.time_model import (
    Estimate,
    Line,
    Method,
    Round,
    Site,
    Step,
    estimate,
    model_payload_bytes,
)
from dilocox.protocol.crypto import sha256
from dilocox.protocol.run.manifest import Compression, Manifest
from dilocox.protocol.run.tensors import parameter_count

__all__ = [
    "ARMS",
    "CELLS",
    "CENTRE",
    "CODECS",
    "HALF",
    "INNERS",
    "OVERLAPS",
    "PARTS",
    "REFERENCES",
    "SEEDS",
    "TRIALS",
    "Arm",
    "Cell",
    "Choice",
    "Trial",
    "drawn",
]

TRIALS = 6
"""Settings that every arm is tried with."""
SEEDS = 3
SHORTER, SHORTEST = 3, 1000
"""A trial's share of a run's length, for runs of at least this many steps."""
HALF = 192
"""Sequences of each held-out set."""
MOST_PHASES = 4
"""max_inner_steps in rounds: a commit that is later is waited for."""
WARMUP = 0.05
"""Share of a run's steps."""
SEQUENCE, BATCH = 64, 8

Ranges = Sequence[tuple[float, float]]
RANGES: Ranges = ((1.5e-3, 1.2e-2), (0.01, 0.06), (0.7, 2.0))
"""Ranges of AdamW's rate, Muon's, and the outer steady rate, drawn uniformly in the logarithm."""
MOMENTA = (0.0, 0.0, 0.4, 0.8)
SLOW_RANGES: Ranges = ((5e-4, 4e-3), (0.0025, 0.01), (1.5, 3.5))
"""Ranges if clusters drift less in a phase and the mean moves farther. They were written after some eighty single runs
that are not stored (docs/results.md)."""
SLOW_MOMENTA = (0.4, 0.6)

Inner = Literal["adamw", "muon", "muon 0.9"]
Part = Literal["", "local steps", "codec"]
PARTS: tuple[Part, ...] = ("local steps", "codec", "")
"""Parts of a gap; each includes the parts before it."""
Settings = Mapping[str, Mapping[str, Any]]

SIZES = {
    "small": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "large": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "3M": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
}
"""Sizes of 0.23M, 0.87M and 2.75M parameters, byte-level; the last needs a GPU."""

INNERS: dict[Inner, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "muon_momentum": 0.95},
    "muon": {"optimizer": "muon", "muon_momentum": 0.95},
    "muon 0.9": {"optimizer": "muon", "muon_momentum": 0.9},
}

CHUNKS = "top 540 of chunks"
"""SparseLoCo's, with its decay (bench/encoders.py)."""
FORGETFUL = "int4, nothing kept"
"""Without error feedback, as Streaming DiLoCo sends (bench/encoders.py)."""
CODECS: dict[str, dict[str, Any]] = {
    "fp32": {"codec": "fp32"},
    "low rank": {"codec": "lowrank-int4"},
    "int4": {"codec": "int4", "entropy_coding": True},
    "int2": {"codec": "int2", "entropy_coding": True},
    "top 230": {"codec": "topk-int2", "k": 230, "entropy_coding": True},
    "top 540": {"codec": "topk-int2", "k": 540, "entropy_coding": True},
    CHUNKS: {"codec": "topk-int2", "k": 540, "entropy_coding": True},
    FORGETFUL: {"codec": "int4", "entropy_coding": True},
}
"""Codecs. `top k`: of every 4,096 values; of chunks with SparseLoCo's decay. FORGETFUL: no error feedback."""
FACTORS = [name for name in CODECS if name != FORGETFUL]
COCKTAIL = "drawn int4"
"""CocktailSGD's, of gradients."""
NOTHING = "nothing"
"""Codec of one cluster alone, which exchanges nothing."""

OVERLAPS: dict[str, dict[str, Any]] = {
    "none": {"overlap": "none"},
    "delayed": {"overlap": "delayed"},
    "rebase": {"overlap": "rebase", "lead_weight": 0.5},
    "rebase, whole lead": {"overlap": "rebase", "lead_weight": 1.0},
}
FRAGMENTS = 2
"""Fragments of four layers; published: of about three layers, of many."""
MIXED = 0.5
"""Published: the share of a live fragment that stays when the averaged one arrives."""
LATER_CODECS = ("int2", "top 230", "top 540")
"""Codecs of the later arms: Muon with less momentum; the whole local mix; and slow inner rates, synchronous and with the
whole local mix."""


@dataclass(frozen=True)
class Arm:
    name: str
    inner: Inner
    codec: str = ""
    """Empty: no rounds, but an exchange of gradients in every step."""
    overlap: str = "none"
    published: str = ""
    """Name of the published algorithm."""
    fragments: int = 1
    """Streaming: each has its turn (bench/streaming.py)."""
    mixed: float | None = None
    """Mix of bench.streaming.Streaming, for arms with fragments."""
    slow: bool = False
    """True: it draws from SLOW_RANGES."""

    @property
    def is_reference(self) -> bool:
        return not self.codec

    @property
    def is_alone(self) -> bool:
        return self.codec == NOTHING

    @property
    def uses_line(self) -> bool:
        """Return whether its exchange takes time and counts. A reference's does not, and a single cluster exchanges
        nothing."""
        return not (self.is_reference or self.is_alone)

    @property
    def has_rounds(self) -> bool:
        return self.codec not in ("", COCKTAIL, NOTHING)

    @property
    def hides(self) -> bool:
        """Return whether it trains on beside its exchange, in rounds: then its gap has parts."""
        return self.has_rounds and self.overlap != "none"


def _arms() -> list[Arm]:
    """Return every inner optimizer with every codec, synchronous and by rebase; delayed as published; the later arms with
    few codecs."""
    known = {
        ("adamw", "fp32", "none"): "DiLoCo",
        ("adamw", "low rank", "delayed"): "DiLoCoX",
        ("adamw", "low rank", "none"): "DiLoCoX without overlap",
        ("adamw", CHUNKS, "none"): "SparseLoCo",
        ("muon", CHUNKS, "none"): "SparseLoCo, Muon",
        ("muon", "int2", "none"): "MuLoCo, int2",
        ("muon", "int4", "none"): "MuLoCo, int4",
    }
    arms = [Arm(name, inner) for inner, name in REFERENCES.items()]
    arms += [Arm(f"{inner} | alone", inner, NOTHING) for inner in INNERS]
    arms.append(Arm("muon, slow | alone", "muon", NOTHING, slow=True))
    for inner in INNERS:
        for codec in FACTORS:
            for overlap in OVERLAPS:
                published = known.get((inner, codec, overlap), "")
                if overlap == "delayed" and codec not in ("low rank", "int2"):
                    continue
                if (inner == "muon 0.9" or overlap == "rebase, whole lead") and codec not in LATER_CODECS:
                    continue
                arms.append(Arm(f"{inner} | {codec} | {overlap}", inner, codec, overlap, published))
    for codec in LATER_CODECS:
        for overlap in ("none", "rebase, whole lead"):
            published = known.get(("muon", codec, overlap), "")
            arms.append(
                Arm(f"muon, slow | {codec} | {overlap}", "muon", codec, overlap, published and f"{published}, slow", slow=True)
            )
    streaming: dict[Inner, str] = {"adamw": "Streaming DiLoCo", "muon": "Streaming DiLoCo, Muon"}
    for inner, published in streaming.items():
        name = f"{inner} | {FORGETFUL} | {FRAGMENTS} fragments, mixed"
        arms.append(Arm(name, inner, FORGETFUL, "rebase", published, FRAGMENTS, MIXED))
    arms.append(Arm(f"muon 0.9 | int2 | {FRAGMENTS} fragments, rebased", "muon 0.9", "int2", "rebase", "", FRAGMENTS))
    arms.append(Arm("CocktailSGD", "adamw", COCKTAIL, published="CocktailSGD"))
    return arms


REFERENCES: dict[Inner, str] = {"adamw": "AllReduce", "muon": "AllReduce, Muon", "muon 0.9": "AllReduce, Muon 0.9"}
ARMS = {arm.name: arm for arm in _arms()}


@dataclass(frozen=True)
class Cell:
    size: str
    clusters: int
    steps: int
    """Inner steps of an arm that hides its exchange: the time that all have."""
    bits: float
    """Largest payload bits for each parameter and inner step."""
    batch: int = BATCH
    """Sequences that a cluster reads in a step."""

    @property
    def name(self) -> str:
        text = f", {self.batch * SEQUENCE:,} bytes a step" if self.batch != BATCH else ""
        return f"{self.size}, {self.clusters} clusters, {self.steps:,} steps, {self.bits:g} bit{text}"

    @property
    def centre(self) -> bool:
        return self == CENTRE

    def shorter(self) -> "Cell":
        """Return the cell for tuning: itself, if a part of it would have time for only a round or two."""
        return self if self.steps < SHORTEST else replace(self, steps=self.steps // SHORTER)


CENTRE = Cell("small", 4, 3000, 0.016)
CELLS = [
    CENTRE,
    *(Cell("small", 4, steps, 0.016) for steps in (600, 1200)),
    *(Cell("small", clusters, 1200, 0.016) for clusters in (2, 8, 16)),
    *(Cell("small", 4, steps, 0.04) for steps in (600, 1200, 3000)),
    Cell("large", 4, 1200, 0.016),
    Cell("large", 4, 1200, 0.04),
    Cell("large", 8, 1200, 0.016),
    *(Cell("small", 4, steps, 0.2) for steps in (1200, 3000)),
    Cell("small", 4, 1200, 0.1),
    Cell("large", 4, 3000, 0.016),
    Cell("3M", 4, 3000, 0.016),
    *(Cell("small", 4, 3000, 0.016, times * BATCH) for times in (2, 4)),
]
"""Centre, and cells that change one thing about it, or two. Cells of 0.1 and 0.2 bit are for models that are large for
their devices, or slow: steps take long there, and a link carries more in one. The last four are the centre with larger
models, and with twice and four times as much text. There one cluster reads in a step as much as two and four of the
centre's together."""


@dataclass(frozen=True)
class Choice:
    """Settings that tuning chooses for an arm."""

    learning_rate: float
    muon_learning_rate: float
    steady_rate: float
    """Outer lr / (1 - momentum)."""
    momentum: float

    def settings(self) -> Settings:
        return {
            "training": {"learning_rate": self.learning_rate, "muon_learning_rate": self.muon_learning_rate},
            "outer": {"learning_rate": self.steady_rate * (1 - self.momentum), "momentum": self.momentum},
        }


def drawn(index: int, slow: bool = False) -> Choice:
    """Return the same draw for every arm with the same ranges: an arm ignores values that it does not need."""
    source = random.Random(f"dilocox study {'slow ' * slow}{index}")
    inner, muon, steady = (low * (high / low) ** source.random() for low, high in (SLOW_RANGES if slow else RANGES))
    return Choice(inner, muon, steady, source.choice(SLOW_MOMENTA if slow else MOMENTA))


@dataclass(frozen=True)
class Trial:
    """One training run. Its key is the digest of everything that it depends on, except the machine."""

    cell: Cell
    arm: str
    choice: Choice
    seed: int
    text: Text
    part: Part = ""
    """Part of its gap, with the parts before it; empty: the whole gap."""

    @property
    def definition(self) -> Arm:
        return ARMS[self.arm]

    @property
    def clusters(self) -> int:
        """Return the number of training clusters."""
        return 1 if self.definition.is_alone else self.cell.clusters

    @property
    def is_timed(self) -> bool:
        """Return whether commits come by the clock; otherwise at once, or never."""
        return self.definition.uses_line and not self.part

    @cached_property
    def key(self) -> str:
        """Return the key of a kept run. Settings that a later version adds do not change it while they have their defaults."""
        run = self.run.model_dump(mode="json", exclude_defaults=True)
        site = [self.site.line.up, self.site.fixed_seconds] if self.is_timed else []
        said = [not self.definition.uses_line, self.clusters, HALF, site, run]
        if self.definition.fragments > 1:
            said += [self.definition.fragments, self.definition.mixed]
        if self.definition.codec == COCKTAIL:
            said.append(self.share)
        if self.states is not StageState:
            said.append(self.states.__name__)
        return sha256(json.dumps(said, sort_keys=True).encode()).hex()[:24]

    @property
    def states(self) -> type[StageState]:
        """Return the class of the stage states of a lab's clusters."""
        of_codec = {CHUNKS: SparseLoCoState, FORGETFUL: ForgetfulState}
        return StageState if self.part == "local steps" else of_codec.get(self.definition.codec, StageState)

    @cached_property
    def base(self) -> Manifest:
        """Return the cell's model, which is the same for each arm."""
        merged = {name: dict(section) for name, section in load_preset("tiny").model_dump(exclude_none=True).items()}
        toy = {"model_type": "llama", "sequence_length": SEQUENCE, "stages": 1, "seed": self.seed}
        merged["model"] = model_section({**toy, **SIZES[self.cell.size]}, merged["model"])
        merged["data"] |= {**self.text.settings, "seed": self.seed, "evaluation_sequences": 2 * HALF}
        merged["training"] |= {"microbatches": 1, "batch_size": self.cell.batch}
        merged["compression"] = {"codec": "fp32"}
        merged["rounds"]["lead_weight"] = 0.5  # of arms without another one
        return Manifest.model_validate(merged)

    @cached_property
    def site(self) -> Site:
        """Return a site with the published run's proportions at the cell's bytes. DiLoCoX's payload, sent once in the
        steps that its bits allow, takes two thirds of its round. The fixed cost of every round is nearly half of that."""
        run, clusters = self.base, self.cell.clusters
        size = model_payload_bytes(run.model, self.published)
        one = Site(parameter_count(run.model), Step(1.0), clusters * run.tokens_per_step, clusters, Line.both_ways(1.0))
        return like_the_paper(one, size, self.inner_steps(self.published))

    @property
    def published(self) -> Compression:
        return published_compression(self.base.model)

    @property
    def compression(self) -> Compression:
        if self.definition.codec == "low rank":
            return self.published
        return Compression.model_validate(CODECS[self.definition.codec])

    def inner_steps(self, compression: Compression) -> int:
        """Return the H with which a codec's payloads use the cell's bits for each step; at most half of the run's steps."""
        bits = 8 * model_payload_bytes(self.base.model, compression) / parameter_count(self.base.model)
        return min(max(1, math.ceil(bits / self.cell.bits)), self.cell.steps // 2)

    @cached_property
    def clock(self) -> Estimate:
        """Return the clock of an arm with rounds, for one exchange; it moves a fragment if the arm has fragments."""
        size = model_payload_bytes(self.base.model, self.compression) / self.definition.fragments
        h = self.inner_steps(self.compression)
        overlap = OVERLAPS[self.definition.overlap]["overlap"]
        return estimate(self.site, Method(self.arm, size, h, MOST_PHASES * h, overlap))

    @property
    def round(self) -> Round:
        """Return the round in which each parameter is exchanged once. Slow links make fragments wait."""
        if self.definition.fragments == 1:
            return self.clock.round
        computing = self.clock.method.inner_steps * self.site.step.seconds
        seconds = max(computing, self.definition.fragments * self.clock.exchange_seconds)
        return Round(self.clock.method.inner_steps, seconds, seconds - computing)

    @cached_property
    def share(self) -> float:
        """Return the share of CocktailSGD's drawn values that fills the cell's limit."""
        size = parameter_count(self.base.model)
        return CocktailSGD.share_within(self.cell.bits * size / 8, size)

    @cached_property
    def run(self) -> Manifest:
        """Return the run with as many rounds as fit the cell's time; the learning rate's schedule ends with the last."""
        arm, merged = self.definition, self.base.model_dump()
        steps = self.cell.steps
        if arm.codec == COCKTAIL:
            moved = self.site.copies_seconds(self.cell.bits * parameter_count(self.base.model) / 8)
            steps = int(steps * self.site.step.seconds / max(self.site.step.seconds, moved))
        if arm.has_rounds:
            taken = self.round
            count = max(1, round(self.cell.steps / taken.seconds))
            steps, h = count * taken.steps, self.inner_steps(self.compression)
            payloads = Compression(codec="fp32") if self.part == "local steps" else self.compression
            merged["compression"] = payloads.model_dump()
            merged["rounds"] |= {
                **OVERLAPS[arm.overlap],
                "inner_steps": h,
                "max_inner_steps": MOST_PHASES * h,
                "count": count,
                "synchronous_rounds": 0,
            }
            if self.part:
                merged["rounds"] |= {**OVERLAPS["none"], "inner_steps": taken.steps, "max_inner_steps": taken.steps}
        merged["training"] |= {
            **INNERS[arm.inner],
            "total_steps": steps,
            "warmup_steps": max(1, int(WARMUP * steps)),
        }
        for name, section in self.choice.settings().items():
            merged[name] |= section
        return Manifest.model_validate(merged)

    def facts(self) -> dict[str, Any]:
        return {
            "cell": asdict(self.cell),
            "arm": self.arm,
            "choice": asdict(self.choice),
            "seed": self.seed,
            "text": self.text.name,
            **({"part": self.part} if self.part else {}),
        }
