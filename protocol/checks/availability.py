"""Availability as a check (data_root.py, sampling.py): commits prove shards, and votes name the clusters that showed none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dilocox.protocol.checks import availability_rules
from dilocox.protocol.consensus.check_interface import Check, Findings
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.pool import StatementPool, bodies
from dilocox.protocol.consensus.tally import Tally
from dilocox.protocol.member.member_io import CheckInput, Committed, Input, Resynchronise
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.payload.data_root import commit_tree
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["CHECK", "Sampled", "lacking_of"]

NAME = "availability"


@dataclass(frozen=True)
class Sampled(CheckInput):
    """Answer of a cluster that this one was drawn to ask for a shard."""

    cluster: str
    shown: bool


def lacking_of(state: MemberState) -> frozenset[str]:
    """Return the clusters that this one asked for a shard in the open round, and that showed none."""
    return state.checks.get(NAME, frozenset())


class Availability(Check):
    name = NAME

    def fault(self, manifest: Manifest, head: Head, statement: Statement[Any]) -> str:
        if statement.kind == pb.KIND_CONTRIBUTION and not statement.body.shares:
            return "it names no erasure shards"
        if statement.kind == pb.KIND_RECEIPT and statement.body.lacking:
            return availability_rules.finding_fault(
                availability_rules.due(manifest, head), statement.peer, statement.body.lacking
            )
        return ""

    def findings(
        self, manifest: Manifest, head: Head, gathered: StatementPool, weights: Mapping[str, int], candidates: Sequence[str]
    ) -> Findings:
        lacking = availability_rules.lacking(availability_rules.due(manifest, head), bodies(gathered), gathered.contributions)
        return Findings(records={"lacking": lacking}, penalized=lacking)

    def fill_commit(self, manifest: Manifest, head: Head, gathered: StatementPool, result: Tally, commit: pb.Commit) -> None:
        commit.data_root = commit_tree(commit).root

    def receive(self, state: MemberState, event: Input | Resynchronise) -> frozenset[str]:
        match event:
            case Sampled(cluster, shown):
                return lacking_of(state) - {cluster} if shown else lacking_of(state) | {cluster}
            case Committed():
                return frozenset()
        return lacking_of(state)

    def fill_receipt(self, state: MemberState, receipt: pb.Receipt) -> None:
        receipt.lacking.extend(
            availability_rules.told(availability_rules.due(state.manifest, state.head), state.me, lacking_of(state))
        )


CHECK = Availability()
