"""Comparison of the clock (node/planning/time_model.py) with real swarms: seconds of a round at three bandwidths, two sizes and two
numbers of clusters.

Real daemons run in network namespaces on shaped links (root; otherwise on loopback, with a limit on the nodes' sends
only). Steps take a fixed time, longer than computing them, so clusters do not compete for this machine's cores. The
rounds of each swarm on unshaped links give the cost beyond computing and bytes. With that one constant the clock
predicts the rounds on shaped links. Rounds wait for their exchange. One swarm trains beside its exchange, with the
constant of the same swarm that waits. `--check` exits with 1 if a round is further off than the bar.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.lines import swarm
from bench.report import bench_parser, judge, machine, table, write
from bench.texts import stdlib
from dilocox.node.planning.time_model import (
    Estimate,
    Line,
    Method,
    Overlap,
    Site,
    Step,
    estimate,
    model_payload_bytes,
)
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count
from dilocox.testnet.namespaces import lacking

__all__ = ["Cell", "main", "missed"]

OFF = 0.15
"""Largest error of the clock, as a share of a measured round."""
LINES = (20e6, 50e6, 200e6)
"""Bits per second, the slowest first: a run's deadlines follow the times it has seen."""
WIDTHS, CLUSTERS = (128, 256), (2, 4)
STEP_SECONDS = 0.2
INNER_STEPS = 10
ROUNDS = 5
RUN = """
[run]
name = "clock"
owner = "{{owner}}"
[model]
sequence_length = 32
stages = 1
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = {width}
intermediate_size = {middle}
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
[data]
evaluation_sequences = 8
[training]
learning_rate = 1e-3
total_steps = 100000
batch_size = 2
microbatches = 1
[compression]
codec = "fp32"
[rounds]
count = 100000
inner_steps = {steps}
max_inner_steps = {most}
overlap = "{overlap}"
evaluate_every = 0
min_clusters = {clusters}
start_clusters = {clusters}
deadline_seconds = 600
vote_seconds = 300
liveness_seconds = 30
snapshot_every = 100000
"""


@dataclass(frozen=True)
class Kind:
    """A swarm."""

    width: int
    clusters: int
    overlap: Overlap = "none"

    @property
    def run(self) -> str:
        most = 6 * INNER_STEPS
        return RUN.format(
            width=self.width,
            middle=11 * self.width // 4,
            steps=INNER_STEPS,
            most=most,
            overlap=self.overlap,
            clusters=self.clusters,
        )

    @property
    def waiting(self) -> "Kind":
        return replace(self, overlap="none")


KINDS = [Kind(width, clusters) for width in WIDTHS for clusters in CLUSTERS]
KINDS.append(Kind(WIDTHS[-1], CLUSTERS[0], "rebase"))


@dataclass(frozen=True)
class Cell:
    """Rounds of a swarm on one link."""

    clusters: int
    overlap: Overlap
    parameters: int
    payload_bytes: float
    bits_per_second: float | None
    """Bandwidth; None: as fast as the machine."""
    seconds: float
    """Median of its rounds."""
    rounds: Sequence[float]
    clock: float | None = None
    """Predicted seconds; None: this cell made the constant."""
    arrival_step: int | None = None

    @property
    def off(self) -> float | None:
        return None if self.clock is None else self.clock / self.seconds - 1


def foretold(cell: Cell, fixed_seconds: float) -> Estimate:
    site = Site(
        cell.parameters, Step(STEP_SECONDS), 0.0, cell.clusters, Line.both_ways(cell.bits_per_second or 0), 1, fixed_seconds
    )
    return estimate(site, Method("fp32", cell.payload_bytes, INNER_STEPS, 6 * INNER_STEPS, cell.overlap))


def measured(folder: Path, kind: Kind, lines: Sequence[float | None], rounds: int) -> Iterator[Cell]:
    """Measure on one link after the other; on loopback each is a separate swarm."""
    groups = [[line] for line in lines] if lacking() else [list(lines)]
    for number, group in enumerate(groups):
        with swarm(folder / str(number), stdlib().into(kind.run), kind.clusters, STEP_SECONDS, group[0], stdlib()) as running:
            running.measure(1)
            for line in group:
                if line != group[0]:
                    running.shape(line)
                seconds = [row["seconds"] for row in running.measure(rounds)]
                yield cell_of(running.manifest, kind, line, seconds)


def cell_of(run: Manifest, kind: Kind, line: float | None, seconds: Sequence[float]) -> Cell:
    size, median = model_payload_bytes(run.model, run.compression), statistics.median(seconds)
    return Cell(kind.clusters, kind.overlap, parameter_count(run.model), size, line, median, seconds)


def compare(kinds: Sequence[Kind], lines: Sequence[float], rounds: int) -> list[Cell]:
    cells: list[Cell] = []
    fixed: dict[Kind, float] = {}
    with tempfile.TemporaryDirectory(prefix="dx-") as name:
        for number, kind in enumerate(kinds):
            found = list(measured(Path(name) / str(number), kind, [*lines, None], rounds))
            if kind.overlap == "none":
                fixed[kind] = found[-1].seconds - INNER_STEPS * STEP_SECONDS
            for cell in found:
                if cell.bits_per_second is not None:
                    clock = foretold(cell, fixed[kind.waiting])
                    cell = replace(cell, clock=clock.round.seconds, arrival_step=clock.arrival_step)
                cells.append(cell)
                print(" ".join(described(cell)), flush=True)
    return cells


def missed(cells: Sequence[Cell]) -> list[str]:
    """Return the missed bars, as sentences."""
    return [
        f"{cell.clusters} clusters, {cell.parameters:,} parameters, {(cell.bits_per_second or 0) / 1e6:g} Mbit/s, {cell.overlap}:"
        f" the clock says {cell.clock:.2f} s, a round takes {cell.seconds:.2f} s: {cell.off:+.0%}, at most {OFF:.0%} either way"
        for cell in cells
        if cell.off is not None and abs(cell.off) > OFF
    ]


COLUMNS = ["parameters", "payload bytes", "clusters", "overlap", "Mbit/s", "round s", "least", "most", "by the clock", "off"]


def described(cell: Cell) -> list[str]:
    return [
        f"{cell.parameters:,}",
        f"{cell.payload_bytes:,.0f}",
        str(cell.clusters),
        cell.overlap,
        "unshaped" if cell.bits_per_second is None else f"{cell.bits_per_second / 1e6:g}",
        f"{cell.seconds:.2f}",
        f"{min(cell.rounds):.2f}",
        f"{max(cell.rounds):.2f}",
        "–" if cell.clock is None else f"{cell.clock:.2f}",
        "–" if cell.off is None else f"{cell.off:+.1%}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.clock", __doc__, "two swarms, one line, three rounds").parse_args(arguments)
    kinds = [Kind(WIDTHS[-1], CLUSTERS[0]), Kind(WIDTHS[-1], CLUSTERS[0], "rebase")] if options.quick else KINDS
    cells = compare(kinds, LINES[:1] if options.quick else LINES, 3 if options.quick else ROUNDS)
    facts: dict[str, Any] = machine()
    where = (
        f"loopback, nodes limited in what they send: {lacking()}" if lacking() else "network namespaces, lines shaped both ways"
    )
    print(f"{facts['cores']} cores, {facts['platform']}; {where}; {INNER_STEPS} steps of {STEP_SECONDS} s; medians of rounds")
    table(COLUMNS, [described(cell) for cell in cells])
    shown = {"columns": COLUMNS, "cells": [described(cell) for cell in cells]}
    write(
        "clock",
        {"cells": [asdict(cell) for cell in cells], "table": shown, "notes": [where]},
        options.quick,
    )
    judge(missed(cells), options.check)


if __name__ == "__main__":
    main()
