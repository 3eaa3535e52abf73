"""Low rank: a matrix as two thin factors, by warm-started power iteration (PowerSGD, arXiv 1905.13727).

Two exact steps prepare the factors for an Int4 grid without changing their product. Singular values are split evenly
between both, and one orthogonal matrix rotates the columns of each scale block, which makes their sizes even.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dilocox.protocol.payload.arrays import BLOCK

__all__ = ["Factors", "effective_rank", "factorize"]

POWER_ITERATIONS = 2
"""Passes over a matrix for each payload: the factors of the round before are where the first one starts."""


@dataclass(frozen=True)
class Factors:
    p: Tensor
    """(rows, rank)."""
    q: Tensor
    """(columns, rank): the matrix is about p qᵀ."""
    warm: Tensor
    """(columns, rank): where the next power iteration starts."""


def factorize(x: Tensor, rank: int, warm: Tensor | None) -> Factors:
    """The rank-`rank` approximation of x, (rows, columns) float32."""
    q = _start(x, rank) if warm is None else _resized(warm.to(x.device), x, rank)
    for _ in range(POWER_ITERATIONS):
        p = torch.linalg.qr(x @ q).Q
        q = x.T @ p
    squares, turn = torch.linalg.eigh(q.T @ q)
    squares, turn = squares.flip(0).clamp_min(0), turn.flip(1)  # the largest first: columns of a block are alike
    p, q = p @ turn, q @ turn
    even = squares.pow(0.25)
    inverse = torch.where(even > 0, 1 / even, torch.zeros_like(even))
    rotation = _block_rotation(rank).to(x.device)
    return Factors(p * even @ rotation, q * inverse @ rotation, q)


def _resized(warm: Tensor, x: Tensor, rank: int) -> Tensor:
    """Return the warm start for another rank: the strongest columns, or additional random ones."""
    missing = rank - warm.shape[1]
    if missing <= 0:
        return warm[:, :rank]
    fresh = _start(x, missing)
    return torch.cat([warm, fresh * (warm.norm() / fresh.norm())], 1)


def _start(x: Tensor, rank: int) -> Tensor:
    """A cold start: (columns, rank) random values, the same on every run so that tests and restarts agree."""
    rows, columns = x.shape
    generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
    return torch.randn(columns, rank, generator=generator).to(x.device)


def effective_rank(p: Tensor, q: Tensor) -> float:
    """Return the effective rank of p qᵀ, (rows, r) and (columns, r): exp(entropy of the squared singular values'
    fractions); 0 if all are 0."""
    core = torch.linalg.qr(p, mode="r").R @ torch.linalg.qr(q, mode="r").R.T
    squares = torch.linalg.svdvals(core).square()
    total = float(squares.sum())
    if total <= 0:
        return 0.0
    share = squares / total
    return math.exp(float(-(share * share.clamp_min(1e-30).log()).sum()))


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
