"""Seam to erasure shards. The plugin dilocox-availability makes, serves and probes them, and restores blobs from them.

The rules stay in the core: shard_roots.py says what a contribution must announce. A composition root asks `find_shards` once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from dilocox.protocol.consensus.chain import NamedBy
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Finding
from dilocox.transport.plugins import call, installed
from dilocox.transport.store.blobs import BlobStore

if TYPE_CHECKING:
    from dilocox.node.exchange.downloader import Finder, Restores, Roster
    from dilocox.node.member.checks import Loops, Parts
    from dilocox.transport.net.blob_server import Served
    from dilocox.transport.net.rpc import ChannelPool
    from dilocox.transport.store.chain_file import ChainFile

__all__ = ["CHECKS", "NO_ROOTS", "OwnShards", "Roots", "Shards", "find_restorer", "find_shards", "roots_of"]

CHECKS = "dilocox.checks"
"""Group of entry points: each names a check of a run, and a function that takes its manifest."""
NAME, DISTRIBUTION = "availability", "dilocox-availability"


class OwnShards(Protocol):
    """Shards that this peer stores, and its source of blobs from the shards of all peers."""

    @property
    def shelf(self) -> "Served":
        """Return the store of the shards, for peers."""
        ...

    @property
    def restorer(self) -> "Restores": ...

    def share(self, blob: bytes) -> services.Share | None:
        """Return our shard of a blob with its proof; None: it is not here. Blocking."""

    def loops(self, parts: "Parts") -> "Loops":
        """Return the loops that make shards and probe other clusters."""
        ...


class Shards(Protocol):
    """Erasure shards of one run, as its manifest says."""

    def root(self, roster: Mapping[str, Cluster], store: BlobStore, blob: bytes, stage: int | None) -> bytes:
        """Return the root over a blob's shards; empty where that roster makes none. Blocking. Raises FileNotFoundError if the blob
        is not in the store."""
        ...

    def findings(self) -> Iterator[Finding]:
        """Return what a machine that joins the run should know."""
        ...

    def bytes_a_round(self, clusters: int, stages: Sequence[int]) -> float:
        """Return the mean bytes of shards that a host of these stages writes in a round of so many clusters."""
        ...

    def restorer(self, folder: Path, directory: "Finder", channels: "ChannelPool", chain: "ChainFile") -> "Restores":
        """Return the source of blobs for a peer that stores no shards. Blocking. `folder`: of the run."""
        ...

    def open(self, folder: Path, directory: "Finder", channels: "ChannelPool", chain: "ChainFile") -> OwnShards:
        """Return the shards that a node stores. Blocking. `folder`: of the run."""
        ...


def find_shards(manifest: Manifest) -> Shards | None:
    """Return the shards of a run; None unless it has availability. Raises ConfigError if they cannot be made here."""
    if manifest.availability is None:
        return None
    plugin = installed(CHECKS).get(NAME)
    if plugin is None:
        raise ConfigError(f"this run uses erasure shards, but their plugin is not installed: install {DISTRIBUTION}")
    found = call(plugin, manifest)
    if not all(hasattr(found, name) for name in ("root", "findings", "bytes_a_round", "restorer", "open")):
        raise ConfigError(f"the plugin {NAME} makes no erasure shards: install {DISTRIBUTION} again")
    return cast("Shards", found)


@dataclass(frozen=True)
class Unable:
    """Source of blobs on a machine that cannot restore them."""

    why: str

    async def fetch(self, blob: bytes, by: NamedBy, stage: int | None, store: BlobStore, max_size: int) -> int:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"it could be restored from erasure shards, but {self.why}")


def find_restorer(folder: Path, directory: "Finder", channels: "ChannelPool", chain: "ChainFile") -> "Restores | None":
    """Return the source of blobs for a peer that only reads; None unless the run has availability. Blocking.

    Most blobs are served whole: a reader without the plugin learns of it where one is not."""
    try:
        shards = find_shards(chain.manifest)
        return shards.restorer(folder, directory, channels, chain) if shards is not None else None
    except ConfigError as error:
        return Unable(str(error))


class Roots(Protocol):
    """Roots over the shards of what clusters announce. Blocking, all of it."""

    def added(self, boundary: worker.Boundary) -> worker.Boundary:
        """Return what a worker made in the open round, with the root of each payload. Raises FileNotFoundError where a payload is
        not here."""
        ...

    def of_work(self, index: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Return the root of a contribution to the open round, whose payload index is here; empty where it has none."""
        ...

    def check_work(self, body: pb.Contribution, leaves: Sequence[pb.Leaf], roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a contribution names another root than that of its shards."""

    def check_root(self, leaf: pb.Leaf, roster: Mapping[str, Cluster]) -> None:
        """Raise RemoteError where a payload makes other shards than its payload index says."""


class NoRoots:
    """Roots of a run without availability: contributions announce none, which the rules check."""

    def added(self, boundary: worker.Boundary) -> worker.Boundary:
        return boundary

    def of_work(self, index: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        return b""

    def check_work(self, body: pb.Contribution, leaves: Sequence[pb.Leaf], roster: Mapping[str, Cluster]) -> None:
        pass

    def check_root(self, leaf: pb.Leaf, roster: Mapping[str, Cluster]) -> None:
        pass


NO_ROOTS: Roots = NoRoots()


def roots_of(shards: Shards | None, store: BlobStore, roster: "Roster" = dict) -> Roots:
    """Return the roots of a run's payloads, which are in this store. `roster`: returns that of the open round."""
    if shards is None:
        return NO_ROOTS
    from dilocox.node.exchange.shard_roots import ShardRoots

    return ShardRoots(shards.root, store, roster)
