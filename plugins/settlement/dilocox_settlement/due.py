"""Data for a contract, from a run's chain of commits. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from dilocox.protocol.checks import merit_rules as merit
from dilocox.protocol.crypto import sha256
from dilocox.protocol.ids import peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, author

__all__ = ["Claim", "Evidence", "Posted", "claim_of", "equivocations", "posted"]


class Posted(NamedTuple):
    """Arguments of `settle`."""

    root: bytes
    total: int
    round: int
    digest: bytes
    last: bool


class Claim(NamedTuple):
    """Arguments of `claim`."""

    account: str
    merit: int
    proof: list[bytes]


class Evidence(NamedTuple):
    """Two statements of one signer for one slot, in a commit."""

    cluster: bytes
    """Key of its lead host."""
    account: bytes
    """Account that it named when it signed them; empty: none."""
    round: int
    digest: bytes
    """SHA-256 over the digests of both, in order: argument of `slash`."""


def merits_of(commit: pb.Commit) -> Mapping[bytes, int]:
    return {item.account: item.merit for item in commit.merits}


def posted(commit: Statement[pb.Commit]) -> Posted:
    """Return the data to post for a verified commit of a run that settles."""
    body = commit.body
    total = sum(merits_of(body).values())
    return Posted(body.merit_root, total, body.round, commit.digest, body.closing)


def claim_of(commit: pb.Commit, account: bytes) -> Claim:
    """Return the claim. Raises KeyError if the account has earned nothing by then."""
    merits = merits_of(commit)
    return Claim("0x" + account.hex(), merits[account], merit.proof(merits, account))


def equivocations(commits: Sequence[Statement[pb.Commit]]) -> list[Evidence]:
    """Return the equivocations that verified commits prove, oldest first: two contributions, or two votes, of one cluster
    for one round. Claims, layouts, reports and unchanged repetitions prove nothing here."""
    found = []
    for before, commit in pairwise(commits):
        accounts = {member.cluster: member.account for member in before.body.roster}
        for name in ("contributions", "receipts"):
            slots: dict[bytes, list[bytes]] = {}
            for signed in getattr(commit.body, name):
                key = author(commit.body, signed)
                slots.setdefault(key, []).append(sha256(key, signed.body))
            found += [
                Evidence(key, accounts.get(peer_id(key), b""), commit.body.round, sha256(*sorted(digests)))
                for key, digests in sorted(slots.items())
                if len(digests) > 1
            ]
    return found
