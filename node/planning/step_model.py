"""Step model: the seconds of an inner step of a placement, by what takes them. Arithmetic only.

products       matrix products and attention of the worker with the most, at EFFICIENCY of its device's peak; a third more
               where activations are computed again; never less than its host needs to launch their kernels
bubble         the wait of that worker while the pipeline fills and drains
reduction      gradients in float32 between the copies of a stage, after the backward pass; and Muon's updates in bfloat16
optimizer      Newton-Schulz of the hidden matrices, each in one copy, and the traffic of all moments in every copy
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dilocox.node.planning.memory_model import HALF, WIDE, bubble
from dilocox.node.planning.time_model import Step
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, chunks
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.tensors import stage_tensors, stage_units, unit_operations

__all__ = ["EFFICIENCY", "KINDS", "Kind", "Parts", "flops_per_token", "kind_of", "parts_of"]


@dataclass(frozen=True)
class Kind:
    """Kind of device."""

    peak: float
    """Dense bfloat16 operations per second with float32 sums."""
    memory: float
    """Bytes of its memory; 0: unknown."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second that it sends to other devices of its host."""

    @classmethod
    def named(cls, text: str) -> "Kind | None":
        """Return a kind by its name in KINDS, or by its peak in TFLOP/s; None for any other text."""
        if text.lower() in KINDS:
            return KINDS[text.lower()]
        try:
            peak = 1e12 * float(text)
        except ValueError:
            return None
        return cls.of_peak(peak) if 0 < peak < math.inf else None

    @classmethod
    def of_peak(cls, peak: float) -> "Kind":
        """Return a kind of which only the peak is known, with the ratios of usual devices, and a processor's at least."""
        bandwidth = max(PROCESSOR_BANDWIDTH, peak / OPERATIONS_A_BYTE)
        return cls(peak, 0, bandwidth, bandwidth / 8)


PROCESSOR_BANDWIDTH, PROCESSOR_PEAK = 10e9, 0.05e12
"""Memory bandwidth and operations per second of a worker on processors."""
OPERATIONS_A_BYTE = 300.0
"""Peak over memory bandwidth: 295 of an H100."""

KINDS: Mapping[str, Kind] = {
    "3090": Kind(71e12, 24e9, 936e9, 32e9),
    "4090": Kind(165e12, 24e9, 1008e9, 32e9),
    "5090": Kind(209e12, 32e9, 1792e9, 64e9),
    "l40s": Kind(362e12, 48e9, 864e9, 32e9),
    "a100-40": Kind(312e12, 40e9, 1555e9, 300e9),
    "a800-40g": Kind(312e12, 40e9, 1555e9, 200e9),
    "a100": Kind(312e12, 80e9, 2039e9, 300e9),
    "a100-80": Kind(312e12, 80e9, 2039e9, 300e9),
    "a800": Kind(312e12, 80e9, 2039e9, 200e9),
    "h100": Kind(989e12, 80e9, 3350e9, 450e9),
    "h200": Kind(989e12, 141e9, 4800e9, 450e9),
    "b200": Kind(2250e12, 180e9, 8000e9, 900e9),
    "mi300x": Kind(1307e12, 192e9, 5300e9, 448e9),
}
"""Devices by the vendors' data sheets: SXM modules where there are any, PCI Express for cards."""

EFFICIENCY = 0.45
"""Share of the peak that products reach without waits. INTELLECT-1's trainer reached 43% on H100s, its optimizer and
reduction included (arXiv 2412.01152)."""
LINK_SHARE = 0.5
"""Share of a link that an all-reduce between the devices of a host fills."""
LAUNCH_SECONDS = 1.6e-3
"""Host time of a layer's forward and backward pass for one microbatch, eager: half of what a loaded core needed for 12
layers and 4 microbatches. A GPU's host is busy with it while the kernels before run."""
OPTIMIZER_BYTES = 44
"""Memory traffic for each trained float32 parameter: its norm and clip, gradient, moments and value, and its copy in
bfloat16."""
NEWTON_SCHULZ = 5
"""Steps of Muon's orthogonalisation; for a matrix of m x n each multiplies 2 m² n + m³ times (m <= n)."""


def kind_of(machine: Devices) -> Kind:
    """Return the kind of a host's devices: of GPUs the one with the nearest memory, which is enough to rank placements."""
    if not machine.cuda:
        return Kind.of_peak(PROCESSOR_PEAK)
    memory = machine.device_bytes or KINDS["h100"].memory
    return min(KINDS.values(), key=lambda kind: abs(kind.memory - memory))


@dataclass(frozen=True)
class Parts:
    """Seconds of an inner step. Those of `products` on equally loaded workers of all placed devices; the others are what
    comes on top."""

    products: float
    recomputation: float
    imbalance: float
    launching: float
    """The wait for the host, where that is longer than the kernels."""
    bubble: float
    reduction: float
    optimizer: float

    @property
    def ending(self) -> float:
        """Seconds after the pipeline has drained."""
        return self.reduction + self.optimizer

    @property
    def total(self) -> float:
        return self.products + self.recomputation + self.imbalance + self.launching + self.bubble + self.ending

    def step(self, activations: float = 0.0) -> Step:
        """Return the step of the time model."""
        computing = self.products + self.recomputation + self.imbalance + self.launching
        return Step(computing, self.bubble / (computing + self.bubble), activations, self.ending)


@dataclass(frozen=True)
class _Load:
    """Work of some stages in a step."""

    operations: int
    """Multiplications of a forward pass for a token."""
    layers: int
    values: int
    """Trained parameters."""
    orthogonal: int
    """Multiplications of Muon."""

    def __add__(self, other: "_Load") -> "_Load":
        return _Load(
            self.operations + other.operations,
            self.layers + other.layers,
            self.values + other.values,
            self.orthogonal + other.orthogonal,
        )


@lru_cache(maxsize=64)
def _loads(model: Model, muon: bool) -> tuple[_Load, ...]:
    """Return the loads of all stages."""
    found = []
    operations = unit_operations(model)
    for stage, (first, last) in enumerate(stage_units(model)):
        tensors = stage_tensors(model, stage)
        layers = min(last, model.config.num_hidden_layers + 1) - max(1, first)
        sides = [sorted(spec.shape) for spec in tensors if muon and spec.hidden]
        orthogonal = sum(NEWTON_SCHULZ * (2 * m * m * n + m**3) for m, n in sides)
        found.append(_Load(sum(operations[first:last]), layers, sum(spec.elements for spec in tensors), orthogonal))
    return tuple(found)


def flops_per_token(manifest: Manifest, recompute: bool = False) -> float:
    """Return the operations of a training step for each token: two for each multiplication forward and four back (arXiv
    2001.08361). `recompute`: the layers' forward passes count twice."""
    model = manifest.model
    products = sum(unit_operations(model))
    adapters = model.lora is not None
    added = sum(spec.elements for stage in range(model.stages) for spec in stage_tensors(model, stage)) if adapters else 0
    attention = (
        model.config.num_hidden_layers * model.sequence_length * model.config.num_attention_heads * model.config.head_dim
    )
    frozen = 2 * (products - attention) * adapters  # no gradient of theirs is computed
    again = 2 * (sum(unit_operations(model)[:-1]) + added) * recompute  # the head is not computed again
    return float(6 * (products + added) - frozen + again)


def parts_of(manifest: Manifest, placement: Placement, kind: Kind) -> Parts:
    """Return the seconds of a placement's step, without activations between hosts."""
    stages, copies = manifest.model.stages, placement.copies
    loads = _loads(manifest.model, manifest.training.optimizer == "muon")
    workers = [
        sum((loads[stage] for chunk in chunks_of for stage in chunk), _Load(0, 0, 0, 0))
        for chunks_of in chunks(stages, placement.length, placement.schedule)
    ]
    whole = sum(load.operations for load in loads)
    speed = kind.peak * EFFICIENCY
    products = manifest.tokens_per_step * flops_per_token(manifest) / (placement.workers * speed)
    again = manifest.tokens_per_step * flops_per_token(manifest, placement.recompute) / (placement.workers * speed)
    busiest = max(load.operations for load in workers) * placement.length / whole
    launching = max(load.layers for load in workers) * placement.each * LAUNCH_SECONDS * (4 if placement.recompute else 3) / 3
    computing = max(again * busiest, launching)
    share = bubble(placement.turns(stages), placement.length, placement.each)
    values, orthogonal = max(load.values for load in workers), max(load.orthogonal for load in workers)
    updates = HALF * values if orthogonal else 0  # which each copy sends of its share of the matrices
    reduced = (copies - 1) / copies * (2 * WIDE * values + updates) / (kind.link * LINK_SHARE)
    optimizer = 2 * orthogonal / copies / speed + OPTIMIZER_BYTES * values / kind.bandwidth
    return Parts(
        products,
        again - products,
        again * (busiest - 1),
        computing - again * busiest,
        computing * share / (1 - share),
        reduced,
        optimizer,
    )
