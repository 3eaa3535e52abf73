"""Honest clusters that are slower than the others, or faster: does a committee tell less work, or more, from harm?

Rounds are bounded by time. All but two clusters have time for HORIZON inner steps, one for two fifths of them, one for a fifth; or
all but one, which has time for three times as many.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.lab import Lab, process_group_of_one
from bench.poison.design import ARRIVAL, HORIZON, Cell
from dilocox.protocol.manifest import Manifest

__all__ = ["FASTER", "SLOWER", "Slow", "slow_boxes"]

SLOWER, FASTER = (0.4, 0.2), (3.0,)
"""Speeds of those who differ, over the others'."""


@dataclass(frozen=True)
class Slow:
    """Of the clusters of one speed, over a run."""

    speed: float
    contributions: int
    refused: int
    scores: int
    against: int


def slow_boxes(cell: Cell, differ: Sequence[float] = SLOWER) -> list[Slow]:
    process_group_of_one()
    run = cell.manifest().model_dump(mode="json")
    run["rounds"] |= {"round_seconds": float(HORIZON), "deadline_seconds": 60.0 * HORIZON}
    speeds = [1.0] * (cell.clusters - len(differ)) + list(differ)
    lab = Lab(
        Manifest.model_validate(run), cell.clusters, ARRIVAL, evaluate_every=cell.steps, data=cell.text.folder, speeds=speeds
    )
    lab.rounds()
    of = dict(zip((member.state.cluster for member in lab.members), speeds, strict=True))
    refused, judged = (Counter(of[name] for _, name in said) for said in (lab.harmful, lab.judged))
    scores = Counter(of[each.author] for each in lab.committee.measured)
    against = Counter(of[each.author] for each in lab.committee.measured if each.harmful)
    return [
        Slow(speed, judged[speed], refused[speed], scores[speed], against[speed]) for speed in sorted(set(speeds), reverse=True)
    ]
