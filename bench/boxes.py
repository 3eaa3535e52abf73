"""Traffic on a host's WAN link: two clusters of two hosts beside two clusters of one, in the same run.

Real daemons run in network namespaces. Links between clusters have 100 Mbit/s, links inside a cluster 1 Gbit/s. A host
exchanges only the payloads of its own stages. So each of two hosts with stages of equal size should carry half of a
single host's traffic, both ways. The bench counts everything on the interface: payloads, votes, commits, the cluster's
own control and every header. It needs root for the namespaces. `--check` exits with 1 if a bar is missed.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import bench_parser, judge, machine, table, write
from bench.texts import stdlib
from dilocox.node.planning.plan import inside
from dilocox.node.planning.time_model import model_payload_bytes
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count
from dilocox.testnet.namespaces import Traffic, lacking
from dilocox.testnet.swarm import LAN, WAN, LinkRates, Testnet
from dilocox.transport.store.data_directory import load_identity

__all__ = ["Line", "main", "missed"]

CLUSTERS, STAGES = 2, 2
BOXES = (1, 2)
ROUNDS, QUICK_ROUNDS = 12, 3
"""Measured rounds."""
BEGUN = 2
"""Rounds after which all nodes have fetched the initial state."""
SHARE = 0.6
"""Largest share of a single host's traffic on each link of two hosts."""
LINES = LinkRates(lan=1e9, wan=1e8)
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 600.0
RUN = f"""
[run]
name = "boxes"
owner = "{{owner}}"
[model]
sequence_length = 32
stages = {STAGES}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 256
intermediate_size = 704
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 4
[data]
evaluation_sequences = 8
[training]
learning_rate = 1e-3
total_steps = 100000
batch_size = 4
microbatches = 2
[compression]
codec = "fp32"
[rounds]
count = 100000
inner_steps = 8
max_inner_steps = 80
overlap = "none"
evaluate_every = 0
min_clusters = {CLUSTERS}
start_clusters = {CLUSTERS}
deadline_seconds = 120
vote_seconds = 60
liveness_seconds = 30
snapshot_every = 100000
"""
"""Payloads of megabytes, so that they are what is seen, and a round that ends when they have crossed."""


@dataclass(frozen=True)
class Line:
    """Bytes per round of one host."""

    boxes: int
    """Hosts of its cluster."""
    box: str
    wan: Traffic
    blobs: Traffic
    """Part of that traffic: payloads and their indexes, without headers."""
    lan: Traffic


@dataclass(frozen=True)
class Found:
    lines: list[Line]
    rounds: int
    uncounted: int
    """Contributions that a round did not count: what they sent would be missing."""
    seconds: float
    """Seconds of a round."""


def waited(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return value


def rows(testnet: Testnet) -> list[dict[str, Any]]:
    return testnet.coordinator.get("/v1/rounds") or []


def read(testnet: Testnet) -> dict[str, tuple[Traffic, Traffic, Traffic]]:
    """Return the WAN, blob and LAN traffic of each host."""
    assert testnet.network is not None
    wan, lan = testnet.network.traffic(WAN), testnet.network.traffic(LAN)
    found = {}
    for member in testnet.nodes:
        status = waited(lambda member=member: member.get("/v1/status"))  # type: ignore[misc]
        blobs = Traffic(*(status["network"][way].get("blob", 0) for way in ("sent", "received")))
        found[member.name] = wan[member.name], blobs, lan.get(member.name, Traffic(0, 0))
    return found


def measure(folder: Path, run: str, key: bytes, boxes: int, rounds: int) -> Found:
    text = stdlib()
    options = ["--devices", str(STAGES // boxes), "--threads", "1", "--no-dht", "--data", f"{text.name}={text.folder}"]
    testnet = Testnet.create(folder, run.encode(), key, CLUSTERS, options, text.folder, boxes, LINES)
    testnet.coordinator.arguments.append("--no-dht")
    try:
        testnet.start_all()
        waited(lambda: len(rows(testnet)) > BEGUN)
        first = len(rows(testnet))
        waited(lambda: len(rows(testnet)) > first)  # it opened just now
        first, before, began = first + 1, read(testnet), time.monotonic()
        waited(lambda: len(rows(testnet)) >= first + rounds)
        after, seconds = read(testnet), time.monotonic() - began
        measured = rows(testnet)[first : first + rounds]
    finally:
        testnet.stop()
    lines = []
    for name, old in before.items():
        changes = [new.since(earlier) for new, earlier in zip(after[name], old, strict=True)]
        lines.append(Line(boxes, name, *(Traffic(c.sent // rounds, c.received // rounds) for c in changes)))
    return Found(lines, rounds, sum(CLUSTERS - row["counted"] for row in measured), seconds / rounds)


def alone(lines: Sequence[Line]) -> Traffic:
    """Return the mean traffic of the single hosts."""
    single = [line.wan for line in lines if line.boxes == 1]
    return Traffic(sum(wan.sent for wan in single) // len(single), sum(wan.received for wan in single) // len(single))


def shares(line: Line, whole: Traffic) -> tuple[float, float]:
    """Return the shares of a single host's traffic: (sent, received)."""
    return line.wan.sent / whole.sent, line.wan.received / whole.received


def missed(lines: Sequence[Line], uncounted: int) -> list[str]:
    """Return the missed bars, as sentences."""
    whole = alone(lines)
    sentences = [f"{uncounted} contributions were not counted: these are not whole rounds"] if uncounted else []
    for line in lines:
        for verb, share in zip(("sent", "received"), shares(line, whole), strict=True):
            if line.boxes > 1 and share > SHARE:
                sentences.append(f"{line.box} {verb} {share:.2f} of what a cluster's only box does, at most {SHARE}")
    return sentences


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.boxes", __doc__, f"{QUICK_ROUNDS} rounds of each").parse_args(arguments)
    if why := lacking():
        print(why, file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="dx-") as name:
        folder = Path(name)
        owner = load_identity(folder / "run.key")
        text = stdlib().into(RUN).replace("{owner}", owner.key.hex())
        key, rounds = (folder / "run.key").read_bytes(), QUICK_ROUNDS if options.quick else ROUNDS
        found = [measure(folder / f"b{boxes}", text, key, boxes, rounds) for boxes in BOXES]
    run = Manifest.from_toml(text)
    payload = model_payload_bytes(run.model, run.compression) * (CLUSTERS - 1)
    lines, uncounted = [line for each in found for line in each.lines], sum(each.uncounted for each in found)
    whole, facts = alone(lines), machine()
    print(
        f"{facts['cores']} cores, {facts['platform']}; {CLUSTERS} clusters, {rounds} rounds of each; {LINES.wan or 0:,.0f} bit/s"
    )
    columns = [
        "boxes",
        "box",
        "WAN sent",
        "received",
        "of one box's",
        "",
        "payloads by plan",
        "blobs sent",
        "received",
        "LAN sent",
    ]
    cells = [
        [
            str(line.boxes),
            line.box,
            f"{line.wan.sent:,}",
            f"{line.wan.received:,}",
            *(f"{share:.3f}" for share in shares(line, whole)),
            f"{payload / line.boxes:,.0f}",
            f"{line.blobs.sent:,}",
            f"{line.blobs.received:,}",
            f"{line.lan.sent:,}",
        ]
        for line in lines
    ]
    table(columns, cells)
    print(f"bytes per round, of {parameter_count(run.model):,} parameters; WAN and LAN by the interface, with every header;")
    print("blobs: what the daemons count of payloads and leaves; by plan: the cluster's payloads over its boxes, each way")
    passed = max(inside(run, [STAGES // boxes] * boxes).activation_bytes for boxes in BOXES) * run.rounds.inner_steps
    print(f"LAN: activations, {passed:,} bytes a round by plan, in bfloat16; CPUs pass on float32, twice as much")
    write("boxes", {"rounds": rounds, "payload_bytes": payload, "found": [asdict(each) for each in found]})
    judge(missed(lines, uncounted), options.check)


if __name__ == "__main__":
    main()
