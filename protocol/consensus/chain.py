"""Commit chain: a run is a log, and every commit can be verified from the log alone.

`compose` is the only function that makes a commit from a pool of statements; the round machine closes a round with it.
`extend` verifies a commit: it folds the commit's statements through the table of rules, composes again, and compares.
Invariants: commit t names the digest of commit t-1; counted clusters are on the roster of commit t-1; every sample
position is counted at most once (data_leases.py); a commit that counts no cluster changes only the roster.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dilocox.protocol import limits, norms
from dilocox.protocol.consensus import checks, reputation, rules
from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.head import Cluster, Head, Rest, advance
from dilocox.protocol.consensus.pool import Slot, StatementPool, single
from dilocox.protocol.consensus.tally import Tally, tally
from dilocox.protocol.consensus.terms import appoint
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import key_of_peer, peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run import adaptive
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, author, open_envelope, parse, unpacked

__all__ = [
    "Closing",
    "CountedPayload",
    "NamedBy",
    "compose",
    "envelopes",
    "extend",
    "genesis_group",
    "seats",
    "taken",
    "valid_attestations",
]

MISSED_COMMITS = 2
"""So many counting commits in a row without being counted take a cluster off the roster …"""
LONGEST_REST = 6
"""Largest exponent of the rest: it lasts 2 ** removals commits, and at most 2 ** this."""
LEASE_PHASES = 4
"""Phases of samples leased ahead: the one in flight, the one running, and two that a commit may exclude."""
NEWCOMER_SHARE = 8
"""An open run seats at most one new cluster per this many clusters of full reputation on the roster, but always
min_clusters."""


@dataclass(frozen=True)
class Closing:
    """Times measured by the coordinator when a round closes: for people, certificates and the next deadlines."""

    at_ms: int
    """Wall clock, milliseconds since 1970; never below the last commit's."""
    open_ms: int = 0
    collect_ms: int = 0
    """Time until more than half of the roster had contributed; 0: not measured."""
    vote_ms: int = 0


def compose(manifest: Manifest, head: Head, gathered: StatementPool, closing: Closing) -> pb.Commit:
    """The commit that closes `head.round` on exactly these statements. Pure: equal inputs give equal commits."""
    if gathered.ballot is None:
        gathered = replace(gathered, contributions={}, receipts={})
    attestations = valid_attestations(head, gathered.attested.values(), closing.at_ms)
    absent = {item.peer for item in gathered.refusals if item.reason == pb.REASON_ABSENT}
    result = tally(manifest, head, gathered, absent)
    seating = seats(manifest, head, gathered, attestations, absent, bool(result.counted), result.state)
    roster, ledger, resting = _next_roster(manifest, head, gathered, result, attestations, seating.clusters)
    last = head.closing(manifest)
    excluded = [] if last else result.excluded
    why = {item.peer: item.reason for item in excluded}
    standings = reputation.after(
        manifest,
        head.standings,
        result.counted,
        why,
        result.records,
        result.penalized,
        roster,
        genesis=not head.round,
    )
    rank_or_k = (
        adaptive.next_rank_or_k(manifest, head.rank_or_k, [s.body for s in result.counted.values()])
        if head.round
        else manifest.compression.keep
    )
    trained = head.trained + bool(result.counted)
    commit = pb.Commit(
        round=head.round,
        previous=head.digest,
        closed_at_ms=closing.at_ms,
        collect_ms=closing.collect_ms,
        vote_ms=closing.vote_ms,
        open_ms=closing.open_ms,
        ballot=gathered.ballot.envelope if gathered.ballot else None,
        **_packed(gathered),
        refusals=gathered.refusals,
        attested=[gathered.attested[peer] for peer in sorted(gathered.attested)],
        closing=last,
        roster=[_member(manifest, roster[name], ledger.leases[name], attestations, standings[name]) for name in sorted(roster)],
        counted=_counted(gathered, result, reputation.by_standing(manifest, head.standings, result.counted)),
        excluded=excluded,
        state=seating.state,
        norm=result.norm,
        loss=result.loss,
        data_cursor=ledger.cursor,
        free_spans=[pb.Span(start=start, end=end) for start, end in ledger.free],
        rank_or_k=rank_or_k,
        inner_steps=manifest.rounds.inner_steps,
        trained=trained,
        built_by=[] if result.counted else sorted(head.built_by),
        resting=[pb.Rest(cluster=name, until=rest.until, removals=rest.removals) for name, rest in sorted(resting.items())],
        collect_history=_remember(head.collect_history, closing.collect_ms, result),
        vote_history=_remember(head.vote_history, closing.vote_ms, result),
        term=head.term,
        appointment=head.appointment,
        away=[
            pb.Away(key=key_of_peer(name), standing=pb.Standing(**each._asdict()))
            for name, each in standings.items()
            if name not in roster
        ],
    )
    if losses := _losses(gathered):
        says = reputation.by_standing(manifest, head.standings, losses)
        commit.evaluated, commit.evaluation_loss = True, norms.lower_median(list(losses.values()), list(says.values()))
    for check in checks.of(manifest):
        check.fill_commit(manifest, head, gathered, result, commit)
    return commit


def _losses(gathered: StatementPool) -> dict[str, float]:
    """Return held-out losses by cluster, in the order of names; a replay's loss replaces the first one. The order matters:
    a verifier has the statements in another order, and the median of 0 and -0 depends on it."""
    reports = [single(slot) for _, slot in sorted(gathered.reports.items())]
    return {report.peer: report.body.evaluation_loss for report in reports if report and report.body.evaluated}


DEADLINE_HISTORY = 8
"""Rounds remembered for deadlines."""


def _remember(history: tuple[int, ...], milliseconds: int, result: Tally) -> tuple[int, ...]:
    """Return the history with a new duration. Deadlines learn only from rounds that counted a cluster."""
    return (*history, milliseconds)[-DEADLINE_HISTORY:] if milliseconds and result.counted else history


def _statements(slots: Mapping[Any, Slot]) -> list[Statement[Any]]:
    return sorted((statement for slot in slots.values() for statement in slot), key=lambda statement: statement.digest)


LISTS: Mapping[str, pb.Kind] = {
    "claims": pb.KIND_CLAIM,
    "clusters": pb.KIND_CLUSTER,
    "leaves": pb.KIND_LEAVE,
    "reports": pb.KIND_STATE_REPORT,
    "contributions": pb.KIND_CONTRIBUTION,
    "receipts": pb.KIND_RECEIPT,
}
"""A commit's statements as they are folded, the ballot before the receipts: fields of `StatementPool` and of a commit."""


def _packed(gathered: StatementPool) -> dict[str, Any]:
    """Return the commit's lists of statements, and the keys of their signers. A key occurs once, for all its statements."""
    lists = {name: _statements(getattr(gathered, name)) for name in LISTS}
    keys = sorted({statement.envelope.key for statements in lists.values() for statement in statements})
    index = {key: number for number, key in enumerate(keys)}

    def signed(envelope: pb.Envelope) -> pb.Signed:
        return pb.Signed(signer=index[envelope.key], body=envelope.body, signature=envelope.signature)

    packed = {name: [signed(statement.envelope) for statement in statements] for name, statements in lists.items()}
    return {**packed, "signers": keys}


def _counted(gathered: StatementPool, result: Tally, says: Mapping[str, int]) -> list[pb.Counted]:
    index = {statement.digest: number for number, statement in enumerate(_statements(gathered.contributions))}
    return [
        pb.Counted(
            contribution=index[statement.digest],
            weight=result.weights[name],
            clip=result.clips[name],
            standing=says[name],
        )
        for name, statement in result.counted.items()
    ]


def valid_attestations(head: Head, attested: Iterable[pb.Attestation], now_ms: int) -> dict[str, pb.Attestation]:
    """Return the newest verdicts by peer, without expired ones."""
    newest = {**head.attestations, **{item.peer: item for item in attested}}
    return {peer: item for peer, item in newest.items() if item.valid_until_ms > now_ms}


@dataclass(frozen=True)
class Seating:
    clusters: Mapping[str, Cluster]
    """Clusters that take a seat now, or renew theirs."""
    state: bytes
    """State root that the open round starts from; empty: no trusted cluster reports one."""


def seats(
    manifest: Manifest,
    head: Head,
    gathered: StatementPool,
    attestations: Mapping[str, pb.Attestation],
    absent: Set[str],
    counting: bool,
    built_on: bytes,
) -> Seating:
    """Return the claims that a commit seats. All have one state, the run's, and are live: an `absent` cluster takes no
    place, and has no part in the choice of the initial state.

    `counting`: the commit counts a cluster, which built on `built_on`. A commit that counts none revives a run when
    fewer than min_clusters of its roster are live: then suspended clusters may claim, too.
    """
    if head.closing(manifest):
        return Seating({}, rules.known_state(manifest, head, gathered))
    complete = {n: item for n, item in rules.complete_clusters(manifest, head, gathered).items() if n not in absent}
    if manifest.attestation.kinds:
        complete = {n: (c, s) for n, (c, s) in complete.items() if all(peer in attestations for peer in c.peers)}
    if head.round == 0:
        group = genesis_group(manifest, complete)
        return Seating({name: complete[name][0] for name in group}, complete[group[0]][1] if group else b"")
    staying = set(head.roster) - absent - gathered.leaving()
    waking = not counting and len(staying) < manifest.rounds.min_clusters
    state = built_on or rules.known_state(manifest, head, gathered)
    if waking and not state:
        state = _plurality(manifest, head, gathered, staying | complete.keys())
    wanting = [name for name, (_, root) in complete.items() if state and root == state]
    fresh = [name for name in wanting if name not in head.roster and (waking or not _rests(head, name))]
    if manifest.admission.policy == "open":
        whole = reputation.total(manifest, head.standings, head.roster) // max(1, manifest.standing.rounds)
        most = max(manifest.rounds.min_clusters, whole // NEWCOMER_SHARE)
        # a cluster that returns with reputation takes no newcomer's place
        back = [name for name in fresh if name in head.standings]
        lot = _lot(head, gathered)
        lots = sorted(set(fresh) - set(back), key=lambda name: sha256(lot, name.encode()))
        fresh = [*sorted(back, key=lambda name: (-head.standings[name].earned, name)), *lots[:most]]
    fresh = fresh[: limits.CLUSTERS - len(head.roster)]
    return Seating({name: complete[name][0] for name in wanting if name in head.roster or name in fresh}, state)


def _lot(head: Head, gathered: StatementPool) -> bytes:
    """Return the seed of the newcomers' lots: the votes' signatures, which no unknown peer sees before the commit. Without
    votes it is the head alone, which unknown peers know when they choose their names."""
    return sha256(head.digest, *(receipt.signing for receipt in _statements(gathered.receipts)))


def _rests(head: Head, cluster: str) -> bool:
    return cluster in head.resting and head.round < head.resting[cluster].until


def genesis_group(manifest: Manifest, complete: Mapping[str, tuple[Cluster, bytes]]) -> list[str]:
    """Return the largest group of claiming clusters with one initial state; of equals the one with the smallest name. If the
    manifest names founders, only their claims are in it."""
    founders = set(manifest.admission.allow) or complete.keys()
    groups: dict[bytes, list[str]] = {}
    for name in sorted(complete.keys() & founders):
        groups.setdefault(complete[name][1], []).append(name)
    return min(groups.values(), key=lambda names: (-len(names), names[0]), default=[])


def _plurality(manifest: Manifest, head: Head, gathered: StatementPool, here: Set[str]) -> bytes:
    """Return the state of a run that would stop otherwise, because two thirds of its makers are not live: the majority
    state of the first group below that has live clusters. This applies only to a commit that counts no cluster while
    too few are live. At least min_clusters of `here` must not contradict the state: the last cluster that leaves
    decides nothing for clusters that return.

    The groups are: makers of the state; the roster; suspended clusters; and, in a run with an allow-list, claiming
    clusters. Unknown peers alone never define an open run's model. If all peers with the state are gone, the run waits
    for one of them.
    """
    said = list(rules.told_states(gathered, here).values())
    admitted = gathered.claims if manifest.admission.policy == "allow-list" else ()
    for names in (head.built_by, head.roster, head.resting, admitted):
        says = reputation.by_standing(manifest, head.standings, names)
        told: dict[bytes, int] = {}
        for name, root in rules.told_states(gathered, names).items():
            if len(here) - len(said) + said.count(root) >= manifest.rounds.min_clusters:
                told[root] = told.get(root, 0) + says[name]
        if told:
            return min(told, key=lambda root: (-told[root], root))
    return b""


def _next_roster(
    manifest: Manifest,
    head: Head,
    gathered: StatementPool,
    result: Tally,
    attestations: Mapping[str, pb.Attestation],
    seating: Mapping[str, Cluster],
) -> tuple[dict[str, Cluster], Ledger, dict[str, Rest]]:
    """Return the roster of the next round, the data leases after this round, and the clusters that must wait before they
    claim again."""
    ledger, leaving, resting = head.ledger, gathered.leaving(), _still_resting(head)
    # No cluster can claim a seat in the closing round. Clusters that the last trained round counts keep theirs, to
    # report their state.
    ended = head.trained + bool(result.counted) >= manifest.rounds.count
    for name, statement in result.counted.items():
        ledger = ledger.settle(name, statement.body.samples_read)
    roster: dict[str, Cluster] = {}
    for name, cluster in head.roster.items():
        missed = 0 if name in result.counted else cluster.missed + bool(result.counted)
        admitted = not manifest.attestation.kinds or all(peer in attestations for peer in cluster.peers)
        if missed >= MISSED_COMMITS:
            removals = resting[name].removals + 1 if name in resting else 1
            resting[name] = Rest(head.round + 1 + 2 ** min(removals, LONGEST_REST), removals)
        elif (name not in leaving and admitted) or (ended and name in result.counted):
            roster[name] = replace(cluster, missed=missed)
    for name, cluster in seating.items():
        # A cluster that restarts claims again, with the same hosts and lease. A cluster with a new layout keeps its
        # lease, too.
        known = roster.get(name)
        if name not in leaving and (known or name not in head.roster):
            roster[name] = replace(cluster, joined=known.joined, missed=known.missed) if known else cluster
    for name in sorted(head.ledger.leases):
        if name not in roster:
            ledger = ledger.release(name)
    ahead = LEASE_PHASES * manifest.rounds.max_inner_steps * manifest.training.batch_size
    return roster, ledger.top_up(sorted(roster), ahead), resting


def _still_resting(head: Head) -> dict[str, Rest]:
    """Rests are forgotten as long after their end as they lasted."""
    return {
        name: rest
        for name, rest in sorted(head.resting.items(), key=lambda item: (-item[1].until, item[0]))[: limits.CLUSTERS]
        if head.round < rest.until + 2 ** min(rest.removals, LONGEST_REST)
    }


def _member(
    manifest: Manifest,
    cluster: Cluster,
    lease: Lease,
    attestations: Mapping[str, pb.Attestation],
    record: reputation.Record,
) -> pb.Member:
    hosts = [
        pb.Host(
            peer=host.peer,
            first_stage=host.first_stage,
            stage_count=host.stage_count,
            copy=host.copy,
            attestation=attestations.get(host.peer) if manifest.attestation.kinds else None,
        )
        for host in cluster.hosts
    ]
    alone = len(hosts) == 1 and not hosts[0].HasField("attestation")
    return pb.Member(
        cluster=cluster.cluster,
        hosts=[] if alone else hosts,
        joined=cluster.joined,
        missed=cluster.missed,
        samples_counted=lease.counted,
        lease=[pb.Span(start=start, end=end) for start, end in lease.spans],
        account=cluster.account,
        standing=pb.Standing(**record._asdict()),
    )


@dataclass(frozen=True)
class CountedPayload:
    """One cluster's payload that a commit counts."""

    cluster: str
    weight: int
    clip: int
    """Norm codes above the bound: its payloads count by `norms.clip_factor(clip)`."""
    say: int
    """Its author's standing."""
    contribution: pb.Contribution
    digest: bytes
    """Digest of the contribution."""

    @property
    def factor(self) -> float:
        return norms.clip_factor(self.clip)


class NamedBy(NamedTuple):
    """The commit that names a blob, for a peer that restores it."""

    round: int
    state: bool = False
    """The blob is of the state that the round starts from; else of what the commit counts."""


def taken(commit: pb.Commit) -> list[CountedPayload]:
    """The counted of a commit that was verified, in the order of the mean."""
    found = []
    for item in commit.counted:
        signed = commit.contributions[item.contribution]
        key = author(commit, signed)
        contribution = parse(pb.Contribution, signed.body)
        found.append(
            CountedPayload(peer_id(key), item.weight, item.clip, item.standing, contribution, sha256(key, signed.body))
        )
    return found


def holders(commit: pb.Commit) -> dict[str, list[str]]:
    """Return, by counted cluster, the clusters that can serve its payloads: itself and every cluster that accepted it."""
    if not commit.receipts:
        return {item.cluster: [item.cluster, *item.contribution.holders] for item in taken(commit)}
    index = {digest: number for number, digest in enumerate(parse(pb.Ballot, commit.ballot.body).contributions)}
    votes = sorted({peer_id(author(commit, s)): parse(pb.Receipt, s.body).accepted for s in commit.receipts}.items())
    voters = np.array([voter for voter, _ in votes], object)
    rows = np.frombuffer(b"".join(accepted for _, accepted in votes), np.uint8).reshape(len(votes), -1)
    accepted = np.unpackbits(rows, axis=1, bitorder="little", count=len(index)).astype(bool)
    return {
        item.cluster: [item.cluster, *item.contribution.holders, *voters[accepted[:, index[item.digest]]]]
        for item in taken(commit)
    }


# Verifying.


def extend(manifest: Manifest, head: Head, envelope: pb.Envelope | bytes) -> tuple[Head, Statement[pb.Commit]]:
    """Verify the next commit completely and fold it in. Raises RemoteError with the rule that it breaks."""
    commit: Statement[pb.Commit] = open_envelope(envelope, manifest.run_id, (pb.KIND_COMMIT,))
    body = commit.body
    if body.HasField("appointment") and body.appointment != head.appointment:
        head = appoint(manifest, head, body.appointment)
    if commit.peer != head.coordinator:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, f"commit {body.round} is signed by {commit.peer}, not by the coordinator")
    if body.round != head.round or body.previous != head.digest or head.finished:
        raise RemoteError(pb.REASON_WRONG_HEAD, f"commit {body.round} does not follow commit {head.round - 1}")
    if body.closed_at_ms < head.closed_at_ms:
        raise RemoteError(pb.REASON_MALFORMED, f"commit {body.round} was closed before the commit before it")
    closing = Closing(body.closed_at_ms, body.open_ms, body.collect_ms, body.vote_ms)
    expected = compose(manifest, head, _gather(manifest, head, body), closing)
    if expected != body:
        names = [f.name for f in body.DESCRIPTOR.fields if getattr(expected, f.name) != getattr(body, f.name)]
        raise RemoteError(pb.REASON_MALFORMED, f"commit {body.round} does not follow from its statements: {', '.join(names)}")
    return advance(manifest, commit), commit


def _gather(manifest: Manifest, head: Head, commit: pb.Commit) -> StatementPool:
    """Fold a commit's statements through the rules. Raises RemoteError at the first invalid one."""
    verdicts = {item.peer: item for item in commit.attested}
    if verdicts and not manifest.attestation.kinds:
        raise RemoteError(
            pb.REASON_ATTESTATION, f"commit {commit.round} contains verdicts on evidence, but the run requires none"
        )
    gathered = StatementPool(attested=verdicts, refusals=tuple(commit.refusals))
    for envelope in envelopes(commit):
        statement = open_envelope(envelope, manifest.run_id, rules.JUDGES)
        judgement, after = rules.judge(manifest, head, gathered, statement)
        if after is gathered:
            what = pb.Kind.Name(statement.kind).removeprefix("KIND_").lower()
            reason = judgement.reason or pb.REASON_MALFORMED
            raise RemoteError(reason, f"commit {commit.round} contains a {what} that is not allowed: {judgement.detail}")
        gathered = after
    return gathered


def envelopes(commit: pb.Commit) -> Iterator[pb.Envelope]:
    """A commit's statements as they came, in the order in which they are folded. Raises RemoteError where a key is missing."""
    for name, kind in LISTS.items():
        if kind == pb.KIND_RECEIPT and commit.HasField("ballot"):
            yield commit.ballot
        yield from (unpacked(commit, kind, signed) for signed in getattr(commit, name))
