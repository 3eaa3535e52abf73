"""Count of a round: counted clusters, their weights, and reasons for the others. It is a pure function of signed
statements, so anybody can verify a commit.

Voters are the clusters that contributed and voted. A cluster that does not vote does not count, unless it left
meanwhile, and delays no other one. A contribution counts when at least half of the other voters, by voting weight, and
at least one, accepted it. A single one counts only if the manifest's `min_clusters` is 1. The run's checks
(protocol/checks) come first: a convicted cluster neither counts nor votes, and a refused contribution does not count. A
voter that rejects a contribution for its effect alone counts as an acceptance, because the contribution is well formed.

The sentences of the reasons are part of the commit. A verifier composes the same bytes, so no sentence may change.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dilocox.protocol.consensus import checks, reputation, weighting
from dilocox.protocol.consensus.check_interface import Findings, Why, join
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.pool import StatementPool, single
from dilocox.protocol.errors import reason_name
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["Tally", "tally"]


@dataclass(frozen=True)
class Tally:
    counted: Mapping[str, Statement[pb.Contribution]]
    """Contributions by cluster, in the order of the mean."""
    excluded: Sequence[pb.Exclusion]
    state: bytes
    """State root on which the counted clusters built; empty if none counts."""
    norm: int
    """Their lower median norm code that is not 0."""
    weights: Mapping[str, int]
    """Weights in the mean, by cluster."""
    clips: Mapping[str, int]
    """Norm codes above clip_ratio times that median, by cluster."""
    loss: float
    """Mean training loss; 0 if no cluster reports one."""
    records: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Clusters whose reputation record counts one more, by field, as the run's checks found."""
    penalized: frozenset[str] = frozenset()
    """Clusters that lose reputation although they count."""


def tally(manifest: Manifest, head: Head, gathered: StatementPool, absent: Container[str]) -> Tally:
    """Count a round. `absent`: roster clusters that were not live when the round closed."""
    reasons = _without_a_vote(manifest, head, gathered, absent)
    says = reputation.by_standing(manifest, head.standings, gathered.listed())
    found = _checked(manifest, head, gathered, says, reasons)
    accepted = _accepted(manifest, gathered, says, _candidates(gathered, reasons), found, reasons)
    _keep_one_base(accepted, says, reasons)
    if len(accepted) < manifest.rounds.min_clusters:
        too_few = f"{len(accepted)} could be counted; the run needs {manifest.rounds.min_clusters}"
        reasons.update((name, (pb.REASON_TOO_FEW_CLUSTERS, too_few)) for name in accepted)
        accepted = {}
    norms = {name: statement.body.norm for name, statement in accepted.items()}
    median, clips = weighting.clip(manifest, norms, head.standings)
    tokens = {name: statement.body.tokens for name, statement in accepted.items()}
    weights = weighting.weights(manifest, tokens, head.standings)
    return Tally(
        accepted,
        [
            pb.Exclusion(peer=name, reason=reasons[name][0], detail=reasons[name][1])
            for name in sorted(head.roster)
            if name in reasons
        ],
        next((statement.body.base_state for statement in accepted.values()), b""),
        median if accepted else head.norm,
        weights,
        clips,
        _mean_loss(accepted, weights),
        found.records,
        found.penalized,
    )


def _candidates(gathered: StatementPool, reasons: Container[str]) -> list[str]:
    return sorted(name for name in gathered.listed() if name not in reasons)


def _checked(
    manifest: Manifest, head: Head, gathered: StatementPool, says: Mapping[str, int], reasons: dict[str, Why]
) -> Findings:
    """Return the findings of the run's checks, in the order of their turns; `reasons` gets those of convicted clusters."""
    findings: list[Findings] = []
    for check in checks.of(manifest):
        findings.append(check.findings(manifest, head, gathered, says, _candidates(gathered, reasons)))
        reasons.update((name, why) for name, why in findings[-1].convicted.items() if name in head.roster)
    return join(findings)


def _mean_loss(accepted: Mapping[str, Statement[pb.Contribution]], weights: Mapping[str, int]) -> float:
    """Return the mean of the reported losses; 0 if there is none."""
    said = {name: statement.body.loss for name, statement in accepted.items() if statement.body.loss}
    return sum(loss * weights[name] for name, loss in said.items()) / max(1, sum(weights[name] for name in said))


def _without_a_vote(manifest: Manifest, head: Head, gathered: StatementPool, absent: Container[str]) -> dict[str, Why]:
    """Return roster clusters that did not both contribute and vote, once each. If the round was closed for claiming
    clusters, no remaining cluster was late."""
    reasons: dict[str, Why] = {}
    leaving, least = gathered.leaving(), manifest.rounds.min_clusters
    stayed = [name for name in head.roster if name not in absent and name not in leaving]
    waking = gathered.ballot is None and len(stayed) < least
    for name in head.roster:
        slot, votes = gathered.contributions.get(name, ()), gathered.receipts.get(name, ())
        if len(slot) > 1 or len(votes) > 1:
            what = "contributions" if len(slot) > 1 else "receipts"
            reasons[name] = pb.REASON_EQUIVOCATION, f"it signed two different {what}"
        elif not slot and name in leaving:
            reasons[name] = pb.REASON_LEFT, ""
        elif not slot and name in absent:
            reasons[name] = pb.REASON_ABSENT, ""
        elif waking and name in stayed:
            reasons[name] = (
                pb.REASON_TOO_FEW_CLUSTERS,
                f"{len(stayed)} took part; the run needs {least}; it was closed for a seat",
            )
        elif not slot:
            reasons[name] = pb.REASON_LATE, ""
        elif not votes and name not in leaving:
            reasons[name] = pb.REASON_DID_NOT_VOTE, ""
    return reasons


def _accepted(
    manifest: Manifest,
    gathered: StatementPool,
    says: Mapping[str, int],
    candidates: Sequence[str],
    found: Findings,
    reasons: dict[str, Why],
) -> dict[str, Statement[pb.Contribution]]:
    """Contributions that enough of the other voters accepted, by cluster; `reasons` gets those of the others."""
    accepted: dict[str, Statement[pb.Contribution]] = {}
    index = {name: number for number, name in enumerate(gathered.listed())}
    voters = [name for name in candidates if name in gathered.receipts]
    weights = np.array([says[name] for name in voters], np.int64)
    everybody, yes = int(weights.sum()), _yes(gathered, voters, len(index))
    heads, heavy = yes.sum(0, dtype=np.int64), weights @ yes
    complaints = _complaints(gathered, voters, says)
    first = max(range(len(voters)), key=lambda voter: (says[voters[voter]], voters[voter]), default=-1)
    well_made: dict[str, int] = {}
    for name in candidates:
        well_made_for = found.well_made.get(name, frozenset())
        others = everybody - says[name] * (name in gathered.receipts)
        votes = int(heavy[index[name]]) + sum(says[voter] for voter in well_made_for)
        if voters and voters[first] != name:  # no cluster has more weight than all others together
            over = reputation.excess(says[voters[first]], others)
            votes -= over * bool(yes[first, index[name]] or voters[first] in well_made_for)
            others -= over
        if name in found.refused:
            reasons[name] = found.refused[name]
        elif (votes and 2 * votes >= others) or (not others and manifest.rounds.min_clusters == 1):
            statement = single(gathered.contributions[name])
            assert statement is not None
            accepted[name], well_made[name] = statement, votes
        elif not any(voter != name for voter in voters):
            reasons[name] = pb.REASON_TOO_FEW_CLUSTERS, f"nobody else voted; the run needs {manifest.rounds.min_clusters}"
        else:
            asked = len(voters) - (name in gathered.receipts)
            few = f"{heads[index[name]] + len(well_made_for)} of {asked} accepted it"
            few += "" if len(set(says.values())) == 1 else f", with {votes} of {others} rounds of standing"
            reasons[name] = _complaint(complaints.get(index[name]), asked, few)
    _drop_copies(accepted, well_made, reasons)
    return accepted


def _drop_copies(accepted: dict[str, Statement[pb.Contribution]], votes: Mapping[str, int], reasons: dict[str, Why]) -> None:
    """Count identical payload indexes once. The payloads name their owner, and voters have read them: the copy has fewer
    votes. Without such votes the owner is unknown, and none of them counts."""
    groups: dict[bytes, list[str]] = {}
    for name, statement in accepted.items():
        groups.setdefault(statement.body.leaves, []).append(name)
    for names in groups.values():
        most = max(votes[name] for name in names)
        author = [name for name in names if votes[name] == most]
        for name in names:
            if len(names) > 1 and author != [name]:
                del accepted[name]
                reasons[name] = pb.REASON_COPIED, "another cluster announced the same leaves"


def _yes(gathered: StatementPool, voters: Sequence[str], listed: int) -> npt.NDArray[np.uint8]:
    """(voters, contributions on the ballot): 1 where it was accepted."""
    rows = [np.frombuffer(gathered.receipts[name][0].body.accepted, np.uint8) for name in voters]
    stacked = np.stack(rows) if rows else np.zeros((0, -(-listed // 8)), np.uint8)
    return np.unpackbits(stacked, axis=1, bitorder="little", count=listed)


NO_FINDINGS = frozenset(
    {
        pb.REASON_EQUIVOCATION,
        pb.REASON_ABSENT,
        pb.REASON_LATE,
        pb.REASON_DID_NOT_VOTE,
        pb.REASON_TOO_FEW_ACCEPTS,
        pb.REASON_TOO_FEW_CLUSTERS,
        pb.REASON_HARMS,
        pb.REASON_AUDIT,
        pb.REASON_LEFT,
    }
)
"""Reasons that the chain or a committee decides, and no single voter: in a vote they are no reason."""


@dataclass(frozen=True)
class Complaint:
    """Reasons of the voters against a contribution."""

    reason: pb.Reason
    voters: int = 0
    says: int = 0
    """Sum of their voting weights."""


def _complaints(
    gathered: StatementPool, voters: Sequence[str], says: Mapping[str, int]
) -> dict[int, dict[pb.Reason, Complaint]]:
    """Return complaints by contribution on the ballot and reason."""
    found: dict[int, dict[pb.Reason, Complaint]] = {}
    for name in voters:
        for finding in gathered.receipts[name][0].body.findings:
            if finding.reason not in NO_FINDINGS:
                told = found.setdefault(finding.index, {})
                before = told.get(finding.reason, Complaint(finding.reason))
                told[finding.reason] = Complaint(finding.reason, before.voters + 1, before.says + says[name])
    return found


def _complaint(complaints: Mapping[pb.Reason, Complaint] | None, others: int, few: str) -> Why:
    """Return the commonest complaint, by voting weight; of equal ones the first of the enum. `few`: the result without
    any."""
    if not complaints:
        return pb.REASON_TOO_FEW_ACCEPTS, few
    told = min(complaints.values(), key=lambda each: (-each.says, each.reason))
    return told.reason, f"{told.voters} of {others} voters: {reason_name(told.reason)}"


def _keep_one_base(accepted: dict[str, Statement[pb.Contribution]], says: Mapping[str, int], reasons: dict[str, Why]) -> None:
    """All counted must build on one state; the larger group by standing stays, of equals the one with the smaller root."""
    groups: dict[bytes, list[str]] = {}
    for name, statement in accepted.items():
        groups.setdefault(statement.body.base_state, []).append(name)
    weights = reputation.capped({name: says[name] for name in accepted})

    def order(base: bytes) -> tuple[int, int, bytes]:
        return -sum(weights[name] for name in groups[base]), -len(groups[base]), base

    for base in sorted(groups, key=order)[1:]:
        for name in groups[base]:
            del accepted[name]
            reasons[name] = pb.REASON_WRONG_BASE, "its base state differs from the state the others built on"
