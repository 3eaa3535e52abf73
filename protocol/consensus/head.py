"""`Head`: state of the open round, as a fold over all commits, and the types of a roster."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dilocox.protocol.consensus import checks
from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.reputation import Record
from dilocox.protocol.crypto import sha256
from dilocox.protocol.ids import peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, author

__all__ = ["Cluster", "Head", "HostRange", "Rest", "advance", "alone", "host_ranges", "initial_head", "resting_on"]


class HostRange(NamedTuple):
    """A box's share of a cluster, or one stretch of it: a looped schedule gives a box several."""

    peer: str
    first_stage: int
    stage_count: int
    copy: int = 0


def host_ranges(hosts: Iterable[pb.Host]) -> tuple[HostRange, ...]:
    """Return the hosts of a message as ranges."""
    return tuple(HostRange(host.peer, host.first_stage, host.stage_count, host.copy) for host in hosts)


def alone(peer: str, stages: int) -> tuple[HostRange, ...]:
    """The hosts of a cluster of one box."""
    return (HostRange(peer, 0, stages),)


@dataclass(frozen=True)
class Cluster:
    """Cluster on a roster. Its id is its lead host's peer id: no other peer can sign for it."""

    cluster: str
    hosts: tuple[HostRange, ...]
    """Hosts in stage order; those of copy 0 together cover all stages."""
    joined: int
    missed: int = 0
    account: bytes = b""

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host.peer for host in self.hosts))

    def hosts_of(self, stage: int) -> list[str]:
        """Peers with a copy of this stage."""
        return [host.peer for host in self.hosts if host.first_stage <= stage < host.first_stage + host.stage_count]

    def stages_of(self, peer: str) -> list[int]:
        ranges = (range(h.first_stage, h.first_stage + h.stage_count) for h in self.hosts if h.peer == peer)
        return [stage for stages in ranges for stage in stages]


class Rest(NamedTuple):
    """Rest of a cluster that left the roster for missed commits: what it must wait for."""

    until: int
    """The first round in which it may claim."""
    removals: int


@dataclass(frozen=True)
class Head:
    round: int
    """The open round; 0 before the genesis commit."""
    digest: bytes
    """Digest of commit round-1; empty before the genesis commit."""
    coordinator: str
    """Peer id whose signature makes the next commit."""
    term: int = 0
    """Term of the appointment under which it signs; 0: the manifest names it."""
    appointment: pb.Envelope | None = None
    """Appointment, if the next commit is the first of its term."""
    roster: Mapping[str, Cluster] = field(default_factory=dict)
    """Clusters by id."""
    ledger: Ledger = field(default_factory=Ledger)
    trained: int = 0
    """Number of commits that counted a cluster."""
    state: bytes = b""
    """State root that the open round starts from, if the chain already contains it; else empty."""
    built_by: frozenset[str] = frozenset()
    """Clusters that the last commit with any counted: they know that state."""
    norm: int = 0
    """Median norm code of the payloads that were last counted."""
    closed_at_ms: int = 0
    finished: bool = False
    """The closing commit was made."""
    rank_or_k: int = 0
    """Rank or k of the codec in the open round."""
    inner_steps: int = 0
    """H of the open round."""
    attestations: Mapping[str, pb.Attestation] = field(default_factory=dict)
    """Evidence that admits the roster, by peer, in a run that requires evidence."""
    resting: Mapping[str, Rest] = field(default_factory=dict)
    """Suspended clusters by id."""
    collect_history: tuple[int, ...] = ()
    """Milliseconds until more than half of the roster had contributed, of the last rounds that measured it."""
    vote_history: tuple[int, ...] = ()
    standings: Mapping[str, Record] = field(default_factory=dict)
    """Reputation by cluster: of the roster, and of departed clusters with more than a newcomer's."""
    checks: Mapping[str, Any] = field(default_factory=dict)
    """Values that the last commit leaves to each check, by its name."""

    @cached_property
    def cluster_by_peer(self) -> Mapping[str, Cluster]:
        return {peer: cluster for cluster in self.roster.values() for peer in cluster.peers}

    @cached_property
    def known_peers(self) -> Set[str]:
        """Return peers of the roster, lead hosts of the clusters that made the open round's starting state, and departed
        peers with more reputation than a newcomer."""
        return {*self.cluster_by_peer, *self.built_by, *self.standings}

    def closing(self, manifest: Manifest) -> bool:
        """Whether all rounds are trained: the open round only records the final state."""
        return self.round > 0 and self.trained >= manifest.rounds.count

    def names(self, body: pb.Claim | pb.Cluster | pb.Leave) -> bool:
        """Whether a statement that asks for a change of the roster was made now."""
        return bool((body.round, body.head) == (max(1, self.round), self.digest))


def initial_head(coordinator: str, state: bytes = b"") -> Head:
    """Before the genesis commit. `state`: the root that the manifest names; empty where it follows from the seed, and the chain
    says it first in its genesis commit."""
    return Head(round=0, digest=b"", coordinator=coordinator, state=state)


def advance(manifest: Manifest, commit: Statement[pb.Commit]) -> Head:
    """The head after a commit that is trusted: read off the commit, nothing recomputed."""
    body = commit.body
    roster = {
        m.cluster: Cluster(
            m.cluster,
            host_ranges(m.hosts) or alone(m.cluster, manifest.model.stages),
            m.joined,
            m.missed,
            m.account,
        )
        for m in body.roster
    }
    leases = {m.cluster: Lease(m.samples_counted, tuple((s.start, s.end) for s in m.lease)) for m in body.roster}
    counted = frozenset(authors(body, [item.contribution for item in body.counted]))
    return Head(
        round=body.round + 1,
        digest=commit.digest,
        coordinator=commit.peer,
        term=body.term,
        roster=roster,
        ledger=Ledger(body.data_cursor, tuple((span.start, span.end) for span in body.free_spans), leases),
        trained=body.trained,
        state=b"" if counted else body.state,
        built_by=counted or frozenset(body.built_by),
        norm=body.norm,
        closed_at_ms=body.closed_at_ms,
        finished=body.closing,
        rank_or_k=body.rank_or_k,
        inner_steps=body.inner_steps,
        attestations={h.peer: h.attestation for m in body.roster for h in m.hosts if h.HasField("attestation")},
        resting={item.cluster: Rest(item.until, item.removals) for item in body.resting},
        collect_history=tuple(body.collect_history),
        vote_history=tuple(body.vote_history),
        standings={
            **{member.cluster: _record(member.standing) for member in body.roster},
            **{peer_id(item.key): _record(item.standing) for item in body.away},
        },
        checks={check.name: left for check in checks.of(manifest) if (left := check.read_commit(body)) is not None},
    )


def _record(standing: pb.Standing) -> Record:
    return Record(standing.earned, standing.counted, standing.refused, standing.scored, standing.audited, standing.lacking)


def authors(commit: pb.Commit, contributions: Sequence[int]) -> list[str]:
    """Return the clusters that signed these contributions of a commit. Raises IndexError for a number that it does not
    contain."""
    return [peer_id(author(commit, commit.contributions[index])) for index in contributions]


def resting_on(attestations: Mapping[str, pb.Attestation], cluster: Cluster) -> bytes:
    """Return the evidence that a contribution of this cluster names; empty if there is none."""
    nonces = [attestations[peer].nonce for peer in cluster.peers if peer in attestations]
    return sha256(*nonces) if nonces else b""
