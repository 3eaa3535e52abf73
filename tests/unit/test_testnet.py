"""Tests of the report of `dilocox testnet` about its swarm."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from rich.console import Console

from dilocox.cli.dev import testnet as verbs
from dilocox.cli.dev.testnet import StatesTold, Watcher
from dilocox.cli.progress import working
from dilocox.protocol.errors import LocalError
from dilocox.testnet.swarm import Testnet
from tests.sentences import Message


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verbs, "POLL_SECONDS", 0)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(verbs, "console", Console(file=written, width=200))
    return written


NONE_TOLD = Message("cli/dev/testnet.py", "no node")


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ([], NONE_TOLD),
        ([{"1": "aa"}, {"1": "aa"}], NONE_TOLD),
        ([{"1": "aa", "2": "bb"}, {"1": "aa"}], None),
        ([{"2": "bb", "3": "cc"}, {"3": "cc", "4": "dd"}], None),
        ([{"2": "bb"}, {"3": "cc"}, {"2": "cc"}], Message("cli/dev/testnet.py", 1)),
        (
            [{"2": "bb", "10": "aa", "3": "cc"}, {"2": "b0", "10": "cc", "3": "cc"}],
            Message("cli/dev/testnet.py", "1, 9"),
        ),
    ],
)
def test_one_model_is_one_root_for_each_round(told: list[dict[str, str]], fault: str | None):
    states = StatesTold()
    for roots in told:
        states.hear(roots)
    assert states.fault == fault


@dataclass
class Daemon:
    """Daemon with given answers: each request takes the next; the last one repeats."""

    name: str
    answers: dict[str, list[Any]]
    looks: dict[str, int] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        look = self.looks[path] = self.looks.get(path, -1) + 1
        return self.answers[path][min(look, len(self.answers[path]) - 1)]


@dataclass
class Swarm:
    coordinator: Daemon
    nodes: list[Daemon]
    broken: list[Daemon] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    network: None = None

    def failed(self) -> list[Daemon]:
        return self.broken

    def last_words(self, member: Daemon) -> str:
        return f"the last of {member.name}"

    def member(self, name: str) -> str:
        return name

    def kill(self, member: str) -> None:
        self.killed.append(member)


def row(round: int, closing: bool = False) -> dict[str, Any]:
    whole = {"round": round, "closing": closing, "counted": 2 * (not closing), "roster": 2, "payload_bytes": 10}
    return {**whole, "loss": 2.0, "evaluation_loss": 1.5}


def status(name: str, roots: dict[str, str]) -> dict[str, Any]:
    rounds = {"1": 7, "2": 7}
    return {
        "role": "node",
        "peer": name,
        "cluster": name,
        "on_roster": True,
        "state": "training",
        "why": "",
        "state_roots": roots,
        "applied_at_step": rounds,
        "phase_steps": rounds,
    }


def swarm(*roots: list[dict[str, str]]) -> Swarm:
    """Return a swarm of two counted rounds: observed one by one, the closing commit last. `roots`: the answers of each
    node at each request."""
    rows = [row(0), row(1), row(2), row(3, closing=True)]
    rounds = [None, rows[:1], rows[:2], rows[:3], rows[:3], rows]
    coordinator = Daemon("coordinator", {"/v1/rounds": rounds, "/v1/status": [{"round": 1, "why": "nobody is late"}]})
    names = [f"node-{index}" for index, _ in enumerate(roots, 1)]
    each = {name: [None, *(status(name, told) for told in looks)] for name, looks in zip(names, roots, strict=True)}
    return Swarm(coordinator, [Daemon(name, {"/v1/status": answers}) for name, answers in each.items()])


def watched(of: Swarm, kills: Sequence[tuple[str, int]] = ()) -> Watcher:
    with working("starting") as bar:
        return Watcher(cast(Testnet, of), list(kills), bar).follow()


BEGUN, TOLD = {"1": "aa"}, {"1": "aa", "2": "bb", "3": "cc"}


def test_a_row_for_each_round_and_the_state_that_all_hold_after_it(screen: io.StringIO):
    of = watched(swarm([BEGUN, TOLD], [BEGUN, TOLD]))
    assert of.states.fault is None
    assert [line.split()[0] for line in screen.getvalue().splitlines()] == ["round", "1", "2"]
    assert [line.split()[-1] for line in screen.getvalue().splitlines()[1:]] == ["bb", "cc"]
    assert (of.final_loss, of.inner_steps) == (1.5, 14)


def test_a_state_that_differs_is_seen_in_its_row(screen: io.StringIO):
    of = watched(swarm([BEGUN, TOLD], [BEGUN, {**TOLD, "2": "b0"}]))
    assert of.states.fault == Message("cli/dev/testnet.py", 1)
    assert "2 DIFFER" in screen.getvalue()


def test_a_state_that_is_told_after_its_row_was_shown_is_compared_all_the_same(screen: io.StringIO):
    of = watched(swarm([BEGUN, TOLD], [BEGUN, BEGUN, BEGUN, BEGUN, {**TOLD, "2": "b0"}]))
    assert "DIFFER" not in screen.getvalue()
    assert of.states.fault == Message("cli/dev/testnet.py", 1)


def test_nodes_that_told_no_state_did_not_hold_one(screen: io.StringIO):
    assert watched(swarm([BEGUN], [BEGUN])).states.fault == NONE_TOLD


def test_a_member_is_killed_when_its_round_opens(screen: io.StringIO):
    of = swarm([BEGUN, TOLD], [BEGUN, TOLD])
    watched(of, [("node-2", 2), ("node-1", 90)])
    assert of.killed == ["node-2"]


def test_a_member_that_failed_is_named_with_its_last_words(screen: io.StringIO):
    of = swarm([BEGUN], [BEGUN])
    of.broken.append(of.nodes[1])
    with pytest.raises(LocalError, match="node-2 failed:\nthe last of node-2"):
        watched(of)
