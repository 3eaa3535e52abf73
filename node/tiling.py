"""How a box's workers share out a run: pipelines over its stages, and copies of such a pipeline. Free of torch."""

import itertools
from collections.abc import Sequence

__all__ = ["split_stages", "tile"]


def tile(workers: int, stages: int, microbatches: int) -> tuple[int, int]:
    """(workers of a pipeline, copies of it) that use the most of so many workers, and of these the longest pipeline: it needs the
    least memory of each. torch's 1F1B schedule needs at least one microbatch per worker; copies share them out evenly."""
    tilings = [
        (length, copies)
        for length in range(1, min(workers, stages, microbatches) + 1)
        for copies in range(1, workers // length + 1)
        if microbatches % copies == 0 and microbatches // copies >= length
    ]
    return max(tilings, key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))


def split_stages(stages: Sequence[int], workers: int) -> list[list[int]]:
    """Contiguous, as even as possible; the first workers of a pipeline get the longer shares."""
    size, extra = divmod(len(stages), workers)
    cuts = [rank * size + min(rank, extra) for rank in range(workers + 1)]
    return [list(stages[start:end]) for start, end in itertools.pairwise(cuts)]
