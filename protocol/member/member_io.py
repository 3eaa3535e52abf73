"""Inputs and effects of the member machine (member.py)."""

from dataclasses import dataclass
from typing import Any

from dilocox.protocol import events
from dilocox.protocol.consensus.head import Cluster, Head, HostRange, resting_on
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement

__all__ = [
    "Answered",
    "Asked",
    "Attestation",
    "Away",
    "CheckInput",
    "Committed",
    "Connected",
    "Differs",
    "Effect",
    "Emit",
    "Halt",
    "Input",
    "Judge",
    "Judged",
    "Laid",
    "LeaveRun",
    "Measure",
    "PhaseEnded",
    "Recheck",
    "Rechecked",
    "Resynchronise",
    "Return",
    "Seen",
    "Sign",
    "Signed",
    "StateReady",
    "Tick",
    "Verdict",
    "Whole",
]

Verdict = tuple[pb.Reason, int]
"""Why not (REASON_UNSPECIFIED: accepted), and the first stage the reason is about."""


@dataclass(frozen=True)
class Connected:
    """The coordinator's stream is open; what it held of ours is unknown again."""


@dataclass(frozen=True)
class Away:
    """The stream broke."""


@dataclass(frozen=True)
class Committed:
    """A commit that was verified and stored."""

    commit: Statement[pb.Commit]
    after: Head


@dataclass(frozen=True)
class Seen:
    """A contribution or ballot of the open round."""

    statement: Statement[Any]


@dataclass(frozen=True)
class StateReady:
    """Input: every worker has loaded the state before a round."""

    round: int
    root: bytes
    evaluation_loss: float | None
    """Held-out loss of that state, where it was measured."""


@dataclass(frozen=True)
class PhaseEnded:
    """A local phase is over and its payloads are stored."""

    round: int
    base: bytes
    """State root that it started from."""
    inner_steps: int
    tokens: int
    loss: float
    samples_read: int
    leaves: bytes
    """Blob digest of its leaves."""
    size: int
    """Bytes of all payloads."""
    norm: int
    """Norm code over all stages."""
    effective_rank: float
    error: float
    audit: bytes = b""
    """Digest of the blob with its audit checkpoints, if the run audits."""
    shares: bytes = b""
    """Root over the shards of its payload index and payloads, if the run has shards."""
    holders: tuple[str, ...] = ()
    """Relays that store its payloads, if this node is not reachable."""

    def contribution(self, head: Head, cluster: Cluster) -> pb.Contribution:
        """Return this cluster's contribution to the open round."""
        return pb.Contribution(
            round=head.round,
            head=head.digest,
            inner_steps=self.inner_steps,
            tokens=self.tokens,
            loss=self.loss,
            samples_read=self.samples_read,
            leaves=self.leaves,
            base_state=self.base,
            norm=self.norm,
            size=self.size,
            effective_rank=self.effective_rank,
            error=self.error,
            holders=self.holders,
            attestation=resting_on(head.attestations, cluster),
            audit=self.audit,
            shares=self.shares,
        )


@dataclass(frozen=True)
class Judged:
    """A contribution was fetched and checked, or could not be."""

    contribution: bytes
    verdict: Verdict


@dataclass(frozen=True)
class CheckInput:
    """Finding of this node for one of the run's checks (protocol/checks), which has a subclass for it."""


@dataclass(frozen=True)
class Signed:
    """Input: a statement that `Sign` requested is durable; at a start, also one of an earlier incarnation."""

    statement: Statement[Any]


@dataclass(frozen=True)
class Answered:
    """The coordinator's answer to a statement that was offered."""

    statement: Statement[Any]
    outcome: Outcome
    reason: pb.Reason
    detail: str
    head: bytes | None = None
    """Head of the chain from which it answered; None: the same as ours."""


@dataclass(frozen=True)
class Differs:
    """Input: the coordinator reports that this cluster's state report differs from others."""

    round: int


@dataclass(frozen=True)
class Rechecked:
    """The last commit was replayed from disk."""

    round: int
    root: bytes


@dataclass(frozen=True)
class Attestation:
    """Input: whether this peer's evidence holds, and the reason if not; only in a run that requires evidence."""

    holds: bool
    why: str = ""


@dataclass(frozen=True)
class Laid:
    """Input: the lead host has a new layout for these hosts."""

    hosts: tuple[HostRange, ...]


@dataclass(frozen=True)
class Whole:
    """Whether all boxes of our cluster are here: without one of them nothing is known of some stages."""

    here: bool


@dataclass(frozen=True)
class Asked:
    """Our cluster's lead asks for our consent: a claim that names its layout."""

    claim: pb.Claim


@dataclass(frozen=True)
class LeaveRun:
    """This node takes part no longer: from now on, or once the open round has what it owes it."""

    finishing: bool = False


@dataclass(frozen=True)
class Return:
    """It takes part again."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Sign:
    """Sign this, put it on disk, give it back as Signed."""

    kind: pb.Kind
    body: Any


@dataclass(frozen=True)
class Judge:
    """Fetch and check a contribution."""

    contribution: Statement[pb.Contribution]


@dataclass(frozen=True)
class Measure:
    """Measure what a contribution, which was judged to be well made, does to the loss."""

    contribution: Statement[pb.Contribution]
    own: Statement[pb.Contribution]
    """Contribution of this cluster."""
    clip: int
    """Norm codes by which it is above the round's bound."""
    positions: tuple[int, ...]
    """Samples to measure it on."""


@dataclass(frozen=True)
class Recheck:
    """Replay the last commit from disk."""

    round: int


@dataclass(frozen=True)
class Resynchronise:
    """Start the workers again from a state that the run agreed on."""

    round: int
    detail: str


@dataclass(frozen=True)
class Halt:
    """Effect: the node must stop. The sentence contains the evidence."""

    why: str


@dataclass(frozen=True)
class Emit:
    event: events.Event


Input = (
    Connected
    | Away
    | Committed
    | Seen
    | StateReady
    | PhaseEnded
    | Judged
    | CheckInput
    | Signed
    | Answered
    | Differs
    | Rechecked
    | Attestation
    | Laid
    | Whole
    | Asked
    | LeaveRun
    | Return
    | Tick
)
Effect = Sign | Judge | Measure | Recheck | Resynchronise | Halt | Emit
