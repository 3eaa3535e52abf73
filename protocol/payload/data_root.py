"""Data root of a commit: it covers all counted bytes, so the commit alone proves an erasure shard of any of them.

    blob      the tree over its shares            (dilocox_availability.shards)
    work      the tree over the roots of a contribution's blobs: of its leaves first, then of its payloads, by stage
    commit    the tree over the work of each of the counted, in the order of the mean, then over all statements, the ballot first

    statement    SHA-256("dilocox-data-v1" ‖ 0 ‖ digest of the statement)

A payload index names the root of its payload's shards, and a contribution the root of its work. A voter makes the
shards of what it judges, and rejects a contribution that announces other ones. With a roster of one peer, blobs have no
shards, no root, and no place in the tree.
"""

from collections.abc import Sequence

from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload.merkle import Tree
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import author

__all__ = ["check_root", "check_work", "commit_tree", "ways", "work_root"]


def work_root(listed: bytes, leaves: Sequence[pb.Leaf]) -> bytes:
    """Return the root of a contribution's work. `listed`: root over the shards of its payload index."""
    return _work(listed, leaves).root


def _work(listed: bytes, leaves: Sequence[pb.Leaf]) -> Tree:
    return Tree([root for root in _roots(listed, leaves) if root])


def _roots(listed: bytes, leaves: Sequence[pb.Leaf]) -> list[bytes]:
    """Return the roots of a contribution's blobs; empty: it has no shards."""
    return [listed, *(leaf.shares for leaf in leaves)]


def ways(listed: bytes, leaves: Sequence[pb.Leaf]) -> list[list[bytes]]:
    """Return the siblings from the root of each blob, the payload index first, to the root of the work; empty without
    shards."""
    work, roots = _work(listed, leaves), _roots(listed, leaves)
    return [work.proof(sum(map(bool, roots[:index]))) if root else [] for index, root in enumerate(roots)]


def check_work(body: pb.Contribution, listed: bytes, leaves: Sequence[pb.Leaf]) -> None:
    """Check that a contribution names the root of its work, as far as its payload index shows. `listed`: empty without
    shards. Raises RemoteError."""
    if body.shares and body.shares != work_root(listed, leaves):
        raise RemoteError(
            pb.REASON_SHARES,
            "its data root does not cover the erasure shards of its payload index and of the blobs that the index announces",
        )


def check_root(leaf: pb.Leaf, root: bytes) -> None:
    """Whether a leaf names the `root` over the shares of its payload. Raises RemoteError."""
    if leaf.shares != root:
        raise RemoteError(pb.REASON_SHARES, "its payload gives other erasure shards than it announced")


def commit_tree(commit: pb.Commit) -> Tree:
    """The counted have the places that they have in `counted`."""
    work = [pb.Contribution.FromString(commit.contributions[item.contribution].body).shares for item in commit.counted]
    return Tree([*work, *(sha256(b"dilocox-data-v1\0", digest) for digest in _statements(commit))])


def _statements(commit: pb.Commit) -> list[bytes]:
    """Their digests."""
    ballot = [sha256(commit.ballot.key, commit.ballot.body)] if commit.HasField("ballot") else []
    lists = (commit.claims, commit.clusters, commit.leaves, commit.contributions, commit.receipts, commit.reports)
    return [*ballot, *(sha256(author(commit, signed), signed.body) for signed in (s for each in lists for s in each))]
