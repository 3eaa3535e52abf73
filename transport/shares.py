"""The shares that this peer keeps of blobs (protocol/shares.py): blobs of their own, beside each the proof of what it is.

A proof is written after its share, and removed before it: after any crash what a proof names is here, and what none names goes.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.shares import Code, check_share, make_shares
from dilocox.transport import erasure
from dilocox.transport.blobs import BlobHash, BlobStore
from dilocox.transport.files import read_checked, write_atomically

__all__ = ["ShareStore", "make_share", "share_bytes"]


def make_share(store: BlobStore, blob: bytes, code: Code, index: int, into: BlobStore) -> services.Share:
    """Make a share of a blob that is here, and put it into another store; its proof. Blocking: reads the blob once, and makes all
    shares for the root over them. Raises FileNotFoundError where the blob is not here."""
    size, hashes = store.size(blob), [BlobHash() for _ in range(code.shares)]

    def ours() -> Iterable[memoryview]:
        for parts in erasure.stripes(store.chunks(blob), size, code):
            for digest, part in zip(hashes, parts, strict=True):
                digest.update(part)
            yield parts[index]

    put = into.put(ours())
    share = make_shares(blob, size, code, [each.digest() for each in hashes])[index]
    assert share.digest == put, "one digest, hashed twice"
    return share


class ShareStore:
    """Blocking, all of it."""

    def __init__(self, folder: Path) -> None:
        self.store, self._proofs = BlobStore(folder), folder / "proofs"
        self._proofs.mkdir(exist_ok=True)
        found = (read_checked(path, _parse) for path in sorted(self._proofs.iterdir()) if len(path.name) == 64)
        self._kept = {share.blob: share for share in found if share is not None}
        """By the blob that each is of."""
        self._named = Counter(share.digest for share in self._kept.values())
        """How many blobs have this share: two may have equal ones. Looked at for every blob that anybody asks this peer for."""
        self.store.sweep((self.store.digests() | self.store.partials()) - self._named.keys())

    def __contains__(self, blob: bytes) -> bool:
        return blob in self._kept

    def shares(self) -> list[services.Share]:
        return list(self._kept.values())

    def get(self, blob: bytes) -> services.Share | None:
        """What we keep of it; None: nothing, or it is damaged, and is made again where the blob is here."""
        share = self._kept.get(blob)
        if share is not None and not self.store.sound(share.digest):
            self.remove(blob)
            return None
        return share

    def holds(self, digest: bytes) -> bool:
        """Whether a blob is a share that we keep, here, and right."""
        return self._named[digest] > 0 and self.store.sound(digest)

    def add(self, share: services.Share) -> None:
        """It is in our store already. An older one of the same blob goes."""
        before = self._kept.get(share.blob)
        write_atomically(self._proofs / share.blob.hex(), share.SerializeToString())
        self._kept[share.blob] = share
        self._named[share.digest] += 1
        if before is not None:
            self._let_go(before)

    def remove(self, blob: bytes) -> None:
        share = self._kept.pop(blob, None)
        (self._proofs / blob.hex()).unlink(missing_ok=True)
        if share is not None:
            self._let_go(share)

    def _let_go(self, share: services.Share) -> None:
        self._named[share.digest] -= 1
        if not self._named[share.digest]:
            del self._named[share.digest]
            with suppress(FileNotFoundError):
                self.store.remove(share.digest)


def share_bytes(share: services.Share) -> int:
    """On disk, without its proof."""
    return Code(share.shares, share.needed).share_size(share.size)


def _parse(raw: bytes) -> services.Share:
    """Raises ValueError where it is not what we wrote."""
    try:
        share = services.Share.FromString(raw)
        check_share(share, share.blob)
    except (DecodeError, RemoteError) as error:
        raise ValueError(str(error)) from error
    return share
