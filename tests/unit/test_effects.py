"""Tests of the round machine's effects, input by input, and of its carry into the next round."""

import pytest

from dilocox.protocol import limits
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.rules import ACCEPT, REPEAT, TWICE, Judgement, Outcome
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import (
    Absent,
    Attested,
    Clock,
    Close,
    Differ,
    Present,
    Received,
    Refused,
    Relay,
    Reply,
    Resumed,
    RoundState,
    SealBallot,
    SealCommit,
    Tick,
)
from dilocox.protocol.wire.messages import Statement
from tests.helpers import Table, digest, identity, manifest
from tests.sentences import Message

TRUE, FALSE = digest("true"), digest("false")


def peer(number: int) -> str:
    return identity(number).peer


def peers(*numbers: int) -> tuple[str, ...]:
    return tuple(sorted(peer(number) for number in numbers))


def table_of(clusters: int = 3, trained: int = 0, **rounds: float) -> Table:
    run = manifest(rounds={"start_clusters": clusters, "count": 20, **rounds})
    return Table(run).genesis(range(clusters)).train(trained, range(clusters))


def heard(table: Table, statement: Statement) -> list[round_machine.Effect]:
    return table.feed(Received(statement))


# Answers.


def test_a_contribution_is_answered_and_relayed_once():
    table = table_of()
    statement = table.contribution(0)
    assert heard(table, statement) == [Reply(ACCEPT), Relay(statement)]
    assert heard(table, statement) == [Reply(REPEAT)]


def test_the_proof_of_equivocation_is_relayed():
    table = table_of()
    table.contribute([0])
    second = table.contribution(0, loss=1.0)
    assert heard(table, second) == [Reply(TWICE), Relay(second)]
    assert table.state.gathered.refusals == (pb.Exclusion(peer=peer(0), reason=pb.REASON_EQUIVOCATION, detail=TWICE.detail),)


def test_nothing_else_is_relayed():
    table = table_of()
    for statement in (table.claim(7), table.leave(7), table.report(0)):
        assert heard(table, statement) == [Reply(ACCEPT)]
    table.contribute()
    assert heard(table, table.receipt(0)) == [Reply(ACCEPT)]


def test_what_is_ignored_leaves_the_same_state():
    table = table_of()
    before = table.state
    judgement = Judgement(Outcome.IGNORE, pb.REASON_STALE_ROUND, Message("protocol/consensus/rules.py", "leave", 9, 1))
    assert heard(table, table.leave(0, round=9)) == [Reply(judgement)]
    assert table.state is before


def test_what_is_rejected_is_recorded_once():
    table = table_of()
    wrong = table.contribution(0, head=digest("fork"))
    detail = Message("protocol/consensus/rules.py", "last commit")
    for _ in range(2):
        assert heard(table, wrong) == [Reply(Judgement(Outcome.REJECT, pb.REASON_WRONG_HEAD, detail))]
    [refusal] = table.state.gathered.refusals
    assert (refusal.peer, refusal.reason, refusal.detail) == (peer(0), pb.REASON_WRONG_HEAD, detail)
    assert table.state.gathered == StatementPool(refusals=(refusal,))


@pytest.mark.parametrize("event", [Tick(), Present(peer(0)), Absent(peer(2))])
def test_what_says_nothing_new_leaves_the_same_state(event: round_machine.Input):
    table = table_of()
    table.absent(2)
    before = table.state
    assert table.feed(event) == []
    assert table.state is before


def test_a_refusal_is_cut_to_what_a_commit_holds_and_said_once():
    table = table_of()
    for _ in range(2):
        assert table.feed(Refused("p" * 300, pb.REASON_OVERSIZE, "d" * 300)) == []
    assert table.state.gathered.refusals == (pb.Exclusion(peer="p" * 256, reason=pb.REASON_OVERSIZE, detail="d" * 256),)


def test_a_finished_run_records_nothing():
    table = table_of(trained=1, count=1)
    for number in range(3):
        table.submit(table.report(number))
    before = table.state
    assert table.feed(Refused("somebody", pb.REASON_OVERSIZE, "late")) == []
    assert table.state is before


def test_verdicts_are_bounded_and_the_newest_of_a_peer_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "ATTESTATIONS", 4)  # half of it for unknown peers
    table = table_of()
    table.attest(5)
    assert table.state.gathered.attested == {}, "where none is asked for"
    table = Table(manifest(attestation={"kinds": ["sev-snp"]}))
    first, second, _ = (table.attest(number) for number in (5, 6, 7))
    assert table.state.gathered.attested == {peer(5): first, peer(6): second}
    renewed = table.attest(5, label="renewed")
    assert table.state.gathered.attested == {peer(5): renewed, peer(6): second}


# Peers that report another state.


Said = tuple[int, bytes]


@pytest.mark.parametrize(
    ("clusters", "said", "last"),
    [
        (3, [(0, TRUE)], ()),
        (3, [(0, TRUE), (1, TRUE)], ()),
        (3, [(0, TRUE), (1, TRUE), (2, FALSE)], peers(2)),
        (3, [(0, TRUE), (1, TRUE), (2, TRUE)], ()),
        (3, [(0, TRUE), (1, FALSE)], peers(0, 1)),
        (3, [(0, TRUE), (1, FALSE), (2, TRUE)], ()),
        (6, [(0, TRUE), (1, TRUE)], ()),
        (6, [(0, TRUE), (1, TRUE), (2, FALSE)], peers(0, 1, 2)),
        (6, [(0, TRUE), (1, TRUE), (2, FALSE), (3, TRUE)], peers(3)),
        (6, [(0, TRUE), (1, TRUE), (2, FALSE), (3, FALSE)], peers(3)),
        (6, [(0, TRUE), (1, FALSE), (1, digest("a third one"))], ()),
    ],
)
def test_reports_that_differ_are_looked_at_again(clusters: int, said: list[Said], last: tuple[str, ...]):
    """Check replays. `last`: peers that are asked to replay after the last of these reports."""
    table = table_of(clusters, trained=1)
    for number, state in said:
        effects = heard(table, table.report(number, state=state))
    assert effects[1:] == ([Differ(2, last)] if last else [])


def test_a_replay_is_the_newer_word():
    table = table_of(trained=1)
    for number in (0, 1):
        table.submit(table.report(number, state=TRUE))
    assert heard(table, table.report(2, state=FALSE))[1:] == [Differ(2, peers(2))]
    assert heard(table, table.report(2, state=TRUE, replayed=True))[1:] == []
    assert heard(table, table.report(1, state=FALSE, replayed=True))[1:] == [Differ(2, peers(1))]


def test_a_wrong_replay_of_a_known_state_differs():
    table = table_of(trained=0)
    right = table.state_root()
    assert heard(table, table.report(0, state=right))[1:] == []
    assert heard(table, table.report(0, state=FALSE, replayed=True))[1:] == [Differ(1, peers(0))]
    assert table.state.gathered.refusals == ()


def test_who_did_not_make_the_state_starts_no_search_for_it():
    table = table_of(trained=0)
    table.submit(table.claim(7))
    table.train(1).submit(table.report(0, state=TRUE))
    assert peer(7) in table.head.roster
    assert heard(table, table.report(7, state=FALSE))[1:] == []
    table.submit(table.report(1, state=TRUE))
    assert heard(table, table.report(7, state=FALSE, replayed=True))[1:] == [Differ(2, peers(7))]


# Ballots.


def test_a_ballot_lists_those_who_contributed_once():
    table = table_of(4, vote_seconds=77)
    table.contribute([0])
    table.submit(table.contribution(0, loss=1.0))
    first, second, third = (table.contribution(number) for number in (1, 2, 3))
    table.submit(first)
    table.submit(second)
    effects = heard(table, third)
    listed = sorted(statement.digest for statement in (first, second, third))
    ballot = pb.Ballot(round=1, head=table.head.digest, contributions=listed, seconds=77)
    assert effects == [Reply(ACCEPT), Relay(third), SealBallot(ballot)]
    assert table.state.sealing is False


def test_a_roster_too_small_to_count_stands_still_until_a_claim_closes_its_round():
    table = table_of().contribute()
    for number in (1, 2):
        table.submit(table.leave(number))
    table.vote([0])
    assert table.roster() == [0]
    table.contribute([0]).wait(10_000)
    assert (len(table.ballots), table.head.round) == (1, 2), "nobody could be counted in it"
    table.submit(table.claim(1))
    assert (table.head.round, table.head.trained) == (3, 1), "at once: nobody who is missing comes back without a word"
    assert (table.roster(), table.counted(), table.why(0)) == ([0, 1], [], pb.REASON_TOO_FEW_CLUSTERS)
    table.contribute([0, 1]).vote([0, 1])
    assert table.counted() == [0, 1]
    table.verify()


def test_enough_of_those_who_are_heard_do_not_wait_for_the_others():
    table = table_of(4)
    table.contribute([0]).absent(2, 3)
    assert table.ballots == []
    table.contribute([1])
    assert len(table.ballots) == 1


def test_too_few_wait_though_all_who_are_heard_have_contributed():
    table = table_of(4, min_clusters=2).contribute([0])
    for number in (1, 2, 3):
        table.submit(table.leave(number))
    assert table.ballots == []
    assert table.head.round == 1


# Closing.


def test_votes_of_the_absent_and_of_those_who_leave_are_not_waited_for():
    table = table_of(5).contribute(range(5)).vote([0, 1])
    table.absent(2)
    table.submit(table.leave(3))
    assert table.head.round == 1
    table.absent(4)
    assert table.head.round == 2
    assert table.counted() == [0, 1, 3]


def test_while_the_clocks_stand_still_only_a_vote_of_everybody_closes_the_round():
    table = table_of(5).contribute(range(5))
    receipts = [table.receipt(number) for number in range(5)]
    table.submit(receipts[0])
    table.absent(1, 2, 3, 4)
    assert table.head.round == 1
    for receipt in receipts[1:4]:
        table.submit(receipt)
    assert table.head.round == 1
    table.submit(receipts[4])
    assert table.head.round == 2


def test_the_run_closes_when_all_who_are_heard_and_stay_have_reported():
    table = table_of(4, trained=1, count=1)
    table.absent(2)
    table.submit(table.report(0))
    table.submit(table.leave(3))
    assert not table.head.finished
    table.submit(table.report(1))
    assert table.head.finished


def test_the_run_does_not_close_because_everybody_leaves():
    table = table_of(trained=1, count=1)
    for number in range(3):
        table.submit(table.leave(number))
    assert not table.head.finished
    table.submit(table.report(0))
    assert table.head.finished


def test_deciding_to_close_and_closing_are_two_steps():
    table = table_of().contribute()
    receipts = [table.receipt(number) for number in range(3)]
    table.submit(receipts[0])
    table.submit(receipts[1])
    decided, effects = round_machine.decide(table.state, Received(receipts[2]), table.moment)
    assert effects == [Reply(ACCEPT), Close(table.moment)]
    assert decided.head == table.head
    after, sealing = round_machine.close(decided, table.moment)
    assert isinstance(sealing, SealCommit)
    assert round_machine.step(table.state, Received(receipts[2]), table.moment) == (after, [Reply(ACCEPT), sealing])
    heard(table, receipts[2])
    assert table.state == after
    assert table.commits[-1].body == sealing.body


def test_a_round_begins_with_nothing_but_who_is_not_heard():
    table = table_of(4).contribute([0, 1, 3])
    table.submit(table.claim(7))
    table.absent(7, 2, 50)
    table.now += 30
    table.vote([0, 1, 3])
    head = table.commits[-1]
    assert table.head.digest == head.digest
    assert table.state == RoundState(table.run, table.head, Clock(table.now), table.now, absent=frozenset(peers(2)))
    notes = [pb.Exclusion(peer=name, reason=pb.REASON_ABSENT) for name in peers(2, 7)]
    assert list(head.body.refusals) == notes
    assert round_machine.inherited(table.state) == [Tick(), *(Absent(name) for name in peers(2))]


def attested(*numbers: int) -> Table:
    table = Table(manifest(rounds={"count": 9}, attestation={"kinds": ["simulated"], "lifetime_seconds": 100}))
    for number in numbers:
        table.attest(number)
    return table


def test_verdicts_on_those_who_wait_are_carried_into_the_next_round():
    table = attested(0, 1, 2).genesis()
    waiting = table.attest(7)
    table.attest(8, seconds=0)
    table.train(1)
    assert table.state.gathered == StatementPool(attested={peer(7): waiting})
    table.absent(1)
    assert round_machine.inherited(table.state) == [Tick(), Attested(waiting), Absent(peer(1))]


def test_a_commit_notes_in_order_who_is_not_heard_and_whose_evidence_has_run_out():
    table = attested(0, 1, 2, 3).genesis(range(4))
    assert table.roster() == [0, 1, 2]
    table.submit(table.claim(3))
    table.feed(Refused("somebody", pb.REASON_OVERSIZE, "no"))
    table.attest(0, label="renewed", seconds=9000)
    table.contribute()
    table.absent(3)
    table.now += 2000
    table.vote()
    assert list(table.commits[-1].body.refusals) == [
        pb.Exclusion(peer="somebody", reason=pb.REASON_OVERSIZE, detail="no"),
        pb.Exclusion(peer=peer(3), reason=pb.REASON_ABSENT),
        *(pb.Exclusion(peer=name, reason=pb.REASON_ATTESTATION_EXPIRED) for name in peers(1, 2)),
    ]
    assert table.roster() == [0]
    table.verify()


def test_claims_without_valid_evidence_open_no_run():
    table = attested(0, 1, 2)
    table.now += 1000
    table.genesis()
    assert table.head.round == 0
    table.attest(0, label="renewed")
    table.attest(1, label="renewed")
    assert table.head.round == 0
    table.attest(2, label="renewed")
    assert table.head.round == 1


@pytest.mark.parametrize(("seconds", "opens"), [(999.999, 1), (1000.0, 0)])
def test_a_verdict_lasts_until_its_very_last_millisecond(seconds: float, opens: int):
    table = attested(0, 1).genesis(range(2))
    table.now += seconds
    table.attest(2)
    table.submit(table.claim(2))
    assert table.head.round == opens


# Coming back.


def test_resuming_hears_nobody_of_the_roster_nor_of_those_who_claim():
    table = table_of()
    table.submit(table.claim(7))
    table.absent(50)
    assert table.feed(Resumed()) == []
    assert table.state.absent == frozenset(peers(0, 1, 2, 7))
    assert table.state.starting_since == table.now
    assert not table.state.healed


def test_a_round_that_is_being_voted_on_is_given_up_where_claims_wake_the_run():
    table = table_of().contribute()
    table.vote([0])
    table.absent(1, 2)
    table.wait(table.run.rounds.liveness_seconds)
    effects = heard(table, table.claim(7))
    assert [type(effect) for effect in effects] == [Reply, SealCommit]
    body = table.commits[-1].body
    assert not body.HasField("ballot")
    assert (list(body.contributions), list(body.receipts), list(body.counted)) == ([], [], [])
    assert table.roster() == [0, 1, 2, 7]
    table.verify()


def test_who_falls_silent_last_behind_a_line_that_was_cut_loses_no_round():
    """Check silence, which is noticed for one peer after the other: for a moment one roster member and one claimant were a
    quorum."""
    table = table_of().contribute()
    table.submit(table.claim(7))
    table.absent(1, 2)
    table.wait(1)
    assert table.head.round == 1
    table.absent(0, 7)
    table.wait(600)
    assert table.head.round == 1
    table.present(0, 1, 2, 7)
    table.vote()
    assert table.counted() == [0, 1, 2]
    table.verify()


def test_who_claims_takes_over_after_a_grace():
    table = table_of()
    table.submit(table.claim(7))
    table.absent(1, 2)
    table.wait(table.run.rounds.liveness_seconds - 1)
    assert table.head.round == 1
    assert round_machine.next_deadline(table.state) == table.now + 1
    table.wait(1)
    assert table.head.round == 2
    assert table.roster() == [0, 1, 2, 7]
    table.verify()


def test_claims_of_those_who_have_a_seat_and_are_heard_wake_nobody():
    table = table_of()
    table.absent(1, 2)
    table.submit(table.claim(0))
    assert table.head.round == 1
    table.submit(table.claim(1))
    assert table.head.round == 1, "it claims and is not heard"


def test_claims_wake_a_run_only_up_to_min_clusters():
    table = table_of(5, min_clusters=4)
    table.absent(1, 2, 3, 4)
    table.wait(table.run.rounds.liveness_seconds)
    for number in (7, 8):
        table.submit(table.claim(number))
        assert table.head.round == 1
    table.submit(table.claim(9))
    assert table.head.round == 2
    assert table.roster() == [0, 1, 2, 3, 4, 7, 8, 9]


def test_nobody_is_woken_while_enough_are_heard():
    table = table_of()
    table.absent(2)
    table.submit(table.claim(7))
    assert table.head.round == 1


def test_who_leaves_is_not_counted_among_those_who_are_heard():
    table = table_of()
    table.submit(table.leave(1))
    table.submit(table.leave(2))
    assert table.head.round == 1
    table.submit(table.claim(7))
    assert table.head.round == 2
    assert table.roster() == [0, 7]


def test_only_claims_with_valid_evidence_wake_a_run():
    table = attested(0, 1, 2).genesis()
    table.attest(7, seconds=5)
    table.absent(1, 2)
    table.wait(table.run.rounds.liveness_seconds)
    table.submit(table.claim(7))
    assert table.head.round == 1
    table.attest(7, label="renewed")
    assert table.head.round == 2
    assert table.roster() == [0, 1, 2, 7]
    table.verify()
