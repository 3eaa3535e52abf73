"""Merit as a check (protocol/checks/merit_rules.py): commits say what the work of each account came to."""

from collections.abc import Mapping

from dilocox.protocol.checks import merit_rules
from dilocox.protocol.consensus.check_interface import Check
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.tally import Tally
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest

__all__ = ["CHECK", "merits_of"]

NAME = "merit"


def merits_of(head: Head) -> Mapping[bytes, int]:
    """Return the merit of all rounds so far, by account."""
    return head.checks.get(NAME, {})


class Merit(Check):
    name = NAME

    def fill_commit(self, manifest: Manifest, head: Head, gathered: StatementPool, result: Tally, commit: pb.Commit) -> None:
        weights = [(head.roster[name].account, result.weights[name]) for name in result.counted]
        merits = merit_rules.earned(merits_of(head), weights)
        commit.merits.extend(pb.Merit(account=account, merit=each) for account, each in merits.items())
        commit.merit_root = merit_rules.root(merits)

    def read_commit(self, commit: pb.Commit) -> Mapping[bytes, int]:
        return {item.account: item.merit for item in commit.merits}


CHECK = Merit()
