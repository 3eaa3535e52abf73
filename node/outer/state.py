"""A stage's state between rounds: what everyone shares bit for bit, and what is private.

Four float32 copies of the stage's parameters, flat, in the order of `protocol.tensors.stage_tensors`:

    committed[0]  Θ         the committed parameters                 shared: same bits in every cluster
    committed[1]  momentum  of the outer optimizer                   shared
    feedback                pseudo-gradient that no commit has taken private; a ledger: the codec takes from it what it sends, what
                            no commit counts returns, and only the manifest's feedback_decay forgets
    anchor                  where the running local phase is measured from; private

The state blob is the bytes of `committed`, its digest the state hash. The apply uses separate IEEE operations in a fixed order (no
`alpha=`, no fused or compiled kernels) on exact decoded values, so the bits do not depend on machine, device or thread count.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.node.outer import codec
from dilocox.protocol import payload as wire
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.tensors import TensorSpec, stage_tensors

__all__ = ["EncodedStage", "StageState", "rebase", "start_phase"]

SMALLEST_NORMAL = 2.0**-126
"""Results below this become 0: machines differ in whether they keep subnormal numbers."""


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

    def encode(self, rank_or_k: int | None = None) -> EncodedStage:
        """Send from the feedback what one payload holds, and leave everything else in it.

        feedback before = feedback after / feedback_decay + what the payload decodes to, up to float32 rounding. Nothing is scaled
        here: what is too large is clipped where it is applied, and what was cut off comes back (`return_to_feedback`).
        """
        compression = self.manifest.compression
        rank_or_k = compression.keep if rank_or_k is None else rank_or_k
        wanted = _norm(self.feedback)
        packed, effective_rank = self._pack(self.feedback, rank_or_k)
        self._add_decoded([packed], self.feedback, _subtract)
        error = _norm(self.feedback) / wanted if wanted else 0.0
        self.feedback.mul_(compression.feedback_decay if compression.error_feedback else 0.0)
        norms = [wire.decoded_norm([tensor]) for tensor in packed]
        return EncodedStage(wire.pack(packed, compression.entropy_coding), norms, effective_rank, error)

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

    def return_to_feedback(self, raw: memoryview, rank_or_k: int | None = None, share: float = 1.0) -> None:
        """A payload of ours that no commit counted, or of which one cut off a share: so much of it is owed again."""
        if self.manifest.compression.error_feedback and share:
            self._add_decoded([wire.parse(raw, self.layout(rank_or_k))], self.feedback, _add(share))

    def _add_decoded(self, payloads: Sequence[Sequence[wire.Tensor]], flat: Tensor, fold: "Fold") -> None:
        offset = 0
        for index, spec in enumerate(self.specs):
            target = flat[offset : offset + spec.elements]
            combine = _into(target, fold)
            codec.decode_rows([packed[index] for packed in payloads], combine, flat.device)
            offset += spec.elements

    def apply(
        self,
        payloads: Sequence[memoryview],
        tokens: Sequence[int],
        round: int = 1,
        rank_or_k: int | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        """Θ, momentum ← Outer(Θ, momentum, mean of payloads weighted by tokens and clipped by `factors`), in place.

        `payloads` in the order of their clusters' ids. Raises RemoteError before anything changed when one does not parse.
        """
        if not payloads:
            return
        layout = self.layout(rank_or_k)
        parsed = [wire.parse(raw, layout) for raw in payloads]
        total = sum(tokens)
        weights = [count / total * factor for count, factor in zip(tokens, factors or [1.0] * len(tokens), strict=True)]
        rate, decay = self.manifest.outer.learning_rate, self.manifest.momentum(round)
        offset = 0
        for index, spec in enumerate(self.specs):
            theta = self.committed[0, offset : offset + spec.elements]
            momentum = self.committed[1, offset : offset + spec.elements]
            combine = _outer_step(theta, momentum, weights, rate, decay)
            codec.decode_rows([packed[index] for packed in parsed], combine, theta.device)
            offset += spec.elements


def _norm(flat: Tensor) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in flat.split(codec.ROW_ELEMENTS)))


Fold = Callable[[Tensor, list[Tensor]], None]


def _subtract(target: Tensor, parts: list[Tensor]) -> None:
    target.sub_(parts[0].float())


def _add(share: float) -> "Fold":
    def add(target: Tensor, parts: list[Tensor]) -> None:
        target.add_(parts[0].mul_(share).float())

    return add


def _into(target: Tensor, fold: Fold) -> Callable[[int, list[Tensor]], None]:
    def combine(offset: int, parts: list[Tensor]) -> None:
        fold(target[offset : offset + parts[0].numel()], parts)

    return combine


def _flush(values: Tensor) -> Tensor:
    return values.masked_fill_(values.abs() < SMALLEST_NORMAL, 0.0)


def _outer_step(
    theta: Tensor, momentum: Tensor, weights: Sequence[float], rate: float, decay: float
) -> Callable[[int, list[Tensor]], None]:
    """Nesterov: m ← μ·m + g; Θ ← Θ − lr·(g + μ·m). Each line below is one IEEE operation per element."""

    def combine(offset: int, parts: list[Tensor]) -> None:
        mean = parts[0].mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            mean = mean.add_(part.mul_(weight))
        gradient = _flush(mean.float())
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

    return combine


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
