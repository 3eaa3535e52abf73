"""Tests of the judgement of a round's statements, beyond the examples elsewhere."""

import pytest

from dilocox.protocol import norms
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.head import advance
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.wire.messages import Statement
from tests.helpers import SETTLEMENT, Table, digest, identity, manifest


def test_a_receipt_that_says_nothing_of_a_contribution_does_not_accept_it():
    table = Table(manifest()).genesis().contribute()
    listed = table.state.gathered.listed()
    silent = listed.index(identity(2).peer)
    receipts = []
    for number in (0, 1):
        others = [name != identity(number).peer and index != silent for index, name in enumerate(listed)]
        receipts.append(table.receipt(number, accepted=rules.bits(others)))
    for receipt in [*receipts, table.receipt(2)]:
        assert table.submit(receipt) == rules.ACCEPT
    assert table.counted() == [0, 1]
    assert table.why(2) == pb.REASON_TOO_FEW_ACCEPTS
    table.verify()


def test_a_cluster_is_whole_when_all_its_hosts_hold_one_state():
    table = Table(manifest(rounds={"start_clusters": 2}))
    layout = table.layout(0, [(0, 0, 1, 0), (1, 1, 1, 0)])
    table.submit(layout)
    table.submit(table.claim(2))
    table.submit(table.claim(0, cluster=layout.digest))
    table.submit(table.claim(1, cluster=layout.digest, state=digest("another")))
    assert table.head.round == 0
    table.submit(table.claim(1, cluster=digest("another layout")))
    assert table.head.round == 0
    table.submit(table.claim(1, cluster=layout.digest))
    assert table.roster() == [0, 2]


def test_the_lead_s_newest_layout_is_the_one_that_is_agreed_to():
    table = Table(manifest(rounds={"start_clusters": 2}))
    old = table.layout(0, [(0, 0, 1, 0), (1, 1, 1, 0)])
    new = table.layout(0, [(0, 0, 1, 0), (3, 1, 1, 0)])
    table.submit(old)
    table.submit(new)
    table.submit(table.claim(2))
    table.submit(table.claim(0, cluster=old.digest))
    table.submit(table.claim(1, cluster=old.digest))
    assert table.head.round == 0
    table.submit(table.claim(0, cluster=new.digest))
    table.submit(table.claim(3, cluster=new.digest))
    assert table.roster() == [0, 2]
    assert table.head.roster[identity(0).peer].peers == (identity(0).peer, identity(3).peer)


def test_a_deadline_learns_when_most_had_spoken_not_when_the_round_closed():
    table = Table(manifest(rounds={"count": 100, "deadline_seconds": 600, "vote_seconds": 600})).genesis()
    table.wait(10)
    table.contribute([0, 1])
    table.wait(9)
    assert not table.ballots
    table.submit(table.contribution(2))
    table.wait(3)
    receipts = [table.receipt(number) for number in range(3)]
    table.submit(receipts[0])
    table.submit(receipts[1])
    table.wait(200)
    table.submit(receipts[2])
    commit = table.commits[-1].body
    assert (commit.collect_ms, commit.vote_ms, commit.open_ms) == (10_000, 3_000, 222_000)
    assert table.head.collect_history == (10_000,)
    assert table.head.vote_history == (3_000,)
    for _ in range(20):
        table.now += 7
        table.train(1)
    assert list(table.head.collect_history) == [7_000] * 8


@pytest.mark.parametrize(
    ("admission", "rounds", "capped"),
    [
        ({}, {}, (4, 6, 6)),
        ({"policy": "allow-list", "allow": tuple(identity(n).peer for n in range(3))}, {}, (4, 6, 8)),
        ({}, {"weight_cap": 1.25}, (4, 6, 7.5)),
        ({}, {"weight_cap": 0}, (4, 6, 8)),
    ],
)
def test_weights_are_the_tokens_up_to_the_cap_of_the_run(
    admission: dict[str, object], rounds: dict[str, object], capped: tuple[float, ...]
):
    table = Table(manifest(admission=admission, rounds=rounds)).genesis()
    per_step = table.run.tokens_per_step
    for number, steps in enumerate((4, 6, 8)):
        read = steps * table.run.training.batch_size
        table.submit(
            table.contribution(number, inner_steps=steps, tokens=steps * per_step, samples_read=read, loss=number + 1.0)
        )
    table.vote()
    assert {item.cluster: item.weight for item in chain.taken(table.commits[-1].body)} == {
        identity(number).peer: steps * per_step for number, steps in enumerate(capped)
    }
    mean = sum((number + 1) * steps for number, steps in enumerate(capped)) / sum(capped)
    assert table.commits[-1].body.loss == pytest.approx(mean)
    assert {name: table.head.ledger.leases[name].counted for name in table.head.roster} == {
        identity(number).peer: steps * table.run.training.batch_size for number, steps in enumerate((4, 6, 8))
    }
    table.verify()


def test_who_is_too_large_is_clipped_by_codes():
    table = Table(manifest(rounds={"clip_ratio": 2.0})).genesis()
    for number, norm in enumerate((100, 102, 120)):
        table.submit(table.contribution(number, norm=norm))
    table.vote()
    commit = table.commits[-1].body
    assert commit.norm == 102
    assert {item.cluster: item.clip for item in chain.taken(commit)} == {
        identity(number).peer: clip for number, clip in enumerate((0, 0, 120 - 102 - 8))
    }
    assert [item.factor for item in chain.taken(commit) if item.clip] == [pytest.approx(2 ** (-10 / 8), rel=5e-3)]


def test_an_open_run_seats_few_newcomers_at_once():
    table = Table(manifest(rounds={"min_clusters": 2})).genesis()
    for number in range(10, 20):
        assert table.submit(table.claim(number)) == rules.ACCEPT
    table.train(1)
    seated = [number for number in table.roster() if number >= 10]
    assert len(seated) == 2
    assert len(table.commits[-1].body.claims) == 10
    table.verify()


def test_an_allow_list_seats_everybody():
    run = manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(20)]})
    table = Table(run).genesis()
    for number in range(10, 20):
        table.submit(table.claim(number))
    table.train(1)
    assert len(table.roster()) == 13


def test_hosts_are_named_in_commits_and_lose_their_seat_with_their_lead():
    table = Table(manifest(settlement=SETTLEMENT, rounds={"start_clusters": 2, "count": 20})).genesis(range(2))
    layout = table.layout(5, [(5, 0, 1, 0), (6, 1, 1, 0)])
    table.submit(layout)
    table.submit(table.claim(5, cluster=layout.digest, account=b"a" * 20))
    table.submit(table.claim(6, cluster=layout.digest))
    table.train(1, range(2))
    assert table.roster() == [0, 1, 5]
    assert advance(table.run, table.commits[-1]) == table.head
    assert table.head.roster[identity(5).peer].account == b"a" * 20
    assert table.head.cluster_by_peer[identity(6).peer].cluster == identity(5).peer
    table.absent(5)
    table.train(2, range(2))
    assert identity(6).peer not in table.head.cluster_by_peer
    table.verify()


def test_one_liar_that_reports_first_costs_a_name_for_each_report():
    """Check the memory: all names for each report would be gigabytes with a thousand clusters."""
    table = Table(manifest(rounds={"start_clusters": 12})).genesis(range(12)).train(1, range(12))
    table.submit(table.report(0, state=digest("rotten bit")))
    named = []
    for number in range(1, 12):
        table.submit(table.report(number))
        named += [len(e.clusters) for e in table.effects if isinstance(e, round_machine.Differ)]
    assert named[0] == 2
    assert set(named[1:]) == {1}
    assert len(named) <= 8


def test_what_was_given_back_is_leased_before_anything_new():
    table = Table(manifest(rounds={"start_clusters": 4, "count": 20})).genesis(range(4))
    given_back = table.head.ledger.leases[identity(3).peer].spans
    table.submit(table.leave(3))
    table.train(1, range(4))
    cursor = table.head.ledger.cursor
    free = table.head.ledger.free
    assert free
    assert free[-1][1] == given_back[-1][1]
    table.train(1)
    ledger = table.head.ledger
    assert ledger.cursor == cursor, "there was enough to lease again"
    leased = {p for lease in ledger.leases.values() for start, end in lease.spans for p in range(start, end)}
    still_free = {p for start, end in ledger.free for p in range(start, end)}
    assert {p for start, end in free for p in range(start, end)} <= leased | still_free
    assert len(still_free) < sum(end - start for start, end in free)
    table.verify()


def ask(table: Table, statement: Statement) -> tuple[Outcome, int]:
    """Return the answer of the table of rules; a statement that is not accepted may change nothing, except as a proof of
    equivocation."""
    before = table.state.gathered
    judgement, after = rules.judge(table.run, table.head, before, statement)
    kept = judgement.outcome is Outcome.ACCEPT or judgement.reason == pb.REASON_EQUIVOCATION
    assert kept or after is before
    return judgement.outcome, judgement.reason


STALE = (Outcome.IGNORE, pb.REASON_STALE_ROUND)
REPEATED = (Outcome.IGNORE, pb.REASON_UNSPECIFIED)
OLDER = (Outcome.IGNORE, pb.REASON_SUPERSEDED)
TWICE = (Outcome.REJECT, pb.REASON_EQUIVOCATION)


def test_claims_by_serial():
    table = Table(manifest(settlement=SETTLEMENT)).genesis()
    old, claim = table.claim(5), table.claim(5)
    assert ask(table, table.claim(5, round=3)) == STALE
    table.submit(claim)
    assert ask(table, claim) == REPEATED
    assert ask(table, old) == OLDER
    other = table.claim(5, serial=claim.body.serial, account=b"a" * 20)
    assert ask(table, other) == TWICE
    table.submit(other)
    assert not table.state.gathered.claiming()
    assert ask(table, table.claim(5, serial=claim.body.serial, account=b"b" * 20))[0] is not Outcome.ACCEPT
    leave = table.leave(5)
    table.submit(leave)
    assert ask(table, table.claim(5, serial=leave.body.serial)) == OLDER
    assert ask(table, table.claim(5))[0] is Outcome.ACCEPT
    request = table.claim(6, state=b"")
    assert rules.judge(table.run, table.head, table.state.gathered, request) == (rules.ACCEPT, table.state.gathered)


def test_layouts_by_serial():
    run = manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(8)]})
    table = Table(run).genesis()
    hosts = [(5, 0, 1, 0), (6, 1, 1, 0)]
    old, layout = table.layout(5, hosts), table.layout(5, hosts)
    assert ask(table, table.layout(9, [(9, 0, 2, 0)])) == (Outcome.REJECT, pb.REASON_NOT_ADMITTED)
    assert ask(table, table.layout(5, hosts, round=3)) == STALE
    table.submit(layout)
    assert ask(table, layout) == REPEATED
    assert ask(table, old) == OLDER
    assert ask(table, table.layout(5, [(5, 0, 2, 0)], serial=layout.body.serial)) == TWICE
    assert ask(table, table.layout(5, [(5, 0, 2, 0)]))[0] is Outcome.ACCEPT


def test_leaves_by_serial():
    table = Table(manifest()).genesis()
    assert ask(table, table.leave(9)) == (Outcome.IGNORE, pb.REASON_NOT_ON_ROSTER)
    assert ask(table, table.leave(2, round=3)) == STALE
    assert ask(table, table.leave(2, head=digest("old"))) == STALE
    old, leave = table.leave(2), table.leave(2)
    table.submit(leave)
    assert ask(table, leave) == REPEATED
    assert ask(table, old) == OLDER
    table.submit(table.claim(5))
    assert ask(table, table.leave(5))[0] is Outcome.ACCEPT


def test_reports_by_round_and_kind():
    table = Table(manifest()).genesis().train(1)
    assert ask(table, table.report(0, round=1)) == STALE
    assert ask(table, table.report(0, head=digest("old"))) == STALE
    assert ask(table, table.report(7)) == (Outcome.REJECT, pb.REASON_NOT_ON_ROSTER)
    report = table.report(0)
    table.submit(report)
    assert ask(table, report) == REPEATED
    assert ask(table, table.report(0, replayed=True))[0] is Outcome.ACCEPT
    other = table.report(0, state=digest("two-faced"))
    assert ask(table, other) == TWICE
    table.submit(other)
    table.submit(table.report(0, state=digest("three-faced")))
    assert len(table.state.gathered.reports[identity(0).peer, False]) == 2


def test_the_commonest_complaint_is_the_reason():
    table = Table(manifest(rounds={"start_clusters": 6})).genesis(range(6)).contribute(range(6))
    reasons = [pb.REASON_UNAVAILABLE, pb.REASON_NON_FINITE, pb.REASON_NON_FINITE, pb.REASON_UNAVAILABLE, pb.REASON_WRONG_BASE]
    receipts = [table.receipt(number, {5: reason}) for number, reason in enumerate(reasons)]
    for receipt in [*receipts, table.receipt(5)]:
        table.submit(receipt)
    assert table.counted() == [0, 1, 2, 3, 4]
    (excluded,) = table.commits[-1].body.excluded
    assert (excluded.reason, excluded.detail) == (pb.REASON_NON_FINITE, "2 of 5 voters: non-finite")


def test_norm_codes():
    assert [norms.norm_of(code) for code in (0, 112, 128, 136, 144)] == [0.0, 0.25, 1.0, 2.0, 4.0]
    assert [norms.norm_code(norm) for norm in (0.0, -1.0, 1e-30, 0.25, 1.0, 4.0, 1e30)] == [0, 0, 1, 112, 128, 144, 255]
    assert [norms.matches(code, 1.0) for code in (126, 127, 128, 129, 130)] == [False, True, True, True, False]
    assert [norms.lower_median(codes) for codes in ([], [5], [7, 5], [9, 1, 5], [4, 3, 2, 1])] == [0, 5, 5, 5, 2]
    assert [norms.ratio_codes(ratio) for ratio in (1.0, 2.0, 4.0, 0.5)] == [0, 8, 16, -8]
    assert [norms.clip_factor(excess) for excess in (0, 8, 16)] == [1.0, 0.5, 0.25]
    assert [norms.clip_factor(excess) for excess in range(1, 24)] == pytest.approx(
        [2 ** (-n / 8) for n in range(1, 24)], rel=5e-3
    )
