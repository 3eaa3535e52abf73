"""What the coordinator's machine (round.py) is told, and what it asks for."""

from dataclasses import dataclass
from typing import NamedTuple

from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import Judgement

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
    """Monotonic: decides every wait. Means nothing beyond one life of the process."""
    wall_ms: int
    """Since 1970: a number for commits and certificates."""


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
    """The peer is gone, or stands still: it is not waited for."""

    peer: str


@dataclass(frozen=True)
class Present:
    """The peer is heard, and holds the chain that we hold."""

    peer: str


@dataclass(frozen=True)
class Attested:
    """A peer's evidence holds, by the coordinator's verdict."""

    attestation: pb.Attestation


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Resumed:
    """The coordinator was away and is back: nobody is heard yet, and waiting starts afresh."""

    healed: bool = False
    """Its database was restored or mended: more than half of the roster must be heard, however long that takes."""


@dataclass(frozen=True)
class Returning:
    """The round before closed while some were not heard again yet: the log says it to the round that follows."""

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
    """These clusters report another state than the run's, or nobody knows yet whose is right: they should replay."""

    round: int
    clusters: tuple[str, ...]


Input = Received | Refused | Absent | Present | Resumed | Returning | Attested | Tick
Effect = Reply | Relay | SealBallot | Close | SealCommit | Differ
