"""Adaptive compression: changes of the rank by the effective-rank rule, and its loss beside a fixed rank that sends as
many bytes.

The rule decides as in a commit (protocol/run/adaptive.py), from the clusters' measurements. Beside it a fixed rank runs for
as many steps and sends as many bytes, as nearly as whole ranks allow. The difference is the worth of the rule. `python
-m bench.adaptive [--quick] [--check]`; --check exits with 1 if a rule that ADVISED names loses by more than the seeds
differ.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.arms import ARMS, CLUSTERS, Settings
from bench.lab import Lab, process_group_of_one
from bench.report import bench_parser, judge, table, write
from dilocox.node.planning.time_model import model_payload_bytes
from dilocox.protocol.run.manifest import Compression, Manifest
from dilocox.protocol.run.tensors import parameter_count

__all__ = ["ADVISED", "COLUMNS", "Outcome", "cells", "main", "missed"]

STEPS, QUICK_STEPS = 200, 40
SEEDS, QUICK_SEEDS = 2, 1
LOW_RANK = {"codec": "lowrank-int4", "rank": 16}
RULES: dict[str, Settings] = {"effective-rank": {"compression": {**LOW_RANK, "adapt": "effective-rank"}}}
ADVISED: frozenset[str] = frozenset()
"""Rules that a run file is advised to take."""


@dataclass(frozen=True)
class Outcome:
    losses: Sequence[float]
    bits: float
    """Sent for each parameter and inner step."""
    keep: int
    """Rank or k in the last round."""
    inner_steps: float
    """Mean inner steps of a round."""

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        return max(self.losses) - min(self.losses)


def manifest(settings: Settings, steps: int, seed: int) -> Manifest:
    arm = ARMS["DiLoCoX without overlap"]
    run = arm.manifest({**arm.rates, "compression": settings["compression"]}, steps, seed)
    rounds = run.rounds.model_copy(update={"count": steps, **settings.get("rounds", {})})  # as many as make the steps
    return Manifest.model_validate(run.model_copy(update={"rounds": rounds}).model_dump())


def outcome(settings: Settings, steps: int, seeds: int) -> Outcome:
    """Return the outcome of as many rounds as make `steps` inner steps, for any H."""
    labs = []
    for seed in range(seeds):
        lab = Lab(manifest(settings, steps, seed), CLUSTERS, evaluate_every=10**6)
        while lab.members[0].total_steps < steps:
            lab.round()
        lab.settle()
        lab.measure()
        labs.append(lab)
    taken = labs[0].members[0].total_steps
    parameters = parameter_count(labs[0].run.model)
    return Outcome(
        [lab.points[-1].loss for lab in labs],
        statistics.fmean(8 * lab.wire_bytes / parameters / lab.members[0].total_steps for lab in labs),
        labs[0].head.rank_or_k,
        taken / (labs[0].head.round - 1),
    )


def fixed_like(settings: Settings, bits: float, steps: int) -> Settings:
    """Return the fixed rank or k that sends about `bits` for a parameter and inner step, at the H with which the rule
    began."""
    run = manifest(settings, steps, 0)
    name, most = ("rank", 96) if run.compression.codec == "lowrank-int4" else ("k", 2048)
    plain = {key: settings["compression"][key] for key in ("codec", "entropy_coding") if key in settings["compression"]}

    def off(keep: int) -> float:
        size = model_payload_bytes(run.model, Compression.model_validate({**plain, name: keep}))
        return abs(8 * size / parameter_count(run.model) / run.rounds.inner_steps - bits)

    return {"compression": {**plain, name: min(range(1, most + 1), key=off)}}


def missed(found: dict[str, tuple[Outcome, Outcome]]) -> list[str]:
    return [
        f"{name} is advised, and {rule.loss - fixed.loss:+.4f} beside a fixed codec of {fixed.bits:.4f} bits"
        for name, (rule, fixed) in found.items()
        if name in ADVISED and rule.loss > fixed.loss + max(rule.spread, fixed.spread)
    ]


COLUMNS = [
    "rule",
    "loss",
    "spread",
    "bits/parameter and step",
    "rank or k",
    "H",
    "fixed",
    "its bits",
    "its rank or k",
    "difference",
]


def main() -> None:
    options = bench_parser("bench.adaptive", __doc__, f"{QUICK_STEPS} steps, one seed").parse_args()
    process_group_of_one()
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if options.quick else (STEPS, SEEDS)
    found = {}
    for name, settings in RULES.items():
        rule = outcome(settings, steps, seeds)
        found[name] = rule, outcome(fixed_like(settings, rule.bits, steps), steps, seeds)
        print(f"{name}: {rule.loss:.4f}, fixed {found[name][1].loss:.4f}", flush=True)
    table(COLUMNS, [cells(row) for row in facts(found)])
    write("adaptive", {"steps": steps, "seeds": seeds, "rows": facts(found)}, options.quick)
    judge(missed(found), options.check)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as printed and as on the page."""
    return [
        row["rule"],
        f"{row['rule_loss']:.4f}",
        f"{row['rule_spread']:.4f}",
        f"{row['rule_bits']:.4f}",
        str(row["rule_keep"]),
        f"{row['rule_inner_steps']:.1f}",
        f"{row['fixed_loss']:.4f}",
        f"{row['fixed_bits']:.4f}",
        str(row["fixed_keep"]),
        f"{row['rule_loss'] - row['fixed_loss']:+.4f}",
    ]


def facts(found: dict[str, tuple[Outcome, Outcome]]) -> list[dict[str, Any]]:
    return [
        {
            "rule": name,
            **{
                f"{which}_{key}": getattr(outcome, key)
                for which, outcome in (("rule", rule), ("fixed", fixed))
                for key in ("loss", "spread", "bits", "keep", "inner_steps")
            },
        }
        for name, (rule, fixed) in found.items()
    ]


if __name__ == "__main__":
    main()
