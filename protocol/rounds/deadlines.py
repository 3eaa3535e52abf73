"""Deadlines for contributions and votes, learned from the last rounds, within the manifest's bounds."""

import statistics
from collections.abc import Sequence

from dilocox.protocol.consensus.head import Head
from dilocox.protocol.run.manifest import Manifest

__all__ = ["DEADLINE_FLOOR_SECONDS", "deadline_seconds", "full_deadline", "vote_seconds"]

DEADLINE_SPREADS = 8.0
"""A round is late after median + this many median absolute deviations of the last rounds …"""
DEADLINE_SLACK = 2.0
"""Lower bound of a deadline, as a multiple of the median: short rounds have tiny deviations."""
DEADLINE_FLOOR_SECONDS = 10.0
"""Below this a deadline would measure the scheduler, not the peers."""
DEADLINE_PATIENCE = 4.0
"""Factor of the deadline while less than half of the roster has contributed: a round that is slow for all should not leave
most clusters behind."""


def deadline_seconds(history: Sequence[float], upper_bound: float) -> float:
    """Return the deadline after durations of `history` seconds: median + k·MAD, within bounds."""
    if not history:
        return upper_bound
    median = statistics.median(history)
    spread = statistics.median(abs(value - median) for value in history)
    wanted = max(median + DEADLINE_SPREADS * spread, DEADLINE_SLACK * median, DEADLINE_FLOOR_SECONDS)
    return min(wanted, upper_bound)


def vote_seconds(head: Head, manifest: Manifest) -> float:
    """Return the seconds for voting; the ballot contains them."""
    return deadline_seconds([ms / 1000 for ms in head.vote_history], manifest.rounds.vote_seconds)


def full_deadline(head: Head, manifest: Manifest) -> float:
    """Return the seconds for a round that is much slower than usual: every machine may be busy."""
    upper = manifest.rounds.deadline_seconds
    return min(upper, DEADLINE_PATIENCE * deadline_seconds([ms / 1000 for ms in head.collect_history], upper))
