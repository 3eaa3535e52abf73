"""Tests of the round machine and the rules: every way to be counted, and every way not to be, with its reason."""

from collections.abc import Callable

import pytest

from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.deadlines import DEADLINE_FLOOR_SECONDS, deadline_seconds
from dilocox.protocol.wire.messages import author, seal
from tests.helpers import COORDINATOR, Table, digest, identity, manifest


def test_a_run_from_genesis_to_the_closing_commit():
    table = Table(manifest(rounds={"count": 2})).genesis()
    assert table.head.round == 1
    assert sorted(table.head.roster) == sorted(identity(n).peer for n in range(3))
    for expected in (2, 3):
        table.contribute().vote()
        assert table.counted() == [0, 1, 2]
        assert table.head.round == expected
    for number in range(3):
        table.submit(table.report(number, evaluated=True, evaluation_loss=1.0 + number))
    assert table.head.finished
    assert table.commits[-1].body.closing
    assert table.commits[-1].body.evaluation_loss == 2.0
    assert table.commits[-1].body.state == table.state_root()
    table.verify()


def test_genesis_waits_for_enough_clusters_with_one_state():
    table = Table(manifest())
    table.submit(table.claim(0))
    table.submit(table.claim(1, state=digest("other")))
    table.submit(table.claim(2))
    assert table.head.round == 0
    table.submit(table.claim(3))
    assert sorted(table.head.roster) == sorted(identity(n).peer for n in (0, 2, 3))
    assert table.commits[0].body.state == table.state_root()


def test_a_dead_peer_is_not_waited_for_and_later_leaves_the_roster():
    table = Table(manifest()).genesis()
    table.contribute([0, 1])
    assert not table.ballots
    table.absent(2)
    assert len(table.ballots) == 1
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_ABSENT
    table.contribute([0, 1]).vote([0, 1])
    assert identity(2).peer not in table.head.roster
    table.verify()


def test_a_silent_peer_costs_until_the_deadline():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.wait(20)
    table.contribute([0, 1])
    table.wait(19)
    assert not table.ballots
    table.wait(2)
    table.vote([0, 1])
    assert table.why(2) == pb.REASON_LATE


def test_the_deadline_follows_measured_rounds():
    assert deadline_seconds((), 300) == 300
    assert deadline_seconds((100.0,) * 5, 3600) == 200
    assert deadline_seconds((100.0, 100, 100, 110, 90, 120), 3600) > 200 - 1
    assert deadline_seconds((0.1,) * 5, 3600) == DEADLINE_FLOOR_SECONDS
    assert deadline_seconds((100.0,) * 5, 150) == 150


def test_below_quorum_no_deadline_passes():
    table = Table(manifest(rounds={"deadline_seconds": 60, "liveness_seconds": 5})).genesis()
    table.submit(table.contribution(0))
    table.wait(50)
    table.absent(1, 2)
    assert round_machine.next_deadline(table.state) == table.now + 5, "from then on others may take the seats"
    table.wait(10_000)
    assert round_machine.next_deadline(table.state) is None
    assert not table.ballots
    assert table.state.stands_still
    table.present(1)
    assert round_machine.next_deadline(table.state) == table.now + 10  # what was left of the sixty seconds
    table.wait(6)
    table.absent(1)
    table.present(1)
    assert round_machine.next_deadline(table.state) == table.now + 5  # at least one grace
    table.submit(table.contribution(1))
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    table.verify()


def test_who_leaves_so_that_too_few_stay_stops_the_clocks_and_the_work_of_the_others_waits():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.submit(table.contribution(0))
    table.submit(table.leave(1))
    assert round_machine.next_deadline(table.state) is not None, "two of three stay"
    table.submit(table.leave(2))
    assert round_machine.next_deadline(table.state) is None
    table.wait(10_000)
    assert not table.ballots
    assert table.state.stands_still
    table.submit(table.claim(1))
    table.submit(table.contribution(1))
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    table.verify()


def two_voting() -> Table:
    """Return two clusters in a run that needs two; both have contributed, and one of them leaves before it voted."""
    table = Table(manifest(rounds={"start_clusters": 2})).genesis(range(2)).contribute([0, 1])
    table.submit(table.leave(1))
    table.submit(table.receipt(0))
    return table


def test_a_voter_that_restarts_below_quorum_costs_no_round():
    """Check it, because an immediate close would count none, and would discard the round's work of both."""
    table = two_voting()
    table.absent(1)
    table.wait(10_000)
    assert (table.head.round, round_machine.phase_of(table.state)) == (1, "voting")
    table.present(1)
    table.submit(table.claim(1))
    table.submit(table.receipt(1))
    assert table.counted() == [0, 1]
    table.verify()


def test_a_voter_that_left_below_quorum_is_replaced_by_a_newcomer():
    table = two_voting()
    table.absent(1)
    table.submit(table.claim(5))
    assert (table.counted(), table.roster()) == ([], [0, 5])
    table.verify()


def test_a_voter_that_leaves_is_not_waited_for_where_the_votes_are_enough():
    table = Table(manifest()).genesis().contribute()
    for number in (1, 2):
        table.submit(table.leave(number))
    table.submit(table.receipt(0))
    assert table.counted() == [1, 2], "a vote counts the others' work"
    table.verify()


@pytest.mark.parametrize("healed", [False, True])
def test_a_roster_below_quorum_is_enough_to_start_again(healed: bool):
    """Reproduce a fault: a node left, then the coordinator restarted. More clusters than the roster has can never be live.
    So the node's claim waited for a full deadline; with a damaged database for ever."""
    table = Table(manifest(rounds={"start_clusters": 2})).genesis(range(2)).contribute([0, 1])
    table.submit(table.receipt(1))
    table.submit(table.leave(1))
    table.submit(table.receipt(0))
    assert (table.counted(), table.roster()) == ([0, 1], [0])
    table.feed(round_machine.Resumed(healed=healed))
    table.submit(table.claim(1))
    assert round_machine.phase_of(table.state) == "starting"
    table.present(0, 1)
    assert table.roster() == [0, 1]
    table.contribute([0, 1]).vote([0, 1])
    assert table.counted() == [0, 1]
    table.verify()


def test_who_left_before_it_contributed_is_not_said_to_be_late():
    table = Table(manifest(rounds={"min_clusters": 2})).genesis()
    table.submit(table.leave(2))
    table.contribute([0, 1]).vote([0, 1])
    assert table.why(2) == pb.REASON_LEFT
    assert table.roster() == [0, 1]
    table.verify()


def test_who_stayed_alone_and_had_not_contributed_is_not_said_to_be_late():
    table = Table(manifest(rounds={"min_clusters": 2})).genesis()
    for number in (1, 2):
        table.submit(table.leave(number))
    table.submit(table.claim(5))
    assert [table.why(number) for number in range(3)] == [pb.REASON_TOO_FEW_CLUSTERS, pb.REASON_LEFT, pb.REASON_LEFT]
    table.verify()


def test_a_newcomer_takes_the_seat_of_who_left_at_once():
    table = Table(manifest(rounds={"min_clusters": 3})).genesis()
    table.submit(table.claim(5))
    table.submit(table.leave(1))
    assert table.roster() == [0, 2, 5]
    table.verify()


def test_with_nobody_heard_nothing_ever_closes_and_waiting_starts_afresh():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.contribute([0])
    table.wait(55)
    table.absent(0, 1, 2)
    table.wait(1e9)
    assert table.head.round == 1
    table.present(0, 1, 2)
    assert round_machine.next_deadline(table.state) == table.now + 60
    table.contribute([1, 2]).vote()
    assert table.counted() == [0, 1, 2]
    assert not table.commits[-1].body.collect_ms  # it teaches no later deadline
    assert table.roster() == [0, 1, 2]


def test_a_commit_that_counts_nobody_changes_nothing_but_who_is_there():
    table = Table(manifest(compression={"rank": 20, "adapt": "effective-rank"})).genesis()
    before = table.contribute().vote().head
    for number in (0, 1):
        table.submit(table.report(number))
    table.submit(table.claim(5))
    table.contribute().vote(reject={0: pb.REASON_NORM_MISMATCH, 1: pb.REASON_NORM_MISMATCH, 2: pb.REASON_UNAVAILABLE})
    commit, after = table.commits[-1].body, table.head
    assert not commit.counted
    assert table.why(0) == pb.REASON_NORM_MISMATCH
    assert table.roster() == [0, 1, 2, 5]
    assert {name: after.roster[name] for name in before.roster} == dict(before.roster)  # all were present
    assert {name: after.ledger.leases[name] for name in before.roster} == dict(before.ledger.leases)
    for field in ("trained", "norm", "rank_or_k", "built_by", "resting", "collect_history"):
        assert getattr(after, field) == getattr(before, field), field
    table.verify()


def test_rounds_that_count_nobody_do_not_use_up_the_run():
    table = Table(manifest(rounds={"count": 2})).genesis()
    for _ in range(4):
        table.contribute().vote(reject=dict.fromkeys(range(3), pb.REASON_UNAVAILABLE))
    table.train(2)
    assert table.head.closing(table.run)
    assert table.head.round == 7
    for number in range(3):
        table.submit(table.report(number))
    assert table.head.finished
    table.verify()


def test_half_of_the_others_must_accept():
    table = Table(manifest()).genesis()
    table.contribute()
    table.submit(table.receipt(0, {2: pb.REASON_NON_FINITE}))
    table.submit(table.receipt(1))
    table.submit(table.receipt(2))
    assert table.counted() == [0, 1, 2]  # one of two accepted number 2
    table.contribute().vote(reject={2: pb.REASON_NON_FINITE})
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_NON_FINITE
    table.verify()


def test_a_lone_contributor_counts_only_where_the_manifest_says_so():
    for minimum, expected in ((1, [0]), (2, [])):
        table = Table(manifest(rounds={"min_clusters": minimum, "start_clusters": 2, "deadline_seconds": 60})).genesis(range(2))
        table.submit(table.contribution(0))
        table.wait(61)
        table.submit(table.receipt(0))
        table.wait(10_000)
        assert table.counted() == expected


def test_holders_are_the_acceptors():
    table = Table(manifest()).genesis()
    table.contribute()
    receipts = [table.receipt(0), table.receipt(1), table.receipt(2, {0: pb.REASON_UNAVAILABLE})]
    for receipt in receipts:
        table.submit(receipt)
    found = {name: set(holders) for name, holders in chain.holders(table.commits[-1].body).items()}
    assert found[identity(0).peer] == {identity(0).peer, identity(1).peer}
    assert found[identity(1).peer] == {identity(n).peer for n in range(3)}


def test_who_does_not_vote_does_not_count_and_stands_in_nobodys_way():
    table = Table(manifest(rounds={"vote_seconds": 60, "start_clusters": 4})).genesis(range(4))
    table.contribute(range(4))
    receipts = [table.receipt(0), table.receipt(1)]
    for receipt in receipts:
        table.submit(receipt)
    table.wait(61)
    assert table.counted() == [0, 1]
    assert table.why(3) == pb.REASON_DID_NOT_VOTE
    table.verify()


@pytest.mark.parametrize(
    ("spoil", "outcome", "reason"),
    [
        (lambda b: setattr(b, "round", 0), Outcome.REJECT, pb.REASON_STALE_ROUND),
        (lambda b: setattr(b, "round", 2), Outcome.REJECT, pb.REASON_FUTURE_ROUND),
        (lambda b: setattr(b, "head", digest("fork")), Outcome.REJECT, pb.REASON_WRONG_HEAD),
        (lambda b: setattr(b, "base_state", digest("mine")), Outcome.REJECT, pb.REASON_WRONG_BASE),
        (lambda b: setattr(b, "attestation", digest("none")), Outcome.REJECT, pb.REASON_NOT_ATTESTED),
        (lambda b: setattr(b, "tokens", b.tokens + 1), Outcome.REJECT, pb.REASON_IMPOSSIBLE_TOKENS),
        (lambda b: setattr(b, "inner_steps", 0), Outcome.REJECT, pb.REASON_IMPOSSIBLE_TOKENS),
        (lambda b: setattr(b, "inner_steps", 10**6), Outcome.REJECT, pb.REASON_IMPOSSIBLE_TOKENS),
        (lambda b: setattr(b, "samples_read", 0), Outcome.REJECT, pb.REASON_IMPOSSIBLE_TOKENS),
        (lambda b: setattr(b, "samples_read", 10**9), Outcome.REJECT, pb.REASON_IMPOSSIBLE_TOKENS),
    ],
)
def test_contributions_that_break_a_rule(spoil, outcome, reason):
    table = Table(manifest()).genesis()
    judgement = table.submit(table.contribution(0, spoil))
    assert (judgement.outcome, judgement.reason) == (outcome, reason)
    if outcome is Outcome.REJECT:
        table.absent(0)
        table.contribute([1, 2]).vote([1, 2])
        assert (identity(0).peer, reason) in [(item.peer, item.reason) for item in table.commits[-1].body.refusals]
        table.verify()


def test_of_conversations_a_contribution_counts_the_tokens_that_it_was_trained_on():
    table = Table(manifest(data={"loss_mask": True})).genesis()
    read = table.contribution(0).body.tokens
    assert table.submit(table.contribution(0, tokens=0)).reason == pb.REASON_IMPOSSIBLE_TOKENS
    assert table.submit(table.contribution(0, tokens=read + 1)).reason == pb.REASON_IMPOSSIBLE_TOKENS
    for number, tokens in enumerate((1, read // 4, read)):
        assert table.submit(table.contribution(number, tokens=tokens)).outcome is Outcome.ACCEPT
    table.vote()
    weights = {item.cluster: item.weight for item in chain.taken(table.commits[-1].body)}
    assert weights[identity(0).peer] == 1
    table.verify()


def test_strangers_and_repeats():
    table = Table(manifest()).genesis()
    assert table.submit(table.contribution(7)).reason == pb.REASON_NOT_ON_ROSTER
    contribution = table.contribution(0)
    assert table.submit(contribution).outcome is Outcome.ACCEPT
    assert table.submit(contribution).outcome is Outcome.IGNORE
    table.contribute([1, 2])
    assert table.submit(table.receipt(7, accepted=b"\x07")).reason == pb.REASON_NOT_ON_ROSTER


def test_two_contributions_for_one_slot_void_both_and_are_kept_as_proof():
    table = Table(manifest()).genesis()
    table.submit(table.contribution(0))
    second = table.contribution(0, loss=1.0)
    assert table.submit(second).reason == pb.REASON_EQUIVOCATION
    assert table.submit(table.contribution(0, loss=0.5)).outcome is not Outcome.ACCEPT
    table.contribute([1, 2]).vote()
    assert table.counted() == [1, 2]
    assert table.why(0) == pb.REASON_EQUIVOCATION
    commit = table.commits[-1].body
    proof = [signed for signed in commit.contributions if author(commit, signed) == identity(0).key]
    assert len(proof) == 2
    table.verify()


def test_two_receipts_for_one_slot_void_both():
    table = Table(manifest()).genesis()
    table.contribute()
    table.submit(table.receipt(0))
    assert table.submit(table.receipt(0, {1: pb.REASON_NON_FINITE})).reason == pb.REASON_EQUIVOCATION
    table.vote([1, 2])
    commit = table.commits[-1].body
    assert [author(commit, signed) for signed in commit.receipts].count(identity(0).key) == 2
    assert table.counted() == [1, 2]
    assert table.why(0) == pb.REASON_EQUIVOCATION
    table.verify()


def test_the_smaller_group_of_two_base_states_is_not_counted():
    table = Table(manifest()).genesis().train(1)  # now the state follows from no commit yet
    table.submit(table.contribution(2, base_state=digest("diverged")))
    table.contribute([0, 1]).vote()
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_WRONG_BASE
    table.verify()


def test_a_joiner_is_counted_in_the_next_round():
    table = Table(manifest()).genesis()
    table.submit(table.claim(5))
    table.contribute().vote()
    assert identity(5).peer in table.head.roster
    table.contribute([0, 1, 2, 5]).vote([0, 1, 2, 5])
    assert table.counted() == [0, 1, 2, 5]
    table.verify()


def test_claims_for_another_round_or_state_are_not_taken():
    table = Table(manifest()).genesis()
    assert table.submit(table.claim(5, round=3)).outcome is Outcome.IGNORE
    assert table.submit(table.claim(5, head=digest("old"))).outcome is Outcome.IGNORE
    assert table.submit(table.claim(5, state=digest("mine alone"))).reason == pb.REASON_WRONG_BASE
    table.train(1)
    mine = table.claim(5, state=digest("mine alone"))
    assert table.submit(mine).outcome is Outcome.ACCEPT  # no report has named the state yet
    table.train(1)
    assert table.roster() == [0, 1, 2]
    table.submit(table.report(0))
    table.submit(table.report(1))
    assert table.submit(table.claim(5, state=digest("mine alone"))).reason == pb.REASON_WRONG_BASE
    table.train(1)
    table.verify()


def test_the_allow_list_is_kept():
    table = Table(manifest(admission={"policy": "allow-list", "allow": [identity(0).peer]}))
    assert table.submit(table.claim(0)).outcome is Outcome.ACCEPT
    assert table.submit(table.claim(1)).reason == pb.REASON_NOT_ADMITTED


def test_leaving_gives_the_unread_samples_back():
    table = Table(manifest()).genesis()
    table.contribute()
    leave = table.leave(2)
    assert table.submit(leave).outcome is Outcome.ACCEPT
    table.vote([0, 1])
    assert table.counted() == [0, 1, 2]
    assert identity(2).peer not in table.head.roster
    assert table.head.ledger.free
    table.verify()


def test_several_boxes_make_one_cluster_when_all_of_them_agree():
    table = Table(manifest(rounds={"start_clusters": 2}))
    layout = table.layout(0, [(0, 0, 1, 0), (1, 1, 1, 0), (3, 1, 1, 1)])
    table.submit(layout)
    for number in (0, 1, 2):
        table.submit(table.claim(number, **({} if number == 2 else {"cluster": layout.digest})))
    assert table.head.round == 0  # host 3 has not agreed
    table.submit(table.claim(3, cluster=layout.digest))
    assert table.roster() == [0, 2]
    lead = table.head.roster[identity(0).peer]
    assert lead.peers == tuple(identity(n).peer for n in (0, 1, 3))
    assert lead.stages_of(identity(3).peer) == [1]
    assert table.submit(table.contribution(1)).reason == pb.REASON_NOT_ON_ROSTER  # only the lead host sends
    table.train(1, [0, 2])
    assert table.counted() == [0, 2]
    table.verify()


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ([(0, 0, 1, 0)], pb.REASON_WRONG_STAGES),
        ([(0, 0, 2, 0), (1, 1, 1, 0)], pb.REASON_WRONG_STAGES),
        ([(0, 0, 2, 0), (1, 0, 1, 1)], pb.REASON_WRONG_STAGES),
        ([(1, 0, 2, 0)], pb.REASON_CLUSTER),
    ],
)
def test_layouts_that_break_a_rule(hosts, reason):
    table = Table(manifest())
    assert table.submit(table.layout(0, hosts)).reason == reason


def test_nobody_becomes_a_host_of_two_clusters():
    table = Table(manifest()).genesis()
    layout = table.layout(5, [(5, 0, 1, 0), (2, 1, 1, 0)])  # number 2 already leads a cluster
    table.submit(layout)
    table.submit(table.claim(5, cluster=layout.digest))
    table.submit(table.claim(2, cluster=layout.digest))
    table.train(1)
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_one_false_report_stands_against_its_author_alone():
    table = Table(manifest(rounds={"count": 2})).genesis(range(4)).train(1, range(4))
    for number in range(3):
        table.submit(table.report(number))
    table.submit(table.report(3, state=digest("rotten bit")))
    assert table.effects[-1] == round_machine.Differ(2, (identity(3).peer,))
    assert table.submit(table.claim(5)).outcome is Outcome.ACCEPT
    table.submit(table.report(3, replayed=True))
    table.train(1, range(4))
    assert table.roster() == [0, 1, 2, 3, 5]
    for number in (0, 1, 2, 5):
        table.submit(table.report(number))
    table.submit(table.report(3, state=digest("rotten again")))
    assert table.head.finished
    assert table.commits[-1].body.state == table.state_root()
    table.verify()


def test_while_no_two_thirds_agree_everybody_replays():
    table = Table(manifest()).genesis(range(2)).genesis(range(2, 3)).train(1)
    table.submit(table.report(0))
    table.submit(table.report(1, state=digest("rotten bit")))
    assert table.effects[-1] == round_machine.Differ(2, tuple(sorted(identity(n).peer for n in range(2))))


def test_the_coordinator_s_absence_makes_nobody_late():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.contribute([0])
    table.absent(1)
    table.now += 1000
    table.feed(round_machine.Resumed())
    assert not table.ballots
    table.present(0, 1, 2)
    table.contribute([1, 2]).vote()
    assert table.counted() == [0, 1, 2]


def restarted(table: Table, *present: int) -> Table:
    table.wait(100)
    table.feed(round_machine.Resumed())
    table.present(*present)
    return table


def cut_off(table: Table, *present: int) -> Table:
    """Pause for a time in which no peer was live."""
    table.absent(*(number for number in range(3)))
    table.wait(100)
    table.present(*present)
    return table


BACK = pytest.mark.parametrize("back", [restarted, cut_off])
GRACE = 15.0


@BACK
def test_who_is_not_back_yet_is_waited_for_while_voting(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute().vote([0]), 0, 1)
    table.vote([1])
    table.wait(GRACE - 0.1)
    assert table.head.round == 1
    assert round_machine.next_deadline(table.state) == pytest.approx(table.now + 0.1)
    table.submit(table.receipt(2))
    assert table.counted() == [0, 1, 2]
    table.verify()


@BACK
def test_who_is_not_back_yet_is_waited_for_while_collecting(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute([0]), 0, 1)
    table.contribute([1])
    table.wait(GRACE - 0.1)
    assert not table.ballots
    assert round_machine.next_deadline(table.state) == pytest.approx(table.now + 0.1)
    table.submit(table.contribution(2))
    table.vote()
    assert table.counted() == [0, 1, 2]
    table.verify()


def test_who_is_not_back_yet_is_waited_for_with_the_last_reports():
    table = Table(manifest(rounds={"count": 1})).genesis().train(1)
    table.submit(table.report(0))
    restarted(table, 0, 1)
    table.submit(table.report(1))
    table.wait(GRACE - 0.1)
    assert not table.head.finished
    table.submit(table.report(2))
    assert table.head.finished
    table.verify()


@BACK
def test_who_does_not_come_back_costs_one_grace(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute([0]), 0, 1)
    table.contribute([1])
    table.wait(GRACE)
    assert len(table.ballots) == 1
    assert table.state.clock.returning_until is None
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_ABSENT
    voting = back(Table(manifest()).genesis().contribute().vote([0]), 0, 1)
    voting.vote([1])
    voting.wait(GRACE)
    assert voting.counted() == [0, 1]
    assert voting.why(2) == pb.REASON_DID_NOT_VOTE


@BACK
def test_where_all_are_back_and_done_nobody_waits(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute([0]), 0, 1, 2)
    assert table.state.clock.returning_until is None
    table.contribute([1, 2]).vote()
    assert table.counted() == [0, 1, 2]
    table = back(table.contribute().vote([0]), 0, 1, 2)
    table.vote([1, 2])
    assert table.head.round == 3
    table.verify()


@BACK
def test_who_has_voted_before_is_not_waited_for_but_with_the_round_that_follows(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute().vote([0, 2]), 0, 1)
    table.wait(1)
    table.vote([1])
    assert table.counted() == [0, 1, 2]
    table.contribute([0, 1])
    assert not table.ballots[1:]
    assert round_machine.next_deadline(table.state) == table.now + DEADLINE_FLOOR_SECONDS, (
        "a deadline holds for who comes back too"
    )
    table.wait(2)
    table.present(2)
    assert table.state.clock.returning_until is None
    table.contribute([2]).vote()
    assert table.counted() == [0, 1, 2]
    assert table.head.round == 3
    table.verify()


@BACK
def test_who_does_not_come_back_costs_the_round_that_follows_the_rest_of_the_grace(back: Callable[..., Table]):
    table = back(Table(manifest()).genesis().contribute().vote([0, 2]), 0, 1)
    table.wait(GRACE - 1)
    table.vote([1])
    assert table.head.round == 2
    table.contribute([0, 1])
    assert round_machine.next_deadline(table.state) == table.now + 1
    table.wait(1)
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    table.verify()


def test_a_seat_of_who_may_come_back_is_not_taken_over_as_another_leaves():
    table = restarted(Table(manifest()).genesis().contribute([0]), 0, 1)
    table.submit(table.claim(5))
    table.submit(table.leave(1))
    assert table.head.round == 1
    table.wait(GRACE - 0.1)
    assert table.head.round == 1
    table.wait(0.1)
    assert table.roster() == [0, 2, 5]
    table.verify()


def test_refusals_are_bounded():
    table = Table(manifest()).genesis()
    for number in range(500):
        table.feed(round_machine.Refused(f"peer {number}", pb.REASON_BAD_SIGNATURE, "no"))
    assert len(table.state.gathered.refusals) == 64


def test_a_tampered_commit_does_not_verify():
    table = Table(manifest()).genesis()
    head = table.head
    table.contribute().vote()
    honest = table.commits[-1].body

    def tampered(change) -> None:
        body = pb.Commit.FromString(honest.SerializeToString())
        change(body)
        sealed = seal(COORDINATOR, pb.KIND_COMMIT, table.run.run_id, body)
        with pytest.raises(RemoteError):
            chain.extend(table.run, head, sealed.envelope)

    tampered(lambda b: b.counted.pop())
    tampered(lambda b: b.receipts.pop())
    tampered(lambda b: b.contributions.pop())
    tampered(lambda b: setattr(b.counted[0], "weight", 1))
    tampered(lambda b: setattr(b.counted[0], "clip", 1))
    tampered(lambda b: setattr(b.counted[0], "contribution", b.counted[1].contribution))
    tampered(lambda b: b.ClearField("ballot"))
    tampered(lambda b: setattr(b, "state", digest("x")))
    tampered(lambda b: setattr(b, "trained", 7))
    tampered(lambda b: setattr(b, "previous", digest("x")))
    tampered(lambda b: setattr(b, "round", 7))
    tampered(lambda b: setattr(b, "loss", 0.0))
    tampered(lambda b: setattr(b, "norm", 1))
    tampered(lambda b: b.roster.pop())
    tampered(lambda b: setattr(b, "data_cursor", 0))
    tampered(lambda b: b.signers.pop())
    tampered(lambda b: b.signers.reverse())
    tampered(lambda b: b.signers.append(identity(9).key))
    tampered(lambda b: setattr(b.receipts[0], "signer", b.receipts[1].signer))
    tampered(lambda b: setattr(b.ballot, "kind", pb.KIND_LEAVE))
    forged = seal(identity(1), pb.KIND_COMMIT, table.run.run_id, honest)
    with pytest.raises(RemoteError, match=r"^bad-signature: .*coordinator"):
        chain.extend(table.run, head, forged.envelope)
