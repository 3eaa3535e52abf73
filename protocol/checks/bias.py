"""Bias check (bias_rules.py): a voter remembers how contributions differ, and rejects those of a cluster that pulls steadily.

It compares sketches that come with the scores of the same node, so a run with this check has scores, too.
"""

from collections.abc import Mapping

from dilocox.protocol.checks import bias_rules
from dilocox.protocol.checks.bias_rules import Memory
from dilocox.protocol.checks.scores import HARMS, by_author, scores_of
from dilocox.protocol.consensus import weighting
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.consensus.check_interface import Check
from dilocox.protocol.member.member_io import Committed, Input, Resynchronise, Verdict
from dilocox.protocol.member.member_state import MemberState

__all__ = ["CHECK", "memory_of"]

NAME = "bias"
NO_MEMORY = Memory()


def memory_of(state: MemberState) -> Memory:
    """Return this node's memory of earlier rounds in this incarnation."""
    return state.checks.get(NAME, NO_MEMORY)


class Bias(Check):
    name = NAME

    def receive(self, state: MemberState, event: Input | Resynchronise) -> Memory:
        if not isinstance(event, Committed):
            return memory_of(state)
        commit, run = event.commit.body, state.manifest
        cut = {item.cluster: weighting.cut(run, item.contribution.norm, commit.norm) for item in taken(commit)}
        return bias_rules.closed(_with_this_round(state), cut)

    def rejects(self, state: MemberState) -> Mapping[bytes, Verdict]:
        authors = bias_rules.biased(state.manifest, _with_this_round(state), state.me, by_author(state))
        return {digest: HARMS for digest in scores_of(state).measured if state.open.seen[digest].peer in authors}


def _with_this_round(state: MemberState) -> Memory:
    return bias_rules.after(state.manifest, memory_of(state), state.me, by_author(state))


CHECK = Bias()
