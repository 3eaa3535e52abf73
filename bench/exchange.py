"""Exchange of one round of 26.0M parameters among four peers: ours, hivemind's averager and gloo's all-reduce, in the same
run.

Each peer is a process of one thread, in a network namespace (root; otherwise on loopback, without shaped links). The
time runs from a common start until the last peer is done. Ours does the product's work: encode, store, announce, fetch
over TLS with credentials, check, apply. The bench replaces the coordinator and forwards announcements. hivemind's
groups are complete before its time begins. gloo and hivemind exchange the same parameters in float32, hivemind also in
8 bits. `--check` exits with 1 if a bar is missed.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.exchangers import LAYERS, QUICK_LAYERS, run_of
from bench.processes import Peer, started
from bench.report import bench_parser, judge, machine, table, write
from dilocox.protocol.run.tensors import parameter_count
from dilocox.testnet.namespaces import Namespaces, Net, lacking
from dilocox.testnet.swarm import WAN

__all__ = ["Row", "main", "missed"]

PEERS = 4
SHAPED = 100e6
"""Bits per second of each peer's link, each way."""
KINDS = ("ours", "gloo", "hivemind", "hivemind, 8 bit")
ROUNDS, QUICK_ROUNDS = 5, 2
BAR = 5.0
"""Times hivemind's, at least."""


@dataclass(frozen=True)
class Row:
    kind: str
    bits_per_second: float | None
    seconds: Sequence[float]
    """Seconds of each exchange, after a first one."""
    bytes: float
    """Bytes on a peer's link in one exchange, both directions, headers included; 0: not measured."""
    encode_seconds: float = 0.0
    """Seconds of our exchange until the slowest peer had encoded and stored."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@contextmanager
def peers(kind: str, network: Namespaces | None, layers: int) -> Iterator[list[Peer]]:
    """Run processes that know each other."""
    with tempfile.TemporaryDirectory(prefix="dx-") as name, ExitStack() as closing:
        found = started(closing, "bench.exchangers", PEERS, network, Path(name), kind, str(layers))
        records = {said["peer"]: said.get("record", "") for said in [peer.said() for peer in found]}
        for peer in found:
            peer.tell(records=records)
        yield found


def exchanged(kind: str, found: Sequence[Peer], round: int) -> tuple[float, float]:
    """Return the seconds of an exchange, and for ours those of encoding."""
    for peer in found:
        peer.tell(begin=round)
    for peer in found:
        peer.said()
    began = time.monotonic()
    for peer in found:
        peer.tell(go=True)
    if kind == "ours":
        contributions = [peer.said()["said"] for peer in found]
        for peer in found:
            peer.tell(contributions=contributions)
    done = [peer.said() for peer in found]
    seconds = time.monotonic() - began
    for peer in found:
        peer.tell(end=True)  # compare their results after all peers have finished
    if len({json.dumps(peer.said()["result"]) for peer in found}) > 1 and kind in ("ours", "gloo"):
        raise SystemExit(f"{kind}: the peers do not hold the same after an exchange")
    return seconds, max(each.get("encode_seconds", 0.0) for each in done)


def measure(kind: str, line: float | None, layers: int, rounds: int) -> Row:
    network = Namespaces([Net(WAN, [str(rank) for rank in range(PEERS)], line)]) if not lacking() else None
    with network.present() if network else nullcontext(), peers(kind, network, layers) as found:
        exchanged(kind, found, 1)  # connections, caches
        before = network.traffic(WAN) if network else {}
        times = [exchanged(kind, found, round) for round in range(2, rounds + 2)]
        after = network.traffic(WAN) if network else {}
    moved = [after[name].since(before[name]) for name in before]
    carried = sum(each.sent + each.received for each in moved) / rounds / PEERS
    return Row(kind, line, [seconds for seconds, _ in times], carried, statistics.median(encode for _, encode in times))


def missed(rows: Sequence[Row]) -> list[str]:
    """Return the missed bars, as sentences."""
    sentences = []
    for line in dict.fromkeys(row.bits_per_second for row in rows):
        of = {row.kind: row.median for row in rows if row.bits_per_second == line}
        where = "unshaped" if line is None else f"at {line / 1e6:g} Mbit/s"
        others = [seconds for kind, seconds in of.items() if kind.startswith("hivemind")]
        if others and min(others) < BAR * of["ours"]:
            sentences.append(f"{where} hivemind takes {min(others) / of['ours']:.1f} times as long as ours, not {BAR:g}")
        if line is not None and of["ours"] > of["gloo"]:
            sentences.append(f"{where} gloo takes {of['gloo']:.2f} s, ours {of['ours']:.2f} s")
    return sentences


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.exchange", __doc__, "3.5M parameters, two exchanges of each").parse_args(arguments)
    layers, rounds = (QUICK_LAYERS, QUICK_ROUNDS) if options.quick else (LAYERS, ROUNDS)
    lines: list[float | None] = [None] if lacking() else [None, SHAPED]
    if lacking():
        print(f"no shaped lines: {lacking()}")
    rows = []
    for line in lines:
        for kind in KINDS:
            rows.append(measure(kind, line, layers, rounds))
            print(" ".join(described(rows[-1], rows)), flush=True)
    facts, parameters = machine(), parameter_count(run_of(layers).model)
    print(
        f"{facts['cores']} cores, {facts['platform']}; {parameters:,} parameters, {PEERS} peers of one thread, {rounds} exchanges"
    )
    table(COLUMNS, [described(row, rows) for row in rows])
    print("ours: of that, until the slowest had encoded; line: bytes that a peer sent and received, with all headers")
    shown = {"columns": COLUMNS, "cells": [described(row, rows) for row in rows]}
    notes = [f"{parameters:,} parameters, {PEERS} peers of one thread, {rounds} exchanges"]
    write(
        "exchange",
        {"rows": [asdict(row) for row in rows], "table": shown, "notes": notes},
        options.quick,
    )
    judge(missed(rows), options.check)


COLUMNS = ["exchange", "Mbit/s", "s", "least", "most", "encode s", "line bytes", "of ours"]


def described(row: Row, rows: Sequence[Row]) -> list[str]:
    ours = next(each.median for each in rows if each.kind == "ours" and each.bits_per_second == row.bits_per_second)
    return [
        row.kind,
        "unshaped" if row.bits_per_second is None else f"{row.bits_per_second / 1e6:g}",
        f"{row.median:.3f}",
        f"{min(row.seconds):.3f}",
        f"{max(row.seconds):.3f}",
        f"{row.encode_seconds:.3f}" if row.encode_seconds else "–",
        f"{row.bytes:,.0f}" if row.bytes else "–",
        f"{row.median / ours:.1f}",
    ]


if __name__ == "__main__":
    main()
