"""One worker's part of the pipeline: microbatches over torch.distributed, in the order of the run's schedule; losses, and the
evaluation of the committed model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from dilocox.node.training.model.data import UNTRAINED
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.model import Chain
from dilocox.protocol.run.manifest import Manifest

__all__ = ["Pipeline", "cross_entropy", "trained_tokens"]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats, summed over the targets that are not UNTRAINED; logits (batch, length, vocabulary)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=UNTRAINED, reduction="sum")


def trained_tokens(targets: Tensor) -> int:
    return int((targets != UNTRAINED).sum())


class _Autocast(nn.Module):
    """A chunk whose matrix products are of the run's precision, and what it takes of another and gives to another; logits are
    float32."""

    def __init__(self, chain: Chain, device: torch.device, wire_type: torch.dtype, last: bool) -> None:
        super().__init__()
        self.chain, self._device, self._wire_type, self._last = chain, device.type, wire_type, last

    def forward(self, hidden: Tensor) -> Tensor:
        if self._wire_type is torch.float32:
            return self.chain(hidden)
        with torch.autocast(self._device, dtype=self._wire_type):
            given = self.chain(hidden.float() if hidden.is_floating_point() else hidden)
        return given.float() if self._last else given.to(self._wire_type)


class Pipeline:
    """`step` trains on this copy's share of a batch; only its first worker needs inputs, only its last targets; all pass both."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Chain], mesh: Mesh, single: bool = False) -> None:
        """`chunks`: of the model, this worker's (placement.py): number `stage_rank`, and every `length`-th after it. `single`:
        each sequence is a microbatch, whose loss is the mean over its own tokens, whatever is in the others."""
        self._mesh, self.device, self._single = mesh, mesh.device, single
        training = manifest.training
        self._sequences = 1 if single else training.batch_size // training.microbatches
        """Sequences of a microbatch."""
        self._microbatches = training.batch_size // self._sequences // mesh.copies
        self._count = mesh.length * len(chunks)
        """Chunks of all workers of this copy."""
        half = manifest.training.in_bfloat16(cuda=self.device.type == "cuda")
        self._wire_type = torch.bfloat16 if half else torch.float32
        """Type of activations between chunks."""
        self._modules = [
            _Autocast(chunk, self.device, self._wire_type, number == self._count - 1)
            for number, chunk in zip(self._numbers, chunks, strict=True)
        ]
        stages: list[Any] = [self._stage(manifest, number, module) for number, module in self._numbered()]
        self._schedule: PipelineScheduleSingle | PipelineScheduleMulti
        if len(stages) == 1:
            self._schedule = Schedule1F1B(stages[0], self._microbatches, loss_fn=self._loss)
        else:
            self._schedule = ScheduleInterleaved1F1B(stages, self._microbatches, loss_fn=self._loss)
        self._each = 1.0
        """Tokens of the step's batch that are trained on, by microbatch in the mean."""

    @property
    def _numbers(self) -> range:
        """Return the numbers of this worker's chunks."""
        return range(self._mesh.stage_rank, self._count, self._mesh.length)

    def _numbered(self) -> Iterator[tuple[int, _Autocast]]:
        return zip(self._numbers, self._modules, strict=True)

    def _stage(self, manifest: Manifest, number: int, module: nn.Module) -> PipelineStage:
        """Return a stage, with examples of its input and output for a microbatch: without them torch's stages send each
        other pickled descriptions."""
        model, batch = manifest.model, self._sequences

        def passed(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(batch, model.sequence_length, width, dtype=dtype, device="meta", requires_grad=True)

        tokens = torch.empty(batch, model.sequence_length, dtype=torch.int64, device="meta")
        hidden, logits = passed(model.config.hidden_size, self._wire_type), passed(model.config.vocab_size, torch.float32)
        taken, given = hidden if number else tokens, hidden if number < self._count - 1 else logits
        mesh = self._mesh
        return PipelineStage(module, number, self._count, mesh.device, input_args=taken, output_args=given, group=mesh.pipeline)

    @property
    def first(self) -> bool:
        return self._mesh.stage_rank == 0

    @property
    def last(self) -> bool:
        return self._mesh.stage_rank == self._mesh.length - 1

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a microbatch, such that the mean over all is the mean over the batch's tokens."""
        return cross_entropy(logits, targets) / (max(1, trained_tokens(targets)) if self._single else self._each)

    def step(self, inputs: Tensor, targets: Tensor, tokens: int) -> Tensor:
        """Run forward and backward of this copy's share; gradients are averaged over its microbatches. Return the mean loss of
        these in the last worker, elsewhere 0, on the device. `tokens`: of the whole batch, of all copies, that are trained
        on."""
        self._each = tokens / (self._microbatches * self._mesh.copies)
        losses: list[Tensor] = []
        arguments = (inputs.to(self.device),) if self.first else ()
        target = targets.to(self.device) if self.last else None
        with torch.autocast(self.device.type, enabled=False):  # chunks nest theirs in it: weights are cast once a step
            self._schedule.step(*arguments, target=target, losses=losses if self.last else None, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros((), device=self.device)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, batch: int, width: int) -> float:
        """Mean loss over all tokens that are trained on, with the parameters as they are; in the last worker, elsewhere 0. All of
        a copy call it."""
        total = 0.0
        for start in range(0, len(inputs), batch):
            hidden = inputs[start : start + batch]
            shape = (*hidden.shape, width)
            for number, module in self._numbered():
                hidden = module(self._receive(shape) if number else hidden.to(self.device))
                if number < self._count - 1:
                    self._send(hidden)
            if self.last:
                total += float(cross_entropy(hidden, targets[start : start + batch].to(self.device)))
        return total / trained_tokens(targets)

    def _receive(self, shape: tuple[int, ...]) -> Tensor:
        """Receive from the worker with the chunk before."""
        hidden = torch.empty(shape, device=self.device, dtype=self._wire_type)
        dist.recv(hidden, group=self._mesh.pipeline, group_src=(self._mesh.stage_rank - 1) % self._mesh.length)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        passed = hidden.to(self._wire_type).contiguous()
        dist.send(passed, group=self._mesh.pipeline, group_dst=(self._mesh.stage_rank + 1) % self._mesh.length)
