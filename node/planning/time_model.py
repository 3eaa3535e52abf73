"""Time model: durations of a step and a round, the arrival of a commit, and a cluster's work until then. Arithmetic only;
`dilocox plan`, the bench and the tests share it, and `python -m bench.clock` compares it with real swarms.

    a step         the longer of computing it, with the pipeline's bubble, and of passing activations on between a cluster's boxes
    the line       every contributor's payload goes to the n - 1 others: a box sends its share n - 1 times and receives n - 1
                   shares, both ways at once, with the headers of every layer; the slower direction counts. Several transfers
                   at once do not fill it
    the exchange   from the end of a phase until its commit can be applied: what every round costs (ballot, votes), encoding, the
                   line, and checking and applying n payloads. Nothing in it waits for a disk
    arrival step   inner steps of the next phase that are done when its commit arrives: exchange / step, rounded up
    a round        none               H steps, then the exchange
                   delayed, rebase    H steps beside the exchange; where that takes longer the cluster trains on, to
                                      max_inner_steps, and then waits
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dilocox.protocol.payload.payload import Form, StageLayout, stage_layout
from dilocox.protocol.run.manifest import Compression, Model
from dilocox.protocol.run.tensors import stage_tensors

__all__ = [
    "HEADERS",
    "SEVERAL_FILL",
    "Estimate",
    "Line",
    "Method",
    "Overlap",
    "Round",
    "Site",
    "Step",
    "Timeline",
    "arrival_step",
    "estimate",
    "exchange_seconds",
    "layouts_of",
    "model_payload_bytes",
    "payload_bytes",
    "ring",
    "round_of",
]

Overlap = Literal["none", "delayed", "rebase"]

SEGMENT_BYTES, FRAME_BYTES = 1448, 1514
"""Data bytes of a TCP segment with timestamps, and bytes of its Ethernet frame, at an MTU of 1,500."""
RECORD_BYTES, RECORD_HEADER = 16384, 22
"""Data bytes of a TLS 1.3 record, and its overhead; HTTP/2 adds another 9 bytes per record."""
HEADERS = FRAME_BYTES / SEGMENT_BYTES * (1 + (RECORD_HEADER + 9) / RECORD_BYTES)
"""Ratio of bytes on a link to payload bytes."""

SEVERAL_FILL = 0.8
"""Fraction of a link that transfers from and to several peers fill: queues that drop their tail serve them unevenly, and
links stand idle while the last transfers end. `python -m bench.clock` finds 0.7 to 1 among four clusters on links of 20
and 50 Mbit/s, less on the slower ones, so this is slightly optimistic there; on faster links other work dominates.
hivemind's all-to-all exchange fills as much (`python -m bench.exchange`); one transfer per direction, or a ring, fills
a link."""

INT4_CODED, INT2_CODED = 0.90, 0.97
"""Size of a Huffman-coded payload relative to the uncoded one, for estimates (a test compares real payloads)."""


@dataclass(frozen=True)
class Step:
    """An inner step of a cluster."""

    computing: float
    """Seconds, of its busiest worker."""
    bubble: float = 0.0
    """Share of a step in which a worker waits for the pipeline to fill and to drain, where `computing` is without it."""
    activations: float = 0.0
    """Seconds, on the line between the cluster's boxes: beside computing."""
    ending: float = 0.0
    """Seconds of the reduction between copies and of the inner optimizer, after the pipeline."""

    @property
    def working(self) -> float:
        """Seconds in which the devices work, and the pipeline fills and drains."""
        return self.computing / (1 - self.bubble) + self.ending

    @property
    def seconds(self) -> float:
        return max(self.working, self.activations)


@dataclass(frozen=True)
class Line:
    """Bandwidth of a host to other clusters, in bits per second."""

    up: float
    down: float

    @classmethod
    def both_ways(cls, bits_per_second: float) -> "Line":
        return cls(bits_per_second, bits_per_second)

    def seconds(self, sent: float, received: float) -> float:
        """Return the seconds for so many bytes in each direction, at once."""
        return 8 * HEADERS * max(sent / self.up, received / self.down)


@dataclass(frozen=True)
class Site:
    """The machines of a run: clusters that are all alike."""

    parameters: int
    step: Step
    tokens_per_step: float
    """Tokens per step of all clusters together."""
    clusters: int
    line: Line
    boxes: int = 1
    """Hosts of one cluster; each has a link, and a part of the stages."""
    fixed_seconds: float = 0.0
    """That every round costs, whatever its bytes: ballot, votes, commit."""

    def copies_seconds(self, payload_bytes: float) -> float:
        """Return the seconds until every payload has reached the other clusters."""
        share = payload_bytes / self.boxes * (self.clusters - 1)
        return self.line.seconds(share, share) / (SEVERAL_FILL if self.clusters > 2 else 1.0)


@dataclass(frozen=True)
class Method:
    name: str
    payload_bytes: float
    """Payload bytes of one cluster's exchange."""
    inner_steps: int
    max_inner_steps: int
    overlap: Overlap = "rebase"
    encode_seconds: float = 0.0
    apply_seconds: float = 0.0
    """Seconds to check and apply one cluster's payload."""


@dataclass(frozen=True)
class Round:
    """Course of a round that begins without a late commit."""

    steps: int
    """H, or as many as a cluster takes until the commit is there."""
    seconds: float
    waited: float
    """Seconds in which it takes no step."""


@dataclass(frozen=True)
class Estimate:
    method: Method
    line_seconds: float
    exchange_seconds: float
    arrival_step: int
    """Step of the next phase; beyond max_inner_steps the cluster waits."""
    round: Round
    utilisation: float
    """Share of the time in which pipelines work."""
    tokens_per_second: float
    box_bytes: float
    """That a box sends in a round, and receives, without headers."""


def estimate(site: Site, method: Method) -> Estimate:
    exchange = exchange_seconds(site, method)
    taken = round_of(site.step.seconds, exchange, method)
    return Estimate(
        method,
        site.copies_seconds(method.payload_bytes),
        exchange,
        arrival_step(site.step.seconds, exchange),
        taken,
        taken.steps * site.step.working / taken.seconds,
        taken.steps * site.tokens_per_step / taken.seconds,
        method.payload_bytes / site.boxes * (site.clusters - 1),
    )


def exchange_seconds(site: Site, method: Method) -> float:
    """Return the seconds from the end of a phase until its commit can be applied."""
    codec = method.encode_seconds + site.clusters * method.apply_seconds
    return site.fixed_seconds + codec + site.copies_seconds(method.payload_bytes)


def arrival_step(step_seconds: float, exchange: float) -> int:
    """Inner steps that are done when a commit arrives; it is applied between two steps."""
    return math.ceil(exchange / step_seconds)


def round_of(step_seconds: float, exchange: float, method: Method) -> Round:
    computing = method.inner_steps * step_seconds
    if method.overlap == "none":
        return Round(method.inner_steps, computing + exchange, exchange)
    steps = min(method.max_inner_steps, max(method.inner_steps, arrival_step(step_seconds, exchange)))
    seconds = max(steps * step_seconds, exchange)
    return Round(steps, seconds, seconds - steps * step_seconds)


def ring(site: Site, bytes_per_parameter: float = 2) -> Estimate:
    """AllReduce of the gradient in every inner step, as a ring moves it: 2 (n - 1) / n of its size over each line."""
    size = bytes_per_parameter * site.parameters
    moved = 2 * (site.clusters - 1) / site.clusters * size / site.boxes
    seconds = site.line.seconds(moved, moved)
    method = Method("AllReduce", size, 1, 1, "none")
    step = site.step.seconds + seconds
    round = Round(1, step, seconds)
    return Estimate(method, seconds, seconds, 0, round, site.step.working / step, site.tokens_per_step / step, moved)


@dataclass
class Timeline:
    """The clock of a run as it goes: phases of measured lengths, commits of measured bytes. Seconds since its start."""

    site: Site
    ended: float = 0.0
    """When the last phase did."""
    committed: float = 0.0
    """When its commit can be applied everywhere; not before `ended`."""

    def arrival_step(self, synchronous: bool) -> int:
        """Return the step of the running phase at which the last commit arrives; a phase starts after it if the last round
        was synchronous."""
        return 0 if synchronous else arrival_step(self.site.step.seconds, self.committed - self.ended)

    def phase(self, steps: int, method: Method, synchronous: bool) -> None:
        """One more phase of so many steps ended, and the exchange of its work begins. `synchronous`: it began with the commit
        before it; else with the end of the phase before it, and it cannot end before that commit."""
        began = self.committed if synchronous else self.ended
        self.ended = max(began + steps * self.site.step.seconds, self.committed)
        self.committed = self.ended + exchange_seconds(self.site, method)


# Bytes of a codec


def model_payload_bytes(model: Model, compression: Compression, stages: Sequence[int] | None = None) -> float:
    """`payload_bytes` of these stages of a model; default all."""
    mine = range(model.stages) if stages is None else stages
    shapes = [[spec.shape for spec in stage_tensors(model, stage)] for stage in mine]
    return payload_bytes(layouts_of(shapes, compression))


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
    if not layout.entropy or form is Form.FP32:
        return float(layout.largest)
    return layout.largest * (INT2_CODED if form == Form.INT2 else INT4_CODED)


def layouts_of(shapes: Sequence[Sequence[Sequence[int]]], compression: Compression) -> list[StageLayout]:
    """Per stage, from the shapes of its tensors."""
    return [stage_layout(stage, compression, compression.keep) for stage in shapes]
