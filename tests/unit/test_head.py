"""Tests of the head after a commit, field by field, and of the sets of statements for the next commit."""

from typing import Any

import pytest

from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.head import (
    Cluster,
    Head,
    HostRange,
    Rest,
    advance,
    authors,
    initial_head,
    resting_on,
)
from dilocox.protocol.consensus.pool import Slot, StatementPool, holds, put, put_newest, single
from dilocox.protocol.consensus.reputation import Record
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, SETTLEMENT, digest, identity, manifest

RUN = manifest(rounds={"count": 5}, settlement=SETTLEMENT)


def name(number: int) -> str:
    return identity(number).peer


# The head.

FOUR, SIX = pb.Attestation(nonce=digest("four")), pb.Attestation(nonce=digest("six"))
COMMIT = pb.Commit(
    round=7,
    previous=digest("previous"),
    closed_at_ms=11,
    collect_ms=12,
    vote_ms=13,
    open_ms=14,
    contributions=[pb.Signed(signer=1), pb.Signed(signer=0)],
    closing=True,
    roster=[
        pb.Member(
            cluster=name(1),
            joined=3,
            missed=1,
            samples_counted=40,
            lease=[pb.Span(start=50, end=60), pb.Span(start=70, end=71)],
            account=b"a" * 20,
            standing=pb.Standing(earned=60, counted=50, refused=2, scored=7),
        ),
        pb.Member(
            cluster=name(4),
            hosts=[
                pb.Host(peer=name(4), stage_count=1, attestation=FOUR),
                pb.Host(peer=name(5), first_stage=1, stage_count=1),
                pb.Host(peer=name(6), first_stage=1, stage_count=1, copy=2, attestation=SIX),
            ],
            joined=2,
            standing=pb.Standing(earned=4),
        ),
    ],
    away=[pb.Away(key=identity(9).key, standing=pb.Standing(earned=5, counted=6))],
    counted=[pb.Counted(contribution=0), pb.Counted(contribution=1)],
    state=digest("state"),
    norm=130,
    data_cursor=99,
    free_spans=[pb.Span(start=1, end=2), pb.Span(start=4, end=8)],
    rank_or_k=16,
    inner_steps=17,
    trained=4,
    built_by=[name(9)],
    resting=[pb.Rest(cluster=name(8), until=20, removals=2)],
    collect_history=[1, 2, 3],
    vote_history=[4, 5],
    signers=[identity(1).key, identity(2).key],
    merits=[pb.Merit(account=b"a" * 20, merit=7), pb.Merit(account=b"b" * 20, merit=8)],
)


def sealed(**changes: Any) -> Statement[pb.Commit]:
    body = pb.Commit.FromString(COMMIT.SerializeToString())
    for field in changes:
        body.ClearField(field)
    body.MergeFrom(pb.Commit(**changes))
    return seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body)


def test_a_head_is_read_off_its_commit():
    commit = sealed()
    alone = Cluster(name(1), (HostRange(name(1), 0, 2, 0),), joined=3, missed=1, account=b"a" * 20)
    several = (HostRange(name(4), 0, 1, 0), HostRange(name(5), 1, 1, 0), HostRange(name(6), 1, 1, 2))
    assert advance(RUN, commit) == Head(
        round=8,
        digest=commit.digest,
        coordinator=COORDINATOR.peer,
        roster={name(1): alone, name(4): Cluster(name(4), several, joined=2, missed=0, account=b"")},
        ledger=Ledger(99, ((1, 2), (4, 8)), {name(1): Lease(40, ((50, 60), (70, 71))), name(4): Lease(0, ())}),
        trained=4,
        state=b"",
        built_by=frozenset({name(1), name(2)}),
        norm=130,
        closed_at_ms=11,
        finished=True,
        rank_or_k=16,
        inner_steps=17,
        attestations={name(4): FOUR, name(6): SIX},
        resting={name(8): Rest(until=20, removals=2)},
        collect_history=(1, 2, 3),
        vote_history=(4, 5),
        standings={name(1): Record(60, 50, 2, 7), name(4): Record(4), name(9): Record(5, 6)},
        checks={"merit": {b"a" * 20: 7, b"b" * 20: 8}},
    )


def test_a_commit_that_counts_nobody_changes_no_state():
    head = advance(RUN, sealed(counted=[], closing=False))
    assert head.state == digest("state")
    assert head.built_by == {name(9)}
    assert not head.finished


def test_who_counts_is_who_signed():
    assert authors(COMMIT, [0, 1, 0]) == [name(2), name(1), name(2)]
    with pytest.raises(IndexError):
        authors(COMMIT, [2])
    with pytest.raises(RemoteError, match="signer 2"):
        authors(pb.Commit(contributions=[pb.Signed(signer=2)], signers=COMMIT.signers), [0])


def test_every_host_belongs_to_its_cluster_and_hosts_its_stages():
    head = advance(RUN, sealed())
    several = head.roster[name(4)]
    assert several.peers == (name(4), name(5), name(6))
    assert head.cluster_by_peer == {name(1): head.roster[name(1)], **dict.fromkeys(several.peers, several)}
    wide = Cluster("c", (HostRange("a", 0, 2), HostRange("b", 2, 3), HostRange("a", 6, 1)), joined=1)
    assert (wide.stages_of("a"), wide.stages_of("b"), wide.stages_of("c")) == ([0, 1, 6], [2, 3, 4], [])


@pytest.mark.parametrize(
    ("round", "trained", "closing"), [(0, 5, False), (1, 5, True), (9, 4, False), (9, 5, True), (9, 6, True), (1, 0, False)]
)
def test_a_run_closes_when_all_its_rounds_are_trained(round: int, trained: int, closing: bool):
    assert Head(round, digest("head"), COORDINATOR.peer, trained=trained).closing(RUN) is closing


@pytest.mark.parametrize(
    ("head", "round", "at", "now"),
    [
        (initial_head(COORDINATOR.peer), 1, b"", True),
        (initial_head(COORDINATOR.peer), 0, b"", False),
        (initial_head(COORDINATOR.peer), 2, b"", False),
        (initial_head(COORDINATOR.peer), 1, digest("head"), False),
        (Head(1, digest("head"), COORDINATOR.peer), 1, digest("head"), True),
        (Head(4, digest("head"), COORDINATOR.peer), 4, digest("head"), True),
        (Head(4, digest("head"), COORDINATOR.peer), 1, digest("head"), False),
        (Head(4, digest("head"), COORDINATOR.peer), 4, b"", False),
    ],
)
def test_what_is_asked_of_a_roster_names_the_open_round_and_its_head(head: Head, round: int, at: bytes, now: bool):
    for kind in (pb.Claim, pb.Cluster, pb.Leave):
        assert head.names(kind(round=round, head=at)) is now


def test_a_contribution_rests_on_the_evidence_of_its_hosts_in_their_order():
    cluster = Cluster("c", (HostRange("b", 0, 1), HostRange("x", 1, 1), HostRange("a", 2, 1)), joined=1)
    told = {"a": FOUR, "b": SIX, "z": pb.Attestation(nonce=digest("stranger"))}
    assert resting_on(told, cluster) == sha256(SIX.nonce, FOUR.nonce)
    assert resting_on({"z": FOUR}, cluster) == b""


# Gathered statements.


def claim(number: int, serial: int, account: bytes = b"") -> Statement[Any]:
    return seal(identity(number), pb.KIND_CLAIM, RUN.run_id, pb.Claim(serial=serial, account=account))


def leave(number: int, serial: int) -> Statement[Any]:
    return seal(identity(number), pb.KIND_LEAVE, RUN.run_id, pb.Leave(serial=serial))


def three(serial: int = 1) -> list[Statement[Any]]:
    """Return three statements for one slot, by digest."""
    return sorted((claim(1, serial, account) for account in (b"a" * 20, b"b" * 20, b"")), key=lambda each: each.digest)


def test_a_slot_holds_one_statement_or_a_proof():
    first, second, third = three()
    assert single((first,)) is first
    assert single((first, second)) is None
    assert single(()) is None
    assert single(None) is None
    assert holds((first, second), second)
    assert not holds((first, second), third)
    assert not holds(None, first)


@pytest.mark.parametrize(
    ("known", "said", "pinned", "expected"),
    [
        ((), 1, None, (1,)),
        ((1,), 1, None, None),
        ((1,), 0, None, (0, 1)),
        ((1,), 2, None, (1, 2)),
        ((0, 1), 1, None, None),
        ((0, 1), 2, None, None),
        ((0, 2), 1, None, (0, 1)),
        ((1, 2), 0, None, (0, 1)),
        ((1, 2), 0, 2, (0, 2)),
        ((0, 2), 1, 2, None),
        ((0, 1), 2, 1, None),
        ((0, 2), 1, 0, (0, 1)),
    ],
)
def test_of_three_the_two_smallest_stay_and_what_is_voted_on(
    known: tuple[int, ...], said: int, pinned: int | None, expected: tuple[int, ...] | None
):
    statements, others = three(), {"other": (claim(2, 1),)}
    slots: dict[str, Slot] = {**others, **({"slot": tuple(statements[index] for index in known)} if known else {})}
    kept = put(slots, "slot", statements[said], statements[pinned].digest if pinned is not None else b"")
    assert kept == (expected and {**others, "slot": tuple(statements[index] for index in expected)})


def test_a_newer_serial_takes_the_slot_and_an_older_one_changes_nothing():
    first, second, third = three(serial=5)
    slots = put_newest({}, second)
    assert slots == {name(1): (second,)}
    both = put_newest(slots, first)
    assert both == {name(1): (first, second)}
    assert put_newest(both, third) is None
    assert put_newest(both, claim(1, 4)) is None
    assert put_newest(both, claim(1, 6)) == {name(1): (claim(1, 6),)}
    assert put_newest(both, claim(2, 0)) == {**both, name(2): (claim(2, 0),)}


def test_the_newer_of_a_claim_and_a_leave_is_the_wish_and_of_equals_the_leave():
    claims = {name(number): (claim(number, serial),) for number, serial in ((1, 3), (2, 3), (3, 3), (4, 0))}
    leaves = {name(number): (leave(number, serial),) for number, serial in ((1, 2), (2, 3), (3, 4), (5, 0))}
    gathered = StatementPool(claims={**claims, name(6): tuple(three())}, leaves={**leaves, name(6): (leave(6, 1),)})
    assert gathered.claiming() == {name(1): claims[name(1)][0], name(4): claims[name(4)][0]}
    assert gathered.leaving() == {name(2), name(3), name(5), name(6)}


def test_there_are_voters_once_there_is_a_ballot():
    ballot = seal(COORDINATOR, pb.KIND_BALLOT, RUN.run_id, pb.Ballot(round=1))
    assert StatementPool(ballot=ballot, voters=("b", "a")).listed() == ("b", "a")
    assert StatementPool(voters=("b", "a")).listed() == ()
