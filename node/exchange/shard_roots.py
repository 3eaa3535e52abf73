"""Rules of a run with availability: the roots over erasure shards that a contribution announces. Blocking."""

from collections.abc import Callable, Mapping, Sequence

from dilocox.node.exchange.downloader import Roster
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.payload.data_root import check_root, check_work, work_root
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.store.blobs import BlobStore

__all__ = ["ShardRoots"]

RootOf = Callable[[Mapping[str, Cluster], BlobStore, bytes, int | None], bytes]
"""Returns the root over the shards of a blob, by roster, store, digest and stage."""


class ShardRoots:
    def __init__(self, root: RootOf, store: BlobStore, roster: Roster = dict) -> None:
        self._root, self._store, self._roster = root, store, roster

    def added(self, boundary: worker.Boundary) -> worker.Boundary:
        """Return what a worker made in the open round, with the root over the shards of each payload. Raises
        FileNotFoundError where a payload is not here."""
        after = worker.Boundary.FromString(boundary.SerializeToString())
        for payload in after.payloads:
            payload.shares = self._root(self._roster(), self._store, payload.digest, payload.stage)
        return after

    def of_work(self, index: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Return the root of a contribution to the open round, whose payload index is here."""
        return work_root(self._root(self._roster(), self._store, index, None), announced)

    def check_work(self, body: pb.Contribution, leaves: Sequence[pb.Leaf], roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a contribution names another root than that of its shards."""
        check_work(body, self._root(roster, self._store, body.leaves, None), leaves)

    def check_root(self, leaf: pb.Leaf, roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a payload makes other shards than its payload index says."""
        check_root(leaf, self._root(roster, self._store, leaf.digest, leaf.stage))
