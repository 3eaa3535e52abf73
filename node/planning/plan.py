"""Estimates of `dilocox plan`: the time model (node/planning/time_model.py) of a run on given machines. Arithmetic only.

Checked against the published 107B rows (arXiv 2506.21263): three of the four fit three constants, the fourth is
predicted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from dilocox.node.planning.disk_model import Written, written
from dilocox.node.planning.layouts import Choice, choose
from dilocox.node.planning.memory_model import HALF, WIDE, Device, bubble, fullest_device, host_bytes
from dilocox.node.planning.step_model import KINDS, Kind, flops_per_token
from dilocox.node.planning.time_model import (
    Estimate,
    Line,
    Method,
    Overlap,
    Site,
    Step,
    estimate,
    model_payload_bytes,
    ring,
)
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, chunks, placed
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.manifest import Compression, Manifest, Model
from dilocox.protocol.run.tensors import stage_tensors

if TYPE_CHECKING:
    from dilocox.node.exchange.shards import Shards

__all__ = [
    "DELAY_COST",
    "FIXED_SECONDS",
    "MADE_FOR",
    "PAPER",
    "PAPER_RATIO",
    "PUBLISHED",
    "SPEEDS",
    "Inside",
    "Setting",
    "Speed",
    "exchanging",
    "inside",
    "like_the_paper",
    "mfu",
    "most_values",
    "paper_rows",
    "recommend",
    "step_of",
    "written_by_box",
]


@dataclass(frozen=True)
class Setting:
    """The machines that a preset is made for."""

    clusters: int
    boxes: int
    """Hosts of a cluster."""
    devices: int
    """Devices of a host."""
    device: str
    """Device of KINDS, or its peak in TFLOP/s."""
    bandwidth: str
    """Bandwidth of a host, in each direction."""


MADE_FOR = {
    "tiny": Setting(3, 1, 1, "0.05", "1gbit"),
    "llama-10m": Setting(4, 1, 1, "1", "100mbit"),
    "llama-125m": Setting(4, 1, 1, "4090", "100mbit"),
    "llama-350m": Setting(4, 1, 1, "4090", "100mbit"),
    "llama-1b": Setting(8, 1, 4, "4090", "200mbit"),
    "llama-7b": Setting(16, 1, 8, "4090", "1gbit"),
    "qwen1.5-107b": Setting(2, 10, 8, "a800", "1gbit"),
}
"""Machines by preset. The smallest are for CPUs; the last is the published run's."""

FIXED_SECONDS = 1.0
"""Seconds of a round whatever its bytes, if nothing else is named: ballot, votes, commit."""
DELAY_COST = 0.16
"""Extra tokens to reach the same loss, as a share, when a commit arrives a whole phase late.

One comparison measured 0.161 with sparse payloads and half the lead (docs/results.md); it is not kept. Waiting for the commit
costs 1.0, so the advice does not depend on the digits."""


@dataclass(frozen=True)
class Speed:
    """Speed of a codec on one core, in values per second."""

    encoded: float
    applied: float
    """Speed of applying one cluster's payload, with its check."""


SPEEDS = {
    "fp32": Speed(21e6, 78e6),
    "lowrank-int4": Speed(7.5e6, 75e6),
    "int4": Speed(37e6, 125e6),
    "int2": Speed(125e6, 315e6),
    "topk-int2": Speed(38e6, 240e6),
}
"""Speeds by codec, as `dilocox plan` offers it: topk-int2 with k = 512, fp32 measured as 16-bit values. About half of
those of one idle core in docs/results/boundary.json (bench.boundary, 100M parameters)."""
SPEEDS_RANK = 128
"""Rank of lowrank-int4 in that measurement. Higher ranks are assumed to take longer in proportion, which was not measured,
lower ones as long."""


@dataclass(frozen=True)
class Inside:
    """A cluster's placement on its hosts."""

    choice: Choice
    turns: int
    """Chunks of the model on each worker."""
    activation_bytes: int
    """Bytes that the host with the most of them sends in an inner step; 0 where no pipeline leaves its host."""
    device: Device
    """The worker with the most."""
    host_bytes: int
    """Bytes of the outer state on the host with the most."""
    bubble: float
    """Share of a step in which a worker waits for the pipeline to fill and to drain."""

    @property
    def tiling(self) -> Placement:
        return self.choice.best.placement

    @property
    def device_bytes(self) -> int:
        return self.device.total

    def seconds(self, bits_per_second: float) -> float:
        """Return the seconds for its activations at that bandwidth."""
        return Line.both_ways(bits_per_second).seconds(self.activation_bytes, self.activation_bytes)


def inside(manifest: Manifest, devices: Sequence[int], kind: Kind | None = None) -> Inside:
    """Return the placement on hosts with so many devices each. Between two hosts of a pipeline all tokens of a batch pass
    forward, and their gradients back. `kind`: of the devices; default: one with memory for any model."""
    kind = kind or Kind.of_peak(KINDS["h100"].peak)
    machines = [Devices(count, cuda=True, device_bytes=int(kind.memory)) for count in devices]
    choice, model = choose(manifest, machines, kind), manifest.model
    place = choice.best.placement
    turns, run = place.turns(model.stages), placed(manifest, place.microbatches, place.recompute)
    half = run.training.in_bfloat16(cuda=True)
    passed = run.tokens_per_step * model.config.hidden_size * (HALF if half else WIDE)
    on_host = max(host_bytes(run, place.stages(box, model.stages)) for box in range(len(devices)))
    return Inside(
        choice,
        turns,
        passed * _most_sent(place, turns),
        fullest_device(run, place.length, place.each, half),
        on_host,
        bubble(turns, place.length, place.each),
    )


def _most_sent(tiling: Placement, turns: int) -> int:
    """Return how often the host with the most neighbours, once per chunk, sends a batch forward or back."""
    box_of = [box for box, length in enumerate(tiling.lengths) for _ in range(length)] * turns
    sent = Counter(sender for pair in pairwise(box_of) if pair[0] != pair[1] for sender in pair)
    return max(sent.values(), default=0)


def exchanging(manifest: Manifest, cluster: Inside, name: str, compression: Compression) -> Method:
    """Return a codec's exchange on such a cluster, with the run's H: payload bytes, and seconds of the codec for the
    worker with the most values, on one core."""
    run = manifest.model_copy(update={"compression": compression})
    speed, values = SPEEDS[compression.codec], most_values(run.model, cluster)
    slower = max(1.0, (compression.rank or 0) / SPEEDS_RANK)
    return Method(
        name,
        model_payload_bytes(run.model, compression),
        run.rounds.inner_steps,
        run.rounds.max_inner_steps,
        encode_seconds=values * slower / speed.encoded,
        apply_seconds=values * slower / speed.applied,
    )


def written_by_box(manifest: Manifest, cluster: Inside, clusters: int, shards: "Shards | None" = None) -> list[Written]:
    """Return the bytes that each host of a cluster writes in a round, the lead host first. `shards`: of the run, if any."""
    tiling, stages = cluster.tiling, manifest.model.stages
    return [
        written(manifest, clusters, tiling.stages(box, stages), leads=not box, shards=shards)
        for box in range(len(tiling.lengths))
    ]


def most_values(model: Model, cluster: Inside) -> int:
    """That a worker exchanges."""
    workers = chunks(model.stages, cluster.tiling.length, cluster.tiling.schedule)
    return max(sum(values_of(model, stage) for chunk in worker for stage in chunk) for worker in workers)


def values_of(model: Model, stage: int) -> int:
    """That are exchanged of a stage."""
    return sum(spec.elements for spec in stage_tensors(model, stage))


def step_of(manifest: Manifest, cluster: Inside, kind: Kind, lan: float, measured: float | None) -> Step:
    """Return an inner step of a cluster of such devices, with `lan` bits per second between its hosts. `measured`: its
    seconds, bubble included, if known.

    Raises ConfigError if that is faster than the devices are.
    """
    place = cluster.tiling
    work = manifest.tokens_per_step * flops_per_token(manifest, place.recompute)
    activations = cluster.seconds(lan)
    least = work / (place.workers * kind.peak)
    if measured is None:
        return cluster.choice.best.parts.step(activations)
    if measured < least:
        raise ConfigError(
            f"a step of {measured:g} s is over the devices' peak: {manifest.tokens_per_step:,} tokens take {work:.3g} operations,"
            f" and {place.workers} devices make {place.workers * kind.peak:.3g} a second at most, so {least:.3g} s. Name your"
            " devices (--device, --devices), measure a step, or leave it out."
        )
    return Step(measured, activations=activations)


def mfu(manifest: Manifest, kind: Kind, devices: int, tokens_per_second: float) -> float:
    """Return the model FLOPs utilisation: operations of the model, none computed twice, over the peak of all devices."""
    return tokens_per_second * flops_per_token(manifest) / (devices * kind.peak)


def recommend(site: Site, method: Method) -> Overlap:
    """`none` or `rebase`: which reaches a given loss sooner.

    Rebase costs DELAY_COST · arrival / H more tokens; waiting costs the time of the exchange.
    """
    waiting = estimate(site, replace(method, overlap="none"))
    beside = estimate(site, replace(method, overlap="rebase"))
    late = min(1.0, beside.arrival_step / beside.round.steps)
    rebase = beside.tokens_per_second / (1 + DELAY_COST * late)
    return "rebase" if rebase > waiting.tokens_per_second else "none"


# The published 107B run

PUBLISHED = {"AllReduce": 10.4, "DiLoCoX": 3728.0, "without overlap": 3728.0 * 0.6, "without compression": 1168.0}
"""Tokens per second (arXiv 2506.21263); without overlap: 40% less."""
PAPER_RATIO = PUBLISHED["DiLoCoX"] / PUBLISHED["without overlap"] - 1
"""Exchange over computing of its rounds: one that waits for its exchange is so much longer."""
PAPER_STEPS = 125
"""H."""
PAPER_REDUCTION = 8
"""fp16 to Int4 is 4, rank 2048 another 2; H = 125 makes the published 1,000."""


def _paper() -> Site:
    """20 boxes of 8 GPUs, 1 Gbps by `tc`, 2 clusters. Seconds and tokens of a step are those with which the rows AllReduce, whose
    step waits for the line, and DiLoCoX, whose does not, come out; what a round costs beyond its bytes comes of the row without
    overlap."""
    unknown = Site(107_000_000_000, Step(0.0), 0.0, clusters=2, line=Line.both_ways(1e9), boxes=10)
    slow, fast = PUBLISHED["AllReduce"], PUBLISHED["DiLoCoX"]
    step = slow * ring(replace(unknown, step=Step(1.0))).line_seconds / (fast - slow)
    waited = PAPER_STEPS * step * PAPER_RATIO
    line = unknown.copies_seconds(2.0 * unknown.parameters / PAPER_REDUCTION)
    return replace(unknown, step=Step(step), tokens_per_step=fast * step, fixed_seconds=waited - line)


PAPER = _paper()
PAPER_METHOD = Method("DiLoCoX", 2.0 * PAPER.parameters / PAPER_REDUCTION, PAPER_STEPS, PAPER_STEPS, "delayed")


def paper_rows() -> list[Estimate]:
    """The published rows by the clock, in the order of PUBLISHED. The last one went into no constant."""
    return [
        ring(PAPER),
        estimate(PAPER, PAPER_METHOD),
        estimate(PAPER, replace(PAPER_METHOD, name="without overlap", overlap="none")),
        estimate(PAPER, replace(PAPER_METHOD, name="without compression", payload_bytes=2.0 * PAPER.parameters)),
    ]


def like_the_paper(site: Site, payload_bytes: float, inner_steps: int, ratio: float = PAPER_RATIO) -> Site:
    """A site in the proportions of the published run: an exchange of DiLoCoX's payload, of so many bytes every `inner_steps`, takes
    `ratio` of computing, and of that as much as there is what no compression removes."""
    published = estimate(PAPER, PAPER_METHOD)
    exchange = inner_steps * site.step.seconds * ratio
    line = exchange * published.line_seconds / published.exchange_seconds
    full = replace(site, line=Line.both_ways(1.0)).copies_seconds(payload_bytes)
    return replace(site, line=Line.both_ways(full / line), fixed_seconds=exchange - line)
