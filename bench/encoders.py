"""Encodings of other methods, which the product does not have."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox.node.outer.codec import sparse_arrays, true_positions
from dilocox.node.outer.state import EncodedStage, StageState
from dilocox.node.outer.state_device import STRETCH
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.payload.arrays import GROUP

__all__ = ["ForgetfulState", "SparseLoCoState"]

DECAY = 0.95
"""Share of the error feedback that remains after each payload, as published."""


class ForgetfulState(StageState):
    """A stage without error feedback, as Streaming DiLoCo sends it."""

    def encode(self, rank_or_k: int | None = None, owner: bytes = wire.NOBODYS) -> EncodedStage:
        """Encode as the product does; afterwards the feedback is 0."""
        encoded = super().encode(rank_or_k, owner)
        self.feedback.zero_()
        return encoded


class SparseLoCoState(StageState):
    """A stage of SparseLoCo, whose values compete within each group of GROUP; its run's codec is topk-int2."""

    def pack(self, sent: Tensor, rank_or_k: int) -> tuple[list[wire.Tensor], float]:
        """Return the payload's tensors, and the norm of the error feedback without them."""
        layout = self.layout(rank_or_k)
        positions = true_positions(_kept(sent, [tensor.elements for tensor in layout.tensors], rank_or_k))
        arrays = sparse_arrays(layout, positions, sent.numpy().take(positions))
        packed: list[wire.Tensor] = [(tensor, (array,)) for tensor, array in zip(layout.tensors, arrays, strict=True)]
        self.add_to_feedback(packed, [-1.0] * len(packed))
        return packed, float(self.feedback.norm())

    def encode(self, rank_or_k: int | None = None, owner: bytes = wire.NOBODYS) -> EncodedStage:
        """Encode as the product does; afterwards the feedback decays."""
        encoded = super().encode(rank_or_k, owner)
        self.feedback.mul_(DECAY)
        return encoded


def _kept(feedback: Tensor, sizes: Sequence[int], k: int) -> Iterator[Tensor]:
    """Yield masks of the k largest magnitudes of every GROUP of each tensor."""
    for tensor in feedback.split(list(sizes)):
        for part in tensor.split(STRETCH):
            yield _largest_of_groups(part.abs(), k)


def _largest_of_groups(magnitude: Tensor, k: int) -> Tensor:
    """Return the mask of the k largest magnitudes of every GROUP; a shorter last group has its share. Zeros are never
    selected."""
    padded = torch.nn.functional.pad(magnitude, (0, -len(magnitude) % GROUP)).view(-1, GROUP)
    mask = torch.zeros_like(padded, dtype=torch.bool).scatter_(1, padded.topk(k, dim=1).indices, True)
    last = len(magnitude) - GROUP * (len(padded) - 1)
    mask[-1] = False
    mask[-1, padded[-1].topk(k * last // GROUP).indices] = True
    return (mask & (padded > 0)).view(-1)[: len(magnitude)]
