"""Which algorithm reaches the best loss at the same tokens and wire bytes: every arm with its own tuned learning rates.

`python -m bench.convergence` prints a table and writes bench/results/convergence.json with two plots. Finished runs are kept in
bench/results/runs, so an interrupted bench goes on where it was. A commit arrives when the clock (node/clock.py) says: `--ratio` is
the exchange of DiLoCoX's payload over the computing of its round; the default is what the published 40% without overlap implies. Of
that exchange about half is what every round costs whatever its bytes, as in the published run; rounds of late commits grow longer.
"""

import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.arms import ARMS, CLUSTERS, HORIZON, RANK, Arm, Lengths, Settings
from bench.report import RESULTS, bench_parser, table, write
from bench.texts import Text, text_of
from dilocox.node.clock import Estimate, Line, Method, Site, Step, estimate, layouts_of, model_payload_bytes
from dilocox.node.plan import PAPER_RATIO, like_the_paper
from dilocox.protocol.crypto import sha256
from dilocox.protocol.manifest import Compression, Manifest
from dilocox.protocol.tensors import parameter_count, stage_tensors
from dilocox.transport.files import write_atomically

__all__ = ["choice_text", "main"]

RUNS = RESULTS / "runs"
QUICK = ("AllReduce", "ours")
BASELINE = "AllReduce"
COLOURS, LINES = 10, ("-", "--")
"""Of a plot: colours repeat with another line."""
POINTS = 15
"""Held-out losses measured per run."""


@dataclass(frozen=True)
class Job:
    """One training run; its place on disk is the hash of what it depends on."""

    arm: str
    choice: int
    seed: int
    steps: int
    text: Text
    ratio: float

    @property
    def definition(self) -> Arm:
        return next(arm for arm in ARMS if arm.name == self.arm)

    @property
    def run(self) -> Manifest:
        arm = self.definition
        run = arm.manifest(arm.choices[self.choice], self.steps, self.seed, self.text)
        return of_equal_steps(run, self.steps, self.ratio) if arm.runner == "lab" else run

    @property
    def path(self) -> Path:
        arm = self.definition
        clock = repr(site_of(self.run, self.ratio))
        key = (
            json.dumps([arm.runner, arm.share, arm.states.__name__, CLUSTERS, RANK, clock]).encode()
            + self.run.canonical_bytes()
        )
        return RUNS / f"{sha256(key).hex()[:24]}.json"

    def result(self) -> dict[str, Any] | None:
        return json.loads(self.path.read_text()) if self.path.exists() else None


def site_of(run: Manifest, ratio: float) -> Site:
    """In the published run's proportions, with steps of a second: of DiLoCoX's exchange, which takes `ratio` of its round, some is
    what every round costs, and only the rest shrinks with bytes."""
    one = Site(parameter_count(run.model), Step(1.0), CLUSTERS * run.tokens_per_step, CLUSTERS, Line.both_ways(1.0))
    return like_the_paper(
        one, sum(layout.largest for layout in layouts_of(shapes_of(run), Compression(rank=RANK))), HORIZON, ratio
    )


def shapes_of(run: Manifest) -> list[list[tuple[int, ...]]]:
    return [[spec.shape for spec in stage_tensors(run.model, stage)] for stage in range(run.model.stages)]


def expected(run: Manifest, ratio: float) -> Estimate:
    """What the clock says of an arm's rounds."""
    size, rounds = model_payload_bytes(run.model, run.compression), run.rounds
    return estimate(site_of(run, ratio), Method("", size, rounds.inner_steps, rounds.max_inner_steps, rounds.overlap))


def of_equal_steps(run: Manifest, steps: int, ratio: float) -> Manifest:
    """With as many rounds as fit, where they grow longer than H because commits arrive later."""
    count = 1 + (steps - run.rounds.inner_steps) // expected(run, ratio).round.steps
    return run.model_copy(update={"rounds": run.rounds.model_copy(update={"count": count})})


def run_job(job: Job) -> None:
    """In a worker process: train and keep the result."""
    import torch

    from bench.baselines import AllReduce, CocktailSGD
    from bench.lab import Lab, process_group_of_one

    process_group_of_one()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arm, started, data = job.definition, time.monotonic(), job.text.folder
    run = job.run
    every, site = max(1, job.steps // POINTS), site_of(run, job.ratio)
    if arm.runner == "lab":
        lab = Lab(
            run,
            CLUSTERS,
            site=site,
            device=device,
            evaluate_every=max(1, every // arm.horizon),
            data=data,
            states=arm.states,
        ).rounds()
        points = lab.points
    elif arm.runner == "allreduce":
        points = AllReduce(run, CLUSTERS, every, device, data, site).train().points
    else:
        points = CocktailSGD(run, CLUSTERS, arm.share, every, device, data, site).train().points
    result = {
        "job": {**asdict(job), "text": job.text.settings},
        "points": [asdict(point) for point in points],
        "parameters": parameter_count(run.model),
        "seconds": time.monotonic() - started,
    }
    RUNS.mkdir(parents=True, exist_ok=True)
    write_atomically(job.path, json.dumps(result).encode())


def run_all(jobs: Iterable[Job], processes: int) -> None:
    waiting = [job for job in jobs if job.result() is None]
    if not waiting:
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        for done, job in enumerate(pool.imap_unordered(_run_and_return, waiting), 1):
            result = job.result()
            assert result is not None
            loss = result["points"][-1]["loss"]
            line = f"{done}/{len(waiting)}  {job.arm}, choice {job.choice}, seed {job.seed}, {job.steps} steps: {loss:.4f}"
            print(f"{line}  ({result['seconds']:.0f} s)", flush=True)


def _run_and_return(job: Job) -> Job:
    run_job(job)
    return job


def last_loss(job: Job) -> float:
    result = job.result()
    assert result is not None
    loss = result["points"][-1]["loss"]
    return loss if math.isfinite(loss) else math.inf


def summarize(arm: Arm, choice: int, jobs: Sequence[Job], sweep: Sequence[float]) -> dict[str, Any]:
    """`sweep`: the loss of each choice after the short run."""
    results = [result for job in jobs if (result := job.result()) is not None]
    losses = [result["points"][-1]["loss"] for result in results]
    last = results[0]["points"][-1]
    return {
        "arm": arm.name,
        "describe": arm.describe,
        "settings": arm.settings,
        "choice": arm.choices[choice],
        "horizon": arm.horizon if arm.runner == "lab" else 1,
        "loss": statistics.fmean(losses),
        "spread": max(losses) - min(losses),
        "losses": losses,
        "sweep": sweep,
        "tokens": last["tokens"],
        "wire_bytes": last["wire_bytes"],
        "seconds": last["seconds"],
        "bits_per_parameter": 8 * last["wire_bytes"] / results[0]["parameters"],
        "curves": [result["points"] for result in results],
    }


def compare(
    arms: Sequence[Arm], seeds: int, lengths: Lengths, text: Text, ratio: float, processes: int
) -> list[dict[str, Any]]:
    """Sweep, choose, run: a summary for each arm."""
    sweeps = {
        arm.name: [Job(arm.name, choice, 0, lengths.sweep_steps, text, ratio) for choice in range(len(arm.choices))]
        for arm in arms
    }
    run_all((job for jobs in sweeps.values() for job in jobs), processes)
    best = {name: min(jobs, key=last_loss).choice for name, jobs in sweeps.items()}
    finals = {
        arm.name: [Job(arm.name, best[arm.name], seed, lengths.steps, text, ratio) for seed in range(seeds)] for arm in arms
    }
    run_all((job for jobs in finals.values() for job in jobs), processes)
    return [summarize(arm, best[arm.name], finals[arm.name], [last_loss(job) for job in sweeps[arm.name]]) for arm in arms]


def mean_curve(summary: dict[str, Any]) -> list[tuple[float, float]]:
    """(steps, loss) averaged over the seeds."""
    columns = zip(*summary["curves"], strict=True)
    return [(statistics.fmean(p["steps"] for p in c), statistics.fmean(p["loss"] for p in c)) for c in columns]


def delay_cost(summaries: Sequence[dict[str, Any]], ratio: float, text: Text) -> float | None:
    """Extra tokens that overlap costs to reach the loss it ends at, as a share, for a commit a whole phase late (node/plan.py)."""
    by_name = {summary["arm"]: summary for summary in summaries}
    if not {"ours", "ours without overlap"} <= by_name.keys():
        return None
    ours = by_name["ours"]
    steps, loss = mean_curve(ours)[-1]
    waiting = itertools.pairwise(mean_curve(by_name["ours without overlap"]))
    crossing = next((pair for pair in waiting if pair[1][1] <= loss), None)
    if crossing is None:
        return 0.0  # waiting never gets there
    earlier, later = crossing
    reached = earlier[0] + (later[0] - earlier[0]) * (earlier[1] - loss) / (earlier[1] - later[1])
    arm = next(arm for arm in ARMS if arm.name == "ours")
    clock = expected(arm.manifest(ours["choice"], int(steps), 0, text), ratio)
    return (steps / reached - 1) * clock.round.steps / clock.arrival_step


def print_summary(summaries: Sequence[dict[str, Any]]) -> None:
    base = next((item["loss"] for item in summaries if item["arm"] == BASELINE), None)
    rows = [
        [
            item["arm"],
            f"{item['loss']:.4f}",
            f"{item['spread']:.4f}",
            "–" if base is None else f"{item['loss'] / base - 1:+.1%}",
            str(item["horizon"]),
            f"{item['bits_per_parameter']:.1f}",
            f"{item['wire_bytes']:,}",
            f"{item['tokens']:,}",
            f"{item['seconds']:,.0f}",
            choice_text(item["choice"]),
        ]
        for item in summaries
    ]
    columns = [
        "arm",
        "loss",
        "spread",
        f"over {BASELINE}",
        "H",
        "bits/parameter",
        "wire bytes",
        "tokens",
        "by the clock, steps",
        "tuned",
    ]
    table(columns, rows)


def choice_text(choice: Settings) -> str:
    return " ".join(f"{name}.{key}={value:g}" for name, section in choice.items() for key, value in section.items())


def plot(summaries: Sequence[dict[str, Any]], beside: Path) -> list[Path]:
    """Loss over tokens and over wire bytes: the mean of the seeds. `beside`: the file of results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for key, label, scale in (("tokens", "tokens", "linear"), ("wire_bytes", "bytes that one cluster sent", "log")):
        figure, axes = pyplot.subplots(figsize=(9, 5.5))
        for index, item in enumerate(summaries):
            curves = list(zip(*item["curves"], strict=True))
            across = [statistics.fmean(point[key] for point in points) for points in curves]
            losses = [statistics.fmean(point["loss"] for point in points) for points in curves]
            axes.plot(across, losses, LINES[index // COLOURS], label=item["arm"])
        axes.set(xlabel=label, ylabel="held-out loss, nats per byte", xscale=scale, ylim=(None, 3.0))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        paths.append(beside.with_name(f"{beside.stem}-{key.replace('_', '-')}.png"))
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser("bench.convergence", __doc__, "two arms, one seed, few steps: minutes", bars=False)
    parser.add_argument("--arms", help="names separated by commas; default all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Lengths().steps, help="inner steps of a run")
    parser.add_argument("--data", metavar="NAME=DIR", help="a corpus of `dilocox data build` (default: the standard library)")
    parser.add_argument(
        "--ratio", type=float, default=PAPER_RATIO, help="exchange of DiLoCoX's payload / computing of its round"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time")
    options = parser.parse_args(arguments)
    text = text_of(options.data)
    names = options.arms.split(",") if options.arms else QUICK if options.quick else [arm.name for arm in ARMS]
    unknown = set(names) - {arm.name for arm in ARMS}
    if unknown:
        parser.error(f"no arm {', '.join(sorted(unknown))}; arms: {', '.join(arm.name for arm in ARMS)}")
    arms = [arm for arm in ARMS if arm.name in names]
    lengths = Lengths(60, 20) if options.quick else Lengths(options.steps, options.steps // 3)
    seeds = 1 if options.quick else options.seeds
    summaries = compare(arms, seeds, lengths, text, options.ratio, options.processes)
    print_summary(summaries)
    name = "convergence" + ("" if options.data is None else "-text")
    cost = delay_cost(summaries, options.ratio, text)
    if cost is not None:
        print(f"overlap: {cost:.3f} more tokens to the same loss for a commit a whole phase late")
    facts = {
        "delay_cost": cost,
        "steps": lengths.steps,
        "seeds": seeds,
        "clusters": CLUSTERS,
        "source": text.name,
        "ratio": options.ratio,
    }
    kept = write(name, {**facts, "arms": summaries}, options.quick)
    for path in plot(summaries, kept):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
