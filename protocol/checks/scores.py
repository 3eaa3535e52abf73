"""Score check (score_rules.py): a committee measures the effect of a contribution on the loss, and its votes decide."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dilocox.protocol import limits
from dilocox.protocol.checks import score_rules
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.consensus import weighting
from dilocox.protocol.consensus.check_interface import NOTHING_FOUND, Check, Findings
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.reputation import by_standing
from dilocox.protocol.consensus.rules import bits
from dilocox.protocol.member.member_io import (
    CheckInput,
    Committed,
    Effect,
    Input,
    Measure,
    Resynchronise,
    StateReady,
    Verdict,
)
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.voting import ACCEPTED, REFUSED
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["CHECK", "HARMS", "Scored", "Scores", "by_author", "scores_of"]

NAME = "scores"
HARMS: Verdict = (pb.REASON_HARMS, 0)


@dataclass(frozen=True)
class Scored(CheckInput):
    """Measured effect of a contribution on the loss."""

    contribution: bytes
    score: Score


@dataclass(frozen=True)
class Scores:
    """Scores that this node measured in the open round."""

    requested: frozenset[bytes] = frozenset()
    """Contributions that the workers were asked to measure, by digest."""
    measured: Mapping[bytes, Score] = field(default_factory=dict)
    """Scores by digest of the contribution."""


NOTHING_MEASURED = Scores()


def scores_of(state: MemberState) -> Scores:
    """Return what this node measured in the open round."""
    return state.checks.get(NAME, NOTHING_MEASURED)


def by_author(state: MemberState) -> dict[str, Score]:
    """Return what this node measured in the open round, by cluster."""
    return {state.open.seen[digest].peer: score for digest, score in scores_of(state).measured.items()}


class Scoring(Check):
    name = NAME

    def fault(self, manifest: Manifest, head: Head, statement: Statement[Any]) -> str:
        if statement.kind == pb.KIND_RECEIPT and len(statement.body.measured) > len(statement.body.accepted):
            return "it scored more than it could be drawn for"
        return ""

    def findings(
        self, manifest: Manifest, head: Head, gathered: StatementPool, weights: Mapping[str, int], candidates: Sequence[str]
    ) -> Findings:
        if gathered.ballot is None:
            return NOTHING_FOUND
        receipts = {name: gathered.receipts[name][0].body for name in candidates if name in gathered.receipts}

        def found(voter: str, index: int, place: int) -> bool | None:
            receipt = receipts[voter]
            return not _bit(receipt.accepted, index) if _bit(receipt.measured, place) else None

        opinions = score_rules.opinions(manifest, gathered.ballot, weights, receipts, found)
        return Findings(
            refused={name: (pb.REASON_HARMS, str(opinion)) for name, opinion in opinions.items() if opinion.refuses()},
            well_made={name: opinion.harmed for name, opinion in opinions.items()},
            records={"scored": frozenset(name for name, opinion in opinions.items() if opinion.votes)},
        )

    def receive(self, state: MemberState, event: Input | Resynchronise) -> Scores:
        mine = scores_of(state)
        match event:
            case Scored(contribution, score) if contribution in mine.requested:
                return replace(mine, measured={**mine.measured, contribution: score})
            case StateReady():  # workers that start again were asked for nothing
                return replace(mine, requested=frozenset(mine.measured))
            case Committed() | Resynchronise():
                return NOTHING_MEASURED
        return mine

    def request(self, state: MemberState) -> tuple[Scores, Sequence[Effect]]:
        mine, due = scores_of(state), _due(state)
        if not due:
            return mine, ()
        return replace(mine, requested=mine.requested | {each.contribution.digest for each in due}), due

    def may_vote(self, state: MemberState) -> bool:
        measured = scores_of(state).measured
        return all(s.digest in measured or state.open.verdicts.get(s.digest) != ACCEPTED for s in _duties(state))

    def rejects(self, state: MemberState) -> Mapping[bytes, Verdict]:
        tokens = {digest: statement.body.tokens for digest, statement in state.open.seen.items()}
        return dict.fromkeys(score_rules.harmful(state.manifest, scores_of(state).measured, tokens), HARMS)

    def fill_receipt(self, state: MemberState, receipt: pb.Receipt) -> None:
        assert state.open.ballot is not None, "it votes"
        measured, accepted = scores_of(state).measured, int.from_bytes(receipt.accepted, "little")
        gains = {
            index: score_rules.units(measured[digest].gain)
            for index, digest in enumerate(state.open.ballot.body.contributions)
            if digest in measured
        }
        for finding in receipt.findings:
            if finding.reason == pb.REASON_HARMS:
                finding.score = gains[finding.index]
        worst = _worst({index: gain for index, gain in gains.items() if accepted >> index & 1}, len(receipt.findings))
        receipt.scored.extend(worst)
        receipt.score.extend(gains[index] for index in worst)
        receipt.measured = bits([statement.digest in measured for statement in _duties(state)])


def _bit(bits: bytes, index: int) -> bool:
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)


def _worst(gains: Mapping[int, int], findings: int) -> Collection[int]:
    """Return the indices of the worst accepted contributions that have room beside so many findings, in the ballot's order."""
    return sorted(sorted(gains, key=lambda index: (gains[index], index))[: limits.FINDINGS - findings])


def _listed(state: MemberState) -> list[Statement[pb.Contribution]]:
    """Return the contributions on the ballot, in its order; none unless this node has all of them."""
    own = state.open.own.get(pb.KIND_CONTRIBUTION)
    if state.open.ballot is None or own is None:
        return []
    known = {**state.open.seen, own.digest: own}
    listed = [known.get(digest) for digest in state.open.ballot.body.contributions]
    return [] if None in listed else [statement for statement in listed if statement is not None]


def _duties(state: MemberState) -> list[Statement[pb.Contribution]]:
    """Return the contributions on the ballot that this cluster is drawn to score; none after its vote."""
    ballot = state.open.ballot
    if ballot is None or pb.KIND_RECEIPT in state.open.own:
        return []
    listed = _listed(state)
    if not listed:
        return []
    weights = by_standing(state.manifest, state.head.standings, [statement.peer for statement in listed])
    drawn = score_rules.duties(state.manifest, ballot, state.me, weights)
    return [statement for statement in listed if statement.peer in drawn]


def _due(state: MemberState) -> list[Measure]:
    """Return requests to measure those duties that are well made and not requested yet."""
    requested = scores_of(state).requested
    due = [s for s in _duties(state) if s.digest not in requested and state.open.verdicts.get(s.digest, REFUSED) == ACCEPTED]
    own, ballot, lease = state.open.own.get(pb.KIND_CONTRIBUTION), state.open.ballot, state.head.ledger.leases.get(state.me)
    if not due or own is None or ballot is None or lease is None:
        return []
    norms = {statement.peer: statement.body.norm for statement in _listed(state)}
    _, clips = weighting.clip(state.manifest, norms, state.head.standings)
    positions = tuple(score_rules.positions(state.manifest, ballot, state.me, lease))
    return [
        Measure(s, own, clips[s.peer], positions) for s in sorted(due, key=lambda s: score_rules.turn(ballot, state.me, s.peer))
    ]


CHECK = Scoring()
