"""Inputs and effects of the coordinator's machine (round_machine.py)."""

from dataclasses import dataclass
from typing import NamedTuple

from dilocox.protocol.consensus.rules import Judgement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement

__all__ = [
    "Absent",
    "Attested",
    "Close",
    "Differ",
    "Effect",
    "Input",
    "Moment",
    "Present",
    "Received",
    "Refused",
    "Relay",
    "Reply",
    "Resumed",
    "Returning",
    "SealBallot",
    "SealCommit",
    "Tick",
]


class Moment(NamedTuple):
    """When an input came in."""

    seconds: float
    """Monotonic time; decides every wait. It has no meaning beyond one incarnation of the process."""
    wall_ms: int
    """Milliseconds since 1970: for commits and certificates."""


@dataclass(frozen=True)
class Received:
    """A statement with a valid signature for this run, of a kind that rules.py judges."""

    statement: Statement[object]
    live: bool = True
    """False where the peer has no stream: its claim takes no part until it has one."""


@dataclass(frozen=True)
class Refused:
    """A message that never became a statement; `peer` is unproven."""

    peer: str
    reason: pb.Reason
    detail: str


@dataclass(frozen=True)
class Absent:
    """Input: the peer is gone or silent; no deadline waits for it."""

    peer: str


@dataclass(frozen=True)
class Present:
    """Input: the peer is live, and has the same chain."""

    peer: str


@dataclass(frozen=True)
class Attested:
    """Input: the coordinator has verified a peer's evidence."""

    attestation: pb.Attestation


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Resumed:
    """Input: the coordinator was away and is back. No peer is live yet, and all waits start again."""

    healed: bool = False
    """True if its database was restored or repaired: more than half of the roster must be live first, however long that
    takes."""


@dataclass(frozen=True)
class Returning:
    """Input: some peers were not live again when the last round closed; the log passes this to the next round."""

    until: float
    """Monotonic."""


@dataclass(frozen=True)
class Reply:
    """The answer to the sender of the statement just received."""

    judgement: Judgement


@dataclass(frozen=True)
class Relay:
    """Send a peer's statement on to everyone."""

    statement: Statement[object]


@dataclass(frozen=True)
class SealBallot:
    """Sign, give back as Received, and send once it is on disk."""

    body: pb.Ballot


@dataclass(frozen=True)
class Close:
    """The round closes on what is gathered: `close` makes the commit. The last effect of its step; no input comes in between."""

    moment: Moment


@dataclass(frozen=True)
class SealCommit:
    """Sign, put on disk with the inputs before it cut off, then send."""

    body: pb.Commit


@dataclass(frozen=True)
class Differ:
    """Effect: these clusters should replay. They report another state than the run's, or no majority exists yet."""

    round: int
    clusters: tuple[str, ...]


Input = Received | Refused | Absent | Present | Resumed | Returning | Attested | Tick
Effect = Reply | Relay | SealBallot | Close | SealCommit | Differ
