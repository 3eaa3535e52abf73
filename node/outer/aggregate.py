"""Aggregation of a round's payloads into one pseudo-gradient: on decoded float64 values, in the order of the mean.

    mean           Σ wᵢ fᵢ xᵢ: weights wᵢ (they add up to 1) and clip factors fᵢ. Its bound is the clip's
    centered-clip  c + Σ wᵢ min(1, τ / ‖yᵢ − c‖) (yᵢ − c) for each tensor, yᵢ = fᵢ xᵢ: c is the coordinate-wise median, τ the lower
                   median of the distances: each payload moves the result by at most wᵢ τ (Karimireddy et al. 2021, one step)

Every line is one IEEE operation per element, and sums run in one order. So the bits depend neither on machine, device
and thread count nor on the cuts of a tensor into chunks (see `SquareSum` for the one sum over a whole tensor).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dilocox.node.outer.outer_step import outer_step
from dilocox.protocol.run.manifest import Outer

__all__ = ["Payloads", "SquareSum", "Step", "stepped"]

Parts = list[Tensor]
"""Each payload's float64 values of the same stretch of a tensor, flat. They may be overwritten."""
Combine = Callable[[int, int], Tensor]
"""(start, stop) of a stretch -> its pseudo-gradient, float64."""
Step = Callable[[int, int, Tensor, Tensor], None]
"""Function that takes (start, stop) of a stretch, with its parameters and momentum, and overwrites both with their outer step."""


class Payloads(Protocol):
    """The payloads of one tensor, decoded a stretch at a time: `codec.Decoder`."""

    def stretches(self) -> Iterable[tuple[int, int]]: ...
    def parts(self, start: int, stop: int) -> Parts: ...
    def mean_step(
        self, weights: Sequence[float], start: int, stop: int, theta: Tensor, momentum: Tensor, outer: Outer
    ) -> None: ...


SORTED_VALUES = 1 << 22
"""Values sorted at a time, of all payloads together: 32 MiB, three times over."""
LANES = 1 << 12


def stepped(outer: Outer, tokens: Sequence[int], factors: Sequence[float], payloads: Payloads) -> Step:
    """Return the outer step for one tensor; `tokens` and `factors`: weight and clip factor of each payload."""
    if outer.aggregate == "mean":
        scales = _scales(tokens, factors)
        return lambda start, stop, theta, momentum: payloads.mean_step(scales, start, stop, theta, momentum, outer)
    combine = _centered(_scales(tokens, [1.0] * len(tokens)), factors, payloads)
    return lambda start, stop, theta, momentum: outer_step(theta, momentum, combine(start, stop), outer)


def _scales(tokens: Sequence[int], factors: Sequence[float]) -> list[float]:
    """Return each payload's share of the tokens, times its clip factor."""
    total = sum(tokens)
    return [count / total * factor for count, factor in zip(tokens, factors, strict=True)]


def _scaled(parts: Parts, factors: Sequence[float]) -> Parts:
    return [part.mul_(factor) for part, factor in zip(parts, factors, strict=True)]


def _median(parts: Parts, weights: Sequence[float]) -> Tensor:
    """Return the middle value of each coordinate; with an even number of payloads the weighted mean of the middle two."""
    step = max(1, SORTED_VALUES // len(parts))
    return torch.cat([_middle([part[o : o + step] for part in parts], weights) for o in range(0, parts[0].numel(), step)])


def _middle(parts: Parts, weights: Sequence[float]) -> Tensor:
    ordered = torch.sort(torch.stack(parts), dim=0, stable=True)
    weighed = torch.tensor(weights, dtype=torch.float64, device=parts[0].device)[ordered.indices]
    lower, upper = (len(parts) - 1) // 2, len(parts) // 2
    values = ordered.values.mul_(weighed)
    if lower == upper:
        return values[lower].div_(weighed[lower])
    return values[lower].add_(values[upper]).div_(weighed[lower].add_(weighed[upper]))


def _centered(shares: Sequence[float], factors: Sequence[float], payloads: Payloads) -> Combine:
    """Return the centred combination. It decodes the tensor once, to measure each payload's distance from the centre."""
    sums = [SquareSum() for _ in shares]

    def differences(start: int, stop: int) -> tuple[Tensor, Parts]:
        scaled = _scaled(payloads.parts(start, stop), factors)
        centre = _median(scaled, shares)
        return centre, [part.sub_(centre) for part in scaled]

    for start, stop in payloads.stretches():
        for total, difference in zip(sums, differences(start, stop)[1], strict=True):
            total.add(start, difference)
    distances = [math.sqrt(total.value()) for total in sums]
    radius = sorted(distances)[(len(shares) - 1) // 2]
    scales = [
        share * (radius / distance if distance > radius else 1.0) for share, distance in zip(shares, distances, strict=True)
    ]

    def combine(start: int, stop: int) -> Tensor:
        centre, apart = differences(start, stop)
        for difference, scale in zip(apart, scales, strict=True):
            centre = centre.add_(difference.mul_(scale))
        return centre

    return combine


class SquareSum:
    """Σ x² of a tensor that comes in stretches. Element j is added to lane j mod LANES, in the order of j, wherever a stretch
    begins; the lanes are summed exactly, then rounded once."""

    def __init__(self) -> None:
        self._lanes: Tensor | None = None

    def add(self, offset: int, values: Tensor) -> None:
        """`values`: float64, from flat `offset` on; stretches follow each other."""
        before = offset % LANES
        padded = torch.nn.functional.pad(values * values, (before, -(before + values.numel()) % LANES)).view(-1, LANES)
        if self._lanes is None:
            self._lanes = torch.zeros(LANES, dtype=torch.float64, device=values.device)
        for row in padded:
            self._lanes.add_(row)

    def value(self) -> float:
        return 0.0 if self._lanes is None else math.fsum(self._lanes.tolist())
