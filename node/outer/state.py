"""A stage's state between rounds: what everyone shares bit for bit, and what is private.

Four float32 copies of the stage's parameters, flat, in the order of `protocol.tensors.stage_tensors`:

    committed[0]  Θ         the committed parameters                 shared: same bits in every cluster
    committed[1]  momentum  of the outer optimizer                   shared
    feedback                pseudo-gradient that no commit has taken private; a ledger: the codec takes from it what it sends, what
                            no commit counts returns, and only the manifest's feedback_decay forgets
    anchor                  where the running local phase is measured from; private

The state blob is the bytes of `committed`, its digest the state hash. The apply (node/outer/aggregate.py, then Nesterov) uses
separate IEEE operations in a fixed order (no `alpha=`, no fused or compiled kernels) on exact decoded values, so the bits do not
depend on machine, device or thread count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dilocox.node.outer import aggregate, codec
from dilocox.protocol import payload as wire
from dilocox.protocol.leaves import largest_norm
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.tensors import TensorSpec, stage_tensors

__all__ = ["EncodedStage", "StageState", "rebase", "start_phase"]

SMALLEST_NORMAL = 2.0**-126
"""Results below this become 0: machines differ in whether they keep subnormal numbers."""
PART_OF_BOUND = 0.5
"""Of the largest norm that the run allows, in a payload that would be above it."""


@dataclass(frozen=True)
class EncodedStage:
    raw: bytes
    norms: Sequence[float]
    """Of what the payload decodes to, by tensor of the stage."""
    effective_rank: float
    """Mean over the low-rank tensors; 0 where there are none."""
    error: float
    """Norm of what the payload does not decode to, relative to what was to be sent: what the codec lost, not what waits."""

    @property
    def norm(self) -> float:
        """Of all of it."""
        return math.hypot(*self.norms)


class StageState:
    """One stage's four copies, and the codec's warm starts."""

    def __init__(self, manifest: Manifest, stage: int, specs: Sequence[TensorSpec] | None = None) -> None:
        """`specs`: only these of the stage's tensors; default all."""
        self.manifest, self.stage = manifest, stage
        self.specs = tuple(stage_tensors(manifest.model, stage) if specs is None else specs)
        self.size = sum(spec.elements for spec in self.specs)
        self.committed = torch.zeros(2, self.size)
        self.feedback = torch.zeros(self.size)
        self.anchor = torch.zeros(self.size)
        self.warm: dict[str, Tensor] = {}

    def views(self, flat: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Each tensor's slice of a flat copy, in its shape."""
        offset = 0
        for spec in self.specs:
            yield spec, flat[offset : offset + spec.elements].view(spec.shape)
            offset += spec.elements

    @property
    def parameters(self) -> Tensor:
        return self.committed[0]

    def state_bytes(self) -> memoryview:
        return self.committed.numpy().data.cast("B")

    def load_state(self, raw: memoryview) -> None:
        """`raw`: the bytes of a state blob. Copied."""
        self.state_bytes()[:] = raw

    def layout(self, rank_or_k: int | None = None) -> wire.StageLayout:
        """Of a round whose codec has this rank or k; default the manifest's."""
        compression = self.manifest.compression
        rank_or_k = compression.keep if rank_or_k is None else rank_or_k
        return wire.stage_layout([spec.shape for spec in self.specs], compression, rank_or_k)

    def encode(self, rank_or_k: int | None = None, owner: bytes = wire.NOBODYS) -> EncodedStage:
        """Send from the feedback what one payload holds, and leave everything else in it. `owner`: as the payload's header says it.

        feedback before = feedback after / feedback_decay + what the payload decodes to, up to float32 rounding. What is too large
        for the others is clipped where it is applied, and what was cut off comes back (`return_to_feedback`); what is too large for
        the run (`largest_rms`), which voters would refuse for ever, is sent in parts.
        """
        compression = self.manifest.compression
        rank_or_k = compression.keep if rank_or_k is None else rank_or_k
        wanted = _norm(self.feedback)
        packed, effective_rank = self._pack(self._within_bounds(), rank_or_k)
        self._add_decoded(packed, self.feedback, [_subtract] * len(packed))
        error = _norm(self.feedback) / wanted if wanted else 0.0
        self.feedback.mul_(compression.feedback_decay if compression.error_feedback else 0.0)
        norms = [wire.decoded_norm([tensor]) for tensor in packed]
        return EncodedStage(wire.pack(packed, compression.entropy_coding, owner), norms, effective_rank, error)

    def _within_bounds(self) -> Tensor:
        """The feedback; of a tensor that is larger than the run allows so much of it that no codec's rounding is in the way."""
        sent = self.feedback
        for spec, view in self.views(self.feedback):
            largest, norm = largest_norm(self.manifest, spec), _norm(view.reshape(-1))
            if norm > largest:  # also where it is not finite: the encoder says so
                sent = sent.clone() if sent is self.feedback else sent
                next(part for other, part in self.views(sent) if other.name == spec.name).mul_(PART_OF_BOUND * largest / norm)
        return sent

    def _pack(self, sent: Tensor, rank_or_k: int) -> tuple[list[wire.Tensor], float]:
        """`sent`, flat, as the codec writes it, and its effective rank. Moves the warm starts on."""
        layout = self.layout(rank_or_k)
        encoder = codec.StageEncoder(sent, layout, self.manifest.compression, rank_or_k)
        packed, ranks = [], []
        for (spec, view), tensor_layout in zip(self.views(sent), layout.tensors, strict=True):
            encoded = encoder.encode(view, tensor_layout, self.warm.get(spec.name))
            packed.append(encoded.packed)
            if encoded.warm is not None:
                self.warm[spec.name] = encoded.warm
                ranks.append(encoded.effective_rank)
        return packed, sum(ranks) / max(1, len(ranks))

    def return_to_feedback(self, raw: memoryview, rank_or_k: int | None = None, shares: Sequence[float] | None = None) -> None:
        """A payload of ours of which a commit did not take these shares, by tensor (default: all of it): so much is owed again."""
        shares = [1.0] * len(self.specs) if shares is None else shares
        if self.manifest.compression.error_feedback and any(shares):
            self._add_decoded(wire.parse(raw, self.layout(rank_or_k)), self.feedback, [_add(share) for share in shares])

    def _add_decoded(self, payload: Sequence[wire.Tensor], flat: Tensor, folds: Sequence["Fold"]) -> None:
        offset = 0
        for spec, packed, fold in zip(self.specs, payload, folds, strict=True):
            target = flat[offset : offset + spec.elements]
            codec.decode_rows([packed], _into(target, fold), flat.device)
            offset += spec.elements

    def apply(
        self,
        payloads: Sequence[memoryview],
        tokens: Sequence[int],
        round: int = 1,
        rank_or_k: int | None = None,
        factors: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Θ, momentum ← Outer(Θ, momentum, what the run's aggregate makes of the payloads, weighted and clipped), in place.

        `payloads` in the order of their clusters' ids; `factors`: what the clip leaves of each of them, by tensor; default all.
        Raises RemoteError before anything changed when one does not parse.
        """
        if not payloads:
            return
        layout = self.layout(rank_or_k)
        parsed = [wire.parse(raw, layout) for raw in payloads]
        factors = factors or [[1.0] * len(self.specs)] * len(payloads)
        outer, decay = self.manifest.outer, self.manifest.momentum(round)
        offset = 0
        for index, spec in enumerate(self.specs):
            theta = self.committed[0, offset : offset + spec.elements]
            momentum = self.committed[1, offset : offset + spec.elements]
            packed = [tensors[index] for tensors in parsed]
            decode = partial(codec.decode_rows, packed, device=theta.device)
            combine = aggregate.combined(outer, tokens, [by_tensor[index] for by_tensor in factors], decode)
            decode(_outer_step(theta, momentum, combine, outer.learning_rate, decay))
            offset += spec.elements


def _norm(flat: Tensor) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in flat.split(codec.ROW_ELEMENTS)))


Fold = Callable[[Tensor, list[Tensor]], None]


def _subtract(target: Tensor, parts: list[Tensor]) -> None:
    target.sub_(parts[0].float())


def _add(share: float) -> "Fold":
    def add(target: Tensor, parts: list[Tensor]) -> None:
        if share:
            target.add_(parts[0].mul_(share).float())

    return add


def _into(target: Tensor, fold: Fold) -> Callable[[int, list[Tensor]], None]:
    def combine(offset: int, parts: list[Tensor]) -> None:
        fold(target[offset : offset + parts[0].numel()], parts)

    return combine


def _flush(values: Tensor) -> Tensor:
    return values.masked_fill_(values.abs() < SMALLEST_NORMAL, 0.0)


def _outer_step(
    theta: Tensor, momentum: Tensor, combine: aggregate.Combine, rate: float, decay: float
) -> Callable[[int, list[Tensor]], None]:
    """Nesterov: m ← μ·m + g; Θ ← Θ − lr·(g + μ·m). Each line below is one IEEE operation per element."""

    def step(offset: int, parts: list[Tensor]) -> None:
        gradient = _flush(combine(offset, parts).float())
        m = momentum[offset : offset + gradient.numel()]
        m.mul_(decay)
        m.add_(gradient)
        _flush(m)
        update = m * decay
        update.add_(gradient)
        update.mul_(rate)
        target = theta[offset : offset + gradient.numel()]
        target.sub_(update)
        _flush(target)

    return step


def start_phase(state: StageState, live: Sequence[Tensor], private_share: float = 1.0) -> None:
    """A local phase ended: `feedback += anchor − live; anchor = live = Θ + private_share · (live − Θ)`. Nothing waits.

    A phase's own work is one cluster's noisy guess of the mean that its commit will bring: half of it is nearer to that mean than
    all of it (docs/results.md). The rebase takes private progress away with the anchor, so its share decides only where gradients
    are taken until the commit arrives.
    """
    copies = (state.views(flat) for flat in (state.feedback, state.anchor, state.parameters))
    for (_, feedback), (_, anchor), (_, theta), tensor in zip(*copies, live, strict=True):
        feedback.add_(anchor.sub_(tensor.to(anchor.device)))
        anchor.copy_(tensor)
        if private_share != 1:
            anchor.sub_(theta).mul_(private_share).add_(theta)
            tensor.copy_(anchor)


def rebase(state: StageState, live: Sequence[Tensor], keep_private: bool = True) -> None:
    """Move the live parameters onto the committed ones: `live = Θ + (live − anchor); anchor = copy(Θ)`.

    With live = anchor this is exactly live = Θ: a commit applied at step 0 is the synchronous algorithm. Without `keep_private`
    private progress is dropped (overlap delayed, and a phase that was not counted).
    """
    for (_, theta), (_, anchor), tensor in zip(state.views(state.parameters), state.views(state.anchor), live, strict=True):
        committed = theta.to(tensor.device)
        if keep_private:
            tensor.sub_(anchor.to(tensor.device))
            tensor.add_(committed)
        else:
            tensor.copy_(committed)
        anchor.copy_(theta)
