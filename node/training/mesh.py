"""Where a worker stands in its cluster: in which copy of the pipeline, and at which place of it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

__all__ = ["Mesh"]


class Mesh:
    """Copies of a pipeline train on shares of each batch, with the same parameters. The first one holds the outer state; the others
    follow it: what they train with between two phases is what it broadcasts."""

    def __init__(self, rank: int = 0, workers: int = 1, copies: int = 1, device: torch.device | None = None) -> None:
        """Needs torch.distributed to be initialised with `workers` processes, `copies` · `length` of them."""
        self.rank, self.workers, self.copies = rank, workers, copies
        self.device = device or torch.device("cpu")
        self.length = workers // copies
        """Workers of a pipeline."""
        self.copy, self.place = divmod(rank, self.length)
        self.pipeline: dist.ProcessGroup | None = None
        """The workers of this copy; None: all."""
        self._peers: dist.ProcessGroup | None = None
        """Who is at this place in each copy."""
        if copies > 1:
            mesh = init_device_mesh(self.device.type, (copies, self.length), mesh_dim_names=("copy", "place"))
            self.pipeline, self._peers = mesh.get_group("place"), mesh.get_group("copy")

    @property
    def leads(self) -> bool:
        """Whether it holds the outer state of its stages."""
        return self.copy == 0

    def share(self, samples: Tensor) -> Tensor:
        """This copy's part of a batch."""
        return samples.chunk(self.copies)[self.copy]

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Over the copies, in place; the same bits in each."""
        if self.copies > 1:
            held = list(tensors)
            for work in [dist.all_reduce(tensor, group=self._peers, async_op=True) for tensor in held]:
                work.wait()
            torch._foreach_div_(held, float(self.copies))

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Take what the first copy holds."""
        if self.copies > 1:
            for work in [dist.broadcast(tensor, group=self._peers, group_src=0, async_op=True) for tensor in tensors]:
                work.wait()

    def all_sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over all workers, the same in each."""
        if self.workers == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]
