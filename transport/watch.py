"""What a daemon looks at of its machine and its line while it runs, and tells when it goes on for a while: a disk that fills, a
coordinator that is not heard. Told once; again when it was over in between."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from dilocox.protocol.events import CoordinatorAway, CoordinatorBack, DiskLow, Event

__all__ = ["DISK_SHARE", "Lasting", "watch"]

LOOK_SECONDS = 5.0
AWAY_SECONDS = 120.0
"""A coordinator that restarts, or a line that is dialled anew, is back before."""
LOW_SECONDS = 60.0
"""What fills and empties a disk within this is no news."""
DISK_SHARE = 0.05
"""A disk with less of it free is low: as in deploy/alerts.yml."""


class Lasting:
    """Something that either holds or does not, looked at again and again."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: so long it must hold before it is told."""
        self._seconds = seconds
        self._since: float | None = None
        self.told = False

    def begins(self, holds: bool, now: float) -> float | None:
        """How long it holds, when that is to be told: once."""
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
    """For ever. `connected`: whether the coordinator is heard."""
    low, away = Lasting(LOW_SECONDS), Lasting(AWAY_SECONDS)
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
