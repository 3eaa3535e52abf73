"""Blobs that this host stores as a relay, for peers that are not reachable: payloads of the open round, and agreed states."""

from collections.abc import Container, Iterable

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.messages import seal
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["ROUNDS_KEPT", "AgreedStates", "RelayStore"]

ROUNDS_KEPT = 2
"""Rounds of storage: an upload may precede the commit of its round. Later a contribution names it, or it is not needed."""
STATE_COPIES = 2
"""A state is the parameters and the outer momentum."""


class AgreedStates:
    """The blobs of states that joiners start from: roots that the chain names, and the stages that such a root names."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._roots: frozenset[bytes] = frozenset()

    def name(self, roots: Iterable[bytes]) -> None:
        """Contain the states with these roots, and no others."""
        self._roots = frozenset(roots)

    def __contains__(self, digest: object) -> bool:
        return digest in self._roots or any(digest in self._store.stage_digests(root) for root in self._roots)


class RelayStore:
    def __init__(self, identity: Identity, chain: ChainFile, store: BlobStore, agreed: Container[bytes] = ()) -> None:
        """`agreed`: blobs of states that joiners start from, which the run's relays store."""
        self._identity, self._manifest, self._chain, self._store = identity, chain.manifest, chain, store
        self._agreed, model = agreed, chain.manifest.model
        stages = [stage_tensors(model, stage) for stage in range(model.stages)]
        self._largest = max(4 * sum(tensor.elements for tensor in tensors) for tensors in stages)
        self._most = max(self._largest, limits.LEAVES_BYTES)
        """Bytes of what may be a payload, or its leaves."""
        self._kept: dict[str, dict[bytes, int]] = {}
        """Digests by cluster, with the round that was open."""
        self._forgotten: set[bytes] = set()

    def remember(self) -> None:
        """Store what an earlier incarnation stored, for as long as if it came now. Blocking.

        No record names the peers that pushed it, so it is everything here that may be a payload. The chain names states.
        """
        kept = self._kept.setdefault("", {})
        for digest, size in self._store.sizes().items():
            if size <= self._most:
                kept[digest] = self._chain.head.round

    def admit(self, author: str, digest: bytes, size: int) -> None:
        """Raise RemoteError if this relay does not store that blob for this peer."""
        head = self._chain.head
        if author not in head.cluster_by_peer:
            raise RemoteError(pb.REASON_NOT_ON_ROSTER, "only clusters of the roster may store here")
        if size <= STATE_COPIES * self._largest + limits.LEAVES_BYTES and digest in self._agreed:
            return
        if size > self._most:
            raise RemoteError(pb.REASON_OVERSIZE, f"a payload of this run cannot have {size} bytes")
        cluster = head.cluster_by_peer[author].cluster
        kept = self._recent(cluster)
        places = ROUNDS_KEPT * (self._manifest.model.stages + 1) + 1  # one for a state's root that our chain does not name yet
        if digest not in kept and len(kept) >= places:
            raise RemoteError(pb.REASON_RATE, f"that exceeds the payloads of {ROUNDS_KEPT} rounds")
        self._kept[cluster] = {**kept, digest: head.round}

    def _recent(self, cluster: str) -> dict[bytes, int]:
        """Return a cluster's blobs that a contribution can still name, with their rounds."""
        oldest = self._chain.head.round - ROUNDS_KEPT
        return {digest: round for digest, round in self._kept.get(cluster, {}).items() if round > oldest}

    def blobs(self) -> set[bytes]:
        """Return the blobs to store for peers, whether a contribution names them yet or not."""
        before = {digest for kept in self._kept.values() for digest in kept}
        recent = {cluster: self._recent(cluster) for cluster in self._kept}
        self._kept = {cluster: kept for cluster, kept in recent.items() if kept}
        now = {digest for kept in self._kept.values() for digest in kept}
        self._forgotten |= before - now
        return now

    def forgotten(self) -> set[bytes]:
        """Return, once, the blobs that this relay stores no more."""
        gone, self._forgotten = self._forgotten, set()
        return gone

    def acknowledge(self, digest: bytes) -> pb.Envelope:
        body = pb.Held(blob=digest, round=self._chain.head.round)
        return seal(self._identity, pb.KIND_HELD, self._manifest.run_id, body).envelope
