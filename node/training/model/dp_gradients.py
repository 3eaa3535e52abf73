"""DP-SGD gradients: each sequence's gradient is clipped, and their sum gets noise (node/data/privacy_budget.py)."""

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dilocox.node.training.model.data import Dataset

__all__ = ["Drawn", "Noise", "NoisyGradients"]


@dataclass(frozen=True)
class Noise:
    clip: float
    """Largest norm of one sequence's gradient."""
    noise: float
    """Standard deviation in each coordinate of a batch's sum, over `clip`."""


class Drawn:
    """Samples of a private corpus: each batch is drawn without replacement from all of them, independent of earlier ones.
    The choice is as secret as the text."""

    def __init__(self, dataset: Dataset, secret: bytes | None = None) -> None:
        """`secret`: new, where there is none."""
        self._dataset, self._secret = dataset, secret or secrets.token_bytes(32)
        self._batches = 0
        """So many were drawn."""

    def _chosen(self, positions: Sequence[int]) -> list[int]:
        """Return new samples for the positions of the next batch. Positions repeat in every phase without a seat, and the
        account assumes new draws."""
        seed = hashlib.sha256(self._secret + self._batches.to_bytes(8, "big") + positions[0].to_bytes(8, "big")).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))
        return list(map(int, generator.choice(self._dataset.sequences, len(positions), replace=False)))

    def here(self, positions: Sequence[int]) -> bool:
        """Return as Dataset does, for the next batch."""
        return not positions or self._dataset.here(self._chosen(positions))

    def batch(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return as Dataset does, but never the same draw twice."""
        chosen = self._chosen(positions)
        self._batches += 1
        return self._dataset.batch(chosen)


class NoisyGradients:
    """Takes each sequence's gradient from its parameters as soon as it is whole, where a microbatch is one sequence and one worker
    holds the whole model; `finish` leaves in them the mean over the batch, with its noise."""

    def __init__(self, parameters: Sequence[nn.Parameter], bounds: Noise) -> None:
        self._parameters, self._bounds = list(parameters), bounds
        self._generators: dict[torch.device, torch.Generator] = {}
        self._begin()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _begin(self) -> None:
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._taken: dict[int, int] = {}
        """Sequences so far, by parameter."""
        self._parts: dict[int, dict[int, Tensor]] = {}
        """Gradients of sequences that are not whole yet, by parameter."""
        self._sequences = 0

    def _take(self, parameter: Tensor) -> None:
        which = id(parameter)
        number = self._taken.get(which, 0)
        self._taken[which] = number + 1
        assert parameter.grad is not None
        part = self._parts.setdefault(number, {})
        part[which], parameter.grad = parameter.grad, None
        if len(part) == len(self._parameters):
            self._add([self._parts[number][id(each)] for each in self._parameters])
            del self._parts[number]

    @torch.no_grad()
    def _add(self, gradients: list[Tensor]) -> None:
        """Add a gradient; skip one that is not finite: no bound would apply."""
        square = torch.stack([norm.to("cpu", torch.float64) for norm in torch._foreach_norm(gradients)]).square().sum()
        norm = math.sqrt(float(square)) if torch.isfinite(square) else math.inf
        self._sequences += 1
        if norm < math.inf:
            torch._foreach_add_(self._sums, gradients, alpha=min(1.0, self._bounds.clip / max(norm, 1e-30)))

    @torch.no_grad()
    def finish(self) -> None:
        """The mean over the batch as the parameters' gradients."""
        assert not self._parts, "every parameter has a gradient of every sequence"
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            added = torch.randn(total.shape, generator=self._generator(total.device), device=total.device, dtype=total.dtype)
            parameter.grad = total.add_(added, alpha=self._bounds.noise * self._bounds.clip).div_(self._sequences)
        self._begin()

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(secrets.randbits(63))
        return self._generators[device]
