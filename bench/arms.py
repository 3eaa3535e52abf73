"""A toy run of 0.87M parameters, and the settings of the algorithms that benches train it with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.report import load_preset
from bench.sections import merge
from bench.texts import Text, stdlib
from dilocox.protocol.run.manifest import Compression, Manifest, Model

__all__ = ["ARMS", "CLUSTERS", "Arm", "Settings", "published_compression"]

CLUSTERS = 4
HORIZON = 20
"""Inner steps of a round."""
MOST_PHASES = 4
"""max_inner_steps in rounds: no commit of these benches is as late."""

Settings = Mapping[str, Mapping[str, Any]]

PUBLISHED_RANK_SHARE = 4
"""Width divided by the published rank: 8,192 / 2,048."""


def published_compression(model: Model) -> Compression:
    """Return the published compression of DiLoCoX for a model of any width."""
    return Compression(rank=model.config.hidden_size // PUBLISHED_RANK_SHARE)


@dataclass(frozen=True)
class Arm:
    """One algorithm."""

    settings: Settings
    rates: Settings
    """Learning rates with the lowest loss in a sweep of four, 200 inner steps on the toy. The sweep is not kept."""

    def manifest(self, choice: Settings, steps: int, seed: int, text: Text | None = None, horizon: int = HORIZON) -> Manifest:
        """Return the toy's run: byte-level, one stage, sequences of 64. `choice`: settings on top of the algorithm's."""
        merged = {name: dict(section) for name, section in load_preset("tiny").model_dump(exclude_none=True).items()}
        merged["compression"] = {"codec": "fp32"}  # an arm has its own codec, whatever the preset's
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
            "rounds": _rounds(steps, min(horizon, steps // 2)),
        }
        for settings in (toy, self.settings, choice):
            merge(merged, settings)
        return Manifest.model_validate(merged)


def _rounds(steps: int, horizon: int) -> Mapping[str, Any]:
    return {
        "inner_steps": horizon,
        "lead_weight": 0.5,
        "max_inner_steps": MOST_PHASES * horizon,
        "count": steps // horizon,
        "synchronous_rounds": 0,
    }


def _rates(inner: float, outer: float | None = None, muon: float | None = None) -> Settings:
    """Return learning rates. `outer`: without momentum."""
    return {
        "training": {"learning_rate": inner} | ({} if muon is None else {"muon_learning_rate": muon}),
        **({} if outer is None else {"outer": {"learning_rate": outer, "momentum": 0.0}}),
    }


LOW_RANK = {"codec": "lowrank-int4", "rank": 16}
SPARSE = {"codec": "topk-int2", "k": 230, "entropy_coding": True}
MUON = {"optimizer": "muon"}

ARMS: Mapping[str, Arm] = {
    "AllReduce": Arm({}, _rates(3e-3)),
    "AllReduce, Muon": Arm({"training": MUON}, _rates(6e-3, muon=0.04)),
    "CocktailSGD": Arm({}, _rates(6e-3)),
    "OpenDiLoCo": Arm({"compression": {"codec": "fp32"}, "rounds": {"overlap": "none"}}, _rates(3e-3, 1.0)),
    "DiLoCoX": Arm({"compression": LOW_RANK, "rounds": {"overlap": "delayed"}}, _rates(3e-3, 0.5)),
    "DiLoCoX without overlap": Arm({"compression": LOW_RANK, "rounds": {"overlap": "none"}}, _rates(3e-3, 1.0)),
    "DiLoCoX without compression": Arm({"compression": {"codec": "fp32"}, "rounds": {"overlap": "delayed"}}, _rates(3e-3, 0.5)),
    "sparse, Muon": Arm(
        {"training": MUON, "compression": SPARSE, "rounds": {"overlap": "rebase", "lead_weight": 0.5}},
        _rates(6e-3, muon=0.02),
    ),
}
