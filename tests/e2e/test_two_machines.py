"""The section "Two machines" of the tutorial, typed literally on two machines as far as the network is concerned."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dilocox.testnet.namespaces import Namespaces, Net, lacking
from tests.e2e.conftest import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "join-a-run.md"
WAIT_SECONDS = 60.0
"""A wait for others that lasts longer has to name what to change."""
WAITS = ("joining", "waiting")
"""States in which a node waits for other clusters; in all others it works."""
BOUNDED = (
    "waiting for the contributions of",
    "waiting for the votes of",
    "waiting for the last state reports of",
    "about to close",
)
"""Beginnings of a round's reasons that a deadline of the run ends."""
WORDS = ("why", "round_why", "advice")
"""Fields of a status in which a person reads why a node waits."""
COUNTED = 2
"""Rounds that count both machines, and then the section has kept its promise."""


def section() -> list[list[str]]:
    """The lines of each block, without comments."""
    text = PAGE.read_text().partition("## Two machines\n")[2].partition("\n#")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [[line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()] for block in blocks]


@dataclass
class Machine:
    """Network namespace with a separate folder and home."""

    name: str
    folder: Path
    prefix: tuple[str, ...]
    addresses: dict[str, str]
    """Addresses by their placeholder in the page."""
    going: list[subprocess.Popen[str]] = field(default_factory=list)

    def _started(self, line: str, log: Path) -> subprocess.Popen[str]:
        said = [self.addresses.get(word, word) for word in shlex.split(line)]
        assert said[0] == "dilocox", line
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCOX_")}
        environment |= {"DILOCOX_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            return subprocess.Popen(
                [*self.prefix, sys.executable, "-P", "-m", "dilocox.cli.main", *said[1:]],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
            )

    def type(self, line: str) -> None:
        """Type a line. A daemon continues; any other command has to succeed."""
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        process = self._started(line, log)
        if line.split()[1] in ("coordinator", "node"):
            self.going.append(process)
            return
        code = process.wait(PATIENCE_SECONDS)
        assert code == 0, f"{line}: {log.read_text()}"

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def status(self, daemon: str) -> dict[str, Any] | None:
        """Return the answer of `dilocox status`; None if there is none yet."""
        asked = self.folder / "status"
        process = self._started(f"dilocox status --json --home {self.folder / 'home' / daemon}", asked)
        process.wait(PATIENCE_SECONDS)
        text = asked.read_text()
        return dict(json.loads(text[text.index("{") :])) if process.returncode == 0 and "{" in text else None

    def end(self) -> None:
        for process in reversed(self.going):
            process.send_signal(signal.SIGTERM)
        for process in self.going:
            process.wait(PATIENCE_SECONDS)


@contextmanager
def two(folder: Path) -> Iterator[list[Machine]]:
    names = ["FIRST", "SECOND"]
    network = Namespaces([Net("lan", names)])
    with network.present():
        addresses = {name: network.address(name, "lan") for name in names}
        machines = [Machine(name, folder / name, network.prefix(name), addresses) for name in names]
        for machine in machines:
            machine.folder.mkdir()
        try:
            yield machines
        finally:
            for machine in reversed(machines):
                machine.end()


def setting(status: dict[str, Any]) -> str | None:
    """Return the key of the run file that shortens what a node waits for; None where none does. Raises KeyError unless it waits."""
    if status["state"] not in WAITS:
        raise KeyError(status["state"])
    if status["state"] == "joining":
        return "rounds.start_clusters"
    return "rounds.min_clusters" if "no deadline passes" in status["round_why"] else None


def may_last(status: dict[str, Any]) -> bool:
    """Return whether a node may be in this state for more than WAIT_SECONDS: it works, a deadline ends it, or it names the setting
    that applies."""
    if status.get("state") not in WAITS or status.get("round_why", "").startswith(BOUNDED):
        return True
    named = setting(status)
    return named is not None and named in " ".join(str(status.get(key, "")) for key in WORDS)


def wait(machines: list[Machine], daemon: Machine, until: Any, what: str) -> None:
    """Fails when a daemon ends, or waits for others for more than a minute without naming what to change."""
    since, said, deadline = time.monotonic(), "", time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for machine in machines:
            assert all(process.poll() is None for process in machine.going), machine.logs()
        status = daemon.status("node") or {}
        if until(status):
            return
        words = " ".join(str(status.get(key, "")) for key in ("state", *WORDS))
        if status.get("state") not in WAITS or words != said:
            since, said = time.monotonic(), words
        assert time.monotonic() - since < WAIT_SECONDS or may_last(status), (
            f"it waits, and names no setting that applies: {words}"
        )
        time.sleep(2.0)
    pytest.fail(f"it did not happen that {what}: {[machine.logs() for machine in machines]}")


@pytest.mark.parametrize(
    ("state", "round_why", "advice", "lasts"),
    [
        ("joining", "the run begins when 2 clusters are here: 1 of 2", "the owner sets rounds.start_clusters", True),
        (
            "joining",
            "the run begins when 2 clusters are here: 1 of 2",
            "the owner sets rounds.min_clusters; pass --machines",
            False,
        ),
        ("waiting", "1 cluster is live and the run needs 2 (rounds.min_clusters): no deadline passes while …", "", True),
        ("waiting", "1 cluster is live and the run needs 2: no deadline passes while …", "rounds.start_clusters --name", False),
        ("waiting", "waiting for the contributions of a", "", True),
        ("waiting", "", "the coordinator is away: --join", False),
        ("training", "", "", True),
    ],
)
def test_wait_that_names_another_setting_may_not_last(state: str, round_why: str, advice: str, lasts: bool):
    assert may_last({"state": state, "why": "", "round_why": round_why, "advice": advice}) == lasts


@pytest.mark.skipif(bool(lacking()), reason=lacking() or "it can run here")
def test_the_section_works_as_it_is_typed(tmp_path: Path):
    on_first, on_second = section()
    with two(tmp_path) as (first, second):
        for line in on_first:
            first.type(line)
            link = first.folder / "two.link"
            if "coordinator" in line:
                wait_for_file(link, first)
        wait([first], first, lambda status: status.get("state") == "joining", "the first node waits")
        status = first.status("node") or {}
        assert "rounds.start_clusters" in status["advice"]
        assert "1 of 2" in status["round_why"] or "0 of 2" in status["round_why"]
        assert "this link works on this machine only" not in first.logs()
        shutil.copyfile(link, second.folder / "two.link")
        for line in on_second:
            second.type(line)

        def counted(status: dict[str, Any]) -> bool:
            return sum(status.get("counted", ())) >= COUNTED

        for machine in (first, second):
            wait([first, second], machine, counted, f"{machine.name} is counted")
        for machine in (first, second):
            status = machine.status("node") or {}
            assert status["reachable"] is not False, status["reach"]


def wait_for_file(path: Path, machine: Machine) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        assert all(process.poll() is None for process in machine.going), machine.logs()
        assert time.monotonic() < deadline
        time.sleep(0.1)
