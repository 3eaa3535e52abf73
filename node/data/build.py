"""Sources into a corpus, in bounded memory.

Every document's hash says whether it is held out and to which shard it is dealt, so the same files in the same order make the same
corpus anywhere, copies of a document lie on one side, and a shard is a fair sample of the whole.
"""

import fcntl
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dilocox.node.data.sources import STDLIB, documents, find_files
from dilocox.node.data.tokens import Encoder, open_encoder
from dilocox.protocol import limits
from dilocox.protocol.corpus import BYTES, Corpus, Shard, token_bytes
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.transport.blobs import BlobStore
from dilocox.transport.corpora import last_built, remember_built
from dilocox.transport.files import fsync_directory

__all__ = ["HELD_OUT_EVERY", "build", "build_stdlib"]

HELD_OUT_EVERY = 50
LOCK, MAGIC = ".lock", "dilocox data build\n"
SHARD_BYTES = 64 << 20
"""Of source for a shard, about: a home line fetches one in a minute or two."""
BATCH_CHARACTERS = 1 << 20
"""Encoded at a time."""
BUFFERED_BYTES = 64 << 20
"""Tokens in memory, of all shards together."""


class Shards:
    """Tokens appended to many shards at once."""

    def __init__(self, folder: Path, count: int, dtype: npt.DTypeLike) -> None:
        folder.mkdir()
        self._folder, self.count, self._dtype = folder, count, dtype
        self._buffers: dict[int, list[bytes]] = {}
        self._buffered = 0
        self.documents = 0

    def add(self, shard: int, tokens: npt.NDArray[Any], end: int) -> None:
        """A document."""
        raw = np.append(tokens, end).astype(self._dtype).tobytes()
        self._buffers.setdefault(shard, []).append(raw)
        self._buffered += len(raw)
        self.documents += 1
        if self._buffered >= BUFFERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        for shard, parts in self._buffers.items():
            with (self._folder / str(shard)).open("ab") as file:
                file.writelines(parts)
        self._buffers.clear()
        self._buffered = 0

    def publish(self, store: BlobStore) -> tuple[Shard, ...]:
        """Those that got a document."""
        self._flush()
        paths = [path for shard in range(self.count) if (path := self._folder / str(shard)).exists()]
        sizes = [path.stat().st_size // np.dtype(self._dtype).itemsize for path in paths]
        return tuple(Shard(digest=store.adopt(path).hex(), tokens=size) for path, size in zip(paths, sizes, strict=True))


def build(
    folder: Path,
    files: Sequence[Path],
    encoder: Encoder,
    field: str = "text",
    held_out_every: int = HELD_OUT_EVERY,
    follow: Callable[[int], None] = lambda read: None,
) -> tuple[bytes, Corpus]:
    """Make a corpus in `folder`, beside what was built there before. `follow`: bytes of the files that were read since it was told
    last. Returns its digest, and what it says.

    Raises ConfigError where the sources cannot be read or are too few, LocalError while another build writes there.
    """
    total = sum(path.stat().st_size for path in files)
    counts = [min(limits.SHARDS, math.ceil(size / SHARD_BYTES) or 1) for size in (total, total / held_out_every)]
    folder.mkdir(parents=True, exist_ok=True)
    with _scratch(folder) as scratch:
        store = BlobStore(scratch / "blobs")
        dtype = np.dtype(f"<u{token_bytes(encoder.vocabulary_size)}")
        training, held_out = (Shards(scratch / name, count, dtype) for name, count in zip(("t", "h"), counts, strict=True))
        for texts in _batches(files, field, follow):
            for text, tokens in zip(texts, encoder.encode(texts), strict=True):
                fate = sha256(b"dilocox-document-v1\0", text.encode(errors="replace"))
                shards = training if int.from_bytes(fate[:8], "big") % held_out_every else held_out
                shards.add(int.from_bytes(fate[8:16], "big") % shards.count, tokens, encoder.end_token)
        if not training.documents or not held_out.documents:
            raise ConfigError(
                f"{training.documents} documents to train on and {held_out.documents} held out: both are needed. Give more text,"
                " or a smaller --held-out-every."
            )
        corpus = Corpus(
            tokenizer=BYTES if encoder.file is None else store.put([encoder.file]).hex(),
            vocabulary_size=encoder.vocabulary_size,
            end_token=encoder.end_token,
            held_out_every=held_out_every,
            documents=training.documents,
            held_out_documents=held_out.documents,
            training=training.publish(store),
            held_out=held_out.publish(store),
        )
        digest = store.put([corpus.canonical_bytes()])
        for path in sorted(store.folder.iterdir()):
            path.replace(folder / path.name)
        fsync_directory(folder)
        remember_built(folder, digest)
    return digest, corpus


def build_stdlib(folder: Path) -> tuple[bytes, Corpus]:
    """The text of this Python's standard library, by bytes: what a run trains on that names nothing else. Takes a second."""
    return build(folder, find_files([STDLIB]), open_encoder(BYTES))


def _batches(files: Iterable[Path], field: str, follow: Callable[[int], None]) -> Iterator[list[str]]:
    """Documents that are not empty, about BATCH_CHARACTERS at a time."""
    batch: list[str] = []
    held = 0
    for path in files:
        read = 0
        for text, size in documents(path, field):
            follow(size)
            read += size
            if not text.strip():
                continue
            batch.append(text)
            held += len(text)
            if held >= BATCH_CHARACTERS:
                yield batch
                batch, held = [], 0
        follow(path.stat().st_size - read)  # what a codec or a table's other columns make of the difference
    if batch:
        yield batch


def _is_ours(folder: Path) -> bool:
    """Whether a build wrote here, or what it wrote was copied here."""
    with suppress(OSError, UnicodeDecodeError):
        if (folder / LOCK).read_text() == MAGIC:
            return True
    with suppress(ConfigError):
        return last_built(folder) in BlobStore(folder)
    return False


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """An empty folder in it, gone afterwards; what a killed build left there is removed."""
    if not _is_ours(folder) and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds files that no build made. Name another folder with --to.")
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(f"another build writes in {folder}. Wait for it, or build in another folder with --to.") from error
        if not lock.tell():
            lock.write(MAGIC)
            lock.flush()
        scratch = folder / ".building"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
