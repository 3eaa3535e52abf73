"""Tests of audits: the draw of authors and auditors, the allowed verdicts, and their effects."""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dilocox.protocol import limits
from dilocox.protocol.checks import audit_rules
from dilocox.protocol.checks.audit_rules import Audit, Result
from dilocox.protocol.checks.audits import Audited, audits_of, results_of
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.data_leases import Lease
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, canonical, open_envelope, seal
from dilocox.transport.store.chain_file import ChainFile
from dilocox.views import json_views
from dilocox.views.explain import explain
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

RUN = manifest(audit={"segments": 3, "share": 1.0}, rounds={"count": 40})
NAMES = [f"cluster-{number:02}" for number in range(20)]
EQUAL = dict.fromkeys(NAMES, 1)
DIFFERS = pb.AUDIT_DIFFERS


def ballot(number: int) -> Statement[pb.Ballot]:
    return seal(COORDINATOR, pb.KIND_BALLOT, RUN.run_id, pb.Ballot(round=1, head=digest("head", number), seconds=5))


def peer(number: int) -> str:
    return identity(number).peer


# The draw.


def test_a_share_of_what_is_counted_is_drawn_and_falls_on_all_alike():
    run = manifest(audit={"segments": 3, "share": 0.25})
    found = [audit for number in range(200) for audit in audit_rules.drawn(run, 7, ballot(number), EQUAL)]
    assert len(found) == pytest.approx(0.25 * 200 * len(NAMES), rel=0.15)
    assert all(20 < count < 90 for count in Counter(audit.cluster for audit in found).values())
    auditors = sum((Counter(audit.auditors.keys()) for audit in found), Counter[str]())
    assert max(auditors.values()) < 1.4 * min(auditors.values())
    assert all(audit.cluster not in audit.auditors and sum(audit.auditors.values()) <= 5 for audit in found)
    assert {audit.lot % 3 for audit in found} == {0, 1, 2}
    assert found[0].due == 7 + audit_rules.WAIT


def test_nothing_is_drawn_where_the_run_does_not_audit_or_nobody_else_is_there():
    assert audit_rules.drawn(manifest(), 7, ballot(1), EQUAL) == []
    assert audit_rules.drawn(manifest(audit={"segments": 3, "share": 0.0}), 7, ballot(1), EQUAL) == []
    assert audit_rules.drawn(RUN, 7, ballot(1), {"lone": 1}) == []


def test_who_is_drawn_follows_from_the_coordinators_signature():
    another = ballot(1)
    another.envelope.signature = bytes(64)
    assert audit_rules.drawn(RUN, 7, ballot(1), EQUAL) == audit_rules.drawn(RUN, 7, ballot(1), EQUAL)
    assert audit_rules.drawn(RUN, 7, ballot(1), EQUAL) != audit_rules.drawn(RUN, 7, another, EQUAL)


def test_the_draw_is_by_standing_and_nobody_says_more_than_all_others():
    listed = {"founder": 64, **{f"new-{number}": 4 for number in range(10)}}
    found = [a for n in range(100) for a in audit_rules.drawn(RUN, 7, ballot(n), listed) if a.cluster != "founder"]
    drawn = sum("founder" in audit.auditors for audit in found)
    assert drawn > 0.9 * len(found)
    assert all(2 * max(a.auditors.values()) <= sum(a.auditors.values()) for a in found if len(a.auditors) > 1)


def test_a_commit_names_no_more_than_its_bound():
    many = {f"cluster-{number:04}": 1 for number in range(limits.CLUSTERS)}
    found = audit_rules.drawn(RUN, 7, ballot(1), many)
    assert len(found) == limits.AUDITS
    assert [audit.cluster for audit in found] == sorted(audit.cluster for audit in found)
    assert audit_rules.unpacked(pb.Commit(audits=audit_rules.packed(found))) == tuple(found)


# Verdicts.


def verdicts(against: int, silent: int, of: int) -> tuple[Audit, dict[str, pb.Receipt]]:
    audit = Audit(5, "author", 0, dict.fromkeys(NAMES[:of], 1))
    said = {
        name: pb.Receipt(audits=[pb.AuditResult(index=0, verdict=DIFFERS if number < against else pb.AUDIT_NEAR)])
        for number, name in enumerate(NAMES[: of - silent])
    }
    return audit, said


@pytest.mark.parametrize(
    ("against", "silent", "of", "convicted"),
    [
        (0, 0, 5, False),
        (3, 0, 5, False),
        (4, 0, 5, True),
        (5, 0, 5, True),
        (3, 2, 5, False),
        (4, 1, 5, True),
        (1, 0, 1, False),
        (1, 1, 2, False),
        (2, 0, 2, True),
        (2, 0, 3, True),
        (1, 2, 3, False),
    ],
)
def test_two_thirds_of_what_was_drawn_and_never_one_alone(against: int, silent: int, of: int, convicted: bool):
    audit, said = verdicts(against, silent, of)
    reasons, looked_at = audit_rules.faults([audit], 7, said, ["author"])
    assert set(reasons) == ({"author"} if convicted else set())
    assert looked_at == ({"author"} if silent < of else set())
    assert audit_rules.faults([audit], 6, said, ["author"]) == ({}, frozenset()), (
        "receipts of another round are of other audits"
    )


@pytest.mark.parametrize(("verdict", "wrong"), [*zip(pb.AuditVerdict.values()[1:], (0, 0, 1, 1, 1), strict=True)])
def test_what_is_not_served_or_is_no_phase_counts_as_wrong(verdict: pb.AuditVerdict, wrong: bool):
    audit = Audit(5, "author", 0, {"a": 1, "b": 1})
    said = {name: pb.Receipt(audits=[pb.AuditResult(index=0, verdict=verdict)]) for name in "ab"}
    assert bool(audit_rules.faults([audit], 7, said, ["author"])[0]) == wrong
    gone = wrong and verdict != pb.AUDIT_UNSERVED
    assert bool(audit_rules.faults([audit], 7, said, [])[0]) == gone, "who went cannot serve, and is absent"


def test_votes_weigh_as_they_were_drawn():
    audit = Audit(5, "author", 0, {"a": 3, "b": 1, "c": 1})
    wrong = pb.Receipt(audits=[pb.AuditResult(index=0, verdict=DIFFERS)])
    assert not audit_rules.faults([audit], 7, {"b": wrong, "c": wrong, "stranger": wrong}, [])[0]
    assert audit_rules.faults([audit], 7, {"a": wrong, "b": wrong}, [])[0]


def wrongly(hostile: float, of: int) -> float:
    """Return the chance that a committee of `of` votes, drawn with this hostile share, convicts an honest cluster."""
    return sum(
        hostile ** sum(bad) * (1 - hostile) ** (of - sum(bad)) for bad in product((0, 1), repeat=of) if 3 * sum(bad) >= 2 * of
    )


def test_what_the_docs_say_of_chance():
    assert wrongly(1 / 3, 5) == pytest.approx(0.0453, abs=1e-4)
    assert wrongly(1 / 4, 5) == pytest.approx(0.0156, abs=1e-4)
    assert wrongly(2 / 3, 5) == pytest.approx(0.4609, abs=1e-4)
    assert wrongly(1.0, 5) == 1


# In a run.


def audited(table: Table, number: int, verdict: pb.AuditVerdict = DIFFERS, **changes: Any) -> Statement:
    """Return a due vote with this verdict on all contributions that this peer was drawn for."""
    me, body = peer(number), table.receipt(number).body
    due = audit_rules.due(audits_of(table.head), table.head.round)
    told = [pb.AuditResult(index=index, verdict=verdict) for index, audit in enumerate(due) if me in audit.auditors]
    body.audits.extend([pb.AuditResult(**changes)] if changes else told)
    return seal(identity(number), pb.KIND_RECEIPT, table.run.run_id, body)


def vote(table: Table, said: Mapping[int, list[int]], numbers: range) -> None:
    """Vote for all; `said`: the work that each voter finds wrong, among its due draws."""
    for number in numbers:
        me, body = peer(number), table.receipt(number).body
        for index, audit in enumerate(audit_rules.due(audits_of(table.head), table.head.round)):
            if me in audit.auditors:
                wrong = audit.cluster in [peer(other) for other in said.get(number, [])]
                body.audits.append(pb.AuditResult(index=index, verdict=DIFFERS if wrong else pb.AUDIT_EQUAL))
        assert table.submit(seal(identity(number), pb.KIND_RECEIPT, table.run.run_id, body)).reason == 0


FOUR = range(4)


def four(**sections: dict[str, Any]) -> Table:
    run = manifest(
        audit={"segments": 3, "share": 1.0}, rounds={"count": 40, "start_clusters": 4}, standing={"rounds": 16}, **sections
    )
    return Table(run).genesis(FOUR)


def test_whose_work_most_of_its_auditors_find_wrong_does_not_count_two_rounds_later():
    table = four().train(2, FOUR)
    assert [audit.name for audit in audit_rules.due(audits_of(table.head), 3)] == [
        (1, name) for name in sorted(map(peer, FOUR))
    ]
    table.contribute(FOUR)
    vote(table, {1: [0], 2: [0], 3: [0]}, FOUR)
    assert table.counted() == [1, 2, 3]
    assert table.why(0) == pb.REASON_AUDIT
    assert "3 of 3 auditors found its work of round 1 wrong" in table.commits[-1].body.excluded[0].detail
    record = table.head.standings[peer(0)]
    assert (record.earned, record.refused, record.audited) == (16 - 4, 1, 1)
    assert table.head.standings[peer(1)].audited == 1
    table.contribute(FOUR)
    vote(table, {}, FOUR)
    assert table.counted() == [0, 1, 2, 3]
    table.verify()


def test_one_hostile_auditor_convicts_nobody():
    table = four().train(2, FOUR)
    for _ in range(4):
        table.contribute(FOUR)
        vote(table, {3: [0, 1, 2]}, FOUR)
        assert table.counted() == [0, 1, 2, 3]
    table.verify()


def test_who_says_nothing_is_no_accuser():
    table = four().train(6, FOUR)
    assert table.counted() == [0, 1, 2, 3]
    assert all(record.audited == 0 for record in table.head.standings.values())


@pytest.mark.parametrize("change", [{"index": 9, "verdict": DIFFERS}, {"index": 0, "verdict": DIFFERS}])
def test_nobody_speaks_of_what_is_not_due_or_it_was_not_drawn_for(change: dict[str, Any]):
    table = four().train(2, FOUR).contribute(FOUR)
    first = next(n for n in FOUR if peer(n) == min(map(peer, FOUR)))  # the author of what has index 0
    judgement = table.submit(audited(table, first, **change))
    assert judgement.reason == pb.REASON_MALFORMED


def test_an_undecided_audit_is_carried_by_one_commit_and_no_other():
    table = four().train(1, FOUR)
    assert {audit.round for audit in audits_of(table.head)} == {1}
    table.train(1, FOUR)
    assert {audit.round for audit in audits_of(table.head)} == {1, 2}
    table.train(1, FOUR)
    assert {audit.round for audit in audits_of(table.head)} == {2, 3}


def test_a_commit_that_convicts_for_nothing_or_draws_others_does_not_verify():
    table = four().train(3, FOUR)
    head = initial_head(COORDINATOR.peer)
    for commit in table.commits[:-1]:
        head, _ = chain.extend(table.run, head, commit.envelope)
    forged = pb.Commit.FromString(table.commits[-1].envelope.body)
    del forged.audits[0]
    with pytest.raises(RemoteError, match="audits"):
        chain.extend(table.run, head, seal(COORDINATOR, pb.KIND_COMMIT, table.run.run_id, forged).envelope)


@pytest.mark.parametrize(("segments", "root"), [(0, digest("marks")), (3, b"")])
def test_a_contribution_commits_to_its_states_where_the_run_audits_and_only_there(segments: int, root: bytes):
    table = Table(manifest(audit={"segments": segments})).genesis()
    assert table.submit(table.contribution(0)).reason == 0
    assert table.submit(table.contribution(1, audit=root)).reason == pb.REASON_MALFORMED


@pytest.mark.parametrize(
    "told",
    [
        [pb.AuditResult(index=0)],
        [pb.AuditResult(index=1, verdict=DIFFERS), pb.AuditResult(index=0, verdict=DIFFERS)],
        [pb.AuditResult(index=0, verdict=DIFFERS, distance=-1.0)],
        [pb.AuditResult(index=0, verdict=DIFFERS, distance=float("nan"))],
        [pb.AuditResult(index=index, verdict=DIFFERS) for index in range(limits.AUDITS_TOLD + 1)],
    ],
)
def test_bounds_of_what_a_receipt_tells(told: list[pb.AuditResult]):
    body = pb.Receipt(round=1, ballot=bytes(32), accepted=b"\x01", audits=told)
    with pytest.raises(RemoteError):
        open_envelope(seal(identity(1), pb.KIND_RECEIPT, RUN.run_id, body).envelope, RUN.run_id, (pb.KIND_RECEIPT,))


def test_a_node_tells_what_it_found_when_it_is_due_and_forgets_it_then():
    table = four().train(2, FOUR).contribute(FOUR)
    me = peer(0)
    mine = audit_rules.duties(audits_of(table.head), table.head.round, me)
    assert {audit.round for audit in mine} == {1, 2}
    state = member.start(table.run, me, table.head)
    for audit in mine:
        state, _ = member.step(state, Audited(audit, Result(DIFFERS, 1.5)), 0.0)
    state, _ = member.step(state, member_io.StateReady(table.head.round, table.state_root(), None), 0.0)
    own = next(s for s in table.state.gathered.contributions[me])
    state, _ = member.step(state, member_io.Signed(own), 0.0)
    for slot in table.state.gathered.contributions.values():
        state, _ = member.step(state, member_io.Seen(slot[0]), 0.0)
        state, _ = member.step(state, member_io.Judged(slot[0].digest, (pb.REASON_UNSPECIFIED, 0)), 0.0)
    state, effects = member.step(state, member_io.Seen(table.ballots[-1]), 0.0)
    receipt = next(e.body for e in effects if isinstance(e, member_io.Sign) and e.kind == pb.KIND_RECEIPT)
    due = audit_rules.due(audits_of(table.head), table.head.round)
    assert [due[each.index].name for each in receipt.audits] == [audit.name for audit in mine if audit.round == 1]
    assert all((each.verdict, each.distance) == (DIFFERS, 1.5) for each in receipt.audits)
    vote(table, {}, FOUR)
    state, _ = member.step(state, member_io.Committed(table.commits[-1], table.head), 0.0)
    assert {round for round, _ in results_of(state)} == {2}


# Marks.

LEASE = Lease(counted=100, spans=((1000, 1200),))
SAID = pb.Contribution(inner_steps=10, samples_read=144)


def mark(step: int, read: int | None = None, **changes: Any) -> pb.Mark:
    states = [digest(step, changes.get("after"), stage) for stage in range(2)]
    return pb.Mark(step=step, samples_read=104 + 4 * step if read is None else read, optimizer_steps=50 + step, states=states)


def marks(*each: pb.Mark) -> bytes:
    return canonical(pb.Marks(marks=each, machine="cpu", threads=1, workers=1))


def test_marks_are_of_the_phase_that_is_contributed():
    found = audit_rules.read_marks(RUN, SAID, LEASE, marks(mark(0), mark(4), mark(8), mark(10)))
    assert audit_rules.spacing(RUN) == 4
    stretches = [audit_rules.stretch(RUN, lot, LEASE, found.marks) for lot in range(4)]
    assert [(each.first.step, each.last.step) for each in stretches] == [(0, 4), (4, 8), (8, 10), (0, 4)]
    assert list(stretches[1].positions) == list(range(1020, 1036))


def test_the_step_at_which_a_commit_was_moved_onto_is_no_stretch():
    moved = (mark(0), mark(3), mark(3, after=1), mark(4), mark(8), mark(10))
    found = audit_rules.read_marks(RUN, SAID, LEASE, marks(*moved))
    assert [audit_rules.stretch(RUN, lot, LEASE, found.marks).first.step for lot in range(4)] == [0, 3, 4, 8]


def test_nobody_hides_what_it_did_not_train_between_short_stretches():
    """Check eleven inner steps with eight invented ones in two of five stretches: with even spacing these would be two of
    three."""
    said = pb.Contribution(inner_steps=11, samples_read=148)
    assert audit_rules.read_marks(RUN, said, LEASE, marks(mark(0), mark(4), mark(8), mark(11)))
    with pytest.raises(RemoteError, match=r"^malformed: .*evenly"):
        audit_rules.read_marks(RUN, said, LEASE, marks(mark(0), mark(4), mark(8), mark(9), mark(10), mark(11)))
    with pytest.raises(RemoteError, match=r"^malformed: .*evenly"):
        audit_rules.read_marks(RUN, said, LEASE, marks(mark(0), mark(1), mark(5), mark(9), mark(11)))


@pytest.mark.parametrize(
    "wrong",
    [
        (mark(0),),
        (mark(0), mark(5), mark(9), mark(10)),
        (mark(1), mark(5), mark(9), mark(10)),
        (mark(0), mark(4), mark(8), mark(9)),
        (mark(0), mark(4), mark(4), mark(4), mark(8), mark(10)),
        (mark(0), mark(4, read=124), mark(8), mark(10)),
        (mark(0), mark(8), mark(4), mark(10)),
        (mark(0, read=0), mark(4), mark(8), mark(10)),
        (mark(0), mark(4), mark(8), mark(10, read=145)),
        (mark(0), mark(4), mark(5), mark(6), mark(7), mark(8), mark(10)),
        (mark(0), mark(4), mark(8), pb.Mark(step=10, samples_read=144, optimizer_steps=61, states=mark(10).states)),
        (mark(0), mark(4), mark(8), pb.Mark(step=10, samples_read=144, optimizer_steps=60, states=mark(10).states[:1])),
        (mark(0), mark(4), mark(8), pb.Mark(step=10, samples_read=144, optimizer_steps=60, states=[b"short", b""])),
    ],
)
def test_marks_that_are_no_phase(wrong: tuple[pb.Mark, ...]):
    with pytest.raises(RemoteError) as refused:
        audit_rules.read_marks(RUN, SAID, LEASE, marks(*wrong))
    assert refused.value.reason == pb.REASON_MALFORMED


def test_marks_may_not_read_what_was_not_leased():
    with pytest.raises(RemoteError):
        audit_rules.read_marks(RUN, SAID, Lease(counted=100, spans=((1000, 1040),)), marks(mark(0), mark(4), mark(8), mark(10)))


def test_states_are_kept_until_it_is_known_who_asks_for_them():
    four_marks = [mark(0), mark(4), mark(8), mark(10)]
    everything = {state for each in four_marks for state in each.states}
    audit = Audit(6, "me", 4, {"a": 1})  # the second stretch
    assert audit_rules.needed([], 6, "me", 6, four_marks) == everything
    assert audit_rules.needed([], 7, "me", 6, four_marks) == set()
    assert audit_rules.needed([audit], 7, "me", 6, four_marks) == {*mark(4).states, *mark(8).states}
    assert audit_rules.needed([audit], 7, "you", 6, four_marks) == set()


@pytest.mark.parametrize("sections", [{"audit": {"segments": 3}, "data": {"private": True}}])
def test_a_run_file_that_cannot_be_audited_says_so(sections: dict[str, Any]):
    with pytest.raises(ValueError, match="audit"):
        manifest(**sections)


def test_people_see_what_auditors_found(tmp_path: Path):
    table = four().train(2, FOUR).contribute(FOUR)
    before = table.head
    vote(table, {1: [0], 2: [0], 3: [0]}, FOUR)
    detail = json_views.round_detail(before, table.commits[-1].body)
    found = {audit["cluster"]: [each["found"] for each in audit["auditors"]] for audit in detail["audits"]}
    assert found[peer(0)] == ["differs"] * 3
    assert found[peer(1)] == ["equal"] * 3
    assert {audit["round"] for audit in detail["audits"]} == {1}
    path = tmp_path / "chain.db"
    with closing(ChainFile(path, table.run, json_views.describe)) as chain:
        for commit in table.commits:
            chain.append(commit.envelope)
        says = [row["says"] for row in explain(chain, lambda round: [], 3)["findings"] if row["about"] == "audited"]
    assert len(says) == 4
    assert any(each.endswith("of its auditors found 3 differs") for each in says)
