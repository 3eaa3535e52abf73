"""Events of nodes and coordinators, typed, each with a sentence. Log, status, API and `dilocox events` show the same
sentence; it names a cluster by its id."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dilocox.protocol import limits
from dilocox.protocol.errors import reason_name
from dilocox.protocol.ids import PEERS_NAMED, short, shortly
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = [
    "NOTABLE",
    "Arrival",
    "AttestationRefused",
    "Audited",
    "BallotOpened",
    "Claimed",
    "CommitApplied",
    "CommitFollowed",
    "CoordinatorAway",
    "CoordinatorBack",
    "DiskLow",
    "Diverged",
    "Event",
    "Heard",
    "Leaving",
    "LeftOut",
    "Missed",
    "NobodyCounted",
    "NotCounted",
    "NotHeard",
    "PhaseEnded",
    "RosterChanged",
    "RoundClosed",
    "RoundOpen",
    "RunFinished",
    "StateChanged",
    "StatementRefused",
    "WorkersEnded",
    "missed",
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
    """Status of a node changed."""

    kind = "state-changed"
    state: str
    why: str

    def line(self) -> str:
        return f"{self.state}: {self.why}"


@dataclass(frozen=True)
class PhaseEnded(Event):
    """Local phase ended at a node."""

    kind = "phase-ended"
    round: int
    inner_steps: int
    loss: float
    payload_bytes: int

    def line(self) -> str:
        return f"round {self.round}: {self.inner_steps} steps, loss {self.loss:.3f}, payload {self.payload_bytes:,} bytes"


@dataclass(frozen=True)
class CommitApplied(Event):
    """Node applied a commit."""

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
    """Commit did not count this node."""

    kind = "not-counted"
    round: int
    reason: pb.Reason
    detail: str

    def view(self) -> dict[str, Any]:
        return {**super().view(), "reason": reason_name(self.reason)}

    def line(self) -> str:
        why = f": {self.detail}" if self.detail else ""
        return f"round {self.round}: this node was not counted: {reason_name(self.reason)}{why}"


@dataclass(frozen=True)
class Missed:
    """Clusters of the roster that a commit did not count."""

    cluster: str
    reason: str
    detail: str


def missed(commit: pb.Commit) -> tuple[Missed, ...]:
    """The first of them."""
    return tuple(Missed(item.peer, reason_name(item.reason), item.detail) for item in commit.excluded[: limits.MISSED_TOLD])


@dataclass(frozen=True)
class NobodyCounted(Event):
    """Round counted no cluster; its work is carried over."""

    kind = "nobody-counted"
    round: int
    missed: tuple[Missed, ...]
    """The first of the roster, and why."""

    def line(self) -> str:
        named = "; ".join(
            f"{short(each.cluster)}: {each.reason}{f' ({each.detail})' if each.detail else ''}"
            for each in self.missed[:PEERS_NAMED]
        )
        return f"round {self.round}: no cluster was counted{f': {named}' if named else ''}"

    @classmethod
    def by(cls, commit: pb.Commit) -> list[Event]:
        """Return events for a commit that counted no cluster although it could have: neither the first nor the closing
        one."""
        return [cls(commit.round, missed(commit))] if commit.round and not commit.counted and not commit.closing else []


@dataclass(frozen=True)
class Audited(Event):
    """Node audited another cluster."""

    kind = "audited"
    round: int
    cluster: str
    """Cluster whose work of that round this node audits."""
    found: str
    """`equal`, `near`, `differs`, `unserved`, `malformed`; `nothing` where this machine could not."""
    why: str

    def line(self) -> str:
        return f"round {self.round}: audited {short(self.cluster)}: {self.found}{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True)
class LeftOut(Event):
    """Commit left out an accepted contribution: by a dishonest coordinator, or one restored from an older backup."""

    kind = "left-out"
    round: int

    def line(self) -> str:
        return f"round {self.round}: the coordinator accepted this node's contribution, but the commit does not include it"


@dataclass(frozen=True)
class Diverged(Event):
    """State of this node differs from the run's."""

    kind = "diverged"
    round: int
    detail: str

    def line(self) -> str:
        return f"state before round {self.round} differs from the run's: {self.detail}; resynchronising"


@dataclass(frozen=True)
class AttestationRefused(Event):
    """Coordinator rejected this node's evidence."""

    kind = "attestation-refused"
    code: str
    reason: str

    def line(self) -> str:
        return f"this node's attestation is invalid: {self.code}: {self.reason}"


@dataclass(frozen=True)
class WorkersEnded(Event):
    """Worker group ended."""

    kind = "workers-ended"
    why: str

    def line(self) -> str:
        return f"stage workers ended ({self.why}); restarting them"


@dataclass(frozen=True)
class RunFinished(Event):
    """Run is finished."""

    kind = "run-finished"
    rounds: int

    def line(self) -> str:
        return f"the run is finished after {self.rounds} rounds"


@dataclass(frozen=True)
class CoordinatorAway(Event):
    """Coordinator is away."""

    kind = "coordinator-away"
    seconds: float
    """Seconds since its last heartbeat."""

    def line(self) -> str:
        return f"no message from the coordinator for {self.seconds:,.0f} s"


@dataclass(frozen=True)
class CoordinatorBack(Event):
    """Coordinator is back."""

    kind = "coordinator-back"

    def line(self) -> str:
        return "the coordinator is live again"


@dataclass(frozen=True)
class DiskLow(Event):
    """Disk is nearly full."""

    kind = "disk-low"
    free_bytes: int
    folder: str

    def line(self) -> str:
        return f"the disk of {self.folder} has {self.free_bytes / 1e9:,.1f} GB free"


# At a holder.


@dataclass(frozen=True)
class CommitFollowed(Event):
    """Relay or archive followed a commit."""

    kind = "commit-followed"
    round: int
    counted: int

    def line(self) -> str:
        return f"round {self.round}: its commit counts {self.counted} clusters"


# At the coordinator.


@dataclass(frozen=True)
class Arrival:
    """When a cluster's contribution, or its vote, came."""

    cluster: str
    seconds: float
    """Seconds since the start of the round."""


@dataclass(frozen=True)
class RoundOpen(Event):
    """Open round; published when its sentence changes."""

    kind = "round-open"
    round: int
    why: str

    def line(self) -> str:
        return f"round {self.round}: {self.why}"


@dataclass(frozen=True)
class Claimed(Event):
    """Peer claimed a seat."""

    kind = "claimed"
    round: int
    cluster: str

    def line(self) -> str:
        return f"round {self.round}: {short(self.cluster)} requests a seat"


@dataclass(frozen=True)
class Leaving(Event):
    """Cluster leaves."""

    kind = "leaving"
    round: int
    cluster: str

    def line(self) -> str:
        return f"round {self.round}: {short(self.cluster)} leaves"


@dataclass(frozen=True)
class Heard(Event):
    """Peer became live."""

    kind = "heard"
    round: int
    cluster: str

    def line(self) -> str:
        return f"round {self.round}: {short(self.cluster)} is live again"


@dataclass(frozen=True)
class NotHeard(Event):
    """Peer became absent."""

    kind = "not-heard"
    round: int
    cluster: str

    def line(self) -> str:
        return f"round {self.round}: {short(self.cluster)} is absent; the round does not wait for it"


@dataclass(frozen=True)
class StatementRefused(Event):
    """Coordinator rejected a statement."""

    kind = "statement-refused"
    round: int
    peer: str
    """Unproven."""
    reason: str
    detail: str

    def line(self) -> str:
        return f"round {self.round}: rejected a statement of {short(self.peer)}: {self.reason}: {self.detail}"


@dataclass(frozen=True)
class BallotOpened(Event):
    """Voting began."""

    kind = "ballot-opened"
    round: int
    contributions: int
    seconds: float
    """Seconds since the start of the round."""
    last: tuple[Arrival, ...]
    """The contributions that came last, the latest at the end."""

    def line(self) -> str:
        return f"round {self.round}: {self.contributions} contributions after {self.seconds:.1f} s{_last(self.last)}; voting begins"


@dataclass(frozen=True)
class RoundClosed(Event):
    """Round closed."""

    kind = "round-closed"
    round: int
    counted: int
    not_counted: int
    seconds: float
    missed: tuple[Missed, ...]
    """The first of those who were not counted."""
    last: tuple[Arrival, ...]
    """The votes that came last, the latest at the end."""

    def line(self) -> str:
        named = "; ".join(f"{short(each.cluster)}: {each.reason}" for each in self.missed[:PEERS_NAMED])
        without = f", {self.not_counted} not ({named})" if self.not_counted else ""
        return f"round {self.round}: closed after {self.seconds:.1f} s, {self.counted} counted{without}{_last(self.last)}"


@dataclass(frozen=True)
class RosterChanged(Event):
    """Roster changed."""

    kind = "roster-changed"
    round: int
    """The first with this roster."""
    clusters: int
    joined: tuple[str, ...]
    """The first of them."""
    left: tuple[str, ...]

    def line(self) -> str:
        joined, left = (_named(what, names) for what, names in (("joined", self.joined), ("gone", self.left)))
        return f"round {self.round}: {self.clusters} clusters on the roster{joined}{left}"


def _last(arrivals: Sequence[Arrival]) -> str:
    return f", the last from {short(arrivals[-1].cluster)} at {arrivals[-1].seconds:.1f} s" if arrivals else ""


def _named(what: str, names: Sequence[str]) -> str:
    return f"; {what}: {shortly(names)}" if names else ""


_TOLD = (
    NotCounted,
    NobodyCounted,
    LeftOut,
    Diverged,
    AttestationRefused,
    RunFinished,
    CoordinatorAway,
    CoordinatorBack,
    DiskLow,
)
NOTABLE = frozenset(each.kind for each in _TOLD)
"""Kinds of events that `--notify` sends to an absent operator."""
