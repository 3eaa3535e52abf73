"""What a node knows of the run that it takes part in, between two inputs: the state of the machine in member.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilocox.protocol.facts import Attestation, Verdict
from dilocox.protocol.head import Head, HostRange, alone
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["MemberState"]


@dataclass(frozen=True)
class OpenRound:
    """Knowledge and statements of a member in the open round. A commit replaces it as a whole."""

    loss: float | None = None
    """Held-out loss of our own state before it."""
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
    """Of the cluster whose box we are: it speaks for us; empty: we lead our own."""
    asked: pb.Claim | None = None
    """What it last asked us to agree to."""
    hosts: tuple[HostRange, ...] = ()
    """The boxes of our own cluster; empty: this one."""
    whole: bool = True
    """All of them are here."""
    account: bytes = b""
    """To which what our own cluster's work earns is paid; empty: to nobody."""
    serial: int = 0
    """Of the newest claim, layout or leave that we signed."""
    roots: Mapping[int, bytes] = field(default_factory=dict)
    """Own state root before each round."""
    agreed: Mapping[int, bytes] = field(default_factory=dict)
    """The run's, as commits name it. A slow node's own comes later than the commit."""
    anew: bool = False
    """Our workers started again from a state that the run agreed on, and none of ours agreed since."""
    turned_away: tuple[pb.Reason, str] | None = None
    """Why our last claim was: shown until one is held."""
    open: OpenRound = OpenRound()
    checks: Mapping[str, Any] = field(default_factory=dict)
    """By name of a check: what this node knows for it, in a value that is never changed."""
    connected: bool = False
    attestation: Attestation | None = None
    """None: the run asks for none."""
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
        """Whether our cluster is on the roster as it is laid out, for the account that we name."""
        wanted = self.hosts or alone(self.me, self.manifest.model.stages), self.account
        return self.on_roster and (self.head.roster[self.me].hosts, self.head.roster[self.me].account) == wanted

    @property
    def root(self) -> bytes | None:
        """Own state before the open round; None: not there yet."""
        return self.roots.get(self.head.round)
