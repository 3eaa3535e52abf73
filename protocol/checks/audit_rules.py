"""Audits: other clusters compute a segment of a cluster's work again.

In a run with audits, a contribution commits to states of its phase (`Marks`): parameters and inner optimizer at evenly
spaced inner steps. SHA-256 of the coordinator's signature over the ballot draws the audited contributions, their
segments between two audit checkpoints, and the auditors; no cluster can know it while it trains. Auditors fetch the two
states, compute the segment's inner steps on the samples of the lease, and compare. Their votes contain the results.

    commit t counts a contribution      its auditors may be drawn: by standing, from all others that it counts
    rounds t+1 and t+2                  they fetch, compute and compare
    receipts of round t+2               say what they found; who says nothing found nothing
    commit t+2                          two thirds of what was drawn, and never one alone, found it wrong: it does not count in this
                                        round, and its author is refused for what it did

Two thirds of all drawn votes convict, not two thirds of those given: a third of hostile auditors convicts no cluster if
all others are silent, and an auditor that cannot compute (no memory, time or data) acquits. A cluster that does not
serve its states although it contributes in that round is as wrong as one that invented them. A cluster that is gone is
absent, and no more.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dilocox.protocol import limits
from dilocox.protocol.consensus.committees import draw
from dilocox.protocol.consensus.data_leases import Lease
from dilocox.protocol.consensus.reputation import capped
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, parse

__all__ = [
    "WAIT",
    "Audit",
    "Result",
    "Stretch",
    "drawn",
    "due",
    "duties",
    "faults",
    "finding_fault",
    "needed",
    "packed",
    "read_marks",
    "results",
    "spacing",
    "still_open",
    "stretch",
    "unpacked",
    "verdict_name",
]

AUDITORS = 5
"""Clusters that audit one contribution. Two thirds of them convict: fewer would leave that to chance, more would take more time."""
WAIT = 2
"""Rounds from a contribution to the receipts that say what its auditors found."""
FAULTS = frozenset((pb.AUDIT_DIFFERS, pb.AUDIT_MALFORMED))
"""Faults of an author. AUDIT_UNSERVED is one, too, if the author contributed in the round of the report: other peers had
its payloads of that round. A machine that is gone is no fault."""
JUMPS = 1
"""Most audit checkpoints at one inner step: before and after the commit that a phase may move onto."""


@dataclass(frozen=True)
class Audit:
    """Audit of a counted contribution."""

    round: int
    """That counted it."""
    cluster: str
    """Its author."""
    lot: int
    """Number of its segment, modulo their count."""
    auditors: Mapping[str, int]
    """Drawn auditors, with their number of votes."""

    @property
    def due(self) -> int:
        """The round in whose receipts its auditors say what they found."""
        return self.round + WAIT

    @property
    def name(self) -> tuple[int, str]:
        return self.round, self.cluster


@dataclass(frozen=True)
class Result:
    """Result of one auditor."""

    verdict: pb.AuditVerdict
    distance: float = 0.0
    """Distance between the computed and the announced state, relative to the way from the first state; 0 if they are
    equal."""


@dataclass(frozen=True)
class Stretch:
    """Inner steps between two audit checkpoints."""

    first: pb.Mark
    last: pb.Mark
    positions: Sequence[int]
    """Samples of its lease that they read."""


def verdict_name(verdict: pb.AuditVerdict) -> str:
    """Return the public name of a verdict."""
    return pb.AuditVerdict.Name(verdict).removeprefix("AUDIT_").lower()


# The draw.


def drawn(manifest: Manifest, head_round: int, ballot: Statement[pb.Ballot], says: Mapping[str, int]) -> list[Audit]:
    """Return the audits of the contributions that this round's commit counts. `says`: their authors' voting weights, in
    the order of the mean."""
    rules = manifest.audit
    if not rules.segments or len(says) < 2:
        return []
    seed, chance = sha256(b"dilocox audits", ballot.signing), int(rules.share * (1 << 53))
    lots = {name: sha256(seed, name.encode()) for name in says}
    wanted = [name for name in says if _number(lots[name][:8]) >> 11 < chance]
    kept = sorted(sorted(wanted, key=lambda name: lots[name])[: limits.AUDITS])
    committees = {name: capped(draw(AUDITORS, seed, name, says)) for name in kept}
    return [Audit(head_round, name, _number(lots[name][8:16]), committees[name]) for name in kept]


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def still_open(audits: Iterable[Audit], head_round: int) -> list[Audit]:
    """Those that the commit of this round leaves open."""
    return [audit for audit in audits if audit.due > head_round]


def packed(audits: Iterable[Audit]) -> list[pb.Audit]:
    """Return the audits as a commit lists them."""
    return [
        pb.Audit(
            round=audit.round,
            cluster=audit.cluster,
            lot=audit.lot,
            auditors=[pb.Auditor(cluster=name, votes=votes) for name, votes in sorted(audit.auditors.items())],
        )
        for audit in audits
    ]


def unpacked(commit: pb.Commit) -> tuple[Audit, ...]:
    """The inverse."""
    return tuple(
        Audit(each.round, each.cluster, each.lot, {auditor.cluster: auditor.votes for auditor in each.auditors})
        for each in commit.audits
    )


def duties(audits: Iterable[Audit], round: int, me: str) -> list[Audit]:
    """Return the audits for which this cluster was drawn, and may still report in this round or later; the first due
    first."""
    return sorted((a for a in audits if a.due >= round and me in a.auditors), key=lambda audit: audit.name)


def due(audits: Iterable[Audit], round: int) -> list[Audit]:
    """Return the audits that this round's votes report: a vote names them by their index here."""
    return [audit for audit in audits if audit.due == round]


# Results.


def results(audits: Iterable[Audit], round: int, me: str, found: Mapping[tuple[int, str], Result]) -> list[pb.AuditResult]:
    """Return the results for our vote of this round."""
    told = [
        pb.AuditResult(index=index, verdict=found[audit.name].verdict, distance=found[audit.name].distance)
        for index, audit in enumerate(due(audits, round))
        if me in audit.auditors and audit.name in found
    ]
    return told[: limits.AUDITS_TOLD]


def finding_fault(audits: Iterable[Audit], round: int, voter: str, told: Sequence[pb.AuditResult]) -> str:
    """Why a receipt of this round may not say this of audits; empty where it may."""
    open_now = due(audits, round)
    for result in told:
        if result.index >= len(open_now):
            return "it reports an audit that is not due"
        if voter not in open_now[result.index].auditors:
            return "it reports an audit that it was not drawn for"
    return ""


def faults(
    audits: Iterable[Audit], round: int, receipts: Mapping[str, pb.Receipt], here: Container[str]
) -> tuple[dict[str, tuple[pb.Reason, str]], frozenset[str]]:
    """Return why clusters do not count in this round, by the reported audits; and the clusters that an auditor reported
    on. `here`: clusters that contributed in the round."""
    told = {(result.index, name): result.verdict for name, body in receipts.items() for result in body.audits}
    reasons: dict[str, tuple[pb.Reason, str]] = {}
    looked_at: set[str] = set()
    for index, audit in enumerate(due(audits, round)):
        said = {name: told[index, name] for name in audit.auditors if (index, name) in told}
        faulty = FAULTS | {pb.AUDIT_UNSERVED} if audit.cluster in here else FAULTS
        against = [name for name, verdict in said.items() if verdict in faulty]
        if said:
            looked_at.add(audit.cluster)
        if _convicts(audit, against):
            why = f"{len(against)} of {len(audit.auditors)} auditors found its work of round {audit.round} wrong"
            reasons[audit.cluster] = pb.REASON_AUDIT, why
    return reasons, frozenset(looked_at)


def _convicts(audit: Audit, against: Sequence[str]) -> bool:
    return len(against) > 1 and 3 * sum(audit.auditors[name] for name in against) >= 2 * sum(audit.auditors.values())


# Marks.


def spacing(manifest: Manifest) -> int:
    """Return the inner steps between two audit checkpoints: the longest phase has the manifest's number of segments, a
    shorter one fewer."""
    return -(-manifest.rounds.max_inner_steps // manifest.audit.segments)


def read_marks(manifest: Manifest, contribution: pb.Contribution, lease: Lease, raw: bytes) -> pb.Marks:
    """Those that a contribution names, where they are of its phase. Raises RemoteError. `lease`: its author's, as the commit before
    the round left it."""
    said = parse(pb.Marks, raw)
    marks, batch = said.marks, manifest.training.batch_size
    _require(2 <= len(marks) <= manifest.audit.segments + 2 + JUMPS, "too few or too many audit checkpoints")
    _require(
        len(said.machine) <= limits.TEXT_CHARACTERS and said.machine.isprintable(), "its machine's description is not text"
    )
    for mark in marks:
        _require(len(mark.states) == manifest.model.stages, "an audit checkpoint does not cover all stages")
        _require(all(len(digest) == 32 for digest in mark.states), "an audit checkpoint has no digests")
    ends = (marks[0].step, marks[-1].step, marks[-1].samples_read)
    _require(ends == (0, contribution.inner_steps, contribution.samples_read), "the audit checkpoints are of another phase")
    # An author that chose their positions could hide long untrained segments between short trained ones.
    free = {contribution.inner_steps, *(after.step for before, after in pairwise(marks) if after.step == before.step)}
    _require(
        all(mark.step in free or not mark.step % spacing(manifest) for mark in marks),
        "the audit checkpoints are not evenly spaced",
    )
    jumps = 0
    for before, after in pairwise(marks):
        steps, read = after.step - before.step, after.samples_read - before.samples_read
        jumps += not steps
        _require(0 <= steps <= spacing(manifest) and jumps <= JUMPS, "a segment is too long, or has no steps")
        _require(read == steps * batch if steps else read >= 0, "a segment does not read one batch per step")
        _require(
            after.optimizer_steps - before.optimizer_steps == steps, "the optimizer's steps do not match those of the segment"
        )
        _require(lease.positions(before.samples_read, steps * batch) is not None, "a segment reads beyond its lease")
    return said


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise RemoteError(pb.REASON_MALFORMED, detail)


def stretch(manifest: Manifest, lot: int, lease: Lease, marks: Sequence[pb.Mark]) -> Stretch:
    """The drawn one; `marks`: as `read_marks` gave them."""
    found = [(first, last) for first, last in pairwise(marks) if last.step > first.step]
    first, last = found[lot % len(found)]
    steps = last.step - first.step
    return Stretch(first, last, lease.positions(first.samples_read, steps * manifest.training.batch_size) or ())


def needed(audits: Iterable[Audit], open_round: int, cluster: str, round: int, marks: Sequence[pb.Mark]) -> set[bytes]:
    """Return the states of our audit checkpoints that a peer may still request: all while the round is open, then the
    drawn ones."""
    if round >= open_round:
        return {digest for mark in marks for digest in mark.states}
    pairs = [(first, last) for first, last in pairwise(marks) if last.step > first.step]
    asked = [pairs[audit.lot % len(pairs)] for audit in audits if audit.name == (round, cluster) and pairs]
    return {digest for pair in asked for mark in pair for digest in mark.states}
