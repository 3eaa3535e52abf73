"""Vote of a cluster, from its verdicts on everything on the ballot."""

from collections.abc import Mapping

from dilocox.protocol import limits
from dilocox.protocol.consensus import rules
from dilocox.protocol.member.member_io import Verdict
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement

__all__ = ["ACCEPTED", "REFUSED", "receipt"]

ACCEPTED: Verdict = (pb.REASON_UNSPECIFIED, 0)
REFUSED: Verdict = (pb.REASON_UNAVAILABLE, 0)
"""Verdict on contributions that were not judged when time was short."""


def receipt(
    ballot: Statement[pb.Ballot], own: bytes, verdicts: Mapping[bytes, Verdict], rejected: Mapping[bytes, Verdict]
) -> pb.Receipt:
    """Return our vote, to which the run's checks add their fields. `own`: digest of our contribution. `rejected`: verdicts of the
    checks on contributions that are well made. These findings have room before others; of what has no room the bits say enough."""
    listed = list(ballot.body.contributions)

    def found(digest: bytes) -> Verdict:
        verdict = verdicts.get(digest, REFUSED)
        return rejected.get(digest, verdict) if verdict == ACCEPTED else verdict

    votes = {index: found(digest) for index, digest in enumerate(listed) if digest != own}
    accepted = [index in votes and not votes[index][0] for index in range(len(listed))]
    against = [index for index in votes if not accepted[index]]
    first = sorted(against, key=lambda index: verdicts.get(listed[index]) != ACCEPTED)[: limits.FINDINGS]
    return pb.Receipt(
        round=ballot.body.round,
        ballot=ballot.signing,
        accepted=rules.bits(accepted),
        findings=[pb.Finding(index=index, reason=votes[index][0], stage=votes[index][1]) for index in sorted(first)],
    )
