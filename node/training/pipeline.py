"""One worker's end of the pipeline: 1F1B microbatches over torch.distributed, losses, and the evaluation of the committed model."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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


class Pipeline:
    """`step` trains on this copy's share of a batch; only its first worker needs inputs, only its last targets; all pass both."""

    def __init__(self, manifest: Manifest, chain: Chain, mesh: Mesh) -> None:
        self._mesh, self.device = mesh, mesh.device
        self._microbatches = manifest.training.microbatches // mesh.copies
        self._module = _Autocast(chain, mesh.device)
        taken, given = self._microbatch(manifest)
        stage = PipelineStage(
            self._module, mesh.stage_rank, mesh.length, mesh.device, input_args=taken, output_args=given, group=mesh.pipeline
        )
        self._schedule = Schedule1F1B(stage, self._microbatches, loss_fn=cross_entropy)

    def _microbatch(self, manifest: Manifest) -> tuple[Tensor, Tensor]:
        """Examples of what this worker takes and gives; without them torch's stages send each other pickled descriptions."""
        model, batch = manifest.model, manifest.training.batch_size // manifest.training.microbatches

        def passed(width: int) -> Tensor:
            return torch.empty(batch, model.sequence_length, width, device="meta", requires_grad=True)

        tokens = torch.empty(batch, model.sequence_length, dtype=torch.int64, device="meta")
        hidden, logits = passed(model.hidden_size), passed(model.vocabulary_size)
        return tokens if self.first else hidden, logits if self.last else hidden

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
        if self.last:
            self._schedule.step(*arguments, target=targets.to(self.device), losses=losses)
        else:
            self._schedule.step(*arguments)
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else 0.0

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor, batch: int, width: int) -> float:
        """Mean loss over all sequences with the parameters as they are; in the last worker, elsewhere 0. All of a copy call it."""
        total = 0.0
        for start in range(0, len(inputs), batch):
            part = inputs[start : start + batch]
            if self.first:
                hidden = part.to(self.device)
            else:
                hidden = torch.empty(len(part), inputs.shape[1], width, device=self.device, dtype=self._wire_type)
                dist.recv(hidden, group=self._mesh.pipeline, group_src=self._mesh.stage_rank - 1)
            hidden = self._module(hidden)
            if self.last:
                total += float(cross_entropy(hidden, targets[start : start + batch].to(self.device))) * len(part)
            else:
                passed = hidden.to(self._wire_type).contiguous()
                dist.send(passed, group=self._mesh.pipeline, group_dst=self._mesh.stage_rank + 1)
        return total / len(inputs)

    @property
    def _wire_type(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32
