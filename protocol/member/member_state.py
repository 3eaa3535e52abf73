"""State of the member machine (member.py): a node's knowledge of its run between two inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.protocol.consensus.head import Head, HostRange, alone
from dilocox.protocol.member.member_io import Attestation, Verdict
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["MemberState"]


@dataclass(frozen=True)
class OpenRound:
    """Knowledge and statements of a member in the open round. A commit replaces it as a whole."""

    loss: float | None = None
    """Held-out loss of this node's state before the phase."""
    own: Mapping[pb.Kind, Statement[Any]] = field(default_factory=dict)
    """Our statements; a replayed report replaces the first one."""
    signing: frozenset[pb.Kind] = frozenset()
    """Kinds that are asked for and not signed yet."""
    held: frozenset[bytes] = frozenset()
    """Digests of those that the coordinator has."""
    refused: Mapping[pb.Kind, tuple[pb.Reason, str]] = field(default_factory=dict)
    """Why the coordinator rejected one finally, since the stream was opened."""
    seen: Mapping[bytes, Statement[pb.Contribution]] = field(default_factory=dict)
    """Contributions, by digest."""
    judging: frozenset[bytes] = frozenset()
    verdicts: Mapping[bytes, Verdict] = field(default_factory=dict)
    ballot: Statement[pb.Ballot] | None = None
    vote_by: float | None = None
    """Time at which this node votes with the verdicts that it has."""
    voted: Statement[pb.Receipt] | None = None
    """Vote of an earlier incarnation, sent again if it is about the ballot. Another one would prove equivocation."""
    rechecking: bool = False
    """The commit that made our state before the open round is being replayed, or was."""


@dataclass(frozen=True)
class MemberState:
    manifest: Manifest
    me: str
    """Our peer id."""
    head: Head
    lead: str = ""
    """Lead host of this host's cluster, which signs for it; empty: this host leads."""
    asked: pb.Claim | None = None
    """Claim that the lead host requested last."""
    hosts: tuple[HostRange, ...] = ()
    """Hosts of this host's cluster; empty: only this one."""
    whole: bool = True
    """All of them are here."""
    account: bytes = b""
    """Account that receives what this cluster earns; empty: none."""
    serial: int = 0
    """Serial of the newest claim, layout or departure that this node signed."""
    roots: Mapping[int, bytes] = field(default_factory=dict)
    """This node's state root before each round."""
    agreed: Mapping[int, bytes] = field(default_factory=dict)
    """The run's roots, as commits name them. A slow node's root is later than the commit."""
    anew: bool = False
    """Our workers started again from a state that the run agreed on, and none of ours agreed since."""
    turned_away: tuple[pb.Reason, str] | None = None
    """Reason why the last claim was rejected; shown until a claim is acknowledged."""
    open: OpenRound = OpenRound()
    checks: Mapping[str, Any] = field(default_factory=dict)
    """Knowledge of each check, by its name; an immutable value."""
    connected: bool = False
    attestation: Attestation | None = None
    """State of this peer's evidence. None: the run requires none."""
    leaving: bool = False
    """We say nothing but goodbye."""
    finishing: int | None = None
    """The round that is still to have what we owe it, before we leave; None: we stay."""

    @property
    def on_roster(self) -> bool:
        """Whether we lead a cluster of it."""
        return self.me in self.head.roster

    @property
    def takes_part(self) -> bool:
        """Whether we are a box of a cluster on it."""
        return self.me in self.head.cluster_by_peer

    @property
    def seated(self) -> bool:
        """Return whether the roster contains this cluster with its current layout and account."""
        wanted = self.hosts or alone(self.me, self.manifest.model.stages), self.account
        return self.on_roster and (self.head.roster[self.me].hosts, self.head.roster[self.me].account) == wanted

    @property
    def root(self) -> bytes | None:
        """Return this node's state root before the open round. None: not computed yet."""
        return self.roots.get(self.head.round)
