"""What a link makes of a run: bytes, arrival steps and tokens per second of a codec and H. Arithmetic only.

    a step            the longer of computing it and of passing its activations on between the boxes of a cluster
    network seconds   a box sends and receives its share of a cluster's payload once per other cluster, both ways at once
    codec seconds     encode, decode and apply; beside training with overlap, between phases without
    a round           without overlap: H steps, then codec and network; with it: the longer of both
    arrival step      of the next phase, at which a commit arrives: (network + codec) / seconds of a step

Checked against the published 107B rows (arXiv 2506.21263) with two constants fitted to them: `PAPER`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dilocox.node.memory import HALF, WIDE, Device, bubble, fullest_device, host_bytes
from dilocox.node.tiling import Tiling, chunks, tile
from dilocox.protocol.manifest import Compression, Manifest
from dilocox.protocol.payload import Form, StageLayout, stage_layout

__all__ = [
    "PAPER",
    "PAPER_RATIO",
    "PUBLISHED",
    "Estimate",
    "Inside",
    "Method",
    "Site",
    "allreduce",
    "estimate",
    "inside",
    "layouts_of",
    "paper_rows",
    "payload_bytes",
    "recommend",
]

DELAY_COST = 0.16
"""Extra tokens to reach the same loss, as a share, when a commit arrives a whole phase late (overlap rebase, half the
lead); measured by bench/convergence.py."""

INT4_CODED, INT2_CODED = 0.90, 0.97
"""What Huffman coding leaves of a payload's bytes, for estimates (a test compares them with real payloads)."""


@dataclass(frozen=True)
class Site:
    """The machines. Two clusters of one box each on a gigabit line unless said otherwise."""

    parameters: int
    step_seconds: float
    """Of one inner step in every cluster, computing only."""
    tokens_per_step: float
    """Of all clusters together."""
    clusters: int = 2
    boxes: int = 1
    """Of one cluster; each has its own line."""
    bits_per_second: float = 1e9
    """Of one box's line to other clusters, each way."""
    activation_seconds: float = 0.0
    """Of one inner step, on the line between a cluster's boxes: beside computing."""

    @property
    def real_step_seconds(self) -> float:
        return max(self.step_seconds, self.activation_seconds)


@dataclass(frozen=True)
class Inside:
    """A cluster's pipeline over its boxes."""

    tiling: Tiling
    turns: int
    """Chunks of the model that each worker holds."""
    activation_bytes: int
    """That the box with the most of them sends in an inner step; 0 where no pipeline leaves its box."""
    device: Device
    """The worker with the most."""
    host_bytes: int
    """Of the box with the most: the outer state of its stages."""
    bubble: float
    """Share of a step in which a worker waits for the pipeline to fill and to drain."""

    @property
    def device_bytes(self) -> int:
        return self.device.total

    def seconds(self, bits_per_second: float) -> float:
        """Of its activations, over a line of that speed."""
        return 8 * self.activation_bytes / bits_per_second


def inside(manifest: Manifest, devices: Sequence[int]) -> Inside:
    """A cluster of boxes with so many devices each. Wherever a chunk and the next one lie on two boxes all tokens of the cluster's
    batch pass forward, and their gradients back."""
    model, training = manifest.model, manifest.training
    tiling = tile(devices, model.stages, training.microbatches, training.schedule)
    turns = len(chunks(model.stages, tiling.length, training.schedule)[0])
    each = training.microbatches // tiling.copies
    half = training.in_bfloat16(cuda=True)
    passed = manifest.tokens_per_step * model.hidden_size * (HALF if half else WIDE)
    on_host = max(host_bytes(manifest, tiling.stages(box, model.stages)) for box in range(len(devices)))
    return Inside(
        tiling,
        turns,
        passed * _most_sent(tiling, turns),
        fullest_device(manifest, tiling.length, each, half),
        on_host,
        bubble(turns, tiling.length, each),
    )


def _most_sent(tiling: Tiling, turns: int) -> int:
    """How often the box with the most neighbours, counted once in each turn, sends a batch forward or back."""
    box_of = [box for box, length in enumerate(tiling.lengths) for _ in range(length)] * turns
    sent = Counter(sender for pair in pairwise(box_of) if pair[0] != pair[1] for sender in pair)
    return max(sent.values(), default=0)


@dataclass(frozen=True)
class Method:
    name: str
    payload_bytes: float
    """Of one cluster's exchange."""
    inner_steps: int
    overlap: bool = True
    codec_seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    method: Method
    network_seconds: float
    arrival_step: float
    round_seconds: float
    utilisation: float
    """Share of the time in which inner steps are computed."""
    tokens_per_second: float


def estimate(site: Site, method: Method) -> Estimate:
    return _estimate(site, method, site.clusters - 1)


def allreduce(site: Site, bytes_per_parameter: int = 2) -> Estimate:
    """The gradient once per inner step, as a ring moves it: 2 (D - 1) / D of its size over each line."""
    method = Method("AllReduce", bytes_per_parameter * site.parameters, 1, overlap=False)
    return _estimate(site, method, 2 * (site.clusters - 1) / site.clusters)


def _estimate(site: Site, method: Method, copies: float) -> Estimate:
    network = 8 * method.payload_bytes / site.boxes * copies / site.bits_per_second
    late = network + method.codec_seconds
    steps = method.inner_steps * site.real_step_seconds
    seconds = max(steps, late) if method.overlap else steps + late
    computing = method.inner_steps * site.step_seconds
    tokens = method.inner_steps * site.tokens_per_step
    return Estimate(method, network, late / site.real_step_seconds, seconds, computing / seconds, tokens / seconds)


def payload_bytes(layouts: Sequence[StageLayout]) -> float:
    """Expected bytes of a cluster's payloads: exact without entropy coding, else estimated."""
    return sum(_expected(layout) for layout in layouts)


def _expected(layout: StageLayout) -> float:
    if layout.kept:
        elements = sum(tensor.elements for tensor in layout.tensors)
        share = layout.kept / elements
        positions = -share * math.log2(share) - (1 - share) * math.log2(1 - share) if share < 1 else 0.0
        return layout.kept / 4 + elements * positions / 8 if layout.entropy else float(layout.largest)
    form = layout.tensors[0].form
    if not layout.entropy or form in (Form.FP16, Form.FP32):
        return float(layout.largest)
    return layout.largest * (INT2_CODED if form == Form.INT2 else INT4_CODED)


def layouts_of(shapes: Sequence[Sequence[Sequence[int]]], compression: Compression) -> list[StageLayout]:
    """Per stage, from the shapes of its tensors."""
    return [stage_layout(stage, compression, compression.keep) for stage in shapes]


def recommend(site: Site, method: Method) -> str:
    """`none` or `rebase`: which reaches a given loss sooner.

    Rebase costs DELAY_COST · arrival / H more tokens; waiting costs the time of the exchange.
    """
    waiting = estimate(site, replace(method, overlap=False))
    beside = estimate(site, replace(method, overlap=True))
    late = min(1.0, beside.arrival_step / method.inner_steps)
    rebase = beside.tokens_per_second / (1 + DELAY_COST * late)
    return "rebase" if rebase > waiting.tokens_per_second else "none"


# The published 107B run

PUBLISHED = {"AllReduce": 10.4, "DiLoCoX": 3728.0, "without overlap": 3728.0 * 0.6, "without compression": 1168.0}
"""Tokens per second (arXiv 2506.21263); without overlap: 40% less."""
PAPER_STEP_SECONDS = 0.479
"""Fitted to the AllReduce and DiLoCoX rows: with 3,728 tokens per second of computing it makes 1,786 tokens per inner step."""
PAPER_CODEC_SECONDS = 18.5
"""Fitted to the row without overlap: what its exchange takes beyond its bytes on a full line."""
PAPER = Site(
    parameters=107_000_000_000,
    step_seconds=PAPER_STEP_SECONDS,
    tokens_per_step=PUBLISHED["DiLoCoX"] * PAPER_STEP_SECONDS,
    clusters=2,
    boxes=10,
    bits_per_second=1e9,
)
"""20 boxes of 8 GPUs, 1 Gbps by `tc`, 2 clusters."""
PAPER_REDUCTION = 8
"""fp16 to Int4 is 4, rank 2048 another 2; H = 125 makes the published 1,000."""


PAPER_RATIO = 1 / 0.6 - 1
"""Exchange over computing of the published run's rounds: a round that waits for its exchange is 40% slower."""


def paper_rows() -> list[Estimate]:
    """The published rows, as this model gives them, in the order of PUBLISHED."""
    dense = 2.0 * PAPER.parameters
    ours = Method("DiLoCoX", dense / PAPER_REDUCTION, 125, codec_seconds=PAPER_CODEC_SECONDS)
    return [
        allreduce(PAPER),
        estimate(PAPER, ours),
        estimate(PAPER, replace(ours, name="without overlap", overlap=False)),
        estimate(PAPER, Method("without compression", dense, 125)),
    ]
