"""Baselines of the swarm: one optimizer step on the mean gradient of all clusters, whole or compressed."""

import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bench.lab import CPU, Point
from bench.texts import stdlib
from dilocox.node.outer import codec
from dilocox.node.planning.time_model import Site
from dilocox.node.training.model.data import load_dataset
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.pipeline import trained_tokens
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.payload.arrays import BlockInt4, Reader, Section, Writer
from dilocox.protocol.run.manifest import Manifest

__all__ = ["AllReduce", "CocktailSGD", "decoded_message", "encoded_message"]


class AllReduce:
    """Data parallelism with an exchange at every step: `clusters` batches, one update. Exchanges fp32 gradients, in a ring."""

    def __init__(
        self,
        run: Manifest,
        clusters: int,
        evaluate_every: int = 20,
        device: torch.device = CPU,
        data: Path | None = None,
        site: Site | None = None,
    ) -> None:
        """Store the run and its settings. `site`: the site with the clock of the run."""
        self.run, self.clusters, self.evaluate_every, self.site = run, clusters, evaluate_every, site
        self.seconds = 0.0
        self.trainer = Trainer(run, Mesh(device=device))
        self.trainer.load_initial()
        self.dataset = load_dataset(run, data or stdlib().folder)
        self.parameters = [p for _, stage in self.trainer.pairs() for p in stage.tensors()]
        self.wire_bytes = 0
        self.points: list[Point] = []

    def train(self) -> Self:
        """Train for the run's total steps."""
        batch, position = self.run.training.batch_size, 0
        for step in range(1, self.run.training.total_steps + 1):
            batches = [self.dataset.batch(range(start, start + batch)) for start in self._starts(position)]
            position += batch * self.clusters
            sent = self.update(batches)
            self.wire_bytes += sent
            if self.site is not None:
                moved = sent * self.copies()
                self.seconds += self.site.step.seconds + self.site.line.seconds(moved, moved)
            if step % self.evaluate_every == 0 or step == self.run.training.total_steps:
                self.points.append(self.measure(step, position))
        return self

    def _starts(self, position: int) -> range:
        """Return the start of each cluster's batch."""
        batch = self.run.training.batch_size
        return range(position, position + batch * self.clusters, batch)

    def update(self, batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Take one step, with a batch of each cluster; return the bytes that one cluster sent."""
        for cluster, (inputs, targets) in enumerate(batches):
            self.trainer.pipeline.step(inputs, targets, trained_tokens(targets))
            self.take(cluster)
        sent = self.exchange()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.run.training.gradient_clip)
        self.trainer.optimizer.step()
        return sent

    def copies(self) -> float:
        """Return how often a cluster's message crosses its link."""
        return 2 * (self.clusters - 1) / self.clusters

    def take(self, cluster: int) -> None:
        """Leave a cluster's gradient in the parameters, to which the next one is added."""

    def exchange(self) -> int:
        """Write the mean gradient to the parameters; return the bytes that one cluster sent."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.div_(self.clusters)
        return self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes that a cluster sends in each step: 0 for a single cluster."""
        return sum(4 * parameter.numel() for parameter in self.parameters) if self.clusters > 1 else 0

    def evaluate(self) -> float:
        """Return the held-out loss."""
        return self.trainer.evaluate(*self.dataset.evaluation())

    def measure(self, step: int, position: int) -> Point:
        loss = self.evaluate()
        return Point(step, position * self.run.model.sequence_length, self.wire_bytes, loss, 0.0, seconds=self.seconds)


class CocktailSGD(AllReduce):
    """CocktailSGD (ICML 2023): a shared seed draws a tenth of the gradient in each step. The largest drawn values are sent
    in Int4, with error feedback. Zlib compresses positions and values. This version omits the published one-step delay,
    to its advantage."""

    DRAWN = 0.1

    def __init__(
        self,
        run: Manifest,
        clusters: int,
        share: float,
        evaluate_every: int = 20,
        device: torch.device = CPU,
        data: Path | None = None,
        site: Site | None = None,
    ) -> None:
        """Store the run and its settings. `share`: the part of the drawn values that is sent."""
        super().__init__(run, clusters, evaluate_every, device, data, site)
        size = sum(parameter.numel() for parameter in self.parameters)
        self.share = share
        self.feedback = [torch.zeros(size, device=device) for _ in range(clusters)]
        self.sum = torch.zeros(size, device=device)
        self.generator = torch.Generator().manual_seed(run.model.seed)
        self.drawn = self.draw()
        self.sent = 0

    def copies(self) -> float:
        """Return the number of other clusters: each receives a copy."""
        return self.clusters - 1

    def draw(self) -> Tensor:
        size = len(self.sum)
        return torch.randperm(size, generator=self.generator)[: int(size * self.DRAWN)].sort().values.to(self.sum.device)

    def take(self, cluster: int) -> None:
        feedback, offset = self.feedback[cluster], 0
        for parameter in self.parameters:
            assert parameter.grad is not None
            feedback[offset : offset + parameter.numel()] += parameter.grad.view(-1)
            parameter.grad.zero_()
            offset += parameter.numel()
        chosen, decoded, raw = self.message(feedback[self.drawn], self.share)
        positions = self.drawn[chosen]
        feedback[positions] -= decoded
        self.sum[positions] += decoded
        self.sent = max(self.sent, len(raw))

    @classmethod
    def share_within(cls, most_bytes: float, parameters: int) -> float:
        """Return the largest share of the drawn values whose messages fit the bytes, for normal gradients. Real gradients
        may take some percent more."""
        size = int(cls.DRAWN * parameters)
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(0))
        counts = range(1, size // 2)
        fitting = bisect_right(counts, most_bytes, key=lambda count: len(cls.message(drawn, count / size)[-1]))
        return counts[max(0, fitting - 1)] / size

    @staticmethod
    def message(drawn: Tensor, share: float) -> tuple[Tensor, Tensor, bytes]:
        """Return from the drawn values (the mask of those sent, their decoded values, the message)."""
        chosen = drawn.abs().topk(round(len(drawn) * share)).indices.sort().values
        values = codec.quantize(drawn[chosen][None])
        return chosen, torch.from_numpy(values.values()[0]).to(drawn), encoded_message(chosen.cpu().numpy(), values)

    def exchange(self) -> int:
        offset = 0
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(self.sum[offset : offset + parameter.numel()].view_as(parameter)).div_(self.clusters)
            offset += parameter.numel()
        self.sum.zero_()
        self.drawn = self.draw()
        sent, self.sent = self.sent, 0
        return sent


_MESSAGE = struct.Struct("<IIII")
WIDE_GAP = 255
"""Byte for a gap that does not fit: this value, and the next byte adds to it."""


def encoded_message(positions: "np.ndarray[tuple[int], np.dtype[np.int64]]", values: BlockInt4) -> bytes:
    """Encode `values` at ascending `positions`: gaps in bytes, Int4 codes, both by zlib."""
    gaps = np.diff(positions, prepend=-1) - 1
    wide = np.repeat(WIDE_GAP, int((gaps // WIDE_GAP).sum()))
    narrow = np.insert(gaps % WIDE_GAP, np.repeat(np.arange(len(gaps)), gaps // WIDE_GAP), wide).astype(np.uint8)
    writer = Writer()
    values.write(writer)
    streams = [narrow.tobytes(), b"".join(writer.parts[Section.HEADS]), b"".join(writer.parts[Section.CODES])]
    stored = [zlib.compress(stream, 1) for stream in streams]
    return _MESSAGE.pack(len(positions), *map(len, stored)) + b"".join(stored)


def decoded_message(
    raw: bytes,
) -> "tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.float64]]]":
    """Decode a message; return (positions, values)."""
    count, *lengths = _MESSAGE.unpack_from(raw)
    streams, offset = [], _MESSAGE.size
    for length in lengths:
        streams.append(zlib.decompress(raw[offset : offset + length]))
        offset += length
    steps = np.frombuffer(streams[0], dtype=np.uint8).astype(np.int64)
    ends = steps != WIDE_GAP
    positions = np.cumsum(steps + ends)[ends] - 1
    sections = dict.fromkeys(Section, memoryview(b"")) | {
        Section.HEADS: memoryview(streams[1]),
        Section.CODES: memoryview(streams[2]),
    }
    return positions, BlockInt4.read(Reader(sections), 1, count).values()[0]
