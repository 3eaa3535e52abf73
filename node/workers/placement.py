"""Placement of a run's stages on a cluster's workers: pipelines over its hosts, and copies of such a pipeline. Imports no
torch. `dilocox.node.planning.layouts` chooses one."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dilocox.protocol import limits
from dilocox.protocol.run.manifest import Manifest, Schedule

__all__ = ["Placement", "chunks", "listed", "placed", "placements", "stretches"]


@dataclass(frozen=True)
class Placement:
    """Placement: a host runs a part of the pipeline, and every copy of it. Activations cross between hosts, gradients do
    not."""

    lengths: tuple[int, ...]
    """Workers of each host's part; 0: the host has no work."""
    copies: int
    schedule: Schedule
    microbatches: int
    """Microbatches of an inner step, of all copies."""
    recompute: bool = False
    """True if activations are computed again for the backward pass."""

    @property
    def length(self) -> int:
        """Workers of a pipeline."""
        return sum(self.lengths)

    @property
    def workers(self) -> int:
        return self.length * self.copies

    @property
    def each(self) -> int:
        """Microbatches of a copy."""
        return self.microbatches // self.copies

    def turns(self, stages: int) -> int:
        """Return the chunks of the model on each worker."""
        return _turns(self.length, stages, self.schedule)

    def ranks(self, box: int) -> list[int]:
        """Return the ranks of a host's workers, copy after copy. A pipeline's workers have consecutive ranks."""
        first = sum(self.lengths[:box])
        stretch = range(first, first + self.lengths[box])
        return [copy * self.length + number for copy in range(self.copies) for number in stretch]

    def stages(self, box: int, stages: int) -> list[int]:
        """Return the stages on a host, in order."""
        first = sum(self.lengths[:box])
        shares = chunks(stages, self.length, self.schedule)[first : first + self.lengths[box]]
        return sorted(stage for share in shares for chunk in share for stage in chunk)


def placed(manifest: Manifest, microbatches: int = 1, recompute: bool = False) -> Manifest:
    """Return the manifest as a cluster trains it: with these choices, unless the run fixes them. The run id stays."""
    if manifest.training.microbatches:
        return manifest
    chosen = {"microbatches": microbatches, "checkpoint_activations": recompute}
    assert manifest.run_id  # computed before the copy, which inherits it
    return manifest.model_copy(update={"training": manifest.training.model_copy(update=chosen)})


def placements(devices: Sequence[int], manifest: Manifest) -> Iterator[Placement]:
    """Yield the placements on hosts with so many devices: each number of copies, length of the pipeline, microbatch and
    recomputation that the run and its schedule allow. Copies share the batch evenly, and the lead host has a part."""
    training, stages = manifest.training, manifest.model.stages
    counts = [training.microbatches] if training.microbatches else _divisors(training.batch_size)
    recomputes = [training.checkpoint_activations] if training.microbatches else [False, True]
    for copies in range(1, min(devices[0], training.batch_size) + 1):
        room = [count // copies for count in devices]
        for microbatches in (count for count in counts if count % copies == 0):
            each = microbatches // copies
            for length in range(1, min(sum(room), stages, each) + 1):
                if _runs(length, stages, each, training.schedule):
                    for recompute in recomputes:
                        yield Placement(_poured(room, length), copies, training.schedule, microbatches, recompute)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


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
