"""How a cluster's workers share out a run: pipelines over its boxes, and copies of such a pipeline. Free of torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Tiling", "split_stages", "tile"]


@dataclass(frozen=True)
class Tiling:
    """A box holds a stretch of the pipeline, and every copy of that stretch: activations cross between boxes, gradients do not."""

    lengths: tuple[int, ...]
    """Of each box's stretch, in workers; 0: the box has nothing to do."""
    copies: int

    @property
    def length(self) -> int:
        """Workers of a pipeline."""
        return sum(self.lengths)

    @property
    def workers(self) -> int:
        return self.length * self.copies

    def ranks(self, box: int) -> list[int]:
        """Of the workers in a box, copy after copy. A pipeline's workers follow one another."""
        first = sum(self.lengths[:box])
        stretch = range(first, first + self.lengths[box])
        return [copy * self.length + number for copy in range(self.copies) for number in stretch]

    def stages(self, box: int, stages: int) -> list[int]:
        """That a box hosts of the run's."""
        first = sum(self.lengths[:box])
        shares = split_stages(range(stages), self.length)[first : first + self.lengths[box]]
        return list(itertools.chain.from_iterable(shares))


def tile(devices: Sequence[int], stages: int, microbatches: int) -> Tiling:
    """Uses the most of so many devices, box by box, and of equals the longest pipeline: it needs the least memory of each. torch's
    1F1B schedule needs at least one microbatch per worker; copies share them out evenly."""
    tilings = []
    for copies in range(1, devices[0] + 1):  # the first box, the lead, hosts some of every cluster
        room = [count // copies for count in devices]
        length = min(sum(room), stages, microbatches // copies)
        if length and microbatches % copies == 0:
            tilings.append(Tiling(_poured(room, length), copies))
    return max(tilings, key=lambda tiling: (tiling.workers, tiling.length))


def _poured(room: Sequence[int], length: int) -> tuple[int, ...]:
    """So many workers into boxes with that much room, as evenly as it allows, the first boxes first."""
    lengths = [0] * len(room)
    while length:
        for box in range(len(room)):
            if length and lengths[box] < room[box]:
                lengths[box] += 1
                length -= 1
    return tuple(lengths)


def split_stages(stages: Sequence[int], workers: int) -> list[list[int]]:
    """Contiguous, as even as possible; the first workers of a pipeline get the longer shares."""
    size, extra = divmod(len(stages), workers)
    cuts = [rank * size + min(rank, extra) for rank in range(workers + 1)]
    return [list(stages[start:end]) for start, end in itertools.pairwise(cuts)]
