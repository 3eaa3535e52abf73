"""One worker's share of a cluster: its stages' parameters, inner optimizer and outer states. No network, no clock, no decisions.

The phase machine (protocol/member/phase.py) decides when to call what; the worker and the lab carry it out on this same class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.node.outer.frozen import frozen_views
from dilocox.node.outer.state import EncodedStage, StageState, rebase, start_phase
from dilocox.node.outer.state_device import HOST, StateDevice
from dilocox.node.training.model.data import Dataset
from dilocox.node.training.model.dp_gradients import Noise, NoisyGradients
from dilocox.node.training.model.inner import InnerOptimizer
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.model import Stage, build_chain, initial_values
from dilocox.node.training.model.pipeline import Pipeline, trained_tokens
from dilocox.node.workers.placement import chunks
from dilocox.protocol import norms
from dilocox.protocol.errors import LocalError
from dilocox.protocol.payload.payload import owner_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_weights
from dilocox.transport.store.blobs import BlobStore

__all__ = ["Commit", "StepResult", "Take", "Trainer", "initial_state"]


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean nats per token of the batch that is trained on, the same number in every worker."""
    tokens: int
    """So many are."""
    gradient_norm: float
    """Norm over all stages of the cluster, before clipping."""
    flags: list[float]
    """Sums over the workers of the flags each passed in: what all of them may act on at this very step."""


def initial_state(manifest: Manifest, stage: int) -> StageState:
    """Θ from the run's seed, momentum 0."""
    state = StageState(manifest, stage)
    for spec, view in state.views(state.parameters):
        for offset, values in initial_values(spec, manifest.model.seed):
            view.view(-1)[offset : offset + len(values)] = values
    return state


@dataclass(frozen=True)
class Take:
    """Counted payload of one cluster."""

    cluster: str
    weight: int
    """Weight in the mean."""
    payloads: Sequence[bytes]
    """Digests, by stage of the run."""
    clip: int = 0
    """Norm codes above the bound in total."""
    clips: Sequence[bytes] = ()
    """Norm codes above each tensor's bounds, by stage, including the payload's clip; empty: only `clip` is known."""

    def factors(self, stage: int, tensors: int) -> list[float]:
        """Return the clip factor of each tensor of a stage."""
        return [norms.clip_factor(excess) for excess in (self.clips[stage] if self.clips else [self.clip] * tensors)]


@dataclass(frozen=True)
class Commit:
    """Commit, as an apply reads it."""

    round: int
    rank_or_k: int
    """Rank or k of the round that it closes."""
    takes: Sequence[Take]
    """Counted payloads in the order of the mean."""

    def apply_to(self, state: StageState, payload: Callable[[bytes], memoryview]) -> None:
        """Θ and momentum as the commit makes them."""
        payloads = [payload(take.payloads[state.stage]) for take in self.takes]
        factors = [take.factors(state.stage, len(state.specs)) for take in self.takes]
        state.apply(payloads, [take.weight for take in self.takes], self.rank_or_k, factors)

    def leaves(self, cluster: str, stage: int, tensors: int, payload: bytes = b"") -> list[float]:
        """The share of each tensor of a cluster's payload of a stage that is not taken: all, or what the clip cuts off. `payload`:
        its digest, where the cluster may have announced another for this round in an earlier life."""
        for take in self.takes:
            if take.cluster == cluster and (not payload or not take.payloads or take.payloads[stage] == payload):
                return [1.0 - factor for factor in take.factors(stage, tensors)]
        return [1.0] * tensors


class Trainer:
    def __init__(
        self, manifest: Manifest, mesh: Mesh | None = None, noise: Noise | None = None, passage: StateDevice = HOST
    ) -> None:
        """Create a trainer. `mesh`: position among its cluster's workers; default: alone. `noise`: noise and clip, if one
        worker trains the whole model. `passage`: device of the outer state. Live parameters start uninitialised."""
        self.manifest, self.mesh = manifest, mesh or Mesh()
        self.device = self.mesh.device
        mine = chunks(manifest.model.stages, self.mesh.length, manifest.training.schedule)[self.mesh.stage_rank]
        self.stages = [stage for chunk in mine for stage in chunk]
        self.states = [StageState(manifest, stage, passage=passage) for stage in self.stages] if self.mesh.leads else []
        recompute = manifest.training.checkpoint_activations
        half = manifest.training.in_bfloat16(cuda=self.device.type == "cuda")
        chains = [build_chain(manifest.model, chunk, self.device, recompute, half) for chunk in mine]
        self.pipeline = Pipeline(manifest, chains, self.mesh, single=noise is not None)
        self._live = [stage for chain in chains for stage in chain]
        if self.device.type == "cuda" and noise is None:
            self.compile_layers()
        self.optimizer = InnerOptimizer(manifest, self._live, self.mesh)
        self._parameters = [parameter for stage in self._live for parameter in stage.tensors()]
        self._noisy = NoisyGradients(self._parameters, noise) if noise is not None else None
        if noise is not None and self.mesh.workers > 1:
            raise LocalError("the gradient of each sequence is bounded where one worker holds the whole model: say --devices 1")

    def compile_layers(self) -> None:
        """Compile the layers, at their first pass. One graph serves all layers of a kind; what the compiler refuses runs
        as it is, with a warning."""
        torch._dynamo.config.suppress_errors = True
        for stage in self._live:
            for layer in stage.model.layers.values():
                layer.compile()

    def pairs(self) -> Iterator[tuple[StageState, Stage]]:
        """Stages whose outer state is here: none in a copy that follows."""
        yield from zip(self.states, self._live, strict=self.mesh.leads)

    def live_stages(self) -> Iterator[tuple[int, Stage]]:
        yield from zip(self.stages, self._live, strict=True)

    def live(self, stage: Stage) -> list[Tensor]:
        return [parameter.data for parameter in stage.tensors()]

    def load_frozen(self, store: BlobStore) -> None:
        """Load the weights under adapters, in a run on adapters; every copy of a stage needs them. Raises LocalError if
        they are not in `store`."""
        if self.manifest.model.lora is None:
            return
        root = self.manifest.model.imported
        digests = store.stage_digests(root)
        for number, stage in self.live_stages():
            if not digests or digests[number] not in store:
                raise LocalError(f"the weights {root.hex()} that adapters are added to are not here")
            weights = dict(stage.named_parameters())
            for spec, values in frozen_views(store.view(digests[number]), stage_weights(self.manifest.model, number)):
                weights[spec.name].data.copy_(values)

    def load_initial(self, imported: BlobStore | None = None) -> None:
        """Load the initial state. `imported`: store with the state that the manifest names; None if the run begins with
        its seed. Raises LocalError if it is missing."""
        root = self.manifest.model.imported_state
        digests = imported.stage_digests(root) if imported is not None else []
        if root and not all(imported is not None and digest in imported for digest in digests or [root]):
            raise LocalError(f"the run begins with the state {root.hex()}, which is not here")
        for state in self.states:
            if imported is not None and root:
                state.load_state(imported.view(digests[state.stage]))
            else:
                state.committed.copy_(initial_state(self.manifest, state.stage).committed)
        self.reset_to_committed()

    def reset_to_committed(self) -> None:
        """live = anchor = Θ: forget all private work but the feedback."""
        self.rebase(keep_private=False)

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        flags: Callable[[], Sequence[float]] = tuple,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """One inner step. Gradients are clipped by the norm over all stages of the cluster; with them at hand all ranks add up what
        `flags` says now, `before_update` is called, then the inner optimizer changes its tensors and the parameters."""
        tokens = trained_tokens(targets) if self._noisy is None else targets.numel()  # the number of answer tokens is private
        mean_loss = self.pipeline.step(self.mesh.share(inputs), self.mesh.share(targets), tokens)
        if self._noisy is not None:
            self._noisy.finish()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.mesh.average(gradients)
        norms = torch._foreach_norm(gradients)
        told = torch.cat([torch.stack(norms).double(), mean_loss.double().view(1)]).cpu()  # the step's one copy from the device
        sums = self.mesh.all_sum([float(told[:-1].square().sum()), float(told[-1]), *flags()])
        norm, loss = (sums[0] / self.mesh.copies) ** 0.5, sums[1] / self.mesh.copies
        scale = self.manifest.training.gradient_clip / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_(gradients, scale)
        before_update()
        self.optimizer.step()
        return StepResult(loss, tokens, norm, sums[2:])

    def end_phase(self, round: int, restart: bool) -> None:
        """Add the phase's work to the error feedback. The next phase starts from a share of it, or (`restart`) from Θ.

        Θ must not be changed meanwhile.
        """
        for state, stage in self.pairs():
            start_phase(state, self.live(stage), self.manifest.rounds.lead_weight)
        if restart:
            self.rebase(keep_private=False)
        else:
            self._follow()
        if self.manifest.rounds.round_seconds is not None:  # slow and fast boxes follow one learning rate schedule
            self.optimizer.steps = self.manifest.nominal_steps(round + 1)

    def encode(self, cluster: str, round: int, rank_or_k: int) -> list[EncodedStage]:
        """A cluster's payload of each stage for a round, from the feedback. May run beside `step`."""
        run = self.manifest.run_id
        return [state.encode(rank_or_k, owner_of(run, cluster, round, state.stage)) for state in self.states]

    def prepare(
        self, commit: Commit, payload: Callable[[bytes], memoryview], cluster: str, announced: Mapping[int, bytes]
    ) -> None:
        """Apply a commit to Θ, momentum and error feedback; live parameters are not touched. May run beside `step`.

        `announced`: digests of our payloads, by stage, if it counts them; fractions that it does not apply return to
        the error feedback.
        """
        for state in self.states:
            if state.stage in announced:
                left = commit.leaves(cluster, state.stage, len(state.specs), announced[state.stage])
                state.return_to_feedback(payload(announced[state.stage]), commit.rank_or_k, left)
            commit.apply_to(state, payload)

    def rebase(self, keep_private: bool = True) -> None:
        for state, stage in self.pairs():
            rebase(state, self.live(stage), keep_private)
        self._follow()

    def _follow(self) -> None:
        """Every copy trains on with the first one's parameters."""
        self.mesh.follow(parameter.data for parameter in self._parameters)

    def copy_inner(self) -> dict[int, dict[str, Tensor]]:
        """The inner optimizer's tensors, on the host, by stage and as `KIND|NAME`. May run beside `step` until that updates."""
        return {number: self._inner(stage) for number, stage in self.live_stages()}

    def _inner(self, stage: Stage) -> dict[str, Tensor]:
        named = zip(stage.specs, stage.tensors(), strict=True)
        return {
            f"{kind}|{spec.name}": tensor.to("cpu", copy=True)
            for spec, parameter in named
            for kind, tensor in self.optimizer.tensors(parameter).items()
        }

    def load_inner(self, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
        """The inverse, for one stage."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("|")
            by_name.setdefault(name, {})[kind] = tensor
        for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
            if spec.name in by_name:
                self.optimizer.restore(parameter, by_name[spec.name])

    def resume_live(self) -> None:
        """The live parameters become the anchor, as they are at every boundary."""
        for state, stage in self.pairs():
            for (_, anchor), live in zip(state.views(state.anchor), self.live(stage), strict=True):
                live.copy_(anchor)
        self._follow()

    @contextmanager
    def weights(self, flat: Sequence[Tensor]) -> Iterator[None]:
        """Swap flat parameters into the model, and back, with one tensor's scratch. Nothing else may touch them meanwhile."""
        self._swap(flat)
        try:
            yield
        finally:
            self._swap(flat)

    def _swap(self, flat: Sequence[Tensor]) -> None:
        for (state, stage), parameters in zip(self.pairs(), flat, strict=True):
            for (_, other), live in zip(state.views(parameters), self.live(stage), strict=True):
                scratch = live.to(other.device, copy=True)
                live.copy_(other)
                other.copy_(scratch)

    @property
    def committed(self) -> list[Tensor]:
        """Θ, flat by state."""
        return [state.parameters for state in self.states]

    def evaluate_committed(self, dataset: Dataset) -> float:
        """`evaluate` of Θ instead of the live parameters, on what is held out."""
        with self.weights(self.committed):
            return self.evaluate(*dataset.evaluation())

    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """Loss, nats per token, the same number in every worker. All workers call it at the same step; the first copy evaluates,
        which alone holds Θ."""
        loss = 0.0
        if self.mesh.leads:
            loss = self.pipeline.evaluate(
                inputs, targets, self.manifest.training.batch_size, self.manifest.model.config.hidden_size
            )
        return self.mesh.all_sum([loss])[0]
