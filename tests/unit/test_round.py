"""The round machine and the rules: every way to be counted, and every way not to be, with its reason."""

import pytest

from dilocox.protocol import chain, round
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.messages import seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import DEADLINE_FLOOR_SECONDS, Outcome, deadline_seconds
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
    assert len(table.commits[-1].body.states) == 2
    table.verify()


def test_genesis_waits_for_enough_clusters_with_one_state():
    table = Table(manifest())
    table.submit(table.claim(0))
    other = [pb.StageState(stage=stage, digest=digest("other", stage)) for stage in range(2)]
    claim = table.claim(1)
    del claim.body.states[:]
    claim.body.states.extend(other)
    table.submit(seal(identity(1), pb.KIND_CLAIM, table.run.run_id, claim.body))
    table.submit(table.claim(2))
    assert table.head.round == 0
    table.submit(table.claim(3))
    assert sorted(table.head.roster) == sorted(identity(n).peer for n in (0, 2, 3))
    assert {s.digest for s in table.commits[0].body.states} == {digest("state", 0, 1), digest("state", 1, 1)}


def test_a_dead_peer_is_not_waited_for_and_later_leaves_the_roster():
    table = Table(manifest()).genesis()
    table.contribute([0, 1])
    assert not table.ballots
    table.feed(round.Absent(identity(2).peer))
    assert len(table.ballots) == 1
    table.vote([0, 1])
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_ABSENT
    table.contribute([0, 1]).vote([0, 1])
    assert identity(2).peer not in table.head.roster
    table.verify()


def test_a_silent_peer_costs_until_the_deadline():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.contribute([0, 1])
    table.wait(59)
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


def test_a_minority_cannot_run_ahead():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.feed(round.Absent(identity(1).peer))
    table.feed(round.Absent(identity(2).peer))
    table.submit(table.contribution(0))
    assert not table.ballots
    assert round.next_deadline(table.state) is not None
    table.wait(61)
    table.submit(table.receipt(0))
    commit = table.commits[-1].body
    assert not commit.counted
    assert table.why(0) == pb.REASON_TOO_FEW_ACCEPTS
    table.verify()


def test_with_no_contribution_at_all_nothing_ever_closes():
    table = Table(manifest()).genesis()
    for number in range(3):
        table.feed(round.Absent(identity(number).peer))
    table.wait(1e9)
    assert table.head.round == 1


def test_an_empty_commit_changes_nothing_but_the_round():
    table = Table(manifest()).genesis()
    before = table.contribute().vote().head
    table.contribute().vote(reject={0: pb.REASON_NORM_TOO_LARGE, 1: pb.REASON_NORM_TOO_LARGE, 2: pb.REASON_UNAVAILABLE})
    commit = table.commits[-1].body
    assert not commit.counted
    assert list(commit.median_norms) == list(before.median_norms)
    assert table.why(0) == pb.REASON_NORM_TOO_LARGE
    samples = {name: lease.counted for name, lease in before.ledger.leases.items()}
    assert {name: lease.counted for name, lease in table.head.ledger.leases.items()} == samples


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
    table.contribute().vote([0, 1])
    table.submit(table.receipt(2, {0: pb.REASON_UNAVAILABLE}))
    counted = {item.cluster: set(item.holders) for item in table.commits[-1].body.counted}
    assert counted[identity(0).peer] == {identity(0).peer, identity(1).peer}
    assert counted[identity(1).peer] == {identity(n).peer for n in range(3)}


@pytest.mark.parametrize(
    ("spoil", "outcome", "reason"),
    [
        (lambda b: setattr(b, "round", 0), Outcome.REJECT, pb.REASON_STALE_ROUND),
        (lambda b: setattr(b, "round", 2), Outcome.REJECT, pb.REASON_FUTURE_ROUND),
        (lambda b: setattr(b, "head", digest("fork")), Outcome.REJECT, pb.REASON_WRONG_HEAD),
        (lambda b: setattr(b, "cluster", "somebody"), Outcome.REJECT, pb.REASON_NOT_ON_ROSTER),
        (lambda b: b.payloads.pop(), Outcome.REJECT, pb.REASON_WRONG_STAGES),
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
        table.contribute([1, 2])
        table.feed(round.Absent(identity(0).peer))
        table.vote([1, 2])
        assert (identity(0).peer, reason) in [(item.peer, item.reason) for item in table.commits[-1].body.refusals]
        table.verify()


def test_strangers_and_repeats():
    table = Table(manifest()).genesis()
    assert table.submit(table.contribution(7)).reason == pb.REASON_NOT_ON_ROSTER
    contribution = table.contribution(0)
    assert table.submit(contribution).outcome is Outcome.ACCEPT
    assert table.submit(contribution).outcome is Outcome.IGNORE
    table.contribute([1, 2])
    assert table.submit(table.receipt(7)).reason == pb.REASON_NOT_ON_ROSTER


def test_two_contributions_for_one_slot_void_both_and_are_kept_as_proof():
    table = Table(manifest()).genesis()
    table.submit(table.contribution(0))
    second = table.contribution(0, loss=1.0)
    assert table.submit(second).reason == pb.REASON_EQUIVOCATION
    assert table.submit(table.contribution(0, loss=0.5)).outcome is Outcome.IGNORE
    table.contribute([1, 2]).vote()
    assert table.counted() == [1, 2]
    assert table.why(0) == pb.REASON_EQUIVOCATION
    proof = [e for e in table.commits[-1].body.contributions if e.key == identity(0).key]
    assert len(proof) == 2
    table.verify()


def test_two_receipts_for_one_slot_void_both():
    table = Table(manifest()).genesis()
    table.contribute()
    table.submit(table.receipt(0))
    assert table.submit(table.receipt(0, {1: pb.REASON_NON_FINITE})).reason == pb.REASON_EQUIVOCATION
    table.vote([1, 2])
    assert identity(0).key not in [e.key for e in table.commits[-1].body.receipts]
    assert table.counted() == [0, 1, 2]


def test_the_smaller_group_of_two_base_states_is_not_counted():
    table = Table(manifest()).genesis()

    def spoil(body: pb.Contribution) -> None:
        body.payloads[1].base_state = digest("diverged")

    table.submit(table.contribution(2, spoil))
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
    assert table.submit(table.claim(5, first_stage=1)).reason in (pb.REASON_WRONG_STAGES, pb.REASON_MALFORMED)
    table.submit(table.report(0))
    claim = table.claim(5)
    claim.body.states[0].digest = digest("mine alone")
    sealed = seal(identity(5), pb.KIND_CLAIM, table.run.run_id, claim.body)
    assert table.submit(sealed).reason == pb.REASON_WRONG_BASE


def test_the_allow_list_is_kept():
    table = Table(manifest(admission={"policy": "allow-list", "allow": [identity(0).peer]}))
    assert table.submit(table.claim(0)).outcome is Outcome.ACCEPT
    assert table.submit(table.claim(1)).reason == pb.REASON_NOT_ADMITTED


def test_leaving_gives_the_unread_samples_back():
    table = Table(manifest()).genesis()
    table.contribute()
    leave = seal(identity(2), pb.KIND_LEAVE, table.run.run_id, pb.Leave(head=table.head.digest))
    assert table.submit(leave).outcome is Outcome.ACCEPT
    table.vote([0, 1])
    assert table.counted() == [0, 1, 2]
    assert identity(2).peer not in table.head.roster
    assert table.head.ledger.free
    table.verify()


def test_several_boxes_make_one_cluster():
    table = Table(manifest(rounds={"start_clusters": 2}))
    lead = identity(0).peer
    for number, first in ((0, 0), (1, 1)):
        body = table.claim(number).body
        body.cluster, body.first_stage, body.stage_count = lead, first, 1
        states = [state for state in body.states if state.stage == first]
        del body.states[:]
        body.states.extend(states)
        table.submit(seal(identity(number), pb.KIND_CLAIM, table.run.run_id, body))
    assert table.head.round == 0
    table.submit(table.claim(2))
    assert [len(c.hosts) for _, c in sorted(table.head.roster.items())] in ([2, 1], [1, 2])

    def half(stage: int):
        def spoil(body: pb.Contribution) -> None:
            body.cluster = lead
            body.samples_read = table.head.ledger.leases[lead].counted + body.inner_steps * 4
            keep = [p for p in body.payloads if p.stage == stage]
            del body.payloads[:]
            body.payloads.extend(keep)

        return spoil

    table.submit(table.contribution(0, half(0)))
    table.submit(table.contribution(2))
    assert not table.ballots
    table.submit(table.contribution(1, half(1)))
    assert len(table.ballots) == 1
    table.vote([0, 1, 2])
    assert {c.cluster: len(c.payloads) for c in table.commits[-1].body.counted} == {lead: 2, identity(2).peer: 2}
    table.verify()


def test_reports_that_differ_ask_everyone_to_replay():
    table = Table(manifest()).genesis()
    table.submit(table.report(0))
    report = table.report(1)
    report.body.states[0].digest = digest("rotten bit")
    table.submit(seal(identity(1), pb.KIND_STATE_REPORT, table.run.run_id, report.body))
    assert next(e for e in table.effects if isinstance(e, round.Differ)).round == 1
    table.submit(table.report(1, replayed=True))
    table.contribute().vote()
    assert len(table.commits[-1].body.states) == 2


def test_the_coordinator_s_absence_makes_nobody_late():
    table = Table(manifest(rounds={"deadline_seconds": 60})).genesis()
    table.contribute([0])
    table.feed(round.Absent(identity(1).peer))
    table.now += 1000
    table.feed(round.Resumed())
    assert not table.ballots
    table.contribute([1, 2]).vote()
    assert table.counted() == [0, 1, 2]


def test_refusals_are_bounded():
    table = Table(manifest()).genesis()
    for number in range(500):
        table.feed(round.Refused(f"peer {number}", pb.REASON_BAD_SIGNATURE, "no"))
    assert len(table.state.refusals) == 64


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
            chain.extend(table.run, COORDINATOR.peer, head, sealed.envelope)

    tampered(lambda b: b.counted.pop())
    tampered(lambda b: b.receipts.pop())
    tampered(lambda b: b.contributions.pop())
    tampered(lambda b: setattr(b.counted[0], "tokens", 1))
    tampered(lambda b: setattr(b, "previous", digest("x")))
    tampered(lambda b: setattr(b, "round", 7))
    tampered(lambda b: setattr(b, "loss", 0.0))
    tampered(lambda b: setattr(b.median_norms[0], "norm", 1e9))
    tampered(lambda b: b.roster.pop())
    tampered(lambda b: setattr(b, "data_cursor", 0))
    forged = seal(identity(1), pb.KIND_COMMIT, table.run.run_id, honest)
    with pytest.raises(RemoteError, match="not by the coordinator"):
        chain.extend(table.run, COORDINATOR.peer, head, forged.envelope)
