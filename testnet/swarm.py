"""Swarm on this machine: real daemons, each with its process and folder, started through the command line.

Attached (the default), every member is connected to this process by a pipe and dies with it, however it dies. Detached
members live on.

With `LinkRates` each member has a network namespace, and in it:

    wan      the line to all others
    lan      of a cluster of several boxes: the line to its own boxes, and to nobody else
    watch    the line to this machine, for its HTTP API: who looks on does not count as traffic
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dilocox.node.hosts.cluster_link import CLUSTER_LINK
from dilocox.node.workers.pool import LOOPBACK
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.manifest import Manifest
from dilocox.testnet.namespaces import Namespaces, Net
from dilocox.transport.process.health import running_daemon
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox.transport.store.files import write_atomically

__all__ = ["ANSWER_SECONDS", "LAN", "WAN", "LinkRates", "Member", "Testnet"]

START_SECONDS = 120.0
"""Six stage workers importing torch on two cores take about a minute."""
ANSWER_SECONDS = 5.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.2
COORDINATOR = "coordinator"
MARKER = ".dilocox-testnet"
"""File that marks a folder as a testnet's, and names its members' folders: the next testnet may delete those."""
MEMBER = rf"{COORDINATOR}|node-\d+(-box-\d+)?"
"""Names that `member_names` may return."""
FILES = ("run.toml", "run.key", "link", "testnet.json")
"""Files beside the members' folders and logs."""
ANY_PORTS = {f"DILOCOX_{verb}__{port}": "0" for verb in ("COORDINATOR", "NODE") for port in ("PORT", "DHT_PORT")} | {
    f"DILOCOX_{verb}__API": "127.0.0.1:0" for verb in ("COORDINATOR", "NODE")
}
"""Options of members by environment: several daemons of one kind share this machine."""
WAN, LAN, WATCH = "wan", "lan", "watch"
API_PORT = 8080


@dataclass(frozen=True)
class Member:
    name: str
    home: Path
    arguments: list[str]
    """Arguments of `dilocox`."""
    prefix: tuple[str, ...] = ()
    """Command prefix, such as `nsenter --net=…`; it ends in an exec."""
    needs: Path | None = None
    """A file that another member writes first."""

    @property
    def lead(self) -> str:
        """The name of its cluster's lead."""
        return self.needs.parent.name if self.needs is not None else self.name

    def facts(self) -> dict[str, Any] | None:
        """Return what the running daemon published; None when it does not run."""
        return running_daemon(self.home)

    def get(self, path: str, seconds: float = ANSWER_SECONDS) -> Any:
        """A document of its HTTP API; None when it does not answer within so many, or only starts."""
        facts = self.facts()
        if facts is None or "api" not in facts:
            return None
        try:
            with urllib.request.urlopen(facts["api"] + path, timeout=seconds) as response:
                value = json.load(response)
            starts = isinstance(value, dict) and (value.get("role"), value.get("state")) == ("waiting", "starting")
            return None if starts else value
        except (urllib.error.URLError, OSError, ValueError):
            return None


@dataclass(frozen=True)
class LinkRates:
    """Bandwidths of members in network namespaces, in bits per second, each way; None: unlimited."""

    lan: float | None = None
    wan: float | None = None

    def between(self, names: list[str], clusters: list[list[str]]) -> Namespaces:
        """`names`: of all members; `clusters`: of each one's boxes."""
        nets = [Net(WAN, names, self.wan), Net(WATCH, names, here=True, apart=True)]
        return Namespaces([*nets, *(Net(LAN, boxes, self.lan) for boxes in clusters if len(boxes) > 1)])


def member_names(nodes: int, boxes: int) -> list[str]:
    """Return the names of a testnet with so many clusters of so many hosts."""
    leads, others = _clusters(nodes, boxes)
    return [COORDINATOR, *leads, *others]


def _clusters(nodes: int, boxes: int) -> tuple[list[str], dict[str, str]]:
    """Names of the clusters' leads, and of their other boxes with whose they are."""
    leads = [f"node-{number}" for number in range(1, nodes + 1)]
    return leads, {f"{lead}-box-{number}": lead for number in range(2, boxes + 1) for lead in leads}


def _clear(folder: Path) -> None:
    """Remove what an earlier testnet made in the folder; other files stay. Raises ConfigError or LocalError before it does."""
    marker = folder / MARKER
    if not marker.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} contains files that no testnet made. Use an empty folder with --folder.")
        return
    names = _made_by(marker)
    if any(running_daemon(folder / name) for name in names):
        raise LocalError(f"a testnet runs in {folder}. Stop it: dilocox testnet down")
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (*FILES, *(f"{name}.log" for name in names)):
        (folder / name).unlink(missing_ok=True)
    for leftover in folder.glob("parent-*"):
        if leftover.is_fifo():
            leftover.unlink()


def _made_by(marker: Path) -> list[str]:
    """Return the folders that may be deleted. Raises ConfigError if a testnet did not write the file."""
    try:
        names = json.loads(marker.read_bytes())
        if isinstance(names, list) and all(re.fullmatch(MEMBER, name) for name in names):
            return names
    except (ValueError, TypeError, RecursionError):
        pass
    raise ConfigError(f"{marker} is damaged: the members of this testnet are unknown. Use another folder with --folder.")


def _placed(member: Member, network: Namespaces) -> Member:
    """Return the member with its namespace."""
    addresses = ["--host", network.address(member.name, WAN), "--api", f"{network.address(member.name, WATCH)}:{API_PORT}"]
    return replace(member, arguments=[*member.arguments, *addresses], prefix=network.prefix(member.name))


class Testnet:
    __test__ = False  # not a test class, whatever its name

    def __init__(self, folder: Path, members: list[Member], network: Namespaces | None = None) -> None:
        """`network`: in which the members run; None: on this machine's loopback."""
        self.folder, self.members, self.network = folder.absolute(), members, network
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._parent_pipe: ParentPipe | None = None

    @classmethod
    def create(
        cls,
        folder: Path,
        run: bytes,
        key: bytes,
        nodes: int,
        options: list[str],
        data: Path,
        boxes: int = 1,
        lines: LinkRates | None = None,
        private: Sequence[Path] = (),
    ) -> "Testnet":
        """Lay out a new testnet in `folder`, replacing an old one: `run` is the run file, `key` its owner's, `data` the
        folder of its corpus, which the coordinator serves; each node is a cluster of so many `boxes`. `lines`: in network
        namespaces, which `start_all` makes; None: on loopback. `private`: of each node, the folder of its own corpus.

        Raises ConfigError when the folder holds what no testnet made, LocalError while one runs there.
        """
        folder = folder.absolute()
        leads, others = _clusters(nodes, boxes)
        names = member_names(nodes, boxes)
        clusters = [[lead, *(name for name in others if others[name] == lead)] for lead in leads]
        network = lines.between(names, clusters) if lines is not None else None
        _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MARKER, json.dumps(names).encode())
        write_atomically(folder / "run.toml", run)
        write_atomically(folder / "run.key", key, mode=0o600)
        link = folder / "link"
        coordinator = folder / COORDINATOR
        arguments = ["coordinator", str(folder / "run.toml"), "--home", str(coordinator), "--link-file", str(link)]
        arguments += ["--name", COORDINATOR]
        arguments += ["--data", f"{Manifest.from_toml(run.decode()).data.name}={data}"]
        members = [Member(COORDINATOR, coordinator, arguments)]
        lan = ["--cluster-interface", LAN if network else LOOPBACK] if boxes > 1 else []
        for name in leads:
            home = folder / name
            arguments = ["node", "--join", f"@{link}", "--home", str(home), "--name", name, *options]
            arguments += ["--private", str(private[leads.index(name)])] if private else []
            members.append(Member(name, home, [*arguments, *(["--cluster-boxes", str(boxes)] if lan else []), *lan]))
        for name, lead in others.items():
            home, needs = folder / name, folder / lead / CLUSTER_LINK
            arguments = ["node", "--cluster", str(needs), "--home", str(home), "--name", name, *options, *lan]
            arguments += ["--private", str(private[leads.index(lead)])] if private else []
            members.append(Member(name, home, arguments, needs=needs))
        if network is not None:
            members = [_placed(member, network) for member in members]
        testnet = cls(folder, members, network)
        write_atomically(folder / "testnet.json", json.dumps(testnet._described(), indent=1).encode())
        return testnet

    def _described(self) -> dict[str, Any]:
        network = {"tag": self.network.tag, "nets": [asdict(net) for net in self.network.nets]} if self.network else None
        members = [
            {"name": m.name, "home": str(m.home), "arguments": m.arguments, "prefix": m.prefix, "needs": str(m.needs or "")}
            for m in self.members
        ]
        return {"network": network, "members": members}

    @classmethod
    def load(cls, folder: Path) -> "Testnet":
        """Return the testnet that `create` made in `folder`. Raises ConfigError if there is none, LocalError."""
        path = folder / "testnet.json"
        if not path.exists():
            raise ConfigError(f"no testnet in {folder}. Start one: dilocox testnet up")
        try:
            described = json.loads(path.read_bytes())
            members = [
                Member(m["name"], Path(m["home"]), m["arguments"], tuple(m["prefix"]), Path(m["needs"]) if m["needs"] else None)
                for m in described["members"]
            ]
            found = described["network"]
            network = Namespaces([Net(**net) for net in found["nets"]], found["tag"]) if found else None
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise LocalError(
                f"{path} is damaged, or of another version: use that version to stop it. Otherwise stop its "
                f"daemons by pid: each is in {folder}/MEMBER/daemon.json."
            ) from error
        return cls(folder, members, network)

    @property
    def coordinator(self) -> Member:
        return self.members[0]

    @property
    def nodes(self) -> list[Member]:
        return self.members[1:]

    def member(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise ConfigError(f"no member {name}; use one of: {', '.join(member.name for member in self.members)}")

    def start(self, member: Member, attached: bool = True) -> None:
        """Start a member's daemon; its output goes to `<name>.log`. Raises LocalError if its network is gone."""
        if self.network is not None and not self.network.laid:
            raise LocalError("this testnet's network was removed. Start a new testnet: dilocox testnet up")
        if (earlier := self.processes.pop(member.name, None)) is not None:
            earlier.wait(timeout=STOP_SECONDS)
        environment = dict(os.environ)
        if attached:
            self._parent_pipe = self._parent_pipe or ParentPipe(self.folder)
            environment |= self._parent_pipe.environment()
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment |= ANY_PORTS
        with (self.folder / f"{member.name}.log").open("ab") as output:
            self.processes[member.name] = subprocess.Popen(
                [*member.prefix, sys.executable, "-P", "-m", "dilocox.cli.main", *member.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def start_all(self, attached: bool = True) -> None:
        """The coordinator, then, once its join link is there, the nodes. Raises LocalError when it does not come up."""
        if self.network is not None:
            self.network.lay()
        self.start(self.coordinator, attached)
        self._wait_for(self.folder / "link")
        for node in self.nodes:
            if node.needs is not None:
                self._wait_for(node.needs)
            self.start(node, attached)

    def _wait_for(self, link: Path) -> None:
        """Wait until a member has written the file. Raises LocalError if one ends instead."""
        deadline = time.monotonic() + START_SECONDS
        while not link.exists():
            ended = [member for member in self.members if (p := self.processes.get(member.name)) and p.poll() is not None]
            if ended or time.monotonic() > deadline:
                who = ended[0] if ended else self.coordinator
                raise LocalError(f"{who.name} did not start:\n{self.last_words(who)}")
            time.sleep(POLL_SECONDS)

    def failed(self) -> list[Member]:
        """Members started here whose process ended with an error."""
        return [m for m in self.members if m.name in self.processes and self.processes[m.name].poll() not in (None, 0, -9)]

    def last_words(self, member: Member) -> str:
        path = self.folder / f"{member.name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-12:]) if path.exists() else ""

    def kill(self, member: Member, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member's daemon. Raises LocalError when it does not run."""
        facts = member.facts()
        if facts is None:
            raise LocalError(f"{member.name} does not run. Start it: dilocox testnet start {member.name}")
        os.kill(facts["pid"], number)

    def running(self) -> list[Member]:
        return [member for member in self.members if member.facts() is not None]

    def stop(self) -> None:
        """SIGTERM to every member, nodes first; SIGKILL to what is left after a while. Leaves no process, and no network."""
        for group in (self.nodes, [self.coordinator]):
            for member in group:
                with contextlib.suppress(LocalError, ProcessLookupError):
                    self.kill(member, signal.SIGTERM)
                process = self.processes.get(member.name)
                if process is not None and process.poll() is None:  # it has not taken its lock yet
                    process.terminate()
            deadline = time.monotonic() + STOP_SECONDS
            while any(m.facts() for m in group) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            for member in group:
                with contextlib.suppress(LocalError, ProcessLookupError):
                    self.kill(member)
        if self._parent_pipe is not None:
            self._parent_pipe.close()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=STOP_SECONDS)
            if process.poll() is None:
                process.kill()
                process.wait()
        if self.network is not None:
            self.network.remove()
