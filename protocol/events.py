"""What happens to a node, as typed events with a line for people: log, status, API and `dilocox node` show the same sentence."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dilocox.protocol.errors import reason_name
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = [
    "AttestationRefused",
    "CommitApplied",
    "Diverged",
    "Event",
    "LeftOut",
    "NotCounted",
    "PhaseEnded",
    "RunFinished",
    "StateChanged",
    "WorkersEnded",
]


@dataclass(frozen=True)
class Event:
    kind: ClassVar[str] = "event"

    def line(self) -> str:
        """The sentence."""
        return self.kind

    def view(self) -> dict[str, Any]:
        return {"event": self.kind, **asdict(self), "line": self.line()}


@dataclass(frozen=True)
class StateChanged(Event):
    kind = "state-changed"
    state: str
    why: str

    def line(self) -> str:
        return f"{self.state}: {self.why}"


@dataclass(frozen=True)
class PhaseEnded(Event):
    kind = "phase-ended"
    round: int
    inner_steps: int
    loss: float
    payload_bytes: int

    def line(self) -> str:
        return f"round {self.round}: {self.inner_steps} steps, loss {self.loss:.3f}, payload {self.payload_bytes:,} bytes"


@dataclass(frozen=True)
class CommitApplied(Event):
    kind = "commit-applied"
    round: int
    counted: bool
    clusters: int
    applied_at_step: int
    """Inner step of the next local phase."""
    state: str
    """First digits of the state root."""

    def line(self) -> str:
        me = "counted" if self.counted else "not counted"
        return f"round {self.round}: {me}, {self.clusters} clusters; applied at step {self.applied_at_step}, state {self.state}"


@dataclass(frozen=True)
class NotCounted(Event):
    kind = "not-counted"
    round: int
    reason: pb.Reason
    detail: str

    def line(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        return f"round {self.round}: this node was not counted: {reason_name(self.reason)}{why}"


@dataclass(frozen=True)
class LeftOut(Event):
    kind = "left-out"
    round: int

    def line(self) -> str:
        return f"round {self.round}: the coordinator accepted this node's contribution, and its commit leaves it out"


@dataclass(frozen=True)
class Diverged(Event):
    kind = "diverged"
    round: int
    detail: str

    def line(self) -> str:
        return f"state before round {self.round} differs from the run's: {self.detail}; resynchronising"


@dataclass(frozen=True)
class AttestationRefused(Event):
    kind = "attestation-refused"
    code: str
    reason: str

    def line(self) -> str:
        return f"this node's attestation does not hold: {self.code}: {self.reason}"


@dataclass(frozen=True)
class WorkersEnded(Event):
    kind = "workers-ended"
    why: str

    def line(self) -> str:
        return f"stage workers ended ({self.why}); starting them again"


@dataclass(frozen=True)
class RunFinished(Event):
    kind = "run-finished"
    rounds: int

    def line(self) -> str:
        return f"the run is finished after {self.rounds} rounds"
