"""`lowrank-int4`: a matrix as two Int4 factors, a vector as Int4 codes (layout: protocol/payload.py).

Encoding is warm-started power iteration (PowerSGD, arXiv 1905.13727), made kinder to the grid in two exact ways that change the
factors but not their product: singular values are split evenly between both factors, and the columns of each scale block are turned
by one orthogonal matrix, which evens their sizes. Encoding may differ between machines; decoding is bit-exact on all of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from protocol.errors import LocalError
from protocol.payload import BLOCK, LOWRANK, MAX_BASE, MAX_CODE, MIN_BASE, OFFSETS, Array, Layout
from protocol.payload import Tensor as PackedTensor

__all__ = ["Encoded", "decode_rows", "encode", "quantize"]

ROW_ELEMENTS = 1 << 22
"""Elements decoded at a time: 32 MiB of float64, far below one tensor of a large model."""


@dataclass(frozen=True)
class Encoded:
    packed: PackedTensor
    warm: Tensor | None
    """(columns, rank) float32: where the next power iteration starts; None for int4 tensors."""
    effective_rank: float
    """exp(entropy of the squared singular values' shares); 0 for int4 tensors."""


def encode(matrix: Tensor, layout: Layout, warm: Tensor | None, power_iterations: int) -> Encoded:
    """Compress `matrix` (any shape with layout.rows · layout.columns elements, float32). Raises LocalError when not finite."""
    if not bool(torch.isfinite(matrix).all()):
        raise LocalError("a pseudo-gradient is not finite: training diverged on this node. Lower training.learning_rate.")
    if layout.form != LOWRANK:
        return Encoded((layout, (quantize(matrix.reshape(1, -1)),)), None, 0.0)
    x = matrix.reshape(layout.rows, layout.columns)
    q = _start(layout, x.device) if warm is None else warm.to(x.device)
    for _ in range(power_iterations):
        p = torch.linalg.qr(x @ q).Q
        q = x.T @ p
    squares, turn = torch.linalg.eigh(q.T @ q)
    squares, turn = squares.flip(0).clamp_min(0), turn.flip(1)  # the largest first: columns of a block are alike
    p, q = p @ turn, q @ turn
    even = squares.pow(0.25)
    inverse = torch.where(even > 0, 1 / even, torch.zeros_like(even))
    rotation = _block_rotation(layout.rank).to(x.device)
    factors = (quantize(p * even @ rotation), quantize(q * inverse @ rotation))
    return Encoded((layout, factors), q, _effective_rank(squares))


def _effective_rank(squares: Tensor) -> float:
    total = float(squares.sum())
    if total <= 0:
        return 0.0
    share = squares / total
    return math.exp(float(-(share * share.clamp_min(1e-30).log()).sum()))


def _start(layout: Layout, device: torch.device) -> Tensor:
    """A cold start: random columns, the same on every run so that tests and restarts agree."""
    generator = torch.Generator().manual_seed(layout.rows * 1_000_003 + layout.columns)
    return torch.randn(layout.columns, layout.rank, generator=generator).to(device)


@lru_cache
def _block_rotation(rank: int) -> Tensor:
    """(rank, rank) block-diagonal orthogonal matrix: Hadamard where the block is a power of two, else a DCT."""
    blocks = [_rotation(min(BLOCK, rank - start)) for start in range(0, rank, BLOCK)]
    return torch.block_diag(*blocks)


def _rotation(size: int) -> Tensor:
    if size & (size - 1) == 0:
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix / math.sqrt(size)
    index = torch.arange(size, dtype=torch.float64)
    dct = torch.cos(math.pi / size * (index[:, None] + 0.5) * index[None, :]) * math.sqrt(2 / size)
    dct[:, 0] /= math.sqrt(2)
    return dct.float()


def quantize(values: Tensor) -> Array:
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
    return Array(rows, columns, base, offsets.to(torch.uint8).cpu().numpy(), flat.to(torch.int8).cpu().numpy())


def _round(padded: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Codes at these block exponents, and each block's squared error."""
    scale = torch.exp2(exponent)[:, :, None]
    codes = (padded / scale).round_().clamp_(-MAX_CODE, MAX_CODE)
    return codes, (codes * scale).sub_(padded).square_().sum(dim=2)


def dequantize(array: Array, device: torch.device) -> Tensor:
    """(rows, columns) float64, exact."""
    codes = torch.from_numpy(np.ascontiguousarray(array.codes)).to(device)
    exponents = torch.from_numpy(array.exponents().astype(np.float64)).to(device)
    scales = torch.exp2(exponents).repeat_interleave(BLOCK, dim=1)[:, : array.columns]
    return codes.double().mul_(scales)


def decode_rows(packed: Sequence[PackedTensor], combine: Callable[[int, list[Tensor]], None], device: torch.device) -> None:
    """Decode several payloads of one tensor side by side, some rows at a time.

    `combine(offset, parts)` gets, for the elements from flat `offset` on, each payload's float64 values (rows · columns, flat).
    Every value is exact, so neither the row split, the thread count nor the device changes a bit.
    """
    layout = packed[0][0]
    factors = [[dequantize(array, device) for array in arrays] for _, arrays in packed]
    if layout.form != LOWRANK:
        combine(0, [factor[0].view(-1) for factor in factors])
        return
    step = max(1, ROW_ELEMENTS // layout.columns)
    for row in range(0, layout.rows, step):
        parts = [(p[row : row + step] @ q.T).view(-1) for p, q in factors]
        combine(row * layout.columns, parts)
