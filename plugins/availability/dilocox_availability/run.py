"""Entry of the plugin: what the core asks of a run's erasure shards (dilocox.node.exchange.shards)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from dilocox.node.exchange.downloader import Finder
from dilocox.node.member.checks import Loops, Parts
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Availability, Manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox_availability import erasure, probes
from dilocox_availability.disk import rounds_shared, shard_bytes, state_is_shared
from dilocox_availability.own_shards import Sharing
from dilocox_availability.restoring import Restorer
from dilocox_availability.store import ShareStore, share_root

__all__ = ["NodeShards", "RunShards", "of_run"]


@dataclass(frozen=True)
class NodeShards:
    """Erasure shards of a node, and what restores blobs from those of all peers."""

    shelf: ShareStore
    restorer: Restorer

    def share(self, blob: bytes) -> services.Share | None:
        """Return our shard of a blob with its proof; None: it is not here. Blocking."""
        return self.shelf.get(blob)

    def loops(self, parts: Parts) -> Loops:
        """Return the loops of a node: one makes its own shards, one asks other clusters for theirs."""
        member, store, oldest = parts.member, parts.place.store, parts.starts.oldest_kept
        sharing = Sharing(member.manifest, member.chain, store, self.shelf, member.identity.peer, oldest)
        return {"share": sharing.run(), "sample": probes.Asker(member, self.restorer, self.shelf, SystemRandom()).run()}


@dataclass(frozen=True)
class RunShards:
    """Erasure shards of one run, as its manifest says."""

    manifest: Manifest
    settings: Availability

    def root(self, roster: Mapping[str, Cluster], store: BlobStore, blob: bytes, stage: int | None) -> bytes:
        """Return the root over a blob's shards; empty if that roster makes none. Blocking. Raises FileNotFoundError if the
        blob is not in the store."""
        return share_root(self.manifest, roster, store, blob, stage)

    def findings(self) -> Iterator[Finding]:
        """Yield that shards can be made here, and whether peers have space for them if there are several clusters."""
        yield Finding(Level.FINE, "availability", "the run uses erasure shards, and this machine can make them")
        if self.manifest.rounds.start_clusters > 1:
            yield self._room()

    def _room(self) -> Finding:
        manifest, settings, clusters = self.manifest, self.settings, self.manifest.rounds.start_clusters
        rounds = rounds_shared(manifest, clusters)
        says = f"peers can store the shards of {rounds:,} rounds of {clusters} clusters"
        do = f"its owner can raise availability.megabytes (now {settings.megabytes:,})"
        if settings.rounds < probes.SETTLED:
            do = f"its owner can raise availability.rounds (now {settings.rounds:,})"
        if rounds < probes.SETTLED:
            return Finding(Level.ODD, "shards", f"{says}: too few for any probe", do)
        if not state_is_shared(manifest, clusters):
            says = f"{says}, but of no state: a joining node needs a peer that has the state"
            return Finding(Level.ODD, "shards", says, do)
        return Finding(Level.FINE, "shards", f"{says}, and the shards of a state")

    def bytes_a_round(self, clusters: int, stages: Sequence[int]) -> float:
        """Return the mean bytes of shards that a host of these stages writes in a round of so many clusters."""
        return shard_bytes(self.manifest, clusters, stages)

    def restorer(self, folder: Path, directory: Finder, channels: ChannelPool, chain: ChainFile) -> Restorer:
        """Return the source of blobs for a peer that stores no shards. Blocking. `folder`: of the run."""
        return Restorer(folder / "restoring", directory, channels, chain)

    def open(self, folder: Path, directory: Finder, channels: ChannelPool, chain: ChainFile) -> NodeShards:
        """Return the shards that a node stores. Blocking. `folder`: of the run."""
        shards = ShareStore(folder / "shares")
        return NodeShards(shards, Restorer(folder / "restoring", directory, channels, chain, shards))


def of_run(manifest: Manifest) -> RunShards:
    """Return the erasure shards of a run with availability. Raises ConfigError if they cannot be made here."""
    assert manifest.availability is not None, "only runs with availability use this"
    erasure.need_coder()
    return RunShards(manifest, manifest.availability)
