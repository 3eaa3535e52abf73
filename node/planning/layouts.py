"""Choice of a cluster's placement: of all that fit in memory, the fastest by the step model. Arithmetic only.

A model that fits on one device is not cut: where a placement without a pipeline inside a host uses every device that any
placement uses, and computes no activations again, longer pipelines are not compared.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dilocox.node.planning.memory_model import Lack, lacks
from dilocox.node.planning.step_model import Kind, Parts, kind_of, parts_of
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.placement import Placement, placements
from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import Manifest

__all__ = ["Choice", "Layout", "choose", "layouts"]

TIGHT = 0.92
"""Share of a GPU's memory that a placement fills by choice: the rest is of the driver, buffers and fragmentation. Fuller
ones are taken where nothing else fits."""
RUNNERS_UP = 3
LOSSES = {
    "products": "fewer devices work",
    "recomputation": "activations are computed again",
    "imbalance": "the busiest worker has more layers",
    "launching": "the host launches kernels too slowly",
    "bubble": "the pipeline fills and drains",
    "reduction": "copies exchange gradients",
    "optimizer": "each copy computes the optimizer for all its stages",
}
"""Reasons of the step model's parts, in words."""


@dataclass(frozen=True)
class Layout:
    """A placement with its estimate."""

    placement: Placement
    parts: Parts
    batch: int
    """Sequences of an inner step."""

    @property
    def seconds(self) -> float:
        return self.parts.total

    @property
    def is_uncut(self) -> bool:
        """True if a copy has one worker on each host, and computes no activations again."""
        return max(self.placement.lengths) == 1 and not self.placement.recompute

    @property
    def kinship(self) -> tuple[int, int, bool]:
        """Copies, length and recomputation: placements that differ in the microbatch only share it."""
        return self.placement.copies, self.placement.length, self.placement.recompute

    @property
    def name(self) -> str:
        place = self.placement
        pipeline = f" of a pipeline of {place.length}" if place.length > 1 else ""
        size = several(self.batch // place.microbatches, "sequence")
        again = ", recomputation" if place.recompute else ""
        return f"{several(place.copies, 'copy', 'copies')}{pipeline}, microbatches of {size}{again}"

    def loss(self, best: "Layout") -> str:
        """Return why it is slower than the best one."""
        more = {name: getattr(self.parts, name) - getattr(best.parts, name) for name in LOSSES}
        most = max(more, key=lambda name: more[name])
        return f"{self.seconds:,.3g} s, {self.seconds / best.seconds:.2f} times as long: {LOSSES[most]}"


@dataclass(frozen=True)
class Choice:
    """Result of a choice: the best layout, or the reason why none fits."""

    best: Layout
    """The fastest that fits; if none does, the one whose need is nearest to its memory."""
    lacking: tuple[Lack, ...]
    """Hosts on which the best one does not fit, the worst first; empty: it fits."""
    others: tuple[tuple[Layout, str], ...]
    """Runners-up, each with the reason why it loses."""
    devices: int
    """Devices of all hosts."""

    @property
    def idle(self) -> int:
        """Number of devices without work."""
        return self.devices - self.best.placement.workers

    @property
    def why_idle(self) -> str:
        """Return a sentence about devices without work; empty: all have work."""
        if not self.idle:
            return ""
        return (
            f"idle: {self.idle} of {several(self.devices, 'device')}; no placement of {several(self.best.batch, 'sequence')} on"
            f" more of them is faster. Set training.batch_size, and training.microbatches if the run names them, to a multiple of"
            f" {self.devices}"
        )

    def sentences(self) -> list[str]:
        """Return the choice and its runners-up, a sentence each."""
        first = f"placement: {self.best.name}: {self.best.seconds:,.3g} s a step"
        return [first, *(f"not {other.name}: {why}" for other, why in self.others), *filter(None, [self.why_idle])]


def layouts(manifest: Manifest, machines: Sequence[Devices], kind: Kind | None = None) -> list[Layout]:
    """Return all layouts on these hosts, whether they fit or not, the best first. `kind`: of the devices; default: the
    nearest by memory."""
    kind = kind or kind_of(machines[0])
    batch = manifest.training.batch_size
    found = [Layout(place, parts_of(manifest, place, kind), batch) for place in placements(_counts(machines), manifest)]
    most = max(layout.placement.workers for layout in found)

    def rank(layout: Layout) -> tuple[bool, float, int, int]:
        uncut = layout.is_uncut and layout.placement.workers == most
        return not uncut, layout.seconds, layout.placement.length, -layout.placement.microbatches

    return sorted(found, key=rank)


def choose(manifest: Manifest, machines: Sequence[Devices], kind: Kind | None = None) -> Choice:
    """Return the best layout that fits these hosts."""
    ranked, devices = layouts(manifest, machines, kind), sum(_counts(machines))
    roomy = Hosts(manifest, [_with_share(machine) for machine in machines], ranked)
    full = Hosts(manifest, machines, ranked)
    best = roomy.first(ranked) or full.first(ranked)
    if best is None:
        lacking = {layout: full.lacks(layout) for layout in full.leanest.values()}
        least = max(lacking, key=lambda layout: lacking[layout][0].has / lacking[layout][0].needs)
        return Choice(least, lacking[least], (), devices)
    return Choice(best, (), tuple(islice(_runners_up(ranked, best, roomy), RUNNERS_UP)), devices)


class Hosts:
    """Memory of some hosts, and what does not fit in it."""

    def __init__(self, manifest: Manifest, machines: Sequence[Devices], ranked: Iterable[Layout]) -> None:
        """Find the leanest of each number of copies and length: it computes activations again, and its microbatches are
        the smallest. Where that does not fit, no other does."""
        self._manifest, self._machines = manifest, machines
        self._known: dict[Placement, tuple[Lack, ...]] = {}
        self.leanest: dict[tuple[int, int], Layout] = {}
        for layout in sorted(ranked, key=lambda each: (each.placement.recompute, each.placement.microbatches)):
            self.leanest[layout.kinship[:2]] = layout

    def first(self, ranked: Iterable[Layout]) -> Layout | None:
        """Return the first that fits."""
        return next((layout for layout in ranked if not self.lacks(self._lean(layout)) and not self.lacks(layout)), None)

    def lacks(self, layout: Layout) -> tuple[Lack, ...]:
        """Return where a layout does not fit, the worst first."""
        if layout.placement not in self._known:
            self._known[layout.placement] = tuple(lacks(self._manifest, layout.placement, self._machines))
        return self._known[layout.placement]

    def _lean(self, layout: Layout) -> Layout:
        return self.leanest[layout.kinship[:2]]


def _counts(machines: Sequence[Devices]) -> list[int]:
    return [machine.devices for machine in machines]


def _with_share(machine: Devices) -> Devices:
    return Devices(machine.devices, machine.cuda, int(TIGHT * machine.device_bytes), machine.host_bytes)


def _runners_up(ranked: Sequence[Layout], best: Layout, hosts: Hosts) -> Iterator[tuple[Layout, str]]:
    """Yield the best other layout of each number of copies, length and recomputation, the fastest first."""
    kin: dict[tuple[int, int, bool], list[Layout]] = {}
    for each in ranked:
        kin.setdefault(each.kinship, []).append(each)
    del kin[best.kinship]
    for layouts_of in sorted(kin.values(), key=lambda some: some[0].seconds):
        if (layout := hosts.first(layouts_of)) is None:
            lack = hosts.lacks(layouts_of[0])[0]
            why = f"{lack.needs / 1e9:,.1f} GB {lack.where}, and {lack.has / 1e9:,.1f} are free for it"
            yield layouts_of[0], why
        elif layout.seconds >= best.seconds:
            yield layout, layout.loss(best)
        else:
            yield layout, f"{layout.seconds:,.3g} s, and a model that fits on one device is not cut"
