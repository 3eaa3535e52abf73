"""Samples: a function of the run's corpus and a position only (protocol/run/corpus.py defines the order)."""

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import Corpus, Shard, check_fits, order_of, samples_in
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in

__all__ = ["SHARDS_MAPPED", "UNTRAINED", "Dataset", "load_dataset", "load_private"]

Tokens = npt.NDArray[np.unsignedinteger]
UNTRAINED = -100
"""Target of a token that is read but not trained on."""

SHARDS_MAPPED = 16
"""Most mapped shards: each takes a file descriptor, and neighbouring positions need one shard, or two."""


class Dataset:
    """Reads the shards where they lie: mapped into memory, never copied whole. The daemon brings them (node/data/supply.py)."""

    def __init__(self, manifest: Manifest, corpus: Corpus, store: BlobStore, cluster: str = "") -> None:
        """Open the samples. `cluster`: owner of a private corpus."""
        self._width = manifest.model.sequence_length + 1
        self._store, self._dtype, self._chat = store, np.dtype(f"<u{corpus.token_bytes}"), corpus.chat
        self._training, self._held_out = corpus.training, corpus.held_out
        self._map = lru_cache(maxsize=SHARDS_MAPPED)(self._mapped)
        self._samples = partial(samples_in, manifest)
        self._order = order_of(manifest, corpus, cluster)
        self._evaluation = min(manifest.data.evaluation_sequences, sum(map(self._samples, self._held_out)))
        self._checking: dict[bytes, Future[bool]] = {}
        self._checker = ThreadPoolExecutor(1, "check shards")

    def _mapped(self, shard: Shard) -> tuple[Tokens, Tokens | None]:
        """Tokens (samples, sequence_length + 1), and the rows' masks, where there are any."""
        samples, view = self._samples(shard), self._store.view(bytes.fromhex(shard.digest))
        count = samples * self._width
        tokens = np.frombuffer(view, dtype=self._dtype, count=count).reshape(samples, self._width)
        if self._chat is None:
            return tokens, None
        masks = np.frombuffer(view, dtype=np.uint8, offset=count * self._dtype.itemsize)
        return tokens, masks.reshape(samples, self._chat.mask_bytes)

    @property
    def sequences(self) -> int:
        """Return the sequences of an epoch."""
        return self._order.total

    def here(self, positions: Sequence[int]) -> bool:
        """Return whether these samples are here and valid. It never blocks: shards are read in the background, and the
        next one ahead of time."""
        stretches = {self._order.stretch(position) for position in positions}
        right = [self._right(self._training[shard]) for shard, _ in stretches]
        for _, end in stretches:
            self._right(self._training[self._order.stretch(end)[0]])
        return all(right)

    def _right(self, shard: Shard) -> bool:
        """Return whether the shard is known to be valid: a missing or damaged one may arrive."""
        digest = bytes.fromhex(shard.digest)
        check = self._checking.get(digest)
        if check is not None and not check.done():
            return False
        if check is not None and check.exception() is None and check.result():
            return True
        if digest in self._store:
            self._checking[digest] = self._checker.submit(self._store.sound, digest)
        return False

    def batch(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each (len(positions), sequence_length) int64; a target may be UNTRAINED."""
        return self._split([self._row(self._training, *self._order.find(position)) for position in positions])

    def evaluation(self) -> tuple[Tensor, Tensor]:
        """The held-out samples, spread evenly over the text: (inputs, targets)."""
        ends = list(accumulate(map(self._samples, self._held_out)))
        step = ends[-1] / self._evaluation
        chosen = [int(index * step) for index in range(self._evaluation)]
        places = [(bisect_right(ends, index), index) for index in chosen]
        return self._split([self._row(self._held_out, shard, index - ends[shard]) for shard, index in places])  # from its end

    def _row(self, shards: Sequence[Shard], shard: int, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets of a sample: copies, the shard need not stay mapped."""
        tokens, masks = self._map(shards[shard])
        inputs, targets = tokens[row, :-1].astype(np.int64), tokens[row, 1:].astype(np.int64)
        if masks is not None:
            targets[np.unpackbits(masks[row], count=self._width)[1:] == 0] = UNTRAINED
        return inputs, targets

    def _split(self, rows: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
        inputs, targets = (torch.from_numpy(np.stack(each)) for each in zip(*rows, strict=True))
        return inputs, targets


def load_dataset(manifest: Manifest, folder: Path) -> Dataset:
    """Return the run's samples. `folder`: of its corpus. Raises ConfigError if it is missing, or does not fit the model."""
    store = BlobStore(folder, ours=False)  # the daemon sets aside what is damaged, where the folder is ours
    corpus = corpus_in(store, bytes.fromhex(manifest.data.digest))
    if corpus is None:
        raise ConfigError(f"the run's corpus {manifest.data.digest} does not lie in {folder}")
    check_fits(manifest, corpus)
    return Dataset(manifest, corpus, store)


def load_private(manifest: Manifest, folder: Path, digest: bytes, cluster: str) -> Dataset:
    """Return private samples. `folder`: of the private corpus with this digest, which the daemon has checked. Raises
    ConfigError if it is missing."""
    store = BlobStore(folder, ours=False)
    corpus = corpus_in(store, digest)
    if corpus is None:
        raise ConfigError(f"the private data in {folder} are damaged: build them again")
    return Dataset(manifest, corpus, store, cluster)
