"""Interface of a check: what rules, tally, chain, head and member machine request of each check of a run.

A check has no state. Its memory is one frozen value: in a head, what a commit leaves to the open round; in a member's
state, what this node found. Both are in mappings by the check's name, and only the check reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

if TYPE_CHECKING:
    from dilocox.protocol.consensus.head import Head
    from dilocox.protocol.consensus.pool import StatementPool
    from dilocox.protocol.consensus.tally import Tally
    from dilocox.protocol.member.member_io import Effect, Input, Resynchronise, Verdict
    from dilocox.protocol.member.member_state import MemberState

__all__ = ["NOTHING_FOUND", "Check", "Findings", "Why", "join"]

Why = tuple[pb.Reason, str]
"""A reason, and the sentence where the reason does not say it all."""


@dataclass(frozen=True)
class Findings:
    """Result of a check of the votes of a round."""

    convicted: Mapping[str, Why] = field(default_factory=dict)
    """Clusters that do not count and have no vote."""
    refused: Mapping[str, Why] = field(default_factory=dict)
    """Clusters that do not count; their votes do."""
    well_made: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Voters that reject a contribution for its effect alone, by cluster. They count as if they had accepted it."""
    records: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Clusters whose reputation record counts one more, by field."""
    penalized: frozenset[str] = frozenset()
    """Clusters that lose reputation although they count."""


NOTHING_FOUND = Findings()


def join(findings: Iterable[Findings]) -> Findings:
    """Return the findings of all checks together; of two reasons for one cluster the last."""
    convicted: dict[str, Why] = {}
    refused: dict[str, Why] = {}
    well_made: dict[str, frozenset[str]] = {}
    records: dict[str, frozenset[str]] = {}
    penalized = frozenset[str]()
    for each in findings:
        convicted.update(each.convicted)
        refused.update(each.refused)
        for name, voters in each.well_made.items():
            well_made[name] = well_made.get(name, frozenset()) | voters
        for name, clusters in each.records.items():
            records[name] = records.get(name, frozenset()) | clusters
        penalized |= each.penalized
    return Findings(convicted, refused, well_made, records, penalized)


class Check:
    """One optional check of a run. The hooks of this class do nothing; a check overrides those that it needs."""

    name: str
    """Key of its values in the mappings of heads and members."""

    # The chain: pure functions of what was gathered.

    def fault(self, manifest: Manifest, head: "Head", statement: Statement[Any]) -> str:
        """Return why a claim, contribution or vote is malformed; empty: it is not. Only claims, contributions and votes are asked
        about."""
        return ""

    def findings(
        self,
        manifest: Manifest,
        head: "Head",
        gathered: "StatementPool",
        weights: Mapping[str, int],
        candidates: Sequence[str],
    ) -> Findings:
        """Return what the votes say. `weights`: voting weights of the clusters on the ballot, in its order. `candidates`: clusters
        that contributed and voted, and that no check before this one convicted."""
        return NOTHING_FOUND

    def fill_commit(
        self, manifest: Manifest, head: "Head", gathered: "StatementPool", result: "Tally", commit: pb.Commit
    ) -> None:
        """Fill in this check's fields of a commit that is otherwise complete."""

    def read_commit(self, commit: pb.Commit) -> Any:
        """Return what a trusted commit leaves to the round that it opens; None: nothing."""
        return None

    # The member machine: what this node does for its cluster.

    def receive(self, state: "MemberState", event: "Input | Resynchronise") -> Any:
        """Return what the check knows after an input. `state`: before it. `Resynchronise`: this node starts again from a state that
        the run agreed on, and what hangs on its own is void."""
        return state.checks.get(self.name)

    def request(self, state: "MemberState") -> tuple[Any, Sequence["Effect"]]:
        """Return what the check knows, and the work that is due now and was not asked for yet."""
        return state.checks.get(self.name), ()

    def may_vote(self, state: "MemberState") -> bool:
        """Return whether the vote need not wait for this check any longer."""
        return True

    def rejects(self, state: "MemberState") -> Mapping[bytes, "Verdict"]:
        """Return contributions, by digest, that this node rejects although they are well made."""
        return {}

    def fill_receipt(self, state: "MemberState", receipt: pb.Receipt) -> None:
        """Fill in this check's fields of our vote, whose verdicts are complete."""
