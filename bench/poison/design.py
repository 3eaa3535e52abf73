"""Design of the comparison: attacks (bench/attacks.py) against defences, each of which adds one choice to the previous,
for a number of clusters.

A cell is one training run. Its key is the digest of everything that it depends on.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.arms import ARMS, Arm, Settings
from bench.report import load_preset
from bench.texts import Text, stdlib
from dilocox.protocol.crypto import sha256
from dilocox.protocol.run.manifest import Manifest

__all__ = [
    "ARRIVAL",
    "BIAS",
    "CODECS",
    "DEFENCES",
    "FULL",
    "HORIZON",
    "QUICK",
    "SCORED",
    "SCORES",
    "TENSORS",
    "Cell",
    "Defence",
    "Setting",
]

HORIZON = 5
ARRIVAL = 2
"""Inner step at which a commit arrives."""
_PRESET = load_preset("tiny").model_dump(exclude_none=True)
DENSE: Settings = {
    "training": {key: _PRESET["training"][key] for key in ("optimizer", "muon_momentum")},
    "compression": {**_PRESET["compression"], "entropy_coding": True},
    "rounds": {key: _PRESET["rounds"][key] for key in ("overlap", "lead_weight")},
    "outer": _PRESET["outer"],
}
"""Settings of presets for short runs, with the entropy coding of the stored runs: the same values, in fewer bytes."""
AVERAGING: Settings = {"outer": {"learning_rate": 1.0, "momentum": 0.0}}
MUON_RATES: Settings = {"training": {"learning_rate": 3e-3, "muon_learning_rate": 0.02}}
CODECS: dict[str, tuple[Arm, Settings]] = {
    "sparse": (replace(ARMS["sparse, Muon"], rates=MUON_RATES), AVERAGING),
    "low rank": (ARMS["DiLoCoX"], AVERAGING),
    "dense": (Arm(DENSE, MUON_RATES), {}),
}
"""Codecs by kind of payload: the algorithm, and the settings that change it."""
SMALL: Settings = {
    "model": {"hidden_size": 64, "intermediate_size": 128, "sequence_length": 32},
    "data": {"evaluation_sequences": 128},
    "training": {"warmup_steps": 5},
}
"""Settings that change the toy of bench/arms.py."""


class Unbounded(Manifest):
    """A run whose voters let a payload change a tensor by nearly any amount."""

    @property
    def largest_rms(self) -> float:
        return 1e6


@dataclass(frozen=True)
class Defence:
    name: str
    describe: str
    settings: Mapping[str, Mapping[str, Any]]
    bounds_rms: bool = True
    """True: voters reject payloads that move a tensor farther than an honest local phase, as in the product."""
    looks_for_bias: bool = False
    """True: voters take sketches, as in the product."""


def _more(before: Defence, name: str, describe: str, **settings: Mapping[str, Any]) -> Defence:
    merged = {section: dict(values) for section, values in before.settings.items()}
    for section, values in settings.items():
        merged.setdefault(section, {}).update(values)
    return Defence(name, describe, merged)


OFF = {"weight_cap": 0, "clip_ratio": 1024.0, "tensor_clip_ratio": 0}
NONE = Defence("none", "the mean by announced tokens", {"rounds": OFF}, bounds_rms=False)
CAP = replace(_more(NONE, "cap", "weights at most the median", rounds={"weight_cap": 1.0}), bounds_rms=False)
TOTAL = _more(CAP, "+ clip", "payloads at most two medians, and largest_rms", rounds={"clip_ratio": 2.0})
TENSORS = _more(
    TOTAL, "+ tensors", "each tensor at most 1.25 medians: the defaults of an open run", rounds={"tensor_clip_ratio": 1.25}
)
CENTERED = _more(TENSORS, "centered-clip", "outer.aggregate", outer={"aggregate": "centered-clip"})
SCORING = {"voters": 32}
SCORES = _more(TENSORS, "scores", "the defaults, and a committee of 32 that scores each round for itself", scoring=SCORING)
BIAS = replace(SCORES, name="scores + bias", describe="as scores, and who pulls steadily harms", looks_for_bias=True)
SCORES_CENTERED = _more(CENTERED, "scores + centered-clip", "both", scoring=SCORING)
DEFENCES = [
    NONE,
    CAP,
    TOTAL,
    TENSORS,
    CENTERED,
    SCORES,
    BIAS,
    SCORES_CENTERED,
]
"""A defence that is to come is one more."""
SCORED = {SCORES.name: TENSORS.name, BIAS.name: TENSORS.name, SCORES_CENTERED.name: CENTERED.name}
"""Defences with scores, and the same defence without scores."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    attack: str
    defence: str
    clusters: int
    hostile: int
    codec: str
    layers: int
    steps: int
    seed: int
    text: Text

    @property
    def defended(self) -> Defence:
        return next(defence for defence in DEFENCES if defence.name == self.defence)

    def manifest(self) -> Manifest:
        arm, on_top = CODECS[self.codec]
        choice: dict[str, dict[str, Any]] = {}
        model: Settings = {"model": {"num_hidden_layers": self.layers}}
        for settings in (arm.settings, arm.rates, SMALL, model, on_top, self.defended.settings):
            for section, values in settings.items():
                choice.setdefault(section, {}).update(values)
        run = arm.manifest(choice, self.steps, self.seed, self.text, HORIZON)
        return run if self.defended.bounds_rms else Unbounded.model_validate(run.model_dump())

    @property
    def said(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text.settings}

    @property
    def key(self) -> str:
        """Return the key of a kept run. Settings that a later version adds do not change it while they have their defaults."""
        said = [
            self.said,
            self.defended.bounds_rms,
            self.defended.looks_for_bias,
            self.manifest().model_dump(mode="json", exclude_defaults=True),
        ]
        return sha256(json.dumps(said, sort_keys=True).encode()).hex()[:24]


@dataclass(frozen=True)
class Setting:
    """One table: attacks down, defences across."""

    clusters: int
    hostile: int
    codec: str
    layers: int
    steps: int
    seeds: int

    def cells(self, attack: str, defence: str) -> list[Cell]:
        hostile = self.hostile if attack != "nobody" else 0
        cell = Cell(attack, defence, self.clusters, hostile, self.codec, self.layers, self.steps, 0, stdlib())
        return [replace(cell, seed=seed) for seed in range(self.seeds)]

    @property
    def inner_steps(self) -> int:
        """Return the inner steps of all clusters, over the runs of all seeds."""
        return self.clusters * self.steps * self.seeds

    @property
    def title(self) -> str:
        parts = f"{self.hostile} of {self.clusters} hostile, {self.codec} payloads"
        return f"{parts}, {self.layers} layer{'s' * (self.layers > 1)}, {self.length}"

    @property
    def length(self) -> str:
        """Return the length in words."""
        rounds = f"{self.steps // HORIZON} rounds of {HORIZON} inner steps"
        return f"{rounds}, {self.seeds} seed{'s' * (self.seeds > 1)}"


QUICK = Setting(4, 1, "sparse", 1, 50, 1)
FULL = [
    Setting(clusters, hostile, codec, 1, steps, 3)
    for codec in CODECS
    for clusters, hostile, steps in ((4, 1, 200), (8, 1, 200), (8, 2, 200), (16, 5, 100))
]
