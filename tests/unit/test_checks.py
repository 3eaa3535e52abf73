"""The seam of a run's optional checks: which checks a run has, and what the core does with a check that it does not know."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from dilocox.protocol.consensus import checks
from dilocox.protocol.consensus.check_interface import Check, Findings
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import SETTLEMENT, Table, identity, manifest

EVERY: Mapping[str, Mapping[str, Any]] = {
    "audit": {"segments": 2},
    "scoring": {"voters": 2},
    "availability": {},
    "settlement": SETTLEMENT,
}
NAMES = [identity(number).peer for number in range(4)]


def test_names_of_every_check_come_in_the_order_of_the_table():
    assert checks.names(manifest(**EVERY)) == tuple(checks.WANTED) == ("audits", "scores", "bias", "availability", "merit")
    assert [check.name for check in checks.of(manifest(**EVERY))] == list(checks.WANTED)


def test_names_of_a_run_without_checks_are_none():
    assert checks.of(manifest()) == ()


def test_names_of_a_run_on_private_data_are_without_bias():
    assert checks.names(manifest(scoring={"voters": 2}, data={"private": True})) == ("scores",)


SPOILED: list[tuple[pb.Kind, str, Callable[[Any], object]]] = [
    (pb.KIND_CLAIM, "account", lambda body: setattr(body, "account", b"a" * 20)),
    (pb.KIND_CONTRIBUTION, "audit", lambda body: setattr(body, "audit", b"a" * 32)),
    (pb.KIND_CONTRIBUTION, "shares", lambda body: setattr(body, "shares", b"a" * 32)),
    (pb.KIND_RECEIPT, "measured", lambda body: setattr(body, "measured", b"\0")),
    (pb.KIND_RECEIPT, "audits", lambda body: body.audits.add(index=0, verdict=pb.AUDIT_EQUAL)),
    (pb.KIND_RECEIPT, "lacking", lambda body: body.lacking.append(0)),
]


def spoiled(table: Table, kind: pb.Kind, spoil: Callable[[Any], object]) -> Statement[Any]:
    """Return a statement of peer 0 that this spoils; without that it is accepted."""
    if kind == pb.KIND_CLAIM:
        body = table.claim(0).body
    elif kind == pb.KIND_CONTRIBUTION:
        body = table.genesis().contribution(0).body
    else:
        body = table.genesis().contribute().receipt(0).body
    spoil(body)
    return seal(identity(0), kind, table.run.run_id, body)


@pytest.mark.parametrize(("kind", "field", "spoil"), SPOILED)
def test_field_of_a_check_that_the_run_does_not_have_is_rejected(kind: pb.Kind, field: str, spoil: Callable[[Any], object]):
    table = Table(manifest())
    judged = table.submit(spoiled(table, kind, spoil))
    assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_MALFORMED)
    assert field in judged.detail


def test_every_field_of_a_check_is_tried():
    assert {(kind, field) for kind, field, _ in SPOILED} == {
        (kind, field) for kind, fields in checks.FIELDS.items() for field in fields
    }


@pytest.mark.parametrize("field", ["audit", "shares"])
def test_contribution_without_a_field_that_a_check_needs_is_rejected(field: str):
    table = Table(manifest(**EVERY)).genesis()
    judged = table.submit(table.contribution(0, lambda body: body.ClearField(field)))
    assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_MALFORMED)


@dataclass(frozen=True)
class Noted(member_io.CheckInput):
    word: str


class Toy(Check):
    """Example of a check: it convicts, rejects and penalizes, and remembers statements."""

    name = "toy"
    found = Findings()

    def fault(self, manifest: Manifest, head: Head, statement: Statement[Any]) -> str:
        return "it says too much" if statement.kind == pb.KIND_CONTRIBUTION and statement.body.loss > 100 else ""

    def findings(self, *_: Any) -> Findings:
        return self.found

    def read_commit(self, commit: pb.Commit) -> int:
        return commit.round

    def receive(self, state: MemberState, event: Any) -> tuple[str, ...]:
        words = state.checks.get("toy", ())
        return (*words, event.word) if isinstance(event, Noted) else words

    def may_vote(self, state: MemberState) -> bool:
        return "ready" in state.checks.get("toy", ())

    def rejects(self, state: MemberState) -> Mapping[bytes, member_io.Verdict]:
        return {digest: (pb.REASON_HARMS, 0) for digest, each in state.open.seen.items() if each.peer == NAMES[1]}


TOY = Toy()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    """Return a check that every run has."""
    module = ModuleType("dilocox.protocol.checks.toy")
    module.CHECK = TOY  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(checks.WANTED, TOY.name, lambda manifest: True)
    monkeypatch.setattr(TOY, "found", Findings())
    return TOY


def voted(toy: Toy, found: Findings) -> Table:
    """Return a table after a round of four clusters in which the check found this."""
    table = Table(manifest(rounds={"start_clusters": 4})).genesis(range(4))
    toy.found = found
    table.train(1, range(4))
    assert table.verify().checks == {"toy": 1}
    return table


def test_cluster_that_a_check_convicts_neither_counts_nor_votes(toy: Toy):
    table = voted(toy, Findings(convicted={NAMES[0]: (pb.REASON_AUDIT, "found")}))
    assert table.counted() == [1, 2, 3]
    assert table.why(0) == pb.REASON_AUDIT


def test_cluster_that_a_check_refuses_does_not_count(toy: Toy):
    table = voted(toy, Findings(refused={NAMES[0]: (pb.REASON_HARMS, "found")}))
    assert table.counted() == [1, 2, 3]
    assert table.why(0) == pb.REASON_HARMS


def test_cluster_that_a_check_penalizes_counts_and_loses_reputation(toy: Toy):
    table = voted(toy, Findings(records={"lacking": frozenset({NAMES[0]})}, penalized=frozenset({NAMES[0]})))
    assert table.counted() == [0, 1, 2, 3]
    before, after = table.head.standings[NAMES[1]], table.head.standings[NAMES[0]]
    assert after.earned < before.earned
    assert (after.lacking, before.lacking) == (1, 0)


def test_statement_that_a_check_faults_is_malformed(toy: Toy):
    table = Table(manifest()).genesis()
    judged = table.submit(table.contribution(0, loss=101.0))
    assert (judged.outcome, judged.reason) == (Outcome.REJECT, pb.REASON_MALFORMED)


def test_member_votes_when_its_checks_are_ready_and_rejects_what_they_reject(toy: Toy):
    table = Table(manifest()).genesis()
    state = member.start(table.run, NAMES[0], table.head)
    mine, others = table.contribution(0), [table.contribution(1), table.contribution(2)]
    for statement in (mine, *others):
        table.submit(statement)
    accepted = [member_io.Judged(statement.digest, (pb.REASON_UNSPECIFIED, 0)) for statement in others]
    seen = [member_io.Seen(statement) for statement in (*others, table.ballots[-1])]
    events: list[member_io.Input] = [
        member_io.StateReady(1, table.state_root(), None),
        member_io.Signed(mine),
        *seen,
        *accepted,
    ]
    for event in events:
        state, effects = member.step(state, event, 0.0)
    assert not [effect for effect in effects if isinstance(effect, member_io.Sign)]
    state, effects = member.step(state, Noted("ready"), 0.0)
    (vote,) = [effect.body for effect in effects if isinstance(effect, member_io.Sign)]
    listed = list(table.ballots[-1].body.contributions)
    assert [(listed[each.index], each.reason) for each in vote.findings] == [(others[0].digest, pb.REASON_HARMS)]
    assert state.checks == {"toy": ("ready",)}
