"""Tests of the reasons for a slow, short or incomplete round: from chain and events, with numbers, and with an action."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.protocol import events
from dilocox.protocol.errors import LocalError, reason_name
from dilocox.protocol.ids import short
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views.explain import explain, named
from dilocox.views.reasons import REASONS, advice
from tests.helpers import Told, identity, manifest
from tests.sentences import Message

PEERS = [identity(number).peer for number in range(5)]


def test_every_reason_has_a_meaning_and_advice():
    assert REASONS.keys() == set(pb.Reason.values()) - {pb.REASON_UNSPECIFIED}
    assert all(said.means and said.do for said in REASONS.values())
    assert advice(reason_name(pb.REASON_LATE)) == REASONS[pb.REASON_LATE]


class Run:
    """Rounds on a fake clock: the chain file, and a coordinator's event log."""

    def __init__(self, folder: Path, rounds: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True)
        self.table, self.wall = Told(manifest(rounds={"count": 9, **(rounds or {})})), 0.0
        self.chain = ChainFile(folder / "chain.db", self.table.run, views.describe)
        self.log = EventLog(folder / "events.db", lambda: self.table.now)

    def keep(self) -> None:
        """Write the events and sealed commits to disk, each at its time."""
        for event in self.table.told:
            self.log.add(event)
        self.table.told = []
        self.log.flush()
        for commit in self.table.commits[self.chain.length :]:
            self.chain.append(commit.envelope)

    def say(self, *statements) -> None:
        for statement in statements:
            self.table.feed(round_machine.Received(statement))
            self.keep()

    def wait(self, seconds: float, why: str = "") -> None:
        if why:
            self.log.add(events.RoundOpen(self.table.head.round, why))
            self.log.flush()
        self.table.now += seconds

    def usual(self) -> None:
        self.wait(2.0)
        self.say(*(self.table.contribution(number) for number in range(3)))
        self.wait(0.5)
        self.say(*[self.table.receipt(number) for number in range(3)])

    def read(self, number: int):
        return self.log.read(0, number)


@pytest.fixture
def run(tmp_path: Path):
    run = Run(tmp_path / "runs" / "ab")
    run.say(*(run.table.claim(number) for number in range(3)))
    for _ in range(3):
        run.usual()
    run.wait(2.0, "waiting for the contributions of all")
    run.say(run.table.contribution(0), run.table.contribution(1, norm=run.table.contribution(1).body.norm + 32))
    run.wait(7.0, "waiting for the contributions of the third")
    run.say(run.table.contribution(2))
    receipts = [run.table.receipt(0), run.table.receipt(1)]
    run.wait(1.0)
    run.say(receipts[0])
    run.wait(1.5)
    run.say(receipts[1])
    run.table.feed(round_machine.Absent(PEERS[2]))
    run.keep()
    assert run.chain.length == 5
    yield run
    run.log.close()
    run.chain.close()


def explains(*values: object) -> Message:
    return Message("views/explain.py", *values)


def said(value, about: str) -> list[str]:
    return [row["says"] for row in value["findings"] if row["about"] == about]


def test_a_round_like_the_others(run: Run):
    value = explain(run.chain, run.read, 3)
    assert (value["verdict"], value["seconds"], value["usual_seconds"]) == ("in the usual range", 2.5, 2.5)
    assert said(value, "counted") == ["3 of 3 clusters"]
    assert said(value, "time") == [explains("2.5 s", 2)]
    assert not said(value, "not counted")


def test_a_slow_and_incomplete_round(run: Run):
    value = explain(run.chain, run.read, 4, me=PEERS[2])
    assert (value["verdict"], value["seconds"], value["usual_seconds"]) == ("slow and incomplete", 11.5, 2.5)
    third, second = (f"{PEERS[n][:4]}…{PEERS[n][-4:]}" for n in (2, 1))
    assert explains("contribution", third, "9.0 s", "7.0 s") in said(value, "collect")
    assert explains("vote", second, "11.5 s", "1.5 s") in said(value, "vote")
    assert said(value, "waited")[0] == "9.5 s: waiting for the contributions of the third"
    (excluded,) = [row for row in value["findings"] if row["about"] == "not counted"]
    assert excluded["says"].startswith(f"{third}: did-not-vote: {REASONS[pb.REASON_DID_NOT_VOTE].means}")
    assert excluded["do"] == REASONS[pb.REASON_DID_NOT_VOTE].do
    (mine,) = [row for row in value["findings"] if row["about"] == "this node"]
    assert "at 9.0 s" in mine["says"]
    assert mine["do"] == REASONS[pb.REASON_DID_NOT_VOTE].do
    (clipped,) = said(value, "clipped")
    assert clipped.startswith(f"{second} to 0.")


def test_without_events_the_chain_says_what_it_knows(run: Run):
    value = explain(run.chain, lambda number: [], 4, PEERS[1])
    assert value["verdict"] == "slow and incomplete"
    assert said(value, "cluster")[0].endswith("weight 256")
    assert not said(value, "waited")


def test_the_open_round(run: Run):
    run.wait(3.0, "waiting for somebody")
    value = explain(run.chain, run.read, 5, me=PEERS[0])
    assert (value["verdict"], said(value, "open")) == ("open", ["waiting for somebody"])
    assert said(value, "this node") == [explains("this node", "on the roster")]


def test_who_paused_hears_so_of_the_open_round(run: Run):
    """Check that it is not described as off the roster only."""
    run.usual()
    run.say(run.table.leave(2))
    for _ in range(2):
        run.wait(1.0)
        run.say(run.table.contribution(0), run.table.contribution(1))
        run.say(*[run.table.receipt(number) for number in range(2)])
    stands = Status("paused", "until `dilocox resume`")
    value = explain(run.chain, run.read, run.chain.length, me=PEERS[2], stands=stands)
    assert said(value, "this node") == [explains("this node", "not on", "paused: until `dilocox resume`")]
    others = explain(run.chain, run.read, run.chain.length, PEERS[0], me=PEERS[2], stands=stands)
    assert said(others, "cluster")[0].endswith("is on the roster"), "of them it knows nothing more"


def test_a_round_that_counts_nobody_by_its_nature_blames_nobody(tmp_path: Path):
    run = Run(tmp_path / "runs" / "ab", {"count": 1, "overlap": "none"})
    run.wait(1.0, "waiting for 3 clusters")
    run.say(*(run.table.claim(number) for number in range(3)))
    run.usual()
    run.say(*(run.table.report(number) for number in range(3)))
    assert run.chain.head.finished
    for number, about in ((0, "began"), (2, "counted")):
        value = explain(run.chain, run.read, number, me=PEERS[0])
        assert said(value, about)
        assert not said(value, "this node")
        assert not said(value, "open")
    with pytest.raises(LocalError, match=r"no round 3: .* finished, .* 2"):
        explain(run.chain, run.read, 3, me=PEERS[0])
    run.log.close()
    run.chain.close()


def test_who_was_not_there(run: Run):
    for _ in range(2):
        run.wait(1.0)
        run.say(run.table.contribution(0), run.table.contribution(1))
        run.say(*[run.table.receipt(number) for number in range(2)])
    assert PEERS[2] not in run.chain.head.roster
    run.wait(1.0)
    run.say(run.table.contribution(0), run.table.contribution(1))
    run.say(*[run.table.receipt(number) for number in range(2)])
    value = explain(run.chain, run.read, run.chain.length - 1, PEERS[2][:20])
    assert explains("not on the roster", "last in round") == said(value, "cluster")[0]
    assert value["findings"][-1]["do"] != REASONS[pb.REASON_LEFT].do, "it did not say that it leaves"


def test_who_left_is_told_to_come_back_and_a_round_of_nobody_says_what_the_run_needs(run: Run):
    run.table.present(2)
    run.usual()
    run.say(*(run.table.contribution(number) for number in range(3)))
    run.say(run.table.leave(1), run.table.leave(2))
    run.say(run.table.receipt(0))
    alone = run.table.head.round
    run.say(run.table.contribution(0))
    run.say(run.table.report(0))
    run.say(run.table.claim(5))
    assert run.table.roster() == [0, 5]
    value = explain(run.chain, run.read, alone, PEERS[2])
    assert said(value, "counted") == [explains(0, 1, 2)]
    mine = value["findings"][-1]
    assert mine["says"].endswith(f"it was last in round {alone - 1}: counted")
    assert mine["do"] == REASONS[pb.REASON_LEFT].do
    (told,) = [each.body["line"] for each in run.read(alone) if each.kind == "nobody-counted"]
    assert told.startswith(f"round {alone}: ")
    assert "too-few-clusters (1 took part; the run needs 2" in told, "a commit contains this sentence"
    assert not [each for each in run.read(alone - 1) if each.kind == "nobody-counted"]


def test_what_is_not_there_is_a_sentence(run: Run):
    with pytest.raises(LocalError, match="no round 6 yet: round 5"):
        explain(run.chain, run.read, 6)
    with pytest.raises(LocalError, match="no cluster's"):
        explain(run.chain, run.read, 4, "nobody")
    with pytest.raises(LocalError, match="several"):
        explain(run.chain, run.read, 4, "12D3")


@pytest.mark.parametrize(
    ("words", "code", "help"),
    [
        ("rounds 6 --why", "no-such-round", "rounds"),
        ("rounds 6", "no-such-round", "rounds"),
        ("rounds 4 x --why", "no-such-peer", "peers"),
    ],
)
def test_what_is_not_there_has_its_code_and_an_advice_offline_too(run: Run, tmp_path: Path, words: str, code: str, help: str):
    told = CliRunner().invoke(app, [*words.split(), "--home", str(tmp_path)])
    assert told.exit_code == 2
    assert f"error[{code}]: " in told.stderr
    assert f"run `dilocox {help}`" in told.stderr


def test_the_verb_reads_a_folder(run: Run, tmp_path: Path):
    shown = CliRunner().invoke(app, ["rounds", "4", PEERS[2], "--why", "--home", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert all(each in shown.stdout.splitlines()[0] for each in ("round 4: slow and incomplete: 11.5 s", "2.5 s", "3.8 s"))
    assert REASONS[pb.REASON_DID_NOT_VOTE].do in shown.stdout


def test_explanation_names_each_peer_beside_its_short_id(run: Run):
    value = explain(run.chain, run.read, 4, me=PEERS[0])
    told = " ".join(row["says"] for row in value["findings"])
    assert any(short(peer) in told for peer in PEERS)
    shown = " ".join(row["says"] for row in named(value, dict(zip(PEERS, "abcdefgh", strict=False)))["findings"])
    for peer, name in zip(PEERS, "abcdefgh", strict=False):
        assert shown.count(f"{name} ({short(peer)})") == told.count(short(peer))
    assert named(value, dict.fromkeys(PEERS, "")) == value, "a peer without a name stays an id"
    nasty = named(value, dict.fromkeys(PEERS, "\x1b[31mx\n"))
    assert all(row["says"].isprintable() for row in nasty["findings"])
