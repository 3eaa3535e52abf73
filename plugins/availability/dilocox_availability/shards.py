"""Shares of a blob: any `needed` of them restore it, when whoever held the blob is gone. Who holds which; what proves one.

What is shared is what a commit names: counted payloads with their lists, and states that joiners start from. Every machine that has
the blob makes the same shares of it (erasure.py), keeps its own, and nobody sends one to anybody.

    leaf    SHA-256("dilocox-share-v1" ‖ 0 ‖ blob ‖ size, u64 ‖ shares, u32 ‖ needed, u32 ‖ index, u32 ‖ digest of the share)

and over the leaves, in the order of their indices, a tree (protocol/tree.py). Of what a commit counts it hangs in larger ones
(protocol/data_root.py), and the commit names the root of all: a share proves itself by the commit. No commit names that of a state:
what shares under one root restore has the digest that the commit names, or that root was a lie, and another's shares are tried.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import comb
from typing import NamedTuple

from dilocox.protocol import limits, tree
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.head import Cluster
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.tensors import stage_tensors

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
"""Of a share in a stripe of the blob: so much of it is in memory, times the shares; it divides a chunk of a blob."""
GRAIN_BYTES = 16
"""The last stripe is filled up to these: processors code whole words of them."""

LEAF_BYTES = 128
"""Of a list, at most, for each stage, beside a byte for each tensor's norm."""

SNAPSHOTS_KEPT = 2
"""As of whole states: the newest may not be agreed on everywhere yet."""


class Code(NamedTuple):
    """How a blob is cut."""

    shares: int
    needed: int

    @property
    def stripe(self) -> int:
        """Bytes of the blob."""
        return self.needed * UNIT_BYTES

    def units(self, size: int) -> Iterator[int]:
        """Bytes of each share in each stripe of a blob of `size`."""
        for begin in range(0, size, self.stripe):
            each = -(-min(self.stripe, size - begin) // self.needed)
            yield -(-each // GRAIN_BYTES) * GRAIN_BYTES

    def share_size(self, size: int) -> int:
        """Bytes of each share of a blob of `size`."""
        whole, rest = divmod(size, self.stripe)
        return whole * UNIT_BYTES + sum(self.units(rest))


class Named(NamedTuple):
    """A blob that a commit names, and of which shares are kept."""

    blob: bytes
    stage: int | None
    """None: it is of no stage; everybody has it."""
    state: bool = False
    """Of a state that joiners start from; else of what the commit counted."""


def code_of(peers: int, part: float) -> Code | None:
    """For as many peers as hold shares, `part` of which are to restore. None: there are not two."""
    shares = min(peers, limits.SHARES)
    return Code(shares, min(shares - 1, max(1, int(shares * part)))) if shares > 1 else None


def code_in(manifest: Manifest, roster: Mapping[str, Cluster], stage: int | None) -> Code | None:
    """Of what is of this stage, as a roster shares it. None: it does not."""
    settings = manifest.availability
    return None if settings is None else code_of(len(hosts(roster, stage)), settings.needed_share)


def hosts(roster: Mapping[str, Cluster], stage: int | None) -> list[str]:
    """Who holds shares of what is of this stage: each box that hosts it, so that it had the blob; of what is of none, the leads.
    `roster`: of the round in which it was made. Who came with the commit that names it did not have it."""
    if stage is None:
        return sorted(roster)
    return sorted({peer for cluster in roster.values() for peer in cluster.hosts_of(stage)})


def order(commit: bytes, blob: bytes, peers: Iterable[str]) -> list[str]:
    """Who holds the shares: the peer at place i has share i modulo their number. For each blob another order."""
    return sorted(peers, key=lambda peer: sha256(b"dilocox-share-order\0", commit, blob, peer.encode()))


def share_of(commit: bytes, blob: bytes, peers: Sequence[str], me: str, code: Code) -> int | None:
    """The index of this peer's share; None: it holds none."""
    return order(commit, blob, peers).index(me) % code.shares if me in peers else None


def places(
    manifest: Manifest, roster: Mapping[str, Cluster], commit: bytes, ours: services.Share, me: str, peers: Iterable[str]
) -> dict[str, frozenset[int]]:
    """Indices of the shares that these peers hold of a blob of which we hold this one, by peer; none of who holds none. Of which
    stage the blob is stands nowhere: they are of all those of which ours would be."""
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
    """Of the tree over the shares of a blob; `digests`: of the shares, in order."""
    return tree.root([leaf(blob, size, code, index, digest) for index, digest in enumerate(digests)])


def make_shares(
    blob: bytes, size: int, code: Code, digests: Sequence[bytes], way: Sequence[bytes] = ()
) -> list[services.Share]:
    """Each with its proof; `digests`: of the shares, in order; `way`: siblings from the root over them to the one that is named."""
    over = tree.Tree([leaf(blob, size, code, index, digest) for index, digest in enumerate(digests)])
    root = tree.climb(over.root, way)
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
    """What a peer says of its share of this blob, of at most `largest` bytes; `root`: that the chain names for it, where it does.
    Raises RemoteError where it proves nothing."""
    if share.blob != blob:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the share is of another blob")
    if not 0 < share.needed < share.shares <= limits.SHARES or share.index >= share.shares:
        raise RemoteError(pb.REASON_MALFORMED, f"share {share.index} of {share.shares}, {share.needed} of which restore")
    if share.size > largest:
        raise RemoteError(pb.REASON_OVERSIZE, f"a share of {share.size} bytes; the blob has at most {largest}")
    if root and share.root != root:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the share is proved by another root than the commit's")
    if len(share.proof) > limits.SHARE_PROOF or {len(each) for each in (share.digest, share.root, *share.proof)} != {32}:
        raise RemoteError(pb.REASON_MALFORMED, "the proof of a share is not made of digests")
    code = Code(share.shares, share.needed)
    if tree.climb(leaf(blob, share.size, code, share.index, share.digest), share.proof) != share.root:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the proof of a share does not lead to its root")
    return code


def chance(code: Code, samples: int, unanswered: int, part: float = 1.0) -> float:
    """The probability that at most so many of the samples go unanswered, although of this part of the blobs fewer than `needed`
    shares exist.

    Samples are drawn with replacement, blob and share; each goes unanswered with q ≥ part · (shares − needed + 1) / shares then, so
    it is at most Σ C(samples, i) qⁱ (1 − q)^(samples − i) over i ≤ unanswered.
    """
    q = part * (code.shares - code.needed + 1) / code.shares
    return min(1.0, sum(comb(samples, i) * q**i * (1 - q) ** (samples - i) for i in range(unanswered + 1)))


class Held(NamedTuple):
    """A share that is kept, or could be."""

    round: int
    """Of the commit that names the blob."""
    state: bool
    size: int
    """Bytes of the share."""
    blob: bytes


def worth_keeping(shares: Iterable[Held], head: int, rounds: int, most: int) -> set[bytes]:
    """Of which blobs the shares are kept, so that they take at most so many bytes, the newest first. What was counted has half of
    them, then states, each whole or not at all, then what was counted the rest: neither, however large, keeps the other out.

    `head`: the open round; `rounds`: for how many what was counted is kept.
    """
    here = sorted(set(shares), key=lambda share: (-share.round, share.blob))
    counted = [[share] for share in here if not share.state and head - rounds <= share.round < head]
    states = [[*state] for _, state in groupby((share for share in here if share.state), key=lambda share: share.round)]
    keep = dict[bytes, int]()
    for kind, room in ((counted, counted_room(most)), (states[:SNAPSHOTS_KEPT], most), (counted, most)):
        _keep_newest(keep, kind, room)
    return set(keep)


def _keep_newest(keep: dict[bytes, int], groups: Iterable[Sequence[Held]], room: int) -> None:
    """Those that fit into what is left of the room, up to the first that does not: who has more room keeps at least as many.
    `groups`: newest first, each whole or not at all; `keep`: sizes by blob."""
    left = room - sum(keep.values())
    for group in groups:
        more = {share.blob: share.size for share in group if share.blob not in keep}
        left -= sum(more.values())
        if left < 0:
            return
        keep |= more


def counted_room(most: int) -> int:
    """Of so many bytes those that states never take."""
    return most // 2


def most_shared(manifest: Manifest, roster: Mapping[str, Cluster], sizes: Iterable[int]) -> int:
    """The bytes of all shares, at most, that a peer which hosts all stages keeps of what a round counted. `roster`: of the round;
    `sizes`: of each cluster's payloads together."""
    codes = [code_in(manifest, roster, stage) for stage in (None, *range(manifest.model.stages))]
    needed = min((code.needed for code in codes if code is not None), default=0)
    lists = sum(LEAF_BYTES + len(stage_tensors(manifest.model, stage)) for stage in range(manifest.model.stages))
    return sum(-(-(size + lists) // needed) + len(codes) * GRAIN_BYTES for size in sizes) if needed else 0


def kept_since(rounds: Iterable[tuple[int, int]], head: int, most: int) -> int:
    """The first round of which everybody keeps its shares of what was counted, whatever states it has beside them; `head`, the open
    one: it is none. `rounds`: with `most_shared` of each, newest first; `most`: bytes that a peer may keep."""
    left, first = counted_room(most), head
    for round, size in rounds:
        left -= size
        if left < 0:
            break
        first = round
    return first
