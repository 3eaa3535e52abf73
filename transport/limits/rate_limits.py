"""Rate limits by the hours of the day. Pure: the time of day is an argument."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from dilocox.protocol.errors import ConfigError
from dilocox.transport.limits.schedule import Hours

__all__ = ["SLOWEST_DOWNLOAD_BITS_PER_SECOND", "Rates", "bits_per_second", "parse_rates"]

RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(kbit|mbit|gbit|)")
UNITS_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
"""Per second."""
FASTEST_BITS_PER_SECOND = 1e15
"""No line is: the number has digits too many."""
SLOWEST_BITS_PER_SECOND = 250e3
"""Lowest upload limit: with less, no payload arrives within a round."""
SLOWEST_DOWNLOAD_BITS_PER_SECOND = 1e6
"""Lowest download limit. Downloads share it, and a server ends a stream that is too slow."""


@dataclass(frozen=True)
class Rates:
    """Rate limits of one direction."""

    timed_bytes_per_second: tuple[tuple[Hours, float], ...] = ()
    """Limits by hours; the first one whose hours apply counts."""
    usual_bytes_per_second: float | None = None
    """Limit at all other hours; None: no limit."""

    def bytes_per_second(self, now: datetime) -> float | None:
        return next((rate for hours, rate in self.timed_bytes_per_second if hours.hold(now)), self.usual_bytes_per_second)


def bits_per_second(text: str, option: str) -> float:
    """Return the bandwidth of an option's value. Raises ConfigError."""
    found = RATE.fullmatch(text.strip().lower())
    bits = float(found[1]) * UNITS_BITS[found[2]] if found is not None else 0.0
    if not 0 < bits <= FASTEST_BITS_PER_SECOND:
        raise ConfigError(f"{option} {text}: use a number and kbit, mbit or gbit, such as 20mbit")
    return bits


def parse_rates(texts: Iterable[str], option: str, slowest_bits_per_second: float = SLOWEST_BITS_PER_SECOND) -> Rates:
    """Return the limits of a repeated option: 20mbit, or 20mbit@08-22. Raises ConfigError."""
    timed: list[tuple[Hours, float]] = []
    usual: float | None = None
    for text in texts:
        rate, at, hours = text.partition("@")
        bits = bits_per_second(rate, option)
        if bits < slowest_bits_per_second:
            raise ConfigError(
                f"{option} {text}: below {slowest_bits_per_second / 1e3:.0f}kbit no payload arrives in time. Run "
                "`dilocox pause` to stop all traffic."
            )
        if at:
            timed.append((Hours.parse(hours), bits / 8))
        elif usual is not None:
            raise ConfigError(f"{option} is set twice without hours: add hours to one, such as {text}@08-22")
        else:
            usual = bits / 8
    return Rates(tuple(timed), usual)
