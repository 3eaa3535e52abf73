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
from dilocox.node.outer.outer_step import outer_step
from dilocox.node.outer.state_device import STRETCH
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
from dilocox.protocol.payload.native import Kernels, WeightedArrays, kernels
from dilocox.protocol.payload.payload import Form, Layout, StageLayout
from dilocox.protocol.payload.payload import Tensor as PackedTensor
from dilocox.protocol.run.manifest import Outer

__all__ = ["Decoder", "Encoded", "StageEncoder", "quantize", "sparse_arrays", "true_positions"]

PRODUCT = 1 << 22
"""Elements of a product of factors taken at a time: with few rows the other factor would be read too often."""
NO_EXPONENT = -128
"""Exponent of a block that is all zeros, below every base."""
SAMPLE = 1 << 16
"""Values from which a stage-wide threshold is estimated."""


@dataclass(frozen=True)
class Encoded:
    packed: PackedTensor
    warm: Tensor | None
    """(columns, rank) float32: where the next power iteration starts; None for other forms."""
    left: float | None = None
    """Norm of the error feedback, from which the fast path has subtracted what the payload decodes to; None: it has not."""


class StageEncoder:
    """Encodes the tensors of one stage in their order; sparse ones together, because they compete and are many."""

    def __init__(self, feedback: Tensor, layout: StageLayout, device: torch.device | None = None) -> None:
        """`feedback`: the stage, flat. `device`: that factors, rounds to Int4 and places dense levels; default where `feedback`
        lies. All values are finite."""
        self._device = device or feedback.device
        self._native = kernels() if feedback.device.type == self._device.type == "cpu" else None
        self._sparse = iter(sparse_arrays(layout, *_largest(feedback, layout.kept)) if layout.kept else [])

    def encode(self, matrix: Tensor, layout: Layout, warm: Tensor | None, left: Tensor | None = None) -> Encoded:
        """Compress `matrix`: any shape with layout.elements elements, float32. `left`: the tensor's error feedback, from
        which the fast path subtracts what the payload decodes to."""
        flat = matrix.reshape(-1)
        array: Array
        if self._native is not None and layout.form in (Form.INT2, Form.INT4):
            return self._encode_natively(self._native, flat, layout, left)
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

    def _encode_natively(self, native: Kernels, flat: Tensor, layout: Layout, left: Tensor | None) -> Encoded:
        flat = flat.contiguous()
        to = left.data_ptr() if left is not None and left.is_contiguous() else 0
        if layout.form == Form.INT2:
            magnitudes, codes, squares = native.int2_encode(flat.data_ptr(), flat.numel(), to)
            array: Array = Levels(flat.numel(), magnitudes, codes)
        else:
            array, squares = _quantized(native, flat[None], to)
        return Encoded((layout, (array,)), None, math.sqrt(squares) if to else None)


def sparse_arrays(layout: StageLayout, positions: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> list[Sparse]:
    """Return the stage's tensors, of which these values at these positions are sent.

    One pass makes all of them, because a stage has many small ones.
    """
    sizes = [tensor.elements for tensor in layout.tensors]
    edges = [0, *itertools.accumulate(sizes)]
    cuts = np.searchsorted(positions, edges)
    first_group = [0, *itertools.accumulate(groups(size) for size in sizes)]
    starts = np.concatenate([np.arange(edge, edge + size, GROUP) for edge, size in zip(edges, sizes, strict=False)])
    bounds, signs = np.searchsorted(positions, [*starts, edges[-1]]), values < 0
    native = kernels()
    if native is not None:
        magnitudes, levels = native.sparse_levels(np.abs(values), bounds)
    else:
        ragged = Ragged(np.abs(values), bounds)
        magnitudes, boundaries = place_levels(ragged)
        levels = ragged.levels(boundaries)
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


def _largest(values: Tensor, kept: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return positions and values of about the `kept` largest magnitudes of a stage, and of no more.

    They exceed a threshold that is estimated from a sample, and raised where it has to be."""
    stride = max(1, values.numel() // SAMPLE)
    sample = values[::stride].abs()
    wanted = min(sample.numel() - 1, kept // stride)
    threshold = float(sample.kthvalue(sample.numel() - wanted).values)
    native = kernels() if values.device.type == "cpu" else None
    if native is not None:
        positions, large = native.above(values.data_ptr(), values.numel(), threshold, expected=kept)
    else:
        positions = true_positions(part.abs() > threshold for part in values.split(STRETCH))
        large = values.cpu().numpy().take(positions)
    while len(positions) > kept:
        threshold = threshold * 1.01 + 1e-30
        above = np.abs(large) > threshold
        positions, large = positions[above], large[above]
    return positions, large


def quantize(values: Tensor) -> BlockInt4:
    """Round (rows, columns) float32 to Int4 codes with power-of-two block scales; of two candidate scales the better one."""
    rows, columns = values.shape
    native = kernels() if values.device.type == "cpu" else None
    if native is not None:
        return _quantized(native, values.contiguous())[0]
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    wanted = padded.abs().amax(dim=2) / MAX_CODE
    mantissa, exponent = torch.frexp(wanted)
    exponent = torch.where(wanted > 0, exponent - (mantissa == 0.5).int(), NO_EXPONENT)
    base = _base(int(exponent.max()) if exponent.numel() else NO_EXPONENT)
    exponent = exponent.clamp(base, base + OFFSETS - 1)
    finer = (exponent - 1).clamp_min(base)  # clips the peak, but rounds the rest twice as finely
    coarse_codes, coarse_error = _round(padded, exponent)
    fine_codes, fine_error = _round(padded, finer)
    better = fine_error < coarse_error
    codes = torch.where(better[:, :, None], fine_codes, coarse_codes)
    offsets = torch.where(better, finer, exponent) - base
    flat = codes.view(rows, blocks * BLOCK)[:, :columns]
    return BlockInt4(rows, columns, base, offsets.to(torch.uint8).cpu().numpy(), flat.to(torch.int8).cpu().numpy())


def _quantized(native: Kernels, values: Tensor, left: int = 0) -> tuple[BlockInt4, float]:
    """Quantise contiguous values; return them and Σ left². `left`: address of what loses the decoded values; 0: of none."""
    rows, columns = values.shape
    needed, top = native.int4_exponents(values.data_ptr(), rows, columns)
    base = _base(top)
    offsets, codes, squares = native.int4_round(values.data_ptr(), columns, needed, base, left)
    return BlockInt4(rows, columns, base, offsets, codes), squares


def _base(top: int) -> int:
    """Return the base exponent of an array whose blocks need at most the exponent `top`."""
    return min(max(top - (OFFSETS - 1), MIN_BASE), MAX_BASE)


def _round(padded: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes at these block exponents, and each block's squared error."""
    scale = torch.exp2(exponent.float())[:, :, None]
    codes = (padded / scale).round_().clamp_(-MAX_CODE, MAX_CODE)
    errors = (codes * scale).sub_(padded).square_()
    while errors.shape[2] > 1:  # halves are added: the fast path does it in the same order
        low, high = errors.chunk(2, dim=2)
        errors = low + high
    return codes, errors[:, :, 0]


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
        self._last: tuple[tuple[float, ...], WeightedArrays] | None = None
        self._native = kernels() if device.type == "cpu" and not self._factors else None

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

    def add_to(self, flat: Tensor, weight: float, start: int, stop: int) -> None:
        """Add the values start … stop of a single payload, times `weight`, to `flat`, in float32; none that is not sent."""
        (array,) = self._arrays
        if self._native is not None and flat.is_contiguous():
            self._native.add_to(self._described((weight,)), start, stop, flat.data_ptr())
        elif isinstance(array, Sparse):
            positions, values = array.few(start, stop)
            flat[torch.from_numpy(positions).to(flat.device)] += torch.from_numpy(values * weight).to(
                flat.device, torch.float32
            )
        else:
            flat.add_(self.weighted_sum([weight], start, stop).float())

    def mean_step(self, weights: Sequence[float], start: int, stop: int, theta: Tensor, momentum: Tensor, outer: Outer) -> None:
        """Overwrite values start … stop with their outer step by Σ wᵢ xᵢ."""
        if self._native is not None:
            where = theta.data_ptr(), momentum.data_ptr(), outer.learning_rate, outer.momentum
            self._native.mean_step(self._described(tuple(weights)), start, stop, *where)
        else:
            outer_step(theta, momentum, self.weighted_sum(weights, start, stop), outer)

    def _described(self, weights: tuple[float, ...]) -> WeightedArrays:
        """Return the arrays for the fast path; the last ones are kept, because stretches follow each other."""
        if self._last is None or self._last[0] != weights:
            parts = WeightedArrays()
            for array, weight in zip(self._arrays, weights, strict=True):
                array.describe(parts, weight)
            self._last = weights, parts
        return self._last[1]

    def effective_rank(self, weights: Sequence[float]) -> float | None:
        """Return the effective rank of Σ wᵢ xᵢ; None if the tensor is not of low rank. Its bits differ between machines."""
        if not self._factors:
            return None
        p = torch.cat([p * weight for (p, _), weight in zip(self._factors, weights, strict=True)], 1)
        return lowrank.effective_rank(p, torch.cat([q for _, q in self._factors], 1))

    def weighted_sum(self, weights: Sequence[float], start: int, stop: int) -> Tensor:
        """Return Σ wᵢ xᵢ in float64, flat, added in the order of the payloads; a sum that is 0 may have either sign."""
        if self._native is not None:
            return torch.from_numpy(self._native.weighted_sum(self._described(tuple(weights)), start, stop))
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
