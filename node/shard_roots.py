"""Roots over the erasure shards of what our workers made. Blocking."""

from collections.abc import Sequence

from dilocox.node.downloader import Roster
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore

__all__ = ["ShardRoots"]


class ShardRoots:
    def __init__(self, manifest: Manifest, store: BlobStore, roster: Roster = dict) -> None:
        self._manifest, self._store, self._roster = manifest, store, roster

    def _root(self, blob: bytes, stage: int | None) -> bytes:
        from dilocox.transport.shares import share_root

        return share_root(self._manifest, self._roster(), self._store, blob, stage)

    def added(self, boundary: worker.Boundary) -> worker.Boundary:
        """Return what a worker made in the open round, with the root over the shards of each payload. Raises
        FileNotFoundError where a payload is not here."""
        if self._manifest.availability is None:
            return boundary
        after = worker.Boundary.FromString(boundary.SerializeToString())
        for payload in after.payloads:
            payload.shares = self._root(payload.digest, payload.stage)
        return after

    def of_work(self, index: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Return the root of a contribution to the open round, whose payload index is here; empty where the run keeps no shards."""
        if self._manifest.availability is None:
            return b""
        from dilocox.protocol.data_root import work_root

        return work_root(self._root(index, None), announced)
