"""Unequal boxes: three clusters and one four times slower, for the same wall-clock time, by how a round ends.

    waiting      fixed H, synchronous: everybody waits for the slow box
    fixed H      rebase: the fast ones train on while the slow box finishes its H, up to max_inner_steps
    time-boxed   rebase: a round lasts as long as a fast box needs for H; the slow one takes the steps that fit

The mean is weighted by tokens, up to their median. Time is counted in steps of a fast box. `python -m bench.unequal`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from bench.arms import ARMS, CLUSTERS
from bench.lab import Lab, process_group_of_one
from bench.report import bench_parser, table, write

__all__ = ["main"]

SLOWDOWN = 4
SPEEDS = (1.0, 1.0, 1.0, 1 / SLOWDOWN)
STEPS = 240
"""Of a fast box: the wall-clock time of every row."""
SEEDS = 3
HORIZON = 10
ARRIVAL = 0.6
"""Of a fast box's H that the exchange takes."""


def run(rule: str, seed: int) -> tuple[float, int]:
    """(held-out loss, tokens read)."""
    arm = next(arm for arm in ARMS if arm.name == "ours")
    boxed = rule == "time-boxed"
    length = HORIZON if boxed else SLOWDOWN * HORIZON  # of a round, in steps of a fast box
    rounds = {
        "inner_steps": HORIZON,
        "max_inner_steps": SLOWDOWN * HORIZON,
        "count": STEPS // length,
        "overlap": "none" if rule == "waiting" else "rebase",
        "round_seconds": float(HORIZON) if boxed else None,  # a second is a step of a fast box
    }
    manifest = arm.manifest({"rounds": rounds, **arm.choices[0]}, STEPS, seed)

    def arrive(_: Lab, cluster: int) -> int:
        """A fast box is SLOWDOWN rounds of its own ahead when the slow one has done its H."""
        if rule == "fixed H" and SPEEDS[cluster] == 1:
            return SLOWDOWN * HORIZON
        return int(SPEEDS[cluster] * ARRIVAL * HORIZON)

    lab = Lab(manifest, CLUSTERS, arrive_at=arrive, speeds=SPEEDS, evaluate_every=10**6).rounds()
    return lab.losses[-1], lab.points[-1].tokens


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.unequal", __doc__, "one seed", bars=False).parse_args(arguments)
    seeds = 1 if options.quick else SEEDS
    process_group_of_one()
    results: list[dict[str, Any]] = []
    for rule in ("waiting", "fixed H", "time-boxed"):
        found = [run(rule, seed) for seed in range(seeds)]
        losses = [loss for loss, _ in found]
        results.append(
            {
                "rule": rule,
                "loss": statistics.fmean(losses),
                "spread": max(losses) - min(losses),
                "tokens": found[0][1],
                "tokens_per_step_time": found[0][1] / STEPS,
            }
        )
        print(f"{rule}: {losses}", flush=True)
    base = results[0]["tokens"]
    columns = ["round ends", "loss", "spread", "tokens", "tokens / time, waiting = 1"]
    rows = [
        [r["rule"], f"{r['loss']:.4f}", f"{r['spread']:.4f}", f"{r['tokens']:,}", f"{r['tokens'] / base:.2f}"] for r in results
    ]
    table(columns, rows)
    write("unequal", {"steps": STEPS, "seeds": seeds, "slowdown": SLOWDOWN, "rows": results}, options.quick)


if __name__ == "__main__":
    main()
