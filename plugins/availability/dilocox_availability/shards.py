"""Erasure shards of a blob: which peer stores which, and what proves one. Any `needed` of them restore the blob.

Shards are made of the blobs that a commit names: counted payloads with their indexes, and states from which nodes join. Every
host that has such a blob makes the same shards of it (erasure.py) and stores its own. No peer sends one unasked.

    leaf    SHA-256("dilocox-share-v1" ‖ 0 ‖ blob ‖ size, u64 ‖ shares, u32 ‖ needed, u32 ‖ index, u32 ‖ digest of the share)

A Merkle tree (merkle.py) is over the leaves, in the order of their indices. For a counted blob it is part of larger
trees (protocol/payload/data_root.py), whose root the commit names: such a shard proves itself by the commit. No commit names a root
for a state. A peer that restores a state compares its digest with the commit's, and tries the shards under another root where
they differ.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import comb
from typing import NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload import merkle
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_tensors

__all__ = [
    "Code",
    "Held",
    "Named",
    "chance",
    "check_share",
    "code_in",
    "code_of",
    "counted_room",
    "hosts",
    "kept_since",
    "leaf",
    "make_shares",
    "most_shared",
    "order",
    "places",
    "root_over",
    "share_of",
    "worth_keeping",
]

UNIT_BYTES = 64 << 10
"""Bytes of a shard in a stripe of the blob. Memory holds one stripe of all shards; a chunk of a blob is a multiple."""
GRAIN_BYTES = 16
"""Multiple to which the last stripe is filled up: processors code whole words of these bytes."""

LEAF_BYTES = 128
"""Most bytes of a payload index for each stage, beside a byte for each tensor's norm."""

SNAPSHOTS_KEPT = 2
"""Snapshots of which shards are stored, as of whole states: peers may not agree on the newest yet."""


class Code(NamedTuple):
    """Number of shards of a blob, and how many restore it."""

    shares: int
    needed: int

    @property
    def stripe(self) -> int:
        """Return the bytes of a stripe of the blob."""
        return self.needed * UNIT_BYTES

    def units(self, size: int) -> Iterator[int]:
        """Return the bytes of each shard in each stripe of a blob of `size`."""
        for begin in range(0, size, self.stripe):
            each = -(-min(self.stripe, size - begin) // self.needed)
            yield -(-each // GRAIN_BYTES) * GRAIN_BYTES

    def share_size(self, size: int) -> int:
        """Return the bytes of each shard of a blob of `size`."""
        whole, rest = divmod(size, self.stripe)
        return whole * UNIT_BYTES + sum(self.units(rest))


class Named(NamedTuple):
    """Blob that a commit names, and of which peers store shards."""

    blob: bytes
    stage: int | None
    """Stage; None: the blob belongs to no stage, and every host has it."""
    state: bool = False
    """True for a state from which nodes join, false for a counted blob."""


def code_of(peers: int, part: float) -> Code | None:
    """Return the code for so many peers, `part` of whose shards restore; None for fewer than two."""
    shares = min(peers, limits.SHARES)
    return Code(shares, min(shares - 1, max(1, int(shares * part)))) if shares > 1 else None


def code_in(manifest: Manifest, roster: Mapping[str, Cluster], stage: int | None) -> Code | None:
    """Return the code of a stage's blobs on a roster; None: that roster makes no shards."""
    settings = manifest.availability
    return None if settings is None else code_of(len(hosts(roster, stage)), settings.needed_share)


def hosts(roster: Mapping[str, Cluster], stage: int | None) -> list[str]:
    """Return the peers that store shards of a stage's blobs: each host of that stage, and for blobs of no stage the lead
    hosts.

    `roster`: of the round in which the blob was made. A cluster that joined with the commit that names it did not have it.
    """
    if stage is None:
        return sorted(roster)
    return sorted({peer for cluster in roster.values() for peer in cluster.hosts_of(stage)})


def order(commit: bytes, blob: bytes, peers: Iterable[str]) -> list[str]:
    """Return the peers in the order of their shards: the peer at place i stores shard i modulo their number. Each blob has
    another order."""
    return sorted(peers, key=lambda peer: sha256(b"dilocox-share-order\0", commit, blob, peer.encode()))


def share_of(commit: bytes, blob: bytes, peers: Sequence[str], me: str, code: Code) -> int | None:
    """Return the index of this peer's shard; None: it stores none."""
    return order(commit, blob, peers).index(me) % code.shares if me in peers else None


def places(
    manifest: Manifest, roster: Mapping[str, Cluster], commit: bytes, ours: services.Share, me: str, peers: Iterable[str]
) -> dict[str, frozenset[int]]:
    """Return the indices of the shards that these peers store of a blob of which we store this one, by peer. A peer without
    any is left out. Our shard does not say of which stage the blob is: the indices are those for all stages that fit it."""
    found: dict[str, set[int]] = {}
    for stage in (None, *range(manifest.model.stages)):
        code, holding = code_in(manifest, roster, stage), hosts(roster, stage)
        if code != (ours.shares, ours.needed) or share_of(commit, ours.blob, holding, me, code) != ours.index:
            continue
        for peer in peers:
            if (index := share_of(commit, ours.blob, holding, peer, code)) is not None:
                found.setdefault(peer, set()).add(index)
    return {peer: frozenset(indices) for peer, indices in found.items()}


def leaf(blob: bytes, size: int, code: Code, index: int, digest: bytes) -> bytes:
    return sha256(b"dilocox-share-v1\0", blob, struct.pack(">QIII", size, *code, index), digest)


def root_over(blob: bytes, size: int, code: Code, digests: Sequence[bytes]) -> bytes:
    """Return the root of the tree over the shards of a blob. `digests`: of the shards, in order."""
    return merkle.root([leaf(blob, size, code, index, digest) for index, digest in enumerate(digests)])


def make_shares(
    blob: bytes, size: int, code: Code, digests: Sequence[bytes], way: Sequence[bytes] = ()
) -> list[services.Share]:
    """Return the shards, each with its proof. `digests`: of the shards, in order; `way`: siblings from the root over them to
    the named root."""
    over = merkle.Tree([leaf(blob, size, code, index, digest) for index, digest in enumerate(digests)])
    root = merkle.climb(over.root, way)
    return [
        services.Share(
            blob=blob,
            size=size,
            shares=code.shares,
            needed=code.needed,
            index=index,
            digest=digest,
            root=root,
            proof=[*over.proof(index), *way],
        )
        for index, digest in enumerate(digests)
    ]


def check_share(share: services.Share, blob: bytes, largest: int = limits.BLOB_BYTES, root: bytes = b"") -> Code:
    """Check a peer's shard of this blob, of at most `largest` bytes, and return its code. `root`: that the chain names for
    it, if any. Raises RemoteError if it proves nothing."""
    if share.blob != blob:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the shard belongs to another blob")
    if not 0 < share.needed < share.shares <= limits.SHARES or share.index >= share.shares:
        raise RemoteError(pb.REASON_MALFORMED, f"shard {share.index} of {share.shares}, {share.needed} of which restore")
    if share.size > largest:
        raise RemoteError(pb.REASON_OVERSIZE, f"a shard of a blob of {share.size} bytes; the blob has at most {largest}")
    if root and share.root != root:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the shard's proof has another root than the commit's")
    if len(share.proof) > limits.SHARE_PROOF or {len(each) for each in (share.digest, share.root, *share.proof)} != {32}:
        raise RemoteError(pb.REASON_MALFORMED, "the proof of a shard does not consist of digests")
    code = Code(share.shares, share.needed)
    if merkle.climb(leaf(blob, share.size, code, share.index, share.digest), share.proof) != share.root:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the proof of a shard does not lead to its root")
    return code


def chance(code: Code, samples: int, unanswered: int, part: float = 1.0) -> float:
    """Return the probability that at most so many samples go unanswered although fewer than `needed` shards exist of this
    part of the blobs.

    Samples are drawn with replacement, blob and shard. Each then goes unanswered with q ≥ part · (shares − needed + 1) /
    shares, so the probability is at most Σ C(samples, i) qⁱ (1 − q)^(samples − i) over i ≤ unanswered.
    """
    q = part * (code.shares - code.needed + 1) / code.shares
    return min(1.0, sum(comb(samples, i) * q**i * (1 - q) ** (samples - i) for i in range(unanswered + 1)))


class Held(NamedTuple):
    """Shard that is stored, or could be."""

    round: int
    """Round of the commit that names the blob."""
    state: bool
    size: int
    """Size of the shard, bytes."""
    blob: bytes


def worth_keeping(shares: Iterable[Held], head: int, rounds: int, most: int) -> set[bytes]:
    """Return the blobs whose shards are stored, the newest first, so that they take at most so many bytes.

    Counted blobs have half of the bytes. States come next, each whole or not at all; counted blobs take what is left. So
    neither kind, however large, displaces the other. `head`: the open round; `rounds`: for how many rounds shards of counted
    blobs are stored.
    """
    here = sorted(set(shares), key=lambda share: (-share.round, share.blob))
    counted = [[share] for share in here if not share.state and head - rounds <= share.round < head]
    states = [[*state] for _, state in groupby((share for share in here if share.state), key=lambda share: share.round)]
    keep = dict[bytes, int]()
    for kind, room in ((counted, counted_room(most)), (states[:SNAPSHOTS_KEPT], most), (counted, most)):
        _keep_newest(keep, kind, room)
    return set(keep)


def _keep_newest(keep: dict[bytes, int], groups: Iterable[Sequence[Held]], room: int) -> None:
    """Add the groups that fit into the free bytes, up to the first that does not fit: a peer with more space stores at
    least as many. `groups`: newest first, each whole or not at all; `keep`: sizes by blob."""
    left = room - sum(keep.values())
    for group in groups:
        more = {share.blob: share.size for share in group if share.blob not in keep}
        left -= sum(more.values())
        if left < 0:
            return
        keep |= more


def counted_room(most: int) -> int:
    """Return how many of so many bytes states never take."""
    return most // 2


def most_shared(manifest: Manifest, roster: Mapping[str, Cluster], sizes: Iterable[int]) -> int:
    """Return the most bytes of shards of one round's counted blobs, on a peer that hosts all stages. `roster`: of the round;
    `sizes`: of each cluster's payloads together."""
    codes = [code_in(manifest, roster, stage) for stage in (None, *range(manifest.model.stages))]
    needed = min((code.needed for code in codes if code is not None), default=0)
    lists = sum(LEAF_BYTES + len(stage_tensors(manifest.model, stage)) for stage in range(manifest.model.stages))
    return sum(-(-(size + lists) // needed) + len(codes) * GRAIN_BYTES for size in sizes) if needed else 0


def kept_since(rounds: Iterable[tuple[int, int]], head: int, most: int) -> int:
    """Return the first round since which every peer has space for its shards of counted blobs, whatever states it has
    beside them.

    `head`, the open round, means none. `rounds`: with `most_shared` of each, newest first; `most`: bytes that a peer
    may use.
    """
    left, first = counted_room(most), head
    for round, size in rounds:
        left -= size
        if left < 0:
            break
        first = round
    return first
