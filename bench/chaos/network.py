"""A wire between network namespaces on this machine: one bridge, one address each, and what can be wrong with a line. The bridge
has a namespace of its own: what a firewall of this machine forbids to others, such as Docker's, does not touch it.

A direction is cut by giving the receiver a hardware address that nobody has: what is sent disappears, as on a line that is down,
and no end hears of it. The bench itself talks over the bridge, past every cut.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Wire", "lacking"]

BRIDGE = "bridge"
NOBODY = "02:dc:00:00:ff:ff"


def lacking() -> str:
    """Why there can be no such wire here; empty where there can."""
    if os.geteuid() != 0:
        return "chaos needs root: it makes network namespaces and mounts small disks"
    if missing := [tool for tool in ("ip", "tc", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"chaos needs {', '.join(missing)} (of iproute2 and util-linux)"
    trial = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"this machine lets nobody make network namespaces: {trial.stderr.strip()}" if trial.returncode else ""


def run(*command: str) -> None:
    """Raises CalledProcessError, with what it said."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr.strip())
        raise


class Wire:
    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"dc{os.getpid() % 100_000}"
        self._net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._switch = f"{self._tag}-0"

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{self._numbers[name]}"

    def address(self, name: str) -> str:
        return f"{self._net}.{self._numbers[name]}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Before a command that is to run there."""
        return ("nsenter", f"--net=/run/netns/{self.namespace(name)}")

    def _hardware(self, name: str) -> str:
        return f"02:dc:00:00:00:{self._numbers[name]:02x}"

    def _outer_end(self, name: str) -> str:
        return f"{self._tag}v{self._numbers[name]}"

    @contextmanager
    def laid(self) -> Iterator["Wire"]:
        run("ip", "netns", "add", self._switch)
        try:
            run("ip", "-n", self._switch, "link", "add", BRIDGE, "type", "bridge")
            run("ip", "-n", self._switch, "link", "set", BRIDGE, "up")
            run("ip", "link", "add", self._tag, "type", "veth", "peer", "name", "bench", "netns", self._switch)
            run("ip", "-n", self._switch, "link", "set", "bench", "master", BRIDGE, "up")
            run("ip", "address", "add", f"{self._net}.254/24", "dev", self._tag)
            run("ip", "link", "set", self._tag, "up")
            for name in self._numbers:
                self._plug_in(name)
            yield self
        finally:
            for namespace in (*map(self.namespace, self._numbers), self._switch):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
            subprocess.run(["ip", "link", "delete", self._tag], capture_output=True)  # gone with its other end, in a while

    def _plug_in(self, name: str) -> None:
        namespace, end = self.namespace(name), self._outer_end(name)
        run("ip", "netns", "add", namespace)
        run("ip", "-n", self._switch, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "-n", self._switch, "link", "set", end, "master", BRIDGE, "up")
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", namespace, "link", "set", "eth0", "address", self._hardware(name), "up")
        run("ip", "-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Nothing gets from the first of a pair to the second."""
        self._point(pairs, cut=True)

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._point(pairs, cut=False)

    def _point(self, pairs: Iterable[tuple[str, str]], cut: bool) -> None:
        for sender, receiver in pairs:
            hardware = NOBODY if cut else self._hardware(receiver)
            neighbour = ["ip", "-n", self.namespace(sender), "neigh", "replace", self.address(receiver)]
            run(*neighbour, "lladdr", hardware, "nud", "permanent", "dev", "eth0")

    def slow(self, name: str, rate: str) -> None:
        """Both directions of a member's line carry no more than this (tc's units)."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        run("tc", "-n", self.namespace(name), "qdisc", "replace", "dev", "eth0", *shape)
        run("tc", "-n", self._switch, "qdisc", "replace", "dev", self._outer_end(name), *shape)

    def quicken(self, name: str) -> None:
        run("tc", "-n", self.namespace(name), "qdisc", "delete", "dev", "eth0", "root")
        run("tc", "-n", self._switch, "qdisc", "delete", "dev", self._outer_end(name), "root")

    def processes(self, name: str) -> list[int]:
        """Everything that runs there."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True, check=True)
        return [int(word) for word in found.stdout.split()]
