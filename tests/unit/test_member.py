"""Tests of the node's machine: its statements, and their times."""

from dataclasses import replace

import numpy as np
import pytest

from dilocox.protocol import events, limits
from dilocox.protocol.checks import bias_rules, score_rules
from dilocox.protocol.checks.bias import memory_of
from dilocox.protocol.checks.bias_rules import Bias
from dilocox.protocol.checks.score_rules import SAMPLES, Score
from dilocox.protocol.checks.scores import Scored
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.head import HostRange, resting_on
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState, OpenRound
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, Table, digest, identity, manifest
from tests.sentences import Message

ACCEPTED: member_io.Verdict = (pb.REASON_UNSPECIFIED, 0)


class Node:
    """Machine of peer 0 beside the coordinator's, whose messages it receives."""

    def __init__(self, voters: int = 0, clusters: int = 3, **rounds: float) -> None:
        self.table = Table(manifest(rounds=rounds, scoring={"voters": voters})).genesis(range(clusters))
        self.state = member.start(self.table.run, identity(0).peer, self.table.head)
        self.effects: list[member_io.Effect] = []
        self.feed(member_io.StateReady(1, self.table.state_root(), None))

    def feed(self, event: member_io.Input) -> list[member_io.Effect]:
        self.state, effects = member.step(self.state, event, self.table.now)
        for effect in list(effects):
            if isinstance(effect, member_io.Sign):
                statement = seal(identity(0), effect.kind, self.table.run.run_id, effect.body)
                effects += self.feed(member_io.Signed(statement))
        self.effects = effects
        return effects

    def see(self, *statements: Statement) -> "Node":
        for statement in statements:
            self.feed(member_io.Seen(statement))
        return self

    def said(self, kind: pb.Kind) -> Statement | None:
        return self.state.open.own.get(kind)

    def vote(self) -> "Node":
        """Advance to the ballot, with contributions of all clusters, this one included."""
        mine = self.table.contribution(0)
        self.feed(member_io.Signed(mine))
        self.table.submit(mine)
        others = [self.table.contribution(number) for number in (1, 2)]
        for statement in others:
            self.table.submit(statement)
        self.digests = [statement.digest for statement in others]
        return self.see(*others, self.table.ballots[-1])


def test_who_voted_on_what():
    node = Node(vote_seconds=100).vote()
    assert {effect.contribution.peer for effect in node.effects if isinstance(effect, member_io.Judge)} == set()
    node.feed(member_io.Judged(node.digests[0], ACCEPTED))
    assert node.said(pb.KIND_RECEIPT) is None, "one is not judged yet"
    node.feed(member_io.Judged(node.digests[1], (pb.REASON_NON_FINITE, 1)))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.open.ballot.body.contributions)  # type: ignore[union-attr]
    accepted = [bool(int.from_bytes(receipt.body.accepted, "little") >> listed.index(d) & 1) for d in node.digests]
    assert accepted == [True, False]
    assert [(listed[f.index], f.reason, f.stage) for f in receipt.body.findings] == [(node.digests[1], pb.REASON_NON_FINITE, 1)]
    assert node.table.submit(receipt) == rules.ACCEPT


def test_what_was_not_fetched_in_time_is_voted_unavailable():
    node = Node(vote_seconds=100).vote()
    node.feed(member_io.Judged(node.digests[0], ACCEPTED))
    assert member.next_deadline(node.state) == node.table.now + 75
    node.table.now += 74
    node.feed(member_io.Tick())
    assert node.said(pb.KIND_RECEIPT) is None
    node.table.now += 1
    node.feed(member_io.Tick())
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.open.ballot.body.contributions)  # type: ignore[union-attr]
    missing = listed.index(node.digests[1])
    assert [(f.index, f.reason) for f in receipt.body.findings] == [(missing, pb.REASON_UNAVAILABLE)]
    assert not int.from_bytes(receipt.body.accepted, "little") >> missing & 1
    assert member.next_deadline(node.state) is None


@pytest.mark.parametrize("same", [True, False])
def test_who_voted_and_starts_again_says_the_same(same: bool):
    """Reproduce a fault: it judged again, and another vote on one ballot is an equivocation. `same`: the ballot is the one
    of its vote."""
    node = Node(vote_seconds=100).vote()
    for verdict in node.digests:
        node.feed(member_io.Judged(verdict, ACCEPTED))
    receipt, seen, kept = node.said(pb.KIND_RECEIPT), node.state.open.seen.values(), node.state.open.own
    assert receipt is not None
    assert node.table.submit(receipt) == rules.ACCEPT
    ballot = node.table.ballots[-1]
    if not same:
        body = pb.Ballot.FromString(ballot.envelope.body)
        body.seconds += 1
        ballot = seal(COORDINATOR, pb.KIND_BALLOT, node.table.run.run_id, body)
    node.state = member.start(node.table.run, identity(0).peer, node.table.head)
    for _, statement in sorted(kept.items()):
        node.feed(member_io.Signed(statement))
    node.feed(member_io.StateReady(1, node.table.state_root(), None))
    node.see(*seen, ballot)
    node.table.now += 100
    node.feed(member_io.Tick())
    again = node.said(pb.KIND_RECEIPT)
    assert again is not None
    assert (again == receipt) is same
    assert again.body.ballot == ballot.signing


def test_what_is_well_made_is_scored_once_the_ballot_is_here_and_voted_on_then():
    node = Node(voters=8, vote_seconds=100).vote()
    assert not [effect for effect in node.effects if isinstance(effect, member_io.Measure)], "nothing is judged yet"
    (asked,) = [e for e in node.feed(member_io.Judged(node.digests[0], ACCEPTED)) if isinstance(e, member_io.Measure)]
    assert asked.contribution.digest == node.digests[0]
    assert asked.own.peer == identity(0).peer
    lease = node.table.head.ledger.leases[identity(0).peer]
    assert len(asked.positions) == SAMPLES
    assert all(any(start <= position < end for start, end in lease.spans) for position in asked.positions)
    effects = node.feed(member_io.Judged(node.digests[1], (pb.REASON_NON_FINITE, 1)))
    assert not [e for e in effects if isinstance(e, member_io.Measure)], (
        "what is refused anyway is not scored, nor anything twice"
    )
    assert node.said(pb.KIND_RECEIPT) is None, "one is not scored yet"
    node.feed(Scored(node.digests[0], Score(2.0, 2.5, -0.25)))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.open.ballot.body.contributions)  # type: ignore[union-attr]
    found = {(listed[f.index], f.reason, f.score) for f in receipt.body.findings}
    assert found == {(node.digests[0], pb.REASON_HARMS, -512), (node.digests[1], pb.REASON_NON_FINITE, 0)}
    assert not int.from_bytes(receipt.body.accepted, "little")
    assert node.table.submit(receipt) == rules.ACCEPT


def test_the_ballots_order_is_nobodys_order_of_scoring():
    node = Node(clusters=8, voters=8, vote_seconds=100, start_clusters=8)
    mine, *others = [node.table.contribution(number) for number in range(8)]
    node.feed(member_io.Signed(mine))
    for statement in (mine, *others):
        node.table.submit(statement)
    node.see(*others)
    for statement in others:
        node.feed(member_io.Judged(statement.digest, ACCEPTED))
    ballot = node.table.ballots[-1]
    asked = [e.contribution.peer for e in node.feed(member_io.Seen(ballot)) if isinstance(e, member_io.Measure)]
    assert asked == sorted((s.peer for s in others), key=lambda peer: score_rules.turn(ballot, identity(0).peer, peer))
    assert asked != [s.peer for s in sorted(others, key=lambda s: s.digest)]


def test_what_helps_is_accepted_and_its_score_stands_in_the_receipt():
    node = Node(voters=8, vote_seconds=100).vote()
    for digest_, gain in zip(node.digests, (0.25, 0.125), strict=True):
        node.feed(member_io.Judged(digest_, ACCEPTED))
        node.feed(Scored(digest_, Score(2.0, 2.0 - gain, 0.1)))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.open.ballot.body.contributions)  # type: ignore[union-attr]
    told = {listed[index]: score for index, score in zip(receipt.body.scored, receipt.body.score, strict=True)}
    assert told == {node.digests[0]: 256, node.digests[1]: 128}
    assert not receipt.body.findings
    assert node.table.submit(receipt) == rules.ACCEPT


def test_who_pulls_steadily_is_refused_and_what_a_round_showed_is_remembered():
    node = Node(voters=8, vote_seconds=100).vote()
    axes = np.eye(bias_rules.SKETCH)
    peers = [identity(number).peer for number in range(3)]
    weak, strong = (Bias(length * axes[0], bias_rules.LEAST_ROUNDS - 1) for length in (1.0, 9.0))
    known = bias_rules.Memory({peers[0]: weak, peers[1]: weak, peers[2]: strong}, cut=dict.fromkeys(peers, 0.0))
    node.state = replace(node.state, checks={**node.state.checks, "bias": known})
    for number, digest_ in enumerate(node.digests, 1):
        node.feed(member_io.Judged(digest_, ACCEPTED))
        node.feed(Scored(digest_, Score(2.0, 1.0, 0.5, tuple(axes[number]), tuple(axes[0]))))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.open.ballot.body.contributions)  # type: ignore[union-attr]
    assert [(listed[f.index], f.reason) for f in receipt.body.findings] == [(node.digests[1], pb.REASON_HARMS)]
    for statement in [receipt, node.table.receipt(1), node.table.receipt(2)]:
        node.table.submit(statement)
    node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    memory = memory_of(node.state)
    assert {peer: each.rounds for peer, each in memory.authors.items()} == dict.fromkeys(peers, bias_rules.LEAST_ROUNDS)
    assert set(memory.last) == set(peers)
    assert memory.cut.keys() == {item.cluster for item in chain.taken(node.table.commits[-1].body)}


def test_what_was_not_scored_in_time_is_not_held_against_it():
    node = Node(voters=8, vote_seconds=100).vote()
    for digest_ in node.digests:
        node.feed(member_io.Judged(digest_, ACCEPTED))
    assert node.said(pb.KIND_RECEIPT) is None
    node.table.now += 75
    node.feed(member_io.Tick())
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    assert not receipt.body.findings
    assert not receipt.body.scored


def test_workers_that_start_again_are_asked_again():
    node = Node(voters=8, vote_seconds=100).vote()
    first = [e for e in node.feed(member_io.Judged(node.digests[0], ACCEPTED)) if isinstance(e, member_io.Measure)]
    again = [e for e in node.feed(member_io.StateReady(1, node.table.state_root(), None)) if isinstance(e, member_io.Measure)]
    assert first
    assert again == first


def test_no_run_scores_that_does_not_ask_for_it():
    node = Node(vote_seconds=100).vote()
    effects = node.feed(member_io.Judged(node.digests[0], ACCEPTED))
    assert not [e for e in effects if isinstance(e, member_io.Measure)]


def test_a_lead_whose_box_is_away_does_not_vote_against_what_that_could_not_look_at():
    node = Node(vote_seconds=100).vote()
    node.feed(member_io.Judged(node.digests[0], ACCEPTED))
    node.feed(member_io.Whole(False))
    assert member.next_deadline(node.state) is None
    node.table.now += 80
    node.feed(member_io.Tick())
    assert node.said(pb.KIND_RECEIPT) is None
    node.feed(member_io.Whole(True))
    assert node.said(pb.KIND_RECEIPT) is None, "the box that is back has time to look"
    assert member.next_deadline(node.state) == node.table.now + 25
    node.feed(member_io.Judged(node.digests[1], ACCEPTED))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    assert not receipt.body.findings


def test_only_the_coordinator_s_ballot_and_the_roster_s_contributions_of_this_round_are_seen():
    node = Node()
    body = pb.Ballot(round=1, head=node.table.head.digest, contributions=[], seconds=5)
    node.see(seal(identity(1), pb.KIND_BALLOT, node.table.run.run_id, body))
    assert node.state.open.ballot is None
    node.see(node.table.contribution(1, round=2), node.table.contribution(1, head=digest("fork")))
    assert not node.state.open.seen
    node.see(seal(identity(9), pb.KIND_CONTRIBUTION, node.table.run.run_id, node.table.contribution(1).body))
    assert not node.state.open.seen
    node.see(node.table.contribution(1))
    assert len(node.state.open.seen) == 1
    node.see(seal(COORDINATOR, pb.KIND_BALLOT, node.table.run.run_id, body))
    assert node.state.open.ballot is not None


def test_nothing_is_judged_twice_or_before_the_own_state_is_known():
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(0).peer, table.head)
    state, effects = member.step(state, member_io.Seen(table.contribution(1)), 0)
    assert not [e for e in effects if isinstance(e, member_io.Judge)]
    state, effects = member.step(state, member_io.StateReady(1, table.state_root(), None), 0)
    assert len([e for e in effects if isinstance(e, member_io.Judge)]) == 1
    state, effects = member.step(state, member_io.Tick(), 0)
    assert not [e for e in effects if isinstance(e, member_io.Judge)]


def phase(node: Node, **changes: object) -> member_io.PhaseEnded:
    body = node.table.contribution(0).body
    return member_io.PhaseEnded(
        **{
            "round": 1,
            "base": body.base_state,
            "inner_steps": body.inner_steps,
            "tokens": body.tokens,
            "loss": body.loss,
            "samples_read": body.samples_read,
            "leaves": body.leaves,
            "size": body.size,
            "norm": body.norm,
            "effective_rank": body.effective_rank,
            "error": body.error,
            **changes,
        }
    )


def test_a_phase_is_contributed_once_and_only_in_its_round():
    node = Node()
    node.feed(phase(node, round=2))
    assert node.said(pb.KIND_CONTRIBUTION) is None
    node.feed(phase(node))
    first = node.said(pb.KIND_CONTRIBUTION)
    assert first is not None
    assert node.table.submit(first) == rules.ACCEPT
    assert not [e for e in node.feed(phase(node, loss=1.0)) if isinstance(e, member_io.Sign)]
    assert node.said(pb.KIND_CONTRIBUTION) is first


def test_what_an_earlier_life_announced_is_adopted():
    node = Node()
    earlier = node.table.contribution(0)
    node.see(earlier)
    node.feed(phase(node, loss=1.0))
    assert node.said(pb.KIND_CONTRIBUTION) == earlier


def test_a_commit_ends_what_was_said_in_its_round():
    node = Node().vote()
    before = node.table.head
    for receipt in [node.table.receipt(number) for number in range(3)]:
        node.table.submit(receipt)
    node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    assert node.state.head.round == before.round + 1
    assert node.state.open == OpenRound()
    assert not member.offers(node.state), "the state after it is not there yet"
    node.feed(member_io.StateReady(2, node.table.state_root(), None))
    assert [s.kind for s in member.offers(node.state)] == [pb.KIND_STATE_REPORT]


def test_an_accepted_contribution_that_the_commit_leaves_out_is_told_and_no_other():
    def told(accepted: bool, ballot: bool, listed: bool) -> bool:
        node = Node()
        mine = node.table.contribution(0)
        node.feed(member_io.Signed(mine))
        if accepted:
            node.feed(member_io.Answered(mine, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, ""))
        if ballot:
            node.table.contribute(range(3) if listed else [1, 2])
            if not listed:
                node.table.wait(1e6)
            node.table.vote(range(3) if listed else [1, 2])
        commit = node.table.commits[-1] if ballot else empty_commit(node.table)
        effects = node.feed(member_io.Committed(commit, node.table.head))
        return member_io.Emit(events.LeftOut(1)) in effects

    assert told(accepted=True, ballot=True, listed=False)
    assert not told(accepted=True, ballot=True, listed=True)
    assert not told(accepted=False, ballot=True, listed=False)
    assert not told(accepted=True, ballot=False, listed=False), "a commit without votes takes nobody's"


def empty_commit(table: Table) -> Statement[pb.Commit]:
    return seal(COORDINATOR, pb.KIND_COMMIT, table.run.run_id, pb.Commit(round=1, previous=table.head.digest))


def rotten(round: int) -> member_io.StateReady:
    return member_io.StateReady(round, digest("rotten bit"), None)


def train(node: Node) -> list[member_io.Effect]:
    node.table.train(1)
    return node.feed(member_io.Committed(node.table.commits[-1], node.table.head))


def test_memory_that_contradicts_the_run_is_started_again():
    node = Node()
    train(node)
    node.feed(rotten(2))
    effects = train(node)
    assert [e.round for e in effects if isinstance(e, member_io.Resynchronise)] == [2]
    assert not node.state.roots
    node.feed(member_io.StateReady(3, node.table.state_root(), None))
    report = node.said(pb.KIND_STATE_REPORT)
    assert report is not None
    assert report.body.replayed
    train(node)
    assert not node.state.anew, "ours agreed again"


def test_a_state_that_comes_after_the_commit_that_names_it_is_compared_too():
    node = Node()
    train(node)
    train(node)
    effects = node.feed(rotten(2))
    assert [e.round for e in effects if isinstance(e, member_io.Resynchronise)] == [2]


@pytest.mark.parametrize("late", [False, True])
def test_who_started_again_and_still_contradicts_the_run_halts(late: bool):
    node = Node()
    train(node)
    node.feed(rotten(2))
    train(node)
    if late:
        train(node)
        effects = node.feed(rotten(3))
    else:
        node.feed(rotten(3))
        effects = train(node)
    assert [e for e in effects if isinstance(e, member_io.Halt)]


def test_a_replay_that_confirms_a_wrong_state_proves_only_that_the_state_before_it_was_wrong():
    node = Node()
    train(node)
    node.feed(rotten(2))
    assert [e for e in node.feed(member_io.Differs(2)) if isinstance(e, member_io.Recheck)] == [member_io.Recheck(2)]
    assert not [e for e in node.feed(member_io.Differs(2)) if isinstance(e, member_io.Recheck)], "once is enough"
    node.feed(member_io.Rechecked(2, digest("rotten bit")))
    report = node.said(pb.KIND_STATE_REPORT)
    assert report is not None
    assert report.body.replayed
    assert [e.round for e in train(node) if isinstance(e, member_io.Resynchronise)] == [2]


def test_who_started_again_says_once_what_it_replayed():
    """Reproduce a fault: a second replayed report with other fields was an equivocation, and its report was lost."""
    node = Node()
    train(node)
    node.feed(rotten(2))
    train(node)
    node.feed(member_io.StateReady(3, node.table.state_root(), 1.5))
    said = node.said(pb.KIND_STATE_REPORT)
    assert said is not None
    node.feed(member_io.Differs(3))
    node.feed(member_io.Rechecked(3, node.table.state_root()))
    assert node.said(pb.KIND_STATE_REPORT) is said


def test_verdicts_against_a_wrong_state_are_reached_again():
    node = Node()
    train(node)
    node.feed(member_io.StateReady(2, node.table.state_root(), None))
    other = node.table.contribution(1)
    node.see(other)
    node.feed(member_io.Judged(other.digest, (pb.REASON_WRONG_BASE, 0)))
    node.feed(member_io.Rechecked(2, digest("from disk")))
    assert not node.state.open.verdicts
    effects = node.feed(member_io.StateReady(2, node.table.state_root(), None))
    assert [e.contribution.digest for e in effects if isinstance(e, member_io.Judge)] == [other.digest]


def test_memory_that_a_replay_contradicts_is_started_again():
    node = Node()
    why = Message("protocol/member/member.py", "from disk", "in memory")
    assert node.feed(member_io.Rechecked(1, digest("from disk")))[0] == member_io.Resynchronise(1, why)
    assert node.said(pb.KIND_STATE_REPORT) is None, "what it said of its state was wrong"
    node.feed(member_io.StateReady(1, node.table.state_root(), None))
    assert node.said(pb.KIND_STATE_REPORT).body.replayed  # type: ignore[union-attr]
    assert isinstance(node.feed(member_io.Rechecked(1, digest("from disk")))[0], member_io.Halt)


def test_who_is_not_on_the_roster_claims_and_who_leaves_says_so():
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(5).peer, table.head, serial=3)
    state, effects = member.step(state, member_io.StateReady(1, table.state_root(), None), 0)
    (sign,) = [e for e in effects if isinstance(e, member_io.Sign)]
    assert (sign.kind, sign.body.serial, sign.body.state) == (pb.KIND_CLAIM, 4, table.state_root())
    claim = seal(identity(5), sign.kind, table.run.run_id, sign.body)
    state, _ = member.step(state, member_io.Signed(claim), 0)
    assert table.submit(claim) == rules.ACCEPT
    state, effects = member.step(state, member_io.LeaveRun(), 0)
    (sign,) = [e for e in effects if isinstance(e, member_io.Sign)]
    assert (sign.kind, sign.body.serial) == (pb.KIND_LEAVE, 5)
    assert table.submit(seal(identity(5), sign.kind, table.run.run_id, sign.body)) == rules.ACCEPT


@pytest.mark.parametrize("reason", [pb.REASON_RATE, pb.REASON_NOT_ADMITTED])
def test_a_rate_is_no_final_refusal(reason: pb.Reason):
    node = Node()
    (report,) = member.offers(node.state)
    node.feed(member_io.Answered(report, Outcome.REJECT, reason, "no"))
    assert bool(member.offers(node.state)) == (reason == pb.REASON_RATE)


def offered_after(node: Node, reason: pb.Reason, head: bytes | None) -> bool:
    """Return whether our contribution is offered again after a rejection."""
    mine = node.table.contribution(0)
    node.feed(member_io.Signed(mine))
    node.feed(member_io.Answered(mine, Outcome.REJECT, reason, "no", head))
    return mine in member.offers(node.state)


@pytest.mark.parametrize("reason", [pb.REASON_FUTURE_ROUND, pb.REASON_NOT_ON_ROSTER, pb.REASON_WRONG_HEAD])
def test_rejection_by_a_coordinator_at_another_head_is_not_final(reason: pb.Reason):
    assert offered_after(Node(), reason, digest("an older head"))


def test_rejection_by_a_coordinator_at_our_head_is_final_but_where_time_heals_it():
    node = Node()
    assert not offered_after(node, pb.REASON_WRONG_BASE, node.table.head.digest)
    for reason in (pb.REASON_FUTURE_ROUND, pb.REASON_RATE, pb.REASON_UNAVAILABLE, pb.REASON_NOT_ATTESTED):
        node = Node()
        assert offered_after(node, reason, node.table.head.digest)


def test_connected_forgets_rejections():
    node = Node()
    assert not offered_after(node, pb.REASON_NOT_ON_ROSTER, node.table.head.digest)
    node.feed(member_io.Away())
    node.feed(member_io.Connected())
    assert pb.KIND_CONTRIBUTION in [statement.kind for statement in member.offers(node.state)]


def test_findings_are_bounded():
    run = manifest(rounds={"start_clusters": 30, "vote_seconds": 100})
    table = Table(run).genesis(range(30))
    state = member.start(run, identity(0).peer, table.head)
    state, _ = member.step(state, member_io.StateReady(1, table.state_root(), None), 0)
    mine = table.contribution(0)
    state, _ = member.step(state, member_io.Signed(mine), 0)
    table.submit(mine)
    table.contribute(range(1, 30))
    for slot in table.state.gathered.contributions.values():
        state, _ = member.step(state, member_io.Seen(slot[0]), 0)
    state, _ = member.step(state, member_io.Seen(table.ballots[-1]), 0)
    state, effects = member.step(state, member_io.Tick(), 80)
    (sign,) = [e for e in effects if isinstance(e, member_io.Sign)]
    assert len(sign.body.findings) == limits.FINDINGS
    assert not int.from_bytes(sign.body.accepted, "little")
    assert table.submit(seal(identity(0), pb.KIND_RECEIPT, run.run_id, sign.body)) == rules.ACCEPT


# Each statement whole.


ROOT = digest("the state")


def machine(number: int = 0, table: Table | None = None, serial: int = 0) -> tuple[Table, MemberState]:
    """Return a machine without any input, beside an open round."""
    table = table or Table(manifest()).genesis()
    return table, member.start(table.run, identity(number).peer, table.head, serial)


def attested_table() -> Table:
    table = Table(manifest(attestation={"kinds": ["simulated"], "lifetime_seconds": 100}))
    for number in range(3):
        table.attest(number)
    return table.genesis()


def closing_table() -> Table:
    return Table(manifest(rounds={"count": 1})).genesis().train(1)


def ready(table: Table) -> member_io.StateReady:
    return member_io.StateReady(table.head.round, table.state_root(), None)


def test_a_machine_starts_with_nothing_said():
    table, _ = machine()
    state = member.start(table.run, identity(0).peer, table.head)
    assert state == MemberState(table.run, identity(0).peer, table.head)
    assert (state.serial, state.attestation, state.connected, state.leaving) == (0, None, False, False)
    assert machine(serial=7)[1].serial == 7


def test_where_the_run_asks_for_evidence_a_stranger_claims_once_its_own_holds():
    table, state = machine(7, attested_table())
    assert state.attestation == member_io.Attestation(False, "no evidence was given yet")
    state, effects = member.step(state, ready(table), 0)
    assert effects == []
    for verdict in (member_io.Attestation(False, "measurement: unknown"), member_io.Attestation(True)):
        state, effects = member.step(state, verdict, 0)
        assert state.attestation is verdict
    assert [effect.kind for effect in effects if isinstance(effect, member_io.Sign)] == [pb.KIND_CLAIM]


def test_a_connection_is_remembered_until_it_breaks():
    _, state = machine()
    connected, effects = member.step(replace(state, open=replace(state.open, held=frozenset({ROOT}))), member_io.Connected(), 0)
    assert (connected, effects) == (replace(state, connected=True), [])
    assert member.step(connected, member_io.Away(), 0) == (state, [])


def test_time_alone_changes_nothing():
    _, state = machine()
    assert member.step(state, member_io.Tick(), 1e9) == (state, [])


@pytest.mark.parametrize("round", [1, 3])
def test_only_the_loss_of_the_open_round_is_reported(round: int):
    node = Node()
    train(node)
    node.feed(member_io.StateReady(round, digest("of another round"), 9.5))
    node.feed(member_io.StateReady(2, node.table.state_root(), 1.5))
    node.feed(member_io.StateReady(round, digest("of another round"), 9.5))
    assert node.state.open.loss == 1.5


@pytest.mark.parametrize(
    ("loss", "told"), [(None, (False, 0.0)), (0.0, (True, 0.0)), (1.5, (True, 1.5)), (2 * limits.LOSS, (True, limits.LOSS))]
)
def test_a_report_says_the_state_and_its_loss(loss: float | None, told: tuple[bool, float]):
    table, state = machine()
    state, effects = member.step(state, member_io.StateReady(1, ROOT, loss), 0)
    body = pb.StateReport(round=1, head=table.head.digest, state=ROOT, evaluated=told[0], evaluation_loss=told[1])
    assert effects == [member_io.Sign(pb.KIND_STATE_REPORT, body)]
    assert state.open.signing == {pb.KIND_STATE_REPORT}
    assert member.step(state, member_io.Tick(), 0) == (state, []), "asked for once"


def signs(effects: list[member_io.Effect]) -> list[pb.Kind]:
    return [effect.kind for effect in effects if isinstance(effect, member_io.Sign)]


HOSTS = (HostRange(identity(7).peer, 0, 1), HostRange(identity(8).peer, 1, 1))


def test_a_lead_signs_its_layout_and_then_claims_with_it():
    table, state = machine(7, serial=4)
    state, effects = member.step(state, member_io.Laid(HOSTS), 0)
    assert effects == [], "no state to claim with yet"
    state, effects = member.step(state, member_io.StateReady(1, ROOT, 1.5), 0)
    hosts = [pb.Host(peer=host.peer, first_stage=host.first_stage, stage_count=1) for host in HOSTS]
    layout = pb.Cluster(serial=5, round=1, head=table.head.digest, hosts=hosts)
    assert effects == [member_io.Sign(pb.KIND_CLUSTER, layout)]
    assert member.consent(state) is None
    signed = seal(identity(7), pb.KIND_CLUSTER, table.run.run_id, layout)
    state, effects = member.step(state, member_io.Signed(signed), 0)
    claim = pb.Claim(serial=6, round=1, head=table.head.digest, state=ROOT, cluster=signed.digest)
    assert effects == [member_io.Sign(pb.KIND_CLAIM, claim)]
    assert (state.serial, state.open.signing) == (6, frozenset({pb.KIND_CLAIM}))
    asked = member.consent(state)
    assert asked == pb.Claim(round=1, head=table.head.digest, state=ROOT, cluster=signed.digest)


def test_a_layout_is_signed_before_the_first_commit_too():
    table, state = machine(0, Table(manifest()))
    state, _ = member.step(state, member_io.StateReady(0, ROOT, None), 0)
    state, effects = member.step(
        state, member_io.Laid((HostRange(identity(0).peer, 0, 1), HostRange(identity(8).peer, 1, 1))), 0
    )
    assert signs(effects) == [pb.KIND_CLUSTER]
    (layout,) = [effect.body for effect in effects if isinstance(effect, member_io.Sign)]
    signed = seal(identity(0), pb.KIND_CLUSTER, table.run.run_id, layout)
    assert signs(member.step(state, member_io.Signed(signed), 0)[1]) == [pb.KIND_CLAIM]


def test_a_box_claims_what_its_lead_asks_for_and_says_nothing_else():
    table, state = machine(8, serial=4)
    state = replace(state, lead=identity(7).peer)
    asked = pb.Claim(round=1, head=table.head.digest, state=ROOT, cluster=digest("layout"))
    state, effects = member.step(state, member_io.Asked(asked), 0)
    claim = pb.Claim(serial=5, round=1, head=table.head.digest, state=ROOT, cluster=digest("layout"))
    assert effects == [member_io.Sign(pb.KIND_CLAIM, claim)]
    state, _ = member.step(state, member_io.Signed(seal(identity(8), pb.KIND_CLAIM, table.run.run_id, claim)), 0)
    assert member.step(state, member_io.Asked(asked), 0) == (state, []), "it was said"
    other = pb.Claim(round=1, head=table.head.digest, state=ROOT, cluster=digest("another layout"))
    state, effects = member.step(state, member_io.Asked(other), 0)
    assert effects == [member_io.Sign(pb.KIND_CLAIM, pb.Claim(serial=6, **{f.name: v for f, v in other.ListFields()}))]
    assert member.step(state, member_io.LeaveRun(), 0)[1] == [], "its lead leaves"
    elsewhere = pb.Claim(round=9, head=digest("head"), state=ROOT, cluster=digest("layout"))
    assert member.step(machine(8)[1], member_io.Asked(elsewhere), 0)[1] == [], "of a round that is not open here"


def test_who_led_a_cluster_and_is_a_box_now_leaves_before_it_agrees():
    """Check the order; otherwise the coordinator would wait for a cluster without a lead host."""
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(0).peer, table.head, lead=identity(7).peer)
    asked = pb.Claim(round=1, head=table.head.digest, state=ROOT, cluster=digest("layout"))
    _, effects = member.step(state, member_io.Asked(asked), 0)
    assert signs(effects) == [pb.KIND_LEAVE]


def test_a_cluster_that_is_laid_out_anew_claims_its_seat_anew():
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(0).peer, table.head)
    state, effects = member.step(state, member_io.StateReady(1, ROOT, None), 0)
    assert signs(effects) == [pb.KIND_STATE_REPORT], "it has its seat as it is"
    hosts = (HostRange(identity(0).peer, 0, 1), HostRange(identity(8).peer, 1, 1))
    state, effects = member.step(state, member_io.Laid(hosts), 0)
    assert signs(effects) == [pb.KIND_CLUSTER]
    assert member.step(state, member_io.Laid(hosts), 0) == (state, [])
    _, effects = member.step(state, member_io.Laid(()), 0)
    assert effects == [], "as before"


def test_the_first_claim_is_for_round_one():
    _, state = machine(0, Table(manifest()))
    _, effects = member.step(state, member_io.StateReady(0, ROOT, None), 0)
    assert effects == [member_io.Sign(pb.KIND_CLAIM, pb.Claim(serial=1, round=1, state=ROOT))]


def test_a_leave_is_said_instead_of_everything_else():
    table, state = machine(serial=4)
    state, effects = member.step(state, member_io.LeaveRun(), 0)
    leave = pb.Leave(serial=5, round=1, head=table.head.digest)
    assert effects == [member_io.Sign(pb.KIND_LEAVE, leave)]
    assert (state.serial, state.leaving) == (5, True)
    assert member.step(state, ready(table), 0)[1] == []


def test_who_leaves_before_the_first_commit_names_round_one():
    table, state = machine(0, Table(manifest()))
    assert member.step(state, member_io.LeaveRun(), 0)[1] == [], "nobody knows of it"
    assert member.parted(member.step(state, member_io.LeaveRun(), 0)[0])
    state, (sign,) = member.step(state, member_io.StateReady(0, ROOT, None), 0)
    state, _ = member.step(state, member_io.Signed(seal(identity(0), pb.KIND_CLAIM, table.run.run_id, sign.body)), 0)  # type: ignore[union-attr]
    assert member.step(state, member_io.LeaveRun(), 0)[1] == [member_io.Sign(pb.KIND_LEAVE, pb.Leave(serial=2, round=1))]


def test_of_a_claim_and_a_leave_in_one_round_only_the_newer_is_said():
    """Check a peer that left a round that never closes, is back in it, and claims again."""
    table, state = machine()
    first, claim, last = table.leave(0), table.claim(0), table.leave(0)
    for signed, said in ((first, first), (claim, claim), (last, last), (claim, last)):
        state, _ = member.step(state, member_io.Signed(signed), 0)
        assert state.open.own == {said.kind: said}


def held(node: Node, kind: pb.Kind, reason: pb.Reason = pb.REASON_UNSPECIFIED) -> None:
    """Report that the coordinator has this peer's statement."""
    statement = node.said(kind)
    assert statement is not None
    outcome = rules.Outcome.IGNORE if reason else rules.Outcome.ACCEPT
    node.feed(member_io.Answered(statement, outcome, reason, ""))


def test_who_finishes_leaves_when_the_coordinator_has_its_vote():
    node = Node(vote_seconds=100).vote()
    node.feed(member_io.LeaveRun(finishing=True))
    assert node.said(pb.KIND_LEAVE) is None
    for number in range(2):
        node.feed(member_io.Judged(node.digests[number], ACCEPTED))
    assert node.said(pb.KIND_RECEIPT) is not None
    assert node.said(pb.KIND_LEAVE) is None, "a vote that is on its way may be lost, and with it the others' work"
    held(node, pb.KIND_RECEIPT)
    leave = node.said(pb.KIND_LEAVE)
    assert leave is not None
    assert not member.parted(node.state)
    for kind in (pb.KIND_STATE_REPORT, pb.KIND_CONTRIBUTION, pb.KIND_LEAVE):
        held(node, kind)
    assert member.parted(node.state)


def test_who_finishes_waits_for_no_round_but_the_one_that_was_open():
    node = Node()
    node.feed(member_io.LeaveRun(finishing=True))
    node.table.absent(0)
    node.table.contribute([1, 2]).vote([1, 2])  # the round closed without us
    node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    assert node.said(pb.KIND_LEAVE) is not None


def test_who_takes_no_part_says_goodbye_once():
    node = Node()
    node.feed(member_io.LeaveRun())
    leave = node.said(pb.KIND_LEAVE)
    assert leave is not None
    assert node.table.submit(leave) == rules.ACCEPT
    node.table.contribute([1, 2]).vote([1, 2])
    assert identity(0).peer not in node.table.head.roster
    node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    assert not [each for each in node.effects if isinstance(each, member_io.Emit)], "that it is not counted is no news to it"
    assert node.said(pb.KIND_LEAVE) is None, "the coordinator answers that nobody of that name is here, for ever"
    assert member.parted(node.state)
    node.feed(member_io.Return())
    node.feed(member_io.StateReady(node.table.head.round, node.table.state_root(), None))
    assert node.said(pb.KIND_CLAIM) is not None


def test_who_is_back_before_its_leave_counts_takes_it_back():
    node = Node()
    node.feed(member_io.LeaveRun())
    leave = node.said(pb.KIND_LEAVE)
    assert leave is not None
    assert node.table.submit(leave) == rules.ACCEPT
    node.feed(member_io.Return())
    claim = node.said(pb.KIND_CLAIM)
    assert claim is not None
    assert node.said(pb.KIND_LEAVE) is None
    assert node.table.submit(claim) == rules.ACCEPT
    node.table.contribute().vote()
    assert identity(0).peer in node.table.head.roster, "it lost no round"


def test_a_leave_of_who_is_not_here_is_said():
    """Check a claim that never arrived: its withdrawal needs no statement."""
    node = Node()
    node.state = member.start(node.table.run, identity(5).peer, node.table.head)
    node.state = replace(node.state, open=replace(node.state.open, own={pb.KIND_CLAIM: node.table.claim(5)}))
    leave = seal(identity(5), pb.KIND_LEAVE, node.table.run.run_id, pb.Leave(serial=9, round=1, head=node.table.head.digest))
    node.state, _ = member.step(node.state, member_io.LeaveRun(), 0)
    node.state, _ = member.step(node.state, member_io.Signed(leave), 0)
    assert not member.parted(node.state)
    held(node, pb.KIND_LEAVE, pb.REASON_NOT_ON_ROSTER)
    assert member.parted(node.state)


def test_a_contribution_says_all_of_its_phase():
    table, state = machine(0, attested_table())
    phase = member_io.PhaseEnded(1, ROOT, 3, 192, 2.25, 12, digest("leaves"), 12345, 130, 5.5, 0.75)
    state, effects = member.step(state, phase, 0)
    body = pb.Contribution(
        round=1,
        head=table.head.digest,
        inner_steps=3,
        tokens=192,
        loss=2.25,
        samples_read=12,
        leaves=digest("leaves"),
        base_state=ROOT,
        norm=130,
        size=12345,
        effective_rank=5.5,
        error=0.75,
        attestation=resting_on(table.head.attestations, table.head.roster[identity(0).peer]),
    )
    assert body.attestation
    assert effects == [member_io.Sign(pb.KIND_CONTRIBUTION, body)]
    assert member.step(state, phase, 0) == (state, []), "it is being signed"


@pytest.mark.parametrize(("number", "closing"), [(7, False), (0, True)])
def test_nothing_is_contributed_without_a_place_or_in_the_closing_round(number: int, closing: bool):
    table, state = machine(number, closing_table() if closing else None)
    phase = member_io.PhaseEnded(table.head.round, ROOT, 3, 192, 2.25, 12, digest("leaves"), 12345, 130, 5.5, 0.75)
    assert member.step(state, phase, 0) == (state, [])


# The end of a round.


def test_a_commit_ends_everything_that_was_said_in_its_round():
    node = Node().vote()
    node.table.submit(node.said(pb.KIND_STATE_REPORT))  # type: ignore[arg-type]
    node.table.vote()
    busy = replace(
        node.state,
        serial=9,
        turned_away=(pb.REASON_NOT_ADMITTED, "no"),
        connected=True,
        open=replace(
            node.state.open,
            loss=1.5,
            signing=frozenset({pb.KIND_LEAVE}),
            held=frozenset({ROOT}),
            refused={pb.KIND_CLAIM: (pb.REASON_RATE, "")},
            verdicts={ROOT: ACCEPTED},
            rechecking=True,
        ),
    )
    assert busy.open.own
    assert busy.open.seen
    assert busy.open.judging
    assert busy.open.ballot is not None
    assert busy.open.vote_by is not None
    commit = node.table.commits[-1]
    after, effects = member.step(busy, member_io.Committed(commit, node.table.head), node.table.now)
    assert effects == []
    assert after == MemberState(
        node.table.run,
        busy.me,
        node.table.head,
        serial=9,
        roots=busy.roots,
        agreed={1: commit.body.state},
        turned_away=(pb.REASON_NOT_ADMITTED, "no"),
        connected=True,
    )


def test_a_commit_that_names_no_state_says_nothing_of_ours():
    node = Node()
    train(node)
    node.feed(rotten(2))
    node.table.contribute().vote(reject=dict.fromkeys(range(3), pb.REASON_UNAVAILABLE))
    commit = node.table.commits[-1]
    assert commit.body.state == b""
    effects = node.feed(member_io.Committed(commit, node.table.head))
    told = [effect.event.kind for effect in effects if isinstance(effect, member_io.Emit)]
    assert told == ["nobody-counted", "not-counted"]
    assert len(told) == len(effects), "nothing is said"
    assert node.state.agreed == {1: digest("state", [])}


def test_who_was_not_counted_is_told_why():
    node = Node()
    node.table.contribute().vote(reject={0: pb.REASON_NON_FINITE, 1: pb.REASON_NON_FINITE})
    effects = node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    mine = next(item for item in node.table.commits[-1].body.excluded if item.peer == node.state.me)
    nobody = events.NobodyCounted(1, events.missed(node.table.commits[-1].body))
    assert effects == [member_io.Emit(nobody), member_io.Emit(events.NotCounted(1, pb.REASON_NON_FINITE, mine.detail))]
    assert mine.detail


def test_who_could_be_counted_in_a_round_of_nobody_hears_it_once():
    node = Node()
    node.table.contribute().vote(reject={1: pb.REASON_NON_FINITE, 2: pb.REASON_NON_FINITE})
    assert node.table.why(0) == pb.REASON_TOO_FEW_CLUSTERS
    effects = node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    assert effects == [member_io.Emit(events.NobodyCounted(1, events.missed(node.table.commits[-1].body)))]


def test_the_end_of_the_run_is_told():
    table, state = machine(0, closing_table())
    for number in range(3):
        table.submit(table.report(number))
    state, effects = member.step(state, member_io.Committed(table.commits[-1], table.head), 0)
    assert effects == [member_io.Emit(events.RunFinished(1))]
    assert member.step(state, ready(table), 0)[1] == [], "nothing is left to say"


def test_only_the_last_states_are_remembered():
    _, state = machine()
    for round in range(2, 2 + member.STATES_KEPT + 5):
        state, _ = member.step(state, member_io.StateReady(round, ROOT, None), 0)
    assert list(state.roots) == list(range(7, 7 + member.STATES_KEPT))


# Starting again.


def test_who_contradicts_the_run_forgets_its_states_and_what_it_said_of_them():
    node = Node()
    train(node)
    node.feed(rotten(2))
    mine, other = node.table.contribution(0), node.table.contribution(1)
    node.feed(member_io.Signed(mine))
    node.see(other)
    node.feed(member_io.Judged(other.digest, (pb.REASON_WRONG_BASE, 0)))
    before = node.state
    assert set(before.open.own) == {pb.KIND_STATE_REPORT, pb.KIND_CONTRIBUTION}
    after, effects = member.step(before, member_io.Rechecked(2, digest("from disk")), 0)
    why = Message("protocol/member/member.py", "from disk", "in memory")
    assert effects == [member_io.Resynchronise(2, why)]
    own = {pb.KIND_CONTRIBUTION: mine}
    assert after == replace(before, roots={}, open=replace(before.open, own=own, judging=frozenset(), verdicts={}), anew=True)


def test_a_verdict_from_before_a_new_start_is_no_verdict():
    """Check a verdict on a base that the run does not have: the contribution is judged again on the right one."""
    node = Node()
    train(node)
    node.feed(rotten(2))
    node.feed(member_io.Signed(node.table.contribution(0)))
    other = node.table.contribution(1)
    node.see(other)
    assert other.digest in node.state.open.judging
    node.feed(member_io.Rechecked(2, digest("from disk")))
    node.feed(member_io.Judged(other.digest, ACCEPTED))
    assert node.state.open.verdicts == {}
    asked = [each for each in node.feed(ready(node.table)) if isinstance(each, member_io.Judge)]
    assert [each.contribution.digest for each in asked] == [other.digest]
    node.feed(member_io.Judged(other.digest, ACCEPTED))
    assert node.state.open.verdicts == {other.digest: ACCEPTED}


def test_memory_and_run_are_named_where_they_differ():
    node = Node()
    train(node)
    right = node.table.state_root()
    node.feed(rotten(2))
    again = train(node)[0]
    assert isinstance(again, member_io.Resynchronise)
    assert [again.round, digest("rotten bit").hex()[:12] in again.detail, right.hex()[:12] in again.detail] == [2, True, True]
    right = node.table.state_root()
    node.feed(rotten(3))
    halt = train(node)[0]
    assert isinstance(halt, member_io.Halt)
    assert [each in halt.why for each in ("round 3", digest("rotten bit").hex()[:12], right.hex()[:12])] == [True] * 3


def test_who_agrees_again_may_start_again_later():
    node = Node()
    train(node)
    node.feed(rotten(2))
    train(node)
    node.feed(ready(node.table))
    train(node)
    assert node.state.anew is False
    node.feed(rotten(4))
    assert isinstance(train(node)[0], member_io.Resynchronise)


@pytest.mark.parametrize("round", [1, 3])
def test_a_replay_of_another_round_says_nothing(round: int):
    node = Node()
    train(node)
    node.feed(member_io.StateReady(2, ROOT, None))
    before = node.state
    assert node.feed(member_io.Rechecked(round, digest("from disk"))) == []
    assert node.feed(member_io.Differs(round)) == []
    assert node.state == before


def test_a_replay_before_the_own_state_is_there_says_nothing():
    _, state = machine()
    assert member.step(state, member_io.Rechecked(1, ROOT), 0) == (state, [])
    assert member.step(state, member_io.Differs(1), 0) == (state, [])


def test_a_replay_that_agrees_is_reported_by_who_has_a_place():
    for number, expected in ((0, [pb.KIND_STATE_REPORT]), (7, [])):
        table, state = machine(number)
        state, _ = member.step(state, member_io.StateReady(1, ROOT, 1.5), 0)
        state = replace(state, open=replace(state.open, signing=frozenset({pb.KIND_CLAIM})))
        state, effects = member.step(state, member_io.Rechecked(1, ROOT), 0)
        body = pb.StateReport(round=1, head=table.head.digest, state=ROOT, replayed=True)
        assert effects == [member_io.Sign(kind, body) for kind in expected]
        assert state.open.signing == {pb.KIND_CLAIM, *expected}


# Signed statements, and the coordinator's messages about them.


def test_the_words_of_others_are_not_ours():
    node = Node()
    before = node.state
    node.feed(member_io.Signed(node.table.report(1)))
    assert node.state == before


def test_a_serial_that_an_earlier_life_signed_is_not_signed_again():
    table, state = machine(7)
    state, effects = member.step(state, member_io.Signed(table.claim(7, serial=41, round=9)), 0)
    assert (state.serial, state.open.own, effects) == (41, {}, [])
    state, _ = member.step(state, member_io.Signed(table.claim(7, serial=40)), 0)
    assert (state.serial, set(state.open.own)) == (41, {pb.KIND_CLAIM})
    state, _ = member.step(state, member_io.Signed(table.report(7)), 0)
    assert state.serial == 41
    assert member.step(state, member_io.LeaveRun(), 0)[1][0].body.serial == 42  # type: ignore[union-attr]


def test_a_report_counts_no_serial():
    table, state = machine()
    for event in (ready(table), member_io.Signed(table.report(0))):
        state, _ = member.step(state, event, 0)
        assert state.serial == 0


@pytest.mark.parametrize(("ballot", "round", "kept"), [(True, 1, True), (True, 2, False), (False, 1, False), (None, 1, False)])
def test_a_receipt_is_about_the_ballot_that_is_here(ballot: bool | None, round: int, kept: bool):
    """Check the ballot. None: it has none."""
    node = Node(vote_seconds=100).vote()
    here = node.state.open.ballot
    assert here is not None
    receipt = pb.Receipt(round=round, ballot=here.signing if ballot else digest("another"))
    state = node.state if ballot is not None else replace(node.state, open=replace(node.state.open, ballot=None))
    after, _ = member.step(
        state, member_io.Signed(seal(identity(0), pb.KIND_RECEIPT, node.table.run.run_id, receipt)), node.table.now
    )
    assert (pb.KIND_RECEIPT in after.open.own) is kept


def test_a_new_word_is_offered_though_the_one_before_it_was_refused():
    node = Node()
    (report,) = member.offers(node.state)
    node.feed(member_io.Answered(report, Outcome.REJECT, pb.REASON_WRONG_BASE, "no"))
    refused = {pb.KIND_STATE_REPORT: (pb.REASON_WRONG_BASE, "no")}
    assert node.state.open.refused == refused
    node.feed(member_io.Signed(node.table.contribution(0)))
    assert node.state.open.refused == refused
    node.feed(member_io.Signed(node.table.report(0, replayed=True)))
    assert node.state.open.refused == {}


def test_an_answer_to_what_we_no_longer_say_is_nothing():
    node = Node()
    before = node.state
    for stranger in (node.table.contribution(0), node.table.report(0, replayed=True)):
        node.feed(member_io.Answered(stranger, Outcome.REJECT, pb.REASON_WRONG_BASE, "no"))
        node.feed(member_io.Answered(stranger, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, ""))
    assert node.state == before


AWAY = (pb.REASON_NOT_ADMITTED, "no")


@pytest.mark.parametrize(
    ("claims", "outcome", "reason", "held", "refused", "turned_away"),
    [
        (True, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, True, False, None),
        (True, Outcome.IGNORE, pb.REASON_UNSPECIFIED, True, False, None),
        (True, Outcome.IGNORE, pb.REASON_STALE_ROUND, False, False, AWAY),
        (True, Outcome.REJECT, pb.REASON_WRONG_BASE, False, True, (pb.REASON_WRONG_BASE, "why")),
        (True, Outcome.REJECT, pb.REASON_RATE, False, False, AWAY),
        (False, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, True, False, AWAY),
        (False, Outcome.IGNORE, pb.REASON_UNSPECIFIED, True, False, AWAY),
        (False, Outcome.REJECT, pb.REASON_WRONG_BASE, False, True, AWAY),
    ],
)
def test_what_an_answer_means(
    claims: bool, outcome: Outcome, reason: pb.Reason, held: bool, refused: bool, turned_away: tuple[pb.Reason, str] | None
):
    table, state = machine(7 if claims else 0)
    word = table.claim(7) if claims else table.report(0)
    state, _ = member.step(state, member_io.Signed(word), 0)
    state = replace(state, turned_away=AWAY, open=replace(state.open, signing=frozenset()))
    after, effects = member.step(state, member_io.Answered(word, outcome, reason, "why"), 0)
    assert after == replace(
        state,
        open=replace(
            state.open,
            held=frozenset({word.digest}) if held else frozenset(),
            refused={word.kind: (reason, "why")} if refused else {},
        ),
        turned_away=turned_away,
    )
    assert effects == []
    assert member.offers(after) == ([] if held or refused else [word])


# Seeing and voting.


def test_what_an_earlier_life_announced_does_not_replace_what_is_said():
    node = Node()
    node.feed(phase(node))
    said = node.said(pb.KIND_CONTRIBUTION)
    node.see(node.table.contribution(0, loss=7.0))
    assert node.said(pb.KIND_CONTRIBUTION) is said
    assert node.state.open.seen == {}


def test_no_more_contributions_are_seen_than_there_can_be_proofs(monkeypatch: pytest.MonkeyPatch):
    node = Node()
    monkeypatch.setattr(limits, "CLUSTERS", 1)
    words = [node.table.contribution(1, loss=float(n)) for n in range(3)]
    node.see(*words)
    assert node.state.open.seen == {word.digest: word for word in words[:2]}


def test_the_first_ballot_stays():
    node = Node(vote_seconds=100)
    first, second = (
        seal(
            COORDINATOR, pb.KIND_BALLOT, node.table.run.run_id, pb.Ballot(round=1, head=node.table.head.digest, seconds=seconds)
        )
        for seconds in (40, 80)
    )
    node.see(first, second)
    assert (node.state.open.ballot, node.state.open.vote_by) == (first, node.table.now + 30)


def test_a_verdict_on_what_was_not_seen_is_nothing():
    node = Node()
    before = node.state
    assert node.feed(member_io.Judged(ROOT, ACCEPTED)) == []
    assert node.state == before


def test_contributions_are_judged_once_each():
    node = Node()
    first, second = node.table.contribution(1), node.table.contribution(2)
    assert node.feed(member_io.Seen(first)) == [member_io.Judge(first)]
    assert node.feed(member_io.Seen(second)) == [member_io.Judge(second)]
    assert node.state.open.judging == {first.digest, second.digest}


def test_who_is_not_on_the_ballot_has_no_vote():
    node = Node(vote_seconds=100)
    others = [node.table.contribution(number) for number in (1, 2)]
    listed = sorted(other.digest for other in others)
    body = pb.Ballot(round=1, head=node.table.head.digest, contributions=listed, seconds=100)
    node.see(*others, seal(COORDINATOR, pb.KIND_BALLOT, node.table.run.run_id, body))
    for said in (None, node.table.contribution(0)):
        if said is not None:
            node.feed(member_io.Signed(said))
        for other in others:
            node.feed(member_io.Judged(other.digest, ACCEPTED))
        assert member.next_deadline(node.state) is None
        node.table.now += 1000
        node.feed(member_io.Tick())
        assert node.said(pb.KIND_RECEIPT) is None


def test_a_receipt_says_all_it_knows_when_time_presses():
    node = Node(vote_seconds=100).vote()
    node.feed(member_io.Judged(node.digests[0], (pb.REASON_NORM_MISMATCH, 1)))
    node.table.now += 75
    _, effects = member.step(node.state, member_io.Tick(), node.table.now)
    ballot = node.state.open.ballot
    assert ballot is not None
    listed = list(ballot.body.contributions)
    reasons = {node.digests[0]: (pb.REASON_NORM_MISMATCH, 1), node.digests[1]: (pb.REASON_UNAVAILABLE, 0)}
    findings = [
        pb.Finding(index=index, reason=reasons[digest][0], stage=reasons[digest][1])
        for index, digest in enumerate(listed)
        if digest in reasons
    ]
    assert effects == [
        member_io.Sign(pb.KIND_RECEIPT, pb.Receipt(round=1, ballot=ballot.signing, accepted=b"\0", findings=findings))
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"leaving": True},
        {"roots": {}},
        {"me": identity(7).peer},
        {"open": {"ballot": None}},
        {"open": {"own": {}}},
        {"finished": True},
        {"whole": False},
    ],
)
def test_a_vote_that_will_not_be_cast_has_no_deadline(change: dict):
    node = Node(vote_seconds=100).vote()
    assert member.next_deadline(node.state) == node.table.now + 75
    if "finished" in change:
        change = {"head": replace(node.state.head, finished=True)}
    if "open" in change:
        change = {"open": replace(node.state.open, **change["open"])}
    assert member.next_deadline(replace(node.state, **change)) is None


def test_what_is_offered_comes_in_one_order():
    node = Node(vote_seconds=100).vote()
    for contribution in node.digests:
        node.feed(member_io.Judged(contribution, ACCEPTED))
    assert [statement.kind for statement in member.offers(node.state)] == sorted(
        [pb.KIND_STATE_REPORT, pb.KIND_CONTRIBUTION, pb.KIND_RECEIPT]
    )
