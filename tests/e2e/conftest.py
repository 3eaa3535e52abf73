"""A real swarm for the end-to-end tests: three nodes of two workers, a coordinator, a run that never ends by itself."""

import ipaddress
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from bench.texts import stdlib
from dilocox.protocol.errors import reason_name
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.testnet.swarm import LinkRates, Member, Testnet
from dilocox.transport.store.data_directory import load_identity

RUN = """
[run]
name = "e2e"
owner = "{owner}"
[model]
sequence_length = 16
stages = 3
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
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
count = {count}
inner_steps = 20
max_inner_steps = 200
synchronous_rounds = 1
min_clusters = 2
start_clusters = 3
deadline_seconds = 120
vote_seconds = 30
liveness_seconds = 30
snapshot_every = 4
"""


NO_TIME = (pb.REASON_LATE, pb.REASON_ABSENT, pb.REASON_DID_NOT_VOTE)
"""Reasons by which a busy machine excludes a node from a round, although its work was not examined."""
HAD_NO_TIME = tuple(map(reason_name, NO_TIME))

PATIENCE_SECONDS = 600.0
"""Seconds for any condition. No test measures time by it: a machine so loaded that it needs longer runs no tests."""


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true value of `condition`; fail the test if it does not come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"within {PATIENCE_SECONDS:.0f} s it did not happen that {what}")


def wait_until_gone(processes: Collection[psutil.Process]) -> None:
    """Wait for the end of the processes; fail the test if one remains. A zombie that waits for init counts as ended."""
    wait_for(lambda: not any(runs(process) for process in processes), f"these ended: {processes}")


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def names(process: psutil.Process, word: str) -> bool:
    """Return whether the process is alive, and `word` is its name or in its command line."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return word == process.name() or any(word in part for part in process.cmdline())
    return False


def listeners(process: psutil.Process) -> list[tuple[str, int]]:
    """Return (`tcp` or `udp`, port) of the process's sockets that another machine could send to."""
    found = []
    for item in process.net_connections(kind="inet"):
        kind = "udp" if item.type == socket.SOCK_DGRAM else "tcp"
        waits = item.status == psutil.CONN_LISTEN or (kind == "udp" and not item.raddr)
        address = ipaddress.ip_address(item.laddr.ip)
        address = getattr(address, "ipv4_mapped", None) or address
        if waits and not address.is_loopback:
            found.append((kind, item.laddr.port))
    return found


@dataclass
class Swarm:
    testnet: Testnet
    answer_seconds: ClassVar[float] = PATIENCE_SECONDS
    """Seconds for an answer: a running member answers, however busy the machine is."""

    def ask(self, member: str, path: str) -> Any:
        """Return the answer; None if the member does not run, or only starts."""
        return self.testnet.member(member).get(path, self.answer_seconds)

    def rounds(self, member: str = "coordinator") -> list[dict[str, Any]]:
        return self.ask(member, "/v1/rounds") or []

    def status(self, member: str) -> dict[str, Any]:
        return self.ask(member, "/v1/status") or {}

    def open_round(self) -> int:
        for member in self.testnet.failed():
            pytest.fail(f"{member.name} failed:\n{self.testnet.last_words(member)}")
        return len(self.rounds())

    def round(self, number: int) -> dict[str, Any]:
        """Return one closed round in full."""
        detail: dict[str, Any] = self.ask("coordinator", f"/v1/rounds/{number}")
        return detail

    def peer(self, member: str) -> str:
        return load_identity(self.testnet.member(member).home / "identity.key").peer

    def counted(self, number: int) -> set[str]:
        return {item["cluster"] for item in self.round(number)["clusters"]}

    def counted_or_busy(self, number: int) -> int:
        """Return how many clusters a round counted, or excluded for lack of time."""
        excluded = self.round(number)["excluded"]
        return len(self.counted(number)) + sum(item["reason"] in HAD_NO_TIME for item in excluded)

    def wait_for_round(self, number: int) -> None:
        wait_for(lambda: self.open_round() > number, f"round {number} closed")

    def wait_until_all_are_counted(self, members: Iterable[str], since: int) -> int:
        """Return the first round from `since` on that counts these members, and no others: on a busy machine one may be
        late in any round."""
        peers = {self.peer(member) for member in members}

        def look() -> int | None:
            return next((n for n in range(max(1, since), self.open_round()) if self.counted(n) == peers), None)

        found: int = wait_for(look, f"a round counted {members}")
        return found

    def wait_until_gone_from_roster(self, member: str, since: int) -> int:
        """Return the first round from `since` on whose commit leaves the member out of the next."""
        peer = self.peer(member)

        def look() -> int | None:
            rounds = range(since, self.open_round())
            return next((n for n in rounds if peer not in self.round(n)["next_roster"]), None)

        found: int = wait_for(look, f"{member} left the roster")
        return found

    def wait_until_counted(self, member: str, since: int) -> int:
        """Return the first round from `since` on that counts the member."""
        peer = self.peer(member)

        def look() -> int | None:
            return next((n for n in range(since, self.open_round()) if peer in self.counted(n)), None)

        found: int = wait_for(look, f"{member} was counted")
        return found

    def processes(self, member: str) -> list[psutil.Process]:
        """Return the member's daemon and all its descendants."""
        facts = self.testnet.member(member).facts()
        assert facts is not None
        daemon = psutil.Process(facts["pid"])
        return [daemon, *daemon.children(recursive=True)]

    def process(self, member: str, word: str) -> psutil.Process:
        """Return the member's child of that name, or with `word` in its command line."""
        for process in self.processes(member):
            if names(process, word):
                return process
        raise AssertionError(f"{member} has no process {word}")

    def roles(self, member: str, words: Iterable[str]) -> dict[str, int]:
        """Return how many of the member's processes have each word as their name, or in their command line."""
        processes = self.processes(member)
        return {word: sum(names(process, word) for process in processes) for word in words}

    def log(self, member: str) -> str:
        return (self.testnet.folder / f"{member}.log").read_text()

    def same_states(self, round: int) -> bool:
        """Return whether every running node reports one state before `round`."""
        nodes = [m.name for m in self.testnet.nodes if (m.facts() or {}).get("role") == "node"]
        hashes = [self.status(name).get("state_hashes", {}).get(str(round)) for name in nodes]
        return None not in hashes and len({tuple(h) for h in hashes if h}) == 1


def build(
    folder: Path,
    count: int,
    nodes: int = 3,
    holders: Collection[str] = (),
    options: Collection[str] = (),
    changes: Mapping[str, str] | None = None,
    boxes: int = 1,
    lines: LinkRates | None = None,
) -> Testnet:
    """Build a swarm. `changes`: lines of RUN, and their replacements. `lines`: in network namespaces."""
    owner = load_identity(folder / "e2e.key")
    run = stdlib().into(RUN).replace("{owner}", owner.key.hex()).replace("{count}", str(count))
    for line, instead in (changes or {}).items():
        assert f"\n{line}\n" in run
        run = run.replace(f"\n{line}\n", f"\n{instead}\n")
    run = run.replace("[model]", f"relays = {list(holders)}\n[model]", 1)
    arguments = ["--devices", "2", "--threads", "1", "--step-seconds", "0.1", *options]  # two cores for many daemons
    key = (folder / "e2e.key").read_bytes()
    testnet = Testnet.create(folder / "t", run.encode(), key, nodes, arguments, stdlib().folder, boxes, lines)
    testnet.members[-1].arguments.append("--no-dht")  # it is dialled, and dials, by what the coordinator passes on
    return testnet


@contextmanager
def running(testnet: Testnet, rounds: int) -> Iterator[Swarm]:
    """Run all members except the last one, which a test may start later, until `rounds` rounds are closed. At the end no
    process remains."""
    late = testnet.members.pop()
    testnet.start_all()
    testnet.members.append(late)
    swarm = Swarm(testnet)
    try:
        wait_for(lambda: swarm.open_round() > rounds, f"the swarm trained {rounds} rounds")
        yield swarm
    finally:
        everything = [p for m in testnet.running() for p in swarm.processes(m.name)]
        testnet.stop()
        wait_until_gone(everything)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Run a swarm, shared by the tests of a module, in order: a start takes half a minute on two cores."""
    testnet = build(tmp_path_factory.mktemp("e2e"), count=100_000, nodes=4)
    with running(testnet, rounds=2) as swarm:
        yield swarm


def late_member(swarm: Swarm) -> Member:
    return swarm.testnet.members[-1]
