"""Rules of acceptance: one row per kind of statement, the same for every reader.

    judge(manifest, head, gathered, statement) -> judgement, gathered'

This file is blind to roles. The coordinator judges arriving statements with it, nodes and `dilocox verify` judge
commits, the simulation judges both. A statement is ACCEPTed, IGNOREd (harmless and without effect: a repeat, or for
another time) or REJECTed with its reason. The pool changes exactly when the statement may be in the next commit.
Commits are replayed in canonical order, so a rule must not depend on earlier statements of another kind.

    kind          ACCEPT when                                              IGNORE                       REJECT
    claim         admitted, made now, holds the state known so far         repeat, older, stale         NOT_ADMITTED, WRONG_BASE …
    cluster       its copy 0 tiles all stages, its lead is among the hosts repeat, older, stale         WRONG_STAGES, CLUSTER
    leave         the sender leads a cluster or claims, and it means now   repeat, stale, not here
    contribution  on the roster, builds on the head, counts possible       repeat, ballot is open       STALE_ROUND, WRONG_HEAD …
    ballot        lists what is gathered, signed by the coordinator        repeat                       MALFORMED
    receipt       its sender is on the ballot that it names                repeat, no such ballot       NOT_ON_ROSTER, MALFORMED
    state report  the sender is on the roster                              repeat, other round          NOT_ON_ROSTER

Two different statements in one slot are REJECTed with EQUIVOCATION, and both are stored as its proof. A claim whose
state only other statements contradict is REJECTed, and stored: it takes no seat.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.consensus import checks
from dilocox.protocol.consensus.head import Cluster, Head, HostRange, alone, host_ranges, resting_on
from dilocox.protocol.consensus.pool import Slot, StatementPool, holds, put, put_newest, single
from dilocox.protocol.consensus.reputation import by_standing, capped
from dilocox.protocol.crypto import sha256
from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = [
    "ACCEPT",
    "JUDGES",
    "Judgement",
    "Outcome",
    "bits",
    "claims_kept",
    "complete_clusters",
    "ignore",
    "judge",
    "known_state",
    "layouts_kept",
    "reject",
    "strangers",
]


class Outcome(Enum):
    ACCEPT = "accept"
    IGNORE = "ignore"
    REJECT = "reject"


class Judgement(NamedTuple):
    outcome: Outcome
    reason: pb.Reason = pb.REASON_UNSPECIFIED
    detail: str = ""
    valid_until_ms: int = 0
    """End of the verdict on accepted evidence; milliseconds since 1970."""


ACCEPT = Judgement(Outcome.ACCEPT)
REPEAT = Judgement(Outcome.IGNORE, pb.REASON_UNSPECIFIED, "already received")
TWICE = Judgement(Outcome.REJECT, pb.REASON_EQUIVOCATION, "two different statements in one slot; neither is counted")
WRONG_STATE = Judgement(Outcome.REJECT, pb.REASON_WRONG_BASE, "its state differs from the run's")


def ignore(reason: pb.Reason, detail: str) -> Judgement:
    return Judgement(Outcome.IGNORE, reason, detail)


def reject(reason: pb.Reason, detail: str) -> Judgement:
    return Judgement(Outcome.REJECT, reason, detail)


Judged = tuple[Judgement, StatementPool]
Judge = Callable[[Manifest, Head, StatementPool, Statement[Any]], Judged]


def judge(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[Any]) -> Judged:
    """Ask the row of the statement's kind. `gathered` comes back as the same object where nothing changed."""
    if head.finished:
        return ignore(pb.REASON_RUN_FINISHED, "the run has closed its last round"), gathered
    return JUDGES[statement.kind](manifest, head, gathered, statement)


# Roster: claims, layouts, departures.


def _claim(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Claim]) -> Judged:
    body = statement.body
    if (refusal := _not_admitted(manifest, head, gathered, statement.peer)) is not None:
        return refusal, gathered
    if why := checks.fault(manifest, head, statement):
        return reject(pb.REASON_MALFORMED, why), gathered
    if head.closing(manifest):
        return ignore(pb.REASON_RUN_FINISHED, "the run has trained its last round"), gathered
    if not head.names(body):
        return _not_now(head, "claim", body.round), gathered
    if not body.state:
        return ACCEPT, gathered  # a request: it asks for no seat
    if head.state and body.state != head.state:
        return WRONG_STATE, gathered
    newest_leave = gathered.leaves.get(statement.peer)
    if newest_leave and newest_leave[0].body.serial >= body.serial:
        return ignore(pb.REASON_SUPERSEDED, "a newer departure of this peer is known"), gathered
    claims = put_newest(gathered.claims, statement)
    if claims is None:
        return _repeat_or_older(gathered.claims.get(statement.peer), statement), gathered
    room = claims_kept(head)
    # Builders of the current state are exempt from the cap; a stalled run restarts through them.
    claims = _bounded(claims, head, room)
    if not holds(claims.get(statement.peer), statement):
        return ignore(pb.REASON_RATE, f"the limit of {room} waiting peers is reached"), gathered
    known = known_state(manifest, head, gathered)
    after = replace(gathered, claims=claims, leaves=_of_those_here(gathered.leaves, head, claims))
    # The known state depends on the order of arrival. It decides the answer, not the pool: `seats` judges at the end.
    return (WRONG_STATE if known and body.state != known else _once(claims[statement.peer])), after


def claims_kept(head: Head) -> int:
    """Return the most claims of unknown peers: before the genesis commit all peers are unknown."""
    return limits.CLAIMS if head.round else limits.CLUSTERS


def layouts_kept(head: Head) -> int:
    """Return the most layouts of unknown peers."""
    return limits.LAYOUTS if head.round else limits.FIRST_LAYOUTS


def _of_those_here(leaves: Mapping[str, Slot], head: Head, claims: Mapping[str, Slot]) -> Mapping[str, Slot]:
    """Return the departures without those of unknown peers whose claims were dropped for others."""
    return {peer: slot for peer, slot in leaves.items() if peer in head.roster or peer in claims}


def _not_admitted(manifest: Manifest, head: Head, gathered: StatementPool, peer: str) -> Judgement | None:
    admission = manifest.admission
    if admission.policy == "allow-list" and peer not in admission.allow:
        return reject(pb.REASON_NOT_ADMITTED, f"{short(peer)} is not on the run's allow-list")
    if manifest.attestation.kinds and peer not in gathered.attested and peer not in head.attestations:
        return reject(pb.REASON_NOT_ATTESTED, "the run requires evidence, and this peer has no valid one")
    return None


def _not_now(head: Head, what: str, round: int) -> Judgement:
    return ignore(pb.REASON_STALE_ROUND, f"the {what} is for round {round} of its chain; round {max(1, head.round)} is open")


def _repeat_or_older(slot: Slot | None, statement: Statement[Any]) -> Judgement:
    if holds(slot, statement):
        return REPEAT
    return ignore(pb.REASON_SUPERSEDED, "a newer layout, or two with the same serial, are known")


def _once(slot: Slot) -> Judgement:
    return ACCEPT if len(slot) == 1 else TWICE


def strangers(peers: Iterable[str], head: Head) -> list[str]:
    """Return the unknown ones of these peers. Identities are free, so what is stored for unknown peers is bounded."""
    return [peer for peer in peers if peer not in head.known_peers]


def _bounded(slots: dict[str, Slot], head: Head, cap: int) -> dict[str, Slot]:
    """Return at most `cap` statements of unknown peers: those with the smallest hash of head and digest, whatever their
    order."""
    strange = strangers(slots, head)
    if len(strange) <= cap:
        return slots
    last = max(strange, key=lambda peer: sha256(head.digest, slots[peer][0].digest))
    return {peer: slot for peer, slot in slots.items() if peer != last}


def _cluster(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Cluster]) -> Judged:
    body = statement.body
    if (refusal := _not_admitted(manifest, head, gathered, statement.peer)) is not None:
        return refusal, gathered
    if not head.names(body):
        return _not_now(head, "layout", body.round), gathered
    hosts = host_ranges(body.hosts)
    if statement.peer not in {host.peer for host in hosts}:
        return reject(pb.REASON_CLUSTER, "its lead host has no stage of it"), gathered
    if not tiles(hosts, manifest.model.stages):
        return reject(
            pb.REASON_WRONG_STAGES, f"its copy 0 does not cover each of the run's {manifest.model.stages} stages once"
        ), gathered
    clusters = put_newest(gathered.clusters, statement)
    if clusters is None:
        return _repeat_or_older(gathered.clusters.get(statement.peer), statement), gathered
    room = layouts_kept(head)
    clusters = _bounded(clusters, head, room)
    if not holds(clusters.get(statement.peer), statement):
        return ignore(pb.REASON_RATE, f"the limit of {room} waiting clusters is reached"), gathered
    return _once(clusters[statement.peer]), replace(gathered, clusters=clusters)


def tiles(hosts: Sequence[HostRange], stages: int) -> bool:
    """Whether copy 0 covers every stage exactly once, in order, and every other copy repeats a range of it."""
    ranges = [(host.first_stage, host.stage_count) for host in hosts if host.copy == 0]
    expected = 0
    for first, count in ranges:
        if first != expected:
            return False
        expected += count
    return expected == stages and all((host.first_stage, host.stage_count) in ranges for host in hosts)


def _leave(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Leave]) -> Judged:
    if not head.names(statement.body):
        return _not_now(head, "leave", statement.body.round), gathered
    if statement.peer not in head.roster and statement.peer not in gathered.claims:
        return ignore(pb.REASON_NOT_ON_ROSTER, "not used in this run"), gathered
    leaves = put_newest(gathered.leaves, statement)
    if leaves is None:
        return _repeat_or_older(gathered.leaves.get(statement.peer), statement), gathered
    return ACCEPT, replace(gathered, leaves=leaves)


def complete_clusters(manifest: Manifest, head: Head, gathered: StatementPool) -> dict[str, tuple[Cluster, bytes]]:
    """Return complete clusters that claim a seat, with the state root that all their hosts claim to have.

    A host alone is a cluster of its own name. A larger cluster is complete when the newest claim of every host names
    its lead host's newest layout: so every host has consented, and none is in two clusters.
    """
    claiming, next_round = gathered.claiming(), head.round + 1
    found: dict[str, tuple[Cluster, bytes]] = {}
    layouts = {layout.digest: layout for slot in gathered.clusters.values() if (layout := single(slot))}
    for peer, claim in sorted(claiming.items()):
        if not claim.body.cluster:
            hosts = alone(peer, manifest.model.stages)
        else:
            layout = layouts.get(claim.body.cluster)
            if layout is None or layout.peer != peer:
                continue
            hosts = host_ranges(layout.body.hosts)
        told = [claiming.get(host.peer) for host in hosts]
        wanted = (claim.body.cluster, claim.body.state)
        agreed = all(t is not None and (t.body.cluster, t.body.state) == wanted for t in told)
        free = all(head.cluster_by_peer[h.peer].cluster == peer for h in hosts if h.peer in head.cluster_by_peer)
        if agreed and free:
            found[peer] = Cluster(peer, hosts, next_round, account=claim.body.account), claim.body.state
    return found


# A round: contributions, the ballot, receipts.


def _contribution(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Contribution]) -> Judged:
    if holds(gathered.contributions.get(statement.peer), statement):
        return REPEAT, gathered
    if (refusal := _impossible(manifest, head, statement)) is not None:
        return refusal, gathered
    if gathered.ballot is not None and statement.peer not in gathered.contributions:
        return ignore(pb.REASON_LATE, f"the vote of round {head.round} is open"), gathered
    contributions = put(gathered.contributions, statement.peer, statement, _pinned(gathered, statement.peer))
    if contributions is None:
        return ignore(pb.REASON_EQUIVOCATION, "two are enough as proof"), gathered
    return _once(contributions[statement.peer]), replace(gathered, contributions=contributions)


def _pinned(gathered: StatementPool, cluster: str) -> bytes:
    """Digest of the contribution of this cluster that the ballot lists."""
    listed = set(gathered.ballot.body.contributions) if gathered.ballot else set()
    return next((s.digest for s in gathered.contributions.get(cluster, ()) if s.digest in listed), b"")


def _impossible(manifest: Manifest, head: Head, statement: Statement[pb.Contribution]) -> Judgement | None:
    """Everything about a contribution that can be known without its payloads."""
    body = statement.body
    if body.round < head.round:
        return reject(pb.REASON_STALE_ROUND, f"round {body.round} is closed; round {head.round} is open")
    if body.round > head.round:
        return reject(pb.REASON_FUTURE_ROUND, f"round {body.round} is not open; round {head.round} is")
    if body.head != head.digest:
        return reject(pb.REASON_WRONG_HEAD, "it does not follow the last commit")
    cluster = head.roster.get(statement.peer)
    if cluster is None:
        return reject(
            pb.REASON_NOT_ON_ROSTER,
            f"{short(statement.peer)} is not the lead host of a cluster on the roster of round {head.round}",
        )
    if head.closing(manifest):
        return ignore(pb.REASON_RUN_FINISHED, "the run has trained its last round")
    if head.state and body.base_state != head.state:
        return reject(pb.REASON_WRONG_BASE, "its base state differs from the run's")
    if body.attestation != resting_on(head.attestations, cluster):
        return reject(pb.REASON_NOT_ATTESTED, "it does not name the attestation that admits its sender")
    if why := checks.fault(manifest, head, statement):
        return reject(pb.REASON_MALFORMED, why)
    lease = head.ledger.leases[statement.peer]
    if not 0 < body.inner_steps <= manifest.rounds.max_inner_steps:
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{body.inner_steps} inner steps")
    read = body.inner_steps * manifest.tokens_per_step
    if not (0 < body.tokens <= read if manifest.data.loss_mask else body.tokens == read):
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{body.tokens} tokens in {body.inner_steps} inner steps")
    fresh = body.samples_read - lease.counted
    if not body.inner_steps * manifest.training.batch_size <= fresh or body.samples_read > lease.end:
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{fresh} new samples; its lease has {lease.end - lease.counted} left")
    return None


def _ballot(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Ballot]) -> Judged:
    body = statement.body
    if statement.peer != head.coordinator:
        return reject(pb.REASON_BAD_SIGNATURE, "a ballot that the coordinator did not sign"), gathered
    if (body.round, body.head) != (head.round, head.digest):
        return _not_now(head, "ballot", body.round), gathered
    if gathered.ballot is not None:
        return (REPEAT if gathered.ballot.digest == statement.digest else TWICE), gathered
    listed = set(body.contributions)
    authors = {s.digest: peer for peer, slot in gathered.contributions.items() for s in slot if s.digest in listed}
    alone = {slot[0].digest for slot in gathered.contributions.values() if len(slot) == 1}
    if len(authors) != len(listed) or len(set(authors.values())) != len(authors) or not alone <= listed:
        return reject(pb.REASON_MALFORMED, "it does not list exactly one contribution of each contributing cluster"), gathered
    if not 0 < body.seconds <= manifest.rounds.vote_seconds + 1e-3 * manifest.rounds.vote_seconds:
        return reject(pb.REASON_MALFORMED, f"{body.seconds} seconds for the vote"), gathered
    voters = tuple(authors[digest] for digest in body.contributions)
    return ACCEPT, replace(gathered, ballot=statement, voters=voters)


def bits(accepted: Sequence[bool]) -> bytes:
    """A bit for each contribution in ballot order, least significant first."""
    number = sum(1 << index for index, yes in enumerate(accepted) if yes)
    return number.to_bytes(-(-len(accepted) // 8), "little")


def _receipt(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.Receipt]) -> Judged:
    body, ballot = statement.body, gathered.ballot
    if body.round != head.round or ballot is None or body.ballot != ballot.signing:
        return ignore(pb.REASON_STALE_ROUND, f"the vote is on another ballot than that of round {head.round}"), gathered
    slot = gathered.receipts.get(statement.peer)
    if holds(slot, statement):
        return REPEAT, gathered
    listed = gathered.listed()
    if statement.peer not in listed:
        return reject(pb.REASON_NOT_ON_ROSTER, "only clusters that contributed can vote"), gathered
    own, count = listed.index(statement.peer), len(listed)
    known = int.from_bytes(body.accepted, "little")
    if len(body.accepted) != -(-count // 8) or known >> count or known >> own & 1:
        return reject(pb.REASON_MALFORMED, "it must have one bit for each other contribution on the ballot"), gathered
    for finding in body.findings:
        if finding.index >= count or finding.index == own or known >> finding.index & 1:
            return reject(pb.REASON_MALFORMED, "a finding contradicts its bit, or names nothing on the ballot"), gathered
        if finding.stage >= manifest.model.stages:
            return reject(pb.REASON_WRONG_STAGES, f"the run has {manifest.model.stages} stages"), gathered
    if any(not known >> index & 1 for index in body.scored):
        return reject(pb.REASON_MALFORMED, "a score of a contribution that it does not accept"), gathered
    if why := checks.fault(manifest, head, statement):
        return reject(pb.REASON_MALFORMED, why), gathered
    receipts = put(gathered.receipts, statement.peer, statement)
    if receipts is None:
        return ignore(pb.REASON_EQUIVOCATION, "two are enough as proof"), gathered
    return _once(receipts[statement.peer]), replace(gathered, receipts=receipts)


# The state.


def _state_report(manifest: Manifest, head: Head, gathered: StatementPool, statement: Statement[pb.StateReport]) -> Judged:
    body = statement.body
    if (body.round, body.head) != (head.round, head.digest):
        return _not_now(head, "state report", body.round), gathered
    if statement.peer not in head.roster:
        return reject(
            pb.REASON_NOT_ON_ROSTER, f"{short(statement.peer)} is not the lead host of a cluster on the roster"
        ), gathered
    key = (statement.peer, body.replayed)
    if holds(gathered.reports.get(key), statement):
        return REPEAT, gathered
    reports = put(gathered.reports, key, statement)
    if reports is None:
        return ignore(pb.REASON_EQUIVOCATION, "two are enough as proof"), gathered
    return _once(reports[key]), replace(gathered, reports=reports)


def told_states(gathered: StatementPool, clusters: Iterable[str]) -> dict[str, bytes]:
    """Return each cluster's state: by replay, else by report, else by the claim of a cluster that returned."""
    told: dict[str, bytes] = {}
    claiming = gathered.claiming()
    for name in clusters:
        report = single(gathered.reports.get((name, True))) or single(gathered.reports.get((name, False)))
        statement = report or claiming.get(name)
        if statement is not None:
            told[name] = statement.body.state
    return told


def known_state(manifest: Manifest, head: Head, gathered: StatementPool) -> bytes:
    """Return the state root that the open round starts from, as far as the chain implies it; empty otherwise.

    Either the chain contains it, or two thirds, by reputation, of the clusters counted last report it.
    """
    if head.state:
        return head.state
    says = capped(by_standing(manifest, head.standings, head.built_by))
    votes: dict[bytes, int] = {}
    for name, root in told_states(gathered, head.built_by).items():
        votes[root] = votes.get(root, 0) + says[name]
    return next((root for root, weight in votes.items() if 3 * weight >= 2 * sum(says.values())), b"")


JUDGES: Mapping[int, Judge] = {
    pb.KIND_CLAIM: _claim,
    pb.KIND_CLUSTER: _cluster,
    pb.KIND_LEAVE: _leave,
    pb.KIND_CONTRIBUTION: _contribution,
    pb.KIND_BALLOT: _ballot,
    pb.KIND_RECEIPT: _receipt,
    pb.KIND_STATE_REPORT: _state_report,
}
