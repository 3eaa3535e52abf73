"""Audits as a check (protocol/checks/audit_rules.py): contributions commit to states, and votes say what auditors found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.protocol.checks import audit_rules
from dilocox.protocol.checks.audit_rules import Audit, Result
from dilocox.protocol.consensus.check_interface import Check, Findings
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.pool import StatementPool, bodies
from dilocox.protocol.consensus.reputation import by_standing
from dilocox.protocol.consensus.tally import Tally
from dilocox.protocol.member.member_io import CheckInput, Committed, Input, Resynchronise
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["CHECK", "Audited", "audits_of", "results_of"]

NAME = "audits"
Results = Mapping[tuple[int, str], Result]


@dataclass(frozen=True)
class Audited(CheckInput):
    """Result of an audit for which this cluster was drawn."""

    audit: Audit
    result: Result


def audits_of(head: Head) -> tuple[Audit, ...]:
    """Return the audits that are not decided yet, by round and cluster."""
    return head.checks.get(NAME, ())


def results_of(state: MemberState) -> Results:
    """Return this node's results of audits that are not decided yet."""
    return state.checks.get(NAME, {})


class Audits(Check):
    name = NAME

    def fault(self, manifest: Manifest, head: Head, statement: Statement[Any]) -> str:
        if statement.kind == pb.KIND_CONTRIBUTION and not statement.body.audit:
            return "it commits to no states of its phase"
        if statement.kind == pb.KIND_RECEIPT:
            return audit_rules.finding_fault(audits_of(head), head.round, statement.peer, statement.body.audits)
        return ""

    def findings(
        self, manifest: Manifest, head: Head, gathered: StatementPool, weights: Mapping[str, int], candidates: Sequence[str]
    ) -> Findings:
        convicted, audited = audit_rules.faults(audits_of(head), head.round, bodies(gathered), gathered.contributions)
        return Findings(convicted=convicted, records={"audited": audited})

    def fill_commit(self, manifest: Manifest, head: Head, gathered: StatementPool, result: Tally, commit: pb.Commit) -> None:
        audits = audit_rules.still_open(audits_of(head), head.round)
        if gathered.ballot is not None and result.counted:
            weights = by_standing(manifest, head.standings, result.counted)
            audits += audit_rules.drawn(manifest, head.round, gathered.ballot, weights)
        commit.audits.extend(audit_rules.packed(audits))

    def read_commit(self, commit: pb.Commit) -> tuple[Audit, ...]:
        return audit_rules.unpacked(commit)

    def receive(self, state: MemberState, event: Input | Resynchronise) -> Results:
        found = results_of(state)
        match event:
            case Audited(audit, result):
                return {**found, audit.name: result}
            case Committed(_, after):
                return {audit.name: found[audit.name] for audit in audits_of(after) if audit.name in found}
        return found

    def fill_receipt(self, state: MemberState, receipt: pb.Receipt) -> None:
        head = state.head
        receipt.audits.extend(audit_rules.results(audits_of(head), head.round, state.me, results_of(state)))


CHECK = Audits()
