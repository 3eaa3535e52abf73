"""What a cluster votes: its receipt, from what it found of everything on the ballot."""

from collections.abc import Collection, Container, Mapping, Sequence

from dilocox.protocol import limits, rules, scoring
from dilocox.protocol.facts import Verdict
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ACCEPTED", "REFUSED", "receipt"]

ACCEPTED: Verdict = (pb.REASON_UNSPECIFIED, 0)
REFUSED: Verdict = (pb.REASON_UNAVAILABLE, 0)
"""What was not judged when time pressed."""


def receipt(
    ballot: Statement[pb.Ballot],
    own: bytes,
    verdicts: Mapping[bytes, Verdict],
    scores: Mapping[bytes, scoring.Score],
    harmful: Container[bytes],
    duties: Sequence[bytes],
    audits: Sequence[pb.AuditResult] = (),
    lacking: Sequence[int] = (),
) -> pb.Receipt:
    """`own`: digest of our contribution; `harmful`: of those that we scored; `duties`: of those that we were drawn to
    score, in the ballot's order; `audits`: what we found of those that are due; `lacking`: places of the samples that showed
    nothing. What was judged well made and measured to harm is refused; of what has no room the bits say enough."""
    listed = list(ballot.body.contributions)

    def found(digest: bytes) -> Verdict:
        verdict = verdicts.get(digest, REFUSED)
        return (pb.REASON_HARMS, 0) if verdict == ACCEPTED and digest in harmful else verdict

    def gain(index: int) -> int:
        return scoring.units(scores[listed[index]].gain)

    votes = {index: found(digest) for index, digest in enumerate(listed) if digest != own}
    accepted = [index in votes and not votes[index][0] for index in range(len(listed))]
    against = sorted((index for index in votes if not accepted[index]), key=lambda index: votes[index][0] != pb.REASON_HARMS)
    told = sorted(against[: limits.FINDINGS])
    worst = _worst({index: gain(index) for index in votes if accepted[index] and listed[index] in scores}, len(told))
    return pb.Receipt(
        round=ballot.body.round,
        ballot=ballot.signing,
        accepted=rules.bits(accepted),
        findings=[
            pb.Finding(
                index=index,
                reason=votes[index][0],
                stage=votes[index][1],
                score=gain(index) if votes[index][0] == pb.REASON_HARMS else 0,
            )
            for index in told
        ],
        scored=worst,
        score=[gain(index) for index in worst],
        measured=rules.bits([digest in scores for digest in duties]),
        audits=audits,
        lacking=lacking,
    )


def _worst(gains: Mapping[int, int], told: int) -> Collection[int]:
    """Of what is accepted and was scored, by index, the worst that have room beside so many findings, in the ballot's order."""
    return sorted(sorted(gains, key=lambda index: (gains[index], index))[: limits.FINDINGS - told])
