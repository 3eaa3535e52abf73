"""Frozen weights of a stage: its blob contains them all in float32, or all in bfloat16."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dilocox.protocol.run.tensors import TensorSpec

__all__ = ["frozen_views"]


def frozen_views(raw: memoryview, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor of a stage's blob, as it is there: copied, one at a time."""
    dtype = torch.float32 if len(raw) == 4 * sum(spec.elements for spec in specs) else torch.bfloat16
    start = 0
    for spec in specs:
        end = start + spec.elements * dtype.itemsize
        yield spec, torch.frombuffer(bytearray(raw[start:end]), dtype=dtype).view(spec.shape)
        start = end
