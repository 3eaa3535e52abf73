"""The rules of a round: what is accepted, who is counted, and when it closes. Every decision returns its reason.

Statements are judged ACCEPT, IGNORE (harmless and without effect: a repeat) or REJECT (recorded, with its reason):

    kind          ACCEPT when                                         IGNORE                     REJECT
    claim         admitted, builds on the head, stages tile           repeat                     NOT_ADMITTED, WRONG_STAGES …
    contribution  on the roster, builds on the head, counts possible  repeat                     STALE_ROUND, WRONG_HEAD …
    receipt       sender contributed, ballot open                     repeat                     NOT_ON_ROSTER …
    state report  on the roster or claiming                           repeat, older round        WRONG_STAGES …
    leave         signed                                              sender is not here
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dilocox.protocol.errors import reason_name
from dilocox.protocol.ids import short
from dilocox.protocol.ledger import Ledger
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["Cluster", "Judgement", "Outcome", "Tally", "deadline_seconds", "judge_contribution", "tally"]

DEADLINE_SPREADS = 8.0
"""A round is late after median + this many median absolute deviations of the last rounds …"""
DEADLINE_SLACK = 2.0
"""… but never before this multiple of the median: short rounds have tiny deviations."""
DEADLINE_HISTORY = 8
"""Rounds remembered for the deadline."""
DEADLINE_FLOOR_SECONDS = 10.0
"""Below this a deadline would measure the scheduler, not the peers."""
MISSED_COMMITS = 2
"""So many commits in a row without being counted take a cluster off the roster."""
LEASE_PHASES = 4
"""Phases of samples leased ahead: the one in flight, the one running, and two that a commit may exclude."""


class Outcome(Enum):
    ACCEPT = "accept"
    IGNORE = "ignore"
    REJECT = "reject"


class Judgement(NamedTuple):
    outcome: Outcome
    reason: pb.Reason = pb.REASON_UNSPECIFIED
    detail: str = ""


ACCEPT = Judgement(Outcome.ACCEPT)


def ignore(reason: pb.Reason, detail: str) -> Judgement:
    return Judgement(Outcome.IGNORE, reason, detail)


def reject(reason: pb.Reason, detail: str) -> Judgement:
    return Judgement(Outcome.REJECT, reason, detail)


@dataclass(frozen=True)
class Cluster:
    """A cluster on the roster of the open round."""

    cluster: str
    hosts: tuple[tuple[str, int, int], ...]
    """(peer, first stage, stage count), in stage order; together they tile all stages."""
    joined: int
    missed: int = 0

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(peer for peer, _, _ in self.hosts)

    def stages_of(self, peer: str) -> list[int]:
        return [stage for host, first, count in self.hosts if host == peer for stage in range(first, first + count)]


def cluster_of(roster: Mapping[str, Cluster], peer: str) -> Cluster | None:
    return next((cluster for cluster in roster.values() if peer in cluster.peers), None)


def tiles(hosts: Sequence[tuple[str, int, int]], stages: int) -> bool:
    """Whether hosts, in stage order, cover every stage exactly once."""
    expected = 0
    for _, first, count in hosts:
        if first != expected:
            return False
        expected += count
    return expected == stages


def judge_contribution(
    statement: Statement,
    manifest: Manifest,
    round: int,
    head: bytes,
    roster: Mapping[str, Cluster],
    ledger: Ledger,
    attestations: Mapping[str, pb.Attestation],
) -> Judgement:
    """Everything about a contribution that can be known without its payloads."""
    body: pb.Contribution = statement.body
    if body.round < round:
        return reject(pb.REASON_STALE_ROUND, f"round {body.round} is closed; round {round} is open")
    if body.round > round:
        return reject(pb.REASON_FUTURE_ROUND, f"round {body.round} is not open; round {round} is")
    if body.head != head:
        return reject(pb.REASON_WRONG_HEAD, "it does not build on the last commit")
    cluster = cluster_of(roster, statement.peer)
    if cluster is None or cluster.cluster != body.cluster:
        return reject(pb.REASON_NOT_ON_ROSTER, f"{short(statement.peer)} is not on the roster of round {round}")
    if [payload.stage for payload in body.payloads] != cluster.stages_of(statement.peer):
        return reject(pb.REASON_WRONG_STAGES, "its stages are not the ones it claimed")
    resting_on = attestations[statement.peer].nonce if statement.peer in attestations else b""
    if body.attestation != resting_on:
        return reject(pb.REASON_NOT_ATTESTED, "it does not name the attestation that admits its sender")
    lease = ledger.leases[cluster.cluster]
    if not 0 < body.inner_steps <= manifest.rounds.max_inner_steps:
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{body.inner_steps} inner steps")
    if body.tokens != body.inner_steps * manifest.tokens_per_step:
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{body.tokens} tokens in {body.inner_steps} inner steps")
    fresh = body.samples_read - lease.counted
    if not body.inner_steps * manifest.training.batch_size <= fresh or body.samples_read > lease.end:
        return reject(pb.REASON_IMPOSSIBLE_TOKENS, f"{fresh} new samples; its lease has {lease.end - lease.counted}")
    return ACCEPT


@dataclass(frozen=True)
class Tally:
    """Who is counted in a round, and why the others are not."""

    counted: tuple[pb.Counted, ...]
    excluded: tuple[pb.Exclusion, ...]
    states: tuple[pb.StageState, ...]
    """What the counted built on."""
    samples_read: Mapping[str, int]
    loss: float


def tally(
    manifest: Manifest,
    roster: Mapping[str, Cluster],
    contributions: Iterable[Statement],
    receipts: Iterable[Statement],
    absent: Iterable[str] = (),
) -> Tally:
    """Count the votes. A pure function of signed statements, so anyone can recheck a commit.

    Voters on a contribution are the other clusters that contributed. It counts when at least half of them, and at least one,
    accepted it; a lone contributor counts only where the manifest's min_clusters is 1.
    """
    by_cluster, reasons = _complete_clusters(manifest, roster, contributions, frozenset(absent))
    votes = {receipt.peer: {v.contribution: v for v in receipt.body.verdicts} for receipt in receipts}
    accepted: dict[str, dict[str, Statement]] = {}
    holders: dict[str, list[str]] = {}
    for name, parts in by_cluster.items():
        voters = [roster[other] for other in by_cluster if other != name]
        accepting, complaint = _vote(parts, voters, votes)
        if (2 * len(accepting) >= len(voters) and accepting) or (not voters and manifest.rounds.min_clusters == 1):
            accepted[name] = parts
            holders[name] = sorted({*roster[name].peers, *(peer for voter in accepting for peer in voter.peers)})
        else:
            reasons[name] = complaint or (pb.REASON_TOO_FEW_ACCEPTS, f"{len(accepting)} of {len(voters)} accepted it")
    _keep_one_base(accepted, reasons)
    if len(accepted) < manifest.rounds.min_clusters:
        for name in accepted:
            reasons[name] = (
                pb.REASON_TOO_FEW_CLUSTERS,
                f"{len(accepted)} counted; the run needs {manifest.rounds.min_clusters}",
            )
        accepted = {}
    counted = tuple(_counted(name, accepted[name], holders[name]) for name in sorted(accepted))
    excluded = tuple(
        pb.Exclusion(peer=peer, reason=reasons[name][0], detail=reasons[name][1])
        for name in sorted(roster)
        if name not in accepted
        for peer in roster[name].peers
    )
    tokens = sum(item.tokens for item in counted)
    loss = sum(next(iter(accepted[item.cluster].values())).body.loss * item.tokens for item in counted) / max(1, tokens)
    return Tally(
        counted,
        excluded,
        tuple(pb.StageState(stage=p.stage, digest=p.base_state) for p in counted[0].payloads) if counted else (),
        {name: min(part.body.samples_read for part in parts.values()) for name, parts in accepted.items()},
        loss,
    )


Complaint = tuple[pb.Reason, str]


def _complete_clusters(
    manifest: Manifest, roster: Mapping[str, Cluster], contributions: Iterable[Statement], absent: frozenset[str]
) -> tuple[dict[str, dict[str, Statement]], dict[str, Complaint]]:
    """Clusters all of whose hosts made exactly one contribution, all alike; and why the others did not."""
    by_peer: dict[str, dict[bytes, Statement]] = {}
    for statement in contributions:
        by_peer.setdefault(statement.peer, {})[statement.digest] = statement
    complete: dict[str, dict[str, Statement]] = {}
    reasons: dict[str, Complaint] = {}
    for name in sorted(roster):
        parts: dict[str, Statement] = {}
        for peer in roster[name].peers:
            statements = by_peer.get(peer, {})
            if len(statements) > 1:
                reasons[name] = (
                    pb.REASON_EQUIVOCATION,
                    f"{short(peer)} signed {len(statements)} different contributions",
                )
            elif not statements:
                why = pb.REASON_ABSENT if peer in absent else pb.REASON_LATE
                sentence = "was not heard from" if peer in absent else "did not announce its payload before the ballot"
                reasons.setdefault(name, (why, f"{short(peer)} {sentence}"))
            else:
                parts[peer] = next(iter(statements.values()))
        shapes = {(part.body.inner_steps, part.body.tokens, part.body.samples_read) for part in parts.values()}
        if name not in reasons and len(shapes) > 1:
            reasons[name] = (pb.REASON_IMPOSSIBLE_TOKENS, "the cluster's hosts announce different step counts")
        if name not in reasons:
            complete[name] = parts
    return complete, reasons


def _vote(
    parts: Mapping[str, Statement],
    voters: Iterable[Cluster],
    votes: Mapping[str, Mapping[bytes, pb.ContributionVerdict]],
) -> tuple[list[Cluster], Complaint | None]:
    """The clusters that accepted every part, and the commonest complaint of the rest."""
    accepting: list[Cluster] = []
    complaints: Counter[pb.Reason] = Counter()
    for voter in voters:
        cast = [votes[peer].get(part.digest) for peer in voter.peers if peer in votes for part in parts.values()]
        reasons = [verdict.reason for verdict in cast if verdict is not None and verdict.reason]
        heard = all(peer in votes for peer in voter.peers) and None not in cast
        if heard and not reasons:
            accepting.append(voter)
        complaints.update(reasons[:1])
    if not complaints:
        return accepting, None
    reason, count = min(complaints.items(), key=lambda item: (-item[1], item[0]))
    return accepting, (reason, f"{count} of the voters: {reason_name(reason)}")


def _keep_one_base(accepted: dict[str, dict[str, Statement]], reasons: dict[str, Complaint]) -> None:
    """All counted must build on one state; the larger group stays, of equals the one with the smaller digest."""
    groups: dict[tuple[bytes, ...], list[str]] = {}
    for name, parts in accepted.items():
        base = tuple(p.base_state for part in _in_stage_order(parts) for p in part.body.payloads)
        groups.setdefault(base, []).append(name)
    for base in sorted(groups, key=lambda base: (-len(groups[base]), base))[1:]:
        for name in groups[base]:
            del accepted[name]
            reasons[name] = (pb.REASON_WRONG_BASE, "its base state differs from the state the others built on")


def _in_stage_order(parts: Mapping[str, Statement]) -> list[Statement]:
    return sorted(parts.values(), key=lambda part: int(part.body.payloads[0].stage))


def _counted(name: str, parts: Mapping[str, Statement], holders: Sequence[str]) -> pb.Counted:
    ordered = _in_stage_order(parts)
    payloads = [payload for part in ordered for payload in part.body.payloads]
    return pb.Counted(cluster=name, tokens=ordered[0].body.tokens, payloads=payloads, holders=holders)


def medians(counted: Sequence[pb.Counted], previous: Iterable[pb.StageNorm]) -> list[pb.StageNorm]:
    """Median norm per stage of the counted; an empty commit carries the previous ones on."""
    if not counted:
        return list(previous)
    return [
        pb.StageNorm(stage=payload.stage, norm=statistics.median(item.payloads[index].norm for item in counted))
        for index, payload in enumerate(counted[0].payloads)
    ]


def deadline_seconds(history: Sequence[float], upper_bound: float) -> float:
    """How long to wait for something that took `history` seconds in the last rounds: median + k·MAD, within bounds."""
    if not history:
        return upper_bound
    median = statistics.median(history)
    spread = statistics.median(abs(value - median) for value in history)
    wanted = max(median + DEADLINE_SPREADS * spread, DEADLINE_SLACK * median, DEADLINE_FLOOR_SECONDS)
    return min(wanted, upper_bound)
