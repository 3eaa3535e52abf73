"""The codecs: a stage's pseudo-gradient to payload arrays and back, as the manifest chooses (layouts: protocol/payload.py).

    lowrank-int4   a matrix as two Int4 factors (node/outer/lowrank.py), what low rank does not shrink as Int4
    int4           Int4 codes with power-of-two block scales
    int2           two magnitudes with a sign, bin means per group of 4,096 values
    topk-int2      the largest values, as int2; the others are 0. They compete per group, or over the whole stage: then each byte
                   goes where the energy is, whatever the tensor
    fp16, fp32     uncompressed

Encoding may differ between machines; decoding is bit-exact on all of them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dilocox.node.outer import lowrank
from dilocox.protocol.arrays import (
    BLOCK,
    GROUP,
    LARGEST,
    MAX_BASE,
    MAX_CODE,
    MIN_BASE,
    OFFSETS,
    Array,
    BlockInt4,
    Floats,
    Levels,
    Sparse,
    groups,
)
from dilocox.protocol.errors import LocalError
from dilocox.protocol.manifest import Compression
from dilocox.protocol.payload import Form, Layout, StageLayout
from dilocox.protocol.payload import Tensor as PackedTensor

__all__ = ["Encoded", "StageEncoder", "decode_rows", "quantize"]

ROW_ELEMENTS = 1 << 22
"""Elements taken at a time: 32 MiB of float64, far below one tensor of a large model. A multiple of GROUP."""
LLOYD_STEPS = 3
"""Rounds of Lloyd's algorithm (least squares, 1-D k-means) that place the two magnitudes of a group."""
SAMPLE = 1 << 16
"""Values from which a stage-wide threshold is estimated."""


@dataclass(frozen=True)
class Encoded:
    packed: PackedTensor
    warm: Tensor | None
    """(columns, rank) float32: where the next power iteration starts; None for other forms."""
    effective_rank: float
    """exp(entropy of the squared singular values' shares); 0 for other forms."""


class StageEncoder:
    """Encodes the tensors of one stage in their order; sparse ones together, because they compete and are many."""

    def __init__(self, feedback: Tensor, layout: StageLayout, compression: Compression, keep: int) -> None:
        """`feedback`: the stage, flat. Raises LocalError when it is not finite."""
        if not all(bool(torch.isfinite(part).all()) for part in feedback.split(ROW_ELEMENTS)):
            raise LocalError("a pseudo-gradient is not finite: training diverged on this node. Lower training.learning_rate.")
        self._compression = compression
        self._sparse = iter(_encode_sparse(feedback, layout, keep if compression.scope == "chunk" else 0))

    def encode(self, matrix: Tensor, layout: Layout, warm: Tensor | None) -> Encoded:
        """Compress `matrix`: any shape with layout.elements elements, float32."""
        flat = matrix.reshape(-1)
        array: Array
        match layout.form:
            case Form.LOWRANK:
                factors = lowrank.factorize(
                    matrix.reshape(layout.rows, layout.columns), layout.rank, warm, self._compression.power_iterations
                )
                arrays = quantize(factors.p), quantize(factors.q)
                return Encoded((layout, arrays), factors.warm, factors.effective_rank)
            case Form.INT4:
                array = quantize(flat[None])
            case Form.INT2:
                array = _encode_levels(flat)
            case Form.SPARSE:
                array = next(self._sparse)
            case Form.FP16:
                array = Floats(flat.clamp(-65504, 65504).half().cpu().numpy())
            case Form.FP32:
                array = Floats(flat.clamp(-LARGEST, LARGEST).cpu().numpy().copy())
        return Encoded((layout, (array,)), None, 0.0)


def _encode_sparse(feedback: Tensor, layout: StageLayout, chunk_k: int) -> list[Sparse]:
    """The stage's tensors, in one pass over all of them: a stage has many small ones."""
    if not layout.kept:
        return []
    sizes = [tensor.elements for tensor in layout.tensors]
    threshold = math.inf if chunk_k else stage_threshold(feedback, layout.kept)
    found, before = [], 0
    for tensor in feedback.split(sizes):
        for part in tensor.split(ROW_ELEMENTS):
            magnitude = part.abs()
            kept = _largest_of_chunks(magnitude, chunk_k) if chunk_k else magnitude > threshold
            found.append(kept.nonzero().view(-1) + before)
            before += len(part)
    positions = torch.cat(found)
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=feedback.device)
    values = feedback[positions]
    cuts = torch.searchsorted(positions, starts).tolist()
    first_group = [0, *itertools.accumulate(groups(size) for size in sizes)]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(cuts).diff()).to(feedback.device)
    positions -= starts[owner]
    group = positions // GROUP + torch.tensor(first_group, device=feedback.device)[owner]
    magnitudes, levels = _place_levels(values.abs(), group, first_group[-1])
    parts = [tensor.cpu().numpy() for tensor in (positions, values < 0, levels)]
    return [
        Sparse(
            size,
            magnitudes[first_group[index] : first_group[index + 1]].cpu().numpy(),
            *(part[cuts[index] : cuts[index + 1]] for part in parts),
        )
        for index, size in enumerate(sizes)
    ]


def _largest_of_chunks(magnitude: Tensor, k: int) -> Tensor:
    """Mask of the k largest magnitudes of every GROUP; a shorter last group keeps its share. Zeros are never kept."""
    padded = torch.nn.functional.pad(magnitude, (0, -len(magnitude) % GROUP)).view(-1, GROUP)
    mask = torch.zeros_like(padded, dtype=torch.bool).scatter_(1, padded.topk(k, dim=1).indices, True)
    last = len(magnitude) - GROUP * (len(padded) - 1)
    mask[-1] = False
    mask[-1, padded[-1].topk(k * last // GROUP).indices] = True
    return (mask & (padded > 0)).view(-1)[: len(magnitude)]


def stage_threshold(values: Tensor, kept: int) -> float:
    """The magnitude that at most `kept` of these values exceed: estimated from a sample, then made sure of."""
    stride = max(1, values.numel() // SAMPLE)
    sample = values[::stride].abs()
    wanted = min(sample.numel() - 1, kept // stride)
    threshold = float(sample.kthvalue(sample.numel() - wanted).values)
    while sum(int((part.abs() > threshold).sum()) for part in values.split(ROW_ELEMENTS)) > kept:
        threshold = threshold * 1.01 + 1e-30
    return threshold


def _place_levels(values: Tensor, group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Two magnitudes for each group, at the means of the (positive) values they stand for, and which value takes the second.

    `group`: the group of each value. Returns (groups, 2) float32 that are bfloat16s, and (len(values),) bool.
    """
    count = torch.bincount(group, minlength=groups)
    total = torch.bincount(group, values, minlength=groups)
    low = high = total / count.clamp_min(1)
    boundary = 1.3 * low
    for _ in range(LLOYD_STEPS):
        above = values > boundary[group]
        number = torch.bincount(group[above], minlength=groups)
        above_total = torch.bincount(group[above], values[above], minlength=groups)
        high = torch.where(number > 0, above_total / number.clamp_min(1), boundary)
        low = torch.where(number < count, (total - above_total) / (count - number).clamp_min(1), boundary)
        boundary = (low + high) / 2
    magnitudes = torch.stack([low, high], 1).bfloat16().float().clamp(max=LARGEST)
    magnitudes[magnitudes < 2.0**MIN_BASE] = 0
    return magnitudes, values > boundary[group]


def _encode_levels(flat: Tensor) -> Levels:
    group = torch.arange(flat.numel(), device=flat.device) // GROUP
    magnitudes, levels = _place_levels(flat.abs(), group, groups(flat.numel()))
    return Levels(magnitudes.cpu().numpy(), (flat < 0).cpu().numpy(), levels.cpu().numpy())


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


def decode_rows(packed: Sequence[PackedTensor], combine: Callable[[int, list[Tensor]], None], device: torch.device) -> None:
    """Decode several payloads of one tensor side by side, ROW_ELEMENTS at a time: many payloads of a large tensor fit in memory.

    `combine(offset, parts)` gets, for the elements from flat `offset` on, each payload's float64 values, flat. Every value is
    exact, so neither the split, the thread count nor the device changes a bit.
    """
    layout = packed[0][0]
    if layout.form != Form.LOWRANK:
        for start in range(0, layout.elements, ROW_ELEMENTS):
            stop = min(layout.elements, start + ROW_ELEMENTS)
            combine(start, [torch.from_numpy(arrays[0].part(start, stop)).to(device) for _, arrays in packed])
        return
    factors = [[dequantize(array, device) for array in arrays if isinstance(array, BlockInt4)] for _, arrays in packed]
    step = max(1, ROW_ELEMENTS // layout.columns)
    for row in range(0, layout.rows, step):
        parts = [(p[row : row + step] @ q.T).view(-1) for p, q in factors]
        combine(row * layout.columns, parts)
