"""Documents dealt to many shards at once, in bounded memory."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dilocox.node.data.tokenizers import Tokens
from dilocox.protocol.run.corpus import Chat, Shard
from dilocox.transport.store.blobs import BlobStore

__all__ = ["Encoded", "Mask", "Rows", "Shards"]

Mask = npt.NDArray[np.bool_]
BUFFERED_BYTES = 64 << 20
"""Tokens in memory, of all shards together."""
COPIED_BYTES = 4 << 20
"""Bytes per copy."""


@dataclass(frozen=True)
class Encoded:
    """A document."""

    tokens: Tokens
    mask: Mask | None = None
    """Mask of trained tokens; None: all."""


class Shards:
    """A document is one stretch of tokens."""

    def __init__(self, folder: Path, count: int, dtype: npt.DTypeLike) -> None:
        folder.mkdir()
        self._folder, self.count, self._dtype = folder, count, np.dtype(dtype)
        self._buffers: dict[int, list[bytes]] = {}
        self._buffered = 0
        self.documents = 0

    def add(self, shard: int, document: Encoded) -> None:
        """Add a document and its end token."""
        self.documents += 1
        self._append(shard, document.tokens.astype(self._dtype).tobytes())

    def _append(self, shard: int, raw: bytes) -> None:
        self._buffers.setdefault(shard, []).append(raw)
        self._buffered += len(raw)
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
        return tuple(self._publish(store, path) for path in paths)

    def _publish(self, store: BlobStore, path: Path) -> Shard:
        tokens = path.stat().st_size // self._dtype.itemsize
        return Shard(digest=store.adopt(path).hex(), tokens=tokens)


class Rows(Shards):
    """Rows of documents with masks: each goes into its shard's open row, or into the next row if it does not fit."""

    def __init__(self, folder: Path, count: int, dtype: npt.DTypeLike, chat: Chat, end_token: int) -> None:
        super().__init__(folder, count, dtype)
        self._chat, self._end = chat, end_token
        self._open: dict[int, list[Encoded]] = {}
        self.trained = 0

    def add(self, shard: int, document: Encoded) -> None:
        """Add a document of at most one row."""
        self.documents += 1
        row = self._open.setdefault(shard, [])
        if sum(len(each.tokens) for each in (*row, document)) > self._chat.width:
            self._close(shard)
        self._open.setdefault(shard, []).append(document)

    def _close(self, shard: int) -> None:
        """The open row, filled up."""
        row, mask = np.full(self._chat.width, self._end, self._dtype), np.zeros(self._chat.width, bool)
        end = 0
        for document in self._open.pop(shard):
            start, end = end, end + len(document.tokens)
            row[start:end], mask[start:end] = document.tokens, document.mask
        mask[0] = False  # nothing predicts it
        self.trained += int(mask.sum())
        self._append(shard, row.tobytes() + np.packbits(mask).tobytes())

    def publish(self, store: BlobStore) -> tuple[Shard, ...]:
        for shard in sorted(self._open):
            self._close(shard)
        return super().publish(store)

    def _publish(self, store: BlobStore, path: Path) -> Shard:
        """Tokens of all rows, then their masks."""
        tokens = self._chat.width * self._dtype.itemsize
        rows = np.memmap(path, np.uint8, "r").reshape(-1, tokens + self._chat.mask_bytes)
        step = max(1, COPIED_BYTES // rows.shape[1])
        parts = (part[at : at + step] for part in (rows[:, :tokens], rows[:, tokens:]) for at in range(0, len(rows), step))
        return Shard(digest=store.put(part.tobytes() for part in parts).hex(), tokens=len(rows) * self._chat.width)
