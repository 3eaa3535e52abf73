"""`python -m bench.chaos [--check] [--seed N] [--minutes M]`: prints the cost of every fault for the other nodes; --check
exits 1 if a bar is missed. `--quick`: a few faults close together, to see that everything works."""

import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.chaos import loss
from bench.chaos.loss import Closed, Happened, Price, Verdict
from bench.chaos.network import lacking
from bench.chaos.schedule import COORDINATOR, DEADLINE_SECONDS, plan
from bench.chaos.world import World, distinct
from bench.report import bench_parser, judge, table, write
from bench.texts import stdlib
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.data_directory import load_identity

__all__ = ["FULL", "QUICK", "Form", "Report", "chaos", "main"]

NODES = 4
STEP_SECONDS = 0.25
"""A step of this model takes about 20 ms of one core. Four nodes load a third of a core, so two cores stay half idle."""
RUN = f"""
[run]
name = "chaos"
owner = "{{owner}}"
[model]
sequence_length = 16
stages = 2
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
[data]
evaluation_sequences = 8
[training]
learning_rate = 1e-2
total_steps = 100000
batch_size = 8
microbatches = 2
[compression]
rank = 8
[rounds]
count = 100000
inner_steps = 40
max_inner_steps = 400
synchronous_rounds = 1
min_clusters = 2
start_clusters = {NODES}
deadline_seconds = {DEADLINE_SECONDS}
vote_seconds = 10
liveness_seconds = 8
snapshot_every = 4
"""


@dataclass(frozen=True)
class Form:
    seed: int
    minutes: float
    """Minutes with faults."""
    calm_seconds: float
    """Before the first of them: what is faultless is measured there, and scaled."""
    every: float
    """Seconds from fault to fault, about."""
    clocks: bool = True
    """True: step the clocks, if possible."""


FULL = Form(seed=7, minutes=20, calm_seconds=180, every=30)
QUICK = Form(seed=15, minutes=1, calm_seconds=10, every=10, clocks=False)
"""A full disk, a damaged file, and a kill of all daemons at once, the coordinator included."""


@dataclass(frozen=True)
class Report:
    verdict: Verdict
    happened: list[Happened]
    calm: dict[str, float]
    """Steps a second of each node, before the first fault."""
    counted: float
    """Share of all tokens that all nodes would have trained without faults, the hit nodes included."""
    rounds: int
    usage: dict[str, list[list[float]]]
    """Seconds, MiB and descriptors of each daemon."""
    stranger: dict[str, int]
    clocks: bool
    """True if clocks could be stepped."""


def closed(commits: list[Statement[pb.Commit]], world: World, batch_size: int) -> list[Closed]:
    """Return the rounds of the chain, on the clock of this machine's processes."""
    behind = time.time() - time.monotonic()
    said, lasted = [c.body.closed_at_ms / 1000 - behind for c in commits], [c.body.open_ms / 1000 for c in commits]
    rounds = []
    roster: frozenset[str] = frozenset()
    read: dict[str, int] = {}
    """Samples that were settled since each node joined."""
    for commit, at in zip(commits, loss.moments(said, lasted), strict=True):
        counted, settled = {}, {}
        for item in taken(commit.body):
            name, body = world.name_of(item.cluster), item.contribution
            counted[name] = body.inner_steps
            settled[name] = (body.samples_read - read.get(name, 0)) // batch_size
            read[name] = body.samples_read
        rounds.append(Closed(commit.body.round, at, roster, counted, settled))
        roster = frozenset(world.name_of(member.cluster) for member in commit.body.roster)
        read = {name: samples for name, samples in read.items() if name in roster}
    return rounds


def chaos(folder: Path, form: Form) -> Report:
    """Run the bench; it needs everything that `lacking` checks."""
    key = folder / "chaos.key"
    run_file = stdlib().into(RUN).replace("{owner}", load_identity(key).key.hex()).encode()
    world = World(folder / "swarm", run_file, key.read_bytes(), NODES, STEP_SECONDS, form.seed)
    with world.running():
        world.until_all_are_counted()
        began = time.monotonic()
        world.sleep_until(began + form.calm_seconds)
        first = time.monotonic()
        calm = {node: loss.rate(world.samples[node], began, first) for node in world.nodes}
        for fault in plan(form.seed, form.minutes, world.nodes, form.every, form.clocks and world.clocks.there):
            world.sleep_until(first + fault.at)
            print(f"{time.monotonic() - first:6.0f} s  {fault}", flush=True)
            world.suffer(fault)
        world.sleep_until(time.monotonic() + form.every)
        last = time.monotonic()
        world.until_all_are_counted()
        world.stop()
        chains = world.chains()
        rounds = closed(chains[COORDINATOR], world, Manifest.from_toml(run_file.decode()).training.batch_size)
    prices = [
        each for node in world.nodes for each in loss.price(node, calm[node], world.samples[node], world.happened, rounds, last)
    ]
    counted = sum(sum(each.settled.values()) for each in rounds if first <= each.at < last)
    return Report(
        Verdict(prices, distinct(list(chains.values())), world.orphans, world.helps),
        world.happened,
        calm,
        counted / (sum(calm.values()) * (last - first)),
        len(rounds),
        {name: [[u.at - began, u.memory / 2**20, u.descriptors] for u in kept] for name, kept in world.usage.items()},
        world.stranger_did,
        form.clocks and world.clocks.there,
    )


def tell(report: Report, form: Form) -> None:
    verdict = report.verdict
    by_fault: dict[Any, list[Price]] = {each.fault: [] for each in report.happened}
    for each in verdict.prices:
        by_fault[each.fault].append(each)
    rows = []
    for happened in report.happened:
        others = by_fault[happened.fault]
        worst = max(others, key=lambda one: one.lost, default=None)
        figures = ["–"] * 4
        if worst is not None:
            lost, rounds = sum(one.lost for one in others), sum(one.rounds for one in others)
            figures = [str(len(others)), f"{lost / len(others):.2f}", f"{worst.lost:.2f}", str(rounds)]
        rows.append([f"{happened.fault.at:.0f}", str(happened.fault), f"{happened.ended - happened.began:.0f}", *figures])
    table(["at s", "fault", "took s", "others", "lost s each", "worst s", "rounds lost"], rows)
    columns = ["daemon", "MiB first", "MiB last", "MiB most", "descriptors first", "last", "most"]
    table(columns, [[name, *spans(kept)] for name, kept in report.usage.items()])
    if not report.clocks:
        print("no clock was stepped: the short form steps none, and nothing can where libfaketime is not installed")
    rates = ", ".join(f"{value:.3f}" for value in report.calm.values())
    print(f"faultless: {form.calm_seconds:.0f} s before the first fault, {rates} steps/s,")
    print(f"scaled to {form.minutes:g} minutes of faults. A loss is seconds without steps, and steps that no commit counted.")
    print(f"who was not hit kept {loss.kept(verdict.prices):.2%} of the faultless tokens;", end=" ")
    print(f"all together, the hit included, {report.counted:.1%}")
    lost = sum(each.rounds for each in verdict.prices)
    print(f"{report.rounds} rounds, of which those who were not hit lost {lost}; {verdict.chains} chain(s)", end="; ")
    print(f"{len(verdict.orphans)} orphans; {len(verdict.helps)} helps by hand")
    print(f"a stranger throughout: {', '.join(f'{count} {what}' for what, count in sorted(report.stranger.items()))}")
    for help in verdict.helps:
        print(f"HELP {help}")


def spans(kept: list[list[float]]) -> list[str]:
    memory, descriptors = [one[1] for one in kept], [one[2] for one in kept]
    return [f"{value:.0f}" for values in (memory, descriptors) for value in (values[0], values[-1], max(values))]


def main() -> None:
    parser = bench_parser("bench.chaos", __doc__, "a minute of faults close together; no bar on tokens means much")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    if why := lacking():
        print(why, file=sys.stderr)
        sys.exit(2)
    form = QUICK if options.quick else FULL
    given = {name: value for name in ("seed", "minutes") if (value := getattr(options, name)) is not None}
    form = replace(form, **given)
    load = os.getloadavg()[0]
    print(f"seed {form.seed}, {form.minutes:g} minutes, load of this machine before: {load:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="dx-") as name:
        report = chaos(Path(name), form)
    tell(report, form)
    missed = loss.misses(report.verdict)
    write(
        "chaos",
        {
            **asdict(form),
            "load_before": load,
            "kept": loss.kept(report.verdict.prices),
            "counted": report.counted,
            "rounds": report.rounds,
            "chains": report.verdict.chains,
            "orphans": list(report.verdict.orphans),
            "helps": list(report.verdict.helps),
            "missed": missed,
            "prices": [[str(p.fault), p.node, p.window, p.waited, p.rounds, p.uncounted] for p in report.verdict.prices],
            "usage": report.usage,
            "stranger": report.stranger,
            "stepped_clocks": report.clocks,
        },
    )
    judge(missed, options.check)


if __name__ == "__main__":
    main()
