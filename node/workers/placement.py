"""Placement of a run's stages on a cluster's workers: pipelines over its hosts, and copies of such a pipeline. Imports no
torch."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dilocox.protocol import limits
from dilocox.protocol.run.manifest import Schedule

__all__ = ["Placement", "chunks", "listed", "stretches", "tile", "tilings"]


@dataclass(frozen=True)
class Placement:
    """Placement: a host runs a part of the pipeline, and every copy of it. Activations cross between hosts, gradients do
    not."""

    lengths: tuple[int, ...]
    """Workers of each host's part; 0: the host has no work."""
    copies: int
    schedule: Schedule

    @property
    def length(self) -> int:
        """Workers of a pipeline."""
        return sum(self.lengths)

    @property
    def workers(self) -> int:
        return self.length * self.copies

    def ranks(self, box: int) -> list[int]:
        """Return the ranks of a host's workers, copy after copy. A pipeline's workers have consecutive ranks."""
        first = sum(self.lengths[:box])
        stretch = range(first, first + self.lengths[box])
        return [copy * self.length + number for copy in range(self.copies) for number in stretch]

    def stages(self, box: int, stages: int) -> list[int]:
        """That a box hosts of the run's, in order."""
        first = sum(self.lengths[:box])
        shares = chunks(stages, self.length, self.schedule)[first : first + self.lengths[box]]
        return sorted(stage for share in shares for chunk in share for stage in chunk)


def tile(devices: Sequence[int], stages: int, microbatches: int, schedule: Schedule) -> Placement:
    """The best of `tilings`."""
    return tilings(devices, stages, microbatches, schedule)[0]


def tilings(devices: Sequence[int], stages: int, microbatches: int, schedule: Schedule) -> list[Placement]:
    """First those that use the most of so many devices, box by box, and of equals those of the longest pipeline, which needs the
    least memory of each. Copies share out the microbatches evenly."""
    found = []
    for copies in range(1, devices[0] + 1):  # the first box, the lead, hosts some of every cluster
        room = [count // copies for count in devices]
        if microbatches % copies == 0:
            each = microbatches // copies
            lengths = range(1, min(sum(room), stages, each) + 1)
            length = max(length for length in lengths if _runs(length, stages, each, schedule))
            found.append(Placement(_poured(room, length), copies, schedule))
    return sorted(found, key=lambda tiling: (tiling.workers, tiling.length), reverse=True)


def _runs(workers: int, stages: int, microbatches: int, schedule: Schedule) -> bool:
    """Whether a schedule wants a pipeline of so many: torch's need a microbatch for each worker; looped ones also two chunks for
    each, and as many microbatches in every round of about one per worker."""
    if workers == 1 or schedule == "1f1b":
        return microbatches >= workers
    return _turns(workers, stages, schedule) > 1 and microbatches >= workers and microbatches % (microbatches // workers) == 0


def _poured(room: Sequence[int], length: int) -> tuple[int, ...]:
    """Distribute workers over hosts with that much space, as evenly as possible, the first hosts first."""
    lengths = [0] * len(room)
    while length:
        for box in range(len(room)):
            if length and lengths[box] < room[box]:
                lengths[box] += 1
                length -= 1
    return tuple(lengths)


def _turns(workers: int, stages: int, schedule: Schedule) -> int:
    """Return the chunks of the model per worker of a pipeline: a looped schedule has as many as the stages and a cluster's
    layout allow, which names a host once per chunk."""
    return 1 if workers == 1 or schedule == "1f1b" else min(stages, limits.HOSTS) // workers


def chunks(stages: int, workers: int, schedule: Schedule) -> list[list[list[int]]]:
    """Return the chunks by worker of a pipeline, each of consecutive stages. Worker r of p has the chunks r, r + p, r +
    2p, …; all are as even as possible, the first ones longer."""
    count = workers * _turns(workers, stages, schedule)
    size, extra = divmod(stages, count)
    cuts = [number * size + min(number, extra) for number in range(count + 1)]
    parts = [list(range(start, end)) for start, end in itertools.pairwise(cuts)]
    return [parts[worker::workers] for worker in range(workers)]


def stretches(stages: Iterable[int]) -> list[range]:
    """Stages in order, by those that follow one another."""
    found: list[range] = []
    for stage in stages:
        if found and found[-1].stop == stage:
            found[-1] = range(found[-1].start, stage + 1)
        else:
            found.append(range(stage, stage + 1))
    return found


def listed(stages: Iterable[int]) -> str:
    """Return a readable list: "0-3, 8-11"; a dash if it is empty."""
    return ", ".join(f"{part.start}-{part.stop - 1}" for part in stretches(stages)) or "–"
