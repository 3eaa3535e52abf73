"""Real swarms on links of a known bandwidth, for benches that compare their times with the clock.

As root each member has a network namespace, and the nodes' links are shaped both ways. Otherwise all members are on
loopback, with only a limit on the nodes' sends.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.texts import Text
from dilocox.node.planning.time_model import HEADERS
from dilocox.protocol.run.manifest import Manifest
from dilocox.testnet.namespaces import Traffic, lacking
from dilocox.testnet.swarm import WAN, LinkRates, Testnet
from dilocox.transport.store.data_directory import load_identity

__all__ = ["PATIENCE_SECONDS", "Swarm", "swarm", "until"]

T = TypeVar("T")
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 1800.0
"""Seconds that a swarm may spend without progress."""


def until(condition: Callable[[], T | None], progress: Callable[[], Any] = lambda: None) -> T:
    """Return the condition's first true value. `progress`: read at the end of patience, which starts again if
    this value has changed."""
    seen, deadline = progress(), time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            if (now := progress()) == seen:
                raise SystemExit(f"the swarm stood still for {PATIENCE_SECONDS:.0f} s")
            seen, deadline = now, time.monotonic() + PATIENCE_SECONDS
        time.sleep(POLL_SECONDS)
    return value


class Swarm:
    def __init__(self, testnet: Testnet, manifest: Manifest) -> None:
        self.testnet, self.manifest = testnet, manifest

    @property
    def clusters(self) -> int:
        return len(self.testnet.nodes)

    def rows(self) -> list[dict[str, Any]]:
        """Return the closed rounds."""
        if failed := self.testnet.failed():
            raise SystemExit(f"{failed[0].name} ended:\n{self.testnet.last_words(failed[0])}")
        return [row for row in self.testnet.coordinator.get("/v1/rounds") or [] if row["round"] > 0]

    def shape(self, bits_per_second: float | None) -> None:
        """Shape every node's link from now on, in namespaces; None: as fast as the machine is."""
        assert self.testnet.network is not None
        for node in self.testnet.nodes:
            if bits_per_second is None:
                self.testnet.network.quicken(node.name, WAN)
            else:
                self.testnet.network.slow(node.name, WAN, bits_per_second)

    def closed(self) -> int:
        """Return the number of closed rounds."""
        return len(self.rows())

    def measure(self, rounds: int) -> list[dict[str, Any]]:
        """Measure whole rounds that open from now on. Exits if one does not count all clusters."""
        first = len(self.rows()) + 1  # the open one is not whole
        found = until(lambda: rows if len(rows := self.rows()) >= first + rounds else None, self.closed)
        if any(row["counted"] < self.clusters for row in found[first:]):
            raise SystemExit("a round did not count everybody: its seconds are not those of a whole exchange")
        return found[first : first + rounds]

    def steps(self) -> dict[str, tuple[int, float]]:
        """Return for every node (inner steps since its start, seconds of its worker's clock at its last report)."""
        documents = {node.name: until(lambda node=node: node.get("/v1/status")) for node in self.testnet.nodes}  # type: ignore[misc]
        return {name: (said["total_steps"], said["clock_seconds"]) for name, said in documents.items()}

    def traffic(self) -> dict[str, Traffic]:
        """Return the traffic of every node's link since its creation; empty on loopback."""
        network = self.testnet.network
        return {node.name: network.traffic(WAN)[node.name] for node in self.testnet.nodes} if network is not None else {}


@contextmanager
def swarm(
    folder: Path, run: str, nodes: int, step_seconds: float, bits_per_second: float | None, text: Text
) -> Iterator[Swarm]:
    """Run nodes of one worker of one thread, whose steps take at least `step_seconds`; `run`: a run file with {owner}."""
    options = ["--devices", "1", "--threads", "1", "--no-dht", "--step-seconds", str(step_seconds)]
    options += ["--data", f"{text.name}={text.folder}"]
    spaces = not lacking()
    if bits_per_second is not None and not spaces:
        options += ["--upload", f"{bits_per_second / HEADERS / 1e6:.6f}mbit"]  # which counts no headers
    folder.mkdir(parents=True, exist_ok=True)
    owner = load_identity(folder / "run.key")
    filled = run.replace("{owner}", owner.key.hex())
    lines = LinkRates(wan=bits_per_second) if spaces else None
    key = (folder / "run.key").read_bytes()
    testnet = Testnet.create(folder / "swarm", filled.encode(), key, nodes, options, text.folder, lines=lines)
    testnet.coordinator.arguments.append("--no-dht")
    try:
        testnet.start_all()
        if spaces and bits_per_second is not None:
            assert testnet.network is not None
            testnet.network.quicken("coordinator", WAN)  # the coordinator carries no payloads
        yield Swarm(testnet, Manifest.from_toml(filled))
    finally:
        testnet.stop()
