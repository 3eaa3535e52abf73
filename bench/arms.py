"""The arms of the convergence bench: each algorithm as a run file's settings, and the four settings it may choose from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.encoders import SparseLoCoState
from bench.report import load_preset
from bench.sections import merge
from bench.texts import Text, stdlib
from dilocox.node.outer.state import StageState
from dilocox.protocol.manifest import Compression, Manifest, Model

__all__ = ["ARMS", "CLUSTERS", "HORIZON", "RANK", "Arm", "Lengths", "Settings", "published_compression"]

CLUSTERS = 4
HORIZON = 20
"""Inner steps of a round, for all that have rounds and are not told otherwise."""
MOST_PHASES = 4
"""max_inner_steps in rounds: no commit of these benches is as late."""
RANK = 16
"""Of DiLoCoX as published: with Int4 it sets the bytes that the others may use."""

Settings = Mapping[str, Mapping[str, Any]]

PUBLISHED_RANK_SHARE = 4
"""Of the width, the published rank: 2,048 of 8,192."""


def published_compression(model: Model) -> Compression:
    """DiLoCoX's, of a model of any width."""
    return Compression(rank=model.config.hidden_size // PUBLISHED_RANK_SHARE)


@dataclass(frozen=True)
class Lengths:
    """How long a run is: inner steps of each cluster."""

    steps: int = 600
    sweep_steps: int = 200


@dataclass(frozen=True)
class Arm:
    name: str
    describe: str
    settings: Settings
    choices: Sequence[Settings]
    """Tried with one seed and Lengths.sweep_steps; every arm has equally many."""
    runner: Literal["lab", "allreduce", "cocktail"] = "lab"
    share: float = 0.0
    """Of CocktailSGD."""
    states: type[StageState] = StageState
    """Class of the stage states of a lab's clusters."""
    horizon: int = HORIZON

    def manifest(self, choice: Settings, steps: int, seed: int, text: Text | None = None) -> Manifest:
        """The toy: byte-level, 0.87M parameters, one stage, sequences of 64."""
        merged = {name: dict(section) for name, section in load_preset("tiny").model_dump(exclude_none=True).items()}
        merged["compression"] = {"codec": "fp32"}  # an arm's codec is its own, whatever the preset's
        toy: Settings = {
            "model": {"model_type": "llama", "sequence_length": 64, "stages": 1, "seed": seed},
            "data": {**(text or stdlib()).settings, "seed": seed, "evaluation_sequences": 256},
            "training": {
                "optimizer": "adamw",
                "muon_momentum": 0.95,
                "microbatches": 1,
                "total_steps": steps,
                "warmup_steps": 30,
            },
            "outer": {"learning_rate": 1.0, "momentum": 0.0},
            "rounds": self._rounds(steps),
        }
        for settings in (toy, self.settings, choice):
            merge(merged, settings)
        return Manifest.model_validate(merged)

    def _rounds(self, steps: int) -> Mapping[str, Any]:
        horizon = min(self.horizon, steps // 2)
        return {
            "inner_steps": horizon,
            "lead_weight": 0.5,
            "max_inner_steps": MOST_PHASES * horizon,
            "count": steps // horizon,
            "synchronous_rounds": 0,
        }


def _adamw(*rates: float) -> list[Settings]:
    return [{"training": {"learning_rate": rate}} for rate in rates]


def _muon(*pairs: tuple[float, float]) -> list[Settings]:
    return [{"training": {"learning_rate": rate, "muon_learning_rate": muon}} for rate, muon in pairs]


def _outer(*choices: tuple[float, float, float]) -> list[Settings]:
    """(inner learning rate, outer learning rate, outer momentum)."""
    return [
        {"training": {"learning_rate": inner}, "outer": {"learning_rate": outer, "momentum": momentum}}
        for inner, outer, momentum in choices
    ]


MUON = {"optimizer": "muon"}
MUON_RATES = _muon((3e-3, 0.02), (3e-3, 0.04), (6e-3, 0.02), (6e-3, 0.04))
SYNCHRONOUS_RATES = _outer((3e-3, 1.0, 0.0), (6e-3, 1.0, 0.0), (3e-3, 0.7, 0.4), (3e-3, 0.7, 0.9))
DELAYED_RATES = _outer((3e-3, 0.5, 0.0), (6e-3, 0.5, 0.0), (3e-3, 0.5, 0.5), (3e-3, 0.7, 0.9))
OURS = {"codec": "topk-int2", "k": 230, "entropy_coding": True}
"""At half the round length half the bytes of a round."""
OURS_HORIZON = 10
SHORTER = {**OURS, "k": 95}
REBASE = {"overlap": "rebase", "lead_weight": 0.5}

ARMS = [
    Arm("AllReduce", "AdamW on the mean gradient, every step", {}, _adamw(1.5e-3, 3e-3, 6e-3, 1.2e-2), runner="allreduce"),
    Arm("AllReduce, Muon", "the same with Muon for hidden matrices", {"training": MUON}, MUON_RATES, runner="allreduce"),
    Arm(
        "DiLoCo fp32",
        "synchronous, uncompressed",
        {"compression": {"codec": "fp32"}, "rounds": {"overlap": "none"}},
        SYNCHRONOUS_RATES,
    ),
    Arm(
        "OpenDiLoCo",
        "synchronous, fp32; rounds as long as equal bytes allow",
        {"compression": {"codec": "fp32"}, "rounds": {"overlap": "none"}},
        SYNCHRONOUS_RATES,
        horizon=600,
    ),
    Arm(
        "DiLoCoX",
        "as published: low rank + Int4, Nesterov, one round late",
        {"compression": {"codec": "lowrank-int4", "rank": RANK}, "rounds": {"overlap": "delayed"}},
        DELAYED_RATES,
    ),
    Arm(
        "DiLoCoX without overlap",
        "the paper's ablation",
        {"compression": {"codec": "lowrank-int4", "rank": RANK}, "rounds": {"overlap": "none"}},
        SYNCHRONOUS_RATES,
    ),
    Arm(
        "DiLoCoX without compression",
        "the paper's ablation",
        {"compression": {"codec": "fp32"}, "rounds": {"overlap": "delayed"}},
        DELAYED_RATES,
    ),
    Arm(
        "CocktailSGD",
        "a random tenth, its largest 4%, Int4, every step: equal bytes",
        {},
        _adamw(7.5e-4, 1.5e-3, 3e-3, 6e-3),
        runner="cocktail",
        share=0.04,
    ),
    Arm(
        "SparseLoCo",
        "top-k of 4,096 in 2 bits, synchronous, feedback x 0.95: k as equal bytes allow",
        {
            "compression": {"codec": "topk-int2", "k": 540, "entropy_coding": True},
            "rounds": {"overlap": "none"},
        },
        SYNCHRONOUS_RATES,
        states=SparseLoCoState,
    ),
    Arm(
        "ours",
        "Muon, stage-wide top-k in 2 bits with Huffman coding, rebase with half the lead, short rounds",
        {"training": MUON, "compression": OURS, "rounds": REBASE},
        MUON_RATES,
        horizon=OURS_HORIZON,
    ),
    Arm(
        "ours without overlap",
        "ablation",
        {"training": MUON, "compression": OURS, "rounds": {"overlap": "none"}},
        MUON_RATES,
        horizon=OURS_HORIZON,
    ),
    Arm(
        "ours with the whole lead",
        "ablation: a cluster keeps all of its own work until the commit arrives",
        {"training": MUON, "compression": OURS, "rounds": {**REBASE, "lead_weight": 1.0}},
        MUON_RATES,
        horizon=OURS_HORIZON,
    ),
    Arm(
        "ours with AdamW",
        "ablation",
        {"compression": OURS, "rounds": REBASE},
        SYNCHRONOUS_RATES,
        horizon=OURS_HORIZON,
    ),
    Arm(
        "ours, H = 5",
        "half the round again, half the bytes of a round again",
        {"training": MUON, "compression": SHORTER, "rounds": REBASE},
        MUON_RATES,
        horizon=5,
    ),
    Arm(
        "ours, H = 5, without overlap",
        "its ablation",
        {"training": MUON, "compression": SHORTER, "rounds": {"overlap": "none"}},
        MUON_RATES,
        horizon=5,
    ),
]
