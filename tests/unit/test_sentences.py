"""Tests of each row's answer in the table of rules: outcome, reason, and the values that its sentence names."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from dilocox.protocol import limits
from dilocox.protocol.consensus import rules
from dilocox.protocol.consensus.head import Cluster, HostRange
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.rules import Judgement, Outcome
from dilocox.protocol.crypto import sha256
from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, SETTLEMENT, Table, digest, identity, manifest
from tests.sentences import Message


def ignored(reason: pb.Reason, *values: object) -> Judgement:
    """Return the judgement with this reason, and a sentence of the rules with these values."""
    return Judgement(Outcome.IGNORE, reason, Message("protocol/consensus/rules.py", *values))


def rejected(reason: pb.Reason, *values: object) -> Judgement:
    return Judgement(Outcome.REJECT, reason, Message("protocol/consensus/rules.py", *values))


ACCEPTED = Judgement(Outcome.ACCEPT, pb.REASON_UNSPECIFIED, "")
REPEATED = ignored(pb.REASON_UNSPECIFIED)
OLDER = ignored(pb.REASON_SUPERSEDED)
TWICE = rejected(pb.REASON_EQUIVOCATION)
ENOUGH = ignored(pb.REASON_EQUIVOCATION)
TRAINED = ignored(pb.REASON_RUN_FINISHED)
WRONG_STATE = rejected(pb.REASON_WRONG_BASE)
MALFORMED = pb.REASON_MALFORMED

Say = Callable[[Table], Statement]


def name(number: int) -> str:
    return identity(number).peer


def judge(table: Table, statement: Statement) -> tuple[Judgement, StatementPool]:
    return rules.judge(table.run, table.head, table.state.gathered, statement)


def answer(table: Table, statement: Statement) -> Judgement:
    """Return the judgement, which changes nothing unless it accepts."""
    judgement, after = judge(table, statement)
    assert (after is table.state.gathered) == (judgement != ACCEPTED)
    return judgement


def stale(what: str, round: int, opened: int = 1) -> Judgement:
    return ignored(pb.REASON_STALE_ROUND, what, round, opened)


def asking() -> Table:
    """Return a table of a run that requires evidence: 0 to 2 are on its roster with evidence, and 5 has sent it since."""
    run = manifest(attestation={"kinds": ["sev-snp"], "measurements": {"sev-snp": ["ab" * 48]}})
    table = Table(run)
    for number in range(3):
        table.attest(number)
    table.genesis()
    table.attest(5)
    return table


def allowing() -> Table:
    allowed = [name(number) for number in range(10)]
    return Table(manifest(admission={"policy": "allow-list", "allow": allowed})).genesis()


def trained(count: int = 5) -> Table:
    return Table(manifest(rounds={"count": count})).genesis().train(1)


def finished() -> Table:
    table = trained(1)
    for number in range(3):
        table.submit(table.report(number))
    assert table.head.finished
    return table


@pytest.mark.parametrize("say", [Table.claim, Table.leave, Table.contribution, Table.report])
def test_a_run_that_is_over_hears_nothing(say: Callable[[Table, int], Statement]):
    table = finished()
    assert answer(table, say(table, 0)) == ignored(pb.REASON_RUN_FINISHED)


# Claims.


@pytest.mark.parametrize(
    ("make", "say", "expected"),
    [
        (allowing, lambda t: t.claim(9), ACCEPTED),
        (
            allowing,
            lambda t: t.claim(10),
            rejected(pb.REASON_NOT_ADMITTED, short(name(10))),
        ),
        (asking, lambda t: t.claim(0), ACCEPTED),
        (asking, lambda t: t.claim(5), ACCEPTED),
        (
            asking,
            lambda t: t.claim(7),
            rejected(pb.REASON_NOT_ATTESTED),
        ),
        (partial(trained, 1), lambda t: t.claim(7), TRAINED),
        (trained, lambda t: t.claim(7, round=1), stale("claim", 1, opened=2)),
        (trained, lambda t: t.claim(7, round=3), stale("claim", 3, opened=2)),
        (trained, lambda t: t.claim(7, head=digest("elsewhere")), stale("claim", 2, opened=2)),
        (lambda: Table(manifest()), lambda t: t.claim(7, round=2), stale("claim", 2)),
        (lambda: Table(manifest()), lambda t: t.claim(7, head=digest("none yet")), stale("claim", 1)),
        (lambda: Table(manifest()).genesis(), lambda t: t.claim(7, state=digest("mine")), WRONG_STATE),
        (trained, lambda t: t.claim(7, state=digest("mine")), ACCEPTED),
    ],
)
def test_claims(make: Callable[[], Table], say: Say, expected: Judgement):
    table = make()
    assert answer(table, say(table)) == expected


def test_a_claim_s_serial_says_which_is_newer():
    table = Table(manifest(settlement=SETTLEMENT)).genesis()
    older, claim = table.claim(7), table.claim(7)
    table.submit(claim)
    assert answer(table, claim) == REPEATED
    assert answer(table, older) == OLDER
    judgement, both = judge(table, table.claim(7, serial=claim.body.serial, account=bytes(20)))
    assert judgement == TWICE
    assert len(both.claims[name(7)]) == 2
    leave = table.leave(7)
    table.submit(leave)
    newer = ignored(pb.REASON_SUPERSEDED)
    assert answer(table, table.claim(7, serial=leave.body.serial)) == newer
    assert answer(table, table.claim(7, serial=leave.body.serial + 1)) == ACCEPTED


def test_a_claim_that_others_contradict_is_refused_and_kept():
    table = trained()
    for number in range(2):
        table.submit(table.report(number))
    claim = table.claim(7, state=digest("mine"))
    judgement, after = judge(table, claim)
    assert judgement == WRONG_STATE
    assert after == replace(table.state.gathered, claims={name(7): (claim,)})


def by_hash(table: Table, statements: list[Statement]) -> list[Statement]:
    return sorted(statements, key=lambda statement: sha256(table.head.digest, statement.digest))


def test_of_strangers_those_with_the_smallest_hash_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CLAIMS", 3)
    table = Table(manifest()).genesis()
    *few, last = by_hash(table, [table.claim(number) for number in range(10, 14)])
    for claim in few:
        assert table.submit(claim) == ACCEPTED
    assert answer(table, last) == ignored(pb.REASON_RATE, 3)
    assert answer(table, table.claim(0)) == ACCEPTED, "of the roster there are never too many"


def test_whoever_makes_room_leaves_no_leave(monkeypatch: pytest.MonkeyPatch):
    table = Table(manifest()).genesis()
    monkeypatch.setattr(limits, "CLAIMS", 1)
    first, last = by_hash(table, [table.claim(10), table.claim(11)])
    pushed_out = 10 if last.peer == name(10) else 11
    gathered = StatementPool()
    for statement in (last, table.leave(pushed_out), table.leave(0), first):
        judgement, gathered = rules.judge(table.run, table.head, gathered, statement)
        assert judgement == ACCEPTED
    assert set(gathered.claims) == {first.peer}
    assert set(gathered.leaves) == {name(0)}


# Layouts of clusters.

TWO = [(7, 0, 1, 0), (8, 1, 1, 0)]
UNTILED = rejected(pb.REASON_WRONG_STAGES, 0, 2)


@pytest.mark.parametrize(
    ("make", "say", "expected"),
    [
        (trained, lambda t: t.layout(7, TWO), ACCEPTED),
        (allowing, lambda t: t.layout(9, [(9, 0, 2, 0)]), ACCEPTED),
        (
            allowing,
            lambda t: t.layout(10, [(10, 0, 2, 0)]),
            rejected(pb.REASON_NOT_ADMITTED, short(name(10))),
        ),
        (asking, lambda t: t.layout(0, [(0, 0, 2, 0)]), ACCEPTED),
        (asking, lambda t: t.layout(5, [(5, 0, 2, 0)]), ACCEPTED),
        (
            asking,
            lambda t: t.layout(7, TWO),
            rejected(pb.REASON_NOT_ATTESTED),
        ),
        (trained, lambda t: t.layout(7, TWO, round=3), stale("layout", 3, opened=2)),
        (trained, lambda t: t.layout(7, TWO, head=digest("elsewhere")), stale("layout", 2, opened=2)),
        (trained, lambda t: t.layout(9, TWO), rejected(pb.REASON_CLUSTER)),
        (trained, lambda t: t.layout(7, [(7, 0, 1, 0)]), UNTILED),
        (trained, lambda t: t.layout(7, [(7, 0, 2, 1)]), UNTILED),
    ],
)
def test_layouts(make: Callable[[], Table], say: Say, expected: Judgement):
    table = make()
    assert answer(table, say(table)) == expected


def test_a_layout_s_serial_says_which_is_newer():
    table = Table(manifest()).genesis()
    older, layout = table.layout(7, TWO), table.layout(7, TWO)
    table.submit(layout)
    assert answer(table, layout) == REPEATED
    assert answer(table, older) == OLDER
    judgement, both = judge(table, table.layout(7, [(7, 0, 2, 0)], serial=layout.body.serial))
    assert judgement == TWICE
    assert len(both.clusters[name(7)]) == 2


def test_of_strangers_layouts_those_with_the_smallest_hash_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "LAYOUTS", 2)
    table = Table(manifest()).genesis()
    *few, last = by_hash(table, [table.layout(number, [(number, 0, 2, 0)]) for number in (10, 11, 12)])
    for layout in few:
        assert table.submit(layout) == ACCEPTED
    assert answer(table, last) == ignored(pb.REASON_RATE, 2)
    assert answer(table, table.layout(0, [(0, 0, 2, 0)])) == ACCEPTED


@pytest.mark.parametrize(
    ("ranges", "whole"),
    [
        ([(0, 4, 0)], True),
        ([(0, 1, 0), (1, 3, 0)], True),
        ([(0, 1, 0), (1, 3, 0), (1, 3, 1), (0, 1, 2)], True),
        ([(1, 3, 0)], False),
        ([(0, 3, 0)], False),
        ([(0, 5, 0)], False),
        ([(1, 3, 0), (0, 1, 0)], False),
        ([(0, 2, 0), (1, 3, 0)], False),
        ([(0, 1, 0), (2, 2, 0)], False),
        ([(0, 1, 0), (1, 3, 0), (0, 4, 1)], False),
        ([(0, 4, 1)], False),
        ([], False),
    ],
)
def test_copy_0_tiles_all_stages_and_the_others_repeat_it(ranges: list[tuple[int, int, int]], whole: bool):
    hosts = [HostRange(name(number), *each) for number, each in enumerate(ranges)]
    assert rules.tiles(hosts, 4) is whole


# Departures.


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda t: t.leave(0), ACCEPTED),
        (lambda t: t.leave(9), ignored(pb.REASON_NOT_ON_ROSTER)),
        (lambda t: t.leave(0, round=1), stale("leave", 1, opened=2)),
        (lambda t: t.leave(0, head=digest("elsewhere")), stale("leave", 2, opened=2)),
    ],
)
def test_leaves(say: Say, expected: Judgement):
    table = trained()
    assert answer(table, say(table)) == expected


def test_a_leave_s_serial_says_which_is_newer():
    table = Table(manifest()).genesis()
    older, leave = table.leave(0), table.leave(0)
    table.submit(leave)
    assert answer(table, leave) == REPEATED
    assert answer(table, older) == OLDER


# Claims of a seat.


def whole(table: Table) -> dict[str, tuple[Cluster, bytes]]:
    return rules.complete_clusters(table.run, table.head, table.state.gathered)


def test_a_box_alone_is_a_cluster_of_its_own_name():
    table = Table(manifest(settlement=SETTLEMENT)).genesis()
    table.submit(table.claim(7, account=b"a" * 20))
    assert whole(table) == {
        name(7): (Cluster(name(7), (HostRange(name(7), 0, 2, 0),), joined=2, missed=0, account=b"a" * 20), table.state_root())
    }


def test_a_larger_cluster_is_its_lead_s_layout():
    table = Table(manifest()).genesis()
    layout = table.layout(7, [(7, 0, 1, 0), (8, 1, 1, 0), (9, 1, 1, 1)])
    table.submit(layout)
    for number in (7, 8):
        table.submit(table.claim(number, cluster=layout.digest))
    assert not whole(table), "number 9 has not consented"
    table.submit(table.claim(9, cluster=layout.digest))
    hosts = (HostRange(name(7), 0, 1, 0), HostRange(name(8), 1, 1, 0), HostRange(name(9), 1, 1, 1))
    assert whole(table) == {name(7): (Cluster(name(7), hosts, joined=2), table.state_root())}


def test_nobody_is_seated_with_two_layouts_of_one_serial_or_as_a_host_of_another_cluster():
    table = Table(manifest(rounds={"start_clusters": 2}))
    layout = table.layout(0, [(0, 0, 1, 0), (1, 1, 1, 0)])
    table.submit(layout)
    for claim in (table.claim(0, cluster=layout.digest), table.claim(1, cluster=layout.digest), table.claim(2)):
        table.submit(claim)
    assert table.roster() == [0, 2]
    table.submit(table.claim(1))
    assert not whole(table), "it is a host of number 0's cluster"
    table.submit(table.claim(2))
    again = table.layout(0, [(0, 0, 2, 0)])
    table.submit(again)
    table.submit(table.claim(0, cluster=again.digest))
    assert set(whole(table)) == {name(0), name(2)}, "who is on the roster may claim anew"
    table.submit(table.layout(0, [(0, 0, 1, 0), (1, 1, 1, 0)], serial=again.body.serial))
    assert set(whole(table)) == {name(2)}


# Contributions: sixteen samples of number 0 are counted, and its lease ends with the 208th.


def steps(table: Table, inner: int, samples: int | None = None, **changes: Any) -> Statement:
    read = 16 + 4 * inner if samples is None else samples
    return table.contribution(0, inner_steps=inner, tokens=64 * inner, samples_read=read, **changes)


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda t: t.contribution(0), ACCEPTED),
        (lambda t: t.contribution(0, round=1), rejected(pb.REASON_STALE_ROUND, 1, 2)),
        (lambda t: t.contribution(0, round=3), rejected(pb.REASON_FUTURE_ROUND, 3, 2)),
        (
            lambda t: t.contribution(0, head=digest("elsewhere")),
            rejected(pb.REASON_WRONG_HEAD),
        ),
        (
            lambda t: t.contribution(9),
            rejected(pb.REASON_NOT_ON_ROSTER, short(name(9)), 2),
        ),
        (
            lambda t: t.contribution(0, attestation=digest("none")),
            rejected(pb.REASON_NOT_ATTESTED),
        ),
        (lambda t: steps(t, 0), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 0)),
        (lambda t: steps(t, 1), ACCEPTED),
        (lambda t: steps(t, 12), ACCEPTED),
        (lambda t: steps(t, 13), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 13)),
        (lambda t: t.contribution(0, tokens=255), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 255, 4)),
        (lambda t: t.contribution(0, tokens=257), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 257, 4)),
        (lambda t: steps(t, 4, 31), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 15, 192)),
        (lambda t: steps(t, 4, 32), ACCEPTED),
        (lambda t: steps(t, 4, 208), ACCEPTED),
        (lambda t: steps(t, 4, 209), rejected(pb.REASON_IMPOSSIBLE_TOKENS, 193, 192)),
    ],
)
def test_contributions(say: Say, expected: Judgement):
    table = trained()
    assert answer(table, say(table)) == expected


def test_a_contribution_builds_on_the_run_s_state():
    table = Table(manifest()).genesis()
    other = table.contribution(0, base_state=digest("mine"))
    assert answer(table, other) == rejected(pb.REASON_WRONG_BASE)


def test_there_is_nothing_to_contribute_to_once_all_rounds_are_trained():
    table = trained(1)
    assert answer(table, table.contribution(0)) == TRAINED


def test_a_contribution_names_what_admits_its_sender():
    table = asking()
    assert answer(table, table.contribution(0)) == ACCEPTED
    unnamed = rejected(pb.REASON_NOT_ATTESTED)
    assert answer(table, table.contribution(0, attestation=b"")) == unnamed


def test_contributions_of_one_cluster():
    table = Table(manifest()).genesis()
    first, second, third = sorted((table.contribution(0, loss=loss) for loss in (1.0, 2.0, 3.0)), key=lambda each: each.digest)
    table.submit(first)
    assert answer(table, first) == REPEATED
    assert table.submit(second) == TWICE
    assert answer(table, first) == REPEATED
    assert answer(table, second) == REPEATED
    assert answer(table, third) == ENOUGH
    assert table.state.gathered.contributions == {name(0): (first, second)}


def test_what_is_voted_on_stays_whatever_its_author_says_next():
    table = Table(manifest()).genesis()
    first, second, third = sorted((table.contribution(0, loss=loss) for loss in (1.0, 2.0, 3.0)), key=lambda each: each.digest)
    table.submit(third)
    table.contribute([1, 2])
    assert third.digest in table.ballots[-1].body.contributions
    assert table.submit(second) == TWICE
    assert table.state.gathered.contributions[name(0)] == (second, third)
    assert table.submit(first) == TWICE
    assert table.state.gathered.contributions[name(0)] == (first, third)
    assert answer(table, second) == ENOUGH


def test_who_comes_after_the_ballot_is_late():
    table = Table(manifest()).genesis().contribute([0, 1])
    assert table.submit(ballot(table, 0, 1)) == ACCEPTED
    assert answer(table, table.contribution(2)) == ignored(pb.REASON_LATE, 1)


# The ballot.


def ballot(table: Table, *numbers: int, pen: int | None = None, **changes: Any) -> Statement:
    listed = sorted(statement.digest for n in numbers for statement in table.state.gathered.contributions.get(name(n), ()))
    fields = {"round": table.head.round, "head": table.head.digest, "contributions": listed, "seconds": 5.0, **changes}
    author = COORDINATOR if pen is None else identity(pen)
    return seal(author, pb.KIND_BALLOT, table.run.run_id, pb.Ballot(**fields))


def past(number: float) -> float:
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


UNLISTED = rejected(MALFORMED)


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda t: ballot(t, 0, 1), ACCEPTED),
        (lambda t: ballot(t, 0, 1, pen=0), rejected(pb.REASON_BAD_SIGNATURE)),
        (lambda t: ballot(t, 0, 1, round=3), stale("ballot", 3, opened=2)),
        (lambda t: ballot(t, 0, 1, head=digest("elsewhere")), stale("ballot", 2, opened=2)),
        (lambda t: ballot(t), UNLISTED),
        (lambda t: ballot(t, 0), UNLISTED),
        (lambda t: ballot(t, contributions=[digest("nobody's")]), UNLISTED),
        (lambda t: ballot(t, 0, 1, seconds=1e-6), ACCEPTED),
        (lambda t: ballot(t, 0, 1, seconds=1001.0), ACCEPTED),
        (lambda t: ballot(t, 0, 1, seconds=0.0), rejected(MALFORMED, "0.0")),
        (lambda t: ballot(t, 0, 1, seconds=past(1001.0)), rejected(MALFORMED, past(1001.0))),
    ],
)
def test_ballots(say: Say, expected: Judgement):
    table = Table(manifest(rounds={"vote_seconds": 1000})).genesis().train(1).contribute([0, 1])
    assert answer(table, say(table)) == expected


def test_a_ballot_lists_one_contribution_of_a_cluster_that_made_two():
    table = Table(manifest()).genesis().contribute([0, 1])
    other = table.contribution(1, loss=1.0)
    table.submit(other)
    (alone,), both = (table.state.gathered.contributions[name(number)] for number in (0, 1))
    assert answer(table, ballot(table, 0, 1)) == UNLISTED
    assert answer(table, ballot(table, contributions=sorted([alone.digest, digest("nobody's")]))) == UNLISTED
    for chosen in ([alone], *([alone, either] for either in both)):
        said = ballot(table, contributions=sorted(statement.digest for statement in chosen))
        judgement, gathered = judge(table, said)
        assert judgement == ACCEPTED
        assert gathered.ballot == said
        assert gathered.listed() == tuple(each.peer for each in sorted(chosen, key=lambda each: each.digest))


def test_a_round_has_one_ballot():
    table = Table(manifest()).genesis().contribute([0, 1])
    said = ballot(table, 0, 1)
    table.submit(said)
    assert answer(table, said) == REPEATED
    assert answer(table, ballot(table, 0, 1, seconds=6.0)) == TWICE


# Votes.


def receipt(table: Table, number: int, accepted: bytes, **changes: Any) -> Statement:
    said = table.ballots[-1].signing
    fields = {"round": table.head.round, "ballot": said, "accepted": accepted, **changes}
    return seal(identity(number), pb.KIND_RECEIPT, table.run.run_id, pb.Receipt(**fields))


def finding(index: int, stage: int = 0) -> dict[str, Any]:
    return {"findings": [pb.Finding(index=index, reason=pb.REASON_NON_FINITE, stage=stage)]}


UNABOUT = ignored(pb.REASON_STALE_ROUND, 1)
NOT_BITS = rejected(MALFORMED)
NO_FINDING = rejected(MALFORMED)
UNSCORED = rejected(MALFORMED)

Spoil = Callable[[int, int, int], dict[str, Any]]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda own, yes, no: {}, ACCEPTED),
        (lambda own, yes, no: {"round": 2}, UNABOUT),
        (lambda own, yes, no: {"ballot": digest("another")}, UNABOUT),
        (lambda own, yes, no: {"accepted": b""}, NOT_BITS),
        (lambda own, yes, no: {"accepted": bytes([1 << yes, 0])}, NOT_BITS),
        (lambda own, yes, no: {"accepted": bytes([1 << yes | 1 << own])}, NOT_BITS),
        (lambda own, yes, no: {"accepted": bytes([1 << yes | 1 << 3])}, NOT_BITS),
        (lambda own, yes, no: finding(no), ACCEPTED),
        (lambda own, yes, no: finding(yes), NO_FINDING),
        (lambda own, yes, no: finding(own), NO_FINDING),
        (lambda own, yes, no: finding(3), NO_FINDING),
        (lambda own, yes, no: finding(no, stage=1), ACCEPTED),
        (lambda own, yes, no: finding(no, stage=2), rejected(pb.REASON_WRONG_STAGES, 2)),
        (lambda own, yes, no: {"scored": [yes], "score": [5]}, ACCEPTED),
        (lambda own, yes, no: {"scored": [no], "score": [5]}, UNSCORED),
        (lambda own, yes, no: {"scored": [own], "score": [5]}, UNSCORED),
        (lambda own, yes, no: {"scored": [3], "score": [5]}, UNSCORED),
    ],
)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_receipts(spoil: Spoil, expected: Judgement, order: tuple[int, int, int]):
    table = Table(manifest()).genesis().contribute()
    listed = table.state.gathered.listed()
    own, yes, no = (listed.index(name(number)) for number in order)
    assert answer(table, receipt(table, order[0], **{"accepted": bytes([1 << yes]), **spoil(own, yes, no)})) == expected


def test_there_is_no_vote_before_the_ballot_and_none_of_who_is_not_on_it():
    table = Table(manifest()).genesis().contribute([0, 1])
    early = seal(identity(0), pb.KIND_RECEIPT, table.run.run_id, pb.Receipt(round=1, ballot=digest("none"), accepted=b"\2"))
    assert answer(table, early) == UNABOUT
    table.submit(ballot(table, 0, 1))
    table.ballots.append(table.state.gathered.ballot or early)
    assert answer(table, receipt(table, 2, b"\3")) == rejected(pb.REASON_NOT_ON_ROSTER)


def test_a_receipt_has_as_many_bytes_as_there_are_eight_contributions():
    numbers = range(9)
    table = Table(manifest(rounds={"start_clusters": 9})).genesis(numbers).contribute(numbers)
    whole = table.receipt(0)
    assert len(whole.body.accepted) == 2
    assert answer(table, whole) == ACCEPTED
    assert answer(table, table.receipt(0, accepted=whole.body.accepted[:1])) == NOT_BITS


def test_receipts_of_one_voter():
    table = Table(manifest()).genesis().contribute()
    bit = next(index for index, peer in enumerate(table.state.gathered.listed()) if peer != name(0))
    told = [receipt(table, 0, bytes([1 << bit]), scored=[bit], score=[score]) for score in (1, 2, 3)]
    first, second, third = sorted(told, key=lambda each: each.digest)
    table.submit(first)
    assert answer(table, first) == REPEATED
    assert table.submit(second) == TWICE
    assert answer(table, first) == REPEATED
    assert answer(table, third) == ENOUGH
    assert table.state.gathered.receipts == {name(0): (first, second)}


def test_bits_are_least_significant_first():
    assert [rules.bits(yes) for yes in ([], [True], [False, True], [True] * 8, [False] * 8 + [True])] == [
        b"",
        b"\x01",
        b"\x02",
        b"\xff",
        b"\x00\x01",
    ]


# State reports.


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda t: t.report(0), ACCEPTED),
        (lambda t: t.report(0, round=1), stale("state report", 1, opened=2)),
        (lambda t: t.report(0, head=digest("elsewhere")), stale("state report", 2, opened=2)),
        (lambda t: t.report(9), rejected(pb.REASON_NOT_ON_ROSTER, short(name(9)))),
    ],
)
def test_state_reports(say: Say, expected: Judgement):
    table = trained()
    assert answer(table, say(table)) == expected


@pytest.mark.parametrize("replayed", [False, True])
def test_reports_of_one_cluster(replayed: bool):
    table = trained()
    told = [table.report(0, state=digest(each), replayed=replayed) for each in "abc"]
    first, second, third = sorted(told, key=lambda each: each.digest)
    table.submit(first)
    assert answer(table, first) == REPEATED
    assert table.submit(second) == TWICE
    assert answer(table, third) == ENOUGH
    assert table.state.gathered.reports == {(name(0), replayed): (first, second)}


def test_a_replay_says_more_than_a_report_and_a_report_more_than_a_claim():
    table = trained()
    for number in range(3):
        table.submit(table.claim(number, state=digest("claimed", number)))
    for number in range(2):
        table.submit(table.report(number, state=digest("reported", number)))
    table.submit(table.report(0, state=digest("replayed", 0), replayed=True))
    assert rules.told_states(table.state.gathered, [name(number) for number in range(4)]) == {
        name(0): digest("replayed", 0),
        name(1): digest("reported", 1),
        name(2): digest("claimed", 2),
    }


@pytest.mark.parametrize(("clusters", "agreeing", "known"), [(3, 1, False), (3, 2, True), (4, 2, False), (4, 3, True)])
def test_two_thirds_of_those_who_made_it_say_what_the_state_is(clusters: int, agreeing: int, known: bool):
    table = Table(manifest(rounds={"start_clusters": clusters})).genesis(range(clusters)).train(1, range(clusters))
    for number in range(clusters):
        own = {} if number < agreeing else {"state": digest("its own", number)}
        table.submit(table.report(number, **own))
    assert rules.known_state(table.run, table.head, table.state.gathered) == (table.state_root() if known else b"")


def test_what_the_chain_says_is_known_without_reports():
    table = Table(manifest()).genesis()
    assert rules.known_state(table.run, table.head, StatementPool()) == table.head.state == table.state_root()
