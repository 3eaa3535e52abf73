"""Hours of the day by this machine's clock, and what holds in them: when a node takes part, how much a line may carry.

Pure: the time of day is an argument. Hours are what the clock on the wall says: where it is put forward or back, they begin and end
with it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from dilocox.protocol.errors import ConfigError

__all__ = ["SLOWEST_DOWNLOAD", "Hours", "Local", "Rates", "bits_per_second", "changes_at", "parse_rates"]

Local = Callable[[float], datetime]
"""What the clock on the wall says at a time, in seconds since 1970."""

DAY = 24 * 60
"""Minutes."""
MINUTE = 60
"""Seconds."""
LONGEST_DAY = 25 * 60
"""Minutes: that of autumn."""
HOURS = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")
RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(kbit|mbit|gbit|)")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
"""Bits per second."""
SLOWEST = 250e3
"""Bits per second: over less no payload arrives within a round …"""
SLOWEST_DOWNLOAD = 1e6
"""… and downloads share what they have: who serves one ends a stream that takes too little."""


@dataclass(frozen=True)
class Hours:
    """From one minute of the day up to another; over midnight where that is the smaller one."""

    begin: int
    end: int
    """1 … 1440."""

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """22-06, or 22:30-06:15. Raises ConfigError."""
        found = HOURS.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"{text!r} names no hours of the day: write them like 22-06, or 22:30-06:15")
        begin, end = (60 * int(hour) + int(minute or 0) for hour, minute in (found.group(1, 2), found.group(3, 4)))
        if begin >= DAY or end > DAY or any(int(minute or 0) >= 60 for minute in found.group(2, 4)):
            raise ConfigError(f"{text!r} names an hour that no day has: they go from 00:00 to 24:00")
        if begin == end % DAY and (begin, end) != (0, DAY):
            raise ConfigError(f"{text!r} begins when it ends: leave it out for the whole day")
        return cls(begin, end or DAY)

    def hold(self, at: datetime) -> bool:
        """Whether that is within them."""
        minute = 60 * at.hour + at.minute
        inside = self.begin <= minute, minute < self.end
        return all(inside) if self.begin < self.end else any(inside)

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.begin, self.end))


@dataclass(frozen=True)
class Rates:
    """How much a line may carry, in bytes per second."""

    timed: tuple[tuple[Hours, float], ...] = ()
    """The first whose hours it is holds …"""
    usual: float | None = None
    """… else this; None: no limit."""

    def at(self, now: datetime) -> float | None:
        return next((rate for hours, rate in self.timed if hours.hold(now)), self.usual)


def bits_per_second(text: str, option: str) -> float:
    """Of a line, as an option says it. Raises ConfigError."""
    found = RATE.fullmatch(text.strip().lower())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"{option} {text}: a number and kbit, mbit or gbit, such as 20mbit")
    return float(found[1]) * UNITS[found[2]]


def parse_rates(texts: Iterable[str], option: str, slowest: float = SLOWEST) -> Rates:
    """Of an option that is said several times: 20mbit, or 20mbit@08-22. `slowest`: bits per second. Raises ConfigError."""
    timed: list[tuple[Hours, float]] = []
    usual: float | None = None
    for text in texts:
        rate, at, hours = text.partition("@")
        bits = bits_per_second(rate, option)
        if bits < slowest:
            raise ConfigError(
                f"{option} {text}: under {slowest / 1e3:.0f}kbit no payload arrives in time. `dilocox pause` stops all."
            )
        if at:
            timed.append((Hours.parse(hours), bits / 8))
        elif usual is not None:
            raise ConfigError(f"{option} is said twice without hours: add them to one, such as {text}@08-22")
        else:
            usual = bits / 8
    return Rates(tuple(timed), usual)


def changes_at(holds: Callable[[datetime], object], now: float, local: Local = datetime.fromtimestamp) -> float | None:
    """The first whole minute from `now` on (seconds since 1970) at which this is another than now; None: it stays for a day."""
    today = holds(local(now))
    first = MINUTE * (int(now) // MINUTE + 1)
    minutes = range(first, first + MINUTE * LONGEST_DAY, MINUTE)
    return next((float(minute) for minute in minutes if holds(local(minute)) != today), None)
