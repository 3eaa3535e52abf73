"""Tests of faults that running code once had: each attack on others stays impossible, live or in a commit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.chain import Closing
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import Status, status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.deadlines import DEADLINE_FLOOR_SECONDS
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, Table, digest, identity, manifest


def forged(table: Table, gathered: StatementPool) -> Statement:
    """Return the commit that a coordinator without the rules would sign."""
    commit = chain.compose(table.run, table.head, gathered, Closing(table.moment.wall_ms, 1, 1, 1))
    return seal(COORDINATOR, pb.KIND_COMMIT, table.run.run_id, commit)


def refused(table: Table, gathered: StatementPool) -> int:
    with pytest.raises(RemoteError) as caught:
        chain.extend(table.run, table.head, forged(table, gathered).envelope)
    return caught.value.reason


def voted(table: Table) -> StatementPool:
    """Return a round just before it closes."""
    table.contribute()
    for receipt in [table.receipt(0), table.receipt(1)]:
        table.submit(receipt)
    return table.state.gathered


# 1. Names are bound to keys.


def test_nobody_speaks_in_another_s_name():
    table = Table(manifest()).genesis()
    layout = table.layout(5, [(0, 0, 1, 0), (5, 1, 1, 0)])  # names number 0, which never agreed
    table.submit(layout)
    table.submit(table.claim(5, cluster=layout.digest))
    table.submit(table.claim(6, cluster=layout.digest))  # agrees to a layout that does not name it
    table.train(1)
    assert table.roster() == [0, 1, 2]
    assert table.counted() == [0, 1, 2]
    table.verify()


def test_one_peer_has_one_slot():
    run = manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(4)]})
    table = Table(run).genesis()
    words = table.contribution(1)
    stolen = seal(identity(0), pb.KIND_CONTRIBUTION, run.run_id, words.body)  # the words of number 1, signed by number 0
    table.submit(stolen)
    table.submit(table.contribution(0))
    table.contribute([1, 2]).vote([1, 2])
    assert table.counted() == [1, 2]
    assert table.why(0) == pb.REASON_EQUIVOCATION
    table.verify()


# 2. An old departure has no effect, whoever sends it.


def test_a_leave_of_an_earlier_round_evicts_nobody():
    table = Table(manifest()).genesis()
    leave = table.leave(2)
    table.train(1)
    assert table.submit(leave).reason == pb.REASON_STALE_ROUND
    assert refused(table, replace(voted(table), leaves={identity(2).peer: (leave,)})) == pb.REASON_STALE_ROUND
    table.submit(table.receipt(2))
    assert table.roster() == [0, 1, 2]


def test_who_left_and_came_back_stays():
    table = Table(manifest()).genesis()
    leave, claim = table.leave(2), table.claim(2)
    table.submit(claim)
    assert table.submit(leave).outcome is Outcome.ACCEPT
    table.train(1)
    assert table.roster() == [0, 1, 2], "its claim is the newer word"
    table.submit(table.claim(2))
    table.submit(table.leave(2))
    table.train(1)
    assert table.roster() == [0, 1]
    table.verify()


# 4. A commit is judged by the same rules as what arrives.


def test_a_commit_seats_nobody_whom_the_run_does_not_admit():
    table = Table(manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(3)]})).genesis()
    stranger = table.claim(7)
    assert refused(table, replace(voted(table), claims={stranger.peer: (stranger,)})) == pb.REASON_NOT_ADMITTED


def test_a_commit_holds_no_claim_of_another_moment():
    table = Table(manifest()).genesis()
    for wrong in (table.claim(5, round=2), table.claim(5, head=digest("elsewhere"))):
        gathered = replace(voted(Table(manifest()).genesis()), claims={wrong.peer: (wrong,)})
        assert refused(Table(manifest()).genesis(), gathered) == pb.REASON_STALE_ROUND


def test_a_commit_seats_nobody_with_a_state_of_its_own():
    table = Table(manifest()).genesis()
    claim = table.claim(5, state=digest("mine"))
    assert refused(table, replace(voted(table), claims={claim.peer: (claim,)})) == pb.REASON_WRONG_BASE


def test_a_stranger_s_report_sets_no_loss():
    table = Table(manifest()).genesis()
    report = table.report(7, evaluated=True, evaluation_loss=0.1)
    assert table.submit(report).reason == pb.REASON_NOT_ON_ROSTER
    gathered = replace(voted(table), reports={(report.peer, False): (report,)})
    assert refused(table, gathered) == pb.REASON_NOT_ON_ROSTER


def test_two_receipts_of_one_voter_cannot_be_chosen_between():
    table = Table(manifest()).genesis()
    gathered = voted(table)
    first, second = gathered.receipts[identity(0).peer][0], table.receipt(0, {1: pb.REASON_NON_FINITE})
    both = tuple(sorted((first, second), key=lambda each: each.digest))
    honest = forged(table, replace(gathered, receipts={**gathered.receipts, first.peer: both}))
    _, commit = chain.extend(table.run, table.head, honest.envelope)
    assert identity(0).peer not in {item.cluster for item in chain.taken(commit.body)}
    repeated = forged(table, replace(gathered, receipts={**gathered.receipts, first.peer: (first, first)}))
    with pytest.raises(RemoteError):
        chain.extend(table.run, table.head, repeated.envelope)


def test_a_ballot_is_the_coordinator_s():
    table = Table(manifest()).genesis()
    table.contribute([0, 1])
    alone = sorted(slot[0].digest for slot in table.state.gathered.contributions.values())
    body = pb.Ballot(round=1, head=table.head.digest, contributions=alone, seconds=5)
    ballot = seal(identity(1), pb.KIND_BALLOT, table.run.run_id, body)
    judgement, gathered = rules.judge(table.run, table.head, table.state.gathered, ballot)
    assert judgement.reason == pb.REASON_BAD_SIGNATURE
    assert gathered is table.state.gathered
    table.feed(round_machine.Received(ballot))
    assert table.state.gathered.ballot is None


def test_a_ballot_leaves_nobody_out_and_lists_nobody_twice():
    table = Table(manifest()).genesis()
    table.submit(table.contribution(0))
    table.submit(table.contribution(0, loss=1.0))
    table.contribute([1])
    everything = [s.digest for slot in table.state.gathered.contributions.values() for s in slot]
    alone = [slot[0].digest for slot in table.state.gathered.contributions.values() if len(slot) == 1]
    for wrong in ([], everything, [*alone, digest("nobody's")]):
        body = pb.Ballot(round=1, head=table.head.digest, contributions=sorted(wrong), seconds=5)
        ballot = seal(COORDINATOR, pb.KIND_BALLOT, table.run.run_id, body)
        judgement, _ = rules.judge(table.run, table.head, table.state.gathered, ballot)
        assert judgement.reason == pb.REASON_MALFORMED
    late = pb.Ballot(round=1, head=table.head.digest, contributions=alone, seconds=1e9)
    ballot = seal(COORDINATOR, pb.KIND_BALLOT, table.run.run_id, late)
    assert rules.judge(table.run, table.head, table.state.gathered, ballot)[0].reason == pb.REASON_MALFORMED


@pytest.mark.parametrize(
    "change",
    [
        lambda body: setattr(body, "accepted", b"\x07"),  # its own bit
        lambda body: setattr(body, "accepted", b"\xff"),  # bits about nothing
        lambda body: setattr(body, "accepted", b""),
        lambda body: setattr(body, "accepted", body.accepted + b"\0"),
        lambda body: body.findings.add(index=7, reason=pb.REASON_NON_FINITE),
        lambda body: body.MergeFrom(pb.Receipt(accepted=b"\x02", findings=[pb.Finding(index=1, reason=pb.REASON_NON_FINITE)])),
        lambda body: body.scored.append(1) or body.score.append(-5),  # a score of what it refuses
        lambda body: body.scored.append(7) or body.score.append(-5),
        lambda body: body.findings.add(index=1, reason=pb.REASON_NON_FINITE, stage=99),
    ],
)
def test_receipts_that_contradict_themselves(change):
    table = Table(manifest()).genesis().contribute()
    receipt = table.receipt(0, {1: pb.REASON_NON_FINITE, 2: pb.REASON_NON_FINITE})
    del receipt.body.findings[:]
    change(receipt.body)
    spoiled = seal(identity(0), pb.KIND_RECEIPT, table.run.run_id, receipt.body)
    assert table.submit(spoiled).outcome is Outcome.REJECT
    assert not table.state.gathered.receipts


# 5. No peer extends the deadlines of others.


def test_who_never_contributes_stretches_no_round():
    table = Table(manifest(rounds={"deadline_seconds": 3600, "start_clusters": 4, "count": 9})).genesis(range(4))
    for _ in range(2):
        opened = table.now
        table.now += 21
        table.contribute(range(3))
        while (table.head.round and not table.ballots) or table.ballots[-1].body.round != table.head.round:
            table.wait(1)
        table.vote(range(3))
        assert table.now - opened <= 43
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_who_contributes_and_never_votes_stretches_no_round_and_is_not_counted():
    table = Table(manifest(rounds={"vote_seconds": 600, "count": 20})).genesis().train(5)
    for number in range(3):
        table.submit(table.contribution(number))
    opened = table.now
    receipts = [table.receipt(0), table.receipt(1)]
    for receipt in receipts:
        table.submit(receipt)
    while table.head.round == 6:
        table.wait(1)
    assert table.now - opened <= DEADLINE_FLOOR_SECONDS + 1
    assert table.counted() == [0, 1]


def test_a_round_that_slows_down_for_all_leaves_nobody_behind():
    """Check a machine under load: rounds of 4 s become rounds of 30 s."""
    table = Table(manifest(rounds={"count": 20})).genesis()
    for seconds in (4, 4, 4, 4, 30, 30, 30):
        table.now += seconds
        for number in range(3):
            table.wait(0.5)
            table.submit(table.contribution(number))
        table.vote()
        assert table.counted() == [0, 1, 2]
    table.verify()


# 6. A run whose roster is absent comes back.


def test_all_leave_and_come_back():
    table = Table(manifest()).genesis().train(1)
    for number in range(3):
        table.submit(table.leave(number))
        table.absent(number)
    table.submit(table.claim(7, state=digest("a stranger's own")))
    table.submit(table.claim(8, state=digest("a stranger's own")))
    table.absent(7, 8)
    table.wait(table.run.rounds.liveness_seconds)
    assert table.head.round == 2, "strangers alone bring no model"
    table.present(0)
    table.submit(table.claim(0))
    table.present(7, 8)
    assert table.head.round == 2, "nor with one who knows better"
    table.submit(table.claim(9))
    assert table.head.round == 3, "but whoever holds the run's state is welcome"
    assert not table.commits[-1].body.counted
    assert table.roster() == [0, 9]
    table.train(1, [0, 9])
    assert table.counted() == [0, 9]
    table.verify()


def test_a_cluster_that_missed_commits_rests_and_may_come_back():
    table = Table(manifest(rounds={"count": 30})).genesis()
    table.absent(2)
    table.train(2, [0, 1])
    assert table.roster() == [0, 1]
    table.present(2)
    until = table.head.resting[identity(2).peer].until
    while table.head.round < until:
        table.submit(table.claim(2))
        table.train(1, [0, 1])
        assert table.roster() == [0, 1]
    table.submit(table.claim(2))
    table.train(1, [0, 1])
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_who_rests_is_let_in_where_the_run_would_stand_still_without_it():
    table = Table(manifest(rounds={"count": 30})).genesis()
    table.absent(2)
    table.train(2, [0, 1])
    table.absent(1)
    table.wait(table.run.rounds.liveness_seconds)
    table.present(2)
    table.submit(table.claim(2))
    assert table.roster() == [0, 1, 2]
    table.train(1, [0, 2])
    assert table.counted() == [0, 2]
    table.verify()


# 7 and 9. A node repeats a statement until it is received, and shows what it receives.


def machine(run=None) -> tuple[Table, MemberState]:
    table = Table(run or manifest()).genesis()
    return table, member.start(table.run, identity(0).peer, table.head)


def sign(table: Table, state: MemberState, effects: list[member_io.Effect]) -> MemberState:
    for effect in effects:
        if isinstance(effect, member_io.Sign):
            statement = seal(identity(0), effect.kind, table.run.run_id, effect.body)
            state, more = member.step(state, member_io.Signed(statement), table.now)
            state = sign(table, state, more)
    return state


def test_a_statement_is_offered_until_it_is_held_and_again_after_every_connection():
    table, state = machine()
    state = sign(table, *member.step(state, member_io.StateReady(1, table.state_root(), 2.5), table.now))
    (report,) = member.offers(state)
    assert report.body.evaluation_loss == 2.5
    state, _ = member.step(state, member_io.Tick(), table.now)
    assert member.offers(state) == [report]
    held = member_io.Answered(report, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, "")
    state, _ = member.step(state, held, table.now)
    assert not member.offers(state)
    state, _ = member.step(state, member_io.Connected(), table.now)
    assert member.offers(state) == [report], "a coordinator that came back may have lost it"
    stale = member_io.Answered(report, Outcome.IGNORE, pb.REASON_STALE_ROUND, "not now")
    state, _ = member.step(state, stale, table.now)
    assert member.offers(state) == [report]
    state, _ = member.step(state, member_io.Answered(report, Outcome.REJECT, pb.REASON_WRONG_BASE, "no"), table.now)
    assert not member.offers(state), "it was refused for good"


def test_a_refusal_stays_in_sight():
    table = Table(manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(1, 4)]}))
    table.genesis(range(1, 4))
    state = member.start(table.run, identity(0).peer, table.head)
    state = sign(table, *member.step(state, member_io.StateReady(1, table.state_root(), None), table.now))
    (claim,) = member.offers(state)
    judgement = table.submit(claim)
    state, _ = member.step(state, member_io.Answered(claim, *judgement[:3]), table.now)
    for told in (Status("training", "on the roster"), Status("waiting", "commit 1 is on its way")):
        assert status(state, told).name == "refused"
        assert "allow-list" in status(state, told).why


def test_everybody_may_leave_in_the_last_round_and_come_back_to_close_the_run():
    """Reproduce a schedule of the explorer: the closing round had an empty roster, and takes no claims."""
    table = Table(manifest(rounds={"count": 1})).genesis().contribute().vote([0, 1])
    for number in range(3):
        table.submit(table.leave(number))
    assert table.head.trained == 1
    table.absent(0, 1, 2)
    table.present(0, 1, 2)
    for number in range(3):
        table.submit(table.report(number))
    assert table.head.finished
    table.verify()


def test_one_report_does_not_make_the_state_of_a_run_whose_clusters_are_heard():
    """Reproduce a schedule of the explorer: a liar reported while the others were cut off, and an empty commit believed it
    for ever."""
    table = Table(manifest(rounds={"count": 30})).genesis().train(1)
    table.submit(table.report(1, state=digest("false"), replayed=True))
    table.contribute().vote(reject=dict.fromkeys(range(3), pb.REASON_UNAVAILABLE))
    assert not table.commits[-1].body.counted
    assert not table.head.state
    table.train(1)
    assert table.counted() == [0, 1, 2]
    table.verify()


# 11. Unknown peers fill no commit.


@pytest.mark.parametrize("boxes", [1, 2])
def test_as_many_as_a_run_waits_for_can_begin_it(boxes: int):
    """Reproduce a fault: a run that waits for more than 256 clusters, or 32 of several hosts, never began. Before its
    genesis all peers are unknown."""
    count = limits.CLAIMS + 1 if boxes == 1 else limits.FIRST_LAYOUTS
    table = Table(manifest(rounds={"start_clusters": count, "min_clusters": 2}))
    for lead in range(0, boxes * count, boxes):
        if boxes == 1:
            assert table.submit(table.claim(lead)) == rules.ACCEPT
            continue
        layout = table.layout(lead, [(lead, 0, 1, 0), (lead + 1, 1, table.run.model.stages - 1, 0)])
        assert table.submit(layout) == rules.ACCEPT
        for box in (lead, lead + 1):
            assert table.submit(table.claim(box, cluster=layout.digest)) == rules.ACCEPT
    assert table.head.round == 1
    assert len(table.head.roster) == count
    table.verify()


def test_a_thousand_strangers_fill_no_commit():
    table = Table(manifest()).genesis()
    for number in range(10, 1000):
        table.submit(table.claim(number))
    assert len(table.state.gathered.claims) <= limits.CLAIMS
    table.train(1)
    assert len(table.commits[-1].envelope.body) < limits.COMMIT_BYTES // 8
    assert len(table.head.roster) <= 3 + table.run.rounds.min_clusters
    table.verify()


def test_strangers_who_claim_and_leave_and_are_pushed_out_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    """Check that no commit contains the departure of a peer whose claim it does not contain."""
    table = Table(manifest()).genesis()
    monkeypatch.setattr(limits, "CLAIMS", 3)
    for number in range(10, 40):
        table.submit(table.claim(number))
        table.submit(table.leave(number))
    gathered = table.state.gathered
    assert len(gathered.claims) == 3
    assert set(gathered.leaves) <= set(gathered.claims)
    table.train(1)
    table.verify()


def test_strangers_crowd_nobody_out_who_could_wake_the_run(monkeypatch: pytest.MonkeyPatch):
    """Reproduce a schedule of the explorer: all had left, and unknown peers' claims filled the space of an idle round for
    ever."""
    monkeypatch.setattr(limits, "CLAIMS", 3)
    table = Table(manifest(rounds={"count": 30})).genesis().train(1)
    for number in range(3):
        table.submit(table.leave(number))
    table.train(1)
    assert table.roster() == []
    for number in range(10, 60):
        table.submit(table.claim(number, state=digest("mine")))
    assert len(table.state.gathered.claims) == 3
    for number in range(3):
        table.present(number)
        assert table.submit(table.claim(number)).outcome is not Outcome.IGNORE
    table.wait(10_000)
    assert table.roster() == [0, 1, 2], "they had earned their standing: they take no newcomer's place"
    table.verify()


def test_strangers_who_are_gone_keep_no_run_from_beginning(monkeypatch: pytest.MonkeyPatch):
    """Check it before the genesis commit, when all peers are unknown, and no round closes that would forget them."""
    monkeypatch.setattr(limits, "CLUSTERS", 3)
    table = Table(manifest(rounds={"count": 30}))
    for number in range(10, 60):
        table.submit(table.claim(number, state=digest("mine")))
        if number % 2:
            table.submit(table.leave(number, serial=2))
        table.absent(number)
    for number in range(3):
        assert table.submit(table.claim(number)).outcome is Outcome.ACCEPT
    assert table.head.round == 1
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_strangers_who_are_gone_make_room_in_a_round_that_sleeps(monkeypatch: pytest.MonkeyPatch):
    """Check that later peers, which the chain does not know, are accepted while they are live."""
    monkeypatch.setattr(limits, "CLAIMS", 3)
    table = Table(manifest(rounds={"count": 30})).genesis().train(1)
    table.absent(1, 2)
    for number in range(10, 60):
        table.submit(table.claim(number, state=digest("mine")))
        table.absent(number)
    state = table.submit(table.claim(3))
    assert state.outcome is not Outcome.IGNORE
    assert identity(3).peer in table.state.gathered.claims
    table.verify()


def test_layouts_of_strangers_who_are_gone_make_room(monkeypatch: pytest.MonkeyPatch):
    """Check layouts without a claim: a signer of enough of them has the smallest hashes."""
    monkeypatch.setattr(limits, "FIRST_LAYOUTS", 3)
    table = Table(manifest(rounds={"count": 30}))
    for number in range(10, 60):
        table.submit(table.layout(number, [(number, 0, 2, 0)]))
    hosts = {lead: [(lead, 0, 1, 0), (lead + 3, 1, 1, 0)] for lead in range(3)}
    for lead in hosts:
        layout = table.layout(lead, hosts[lead])
        assert table.submit(layout).outcome is Outcome.ACCEPT
        for number, *_ in hosts[lead]:
            table.submit(table.claim(number, cluster=layout.digest))
    assert table.roster() == [0, 1, 2]
    table.verify()


def test_who_is_refused_leaves_no_trace_but_the_refusal():
    """Check the same for a peer that claimed, and replaced others."""
    run = manifest(admission={"policy": "allow-list", "allow": [identity(n).peer for n in range(3)]})
    table = Table(run).genesis()
    for number in range(10, 20):
        assert table.submit(table.claim(number)).outcome is Outcome.REJECT
        table.absent(number)
    assert table.state.absent == frozenset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CLAIMS", 3)
        table = Table(manifest()).genesis()
        for number in range(10, 60):
            table.submit(table.claim(number))
            table.absent(number)
        assert len(table.state.absent) <= 3


@pytest.mark.parametrize("stranger", range(10, 16))
def test_a_claim_that_came_before_the_state_was_known_stands_whatever_it_says(stranger: int):
    """Check both orders of such claims and the report that decides the state: the commit contains the claim in both."""
    table = Table(manifest(rounds={"count": 30})).genesis().train(1)
    for number in range(3):
        table.submit(table.leave(number))
    table.absent(0, 1, 2)
    table.wait(10_000)
    table.submit(table.claim(stranger, state=digest("mine")))
    for number in (0, 1, 2):
        table.present(number)
        table.submit(table.claim(number))
    table.wait(10_000)
    assert table.head.round > 2
    table.verify()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_was_gathered_in_any_order_stands_in_a_commit(data):
    """Check the verifying fold, which takes claims first and votes last; live statements have no order."""
    with pytest.MonkeyPatch.context() as patch:
        table = Table(manifest(rounds={"count": 30})).genesis().train(1)
        patch.setattr(limits, "CLAIMS", 3)
        before = table.head.round

        def said(number: int) -> Statement:
            state = data.draw(st.sampled_from([table.state_root(), table.state_root(), digest("mine")]))
            draw = data.draw(st.sampled_from(["claim", "claim", "leave", "report", "contribution"]))
            changes = {} if draw == "leave" else {"base_state" if draw == "contribution" else "state": state}
            return getattr(table, draw)(number, **changes)

        for number in data.draw(st.lists(st.integers(0, 7), max_size=14)):
            table.submit(said(number))
            if table.head.round != before:
                break
        table.absent(*data.draw(st.sets(st.integers(0, 7))))
        for _ in range(5):
            table.wait(10_000)
        table.verify()


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(8)), st.integers(2, 6))
def test_what_is_gathered_is_the_same_in_any_order(order, cap):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CLAIMS", cap)
        table = Table(manifest()).genesis()
        statements = [table.claim(number) for number in range(10, 16)]
        statements += [table.contribution(0), table.contribution(0, loss=1.0)]
        gathered = StatementPool()
        for index in order:
            _, gathered = rules.judge(table.run, table.head, gathered, statements[index])
        expected = StatementPool()
        for statement in statements:
            _, expected = rules.judge(table.run, table.head, expected, statement)
        assert gathered == expected
        assert len(gathered.claims) == min(cap, 6)


def test_an_initial_head_has_no_past():
    head = initial_head(COORDINATOR.peer)
    assert (head.round, head.digest, head.trained, head.coordinator) == (0, b"", 0, COORDINATOR.peer)


def test_who_asks_for_a_seat_and_is_gone_takes_nobody_s_place():
    """Reproduce a schedule of the explorer: absent claimants with small hashes blocked a live one, and the run made no
    progress."""
    table = Table(manifest(rounds={"count": 30})).genesis().train(1)
    for number in range(3):
        table.submit(table.report(number))
    for number in range(10, 30):
        table.submit(table.claim(number))
        table.absent(number)
    table.absent(0, 1)
    table.wait(table.run.rounds.liveness_seconds)
    table.submit(table.claim(9))
    assert table.roster() == [0, 1, 2, 9]
    table.train(1, [2, 9])
    assert table.counted() == [2, 9]
    table.verify()
