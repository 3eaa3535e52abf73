"""The node's machine: what it says of others, and when."""

import pytest

from dilocox.protocol import events, limits, member, rules
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import Outcome
from tests.helpers import COORDINATOR, Table, digest, identity, manifest

ACCEPTED: member.Verdict = (pb.REASON_UNSPECIFIED, 0)


class Node:
    """Number 0's machine beside the coordinator's, which it hears."""

    def __init__(self, **rounds: float) -> None:
        self.table = Table(manifest(rounds=rounds)).genesis()
        self.state = member.start(self.table.run, identity(0).peer, self.table.head)
        self.effects: list[member.Effect] = []
        self.feed(member.StateReady(1, self.table.state_root(), None))

    def feed(self, event: member.Input) -> list[member.Effect]:
        self.state, effects = member.step(self.state, event, self.table.now)
        for effect in list(effects):
            if isinstance(effect, member.Sign):
                statement = seal(identity(0), effect.kind, self.table.run.run_id, effect.body)
                effects += self.feed(member.Signed(statement))
        self.effects = effects
        return effects

    def see(self, *statements: Statement) -> "Node":
        for statement in statements:
            self.feed(member.Seen(statement))
        return self

    def said(self, kind: pb.Kind) -> Statement | None:
        return self.state.own.get(kind)

    def vote(self) -> "Node":
        """Everybody contributed, we too, and the ballot is here."""
        mine = self.table.contribution(0)
        self.feed(member.Signed(mine))
        self.table.submit(mine)
        others = [self.table.contribution(number) for number in (1, 2)]
        for statement in others:
            self.table.submit(statement)
        self.digests = [statement.digest for statement in others]
        return self.see(*others, self.table.ballots[-1])


def test_who_voted_on_what():
    node = Node(vote_seconds=100).vote()
    assert {effect.contribution.peer for effect in node.effects if isinstance(effect, member.Judge)} == set()
    node.feed(member.Judged(node.digests[0], ACCEPTED))
    assert node.said(pb.KIND_RECEIPT) is None, "one is not judged yet"
    node.feed(member.Judged(node.digests[1], (pb.REASON_NON_FINITE, 1)))
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.ballot.body.contributions)  # type: ignore[union-attr]
    accepted = [bool(int.from_bytes(receipt.body.accepted, "little") >> listed.index(d) & 1) for d in node.digests]
    assert accepted == [True, False]
    assert [(listed[f.index], f.reason, f.stage) for f in receipt.body.findings] == [(node.digests[1], pb.REASON_NON_FINITE, 1)]
    assert node.table.submit(receipt) == rules.ACCEPT


def test_what_was_not_fetched_in_time_is_voted_unavailable():
    node = Node(vote_seconds=100).vote()
    node.feed(member.Judged(node.digests[0], ACCEPTED))
    assert member.next_deadline(node.state) == node.table.now + 75
    node.table.now += 74
    node.feed(member.Tick())
    assert node.said(pb.KIND_RECEIPT) is None
    node.table.now += 1
    node.feed(member.Tick())
    receipt = node.said(pb.KIND_RECEIPT)
    assert receipt is not None
    listed = list(node.state.ballot.body.contributions)  # type: ignore[union-attr]
    missing = listed.index(node.digests[1])
    assert [(f.index, f.reason) for f in receipt.body.findings] == [(missing, pb.REASON_UNAVAILABLE)]
    assert not int.from_bytes(receipt.body.accepted, "little") >> missing & 1
    assert member.next_deadline(node.state) is None


def test_only_the_coordinator_s_ballot_and_the_roster_s_contributions_of_this_round_are_seen():
    node = Node()
    body = pb.Ballot(round=1, head=node.table.head.digest, contributions=[], seconds=5)
    node.see(seal(identity(1), pb.KIND_BALLOT, node.table.run.run_id, body))
    assert node.state.ballot is None
    node.see(node.table.contribution(1, round=2), node.table.contribution(1, head=digest("fork")))
    assert not node.state.seen
    node.see(seal(identity(9), pb.KIND_CONTRIBUTION, node.table.run.run_id, node.table.contribution(1).body))
    assert not node.state.seen
    node.see(node.table.contribution(1))
    assert len(node.state.seen) == 1
    node.see(seal(COORDINATOR, pb.KIND_BALLOT, node.table.run.run_id, body))
    assert node.state.ballot is not None


def test_nothing_is_judged_twice_or_before_the_own_state_is_known():
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(0).peer, table.head)
    state, effects = member.step(state, member.Seen(table.contribution(1)), 0)
    assert not [e for e in effects if isinstance(e, member.Judge)]
    state, effects = member.step(state, member.StateReady(1, table.state_root(), None), 0)
    assert len([e for e in effects if isinstance(e, member.Judge)]) == 1
    state, effects = member.step(state, member.Tick(), 0)
    assert not [e for e in effects if isinstance(e, member.Judge)]


def phase(node: Node, **changes: object) -> member.PhaseEnded:
    body = node.table.contribution(0).body
    return member.PhaseEnded(
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
    assert not [e for e in node.feed(phase(node, loss=1.0)) if isinstance(e, member.Sign)]
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
    node.feed(member.Committed(node.table.commits[-1], node.table.head))
    assert node.state.head.round == before.round + 1
    assert node.state == member.start(node.table.run, node.state.me, node.table.head).__class__(
        **{**vars(node.state), "own": {}, "held": frozenset(), "seen": {}, "verdicts": {}, "ballot": None}
    )
    assert not member.offers(node.state), "the state after it is not there yet"
    node.feed(member.StateReady(2, node.table.state_root(), None))
    assert [s.kind for s in member.offers(node.state)] == [pb.KIND_STATE_REPORT]


def test_an_accepted_contribution_that_the_commit_leaves_out_is_told_and_no_other():
    def told(accepted: bool, ballot: bool, listed: bool) -> bool:
        node = Node()
        mine = node.table.contribution(0)
        node.feed(member.Signed(mine))
        if accepted:
            node.feed(member.Answered(mine, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, ""))
        if ballot:
            node.table.contribute(range(3) if listed else [1, 2])
            if not listed:
                node.table.wait(1e6)
            node.table.vote(range(3) if listed else [1, 2])
        commit = node.table.commits[-1] if ballot else empty_commit(node.table)
        effects = node.feed(member.Committed(commit, node.table.head))
        return member.Emit(events.LeftOut(1)) in effects

    assert told(accepted=True, ballot=True, listed=False)
    assert not told(accepted=True, ballot=True, listed=True)
    assert not told(accepted=False, ballot=True, listed=False)
    assert not told(accepted=True, ballot=False, listed=False), "a commit without votes takes nobody's"


def empty_commit(table: Table) -> Statement[pb.Commit]:
    return seal(COORDINATOR, pb.KIND_COMMIT, table.run.run_id, pb.Commit(round=1, previous=table.head.digest))


def rotten(round: int) -> member.StateReady:
    return member.StateReady(round, digest("rotten bit"), None)


def train(node: Node) -> list[member.Effect]:
    node.table.train(1)
    return node.feed(member.Committed(node.table.commits[-1], node.table.head))


def test_memory_that_contradicts_the_run_is_started_again():
    node = Node()
    train(node)
    node.feed(rotten(2))
    effects = train(node)
    assert [e.round for e in effects if isinstance(e, member.Resynchronise)] == [2]
    assert not node.state.roots
    node.feed(member.StateReady(3, node.table.state_root(), None))
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
    assert [e.round for e in effects if isinstance(e, member.Resynchronise)] == [2]


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
    assert [e for e in effects if isinstance(e, member.Halt)]


def test_a_replay_that_confirms_a_wrong_state_proves_only_that_the_state_before_it_was_wrong():
    node = Node()
    train(node)
    node.feed(rotten(2))
    assert [e for e in node.feed(member.Differs(2)) if isinstance(e, member.Recheck)] == [member.Recheck(2)]
    assert not [e for e in node.feed(member.Differs(2)) if isinstance(e, member.Recheck)], "once is enough"
    node.feed(member.Rechecked(2, digest("rotten bit")))
    report = node.said(pb.KIND_STATE_REPORT)
    assert report is not None
    assert report.body.replayed
    assert [e.round for e in train(node) if isinstance(e, member.Resynchronise)] == [2]


def test_who_started_again_says_once_what_it_replayed():
    """A second replayed report with other words was equivocation, and its word was lost."""
    node = Node()
    train(node)
    node.feed(rotten(2))
    train(node)
    node.feed(member.StateReady(3, node.table.state_root(), 1.5))
    said = node.said(pb.KIND_STATE_REPORT)
    assert said is not None
    node.feed(member.Differs(3))
    node.feed(member.Rechecked(3, node.table.state_root()))
    assert node.said(pb.KIND_STATE_REPORT) is said


def test_verdicts_against_a_wrong_state_are_reached_again():
    node = Node()
    train(node)
    node.feed(member.StateReady(2, node.table.state_root(), None))
    other = node.table.contribution(1)
    node.see(other)
    node.feed(member.Judged(other.digest, (pb.REASON_WRONG_BASE, 0)))
    node.feed(member.Rechecked(2, digest("from disk")))
    assert not node.state.verdicts
    effects = node.feed(member.StateReady(2, node.table.state_root(), None))
    assert [e.contribution.digest for e in effects if isinstance(e, member.Judge)] == [other.digest]


def test_memory_that_a_replay_contradicts_is_started_again():
    node = Node()
    why = "replaying the last commit from disk gives another state than memory holds"
    assert node.feed(member.Rechecked(1, digest("from disk")))[0] == member.Resynchronise(1, why)
    assert node.said(pb.KIND_STATE_REPORT) is None, "what it said of its state was wrong"
    node.feed(member.StateReady(1, node.table.state_root(), None))
    assert node.said(pb.KIND_STATE_REPORT).body.replayed  # type: ignore[union-attr]
    assert isinstance(node.feed(member.Rechecked(1, digest("from disk")))[0], member.Halt)


def test_who_is_not_on_the_roster_claims_and_who_leaves_says_so():
    table = Table(manifest()).genesis()
    state = member.start(table.run, identity(5).peer, table.head, serial=3)
    state, effects = member.step(state, member.StateReady(1, table.state_root(), None), 0)
    (sign,) = [e for e in effects if isinstance(e, member.Sign)]
    assert (sign.kind, sign.body.serial, sign.body.state) == (pb.KIND_CLAIM, 4, table.state_root())
    claim = seal(identity(5), sign.kind, table.run.run_id, sign.body)
    state, _ = member.step(state, member.Signed(claim), 0)
    assert table.submit(claim) == rules.ACCEPT
    state, effects = member.step(state, member.LeaveRun(), 0)
    (sign,) = [e for e in effects if isinstance(e, member.Sign)]
    assert (sign.kind, sign.body.serial) == (pb.KIND_LEAVE, 5)
    assert table.submit(seal(identity(5), sign.kind, table.run.run_id, sign.body)) == rules.ACCEPT


@pytest.mark.parametrize("reason", [pb.REASON_RATE, pb.REASON_NOT_ADMITTED])
def test_a_rate_is_no_final_refusal(reason: pb.Reason):
    node = Node()
    (report,) = member.offers(node.state)
    node.feed(member.Answered(report, Outcome.REJECT, reason, "no"))
    assert bool(member.offers(node.state)) == (reason == pb.REASON_RATE)


def test_findings_are_bounded():
    run = manifest(rounds={"start_clusters": 30, "vote_seconds": 100})
    table = Table(run).genesis(range(30))
    state = member.start(run, identity(0).peer, table.head)
    state, _ = member.step(state, member.StateReady(1, table.state_root(), None), 0)
    mine = table.contribution(0)
    state, _ = member.step(state, member.Signed(mine), 0)
    table.submit(mine)
    table.contribute(range(1, 30))
    for slot in table.state.gathered.contributions.values():
        state, _ = member.step(state, member.Seen(slot[0]), 0)
    state, _ = member.step(state, member.Seen(table.ballots[-1]), 0)
    state, effects = member.step(state, member.Tick(), 80)
    (sign,) = [e for e in effects if isinstance(e, member.Sign)]
    assert len(sign.body.findings) == limits.FINDINGS
    assert not int.from_bytes(sign.body.accepted, "little")
    assert table.submit(seal(identity(0), pb.KIND_RECEIPT, run.run_id, sign.body)) == rules.ACCEPT
