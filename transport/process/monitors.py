"""Monitors of a daemon's machine and network: a disk that fills, an absent coordinator. Each is reported once it has
lasted, and again only after it was over."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from dilocox.protocol.events import CoordinatorAway, CoordinatorBack, DiskLow, Event

__all__ = ["DISK_SHARE", "LastingCondition", "watch"]

LOOK_SECONDS = 5.0
AWAY_SECONDS = 120.0
"""A restarted coordinator, or a new connection, is back before."""
LOW_SECONDS = 60.0
"""A disk that fills and empties within this time is not reported."""
DISK_SHARE = 0.05
"""A disk with less of it free is low: as in deploy/alerts.yml."""


class LastingCondition:
    """Condition that is checked again and again."""

    def __init__(self, seconds: float) -> None:
        """Watch a condition. `seconds`: how long it must last before it is reported."""
        self._seconds = seconds
        self._since: float | None = None
        self.told = False

    def begins(self, holds: bool, now: float) -> float | None:
        """Return how long it has lasted, at the one time to report it."""
        if not holds:
            self._since, self.told = None, False
            return None
        self._since = now if self._since is None else self._since
        if self.told or now - self._since < self._seconds:
            return None
        self.told = True
        return now - self._since


async def watch(
    folder: Path,
    tell: Callable[[Event], None],
    connected: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
    pause: float = LOOK_SECONDS,
) -> None:
    """Check the machine, for ever. `connected`: whether the coordinator is live."""
    low, away = LastingCondition(LOW_SECONDS), LastingCondition(AWAY_SECONDS)
    while True:
        now, disk = clock(), await asyncio.to_thread(shutil.disk_usage, folder)
        if low.begins(disk.free < DISK_SHARE * disk.total, now) is not None:
            tell(DiskLow(disk.free, str(folder)))
        was_told = away.told
        if (seconds := away.begins(not connected(), now)) is not None:
            tell(CoordinatorAway(seconds))
        if was_told and not away.told:
            tell(CoordinatorBack())
        await asyncio.sleep(pause)
