"""Build of a corpus from sources, in bounded memory.

A document's hash decides whether it is held out, and its shard. So the same files in the same order make the same
corpus anywhere, all copies of a document are on one side, and a shard is a fair sample of the whole.
"""

import fcntl
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dilocox.node.data.chat import ChatEncoder
from dilocox.node.data.chat_messages import FIELDS
from dilocox.node.data.finding import STDLIB, find_files
from dilocox.node.data.shards import Encoded, Rows, Shards
from dilocox.node.data.sources import documents, records
from dilocox.node.data.tokenizers import Encoder, open_encoder
from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.corpus import BYTES, Corpus, token_bytes
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import last_built, remember_built
from dilocox.transport.store.files import fsync_directory, read_named

__all__ = ["HELD_OUT_EVERY", "build", "build_stdlib"]

HELD_OUT_EVERY = 50
LOCK, MAGIC = ".lock", "dilocox data build\n"
SHARD_BYTES = 64 << 20
"""Approximate source bytes per shard: a home connection fetches one in a minute or two."""
BATCH_CHARACTERS = 1 << 20
"""Encoded at a time."""


def build(
    folder: Path,
    files: Sequence[Path],
    encoder: Encoder | ChatEncoder,
    field: str = "text",
    held_out_every: int = HELD_OUT_EVERY,
    follow: Callable[[int], None] = lambda read: None,
    wait: bool = False,
) -> tuple[bytes, Corpus]:
    """Make a corpus in `folder`, beside what was built there before; with a ChatEncoder of conversations. `follow`: bytes of the
    files that were read since it was told last; `wait`: while another build writes there. Returns its digest, and what it says.

    Raises ConfigError where the sources cannot be read or are too few, LocalError where another build writes there and it is not to
    wait.
    """
    total = sum(path.stat().st_size for path in files)
    counts = [min(limits.SHARDS, math.ceil(size / SHARD_BYTES) or 1) for size in (total, total / held_out_every)]
    folder.mkdir(parents=True, exist_ok=True)
    with _scratch(folder, wait) as scratch:
        store, chat = BlobStore(scratch / "blobs"), encoder if isinstance(encoder, ChatEncoder) else None
        tokenizer = encoder.encoder if isinstance(encoder, ChatEncoder) else encoder
        dtype = np.dtype(f"<u{token_bytes(tokenizer.vocabulary_size)}")
        training, held_out = (
            Shards(scratch / name, count, dtype)
            if chat is None
            else Rows(scratch / name, count, dtype, chat.layout(), tokenizer.end_token)
            for name, count in zip(("t", "h"), counts, strict=True)
        )
        for key, document in _texts(files, field, tokenizer, follow) if chat is None else _conversations(files, chat, follow):
            fate = sha256(b"dilocox-document-v1\0", key.encode(errors="replace"))
            shards = training if int.from_bytes(fate[:8], "big") % held_out_every else held_out
            shards.add(int.from_bytes(fate[8:16], "big") % shards.count, document)
        if not training.documents or not held_out.documents:
            left_out = "" if chat is None or not chat.says() else f"; {chat.says()}"
            fewer = ", or a smaller --held-out-every" if training.documents > 1 else ""
            advice = (None if chat is None else chat.advice()) or "Pass more text"
            raise ConfigError(
                f"{training.documents} documents to train on and {held_out.documents} held out, but both are "
                f"needed{left_out}. {advice}{fewer}."
            )
        shards_of = [shards.publish(store) for shards in (training, held_out)]
        corpus = Corpus(
            tokenizer=BYTES if tokenizer.file is None else store.put([tokenizer.file]).hex(),
            vocabulary_size=tokenizer.vocabulary_size,
            end_token=tokenizer.end_token,
            held_out_every=held_out_every,
            chat=chat.layout(training.trained) if chat is not None and isinstance(training, Rows) else None,
            documents=training.documents,
            held_out_documents=held_out.documents,
            training=shards_of[0],
            held_out=shards_of[1],
        )
        digest = store.put([corpus.canonical_bytes()])
        for path in sorted(store.folder.iterdir()):
            path.replace(folder / path.name)
        fsync_directory(folder)
        remember_built(folder, digest)
    return digest, corpus


def build_stdlib(folder: Path) -> tuple[bytes, Corpus]:
    """The text of this Python's standard library, by bytes: what a run trains on that names nothing else. Takes a second,
    and as long as others who began it before."""
    return build(folder, find_files([STDLIB]), open_encoder(BYTES), wait=True)


def _texts(files: Iterable[Path], field: str, encoder: Encoder, follow: Callable[[int], None]) -> Iterator[tuple[str, Encoded]]:
    """Each with what its fate follows from: the text."""
    for texts in _batches(files, field, follow):
        for text, tokens in zip(texts, encoder.encode(texts), strict=True):
            yield text, Encoded(np.append(tokens, encoder.end_token))


def _conversations(files: Iterable[Path], chat: ChatEncoder, follow: Callable[[int], None]) -> Iterator[tuple[str, Encoded]]:
    """Yield each conversation with the text that its hash covers: its messages, without the template's text."""
    for path in files:
        read = 0
        for where, record, size in records(path, FIELDS):
            follow(size)
            read += size
            if (found := chat.read(where, record)) is not None:
                messages, encoded = found
                yield json.dumps(messages, sort_keys=True), encoded
        follow(path.stat().st_size - read)


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
    with suppress(ConfigError, OSError, UnicodeDecodeError):
        if read_named(folder / LOCK) == MAGIC:
            return True
    with suppress(ConfigError):
        return last_built(folder) in BlobStore(folder)
    return False


@contextmanager
def _scratch(folder: Path, wait: bool) -> Iterator[Path]:
    """Yield an empty folder, removed afterwards; one left by a killed build is removed first."""
    # no space for MAGIC
    if not _is_ours(folder) and any(path.name != LOCK or path.stat().st_size for path in folder.iterdir()):
        raise ConfigError(f"{folder} contains files that no build wrote. Use another folder with --to.")
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise LocalError(f"another build writes to {folder}. Wait for it, or use another folder with --to.") from error
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
