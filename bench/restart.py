"""Seconds without a killed daemon: the coordinator until its first answer, a node until it trains again, one of two hosts
of a cluster until the cluster trains again.

Real processes receive `kill -9`. Nodes take a step every quarter of a second, so two cores are mostly idle. A node
cannot avoid the import of torch by its workers, which is measured beside it. `--check` exits with 1 if a bar is missed.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.chaos.__main__ import RUN
from bench.report import bench_parser, judge, machine, table, write
from bench.texts import stdlib
from dilocox.node.hosts.cluster_link import CLUSTER_LINK
from dilocox.testnet.swarm import Member, Testnet
from dilocox.transport.store.data_directory import load_identity

__all__ = ["main", "missed"]

NODES, TRIALS = 3, 3
"""Nodes, the last of which leads a second host, and trials."""
BOX = "box-2"
COORDINATOR_SECONDS = 5.0
"""Seconds to the first answer."""
BEYOND_IMPORT_SECONDS = 5.0
"""Seconds of a node's restart: daemon, state, worker group, the first step."""
BOX_SECONDS = 15.0
"""Seconds of a host's return, with torch's import by its workers and the lead host's."""
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 600.0


def waited(condition: Callable[[], Any]) -> float:
    """Return the seconds until the condition is true."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


def import_seconds() -> float:
    """Return the seconds of a worker's import, before any work."""
    began = time.monotonic()
    safe = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", "import dilocox.node.training.worker.worker"], check=True, env=safe)
    return time.monotonic() - began


def trains(member: Member) -> bool:
    status = member.get("/v1/status") or {}
    return status.get("state") == "training" and status.get("total_steps", 0) > 0


def anew(lead: Member) -> Callable[[], bool]:
    """Return a condition: a worker group trains that started after this call."""
    before = lead.get("/v1/status")["total_steps"]
    return lambda: trains(lead) and lead.get("/v1/status")["total_steps"] < before


def with_a_box(testnet: Testnet, options: list[str]) -> None:
    lead, home = testnet.nodes[-1], testnet.folder / BOX
    lead.arguments.extend(["--cluster-boxes", "2", "--cluster-interface", "lo", "--cluster-patience-seconds", "600"])
    needs = lead.home / CLUSTER_LINK
    arguments = ["node", "--cluster", str(needs), "--cluster-interface", "lo", "--home", str(home), "--name", BOX, *options]
    testnet.members.append(Member(BOX, home, arguments, needs=needs))


def killed(testnet: Testnet, member: Member, back: Callable[[], Any]) -> float:
    """Kill a member; return the seconds from its restart to `back`."""
    testnet.kill(member, signal.SIGKILL)
    waited(lambda: member.facts() is None)
    testnet.start(member)
    return waited(back)


def measure(folder: Path, trials: int) -> dict[str, list[float]]:
    owner = load_identity(folder / "owner.key")
    run = stdlib().into(RUN).replace("{owner}", owner.key.hex()).replace("start_clusters = 4", f"start_clusters = {NODES}")
    options = ["--devices", "1", "--threads", "1", "--step-seconds", "0.25", "--no-dht"]
    testnet = Testnet.create(folder / "t", run.encode(), (folder / "owner.key").read_bytes(), NODES, options, stdlib().folder)
    found: dict[str, list[float]] = {"coordinator": [], "node": [], "box": [], "import": []}
    with_a_box(testnet, options)
    single, lead, box = testnet.member("node-1"), testnet.member(f"node-{NODES}"), testnet.member(BOX)
    try:
        testnet.start_all()
        waited(lambda: all(map(trains, testnet.nodes)) and len(testnet.coordinator.get("/v1/rounds") or []) > 2)
        for _ in range(trials):
            found["coordinator"].append(killed(testnet, testnet.coordinator, lambda: testnet.coordinator.get("/v1/status")))
            found["import"].append(import_seconds())
            found["node"].append(killed(testnet, single, lambda: trains(single)))
            waited(lambda: all(map(trains, testnet.nodes)))
            found["box"].append(killed(testnet, box, anew(lead)))
            waited(lambda: all(map(trains, testnet.nodes)))
    finally:
        testnet.stop()
    return found


def missed(found: dict[str, list[float]]) -> list[str]:
    """Return the missed bars, as sentences."""
    middle = {name: statistics.median(seconds) for name, seconds in found.items()}
    bars = []
    if middle["coordinator"] > COORDINATOR_SECONDS:
        bars.append(f"the coordinator answered after {middle['coordinator']:.1f} s, at most {COORDINATOR_SECONDS:.0f}")
    beyond = middle["node"] - middle["import"]
    if beyond > BEYOND_IMPORT_SECONDS:
        bars.append(f"a node took {beyond:.1f} s beside torch's import, at most {BEYOND_IMPORT_SECONDS:.0f}")
    if middle["box"] > BOX_SECONDS:
        bars.append(f"a cluster trained {middle['box']:.1f} s after its box's return, at most {BOX_SECONDS:.0f}")
    return bars


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.restart", __doc__, "one trial").parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), 1 if options.quick else TRIALS)
    facts = machine()
    print(f"{facts['cores']} cores, {facts['platform']}; {NODES} nodes, kill -9, median of {len(found['node'])}")
    rows = [[name, f"{statistics.median(s):.2f}", f"{max(s):.2f}"] for name, s in found.items()]
    table(["", "median s", "worst s"], rows)
    write("restart", found)
    judge(missed(found), options.check)


if __name__ == "__main__":
    main()
