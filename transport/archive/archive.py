"""Archive of one run: blobs by digest, and the head that describes them. All calls block.

Every chunk is hashed before it is written, and again when it is read. A blob exists once its index does, which is
written last. An interrupted transfer continues with the first missing chunk. At most `AT_ONCE` chunks are in memory.
"""

import logging
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import ValidationError

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.archive.index import ArchiveHead, Marker
from dilocox.transport.archive.sealing import PLAIN, Sealed, Sealing, load_key
from dilocox.transport.archive.storage import Storage, open_storage
from dilocox.transport.store.blobs import BlobStore, PartialBlob, blob_digest, chunk_count, digest_of

__all__ = ["Archive", "create_archive", "open_archive"]

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")

AT_ONCE = 4
"""Chunks in transfer: a bucket answers each in a tenth of a second or more, so one at a time would fill no line."""
HEADS_KEPT = 2
"""Heads in an archive: the newest, and the one before it, for current readers and for a damaged newest one."""
MARKER, HEADS = "archive.json", "heads"
MARKER_BYTES = 1 << 10
HEAD_BYTES = 64 * limits.MIB
"""Largest head, for a million rounds with a snapshot of every tenth: about 120 bytes each."""
_OURS = re.compile(r"index|\d{6,}")
"""Names of a blob's objects."""
_HEAD = re.compile(r"\d{12}")
_SIZE = struct.Struct(">Q")


class Index(NamedTuple):
    size: int
    hashes: list[bytes]
    inline: bytes
    """The bytes, where the blob is one chunk."""


class Archive:
    """Archive of one run. Only one process writes at a time: another one's head is detected, and nothing is lost."""

    def __init__(self, storage: Storage, sealing: Sealing, run_id: bytes) -> None:
        self.storage, self.run_id, self._sealing = storage, run_id, sealing
        self._here: set[bytes] = set()
        """Blobs that this process has seen there."""
        self._newest = -1
        """Number of the newest head at the last read, readable or not."""

    @property
    def url(self) -> str:
        return self.storage.url

    # Objects

    def _get(self, name: str, most: int) -> bytes:
        return self._sealing.open(name, self.storage.get(name, most + self._sealing.overhead))

    def _put(self, name: str, content: bytes) -> None:
        self.storage.put(name, self._sealing.seal(name, content))

    def folder(self, digest: bytes) -> str:
        """Return the folder of a blob."""
        return f"blobs/{self._sealing.name(digest)}"

    # Blobs

    def __contains__(self, digest: bytes) -> bool:
        if digest not in self._here and self.storage.size(f"{self.folder(digest)}/index") is not None:
            self._here.add(digest)
        return digest in self._here

    def put(self, store: BlobStore, digest: bytes, stop: threading.Event | None = None) -> int:
        """Have a blob of ours; returns the bytes that it took. Raises FileNotFoundError where it is not in `store`, RemoteError
        where it is damaged there, or the archive does not take it, or `stop` was set."""
        if digest in self:
            return 0
        size, hashes = store.size(digest), store.index(digest)
        if blob_digest(size, hashes) != digest:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"the index of {digest.hex()[:16]}… is damaged on this disk")

        def damaged(number: int) -> RemoteError:
            store.doubt(digest)
            return RemoteError(pb.REASON_DIGEST_MISMATCH, f"chunk {number} of {digest.hex()[:16]}… is damaged on this disk")

        with store.path(digest).open("rb") as file:
            lock = threading.Lock()

            def chunk(number: int) -> bytes:
                with lock:
                    file.seek(number * limits.CHUNK_BYTES)
                    data = file.read(limits.CHUNK_BYTES)
                if sha256(data) != hashes[number]:
                    raise damaged(number)
                return data

            return self._write(digest, size, hashes, chunk, stop)

    def write(self, data: bytes) -> bytes:
        """Have a small document; returns its digest. Raises RemoteError."""
        chunks = [data[at : at + limits.CHUNK_BYTES] for at in range(0, len(data), limits.CHUNK_BYTES)]
        digest = digest_of([data])
        if digest not in self:
            self._write(digest, len(data), [sha256(chunk) for chunk in chunks], lambda number: chunks[number], None)
        return digest

    def _write(
        self,
        digest: bytes,
        size: int,
        hashes: list[bytes],
        chunk: Callable[[int], bytes],
        stop: threading.Event | None,
    ) -> int:
        folder, wrote = self.folder(digest), 0
        index = _SIZE.pack(size) + b"".join(hashes)
        if len(hashes) <= 1:
            data = chunk(0) if hashes else b""
            self._put(f"{folder}/index", index + data)
            wrote = len(data)
        else:
            there = self.storage.sizes(folder)

            def write(number: int) -> int:
                _check(stop)
                name, length = f"{number:06}", min(limits.CHUNK_BYTES, size - number * limits.CHUNK_BYTES)
                if there.get(name) == length + self._sealing.overhead:
                    return 0  # of a transfer that was cut: an object is whole or not there
                self._put(f"{folder}/{name}", chunk(number))
                return length

            with _ahead(write, range(len(hashes))) as sizes:
                wrote = sum(sizes)
            self._put(f"{folder}/index", index)
        self._here.add(digest)
        return wrote

    def _index(self, digest: bytes) -> Index:
        """Raises RemoteError where the blob is not here, or this is not its index."""
        name = f"{self.folder(digest)}/index"
        try:
            raw = self._get(name, _SIZE.size + 32 * chunk_count(limits.BLOB_BYTES))
        except FileNotFoundError as error:
            self._here.discard(digest)
            raise RemoteError(
                pb.REASON_UNAVAILABLE, f"the archive {self.url} does not contain the blob {digest.hex()[:16]}…"
            ) from error
        size = _SIZE.unpack_from(raw)[0] if len(raw) >= _SIZE.size else limits.BLOB_BYTES + 1
        end = _SIZE.size + 32 * chunk_count(size)
        if size <= limits.BLOB_BYTES and len(raw) == end + (size if size <= limits.CHUNK_BYTES else 0):
            hashes = [raw[at : at + 32] for at in range(_SIZE.size, end, 32)]
            if blob_digest(size, hashes) == digest:
                return Index(size, hashes, raw[end:])
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"{name} in the archive {self.url} is damaged")

    def fetch(self, digest: bytes, store: BlobStore, most: int, stop: threading.Event | None = None) -> int:
        """Have a blob of the archive in `store`, going on where an earlier fetch ended; returns the bytes received. Raises
        RemoteError where it is not here, larger than `most`, or damaged: what was right stays."""
        index = self._index(digest)
        if index.size > most:
            raise RemoteError(pb.REASON_OVERSIZE, f"{index.size} bytes; expected at most {most}")
        partial, received = PartialBlob(store, digest, index.size, index.hashes), 0
        with self._chunks(digest, index, partial.next_chunk, stop) as chunks:
            for chunk in chunks:
                partial.feed(chunk)
                received += len(chunk)
        if not partial.complete:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"{digest.hex()[:16]}… in the archive {self.url} is incomplete")
        partial.finish()
        return received

    def _chunks(
        self, digest: bytes, index: Index, first: int, stop: threading.Event | None
    ) -> AbstractContextManager[Iterator[bytes]]:
        def chunk(number: int) -> bytes:
            _check(stop)
            if len(index.hashes) == 1:
                return index.inline
            name = f"{self.folder(digest)}/{number:06}"
            try:
                return self._get(name, limits.CHUNK_BYTES)
            except FileNotFoundError as error:
                raise RemoteError(pb.REASON_UNAVAILABLE, f"{name} is missing in the archive {self.url}") from error

        return _ahead(chunk, range(first, len(index.hashes)))

    def read(self, digest: bytes, most: int) -> bytes:
        """All of a small document, verified. Raises RemoteError."""
        index = self._index(digest)
        if index.size > most:
            raise RemoteError(pb.REASON_OVERSIZE, f"{index.size} bytes; expected at most {most}")
        with self._chunks(digest, index, 0, None) as chunks:
            data = b"".join(chunks)
        if digest_of([data]) != digest:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"{digest.hex()[:16]}… in the archive {self.url} is damaged")
        return data

    def drop(self, digest: bytes) -> None:
        """Remove a blob, and nothing that is not of it."""
        folder = self.folder(digest)
        self._here.discard(digest)
        for name in sorted(self.storage.sizes(folder), reverse=True):  # the index first: then it is not here
            if _OURS.fullmatch(name):
                self.storage.delete(f"{folder}/{name}")

    # Heads

    def head(self) -> ArchiveHead | None:
        """The newest that can be read; None where there is none. Raises RemoteError."""
        names = self._heads()
        self._newest = int(names[0]) if names else -1
        for name in names:
            try:
                head = ArchiveHead.parse(self._get(f"{HEADS}/{name}", HEAD_BYTES))
                if (head.run, head.sequence) != (self.run_id.hex(), int(name)):
                    raise RemoteError(pb.REASON_WRONG_RUN, "it belongs to another run or another number")
                return head
            except FileNotFoundError:
                continue  # a newer one appeared during the read
            except RemoteError as error:
                if error.reason == pb.REASON_UNAVAILABLE:
                    raise
                log.warning("head %s of the archive %s is damaged (%s); trying the one before", name, self.url, error.detail)
        return None

    @property
    def begun(self) -> bool:
        """Whether `head` found any, be it damaged."""
        return self._newest >= 0

    def _heads(self) -> list[str]:
        """The newest first."""
        return sorted(filter(_HEAD.fullmatch, self.storage.sizes(HEADS)), reverse=True)

    def publish(self, head: ArchiveHead) -> ArchiveHead:
        """Return the head with its number; it is the newest now. The archive must contain what it names, and it must
        follow the last head read. Raises RemoteError if another one was written between."""
        head = head.model_copy(update={"sequence": self._newest + 1})
        name = f"{HEADS}/{head.sequence:012}"
        if not _HEAD.fullmatch(name.removeprefix(f"{HEADS}/")):
            last = f"{HEADS}/{self._newest}"
            raise ConfigError(f"{self.url} has the last possible head, {last}, which no archive wrote: delete that object")
        if not self.storage.put_new(name, self._sealing.seal(name, head.model_dump_json().encode())):
            self._here.clear()  # the other one may have removed what was here
            raise RemoteError(pb.REASON_UNAVAILABLE, f"another process also writes to the archive {self.url}: stop one of them")
        self._newest = head.sequence
        for old in self._heads()[HEADS_KEPT:]:
            self.storage.delete(f"{HEADS}/{old}")
        return head


def _check(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise RemoteError(pb.REASON_UNAVAILABLE, "it was cancelled")


@contextmanager
def _ahead(work: Callable[[S], T], items: Iterable[S]) -> Iterator[Iterator[T]]:
    """Yield `map(work, items)` from threads, a few items before the reader; no thread is left at the end."""
    with ThreadPoolExecutor(AT_ONCE, "archive") as pool:

        def results() -> Iterator[T]:
            coming: deque[Future[T]] = deque()
            try:
                for item in items:
                    if len(coming) == AT_ONCE:
                        yield coming.popleft().result()
                    coming.append(pool.submit(work, item))
                while coming:
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

        yield results()


def _sealing(run_id: bytes, key: Path | None) -> Sealing:
    return PLAIN if key is None else Sealed(load_key(key), run_id)


def create_archive(url: str, run_id: bytes, key: Path | None) -> Archive:
    """Open the run's archive, or begin one in an empty place. Raises ConfigError if something else is there or heads could
    be lost, RemoteError if the place is unreachable."""
    storage, sealing = open_storage(url), _sealing(run_id, key)
    if storage.size(MARKER) is None:
        if storage.sizes(""):
            raise ConfigError(
                f"{storage.url} contains files that no archive wrote. Use an empty folder or prefix with --archive."
            )
        marker = Marker(format="dilocox-archive-1", run=run_id.hex(), check=sealing.check)
        if storage.put_new(MARKER, marker.model_dump_json(indent=1).encode()):
            log.info("created an archive in %s", storage.url)
    archive = open_archive(url, key, run_id)
    if storage.put_new(MARKER, storage.get(MARKER, MARKER_BYTES)):
        raise ConfigError(
            f"{storage.url} ignores If-None-Match: *, so two writers could overwrite each other's heads. Use a "
            "bucket of a server that supports it, such as Amazon S3, Cloudflare R2, MinIO or Ceph"
        )
    return archive


def open_archive(url: str, key: Path | None, run_id: bytes | None = None) -> Archive:
    """`run_id`: of which run it must be; None: of whichever it is. Raises ConfigError where it is not that, or the key does not
    fit, or there is none, RemoteError where it cannot be reached."""
    storage = open_storage(url)
    try:
        marker = Marker.model_validate_json(storage.get(MARKER, MARKER_BYTES))
    except FileNotFoundError as error:
        raise ConfigError(f"no archive in {storage.url}. Make one: dilocox archive --archive URL --join LINK") from error
    except ValidationError as error:
        raise ConfigError(f"{MARKER} in {storage.url} is damaged, or of another version") from error
    found = bytes.fromhex(marker.run)
    if run_id not in (None, found):
        raise ConfigError(f"the archive {storage.url} belongs to the run {marker.run}")
    if marker.check and key is None:
        raise ConfigError(f"the archive {storage.url} is encrypted: pass its key with --archive-key FILE")
    if not marker.check and key is not None:
        raise ConfigError(f"the archive {storage.url} is not encrypted: remove --archive-key, or use another archive")
    sealing = _sealing(found, key)
    if marker.check != sealing.check:
        raise ConfigError(f"{key} is not the key of the archive {storage.url}")
    return Archive(storage, sealing, found)
