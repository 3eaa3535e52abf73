"""One worker's part of the pipeline: microbatches over torch.distributed, in the order that the run's schedule says; losses, and the
evaluation of the committed model."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from dilocox.node.training.mesh import Mesh
from dilocox.node.training.model import Chain
from dilocox.protocol.manifest import Manifest

__all__ = ["Pipeline"]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per token; logits (batch, length, vocabulary)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Autocast(nn.Module):
    """bf16 matrix products on CUDA, plain float32 elsewhere; gives float32."""

    def __init__(self, chain: Chain, device: torch.device) -> None:
        super().__init__()
        self.chain, self._cuda = chain, device.type == "cuda"

    def forward(self, hidden: Tensor) -> Tensor:
        if not self._cuda:
            return self.chain(hidden)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.chain(hidden).float()


LOOPED = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


class Pipeline:
    """`step` trains on this copy's share of a batch; only its first worker needs inputs, only its last targets; all pass both."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Chain], mesh: Mesh) -> None:
        """`chunks`: of the model, this worker's (node/tiling.py): number `stage_rank`, and every `length`-th after it."""
        self._mesh, self.device = mesh, mesh.device
        self._microbatches = manifest.training.microbatches // mesh.copies
        self._modules = [_Autocast(chunk, mesh.device) for chunk in chunks]
        self._count = mesh.length * len(chunks)
        """Chunks of all workers of this copy."""
        stages = [self._stage(manifest, number, module) for number, module in self._numbered()]
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], self._microbatches, loss_fn=cross_entropy)
        else:
            self._schedule = LOOPED[manifest.training.schedule](stages, self._microbatches, loss_fn=cross_entropy)

    def _numbered(self) -> Iterator[tuple[int, _Autocast]]:
        """This worker's chunks, and which of all they are."""
        return zip(range(self._mesh.stage_rank, self._count, self._mesh.length), self._modules, strict=True)

    def _stage(self, manifest: Manifest, number: int, module: nn.Module) -> PipelineStage:
        """With examples of what it takes and gives in a microbatch: without them torch's stages send each other pickled
        descriptions."""
        model, batch = manifest.model, manifest.training.batch_size // manifest.training.microbatches

        def passed(width: int) -> Tensor:
            return torch.empty(batch, model.sequence_length, width, device="meta", requires_grad=True)

        tokens = torch.empty(batch, model.sequence_length, dtype=torch.int64, device="meta")
        hidden, logits = passed(model.hidden_size), passed(model.vocabulary_size)
        taken, given = hidden if number else tokens, hidden if number < self._count - 1 else logits
        mesh = self._mesh
        return PipelineStage(module, number, self._count, mesh.device, input_args=taken, output_args=given, group=mesh.pipeline)

    @property
    def first(self) -> bool:
        return self._mesh.stage_rank == 0

    @property
    def last(self) -> bool:
        return self._mesh.stage_rank == self._mesh.length - 1

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward of this copy's share, gradients averaged over it; the mean loss in the last worker, elsewhere 0."""
        losses: list[Tensor] = []
        arguments = (inputs.to(self.device),) if self.first else ()
        target = targets.to(self.device) if self.last else None
        self._schedule.step(*arguments, target=target, losses=losses if self.last else None, return_outputs=False)
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, batch: int, width: int) -> float:
        """Mean loss over all sequences with the parameters as they are; in the last worker, elsewhere 0. All of a copy call it."""
        total = 0.0
        for start in range(0, len(inputs), batch):
            hidden = inputs[start : start + batch]
            shape = (*hidden.shape, width)
            for number, module in self._numbered():
                hidden = module(self._receive(shape) if number else hidden.to(self.device))
                if number < self._count - 1:
                    self._send(hidden)
            if self.last:
                total += float(cross_entropy(hidden, targets[start : start + batch].to(self.device))) * shape[0]
        return total / len(inputs)

    def _receive(self, shape: tuple[int, ...]) -> Tensor:
        """From the worker that has the chunk before."""
        hidden = torch.empty(shape, device=self.device, dtype=self._wire_type)
        dist.recv(hidden, group=self._mesh.pipeline, group_src=(self._mesh.stage_rank - 1) % self._mesh.length)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        passed = hidden.to(self._wire_type).contiguous()
        dist.send(passed, group=self._mesh.pipeline, group_dst=(self._mesh.stage_rank + 1) % self._mesh.length)

    @property
    def _wire_type(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32
