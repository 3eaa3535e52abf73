"""How compression and H follow what is measured: decided once a round, from signed contributions, the same for everybody.

    effective-rank   DiLoCoX's rule as far as it is known: the rank is the mean over a window of rounds of the effective rank of the
                     averaged pseudo-gradient. What every cluster measures of the last commit's mean goes into its contribution;
                     the median of these moves the rank by 1 / rank_window of the way
    error-budget     the relative error is above the budget: keep more; below: keep less

Published summaries disagree on whether rank rises or falls in training, so both rules go either way. A step is at most STEP up or
down; measurements that are missing or absurd hold everything where it is. H follows in proportion, so that the exchange stays as
hidden as it was: half the rank earns half the steps.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from dilocox.protocol import limits
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["next_inner_steps", "next_rank_or_k"]

STEP = 1.25
"""Largest change of rank or k from one round to the next, as a factor."""
SLACK = 1e-3
"""Measurements travel as float32: what is at its goal stays."""
LARGEST_ERROR = 2.0
"""Relative errors above this are absurd: sending nothing has 1."""


def next_rank_or_k(manifest: Manifest, keep: int, counted: Sequence[pb.Contribution]) -> int:
    """Of the next round, from this round's and its counted contributions."""
    settings = manifest.compression
    if settings.adapt == "fixed" or not counted:
        return keep
    if settings.adapt == "effective-rank":
        measured = _median((item.effective_rank for item in counted), largest=float(keep * limits.CLUSTERS))
        wanted = None if measured is None else 1 + (measured / keep - 1) / settings.rank_window
    else:
        measured = _median((item.error for item in counted), largest=LARGEST_ERROR)
        wanted = None if measured is None else (measured / settings.error_budget) ** 2
    if wanted is None:
        return keep
    moved = keep * min(STEP, max(1 / STEP, wanted))
    toward = math.ceil(moved - SLACK) if moved > keep else math.floor(moved + SLACK)  # a small rank must be able to move at all
    return min(settings.largest_keep, max(settings.min_keep, toward))


def _median(values: Iterable[float], largest: float) -> float | None:
    """Of positive, plausible values; None when a majority is missing or absurd."""
    found = list(values)
    good = [value for value in found if 0 < value <= largest]
    return statistics.median(good) if 2 * len(good) > len(found) else None


def next_inner_steps(manifest: Manifest, round: int, keep: int) -> int:
    """H of `round`, whose codec keeps `keep`."""
    rounds, steps = manifest.rounds, manifest.inner_steps(round)
    if rounds.min_inner_steps is None or not manifest.compression.keep or round <= rounds.synchronous_rounds:
        return steps
    wanted = steps * keep // manifest.compression.keep
    return min(rounds.max_inner_steps, max(rounds.min_inner_steps, wanted))
