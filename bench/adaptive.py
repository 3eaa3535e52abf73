"""Adaptive compression: rank or k, relative error and held-out loss over rounds, for each rule. `python -m bench.adaptive`.

The rules decide as they do in a commit (protocol/adaptive.py), from what the payloads measure.
"""

from typing import Any

from bench.arms import ARMS, CLUSTERS
from bench.lab import Lab, process_group_of_one
from bench.report import table, write
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.tensors import parameter_count

__all__ = ["main"]

STEPS = 300
EVERY = 3
"""Rounds between the rows that are printed."""
LOW_RANK = {"codec": "lowrank-int4", "rank": 16, "min_keep": 4, "max_keep": 48}
RULES: dict[str, dict[str, Any]] = {
    "fixed": LOW_RANK,
    "effective-rank": {**LOW_RANK, "adapt": "effective-rank", "rank_share": 0.6},
    "error-budget": {**LOW_RANK, "adapt": "error-budget", "error_budget": 0.7},
    "error-budget, top-k": {
        "codec": "topk-int2",
        "k": 256,
        "entropy_coding": True,
        "adapt": "error-budget",
        "error_budget": 0.7,
        "min_keep": 64,
        "max_keep": 1024,
    },
}


def manifest(compression: dict[str, Any]) -> Manifest:
    arm = next(arm for arm in ARMS if arm.name == "DiLoCoX without overlap")
    return arm.manifest({"compression": compression, **arm.choices[0]}, STEPS, 0)


def main() -> None:
    process_group_of_one()
    results: dict[str, list[dict[str, float]]] = {}
    for name, compression in RULES.items():
        run = manifest(compression)
        lab = Lab(run, CLUSTERS, evaluate_every=EVERY).rounds()
        results[name] = [
            {
                "round": EVERY * (index + 1),
                "keep": point.rank_or_k,
                "error": point.error,
                "loss": point.loss,
                "bits_per_parameter": 8 * point.wire_bytes / parameter_count(run.model),
            }
            for index, point in enumerate(lab.points)
        ]
        print(f"{name}: loss {lab.losses[-1]:.4f}", flush=True)
    rows = [
        [
            str(row["round"]),
            name,
            str(row["keep"]),
            f"{row['error']:.3f}",
            f"{row['loss']:.4f}",
            f"{row['bits_per_parameter']:.1f}",
        ]
        for name, series in results.items()
        for row in series
    ]
    table(["round", "rule", "rank or k", "relative error", "loss", "bits/parameter so far"], rows)
    write("adaptive", results)


if __name__ == "__main__":
    main()
