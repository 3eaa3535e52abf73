"""Content-addressed blob store on disk.

A blob's digest is SHA-256 over its size and the SHA-256 of each 4 MiB chunk. So every chunk is checked on arrival, and
a download resumes at the first missing chunk. The state hash of a stage is the digest of its state blob: one mechanism
for both.

A blob appears under its name only when it is complete. A crash leaves a `.part`, which a later download resumes and a
sweep removes. A blob that can be fetched or computed again does not wait for the disk: after a power loss `sound` finds
whether it is whole.
"""

import hashlib
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import stages_in
from dilocox.transport.store.files import fsync_directory, open_regular, quarantine, write_atomically

__all__ = ["BlobHash", "BlobStore", "PartialBlob", "blob_digest"]

Buffer = bytes | memoryview
_DIGEST = re.compile("[0-9a-f]{64}")


def blob_digest(size: int, chunk_hashes: Iterable[bytes]) -> bytes:
    return sha256(b"dilocox-blob-v1\0", struct.pack(">Q", size), *chunk_hashes)


def chunk_count(size: int) -> int:
    return -(-size // limits.CHUNK_BYTES)


def _chunks(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """Cut buffers into chunks that cross no chunk boundary; no bytes are copied unless a chunk spans two buffers."""
    pending = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while len(view):
            take = min(len(view), limits.CHUNK_BYTES - len(pending))
            if not pending and take == limits.CHUNK_BYTES:
                yield view[:take]
            else:
                pending += view[:take]
                if len(pending) == limits.CHUNK_BYTES:
                    yield memoryview(pending)
                    pending = bytearray()
            view = view[take:]
    if pending:
        yield memoryview(pending)


def digest_of(buffers: Iterable[Buffer]) -> bytes:
    """The digest a blob of these bytes would have."""
    made = BlobHash()
    for buffer in buffers:
        made.update(buffer)
    return made.digest()


class BlobHash:
    """The digest of a blob that comes in parts, for who makes several at once."""

    def __init__(self) -> None:
        self._size, self._hashes, self._chunk, self._in_chunk = 0, list[bytes](), hashlib.sha256(), 0

    def update(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        while len(view):
            part = view[: limits.CHUNK_BYTES - self._in_chunk]
            self._chunk.update(part)
            self._in_chunk += len(part)
            view = view[len(part) :]
            if self._in_chunk == limits.CHUNK_BYTES:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._hashes.append(self._chunk.digest())
        self._chunk, self._in_chunk = hashlib.sha256(), 0

    def digest(self) -> bytes:
        """Nothing is added after it."""
        if self._in_chunk:
            self._end_chunk()
        return blob_digest(self._size, self._hashes)


def _hashed(chunks: Iterable[memoryview]) -> tuple[int, list[bytes]]:
    """Their size, and the hash of each."""
    size, hashes = 0, []
    for chunk in chunks:
        size += len(chunk)
        hashes.append(sha256(chunk))  # type: ignore[arg-type]
    return size, hashes


def _chunks_of(path: Path) -> Iterator[memoryview]:
    """Each until the next one."""
    buffer = memoryview(bytearray(limits.CHUNK_BYTES))
    with open_regular(path) as file:  # buffered: a chunk is whole unless the file ends
        while count := file.readinto(buffer):
            yield buffer[:count]


_LIFE = os.urandom(8).hex()
"""Incarnation of this process. A process id is none: in a container every restart has the same."""
PART, PUSHED = ".part", ".pushed"
"""Suffixes of blobs that are still coming: fetched by us, pushed by others."""


def _read_if_there(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


class BlobStore:
    """Blobs in one folder: `<digest>` beside `<digest>.index`, the chunk hashes."""

    def __init__(self, folder: Path, ours: bool = True) -> None:
        """Open the store. `ours`: a damaged blob may be set aside here; otherwise it stays in place."""
        self.folder, self._ours = folder, ours
        self._sound: set[bytes] = set()
        """Blobs whose digest this process has verified."""
        self._swept = False
        """True once files of earlier incarnations are removed: later ones are this process's."""
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: bytes) -> Path:
        return self.folder / digest.hex()

    def __contains__(self, digest: bytes) -> bool:
        return self.path(digest).is_file()

    def size(self, digest: bytes) -> int:
        return self.path(digest).stat().st_size

    def missing(self, digest: bytes, size: int) -> int:
        """Bytes that a blob of this size still takes on disk: all but what is here, whole or in part."""
        if digest in self:
            return 0
        try:
            return max(0, size - self.path(digest).with_suffix(PART).stat().st_size)
        except FileNotFoundError:
            return size

    def files(self) -> Iterator[tuple[bytes, Path]]:
        """Yield the files of blobs, and files beside them."""
        for entry in self.folder.iterdir():
            name = entry.name.partition(".")[0]
            if _DIGEST.fullmatch(name):
                yield bytes.fromhex(name), entry

    def digests(self) -> set[bytes]:
        return {digest for digest, path in self.files() if not path.suffix}

    def sizes(self) -> dict[bytes, int]:
        """Return the bytes of each blob, without those removed during the scan."""
        found = {}
        for digest, path in self.files():
            if not path.suffix:
                with suppress(FileNotFoundError):
                    found[digest] = path.stat().st_size
        return found

    def partials(self) -> set[bytes]:
        """Return the blobs of which a part is here."""
        return {digest for digest, path in self.files() if path.suffix in (PART, PUSHED)}

    def put(self, buffers: Iterable[Buffer], waits: bool = True) -> bytes:
        """Store the concatenation of `buffers`; returns its digest. Blocking: fsyncs, unless `waits` is false: then it outlives
        this process, and after a power cut `sound` says whether it is whole."""
        scratch = self._scratch()
        size, hashes = 0, []
        try:
            with scratch.open("wb") as file:
                for chunk in _chunks(buffers):
                    hashes.append(sha256(chunk))  # type: ignore[arg-type]
                    size += len(chunk)
                    file.write(chunk)
                file.flush()
                if waits:
                    os.fsync(file.fileno())
            digest = blob_digest(size, hashes)
            if waits or digest not in self._sound or digest not in self:  # a file that is there may be durable
                self._publish(scratch, digest, hashes, waits)
        finally:
            scratch.unlink(missing_ok=True)
        return digest

    def make_durable(self, digests: Iterable[bytes]) -> None:
        """Wait until these blobs are on the disk; missing ones are skipped. Blocking: fsyncs."""
        for digest in digests:
            for path in (self.path(digest), self.path(digest).with_suffix(".index")):
                with suppress(FileNotFoundError), path.open("rb") as file:
                    os.fsync(file.fileno())
        fsync_directory(self.folder)

    def _scratch(self) -> Path:
        """Return a new file to write, before it is renamed. `sweep` removes such files of earlier processes."""
        return self.folder / f".{_LIFE}-{os.urandom(4).hex()}.tmp"

    def _write_index(self, digest: bytes, hashes: list[bytes], waits: bool = True) -> None:
        write_atomically(self.path(digest).with_suffix(".index"), b"".join(hashes), waits=waits, scratch=self._scratch())

    def adopt(self, complete: Path) -> bytes:
        """Make a file on the store's disk a blob: it is renamed, not copied; returns its digest. Blocking: fsyncs."""
        size, hashes = _hashed(_chunks_of(complete))
        with complete.open("rb") as file:
            os.fsync(file.fileno())
        digest = blob_digest(size, hashes)
        self._publish(complete, digest, hashes)
        return digest

    def _publish(self, complete: Path, digest: bytes, hashes: list[bytes], waits: bool = True) -> None:
        self._write_index(digest, hashes, waits)
        os.replace(complete, self.path(digest))
        if waits:
            fsync_directory(self.folder)
        self._sound.add(digest)

    def index(self, digest: bytes) -> list[bytes]:
        """The chunk hashes. Raises FileNotFoundError when the blob is not held."""
        raw = self.path(digest).with_suffix(".index").read_bytes()
        return [raw[at : at + 32] for at in range(0, len(raw), 32)]

    def chunks(self, digest: bytes) -> Iterator[memoryview]:
        """The bytes, of each chunk until the next one. Raises FileNotFoundError when the blob is not held."""
        return _chunks_of(self.path(digest))

    def read(self, digest: bytes, most: int = limits.BLOB_BYTES) -> bytes:
        """All of a small one. Raises FileNotFoundError when it is not held, RemoteError where it has more than so many bytes: who
        names a digest may name any blob."""
        if (size := self.size(digest)) > most:
            raise RemoteError(pb.REASON_OVERSIZE, f"{size} bytes; expected at most {most}")
        with open_regular(self.path(digest)) as file:
            return file.read(size)

    def view(self, digest: bytes) -> memoryview:
        """Return the bytes, mapped for reading; unmapped with the last reference. A file that is truncated under its map,
        or an unreadable sector, kills the process: so this is for processes whose end ends no daemon. A daemon maps
        only blobs that are `sound`: payloads and shards, whose copies would take gigabytes of memory."""
        with self.path(digest).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def verify(self, digest: bytes) -> bool:
        """Whether the bytes on disk still have this digest. Reads all of them."""
        try:
            return blob_digest(*_hashed(self.chunks(digest))) == digest
        except FileNotFoundError:
            return False

    def sound(self, digest: bytes) -> bool:
        """Return whether the blob exists and has its digest; reads it once per process. A damaged one is set aside: fetch
        it again.

        Blocking. Every blob that becomes state, or is served to peers, passes this check.
        """
        path = self.path(digest)
        if digest not in self or digest in self._sound:
            return digest in self
        try:
            size, hashes = _hashed(self.chunks(digest))
        except FileNotFoundError:
            return False
        if blob_digest(size, hashes) != digest:
            if self._ours:
                quarantine(path, "its bytes do not match its digest", (".index",))
            return False
        if self._ours and _read_if_there(path.with_suffix(".index")) != b"".join(hashes):
            self._write_index(digest, hashes)
        self._sound.add(digest)
        return True

    def doubt(self, digest: bytes) -> None:
        """Mark a blob as possibly damaged: `sound` reads it again."""
        self._sound.discard(digest)

    def remove(self, digest: bytes) -> None:
        self._sound.discard(digest)
        for suffix in ("", ".index", PART, PUSHED):
            self.path(digest).with_suffix(suffix).unlink(missing_ok=True)

    def stage_digests(self, root: bytes) -> list[bytes]:
        """Return the digests of a state's stages, in order; empty if its list is missing, damaged, or not a list."""
        try:
            raw = self.read(root, limits.LEAVES_BYTES) if root else b""
            return stages_in(raw) if digest_of([raw]) == root else []
        except (FileNotFoundError, RemoteError):
            return []

    def sweep(self, gone: Iterable[bytes]) -> None:
        """Remove these blobs and what is here of them; the first time also what earlier processes were writing when they ended.
        Only while no other process writes here. What came since the caller looked is not among them, and stays."""
        for digest in gone:
            self.remove(digest)
        for entry in () if self._swept else self.folder.iterdir():
            name, _, ending = entry.name.partition(".")
            if not name and ending.endswith(".tmp") and not ending.startswith(f"{_LIFE}-"):
                entry.unlink(missing_ok=True)
        self._swept = True


class PartialBlob:
    """Download in progress. Feed it bytes in order from `next_chunk`; it checks each chunk before it stores it."""

    def __init__(self, store: BlobStore, digest: bytes, size: int, hashes: list[bytes], suffix: str = PART) -> None:
        """`suffix`: of its file, which one at a time writes. Raises RemoteError when size and hashes are not what the digest
        commits to."""
        if size > limits.BLOB_BYTES or len(hashes) != chunk_count(size):
            raise RemoteError(pb.REASON_OVERSIZE, f"a blob of {size} bytes in {len(hashes)} chunks")
        if blob_digest(size, hashes) != digest:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the chunk hashes do not match the digest")
        self._store, self.digest, self.size, self._hashes = store, digest, size, hashes
        self._path = store.path(digest).with_suffix(suffix)
        self._pending = bytearray()
        self.next_chunk = self._resume()

    def _resume(self) -> int:
        """Reuse the valid leading chunks of an earlier attempt."""
        good = 0
        if self._path.exists():
            with self._path.open("rb+") as file:
                while good < len(self._hashes):
                    chunk = file.read(self._chunk_size(good))
                    if sha256(chunk) != self._hashes[good]:
                        break
                    good += 1
                file.truncate(good * limits.CHUNK_BYTES if good < len(self._hashes) else self.size)
        return good

    def _chunk_size(self, chunk: int) -> int:
        return min(limits.CHUNK_BYTES, self.size - chunk * limits.CHUNK_BYTES)

    @property
    def complete(self) -> bool:
        return self.next_chunk == len(self._hashes)

    @property
    def held(self) -> int:
        """Bytes that are checked and on disk."""
        return min(self.size, self.next_chunk * limits.CHUNK_BYTES)

    def feed(self, data: bytes) -> None:
        """Raises RemoteError on a wrong chunk or surplus bytes; what was kept before stays."""
        self._pending += data
        while not self.complete and len(self._pending) >= (size := self._chunk_size(self.next_chunk)):
            chunk = bytes(self._pending[:size])
            del self._pending[:size]
            if sha256(chunk) != self._hashes[self.next_chunk]:
                raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"chunk {self.next_chunk} does not match its hash")
            with self._path.open("ab") as file:
                if file.tell() != self.next_chunk * limits.CHUNK_BYTES:
                    raise RemoteError(pb.REASON_UNAVAILABLE, "the bytes received so far were deleted in the meantime")
                file.write(chunk)
            self.next_chunk += 1
        if self.complete and self._pending:
            raise RemoteError(pb.REASON_SIZE_MISMATCH, "more bytes than the blob has")

    def feed_from_start(self, data: bytes, sent: int) -> None:
        """`feed` for a sender who does not know what is here already, and sends from the first byte on; `sent` came before."""
        self.feed(data[max(0, self.held + len(self._pending) - sent) :])

    def finish(self) -> None:
        """Publish the complete blob under its digest. Raises RemoteError where it was swept away. Small blobs, which name
        others, are durable. A large one can be fetched again, so this waits for no disk: after a power loss `sound` tells
        whether it is whole."""
        names_others = self.size <= limits.LEAVES_BYTES
        with self._path.open("ab") as file:
            if file.tell() != self.size:
                raise RemoteError(pb.REASON_UNAVAILABLE, "the bytes received so far were deleted in the meantime")
            if names_others:
                os.fsync(file.fileno())
        self._store._publish(self._path, self.digest, self._hashes, waits=names_others)
