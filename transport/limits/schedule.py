"""Hours of the day by this machine's clock: when a node takes part, and when a rate limit applies (rates.py).

Pure: the time of day is an argument. Hours follow the local clock, also when it is put forward or back.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from dilocox.protocol.errors import ConfigError

__all__ = ["Hours", "Local", "changes_at"]

Local = Callable[[float], datetime]
"""Local time at a number of seconds since 1970."""

DAY_MINUTES = 24 * 60
LONGEST_DAY_MINUTES = 25 * 60
"""That of autumn."""
MINUTE_SECONDS = 60
HOURS = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True)
class Hours:
    """Time from one minute of the day to another; it passes midnight if the second one is smaller."""

    begin: int
    end: int
    """1 … 1440."""

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """22-06, or 22:30-06:15. Raises ConfigError."""
        found = HOURS.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{text!r} are not hours of the day: use 22-06, or 22:30-06:15")
        begin, end = (60 * int(hour) + int(minute or 0) for hour, minute in (found.group(1, 2), found.group(3, 4)))
        if begin >= DAY_MINUTES or end > DAY_MINUTES or any(int(minute or 0) >= 60 for minute in found.group(2, 4)):
            raise ConfigError(f"{text!r} contains an hour outside 00:00 to 24:00")
        if begin == end % DAY_MINUTES and (begin, end) != (0, DAY_MINUTES):
            raise ConfigError(f"{text!r} begins when it ends: remove it for the whole day")
        return cls(begin, end or DAY_MINUTES)

    def hold(self, at: datetime) -> bool:
        """Whether that is within them."""
        minute = 60 * at.hour + at.minute
        inside = self.begin <= minute, minute < self.end
        return all(inside) if self.begin < self.end else any(inside)

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


def changes_at(holds: Callable[[datetime], object], now: float, local: Local = datetime.fromtimestamp) -> float | None:
    """The first whole minute from `now` on (seconds since 1970) at which this is another than now; None: it stays for a day."""
    today = holds(local(now))
    first = MINUTE_SECONDS * (int(now) // MINUTE_SECONDS + 1)
    minutes = range(first, first + MINUTE_SECONDS * LONGEST_DAY_MINUTES, MINUTE_SECONDS)
    return next((float(minute) for minute in minutes if holds(local(minute)) != today), None)
