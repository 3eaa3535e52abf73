"""The commit chain: a run is a log, and `Head` is the fold over it.

`compose` is the one function that makes a commit from what was received; the round machine calls it to close a round and `extend`
calls it to verify one, by recomputing everything that follows from the statements inside and comparing. Invariants of a chain:
commit t names the digest of commit t-1; counted clusters are on the roster that commit t-1 named; every sample position is counted
at most once (ledger.py).
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dilocox.protocol import adaptive, rules
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ledger import Lease, Ledger
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import Cluster

__all__ = ["Gathered", "Head", "compose", "extend", "initial_head"]


@dataclass(frozen=True)
class Head:
    """What the commits so far imply for the open round."""

    round: int
    """The open round; 0 before the genesis commit."""
    digest: bytes
    """Digest of commit round-1; empty before the genesis commit."""
    roster: Mapping[str, Cluster] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    median_norms: tuple[pb.StageNorm, ...] = ()
    closed_at_ms: int = 0
    finished: bool = False
    """The closing commit was made."""
    keep: int = 0
    """What the codec keeps in the open round: rank or k."""
    inner_steps: int = 0
    """H of the open round."""
    attestations: Mapping[str, pb.Attestation] = field(default_factory=dict)
    """By peer: what admits the roster, where the run asks for evidence."""


@dataclass(frozen=True)
class Gathered:
    """What a round received: the inputs of `compose`."""

    claims: Sequence[Statement] = ()
    leaves: Sequence[Statement] = ()
    contributions: Sequence[Statement] = ()
    receipts: Sequence[Statement] = ()
    reports: Sequence[Statement] = ()
    refusals: Sequence[pb.Exclusion] = ()
    attested: Sequence[pb.Attestation] = ()
    """Verdicts since the last commit, by peer."""
    ballot_at_ms: int = 0
    closed_at_ms: int = 0


def initial_head() -> Head:
    return Head(round=0, digest=b"")


def compose(manifest: Manifest, head: Head, gathered: Gathered) -> pb.Commit:
    """The commit that closes `head.round` on exactly these statements. Pure: equal inputs give equal commits."""
    attestations = valid_attestations(head, gathered.attested, gathered.closed_at_ms)
    received = gathered
    if manifest.attestation.kinds:
        gathered = replace(gathered, claims=[claim for claim in gathered.claims if claim.peer in attestations])
    closing = head.round > manifest.rounds.count
    absent = [item.peer for item in gathered.refusals if item.reason == pb.REASON_ABSENT]
    result = rules.tally(manifest, head.roster, gathered.contributions, gathered.receipts, absent)
    if closing or head.round == 0:
        result = rules.Tally((), (), (), {}, 0.0)
    for item in result.counted:
        item.attestations.extend(head.attestations[p] for p in head.roster[item.cluster].peers if p in head.attestations)
    roster, ledger = _next_roster(manifest, head, gathered, result, attestations)
    keep = adaptive.next_keep(manifest, head.keep, result.counted) if head.round else manifest.compression.keep
    commit = pb.Commit(
        round=head.round,
        previous=head.digest,
        closing=closing,
        opened_at_ms=head.closed_at_ms,
        closed_at_ms=gathered.closed_at_ms,
        ballot_at_ms=gathered.ballot_at_ms,
        claims=[s.envelope for s in received.claims],
        leaves=[s.envelope for s in gathered.leaves],
        contributions=[s.envelope for s in gathered.contributions],
        receipts=[s.envelope for s in gathered.receipts],
        reports=[s.envelope for s in gathered.reports],
        refusals=gathered.refusals,
        counted=result.counted,
        excluded=result.excluded,
        states=result.states or _reported_states(manifest, head, gathered),
        median_norms=rules.medians(result.counted, head.median_norms),
        loss=result.loss,
        data_cursor=ledger.cursor,
        free_spans=[pb.Span(start=start, end=end) for start, end in ledger.free],
        roster=[_member(roster[name], ledger.leases[name], attestations) for name in sorted(roster)],
        attested=gathered.attested,
        keep=keep,
        inner_steps=adaptive.next_inner_steps(manifest, head.round + 1, keep),
    )
    losses = [s.body.evaluation_loss for s in gathered.reports if s.body.evaluated]
    if losses:
        commit.evaluated, commit.evaluation_loss = True, statistics.median(losses)
    return commit


def valid_attestations(head: Head, attested: Iterable[pb.Attestation], now_ms: int) -> dict[str, pb.Attestation]:
    """By peer: the newest verdicts, without those that have expired."""
    newest = {**head.attestations, **{item.peer: item for item in attested}}
    return {peer: item for peer, item in newest.items() if item.valid_until_ms > now_ms}


def genesis_groups(manifest: Manifest, claims: Iterable[Statement]) -> list[dict[str, Cluster]]:
    """Complete clusters among the claims, grouped by the initial state they claim to hold; the largest group first."""
    groups: dict[tuple[tuple[int, bytes], ...], dict[str, Cluster]] = {}
    claims = list(claims)
    for name, cluster in complete_claims(manifest, claims, round=1).items():
        states = tuple(
            sorted((s.stage, s.digest) for claim in claims if claim.peer in cluster.peers for s in claim.body.states)
        )
        groups.setdefault(states, {})[name] = cluster
    return sorted(groups.values(), key=lambda group: (-len(group), min(group)))


def complete_claims(manifest: Manifest, claims: Iterable[Statement], round: int) -> dict[str, Cluster]:
    """Clusters whose claims tile every stage."""
    hosts: dict[str, list[tuple[str, int, int]]] = {}
    for claim in claims:
        hosts.setdefault(claim.body.cluster, []).append((claim.peer, claim.body.first_stage, claim.body.stage_count))
    ordered = {name: tuple(sorted(found, key=lambda host: host[1])) for name, found in hosts.items()}
    return {
        name: Cluster(name, found, joined=round)
        for name, found in sorted(ordered.items())
        if rules.tiles(found, manifest.model.stages)
    }


def _next_roster(
    manifest: Manifest, head: Head, gathered: Gathered, result: rules.Tally, attestations: Mapping[str, pb.Attestation]
) -> tuple[dict[str, Cluster], Ledger]:
    """Who is on the roster of the next round, and the ledger after this one."""
    ledger, counted = head.ledger, {item.cluster for item in result.counted}
    leaving = {statement.peer for statement in gathered.leaves}
    for name in sorted(counted):
        ledger = ledger.settle(name, result.samples_read[name])
    roster: dict[str, Cluster] = {}
    for name, cluster in sorted(head.roster.items()):
        missed = 0 if name in counted else cluster.missed + 1
        admitted = not manifest.attestation.kinds or all(peer in attestations for peer in cluster.peers)
        if missed < rules.MISSED_COMMITS and leaving.isdisjoint(cluster.peers) and admitted:
            roster[name] = Cluster(name, cluster.hosts, cluster.joined, missed)
    if head.round == 0:
        joining = (genesis_groups(manifest, gathered.claims) or [{}])[0]
    else:
        joining = complete_claims(manifest, gathered.claims, head.round + 1)
    for name, cluster in joining.items():
        if leaving.isdisjoint(cluster.peers):
            # A host that restarts claims again: same cluster, same lease. A changed cluster starts over.
            known = roster.get(name)
            roster[name] = Cluster(name, known.hosts, known.joined) if known and known.hosts == cluster.hosts else cluster
    for name in sorted(head.ledger.leases):
        if name not in roster or roster[name].joined == head.round + 1:
            ledger = ledger.release(name)
    ahead = rules.LEASE_PHASES * manifest.rounds.max_inner_steps * manifest.training.batch_size
    return roster, ledger.top_up(sorted(roster), ahead)


def _reported_states(manifest: Manifest, head: Head, gathered: Gathered) -> list[pb.StageState]:
    """The state that the reports (at genesis: the claims) agree on; a stage on which they differ is left out."""
    digests: dict[int, set[bytes]] = {}
    if head.round == 0:
        chosen = {peer for c in (genesis_groups(manifest, gathered.claims) or [{}])[0].values() for peer in c.peers}
        bodies = [statement.body for statement in gathered.claims if statement.peer in chosen]
    else:
        best: dict[str, Statement] = {}  # a replayed report overrides the sender's first one
        for statement in sorted(gathered.reports, key=lambda statement: bool(statement.body.replayed)):
            best[statement.peer] = statement
        bodies = [statement.body for statement in best.values()]
    for body in bodies:
        for state in body.states:
            digests.setdefault(state.stage, set()).add(state.digest)
    return [pb.StageState(stage=s, digest=next(iter(digests[s]))) for s in sorted(digests) if len(digests[s]) == 1]


def _member(cluster: Cluster, lease: Lease, attestations: Mapping[str, pb.Attestation]) -> pb.Member:
    return pb.Member(
        cluster=cluster.cluster,
        hosts=[
            pb.Host(peer=peer, first_stage=first, stage_count=count, attestation=attestations.get(peer))
            for peer, first, count in cluster.hosts
        ],
        joined=cluster.joined,
        missed=cluster.missed,
        samples_counted=lease.counted,
        lease=[pb.Span(start=start, end=end) for start, end in lease.spans],
    )


def advance(manifest: Manifest, commit: Statement) -> Head:
    """The head after a commit that is trusted: read off the commit, nothing recomputed."""
    body: pb.Commit = commit.body
    roster = {
        m.cluster: Cluster(m.cluster, tuple((h.peer, h.first_stage, h.stage_count) for h in m.hosts), m.joined, m.missed)
        for m in body.roster
    }
    leases = {m.cluster: Lease(m.samples_counted, tuple((s.start, s.end) for s in m.lease)) for m in body.roster}
    free = tuple((span.start, span.end) for span in body.free_spans)
    return Head(
        round=body.round + 1,
        digest=commit.digest,
        roster=roster,
        ledger=Ledger(body.data_cursor, free, leases),
        median_norms=tuple(body.median_norms),
        closed_at_ms=body.closed_at_ms,
        finished=body.closing,
        keep=body.keep,
        inner_steps=body.inner_steps,
        attestations={h.peer: h.attestation for m in body.roster for h in m.hosts if h.HasField("attestation")},
    )


def extend(manifest: Manifest, coordinator: str, head: Head, envelope: pb.Envelope | bytes) -> tuple[Head, Statement]:
    """Verify the next commit completely and fold it in. Raises RemoteError with what does not hold."""
    run_id = manifest.run_id
    commit = open_envelope(envelope, run_id, (pb.KIND_COMMIT,))
    body: pb.Commit = commit.body
    if commit.peer != coordinator:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, f"commit {body.round} is signed by {commit.peer}, not by the coordinator")
    if body.round != head.round or body.previous != head.digest or head.finished:
        raise RemoteError(pb.REASON_WRONG_HEAD, f"commit {body.round} does not follow commit {head.round - 1}")

    def reopen(envelopes: Iterable[pb.Envelope], kind: int) -> list[Statement]:
        return [open_envelope(item, run_id, (kind,)) for item in envelopes]

    gathered = Gathered(
        claims=reopen(body.claims, pb.KIND_CLAIM),
        leaves=reopen(body.leaves, pb.KIND_LEAVE),
        contributions=reopen(body.contributions, pb.KIND_CONTRIBUTION),
        receipts=reopen(body.receipts, pb.KIND_RECEIPT),
        reports=reopen(body.reports, pb.KIND_STATE_REPORT),
        refusals=list(body.refusals),
        attested=list(body.attested),
        ballot_at_ms=body.ballot_at_ms,
        closed_at_ms=body.closed_at_ms,
    )
    for statement in gathered.contributions:
        judgement = rules.judge_contribution(
            statement, manifest, head.round, head.digest, head.roster, head.ledger, head.attestations
        )
        if judgement.outcome is not rules.Outcome.ACCEPT:
            raise RemoteError(judgement.reason, f"commit {body.round} holds a contribution it may not: {judgement.detail}")
    expected = compose(manifest, head, gathered)
    if expected != body:
        names = [f.name for f in body.DESCRIPTOR.fields if getattr(expected, f.name) != getattr(body, f.name)]
        raise RemoteError(pb.REASON_MALFORMED, f"commit {body.round} does not follow from its statements: {', '.join(names)}")
    return advance(manifest, commit), commit
