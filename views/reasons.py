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


_FAULTY = "run the same version as the other nodes; if it happens again, test this machine's memory"
_SAME_VERSION = "run the version that the other nodes run"

REASONS: Mapping[pb.Reason, Advice] = {
    pb.REASON_BAD_SIGNATURE: Advice("a signature was not valid", _SAME_VERSION),
    pb.REASON_WRONG_RUN: Advice("it was signed for another run", "start it with this run's join link"),
    pb.REASON_MALFORMED: Advice("its message could not be read, or was out of bounds", _SAME_VERSION),
    pb.REASON_OVERSIZE: Advice("its message was larger than the limit", _SAME_VERSION),
    pb.REASON_STALE_ROUND: Advice(
        "it arrived after its round was closed", "nothing; if it happens again, check the connection"
    ),
    pb.REASON_FUTURE_ROUND: Advice("it was for a round that was not open yet", "nothing: the node sends it again"),
    pb.REASON_WRONG_HEAD: Advice(
        "it was based on another commit than the run's newest", "nothing: the node follows the chain and retries"
    ),
    pb.REASON_WRONG_BASE: Advice(
        "its state differed from the other nodes'",
        "the node resynchronises by itself; if it happens again, test the machine's memory",
    ),
    pb.REASON_EQUIVOCATION: Advice(
        "two daemons use one identity, or an old copy of the folder was started",
        "stop one; create a new identity for the other",
    ),
    pb.REASON_NOT_ON_ROSTER: Advice("it was not on the roster of this round", "nothing: the node claims a seat by itself"),
    pb.REASON_NOT_ADMITTED: Advice("the run's admission policy does not name it", "ask the run's owner"),
    pb.REASON_WRONG_STAGES: Advice(
        "its stages are not those that it claimed, or its hosts do not cover all",
        "check its hosts: run `dilocox status` on the lead host",
    ),
    pb.REASON_DIGEST_MISMATCH: Advice("its payload did not match the announced digest", _FAULTY),
    pb.REASON_SIZE_MISMATCH: Advice("its payload did not have the announced size", _FAULTY),
    pb.REASON_NON_FINITE: Advice("its payload contained a number that is not finite", "check its loss; " + _FAULTY),
    pb.REASON_NORM_TOO_LARGE: Advice("the norm of its update was above the limit", "check its loss, and the learning rate"),
    pb.REASON_NORM_MISMATCH: Advice("its payload did not match the announced norms", _FAULTY),
    pb.REASON_IMPOSSIBLE_TOKENS: Advice("it announced an impossible amount of work", _SAME_VERSION),
    pb.REASON_UNAVAILABLE: Advice("other nodes could not fetch its payload", "open the gRPC port; check `--host`"),
    pb.REASON_ABSENT: Advice("the coordinator received nothing from it", "check the connection, and whether the daemon runs"),
    pb.REASON_LATE: Advice(
        "it had not announced a contribution when the vote began",
        "check its log for slow or interrupted work; a larger `rounds.round_seconds` gives the next run more time",
    ),
    pb.REASON_TOO_FEW_ACCEPTS: Advice(
        "fewer than half of the other nodes accepted it",
        "see the reasons of its voters: run `dilocox rounds N` with the round's number",
    ),
    pb.REASON_TOO_FEW_CLUSTERS: Advice(
        "fewer clusters than the run needs took part, or could be counted: the round counted none of them",
        "nothing on this machine; restart the absent clusters (`dilocox rounds N --why` names them)",
    ),
    pb.REASON_RATE: Advice("it sent more messages than the limit", _SAME_VERSION),
    pb.REASON_RUN_FINISHED: Advice("the run is finished", "nothing"),
    pb.REASON_NOT_ATTESTED: Advice("the run requires evidence, and it gave no valid one", "docs/how-to/attested-runs.md"),
    pb.REASON_ATTESTATION: Advice("its evidence is not valid", "see the codes in docs/how-to/attested-runs.md"),
    pb.REASON_ATTESTATION_EXPIRED: Advice(
        "its verdict expired and was not renewed", "run `dilocox status`; after a new verdict it claims again"
    ),
    pb.REASON_DID_NOT_VOTE: Advice(
        "its vote did not arrive; only clusters that vote are counted",
        "check the connection; a slower link needs a larger `rounds.vote_seconds`",
    ),
    pb.REASON_RESTING: Advice(
        "it was suspended after commits that did not count it",
        "see why it was not counted then; it claims a seat again by itself",
    ),
    pb.REASON_CLUSTER: Advice(
        "its lead host does not name it, or it did not request the claim", "copy `cluster.link` from the lead host again"
    ),
    pb.REASON_SUPERSEDED: Advice("it sent something newer", "nothing"),
    pb.REASON_COPIED: Advice("another cluster made its payload, or it was made for another round", _SAME_VERSION),
    pb.REASON_HARMS: Advice(
        "most of the scoring committee measured that it made the model worse, or pulled it in one direction round after round",
        "check its data and its loss",
    ),
    pb.REASON_AUDIT: Advice(
        "most of its auditors computed other results than it announced, or could not fetch the states to check",
        "open the gRPC port; " + _FAULTY + " (docs/how-to/scores-and-audits.md)",
    ),
    pb.REASON_SHARES: Advice(
        "its payloads give other erasure shards than it announced, so no peer could prove what restores them", _FAULTY
    ),
    pb.REASON_LEFT: Advice(
        "it left, or was paused, before it had contributed", "run `dilocox resume` there, or start it again"
    ),
}


def advice(reason: str) -> Advice:
    """Return the advice for a reason, by its public name."""
    return _BY_NAME.get(reason, Advice(reason, ""))


_BY_NAME = {reason_name(reason): said for reason, said in REASONS.items()}
