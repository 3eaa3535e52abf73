"""`make reproduce`: the paper's table, measured: tokens per second, utilisation, loss and bytes of each method on one
machine.

Every row is a set of real processes, one for each cluster, in network namespaces. That needs root; otherwise they run
on loopback, with a limit on the nodes' sends, and without gloo's rows. Links have the published run's ratio: AllReduce
moves its 16-bit gradient in 357 times the compute of a step; `--line` sets another bandwidth. A step computes for at
least `--step-seconds`. So codecs and daemons, which have their own cores on a real host, do not slow the training of
others here. `--preset` sets a bigger model, `--data` another text.

Swarms (DiLoCoX, OpenDiLoCo, ours) train on their links from the first step to the last, and the run measures their
losses. For methods that exchange in every step, some steps are timed on the link. Their losses come from the same
arithmetic in one process, placed on the measured clock. Each row is stored under the digest of its settings, so an
interrupted bench continues from there. `--check` exits with 1 if a bar is missed.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from bench.lines import Swarm, swarm, until
from bench.methods import DRAWN_SHARE, METHOD, METHODS, Method, Scale, chosen, toml
from bench.processes import started
from bench.report import RESULTS, bench_parser, judge, machine, table, write
from bench.study.analysis import T95, interval
from bench.texts import Text, text_of
from bench.tuning import tune
from dilocox.cli.run.init import preset_names
from dilocox.node.planning.plan import PAPER, PUBLISHED
from dilocox.protocol.crypto import sha256
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count
from dilocox.testnet.namespaces import Namespaces, Net, lacking
from dilocox.testnet.swarm import WAN
from dilocox.transport.limits.rate_limits import bits_per_second
from dilocox.transport.store.files import write_atomically

__all__ = ["METHODS", "Found", "Point", "Scale", "main", "missed"]

Steps = Mapping[str, tuple[int, float]]
"""Inner steps of each node, and its clock after them."""

KEPT = RESULTS / "reproduce"
TIMED, QUICK_TIMED = 10, 3
"""Steps on the link, of methods that exchange in each."""
STEPS = 625
LEAST_STEPS = QUICK_STEPS = 2 * max(method.inner_steps for method in METHODS)
CURVE = 25
"""Steps between the losses of the arithmetic."""
FILLING = 2
"""Rounds until each takes as long as the next: no exchange runs beside the first, so its commit comes late and the next soon."""
STEADY = 3
"""Least measured rounds after these; if the exchange runs beside training, as many as make the run's steps."""
RATIO = PUBLISHED["DiLoCoX"] / PUBLISHED["AllReduce"]
UTILISATION_BAR, GAP_BAR = 0.97, 0.5
PAPER_LOSSES = {
    "AllReduce": 3.90,
    "DiLoCoX": 4.20,
    "DiLoCoX without overlap": 4.15,
    "DiLoCoX without compression": 4.02,
    "CocktailSGD": 5.23,
}
"""arXiv 2506.21263; AllReduce's and DiLoCoX's are derived from the differences that it gives."""
PAPER_TOKENS = {
    "AllReduce": PUBLISHED["AllReduce"],
    "DiLoCoX": PUBLISHED["DiLoCoX"],
    "DiLoCoX without overlap": PUBLISHED["without overlap"],
    "DiLoCoX without compression": PUBLISHED["without compression"],
}


QUICK = ("AllReduce", "AllReduce (Muon)", "DiLoCoX", "ours")


@dataclass(frozen=True)
class Point:
    steps: int
    """Inner steps of a cluster, in the mean of all."""
    seconds: float
    """Seconds on the link."""
    loss: float
    """Held-out, nats per token."""


@dataclass(frozen=True)
class Found:
    """A row."""

    tokens_per_second: float
    step_bytes: float
    """Payloads that one cluster sends for an inner step."""
    line_bytes: float
    """Bytes on one cluster's link for an inner step, sent and received, with all headers; 0: not measured."""
    curve: list[Point]
    rounds: list[float] = field(default_factory=list)
    """Seconds of each, or of each timed step."""

    def loss_at(self, value: float, key: Literal["steps", "seconds"]) -> float:
        """Return the loss between its points by linear interpolation; after the last point the last loss."""
        points = self.curve
        for before, after in pairwise(points):
            at, then = getattr(before, key), getattr(after, key)
            if value <= then:
                share = (value - at) / (then - at) if then > at else 1.0
                return before.loss + max(0.0, share) * (after.loss - before.loss)
        return points[-1].loss


# Swarms


def train(scale: Scale, method: Method) -> Found:
    run = scale.manifest(method)
    with (
        tempfile.TemporaryDirectory(prefix="dx-") as name,
        swarm(Path(name), toml(run), scale.clusters, scale.step_seconds, scale.bits_per_second(), scale.text) as running,
    ):
        until(running.closed)
        before = running.traffic()
        until(lambda: running.closed() >= FILLING)
        filled = running.steps()
        rows = until(lambda: trained(running, scale), running.closed)
        done, after = running.steps(), running.traffic()
    return found_of(scale, run, rows, pace(filled, done), [after[node].since(before[node]) for node in before])


def pace(before: Steps, after: Steps) -> float:
    """Return the inner steps a second of all nodes together, by their own clocks: the time of a commit has a precision of
    seconds only."""
    return sum((after[node][0] - steps) / (after[node][1] - seconds) for node, (steps, seconds) in before.items())


def trained(running: Swarm, scale: Scale) -> list[dict[str, Any]] | None:
    """Return the rounds when the loss after the last step is known, and enough of them are steady; None before."""
    rows, run = running.rows(), running.manifest
    steps = list(accumulate(steps_of(scale, run, row) for row in rows))
    measured = any(
        done >= scale.steps and row["evaluation_loss"] is not None for row, done in zip(rows[1:], steps, strict=False)
    )
    steady = rows[FILLING:]
    waits = run.rounds.overlap == "none"
    settled = len(steady) >= STEADY and (waits or sum(steps_of(scale, run, row) for row in steady) >= scale.steps)
    return rows if measured and settled else None


def steps_of(scale: Scale, run: Manifest, row: dict[str, Any]) -> float:
    return row["tokens"] / run.tokens_per_step / scale.clusters


def found_of(scale: Scale, run: Manifest, rows: list[dict[str, Any]], pace: float, moved: Sequence[Any]) -> Found:
    """Return the result of a row. `pace`: inner steps in a second, once rounds are steady. The first rounds are on the
    clock, and not in the pace."""
    points, steps, seconds = [Point(0, 0.0, initial_loss(run))], 0.0, 0.0
    for row, following in pairwise(rows):
        steps, seconds = steps + steps_of(scale, run, row), seconds + row["seconds"]
        if following["evaluation_loss"] is not None:
            points.append(Point(round(steps), seconds, following["evaluation_loss"]))
    steady = rows[FILLING:]
    taken = sum(steps_of(scale, run, row) for row in rows[1:])
    return Found(
        pace * run.tokens_per_step,
        sum(row["payload_bytes"] for row in steady) / scale.clusters / sum(steps_of(scale, run, row) for row in steady),
        sum(each.sent + each.received for each in moved) / scale.clusters / taken if moved else 0.0,
        points,
        [row["seconds"] for row in rows],
    )


def initial_loss(run: Manifest) -> float:
    """Return the loss of a uniform guess over the tokens; initial weights give nearly this."""
    return math.log(run.model.config.vocab_size)


# Exchanges in every step


def time_steps(scale: Scale, method: Method) -> tuple[list[float], float, float]:
    """Return the seconds of each step on the link, bytes that a rank sends in one, and the link's traffic."""
    network = Namespaces([Net(WAN, [str(rank) for rank in range(scale.clusters)], scale.bits_per_second())])
    share = str(DRAWN_SHARE)
    with tempfile.TemporaryDirectory(prefix="dx-") as name, network.present(), ExitStack() as closing:
        run_file = Path(name) / "run.toml"
        run_file.write_text(toml(scale.manifest(method)).replace("{owner}", "00" * 32))
        arguments = [str(run_file), str(scale.text.folder), str(scale.step_seconds), share, str(scale.timed)]
        ranks = started(closing, "bench.reproducers", scale.clusters, network, Path(name), method.kind, *arguments)
        computing = max(rank.said()["computing"] for rank in ranks)
        if computing > scale.step_seconds:
            raise SystemExit(f"a step computes for {computing:.3g} s here: --step-seconds {computing * 1.5:.2g} or more")
        before = network.traffic(WAN)
        for rank in ranks:
            rank.tell(go=True)
        steps = [[rank.said() for rank in ranks] for _ in range(scale.timed)]
        after = network.traffic(WAN)
    moved = [after[rank].since(before[rank]) for rank in before]
    carried = sum(each.sent + each.received for each in moved) / scale.clusters / scale.timed
    return [max(each["seconds"] for each in step) for step in steps], statistics.fmean(s[0]["sent"] for s in steps), carried


def arithmetic(scale: Scale, method: Method) -> list[tuple[int, float]]:
    """Return (steps, held-out loss) of the method in one process, without a link."""
    from bench.baselines import AllReduce, CocktailSGD
    from bench.lab import process_group_of_one

    process_group_of_one()
    run, every, data = scale.manifest(method), min(CURVE, scale.steps), scale.text.folder
    if method.kind == "allreduce":
        done = AllReduce(run, scale.clusters, every, data=data).train()
    else:
        done = CocktailSGD(run, scale.clusters, DRAWN_SHARE, every, data=data).train()
    return [(0, initial_loss(run)), *((point.steps, point.loss) for point in done.points)]


def step_by_step(scale: Scale, method: Method, like: Found | None) -> Found:
    """Run a method that exchanges in every step. `like`: a row with equally long steps, if there is one."""
    with get_context("spawn").Pool(1) as pool:
        losses = pool.apply(arithmetic, (scale, method))
    if like is None:
        times, sent, carried = time_steps(scale, method)
    else:
        times, sent, carried = like.rounds, like.step_bytes, like.line_bytes
    seconds = statistics.fmean(times)
    curve = [Point(steps, steps * seconds, loss) for steps, loss in losses]
    run = scale.manifest(method)
    return Found(scale.clusters * run.tokens_per_step / seconds, sent, carried, curve, times)


# Rows


def path_of(scale: Scale, method: Method) -> Path:
    said = asdict(replace(scale, text=Text(scale.text.name, Path(), scale.text.digest)))
    rule = (FILLING, STEADY, "steps") if method.kind == "swarm" else (CURVE,)
    facts = [said, str(said["text"]), method.name, method.kind, DRAWN_SHARE, *rule, machine(), lacking()]
    key = json.dumps(facts, default=str).encode() + scale.manifest(method).canonical_bytes()
    return KEPT / f"{sha256(key).hex()[:24]}.json"


def kept(path: Path) -> Found | None:
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Found(**{**values, "curve": [Point(**point) for point in values["curve"]]})


def row_of(scale: Scale, method: Method, rows: dict[str, Found]) -> Found | None:
    """Return the stored row, or measure it now; None if this machine cannot."""
    if method.kind != "swarm" and lacking():
        print(f"{method.name}: left out: {lacking()}, and gloo's lines cannot be shaped without them", flush=True)
        return None
    path = path_of(scale, method)
    if (found := kept(path)) is None:
        began = time.monotonic()
        like = rows.get(method.timed_like)
        found = train(scale, method) if method.kind == "swarm" else step_by_step(scale, method, like)
        KEPT.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(found)).encode())
        print(f"{method.name}: {found.tokens_per_second:,.1f} tokens/s ({time.monotonic() - began:.0f} s)", flush=True)
    return found


READINGS = ("DiLoCoX", "DiLoCoX (other restart)")
"""Readings of the published restart. Ours is compared with the better one."""


def gap(rows: dict[str, Found], name: str, steps: int) -> float | None:
    """Return the gap to AllReduce with the same inner optimizer, after equal tokens, as a share."""
    reference = rows.get(METHOD[name].reference)
    return None if reference is None else rows[name].loss_at(steps, "steps") / reference.loss_at(steps, "steps") - 1


def utilisation(scale: Scale, found: Found) -> float:
    """Return the steps in a second, over those of a cluster without exchange."""
    tokens = scale.clusters * scale.model.training.batch_size * scale.model.model.sequence_length
    return found.tokens_per_second / tokens * scale.step_seconds


def missed(scale: Scale, rows: dict[str, Found]) -> list[str]:
    """Return the missed bars, as sentences."""
    sentences = []
    theirs, ours = rows["DiLoCoX"], rows["ours"]
    if ours.tokens_per_second < theirs.tokens_per_second:
        sentences.append(f"ours makes {ours.tokens_per_second:,.0f} tokens/s, DiLoCoX {theirs.tokens_per_second:,.0f}")
    of_ours = gap(rows, "ours", scale.steps)
    of_theirs = [found for name in READINGS if name in rows and (found := gap(rows, name, scale.steps)) is not None]
    if of_ours is None or not of_theirs:
        sentences.append("how far losses are over AllReduce's is not known: its rows are left out")
    elif of_ours > GAP_BAR * min(of_theirs):
        sentences.append(
            f"our loss is {of_ours:+.1%} over AllReduce's with the same optimizer, DiLoCoX's {min(of_theirs):+.1%}: not half"
        )
    if (used := utilisation(scale, ours)) < UTILISATION_BAR:
        sentences.append(f"utilisation of ours is {used:.3f}, not {UTILISATION_BAR}")
    return sentences


def end_of(rows: dict[str, Found], steps: int) -> float:
    """Return the seconds after which DiLoCoX has read all tokens: the equal time."""
    curve = rows["DiLoCoX"].curve
    return next((point.seconds for point in curve if point.steps >= steps), curve[-1].seconds)


COLUMNS = ["row", "tokens/s", "x AllReduce", "published", "utilisation", "loss", "gap", "published", "loss at equal time"]
COLUMNS += ["payload B/step", "line B/step"]


def cells(scale: Scale, rows: dict[str, Found], name: str) -> list[str]:
    found, base = rows[name], rows.get("AllReduce")
    difference = gap(rows, name, scale.steps)
    published = PAPER_TOKENS.get(name)
    loss = PAPER_LOSSES.get(name)
    return [
        name,
        f"{found.tokens_per_second:,.1f}",
        "–" if base is None else f"{found.tokens_per_second / base.tokens_per_second:,.1f}",
        "–" if published is None else f"{published / PUBLISHED['AllReduce']:,.1f}",
        f"{utilisation(scale, found):.1%}",
        f"{found.loss_at(scale.steps, 'steps'):.4f}",
        "–" if difference is None else f"{difference:+.1%}",
        "–" if loss is None else f"{loss / PAPER_LOSSES['AllReduce'] - 1:+.1%}",
        f"{found.loss_at(end_of(rows, scale.steps), 'seconds'):.4f}",
        f"{found.step_bytes:,.0f}",
        f"{found.line_bytes:,.0f}" if found.line_bytes else "–",
    ]


def plot(rows: dict[str, Found], path: Path) -> None:
    """Plot loss over time on the link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    for name, found in rows.items():
        reached = [point for point in found.curve if point.seconds > 0]
        axes.plot([point.seconds for point in reached], [point.loss for point in reached], label=name)
    axes.set(xlabel="seconds on the line", ylabel="held-out loss, nats per token", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser("bench.reproduce", __doc__, f"{', '.join(QUICK)}; {QUICK_STEPS} steps, {QUICK_TIMED} of them timed")
    parser.add_argument("--rows", help="names separated by commas, DiLoCoX and ours always (default: all)")
    parser.add_argument(
        "--tune", action="store_true", help="first look for the settings of each row: half an hour on two cores"
    )
    parser.add_argument("--preset", default="", choices=["", *preset_names()], help="a bigger model than the toy, in one stage")
    parser.add_argument("--clusters", type=int, default=PAPER.clusters)
    parser.add_argument("--steps", type=int, help=f"inner steps of a cluster (default {STEPS})")
    parser.add_argument("--step-seconds", type=float, default=0.09, help="that computing a step takes at least")
    parser.add_argument("--line", help="of a cluster, each way, such as 20mbit (default: the published ratio)")
    parser.add_argument("--data", metavar="NAME=DIR", help="a corpus of `dilocox data build` (default: the standard library)")
    options = parser.parse_args(arguments)
    if options.tune and options.quick:
        parser.error("--tune and --quick: settings of short runs would be none of the table's")
    if options.tune and (options.rows or options.steps):
        parser.error("--tune with --rows or --steps: all rows are tuned alike, and at the table's length")
    if options.clusters < 2 or options.step_seconds <= 0 or (options.steps is not None and options.steps < LEAST_STEPS):
        parser.error(f"--clusters 2 at least, --step-seconds above 0, --steps {LEAST_STEPS} at least: two rounds of every row")
    named = set(options.rows.split(",")) if options.rows else {method.name for method in METHODS}
    if unknown := named - {method.name for method in METHODS}:
        parser.error(f"no row {', '.join(sorted(unknown))}; rows: {', '.join(method.name for method in METHODS)}")
    asked = ("rows", "preset", "clusters", "steps", "step_seconds", "line", "data")
    options.whole = all(getattr(options, name) == parser.get_default(name) for name in asked)
    options.rows = set(QUICK) if options.quick and not options.rows else named | {"DiLoCoX", "ours"}
    return options


def without_settings(scale: Scale, methods: Sequence[Method]) -> list[str]:
    """Return a sentence if rows were not tuned at such a scale: another Python's standard library is another text."""
    names = [method.name for method in methods if not chosen(scale, method)]
    told = "not tuned for this text and these lines, and with what won elsewhere (--tune looks for settings)"
    return [f"{', '.join(names)}: {told}"] if names else []


def ratio(theirs: Found, base: Found) -> str:
    """Return the ratio. `theirs`: DiLoCoX as published; `base`: AllReduce, whose steps were timed one by one."""
    times = theirs.tokens_per_second / base.tokens_per_second
    spread = interval(base.rounds) / statistics.fmean(base.rounds) if len(base.rounds) in T95 else math.inf
    told = f" ± {spread:.1%}, by AllReduce's {len(base.rounds)} timed steps" if math.isfinite(spread) else ""
    return f"DiLoCoX as published over AllReduce: {times:,.0f} times the tokens per second{told}; published: {RATIO:.0f}"


def report(scale: Scale, methods: Sequence[Method], rows: dict[str, Found]) -> None:
    facts, equal = machine(), end_of(rows, scale.steps)
    print(
        f"{facts['cores']} cores, {facts['platform']}; {scale.steps} steps of {scale.step_seconds:g} s; text {scale.text.name}"
    )
    table(COLUMNS, [cells(scale, rows, name) for name in rows])
    for method in methods:
        print(f"{method.name}: {method.note}")
    print(f"loss: after {scale.steps} steps of every cluster; at equal time: after {equal:.0f} s, when DiLoCoX has taken them;")
    print(
        "gap: over AllReduce with the same inner optimizer; losses of what exchanges in every step: arithmetic, on the timed clock"
    )
    if (base := rows.get("AllReduce")) is not None:
        print(ratio(rows["DiLoCoX"], base))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    quick = options.quick
    scale = Scale(
        options.preset,
        options.clusters,
        options.steps or (QUICK_STEPS if quick else STEPS),
        QUICK_TIMED if quick else TIMED,
        options.step_seconds,
        bits_per_second(options.line, "--line") if options.line else None,
        text_of(options.data),
    )
    if options.tune:
        tune(scale, options.whole)
    methods = [method for method in METHODS if method.name in options.rows]
    untuned = without_settings(scale, methods)
    line, parameters = scale.bits_per_second(), parameter_count(scale.model.model)
    print(f"{scale.clusters} clusters of {parameters:,} parameters on lines of {line / 1e3:,.0f} kbit/s", flush=True)
    rows: dict[str, Found] = {}
    for method in methods:
        if (found := row_of(scale, method, rows)) is not None:
            rows[method.name] = found
    report(scale, methods, rows)
    for sentence in untuned:
        print(sentence)
    facts = {**asdict(scale), "text": scale.text.settings, "line": line}
    shown = {"columns": COLUMNS, "cells": [cells(scale, rows, name) for name in rows]}
    base = rows.get("AllReduce")
    notes = [
        *([ratio(rows["DiLoCoX"], base)] if base else []),
        *(f"{method.name}: {method.note}" for method in methods),
        *untuned,
    ]
    results = {"scale": facts, "rows": {name: asdict(found) for name, found in rows.items()}, "table": shown, "notes": notes}
    kept = write("reproduce" if options.whole else "reproduce-other", results, quick)
    plot(rows, kept.with_suffix(".png"))
    print(f"wrote {kept} and .png")
    judge(missed(scale, rows), options.check)


if __name__ == "__main__":
    main()
