"""Network namespaces on this machine, and bridges between them: each member of a swarm as on its own machine, on links of
a known bandwidth. Linux and root only.

The bridges have a namespace of their own, so a firewall of this machine, such as Docker's, does not affect them. All
names contain their maker's process id. The next maker removes what a dead one left, if nothing runs in it any more.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.protocol.errors import ConfigError, LocalError

__all__ = ["Namespaces", "Net", "Traffic", "lacking", "run"]

NAMED = Path("/run/netns")
"""Folder of the names of `ip netns`."""
TOOLS = ("ip", "tc", "nsenter", "unshare")
OURS = re.compile(r"(dx([0-9a-f]+)-[0-9a-f]{4})-\d+")
"""A namespace's name: its maker's tag, which begins with the maker's process id and is short enough for a link, and a number."""
BRIDGE = "bridge{}"
MOST_MEMBERS = 250
"""A net has the addresses 1 to 254."""
HERE = 254
"""This machine's address in a net that it is on."""
SHARED_NETS = 512
"""That lie in 198.18.0.0/15, which is kept for benches (RFC 2544): no other network of this machine is there."""
QUEUE_MS = 400
"""Longest queue of a link, in its time; it drops the rest, as a router does."""
BURST_BYTES, BURST_SECONDS = 16 * 1024, 0.004
"""Burst of a link, the larger of both: a late timer must not reduce the bandwidth."""
TRIAL = (
    "ip link add name trial type veth peer name other && ip link add name bridge type bridge"
    " && ip link set dev trial master bridge && ip link set dev trial type bridge_slave isolated on"
    " && tc qdisc add dev trial root tbf rate 1mbit burst 16kb latency 50ms"
)
"""Everything that this module asks of the kernel."""


def lacking() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)} (of iproute2 and util-linux)"
    trial = subprocess.run(["unshare", "--net", "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"this machine cannot create network namespaces: {trial.stderr.strip()}" if trial.returncode else ""


def run(*command: str) -> str:
    """Return the output of a command. Raises LocalError with its error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LocalError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Net:
    """A bridge, and who is plugged into it."""

    interface: str
    """Name of the interface in its members' namespaces."""
    members: Sequence[str]
    bits_per_second: float | None = None
    """Bandwidth of each link, each way; None: unlimited."""
    here: bool = False
    """This machine has an address on it too; on one net at most."""
    apart: bool = False
    """Its members reach this machine and not each other."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of a line, as its interface counts them: with the headers of every layer."""

    sent: int
    received: int

    def since(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class Namespaces:
    def __init__(self, nets: Sequence[Net], tag: str = "") -> None:
        """`tag`: of those that were made before, in another process perhaps."""
        names = dict.fromkeys(name for net in nets for name in net.members)
        if len(names) > MOST_MEMBERS:
            raise ConfigError(f"{len(names)} daemons in network namespaces; the limit is {MOST_MEMBERS}")
        self.nets, self.tag = tuple(nets), tag or _unused_tag()
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._switch = f"{self.tag}-0"

    def namespace(self, name: str) -> str:
        return f"{self.tag}-{self._numbers[name]}"

    def prefix(self, name: str) -> tuple[str, ...]:
        """Before a command that is to run there."""
        return ("nsenter", f"--net={NAMED / self.namespace(name)}")

    def address(self, name: str, interface: str) -> str:
        return f"{self._subnet(self._net(name, interface))}.{self._numbers[name]}"

    def hardware(self, name: str, interface: str) -> str:
        return f"02:dc:00:{self._net(name, interface):02x}:00:{self._numbers[name]:02x}"

    def _net(self, name: str, interface: str) -> int:
        return next(i for i, net in enumerate(self.nets) if net.interface == interface and name in net.members)

    def _subnet(self, net: int) -> str:
        """Only of the net that this machine is on does anything outside the namespaces know the addresses."""
        return _shared_subnet(self.tag) if self.nets[net].here else f"10.{net}.0"

    def _port(self, name: str, net: int) -> str:
        """The bridge's end of a line."""
        return f"p{net}-{self._numbers[name]}"

    @property
    def laid(self) -> bool:
        return (NAMED / self._switch).exists()

    def lay(self) -> None:
        """Make them. Raises LocalError, and then nothing is left."""
        sweep()
        try:
            for namespace in (self._switch, *map(self.namespace, self._numbers)):
                run("ip", "netns", "add", namespace)
                run("ip", "-n", namespace, "link", "set", "dev", "lo", "up")
            for number, net in enumerate(self.nets):
                self._lay_net(number, net)
        except BaseException:
            self.remove()
            raise

    def _lay_net(self, number: int, net: Net) -> None:
        bridge = BRIDGE.format(number)
        run("ip", "-n", self._switch, "link", "add", "name", bridge, "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "dev", bridge, "up")
        if net.here:
            run("ip", "link", "add", "name", self.tag, "type", "veth", "peer", "name", "here", "netns", self._switch)
            run("ip", "-n", self._switch, "link", "set", "dev", "here", "master", bridge, "up")
            run("ip", "address", "add", f"{self._subnet(number)}.{HERE}/24", "dev", self.tag)
            run("ip", "link", "set", "dev", self.tag, "up")
        for name in net.members:
            self._plug_in(name, number, net)

    def _plug_in(self, name: str, number: int, net: Net) -> None:
        namespace, port, inner = self.namespace(name), self._port(name, number), net.interface
        run("ip", "-n", self._switch, "link", "add", "name", port, "type", "veth", "peer", "name", inner, "netns", namespace)
        run("ip", "-n", self._switch, "link", "set", "dev", port, "master", BRIDGE.format(number), "up")
        if net.apart:
            run("ip", "-n", self._switch, "link", "set", "dev", port, "type", "bridge_slave", "isolated", "on")
        run("ip", "-n", namespace, "link", "set", "dev", inner, "address", self.hardware(name, inner), "up")
        run("ip", "-n", namespace, "address", "add", f"{self.address(name, inner)}/24", "dev", inner)
        if net.bits_per_second is not None:
            self.slow(name, inner, net.bits_per_second)

    def remove(self) -> None:
        """Remove all that exist. Nothing runs in them any more."""
        _remove(self.tag)

    @contextmanager
    def present(self) -> Iterator[None]:
        self.lay()
        try:
            yield
        finally:
            self.remove()

    def slow(self, name: str, interface: str, bits_per_second: float) -> None:
        """Both directions of a member's line carry no more than this."""
        burst = max(BURST_BYTES, round(BURST_SECONDS * bits_per_second / 8))
        shape = ["root", "tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MS}ms"]
        for namespace, end in self._ends(name, interface):
            run("tc", "-n", namespace, "qdisc", "replace", "dev", end, *shape)

    def quicken(self, name: str, interface: str) -> None:
        for namespace, end in self._ends(name, interface):
            run("tc", "-n", namespace, "qdisc", "delete", "dev", end, "root")

    def _ends(self, name: str, interface: str) -> tuple[tuple[str, str], ...]:
        """(namespace, link) of a line's two."""
        return (self.namespace(name), interface), (self._switch, self._port(name, self._net(name, interface)))

    def traffic(self, interface: str) -> dict[str, Traffic]:
        """Return the traffic of every link of that name, since its creation."""
        links: list[dict[str, Any]] = json.loads(run("ip", "-n", self._switch, "-s", "-j", "link", "show"))
        counters = {link["ifname"]: link["stats64"] for link in links}
        found = {}
        for name in self._numbers:
            for number, net in enumerate(self.nets):
                if net.interface == interface and name in net.members:
                    port = counters[self._port(name, number)]
                    found[name] = Traffic(sent=port["rx"]["bytes"], received=port["tx"]["bytes"])
        return found

    def processes(self, name: str) -> list[int]:
        """Everything that runs there."""
        return _processes(self.namespace(name))


def _shared_subnet(tag: str) -> str:
    number = int(tag[-4:], 16) % SHARED_NETS
    return f"198.{18 + number // 256}.{number % 256}"


def _unused_tag() -> str:
    """Return a tag whose subnet is unused here."""
    taken = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True).stdout
    while True:
        tag = f"dx{os.getpid():x}-{secrets.token_hex(2)}"
        if f" {_shared_subnet(tag)}." not in taken:
            return tag


def sweep() -> None:
    """Remove what makers left who are dead, where nothing runs in it: what a testnet detached stays."""
    found: dict[str, list[str]] = {}
    for path in sorted(NAMED.glob("dx*")):
        if (ours := OURS.fullmatch(path.name)) and not Path(f"/proc/{int(ours[2], 16)}").exists():
            found.setdefault(ours[1], []).append(path.name)
    for tag, namespaces in found.items():
        if not any(map(_processes, namespaces)):
            _remove(tag)


def _processes(namespace: str) -> list[int]:
    return [int(word) for word in run("ip", "netns", "pids", namespace).split()]


def _remove(tag: str) -> None:
    for path in NAMED.glob(f"{tag}-*"):
        subprocess.run(["ip", "netns", "delete", path.name], capture_output=True)
    subprocess.run(["ip", "link", "delete", "dev", tag], capture_output=True)  # it disappears with its other end, after a while
