"""Each reason for a rejection in words for people: its meaning and a remedy. `dilocox rounds N --why`, `status`, the page and
docs/reference/codes.md print these sentences."""

from collections.abc import Mapping
from typing import NamedTuple

from dilocox.protocol.errors import reason_name
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["REASONS", "Advice", "advice"]


class Advice(NamedTuple):
    means: str
    do: str


_FAULTY = "run the same version as the others; if it comes back, suspect the machine's memory"
_SAME_VERSION = "run the version that the others run"

REASONS: Mapping[pb.Reason, Advice] = {
    pb.REASON_BAD_SIGNATURE: Advice("a signature did not hold", _SAME_VERSION),
    pb.REASON_WRONG_RUN: Advice("it was signed for another run", "start it with this run's join link"),
    pb.REASON_MALFORMED: Advice("what it said could not be read, or was out of bounds", _SAME_VERSION),
    pb.REASON_OVERSIZE: Advice("what it said was larger than the limit", _SAME_VERSION),
    pb.REASON_STALE_ROUND: Advice(
        "it came after its round was closed", "nothing, unless it comes back: then look at the connection"
    ),
    pb.REASON_FUTURE_ROUND: Advice("it was for a round that was not open yet", "nothing: it is said again"),
    pb.REASON_WRONG_HEAD: Advice(
        "it stood on another commit than the run's newest", "nothing: it follows the chain and tries again"
    ),
    pb.REASON_WRONG_BASE: Advice(
        "its state differed from the others'", "it resynchronises by itself; if it comes back, suspect the machine's memory"
    ),
    pb.REASON_EQUIVOCATION: Advice(
        "two daemons run with one identity, or an old copy of the folder was started",
        "stop one; make a new identity for the other",
    ),
    pb.REASON_NOT_ON_ROSTER: Advice("it was not on the roster of this round", "nothing: it claims a seat by itself"),
    pb.REASON_NOT_ADMITTED: Advice("the run's admission policy does not name it", "ask the run's owner"),
    pb.REASON_WRONG_STAGES: Advice(
        "its stages are not those that it claimed, or its boxes do not cover all",
        "look at its boxes: `dilocox status` at the lead",
    ),
    pb.REASON_DIGEST_MISMATCH: Advice("the bytes that others fetched were not those announced", _FAULTY),
    pb.REASON_SIZE_MISMATCH: Advice("its payload had another size than announced", _FAULTY),
    pb.REASON_NON_FINITE: Advice("its payload held a number that is not finite", "look at its loss; " + _FAULTY),
    pb.REASON_NORM_TOO_LARGE: Advice("its update was far larger than may be", "look at its loss, and at the learning rate"),
    pb.REASON_NORM_MISMATCH: Advice("the norms that it announced are not its payload's", _FAULTY),
    pb.REASON_IMPOSSIBLE_TOKENS: Advice("it announced work that cannot be", _SAME_VERSION),
    pb.REASON_UNAVAILABLE: Advice("others could not fetch its payload", "open the gRPC port; check `--host`"),
    pb.REASON_ABSENT: Advice("the coordinator did not hear from it", "check the connection, and whether the daemon runs"),
    pb.REASON_LATE: Advice(
        "what it made had not been announced when the vote began",
        "look at its log: it is slower than the others, or stood still; `rounds.round_seconds` gives the next run more time",
    ),
    pb.REASON_TOO_FEW_ACCEPTS: Advice(
        "fewer than half of the others accepted it", "look at what they refused it for: `dilocox rounds`, with its number"
    ),
    pb.REASON_TOO_FEW_CLUSTERS: Advice(
        "fewer clusters than the run needs took part, or could be counted: the round counted none of them",
        "nothing on this machine; restart the clusters that were away (`dilocox rounds N --why` names them)",
    ),
    pb.REASON_RATE: Advice("it said more than it may", _SAME_VERSION),
    pb.REASON_RUN_FINISHED: Advice("the run is finished", "nothing"),
    pb.REASON_NOT_ATTESTED: Advice("the run asks for evidence, and it gave none that holds", "docs/how-to/attested-runs.md"),
    pb.REASON_ATTESTATION: Advice("its evidence does not hold", "docs/how-to/attested-runs.md has the codes"),
    pb.REASON_ATTESTATION_EXPIRED: Advice(
        "its verdict ran out and was not renewed", "see `dilocox status`; a new one lets it claim again"
    ),
    pb.REASON_DID_NOT_VOTE: Advice(
        "its vote did not arrive: who does not vote does not count",
        "check the connection; a slower link needs `rounds.vote_seconds`",
    ),
    pb.REASON_RESTING: Advice(
        "it was off the roster after commits that did not count it", "look why it was not counted then; it comes back by itself"
    ),
    pb.REASON_CLUSTER: Advice("its lead does not name it, or it does not consent", "copy `cluster.link` anew from the lead"),
    pb.REASON_SUPERSEDED: Advice("it said something newer", "nothing"),
    pb.REASON_COPIED: Advice("what it announced was made by another cluster, or for another round", _SAME_VERSION),
    pb.REASON_HARMS: Advice(
        "it made the model worse, or pulled it the same way round after round, as most of those drawn to score it measured",
        "look at its data and its loss",
    ),
    pb.REASON_AUDIT: Advice(
        "most of those drawn to audit it found that it did not train what it said, or could not fetch the states that show it",
        "open the gRPC port; " + _FAULTY + " (docs/how-to/scores-and-audits.md)",
    ),
    pb.REASON_SHARES: Advice(
        "its payloads make other shares than it announced, so nobody could have proved what restores them", _FAULTY
    ),
    pb.REASON_LEFT: Advice("it left, or was paused, before it had contributed", "`dilocox resume` there, or start it again"),
}


def advice(reason: str) -> Advice:
    """Return the advice for a reason, by its public name."""
    return _BY_NAME.get(reason, Advice(reason, ""))


_BY_NAME = {reason_name(reason): said for reason, said in REASONS.items()}
