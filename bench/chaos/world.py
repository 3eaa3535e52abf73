"""Swarm that the faults hit: real daemons on their own network, each on a small disk, and the code that causes faults.

A killed daemon is restarted, as by a supervisor. Any other repair that the run needs counts as manual.
"""

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.clocks import Clocks
from bench.chaos.loss import Happened, Sample
from bench.chaos.network import LINE, Wire
from bench.chaos.schedule import COORDINATOR, Fault, cut_pairs
from bench.texts import stdlib
from dilocox.node.workers.environment import WORKER
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement
from dilocox.testnet.namespaces import run
from dilocox.testnet.swarm import Member, Testnet
from dilocox.transport.limits.rate_limits import bits_per_second
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.files import find_chains

__all__ = ["Usage", "World"]

STRANGER = "stranger"
API_PORT = 8080
DISK = "256m"
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.1
"""Seconds between two checks for processes that a dead daemon left."""
MEASURE_SECONDS = 10.0
ANSWER_SECONDS = 3.0
ORPHAN_SECONDS = 60.0
"""Seconds in which processes of a dead daemon must end: a worker that loads torch notices its death only afterwards."""
PATIENCE_SECONDS = 600.0
"""Seconds for an eventual result. A longer wait counts as a manual repair."""


@dataclass(frozen=True)
class Usage:
    at: float
    memory: int
    """Resident bytes of the daemon."""
    descriptors: int


class World:
    def __init__(self, folder: Path, run_file: bytes, key: bytes, nodes: int, step_seconds: float, seed: int) -> None:
        options = ["--devices", "1", "--threads", "1", "--step-seconds", str(step_seconds)]
        self._testnet = Testnet.create(folder, run_file, key, nodes, options, stdlib().folder)
        self.names = [member.name for member in self._testnet.members]
        self.nodes = self.names[1:]
        self._wire, self.clocks = Wire([*self.names, STRANGER]), Clocks(folder)
        self._testnet.members = [self._placed(member) for member in self._testnet.members]
        self._folder, self._random = folder, random.Random(seed)
        self._down: set[str] = set()
        """Members that the bench killed and has not restarted."""
        self._peers: dict[str, str] = {}
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.usage: dict[str, list[Usage]] = defaultdict(list)
        self.happened: list[Happened] = []
        self.helps: list[str] = []
        self.orphans: list[str] = []
        self.stranger_did: dict[str, int] = {}

    def _placed(self, member: Member) -> Member:
        address = self._wire.address(member.name, LINE)
        arguments = [*member.arguments, "--host", address, "--api", f"{address}:{API_PORT}"]
        return replace(member, arguments=arguments, prefix=(*self._wire.prefix(member.name), *self.clocks.prefix(member.name)))

    # The swarm

    @contextmanager
    def running(self) -> Iterator["World"]:
        """Run all members until each was counted. At the end all are stopped; the chains stay on disk until the world
        ends."""
        with ExitStack() as closing:
            closing.enter_context(self._wire.present())
            for member in self._testnet.members:
                closing.enter_context(self._small_disk(member.home))
            closing.callback(self._reap)
            closing.callback(self._testnet.stop)
            self._testnet.start_all()
            self.until(lambda: self._counted_since(0) >= set(self.nodes), "the swarm began")
            closing.enter_context(self._stranger())
            closing.enter_context(self._watching())
            yield self

    def stop(self) -> None:
        """Stop all members; a process that remains is an orphan."""
        self._down.update(self.names)
        self._testnet.stop()
        self._reap()

    @contextmanager
    def _small_disk(self, folder: Path) -> Iterator[None]:
        folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "chaos", str(folder))
        try:
            yield
        finally:
            run("umount", "--lazy", str(folder))

    def _reap(self) -> None:
        for name in self.names:
            self._gone(name)

    def _gone(self, name: str) -> None:
        """Wait until nothing of a dead daemon is left; what stays is counted, and killed by its number."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := self._wire.processes(name)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                self.orphans.append(f"{' '.join(process.cmdline())[:200]} ({process.status()}) of {name}")
                process.kill()

    def get(self, name: str, path: str) -> Any:
        """Return a document of a member's API; None if it does not answer."""
        try:
            url = f"http://{self._wire.address(name, LINE)}:{API_PORT}{path}"
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
                return json.load(response)
        except (OSError, ValueError):
            return None

    def name_of(self, peer: str) -> str:
        """Return the node of a peer; the identity of a new node is read first."""
        if peer not in self._peers:
            for name in self.nodes:
                if (self._testnet.member(name).home / "identity.key").exists():
                    self._peers[load_identity(self._testnet.member(name).home / "identity.key").peer] = name
        return self._peers.get(peer, peer)

    def _counted_since(self, first: int) -> set[str]:
        """Return the nodes counted in any round from this one on."""
        rounds = range(first, len(self.get(COORDINATOR, "/v1/rounds") or []))
        details = [self.get(COORDINATOR, f"/v1/rounds/{number}") or {} for number in rounds]
        return {self.name_of(item["cluster"]) for detail in details for item in detail.get("clusters", ())}

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition; at the end of patience, report that a manual repair is needed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                self.helps.append(f"within {PATIENCE_SECONDS:.0f} s it did not happen that {what}")
                return
            self._help()
            time.sleep(LOOK_SECONDS)

    def until_all_are_counted(self) -> None:
        """Wait until each node is counted in a round that opens from now on."""
        first = len(self.get(COORDINATOR, "/v1/rounds") or []) + 1
        for name in self.nodes:
            self.until(lambda name=name: name in self._counted_since(first), f"{name} was counted again")  # type: ignore[misc]

    def sleep_until(self, moment: float) -> None:
        while (left := moment - time.monotonic()) > 0:
            self._help()
            time.sleep(min(left, LOOK_SECONDS))

    def _help(self) -> None:
        """Restart members that ended by themselves, and record it as a manual repair."""
        for member in self._testnet.members:
            process = self._testnet.processes.get(member.name)
            if member.name in self._down or process is None or process.poll() is None:
                continue
            self.helps.append(f"{member.name} ended with {process.returncode}:\n{self._testnet.last_words(member)}")
            self._gone(member.name)
            self._testnet.start(member)

    def chains(self) -> dict[str, list[Statement[pb.Commit]]]:
        """Return each member's commits, verified from the first one on. Call it after `stop`. Raises RemoteError if one is
        not valid."""
        found = {}
        for member in self._testnet.members:
            (path,) = find_chains(member.home)
            with ChainFile.for_reading(path) as chain:
                found[member.name] = list(chain.verify())
        return found

    # Watching

    @contextmanager
    def _watching(self) -> Iterator[None]:
        ended = threading.Event()
        loops = [threading.Thread(target=self._watch, args=(name, ended), name=f"watch {name}") for name in self.nodes]
        loops.append(threading.Thread(target=self._measure, args=(ended,), name="measure"))
        for loop in loops:
            loop.start()
        try:
            yield
        finally:
            ended.set()
            for loop in loops:
                loop.join()

    def _watch(self, name: str, ended: threading.Event) -> None:
        while not ended.wait(LOOK_SECONDS):
            status = self.get(name, "/v1/status")
            if status is None or not status.get("total_steps"):
                continue
            at, steps = status["clock_seconds"], status["total_steps"]
            kept = self.samples[name]
            if not kept or at > kept[-1].at:
                kept.append(Sample(at, steps, status["phase_round"], status["inner_step"], status["on_roster"]))

    def _measure(self, ended: threading.Event) -> None:
        while not ended.wait(MEASURE_SECONDS):
            for name in self.names:
                with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                    daemon = psutil.Process(self._testnet.processes[name].pid)
                    self.usage[name].append(Usage(time.monotonic(), daemon.memory_info().rss, daemon.num_fds()))

    @contextmanager
    def _stranger(self) -> Iterator[None]:
        """Run the unknown peer beside the swarm."""
        facts = {member.name: member.facts() or {} for member in self._testnet.members}
        at = [",".join(f"{self._wire.address(n, LINE)}:{facts[n][port]}" for n in self.names) for port in ("port", "dht_port")]
        link = (self._folder / "link").read_text().strip()
        code = "from bench.chaos.stranger import main; main()"
        log = self._folder / "stranger.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._wire.prefix(STRANGER), sys.executable, "-c", code, link, *at], stdout=output, stderr=output
            )
        try:
            yield
        finally:
            if process.poll() is None:
                process.kill()
            else:
                self.helps.append(f"the stranger gave up:\n{log.read_text()[-2000:]}")
            process.wait()
            lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
            self.stranger_did = json.loads(lines[-1]) if lines else {}

    # Faults

    def suffer(self, fault: Fault) -> None:
        """Let it happen, and put it right after its seconds."""
        began = time.monotonic()
        getattr(self, f"_{fault.kind}")(fault)
        self.happened.append(Happened(fault, began, time.monotonic()))

    def _kill(self, fault: Fault, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._down.update(fault.targets)
        for name in fault.targets:
            self._testnet.processes[name].kill()
        for name in fault.targets:
            self._testnet.processes[name].wait()
        for name in fault.targets:
            self._gone(name)
        meanwhile()
        self.sleep_until(time.monotonic() + fault.seconds)
        for name in fault.targets:
            self._testnet.start(self._testnet.member(name))
        self._down.difference_update(fault.targets)

    def _child(self, name: str, word: str) -> psutil.Process | None:
        for pid in self._wire.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if word == process.name() or any(word in part for part in process.cmdline()):
                    return process
        return None

    def _kill_child(self, fault: Fault) -> None:
        child = self._child(fault.targets[0], fault.detail)
        if child is not None:
            child.kill()

    def _stop_worker(self, fault: Fault) -> None:
        if (child := self._child(fault.targets[0], WORKER)) is not None:
            child.suspend()
            self.sleep_until(time.monotonic() + fault.seconds)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()

    def _hang_worker(self, fault: Fault) -> None:
        """Hang a worker without a later repair: the daemon must notice, or a manual repair counts."""
        if (child := self._child(fault.targets[0], WORKER)) is not None:
            child.suspend()
            deadline = time.monotonic() + fault.seconds
            while child.is_running() and time.monotonic() < deadline:
                self.sleep_until(time.monotonic() + LOOK_SECONDS)
            if child.is_running():
                self.helps.append(f"{fault.targets[0]} did not notice within {fault.seconds:.0f} s that its worker hangs")
                child.resume()

    def _cut(self, fault: Fault) -> None:
        pairs = cut_pairs(fault, self.names)
        self._wire.cut(pairs)
        self.sleep_until(time.monotonic() + fault.seconds)
        self._wire.mend(pairs)

    def _slow(self, fault: Fault) -> None:
        self._wire.slow(fault.targets[0], LINE, bits_per_second(fault.detail, "slow"))
        self.sleep_until(time.monotonic() + fault.seconds)
        self._wire.quicken(fault.targets[0], LINE)

    def _step_clock(self, fault: Fault) -> None:
        self.clocks.step(fault.targets[0], fault.detail)
        self.sleep_until(time.monotonic() + fault.seconds)
        self.clocks.step(fault.targets[0], "+0")

    def _fill_disk(self, fault: Fault) -> None:
        filler = self._testnet.member(fault.targets[0]).home / "filler"
        deadline = time.monotonic() + fault.seconds
        while time.monotonic() < deadline:  # the daemon continues to delete files that it does not need
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
            self.sleep_until(min(deadline, time.monotonic() + 0.5))
        filler.unlink()

    def _damage(self, fault: Fault) -> None:
        """Damage a member's files after `kill -9`, while it is down."""
        self._kill(fault, lambda: self._spoil(fault))

    def _damage_live(self, fault: Fault) -> None:
        self._spoil(fault)

    def _spoil(self, fault: Fault) -> None:
        much, _, pattern = fault.detail.partition(" of ")
        found = sorted(self._testnet.member(fault.targets[0]).home.glob(pattern))
        for path in [file for one in found for file in (one.rglob("*") if one.is_dir() else (one,)) if file.is_file()]:
            with contextlib.suppress(FileNotFoundError):  # live: the daemon removes what it does not need
                path.write_bytes(self._spoiled(path.read_bytes(), much))

    def _spoiled(self, raw: bytes, much: str) -> bytes:
        if much == "half":
            return raw[: len(raw) // 2]
        if much == "all" or not raw:
            return self._random.randbytes(max(16, len(raw)))
        at = self._random.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << self._random.randrange(8)]) + raw[at + 1 :]


def distinct(chains: Sequence[Sequence[Statement[pb.Commit]]]) -> int:
    """Return the number of chains that are not a prefix of another."""
    digests = sorted({tuple(commit.digest for commit in chain) for chain in chains}, key=len, reverse=True)
    ends: list[tuple[bytes, ...]] = []
    for each in digests:
        if not any(longer[: len(each)] == each for longer in ends):
            ends.append(each)
    return len(ends)
