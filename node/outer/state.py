"""State of a stage between rounds: the shared part, equal bit for bit in all clusters, and the private part.

Four float32 copies of the stage's parameters, flat, in the order of `protocol.tensors.stage_tensors`:

    committed[0]  Θ         the committed parameters                 shared: same bits in every cluster
    committed[1]  momentum  of the outer optimizer                   shared
    feedback                pseudo-gradient that no commit has taken private; a ledger: the codec takes from it what it sends, what
                            no commit counts returns
    anchor                  where the running local phase is measured from; private

The state blob is the bytes of `committed`; its digest is the state hash. The apply (aggregation, then Nesterov) uses
separate IEEE operations in a fixed order (no `alpha=`, no fused or compiled kernels) on exact decoded values. So the
bits do not depend on machine, device or thread count. A state device (node/outer/state_device.py) stores the copies, and
computes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilocox.node.outer import aggregate, codec
from dilocox.node.outer.state_device import HOST, STRETCH, StateDevice
from dilocox.protocol.errors import Diverged
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.payload.payload_index import largest_norm
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import TensorSpec, stage_tensors

__all__ = ["EncodedStage", "StageState", "rebase", "start_phase"]

PART_OF_BOUND = 0.5
"""Part of the largest allowed norm that a payload gets which would exceed it."""


@dataclass(frozen=True)
class EncodedStage:
    raw: bytes
    norms: Sequence[float]
    """Norms of the decoded payload, by tensor of the stage."""
    effective_rank: float
    """Effective rank of the averaged pseudo-gradient applied last, mean over the low-rank tensors; 0: not measured."""
    error: float
    """Norm of what the payload does not decode to, relative to what was to be sent: what the codec lost, not what waits."""

    @property
    def norm(self) -> float:
        """Return the norm of the whole payload."""
        return math.hypot(*self.norms)


class StageState:
    """One stage's four copies, and the codec's warm starts."""

    def __init__(
        self, manifest: Manifest, stage: int, specs: Sequence[TensorSpec] | None = None, passage: StateDevice = HOST
    ) -> None:
        """`specs`: only these of the stage's tensors; default all."""
        self.manifest, self.stage, self.passage = manifest, stage, passage
        self.specs = tuple(stage_tensors(manifest.model, stage) if specs is None else specs)
        self.size = sum(spec.elements for spec in self.specs)
        self.committed = passage.zeros(2, self.size)
        self.feedback = passage.zeros(self.size)
        self.anchor = passage.zeros(self.size)
        self.warm: dict[str, Tensor] = {}
        self.effective_rank = 0.0
        """Effective rank of the averaged pseudo-gradient applied last, mean over the low-rank tensors, if the run's rank
        follows it. 0: none was applied since the start."""

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
        return self.committed.cpu().numpy().data.cast("B")

    def load_state(self, raw: memoryview) -> None:
        """`raw`: the bytes of a state blob. Copied."""
        whole = self.committed.cpu()  # the tensor itself, if it is on the host
        whole.numpy().data.cast("B")[:] = raw
        self.committed.copy_(whole)

    def layout(self, rank_or_k: int | None = None) -> wire.StageLayout:
        """Return the layout for this rank or k; default: the manifest's."""
        compression = self.manifest.compression
        rank_or_k = compression.keep if rank_or_k is None else rank_or_k
        return wire.stage_layout([spec.shape for spec in self.specs], compression, rank_or_k)

    def encode(self, rank_or_k: int | None = None, owner: bytes = wire.NOBODYS) -> EncodedStage:
        """Encode one payload from the error feedback, and leave the rest in it. `owner`: field of the payload's header.

        Feedback before = feedback after + decoded payload, up to float32 rounding. The apply clips a payload that is
        larger than others', and returns the difference (`return_to_feedback`). A change above `largest_rms`, which
        voters reject, is sent in parts.
        """
        compression = self.manifest.compression
        rank_or_k = compression.keep if rank_or_k is None else rank_or_k
        wanted = [_norm(view.reshape(-1)) for _, view in self.views(self.feedback)]
        if not all(map(math.isfinite, wanted)):
            raise Diverged("a pseudo-gradient is not finite")
        packed, left = self.pack(self._within_bounds(wanted), rank_or_k)
        error = left / math.hypot(*wanted) if any(wanted) else 0.0
        norms = [wire.decoded_norm([tensor]) for tensor in packed]
        return EncodedStage(wire.pack(packed, compression.entropy_coding, owner), norms, self.effective_rank, error)

    def _within_bounds(self, norms: Sequence[float]) -> Tensor:
        """Return the error feedback; of a tensor larger than the run allows, a part small enough for any codec's rounding.
        `norms`: the tensors'."""
        sent = self.feedback
        for (spec, _), norm in zip(self.views(sent), norms, strict=True):
            largest = largest_norm(self.manifest, spec)
            if norm > largest:
                sent = sent.clone() if sent is self.feedback else sent
                next(part for other, part in self.views(sent) if other.name == spec.name).mul_(PART_OF_BOUND * largest / norm)
        return sent

    def pack(self, sent: Tensor, rank_or_k: int) -> tuple[list[wire.Tensor], float]:
        """Encode `sent`, flat; subtract what it decodes to from the error feedback, and return the latter's norm, too.
        Advance the warm starts."""
        layout = self.layout(rank_or_k)
        encoder = codec.StageEncoder(sent, layout, self.passage.device)
        encoded = []
        tensors = zip(self.views(sent), self.views(self.feedback), layout.tensors, strict=True)
        for (spec, view), (_, left), tensor_layout in tensors:
            encoded.append(encoder.encode(view, tensor_layout, self.warm.get(spec.name), left))
            if (warm := encoded[-1].warm) is not None:
                self.warm[spec.name] = warm.to(self.feedback.device)
        packed = [each.packed for each in encoded]
        self.add_to_feedback(packed, [-1.0 if each.left is None else 0.0 for each in encoded])
        left_norms = [each.left for each in encoded if each.left is not None]
        return packed, math.hypot(*left_norms) if len(left_norms) == len(encoded) else _norm(self.feedback)

    def return_to_feedback(self, raw: memoryview, rank_or_k: int | None = None, shares: Sequence[float] | None = None) -> None:
        """Return the fractions of a payload that a commit did not apply, by tensor (default: all), to the error feedback."""
        shares = [1.0] * len(self.specs) if shares is None else shares
        if any(shares):
            self.add_to_feedback(wire.parse(raw, self.layout(rank_or_k)), shares)

    def add_to_feedback(self, payload: Sequence[wire.Tensor], shares: Sequence[float]) -> None:
        """These shares of a payload, by tensor."""
        for (_, view), packed, share in zip(self.views(self.feedback), payload, shares, strict=True):
            if not share:
                continue
            decoder = codec.Decoder([packed], self.passage.device)
            for start, stop, (flat,) in self.passage.each([view.view(-1)], decoder.stretches()):
                decoder.add_to(flat, share, start, stop)

    def apply(
        self,
        payloads: Sequence[memoryview],
        tokens: Sequence[int],
        rank_or_k: int | None = None,
        factors: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Apply: Θ, momentum ← Outer(Θ, momentum, aggregate of the payloads, weighted and clipped), in place.

        `payloads` in the order of their clusters' ids; `factors`: clip factors of each, by tensor; default 1. Raises
        RemoteError before any change if one does not parse.
        """
        if not payloads:
            return
        layout = self.layout(rank_or_k)
        parsed = [wire.parse(raw, layout) for raw in payloads]
        factors = factors or [[1.0] * len(self.specs)] * len(payloads)
        measures, ranks = self.manifest.compression.adapt == "effective-rank", []
        copies = zip(self.views(self.committed[0]), self.views(self.committed[1]), strict=True)
        for index, ((_, theta), (_, momentum)) in enumerate(copies):
            decoder = codec.Decoder([tensors[index] for tensors in parsed], self.passage.device)
            step = aggregate.stepped(self.manifest.outer, tokens, [by_tensor[index] for by_tensor in factors], decoder)
            if measures and (rank := decoder.effective_rank([float(count) for count in tokens])) is not None:
                ranks.append(rank)
            for start, stop, (values, moment) in self.passage.each([theta.view(-1), momentum.view(-1)], decoder.stretches()):
                step(start, stop, values, moment)
        self.effective_rank = sum(ranks) / len(ranks) if ranks else 0.0


def _norm(flat: Tensor) -> float:
    """Return the norm; not finite if a value is not."""
    parts = flat.split(STRETCH)
    squares = math.fsum(float(torch.dot(part, part)) for part in parts)
    if math.isfinite(squares):
        return math.sqrt(squares)
    return math.hypot(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts))  # squares that overflow


def start_phase(state: StageState, live: Sequence[Tensor], private_share: float = 1.0) -> None:
    """End a local phase: `feedback += anchor − live; anchor = live = Θ + private_share · (live − Θ)`. It waits for
    nothing.

    One cluster's work in a phase is a noisy estimate of the mean in its commit: half of it is nearer to that mean than
    all of it (docs/results.md). The rebase removes private progress with the anchor, so the share only decides where
    gradients are computed until the commit arrives.
    """
    for changed, theta, local in _with_live(state, live, state.feedback, state.anchor):
        feedback, anchor = changed
        feedback.add_(anchor.sub_(local.to(anchor.device)))
        anchor.copy_(local)
        if private_share != 1:
            anchor.sub_(theta).mul_(private_share).add_(theta)
            local.copy_(anchor)


def rebase(state: StageState, live: Sequence[Tensor], keep_private: bool = True) -> None:
    """Move the live parameters onto the committed ones: `live = Θ + (live − anchor); anchor = copy(Θ)`.

    With live = anchor this is exactly live = Θ: a commit applied at step 0 is the synchronous algorithm. Without `keep_private`
    private progress is dropped (overlap delayed, and a phase that was not counted).
    """
    for (anchor,), theta, local in _with_live(state, live, state.anchor):
        committed = theta.to(local.device)
        if keep_private:
            local.sub_(anchor.to(local.device))
            local.add_(committed)
        else:
            local.copy_(committed)
        anchor.copy_(theta)


def _with_live(state: StageState, live: Sequence[Tensor], *changed: Tensor) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Stretch by stretch: of these flat copies, of Θ, and of the live parameters, where each of them is worked on."""
    offset, passage = 0, state.passage
    for spec, tensor in zip(state.specs, live, strict=True):
        of_tensor = slice(offset, offset := offset + spec.elements)
        copies, theta, flat = [copy[of_tensor] for copy in changed], state.parameters[of_tensor], tensor.view(-1)
        for start, stop, parts in passage.each(copies, passage.spans(spec.elements), [theta]):
            yield parts[:-1], parts[-1], flat[start:stop]
