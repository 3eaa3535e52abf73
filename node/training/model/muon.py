"""Muon on stacks: matrices of equal shape are orthogonalised together, in the precision that the device multiplies fastest.

The step is that of torch.optim.Muon (Keller Jordan's Muon, "original" scale): one matrix after another in bfloat16 there.
A processor without bfloat16 units takes float32. Copies of a pipeline have the same gradients, so each orthogonalises its
share of the stacks and sends it to the others.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dilocox.node.training.model.mesh import Mesh

__all__ = ["Muon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton–Schulz iteration, as published."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
STACK = 1 << 24
"""Most elements of a stack of several matrices on a GPU: 64 MiB of float32, and a few times that while it is
orthogonalised. On a processor a stack is one matrix: there is no launch to save, and batched products are slower."""


def product_type(device: torch.device) -> torch.dtype:
    """Return the type of the products: float32 on a processor that emulates bfloat16."""
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32


def orthogonalize(stack: Tensor) -> Tensor:
    """Return the (number, rows, columns) float32 matrices with singular values near 1, by Newton–Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    found = (stack.mT if tall else stack).to(product_type(stack.device))
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = torch.bmm(found, found.mT)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices."""

    def __init__(self, matrices: Sequence[nn.Parameter], rate: float, decay: float, momentum: float, mesh: Mesh) -> None:
        super().__init__(matrices, {"lr": rate, "weight_decay": decay, "momentum": momentum})
        self._mesh = mesh

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for matrix in group["params"]:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        stacks = list(self._stacks(group["params"]))
        for first in range(0, len(stacks), self._mesh.copies):
            self._step_round(group, stacks[first : first + self._mesh.copies])

    def _step_round(self, group: dict[str, Any], stacks: Sequence[Sequence[nn.Parameter]]) -> None:
        """Step stacks of which each copy orthogonalises at most one."""
        found: list[Tensor] = []
        for copy, matrices in enumerate(stacks):
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            if copy == self._mesh.copy:
                found.append(
                    orthogonalize(torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))).contiguous()
                )
            else:
                shape = len(matrices), *matrices[0].shape
                found.append(torch.empty(shape, dtype=product_type(matrices[0].device), device=matrices[0].device))
        self._mesh.share_out(found)
        for matrices, updates in zip(stacks, found, strict=True):
            rows, columns = matrices[0].shape
            values = [matrix.data for matrix in matrices]
            torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
            scale = group["lr"] * math.sqrt(max(1, rows / columns))
            torch._foreach_add_(values, list(updates.float().unbind()), alpha=-scale)

    def _stacks(self, matrices: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield matrices of one shape, so many that every copy has some, and at most STACK elements."""
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            if matrix.grad is not None:
                by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        for alike in by_shape.values():
            most = 1 if alike[0].device.type == "cpu" else STACK // alike[0].numel()
            size = max(1, min(most, -(-len(alike) // self._mesh.copies)))
            for start in range(0, len(alike), size):
                yield alike[start : start + size]
