"""Many models of one shape that train in step on one device: a step of all of them is one batch, and on a GPU one graph.

Small models leave a GPU idle. A step's time there is the launch of its kernels, for one model as long as for fifty. So
the runs of an arm, with all their clusters, are stacked. Each run continues in its thread until it needs its
parameters. When all wait, the crowd takes the requested steps: the first of each, then the second, and so on.

The arithmetic is that of node/training in float32 (transformers' layers, torch's AdamW and Muon), in another order of
additions. A test compares the two, tensor by tensor and by the losses of whole runs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilocox.node.training.model.data import UNTRAINED
from dilocox.node.training.model.inner import BETAS, by_muon, learning_rate_factor
from dilocox.node.training.model.model import build_chain
from dilocox.node.training.model.pipeline import cross_entropy
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.run.manifest import Manifest, Training
from dilocox.protocol.run.tensors import TensorSpec

__all__ = ["Crowd", "Group", "Rates"]

ADAM_EPS = 1e-8
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, MUON_EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""torch.optim.Muon's."""
WARM_UPS = 2
"""Steps that change nothing, before a graph is made of one."""


@dataclass
class Asked:
    """Requested steps of one model."""

    training: Training
    steps: int = 0
    """Steps taken so far."""
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Batches to train on: (inputs, targets)."""


class Rates:
    """Rates of a step for each model, in a tensor of the device."""

    NOTHING = (0.0, 0.0, 0.0, 1.0, 1.0)
    """Rates of a model that takes no step."""

    def __init__(self, values: Tensor) -> None:
        """Store the rates: (5, models)."""
        self.values = values
        self.active, self.adamw, self.muon, self.bias, self.square_bias = values

    @staticmethod
    def of(training: Training, step: int) -> list[float]:
        """Return the rates of the step after `step` steps."""
        factor, taken = learning_rate_factor(training, step), step + 1
        rates = [training.learning_rate * factor, training.muon_learning_rate * factor]
        return [1.0, *rates, 1 - BETAS[0] ** taken, math.sqrt(1 - BETAS[1] ** taken)]


class Group:
    """Tensors of one shape that one optimizer changes: (tensors, models, *shape)."""

    def __init__(self, spec: TensorSpec, names: Sequence[str], models: int, training: Training, device: torch.device) -> None:
        """Allocate the optimizer's state. `spec`: of any of the tensors."""
        self.names, self.shape, self._training = names, spec.shape, training
        self._muon = by_muon(training, spec)
        self._decay = training.weight_decay if len(spec.shape) == 2 else 0.0
        self.values = torch.zeros(len(names), models, *self.shape, device=device)
        self._moments = [torch.zeros_like(self.values) for _ in range(1 if self._muon else 2)]

    def update(self, gradients: Tensor, rates: Rates) -> None:
        (self._update_muon if self._muon else self._update_adamw)(gradients, rates)

    def each(self, of_models: Tensor) -> Tensor:
        """Return a number of each model, in the shape of the values."""
        return of_models.view(1, -1, *[1] * len(self.shape))

    def _update_adamw(self, gradients: Tensor, rates: Rates) -> None:
        mean, square = self._moments
        active, rate = self.each(rates.active), self.each(rates.adamw)
        mean.lerp_(gradients, (1 - BETAS[0]) * active)
        square.lerp_(gradients.square(), (1 - BETAS[1]) * active)
        self.values.mul_(1 - rate * self._decay)
        divisor = square.sqrt() / self.each(rates.square_bias) + ADAM_EPS
        self.values.sub_(rate / self.each(rates.bias) * mean / divisor)

    def _update_muon(self, gradients: Tensor, rates: Rates) -> None:
        (mean,), momentum = self._moments, self._training.muon_momentum
        rate = self.each(rates.muon)
        mean.lerp_(gradients, (1 - momentum) * self.each(rates.active))
        update = orthogonal(gradients.lerp(mean, momentum).flatten(0, 1)).view_as(self.values)
        self.values.mul_(1 - rate * self._decay)
        rows, columns = self.shape
        self.values.sub_(rate * math.sqrt(max(1, rows / columns)) * update)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return Newton and Schulz's iteration on each of (count, rows, columns), in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=MUON_EPS)[:, None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _alike(run: Manifest) -> dict[str, object]:
    """Return the settings that all models of a crowd share."""
    of_model = run.model.model_dump(exclude={"seed"})
    rates = {"learning_rate", "muon_learning_rate", "total_steps", "warmup_steps"}
    return {"model": of_model, "training": run.training.model_dump(exclude=rates), "timed": run.rounds.round_seconds}


class Crowd:
    """Stack of `models` models of a run's shape, requested by `runs` runs together; each run's training may have different
    rates and lengths."""

    def __init__(self, run: Manifest, models: int, runs: int, sequences: int, device: torch.device) -> None:
        """Allocate the stack. `sequences`: in a model's step."""
        self._run, self._device = run, device
        self.asked: list[Asked] = []
        self._number: dict[int, int] = {}
        """Index of a trainer."""
        self._chain = build_chain(run.model, list(range(run.model.stages)), device)
        specs = [(f"stages.{number}.{spec.name}", spec) for number, stage in enumerate(self._chain) for spec in stage.specs]
        by_kind: dict[tuple[tuple[int, ...], bool], list[tuple[str, TensorSpec]]] = {}
        for name, spec in specs:
            by_kind.setdefault((spec.shape, by_muon(run.training, spec)), []).append((name, spec))
        self._groups = [
            Group(kind[0][1], [name for name, _ in kind], models, run.training, device) for kind in by_kind.values()
        ]
        values = {name: each for group in self._groups for name, each in zip(group.names, group.values, strict=True)}
        self._values = {name: values[name] for name, _ in specs}
        """Parameters by name: (models, *shape), in the order of the stages' tensors."""
        shape = (models, sequences, run.model.sequence_length)
        self._inputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._targets = torch.zeros_like(self._inputs)
        self._rates = Rates(torch.tensor([Rates.NOTHING] * models, device=device).T.contiguous())
        self._gradients = vmap(grad_and_value(self._loss))
        self._changed = Condition()
        self._running, self._waiting, self._turn = runs, 0, 0
        self._failed: Exception | None = None
        self._step: Callable[[], object] = self._take_step
        if device.type == "cuda":
            self._step = self._graph()

    def join(self, trainer: Trainer) -> None:
        """Make its live parameters a slice of the stack, with their values. Raises ValueError if its training differs from
        the crowd's."""
        if _alike(trainer.manifest) != _alike(self._run):
            raise ValueError("models of a crowd differ in their seeds, rates and lengths alone")
        number = self._number[id(trainer)] = len(self.asked)
        self.asked.append(Asked(trainer.manifest.training))
        parameters = [parameter for _, stage in trainer.pairs() for parameter in stage.tensors()]
        for stacked, parameter in zip(self._values.values(), parameters, strict=True):
            stacked[number].copy_(parameter.data)
            parameter.data = stacked[number]

    def ask(self, trainer: Trainer, inputs: Tensor, targets: Tensor) -> None:
        self.asked[self._number[id(trainer)]].batches.append((inputs, targets))

    def finish(self, trainers: Sequence[Trainer]) -> None:
        """Wait in a run until the requests of these trainers, its own, are done: as soon as all runs wait."""
        if not any(self.asked[self._number[id(trainer)]].batches for trainer in trainers):
            return
        self._waiting += 1
        turn = self._turn
        self._go_on()
        self._changed.wait_for(lambda: self._turn > turn)
        if self._failed is not None:
            raise RuntimeError("a step of all runs failed") from self._failed

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run one thread's run at a time, while the other runs wait."""
        with self._changed:
            try:
                yield
            finally:
                self._running -= 1
                self._go_on()

    def _go_on(self) -> None:
        """Do the work of all, if this is the last run that the others wait for."""
        if self._waiting and self._waiting == self._running:
            try:
                self.take_steps()
            except Exception as error:
                self._failed = error
            self._waiting, self._turn = 0, self._turn + 1
            self._changed.notify_all()

    def take_steps(self) -> None:
        """Take all requested steps, of all models together."""
        count = max(len(asked.batches) for asked in self.asked)
        inputs = torch.zeros(count, *self._inputs.shape, dtype=torch.int64)
        targets, rates = torch.zeros_like(inputs), torch.tensor(Rates.NOTHING).repeat(count, len(self._inputs), 1)
        for number, asked in enumerate(self.asked):
            for index, batch in enumerate(asked.batches):
                inputs[index, number], targets[index, number] = batch
                rates[index, number] = torch.tensor(Rates.of(asked.training, asked.steps + index))
            asked.steps += len(asked.batches)
            asked.batches.clear()
        staged = [each.to(self._device) for each in (inputs, targets, rates.mT.contiguous())]
        for index in range(count):
            for buffer, values in zip((self._inputs, self._targets, self._rates.values), staged, strict=True):
                buffer.copy_(values[index])
            self._step()

    def _loss(self, values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one model, in nats per trained token."""
        logits = functional_call(self._chain, values, (inputs,))
        return cross_entropy(logits, targets) / (targets != UNTRAINED).sum()

    def _take_step(self) -> None:
        with sdpa_kernel(SDPBackend.MATH):  # the one that every device has for a stack of models
            gradients, _ = self._gradients(self._values, self._inputs, self._targets)
        squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
        norms = torch.stack(squares).sum(0).sqrt()
        scales = (self._run.training.gradient_clip / (norms + 1e-6)).clamp(max=1.0)
        for group in self._groups:
            stacked = torch.stack([gradients[name] for name in group.names])
            group.update(stacked.mul_(group.each(scales)), self._rates)

    def _graph(self) -> Callable[[], object]:
        """Record a step as a graph; every model's rates are 0 during the recording."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._take_step()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._take_step()
        return graph.replay
