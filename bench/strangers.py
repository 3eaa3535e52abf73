"""Thousand hostile connections for ten minutes: honest rounds last as long as without them, and the coordinator's memory
stays constant.

A real coordinator runs in a separate process. Honest peers drive the node's machine (bench/honest.py) at a fixed pace.
They run first alone, then with bench/hostile.py against the coordinator and one of the peers. `--check` exits with 1 if
a bar is missed.
"""

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from bench import hostile
from bench.floods import FLOODS, flood_rows, missed_floods, run_flood
from bench.honest import HonestPeer
from bench.report import bench_parser, judge, machine, table, write
from bench.texts import stdlib
from dilocox.protocol.crypto import Identity
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.testnet.swarm import Testnet
from dilocox.transport.net.rpc import allow_open_files
from dilocox.transport.net.tls import fetch_certificate
from dilocox.transport.process.malloc import limit_arenas
from dilocox.transport.store.data_directory import format_identity

__all__ = ["main", "measure", "missed"]

PEERS = 4
STEP_SECONDS = 3.0
"""Seconds of an honest peer's phase: short beside those of any real run, so the protocol's share of a round is large."""
QUICK_STEP_SECONDS = 0.5
LONGEST_RATIO = 1.1
"""Largest ratio of the median rounds, with unknown peers and without."""
MOST_GROWTH_BYTES = 50 << 20
LOOK_SECONDS = 0.5
LARGE_BLOB_BYTES = 16 << 20
"""Bytes of a blob that unknown peers request and do not read: more than a connection buffers before its reader reads."""
PATIENCE_SECONDS = 120.0
RUN = """
[run]
name = "strangers"
owner = "{owner}"
[model]
sequence_length = 16
stages = 1
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
batch_size = 4
[compression]
rank = 8
[rounds]
count = 100000
inner_steps = 4
max_inner_steps = 12
overlap = "none"
min_clusters = 2
start_clusters = {peers}
deadline_seconds = 120
vote_seconds = 60
"""


@dataclass
class Load:
    """Process whose load is measured from time to time."""

    process: psutil.Process
    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self) -> None:
        self.resident.append(self.process.memory_info().rss)
        self.descriptors.append(self.process.num_fds())


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[JoinLink, psutil.Process]]:
    """Run `dilocox coordinator` in a separate process."""
    owner = os.urandom(32)
    run = stdlib().into(RUN).format(owner=Identity(owner).key.hex(), peers=PEERS).encode()
    testnet = Testnet.create(folder, run, format_identity(owner), 0, [], stdlib().folder)
    testnet.coordinator.arguments.append("--no-dht")
    try:
        testnet.start_all()
        yield JoinLink.parse((folder / "link").read_text()), psutil.Process(testnet.processes["coordinator"].pid)
    finally:
        testnet.stop()


@asynccontextmanager
async def attacked(link: JoinLink, peer: HonestPeer, connections: int, seed: int) -> AsyncIterator[dict[str, int]]:
    """Attack with unknown peers inside the block; yield a mapping that has their outcomes afterwards."""
    certificate = await asyncio.to_thread(fetch_certificate, *link.ways[0].endpoint, PATIENCE_SECONDS)
    servers = [pb.PeerRecord(address=link.at, certificate=certificate), peer.record]
    blob = await asyncio.to_thread(peer.store.put, [bytes(LARGE_BLOB_BYTES)])
    context, counts = multiprocessing.get_context("spawn"), dict[str, int]()
    ours, theirs = context.Pipe()
    arguments = (link.run_id, [record.SerializeToString() for record in servers], blob, connections, seed, theirs)
    child = context.Process(target=hostile.attack, args=arguments, daemon=True)
    child.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)
        yield counts
        ours.send(None)
        counts.update(await asyncio.to_thread(ours.recv))
    finally:
        child.kill()
        child.join()


async def watch(peer: HonestPeer, loads: Sequence[Load], seconds: float) -> list[float]:
    """Return the seconds of each round that opened and closed in this time."""
    first, ends = time.monotonic(), time.monotonic() + seconds
    while time.monotonic() < ends or sum(at >= first for at in peer.closed_at) < 2:
        await asyncio.sleep(LOOK_SECONDS)
        for load in loads:
            load.look()
        if time.monotonic() > ends + PATIENCE_SECONDS:
            raise TimeoutError("no round was closed: the bench measures nothing")
    return [later - earlier for earlier, later in pairwise(at for at in peer.closed_at if at >= first)]


async def _floods(link: JoinLink, process: psutil.Process, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Run each flood of bench/floods.py against the coordinator, one after the other."""
    certificate = await asyncio.to_thread(fetch_certificate, *link.ways[0].endpoint, PATIENCE_SECONDS)
    facts = Testnet.load(folder).coordinator.facts()
    assert facts is not None
    return [await run_flood(flood, link.at, certificate, facts["api"], process, seconds) for flood in FLOODS]


async def measure(
    seconds: float, connections: int, step_seconds: float, seed: int = 1, flood_seconds: float = 10.0
) -> dict[str, Any]:
    """Measure rounds without unknown peers, then with them for as long, then the memory that they left, and each flood for
    `flood_seconds`."""
    allow_open_files(16 * connections)
    async with AsyncExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        link, process = closing.enter_context(coordinator(folder / "testnet"))
        records: dict[str, pb.PeerRecord] = {}
        peers = [HonestPeer(link, folder / f"peer-{number}", step_seconds, records) for number in range(PEERS)]
        for peer in peers:
            await closing.enter_async_context(peer)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(peers[0].closed_at) < 3:  # the first rounds are untypical
                await asyncio.sleep(LOOK_SECONDS)
        loads = {"coordinator": Load(process), "peers": Load(psutil.Process())}
        without = await watch(peers[0], list(loads.values()), seconds)
        before = {name: (max(load.resident), max(load.descriptors)) for name, load in loads.items()}
        async with attacked(link, peers[0], connections, seed) as counts:
            during = await watch(peers[0], list(loads.values()), seconds)
        await watch(peers[0], list(loads.values()), 2 * step_seconds)
        return {
            "floods": await _floods(link, process, folder / "testnet", flood_seconds),
            "connections": connections,
            "seconds": seconds,
            "step_seconds": step_seconds,
            "peers": PEERS,
            "without": without,
            "with": during,
            "processes": {
                name: {
                    "before": before[name][0],
                    "peak": max(load.resident),
                    "after": load.resident[-1],
                    "descriptors": [before[name][1], max(load.descriptors), load.descriptors[-1]],
                }
                for name, load in loads.items()
            },
            "strangers": counts,
        }


def missed(result: dict[str, Any]) -> list[str]:
    """Return the missed bars, as sentences."""
    found = []
    ratio = statistics.median(result["with"]) / statistics.median(result["without"])
    if ratio > LONGEST_RATIO:
        found.append(f"honest rounds last {ratio:.2f} times as long; at most {LONGEST_RATIO}")
    for name, memory in result["processes"].items():
        if (growth := memory["peak"] - memory["before"]) > MOST_GROWTH_BYTES:
            found.append(f"{name}: {growth >> 20} MiB more; at most {MOST_GROWTH_BYTES >> 20}")
    return found + missed_floods(result["floods"])


def show(result: dict[str, Any]) -> None:
    where = machine()
    pace = f"{result['peers']} honest peers, steps of {result['step_seconds']} s, {result['seconds']:.0f} s each"
    print(f"{where['cores']} cores, load {os.getloadavg()[0]:.1f}, {where['platform']}; {pace}")
    rows = [
        [
            f"{count} strangers",
            str(len(rounds)),
            *(f"{1000 * value:,.0f}" for value in (statistics.median(rounds), max(rounds))),
        ]
        for count, rounds in ((0, result["without"]), (result["connections"], result["with"]))
    ]
    table(["with", "rounds", "median ms", "worst ms"], rows)
    memory = [
        [name, *(f"{one[when] / (1 << 20):.0f}" for when in ("before", "peak", "after")), *map(str, one["descriptors"])]
        for name, one in result["processes"].items()
    ]
    table(["process", "MiB before", "peak", "after", "descriptors before", "peak", "after"], memory)
    heads = ["flood", "sent", "calls answered", "HTTP", "median ms", "HTTP", "MiB more", "later"]
    table(heads, flood_rows(result["floods"]))
    print("strangers: " + "; ".join(f"{what}: {count:,}" for what, count in sorted(result["strangers"].items())))


def main(arguments: Sequence[str] = ()) -> list[str]:
    parser = bench_parser("bench.strangers", __doc__, "100 connections for half a minute in all")
    parser.add_argument("--minutes", type=float, default=10.0, help="without strangers, and as long with them")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    limit_arenas()  # as `dilocox` does: the honest peers live here
    if options.quick:
        result = asyncio.run(measure(10.0, 100, QUICK_STEP_SECONDS, options.seed, flood_seconds=3.0))
    else:
        result = asyncio.run(measure(60 * options.minutes, options.connections, STEP_SECONDS, options.seed))
    show(result)
    write("strangers", result, options.quick)
    found = missed(result)
    judge(found, options.check)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
