"""Position of a worker in its cluster: copy of the pipeline, and rank in it."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dilocox.node.training.model.rendezvous import PATIENCE

__all__ = ["Mesh"]

FLYING = 2
"""Buckets that are averaged at a time: more would take as much memory as all gradients."""
BUCKET = 1 << 23
"""Elements of gradients that are averaged together: many small messages cost more than their bytes."""


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors with at most BUCKET elements together; a larger one is alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


class Mesh:
    """Copies of a pipeline that train on parts of each batch. The first one has the outer state; at the end of each phase
    the others take its parameters. Between, all take the same steps with the same gradients, on equal devices with the
    same bits. The moments of the inner optimizer belong to each copy."""

    def __init__(self, rank: int = 0, workers: int = 1, copies: int = 1, device: torch.device | None = None) -> None:
        """Needs torch.distributed to be initialised with `workers` processes, `copies` · `length` of them."""
        self.rank, self.workers, self.copies = rank, workers, copies
        self.device = device or torch.device("cpu")
        self.length = workers // copies
        """Workers of a pipeline."""
        self.copy, self.stage_rank = divmod(rank, self.length)
        self.pipeline: dist.ProcessGroup | None = None
        """The workers of this copy; None: all."""
        self._replicas: dist.ProcessGroup | None = None
        """Workers with the same stages, one in each copy."""
        if copies > 1:
            ranks = torch.arange(workers).view(copies, self.length)
            self.pipeline = self._mine(ranks.tolist())
            self._replicas = self._mine(ranks.T.tolist())

    def _mine(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Every worker makes all of them, in the same order."""
        made = [dist.new_group(ranks, timeout=PATIENCE) for ranks in groups]
        return next(group for ranks, group in zip(groups, made, strict=True) if self.rank in ranks)

    @property
    def leads(self) -> bool:
        """Return whether it has the outer state of its stages."""
        return self.copy == 0

    def share(self, samples: Tensor) -> Tensor:
        """This copy's part of a batch: copies divide the microbatches."""
        return samples.chunk(self.copies)[self.copy]

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average over the copies, in place, with the same bits in each."""
        if self.copies > 1:
            flying: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.view(-1) for tensor in bucket])
                flying.append((bucket, flat, dist.all_reduce(flat, group=self._replicas, async_op=True)))
                if len(flying) == FLYING:
                    self._finish(*flying.popleft())
            for each in flying:
                self._finish(*each)

    def _finish(self, bucket: Sequence[Tensor], flat: Tensor, work: dist.Work) -> None:
        """Wait for a bucket's sum, and write its mean into the tensors."""
        work.wait()
        flat.div_(float(self.copies))
        torch._foreach_copy_([tensor.view(-1) for tensor in bucket], list(flat.split([tensor.numel() for tensor in bucket])))

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Take the first copy's values."""
        if self.copies > 1:
            for work in [dist.broadcast(tensor, group=self._replicas, group_src=0, async_op=True) for tensor in tensors]:
                work.wait()

    def share_out(self, tensors: Sequence[Tensor]) -> None:
        """Send tensor number i, at most one for each copy, from copy i to the others, which overwrite theirs."""
        if self.copies > 1:
            works = [
                dist.broadcast(tensor, group=self._replicas, group_src=copy, async_op=True)
                for copy, tensor in enumerate(tensors)
            ]
            for work in works:
                work.wait()

    def all_sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all workers, the same in each. By the processors' group, also where there are GPUs: what is agreed
        on does not wait behind their work."""
        if self.workers == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]
