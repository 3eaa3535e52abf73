"""The inner optimizer: AdamW, or Muon for hidden matrices with AdamW for the rest; warm-up, then cosine."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.model import Stage
from dilocox.node.training.model.muon import Muon
from dilocox.protocol.run.manifest import Manifest, Training
from dilocox.protocol.run.tensors import TensorSpec

__all__ = ["InnerOptimizer", "by_muon", "learning_rate_factor"]


BETAS = (0.9, 0.95)
"""AdamW's decay of the mean and of the mean square: usual for language models, and what every comparison was made with."""
FINAL_SHARE = 0.1
"""Share of the peak learning rate at which the cosine ends: usual for language models."""


def learning_rate_factor(training: Training, step: int) -> float:
    """Share of the peak at inner step `step` (0-based, counted over the whole run)."""
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    span = max(1, training.total_steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / span)
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def by_muon(training: Training, spec: TensorSpec) -> bool:
    return training.optimizer == "muon" and spec.hidden


class InnerOptimizer:
    """Inner optimizer of either kind. `steps` counts inner steps over the life of this cluster's optimizer."""

    def __init__(self, manifest: Manifest, stages: Sequence[Stage], mesh: Mesh | None = None) -> None:
        """Create the optimizer of these stages. `mesh`: copies that share Muon's work; default: alone."""
        training = self._training = manifest.training
        self.steps = 0
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        hidden: list[nn.Parameter] = []
        for stage in stages:
            for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
                if by_muon(training, spec):
                    hidden.append(parameter)
                else:
                    (matrices if len(spec.shape) == 2 else vectors).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        used = [group for group in groups if group["params"]]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._peaks: list[float] = []
        if used:
            self._optimizers.append(torch.optim.AdamW(used, lr=training.learning_rate, betas=BETAS, fused=True))
            self._peaks.append(training.learning_rate)
        if hidden:
            rate = training.muon_learning_rate
            self._optimizers.append(Muon(hidden, rate, training.weight_decay, training.muon_momentum, mesh or Mesh()))
            self._peaks.append(rate)

    def step(self) -> None:
        factor = learning_rate_factor(self._training, self.steps)
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        self.steps += 1

    def tensors(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's tensors for one parameter, by their names in torch; empty before the first step."""
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        return {}

    def kinds(self, parameter: nn.Parameter) -> dict[str, bool]:
        """Return the names of a parameter's tensors in the optimizer after its first step, and whether each is a scalar."""
        muon = any(
            parameter is other
            for optimizer in self._optimizers
            if isinstance(optimizer, Muon)
            for group in optimizer.param_groups
            for other in group["params"]
        )
        return {"momentum_buffer": False} if muon else {"step": True, "exp_avg": False, "exp_avg_sq": False}

    def restore(self, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        for optimizer in self._optimizers:
            if any(parameter is other for group in optimizer.param_groups for other in group["params"]):
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in tensors.items()}
