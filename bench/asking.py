"""Seconds that a reader waits for a long run's page, and their cost for the run: a coordinator's API over 10,000 rounds of
64 clusters.

Each path is requested a few times after the first. The slowest answer counts, and the longest block of the event loop.
`--check` exits with 1 if a bar is missed.
"""

import asyncio
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import bench_parser, judge, table, write
from bench.scale import RESTART, Blocks, Desk, make_long
from dilocox.coordinator.daemon import create_coordinator_app
from dilocox.coordinator.service import CoordinatorService
from dilocox.node.attest.verify import appraise
from dilocox.protocol import events
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views.api_listener import ApiListener
from tests.helpers import COORDINATOR

__all__ = ["main"]

SLOWEST_SECONDS = 0.2
"""Delay that a person does not notice."""
LONGEST_BLOCK_SECONDS = 0.05
"""CPU of one callback of the event loop: as bench.scale has it."""
TIMES = 5
STAGES = 80


def paths(rounds: int) -> list[str]:
    """Return the paths that the page, `top`, `rounds`, `explain` and Prometheus request."""
    last = rounds - 2  # of the very last the chain that is copied has no row
    asked = ["/", "/v1/status", "/readyz", "/v1/peers", "/v1/stages", "/v1/rounds?last=500", "/v1/rounds", f"/v1/rounds/{last}"]
    return [*asked, f"/v1/explain/{last}", "/v1/events?last=200&follow=no", "/metrics"]


async def measure(rounds: int, clusters: int, stages: int = STAGES) -> list[dict[str, Any]]:
    """Measure each path: seconds, bytes, and the longest block of the event loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with Desk.open(folder, clusters, stages) as desk:
            await desk.round()
            run = desk.crowd.run
            last = desk.service.chain.commit(1)
        assert last is not None
        make_long(folder / "chain.db", run, last, rounds)
        log = EventLog(folder / "events.db")
        for number in range(rounds):
            log.add(events.RoundOpen(number, "waiting for the contributions of somebody"))
        log.flush()
        with closing(log), closing(ChainFile(folder / "chain.db", run, views.describe)) as chain:
            service = CoordinatorService(COORDINATOR, chain, pb.Envelope(), appraise)
            service.resume()
            door = ApiListener("127.0.0.1:0")
            await door.show(create_coordinator_app(service, log, Traffic(), "coordinator"))
            try:
                return [await ask(door.url, path) for path in paths(rounds)]
            finally:
                await door.close()


async def ask(url: str, path: str) -> dict[str, Any]:
    blocks = Blocks()
    async with aiohttp.ClientSession() as session:

        async def once() -> tuple[float, int]:
            before = time.perf_counter()
            async with session.get(url + path) as answer:
                assert answer.status in (200, 503), path
                size = len(await answer.read())
            return time.perf_counter() - before, size

        (first, size), *later = [await once() for _ in range(1 + TIMES)]
        with blocks.watching():  # measured apart, because the watcher loads the loop
            for _ in range(TIMES):
                await once()
    slowest, kept = max(seconds for seconds, _ in later), blocks.longest_callback
    return {"path": path, "first_seconds": first, "seconds": slowest, "bytes": size, "callback_seconds": kept}


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    slow = [f"{one['path']} took {1000 * one['seconds']:.0f} ms" for one in found if one["seconds"] > SLOWEST_SECONDS]
    kept = [one for one in found if one["callback_seconds"] > LONGEST_BLOCK_SECONDS]
    return [*slow, *(f"{one['path']} kept the event loop for {1000 * one['callback_seconds']:.0f} ms" for one in kept)]


def main(quick: bool = False) -> list[str]:
    """Print and write the figures; return the missed bars. `quick`: a short chain."""
    rounds, clusters = (500 if quick else RESTART[0]), RESTART[1]
    found = asyncio.run(measure(rounds, clusters))
    print(f"{rounds:,} rounds of {clusters} clusters")
    milliseconds = ("first_seconds", "seconds", "callback_seconds")
    rows = [[one["path"], *(f"{1000 * one[key]:.1f}" for key in milliseconds), f"{one['bytes']:,}"] for one in found]
    table(["path", "first ms", "ms", "event loop kept ms", "bytes"], rows)
    write("asking", {"rounds": rounds, "clusters": clusters, "paths": found})
    return missed(found)


if __name__ == "__main__":
    arguments = bench_parser("bench.asking", __doc__, "a short chain").parse_args()
    judge(main(arguments.quick), arguments.check)
