"""Outer optimizer: Nesterov's step on the mean pseudo-gradient, with the same bits on every machine."""

import torch
from torch import Tensor

from dilocox.protocol.run.manifest import Outer

__all__ = ["flushed", "outer_step"]

LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149


def flushed(values: Tensor) -> Tensor:
    """Return the values, with 0 for subnormal ones: machines differ in their treatment."""
    return torch.nn.functional.hardshrink(values, LARGEST_SUBNORMAL)


def outer_step(theta: Tensor, momentum: Tensor, gradient: Tensor, outer: Outer) -> None:
    """Overwrite Θ and m with Nesterov's step: m ← μ·m + g; Θ ← Θ − lr·(g + μ·m). `gradient`: float64.

    Each line below is one IEEE operation per element.
    """
    gradient = flushed(gradient.float())
    momentum.mul_(outer.momentum)
    momentum.add_(gradient)
    momentum.copy_(flushed(momentum))
    update = momentum * outer.momentum
    update.add_(gradient)
    update.mul_(outer.learning_rate)
    theta.sub_(update)
    theta.copy_(flushed(theta))
