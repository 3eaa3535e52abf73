"""Codecs: a stage's pseudo-gradient to payload arrays and back, as the manifest chooses (layouts: protocol/payload/payload.py).

    lowrank-int4   a matrix as two Int4 factors (node/outer/lowrank.py), what low rank does not shrink as Int4
    int4           Int4 codes with power-of-two block scales
    int2           two magnitudes with a sign, bin means per group of 4,096 values
    topk-int2      the largest values of the whole stage, as int2; the others are 0. Each byte goes where the energy is, whatever
                   the tensor
    fp32           uncompressed

Encoding may differ between machines; decoding is bit-exact on all of them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.node.outer import lowrank
from dilocox.node.outer.int2 import Ragged, decode_levels, encode_levels, place_levels
from dilocox.node.outer.state_device import STRETCH
from dilocox.protocol.errors import Diverged
from dilocox.protocol.payload.arrays import (
    BLOCK,
    GROUP,
    LARGEST,
    MAX_BASE,
    MAX_CODE,
    MIN_BASE,
    OFFSETS,
    SMALLEST,
    Array,
    BlockInt4,
    Floats,
    Levels,
    Sparse,
    groups,
)
from dilocox.protocol.payload.payload import Form, Layout, StageLayout
from dilocox.protocol.payload.payload import Tensor as PackedTensor

__all__ = ["Decoder", "Encoded", "StageEncoder", "quantize", "sparse_arrays", "true_positions"]

PRODUCT = 1 << 22
"""Elements of a product of factors taken at a time: with few rows the other factor would be read too often."""
SAMPLE = 1 << 16
"""Values from which a stage-wide threshold is estimated."""


@dataclass(frozen=True)
class Encoded:
    packed: PackedTensor
    warm: Tensor | None
    """(columns, rank) float32: where the next power iteration starts; None for other forms."""


class StageEncoder:
    """Encodes the tensors of one stage in their order; sparse ones together, because they compete and are many."""

    def __init__(self, feedback: Tensor, layout: StageLayout, device: torch.device | None = None) -> None:
        """`feedback`: the stage, flat. `device`: that factors, rounds to Int4 and places dense levels; default where `feedback`
        lies. Raises Diverged when it is not finite."""
        if not all(_is_finite(part) for part in feedback.split(STRETCH)):
            raise Diverged("a pseudo-gradient is not finite")
        self._device = device or feedback.device
        self._sparse = iter(sparse_arrays(feedback, layout, _largest(feedback, layout.kept)) if layout.kept else [])

    def encode(self, matrix: Tensor, layout: Layout, warm: Tensor | None) -> Encoded:
        """Compress `matrix`: any shape with layout.elements elements, float32."""
        flat = matrix.reshape(-1)
        array: Array
        match layout.form:
            case Form.LOWRANK:
                shaped = matrix.reshape(layout.rows, layout.columns).to(self._device)
                factors = lowrank.factorize(shaped, layout.rank, warm)
                arrays = quantize(factors.p), quantize(factors.q)
                return Encoded((layout, arrays), factors.warm)
            case Form.INT4:
                array = quantize(flat[None].to(self._device))
            case Form.INT2:
                array = encode_levels(flat, self._device)
            case Form.SPARSE:
                array = next(self._sparse)
            case Form.FP32:
                sent = flat.clamp(-LARGEST, LARGEST)
                array = Floats(sent.where(sent.abs() >= SMALLEST, 0.0).cpu().numpy().copy())
        return Encoded((layout, (array,)), None)


def _is_finite(part: Tensor) -> bool:
    """Return whether all values are finite, by the sum of their squares, which is fast; unless that overflows."""
    return math.isfinite(torch.dot(part, part)) or bool(torch.isfinite(part).all())


def sparse_arrays(feedback: Tensor, layout: StageLayout, positions: npt.NDArray[np.int64]) -> list[Sparse]:
    """Return the stage's tensors, of which the values at these positions are sent.

    One pass makes all of them, because a stage has many small ones.
    """
    sizes = [tensor.elements for tensor in layout.tensors]
    edges = [0, *itertools.accumulate(sizes)]
    values = feedback.cpu().numpy().take(positions)
    cuts = np.searchsorted(positions, edges)
    first_group = [0, *itertools.accumulate(groups(size) for size in sizes)]
    starts = np.concatenate([np.arange(edge, edge + size, GROUP) for edge, size in zip(edges, sizes, strict=False)])
    ragged = Ragged(np.abs(values), np.searchsorted(positions, [*starts, edges[-1]]))
    magnitudes, boundaries = place_levels(ragged)
    signs, levels = values < 0, ragged.levels(boundaries)
    return [
        Sparse(
            size,
            magnitudes[first_group[index] : first_group[index + 1]],
            positions[own] - edges[index],
            signs[own],
            levels[own],
        )
        for index, size in enumerate(sizes)
        for own in [slice(cuts[index], cuts[index + 1])]
    ]


def true_positions(parts: Iterable[Tensor]) -> npt.NDArray[np.int64]:
    """Return the positions of true values in these masks, which follow each other."""
    found, before = [], 0
    for part in parts:
        found.append(np.flatnonzero(part.cpu().numpy()) + before)
        before += len(part)
    return np.concatenate(found)


def _largest(values: Tensor, kept: int) -> npt.NDArray[np.int64]:
    """Positions of about the `kept` largest magnitudes of a stage, and of no more: what exceeds a threshold that is estimated from
    a sample, and raised where it has to be."""
    stride = max(1, values.numel() // SAMPLE)
    sample = values[::stride].abs()
    wanted = min(sample.numel() - 1, kept // stride)
    threshold = float(sample.kthvalue(sample.numel() - wanted).values)
    positions = true_positions(part.abs() > threshold for part in values.split(STRETCH))
    magnitudes = np.abs(values.cpu().numpy().take(positions)) if len(positions) > kept else None
    while magnitudes is not None and len(positions) > kept:
        threshold = threshold * 1.01 + 1e-30
        positions, magnitudes = positions[magnitudes > threshold], magnitudes[magnitudes > threshold]
    return positions


def quantize(values: Tensor) -> BlockInt4:
    """Round (rows, columns) float32 to Int4 codes with power-of-two block scales; of two candidate scales the better one."""
    rows, columns = values.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    peak = padded.abs().amax(dim=2)
    exponent = torch.where(peak > 0, torch.ceil(torch.log2(peak / MAX_CODE)), torch.full_like(peak, -1e9))
    top = float(exponent.max()) if exponent.numel() else -1e9
    base = int(min(max(top - (OFFSETS - 1), MIN_BASE), MAX_BASE))
    exponent = exponent.clamp(base, base + OFFSETS - 1)
    finer = (exponent - 1).clamp_min(base)  # clips the peak, but rounds the rest twice as finely
    coarse_codes, coarse_error = _round(padded, exponent)
    fine_codes, fine_error = _round(padded, finer)
    better = fine_error < coarse_error
    codes = torch.where(better[:, :, None], fine_codes, coarse_codes)
    offsets = torch.where(better, finer, exponent) - base
    flat = codes.view(rows, blocks * BLOCK)[:, :columns]
    return BlockInt4(rows, columns, base, offsets.to(torch.uint8).cpu().numpy(), flat.to(torch.int8).cpu().numpy())


def _round(padded: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes at these block exponents, and each block's squared error."""
    scale = torch.exp2(exponent)[:, :, None]
    codes = (padded / scale).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes, (codes * scale).sub_(padded).square_().sum(dim=2)


def dequantize(array: BlockInt4, device: torch.device) -> Tensor:
    """(rows, columns) float64, exact."""
    codes = torch.from_numpy(np.ascontiguousarray(array.codes)).to(device)
    exponents = torch.from_numpy(array.exponents().astype(np.float64)).to(device)
    scales = torch.exp2(exponents).repeat_interleave(BLOCK, dim=1)[:, : array.columns]
    return codes.double().mul_(scales)


class Decoder:
    """Several payloads of one tensor side by side, a stretch at a time: many payloads of a large tensor fit in memory.

    Every value is exact, so neither the stretches, the thread count nor the device changes a bit.
    """

    def __init__(self, packed: Sequence[PackedTensor], device: torch.device) -> None:
        self._layout, self._device = packed[0][0], device
        self._arrays = [arrays[0] for _, arrays in packed]
        self._factors = [
            [dequantize(array, device) for array in arrays if isinstance(array, BlockInt4)]
            for _, arrays in packed
            if self._layout.form == Form.LOWRANK
        ]

    def stretches(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each, flat, in order: what `parts` and `weighted_sum` take."""
        columns = self._layout.columns
        step = columns * max(1, PRODUCT // columns) if self._factors else STRETCH
        for start in range(0, self._layout.elements, step):
            yield start, min(self._layout.elements, start + step)

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """Each payload's float64 values, flat."""
        return list(self._weighted([1.0] * len(self._arrays), start, stop))

    def _weighted(self, weights: Sequence[float], start: int, stop: int) -> Iterator[Tensor]:
        """Each payload's, times its weight."""
        if self._factors:
            rows = slice(start // self._layout.columns, stop // self._layout.columns)
            for (p, q), weight in zip(self._factors, weights, strict=True):
                yield _times((p[rows] @ q.T).view(-1), weight)
            return
        for array, weight in zip(self._arrays, weights, strict=True):
            if isinstance(array, Levels):
                yield decode_levels(array, weight, start, stop, self._device)
            else:
                yield _times(torch.from_numpy(array.part(start, stop)).to(self._device), weight)

    def effective_rank(self, weights: Sequence[float]) -> float | None:
        """Return the effective rank of Σ wᵢ xᵢ; None if the tensor is not of low rank. Its bits differ between machines."""
        if not self._factors:
            return None
        p = torch.cat([p * weight for (p, _), weight in zip(self._factors, weights, strict=True)], 1)
        return lowrank.effective_rank(p, torch.cat([q for _, q in self._factors], 1))

    def weighted_sum(self, weights: Sequence[float], start: int, stop: int) -> Tensor:
        """Σ wᵢ xᵢ in float64, flat, added in the order of the payloads; a sum that is 0 may have either sign."""
        if self._layout.form == Form.SPARSE:
            sparse = np.zeros(stop - start)
            for array, weight in zip(self._arrays, weights, strict=True):
                if isinstance(array, Sparse):
                    array.add_part(sparse, weight, start)
            return torch.from_numpy(sparse).to(self._device)
        parts = self._weighted(weights, start, stop)
        total = next(parts)
        for part in parts:
            total.add_(part)
        return total


def _times(values: Tensor, weight: float) -> Tensor:
    """Multiply in place."""
    return values if weight == 1 else values.mul_(weight)
