"""Store of this peer's erasure shards (shards.py): each is a blob of its own, with its proof beside it.

Proofs are in numbered batches, one file for all shards that were made at once. Of two proofs of one blob the later counts. A
batch is written after its shards. A shard is deleted before its batch, which is deleted with its last shard. After any crash
a shard with a proof is valid, a proof without its shard is forgotten, and a shard without a proof is deleted. Nothing waits
until shards are on disk: their digests show what a power cut took, and they are made again where their blobs are here.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobHash, BlobStore
from dilocox.transport.store.files import read_checked, write_atomically
from dilocox_availability import erasure
from dilocox_availability.shards import Code, check_share, code_in, make_shares, root_over

__all__ = ["ShareStore", "code_root", "make_share", "share_bytes", "share_root"]


def make_share(
    store: BlobStore, blob: bytes, code: Code, index: int, into: BlobStore, way: Sequence[bytes] = ()
) -> services.Share:
    """Make a shard of a blob that is here, put it into another store, and return it with its proof. `way`: from the root
    over all shards to the named root. Blocking: reads the blob once, and makes all shards for the root. Raises
    FileNotFoundError if the blob is not here."""
    size, hashes = store.size(blob), _hashes(code)
    put = into.put((parts[index] for parts in _hashed(store, blob, size, code, hashes)), waits=False)
    share = make_shares(blob, size, code, [each.digest() for each in hashes], way)[index]
    assert share.digest == put, "one digest, hashed twice"
    return share


def share_root(manifest: Manifest, roster: Mapping[str, Cluster], store: BlobStore, blob: bytes, stage: int | None) -> bytes:
    """Return `code_root` with the code of this roster; empty if it makes no shards."""
    code = code_in(manifest, roster, stage)
    return b"" if code is None else code_root(store, blob, code)


def code_root(store: BlobStore, blob: bytes, code: Code) -> bytes:
    """Return the root over the shards of a blob that is here. Blocking: makes all shards, and stores none. Raises
    FileNotFoundError if the blob is not here."""
    size, hashes = store.size(blob), _hashes(code)
    for _ in _hashed(store, blob, size, code, hashes):
        pass
    return root_over(blob, size, code, [each.digest() for each in hashes])


def _hashes(code: Code) -> list[BlobHash]:
    return [BlobHash() for _ in range(code.shares)]


def _hashed(store: BlobStore, blob: bytes, size: int, code: Code, hashes: Sequence[BlobHash]) -> Iterator[list[memoryview]]:
    """Return the stripes of all shards, and add them to their hashes."""
    for parts in erasure.stripes(store.chunks(blob), size, code):
        for digest, part in zip(hashes, parts, strict=True):
            digest.update(part)
        yield parts


class ShareStore:
    """Shards and their proofs. Every method blocks and may run in any thread, except that `add` has one caller at a time. A
    lock holds shards and proofs in step; it is not held while hashing or syncing."""

    def __init__(self, folder: Path) -> None:
        self.store, self._proofs = BlobStore(folder), folder / "proofs"
        self._proofs.mkdir(exist_ok=True)
        self._kept: dict[bytes, tuple[services.Share, int]] = {}
        """Shards by their blob, with the number of their batch."""
        self._in_batch: Counter[int] = Counter()
        """Number of shards that each batch names."""
        self._named: Counter[bytes] = Counter()
        """Number of blobs by shard: two blobs may have equal shards. Every request for a blob reads it."""
        self.lost: set[int] = set()
        """Rounds of which a damaged shard was deleted. The loop that makes shards removes them."""
        self._next, self._lock = 0, threading.Lock()
        self._read()
        self.store.sweep((self.store.digests() | self.store.partials()) - self._named.keys())

    def _read(self) -> None:
        for number in sorted(int(path.stem) for path in self._proofs.glob("*.pb") if path.stem.isdecimal()):
            self._next = number + 1
            for share in read_checked(self._batch(number), _parse) or ():
                if share.digest in self.store:
                    self._record_share(share, number)
            if not self._in_batch[number]:
                self._batch(number).unlink(missing_ok=True)

    def _batch(self, number: int) -> Path:
        return self._proofs / f"{number}.pb"

    def __contains__(self, blob: bytes) -> bool:
        with self._lock:
            return blob in self._kept

    def shares(self) -> list[services.Share]:
        with self._lock:
            return [share for share, _ in self._kept.values()]

    def get(self, blob: bytes) -> services.Share | None:
        """Return the shard of a blob; None: it is not here, or it was damaged, and is made again if the blob is here."""
        while True:
            with self._lock:
                found = self._kept.get(blob)
            if found is None or self.store.sound(found[0].digest):
                return None if found is None else found[0]
            with self._lock:
                if self._kept.get(blob) is found:  # no newer one was added
                    self._let_go(*self._kept.pop(blob))
                    self.lost.add(found[0].round)

    def holds(self, digest: bytes) -> bool:
        """Return whether a blob is a shard that we store, undamaged."""
        with self._lock:
            named = self._named[digest] > 0
        return named and self.store.sound(digest)

    def add(self, shares: Sequence[services.Share]) -> None:
        """Add the proofs of shards that are in our store. Older shards of the same blobs are deleted."""
        if shares:
            number = self._next
            self._next += 1
            write_atomically(self._batch(number), services.Shares(shares=shares).SerializeToString())
            with self._lock:
                for share in shares:
                    self._record_share(share, number)

    def _record_share(self, share: services.Share, number: int) -> None:
        before = self._kept.get(share.blob)
        self._kept[share.blob] = share, number
        self._named[share.digest] += 1
        self._in_batch[number] += 1
        if before is not None:
            self._let_go(*before)

    def drop(self, share: services.Share) -> None:
        """Delete a shard that was made and has no proof here."""
        with self._lock:
            if not self._named[share.digest]:
                self.store.remove(share.digest)

    def remove(self, blob: bytes) -> None:
        with self._lock:
            found = self._kept.pop(blob, None)
            if found is not None:
                self._let_go(*found)

    def _let_go(self, share: services.Share, number: int) -> None:
        self._named[share.digest] -= 1
        if not self._named[share.digest]:
            del self._named[share.digest]
            with suppress(FileNotFoundError):
                self.store.remove(share.digest)
        self._in_batch[number] -= 1
        if not self._in_batch[number]:
            del self._in_batch[number]
            self._batch(number).unlink(missing_ok=True)


def share_bytes(share: services.Share) -> int:
    """Return the bytes of a shard on disk, without its proof."""
    return Code(share.shares, share.needed).share_size(share.size)


def _parse(raw: bytes) -> list[services.Share]:
    """Return the proofs of a batch. Raises ValueError if this store did not write it."""
    try:
        shares = list(services.Shares.FromString(raw).shares)
        for share in shares:
            check_share(share, share.blob)
    except (DecodeError, RemoteError) as error:
        raise ValueError(str(error)) from error
    return shares
