"""Rank of the next round. A commit decides it from signed contributions, so every peer computes the same rank.

    effective-rank   DiLoCoX's rule as far as it is known: the rank is the mean over RANK_WINDOW rounds of the effective rank of the
                     averaged pseudo-gradient. Each cluster measures the last commit's mean and reports it in its contribution;
                     the median of these moves the rank by 1 / RANK_WINDOW of the way

Published summaries disagree on whether the rank rises or falls in training, so the rule allows both. A step is at most
STEP up or down. Missing or implausible measurements leave the rank as it is.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest

__all__ = ["next_rank_or_k"]

STEP = 1.25
"""Largest change of the rank from one round to the next, as a factor."""
RANK_WINDOW = 5
"""Rounds over which the effective rank is averaged: long enough that one round's noise moves no rank far."""
SLACK = 1e-3
"""Measurements travel as float32: what is at its goal stays."""


def next_rank_or_k(manifest: Manifest, keep: int, counted: Sequence[pb.Contribution]) -> int:
    """Return the rank or k of the next round, from this round's and its counted contributions."""
    if manifest.compression.adapt == "fixed" or not counted:
        return keep
    measured = _median((item.effective_rank for item in counted), largest=float(keep * limits.CLUSTERS))
    if measured is None:
        return keep
    moved = keep * min(STEP, max(1 / STEP, 1 + (measured / keep - 1) / RANK_WINDOW))
    toward = math.ceil(moved - SLACK) if moved > keep else math.floor(moved + SLACK)  # a small rank must be able to move at all
    return min(limits.RANK, max(1, toward))


def _median(values: Iterable[float], largest: float) -> float | None:
    """Return the median of positive, plausible values; None if a majority is missing or implausible."""
    found = list(values)
    good = [value for value in found if 0 < value <= largest]
    return statistics.median(good) if 2 * len(good) > len(found) else None
