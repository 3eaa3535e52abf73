"""Samples: a function of run, position and nothing else.

The text is one stream of tokens cut into sequences of sequence_length + 1. Every `held_out_every`-th sequence is held out for
evaluation; the others are visited in a pseudo-random order that changes every epoch, by position (protocol/ledger.py hands out
positions).
"""

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.node.data_folders import Folders, check_data, source_files, tokenizer_file
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import Manifest

__all__ = ["Dataset", "load_dataset"]

FEISTEL_ROUNDS = 4


class Dataset:
    def __init__(self, manifest: Manifest, tokens: npt.NDArray[np.int64]) -> None:
        """Raises ConfigError when the text is too short for one batch."""
        data, length = manifest.data, manifest.model.sequence_length
        self._width = length + 1
        count = len(tokens) // self._width
        self.tokens = tokens[: count * self._width].reshape(count, self._width)
        self._every = data.held_out_every
        self._held_out = -(-count // self._every)  # rows 0, every, 2·every, …
        self.sequences = count - self._held_out
        self._seed = data.seed
        self._evaluation = min(data.evaluation_sequences, self._held_out)
        if self.sequences < manifest.training.batch_size or not self._held_out:
            needed = self._width * max(self._every, manifest.training.batch_size + 1)
            raise ConfigError(f"data.source has {len(tokens)} tokens; training needs at least {needed}")
        if int(tokens.max()) >= manifest.model.vocabulary_size:
            raise ConfigError(f"token {int(tokens.max())} is outside model.vocabulary_size = {manifest.model.vocabulary_size}")

    def batch(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each (len(positions), sequence_length) int64."""
        rows = torch.from_numpy(self.tokens[[self.row(position) for position in positions]])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def evaluation(self) -> tuple[Tensor, Tensor]:
        """The held-out sequences, spread evenly over the text: (inputs, targets)."""
        step = self._held_out / self._evaluation
        chosen = [int(index * step) * self._every for index in range(self._evaluation)]
        rows = torch.from_numpy(self.tokens[chosen])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def row(self, position: int) -> int:
        epoch, index = divmod(position, self.sequences)
        shuffled = permute(index, self.sequences, self._seed, epoch)
        return shuffled + shuffled // (self._every - 1) + 1  # rows 0, every, 2·every, … are held out


def permute(index: int, count: int, seed: int, epoch: int) -> int:
    """A pseudo-random permutation of 0 … count-1 without a table: a Feistel network, walked until it lands inside."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = sha256(b"dilocox-order-v1\0", seed.to_bytes(8, "big"), epoch.to_bytes(8, "big"))
    while True:
        left, right = index >> half, index & mask
        for number in range(FEISTEL_ROUNDS):
            mixed = int.from_bytes(sha256(key, bytes([number]), right.to_bytes(8, "big"))[:8], "big")
            left, right = right, (left ^ mixed) & mask
        index = left << half | right
        if index < count:
            return index


def load_dataset(manifest: Manifest, folders: Folders | None = None) -> Dataset:
    """`folders`: those that the operator named. Raises ConfigError, before anything is read, when the run wants another."""
    data, folders = manifest.data, folders or {}
    check_data(data, folders)
    files = _standard_library() if data.source == "stdlib" else source_files(data, folders)
    raw = b"\0".join(path.read_bytes() for path in files)
    if data.tokenizer == "bytes":
        return Dataset(manifest, np.frombuffer(raw, dtype=np.uint8).astype(np.int64))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file(data, folders)))
    encoded = tokenizer.encode(raw.decode(errors="replace"), add_special_tokens=False)
    return Dataset(manifest, np.asarray(encoded.ids, dtype=np.int64))


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
