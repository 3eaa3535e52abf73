"""Tests of hours of the day: over midnight, at changes of the clock, and the bandwidth limit of each hour."""

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol.errors import ConfigError
from dilocox.transport.limits.rate_limits import Rates, bits_per_second, parse_rates
from dilocox.transport.limits.schedule import Hours, changes_at
from dilocox.transport.limits.traffic import Limit, Traffic, kind_of


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-23T{clock}")


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a clock that goes forward at 02:00 on 29 March 2026, and back at 03:00 on 25 October."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("08-22", ["08:00", "21:59:59"], ["07:59:59", "22:00", "00:00"]),
        ("22-06", ["22:00", "23:59:59", "00:00", "05:59:59"], ["06:00", "21:59:59", "12:00"]),
        ("22:30-06:15", ["22:30", "06:14:59"], ["22:29:59", "06:15"]),
        ("0-24", ["00:00", "23:59"], []),
        ("18-24", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("18-0", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("23-1", ["23:00", "00:59"], ["01:00", "22:59"]),
    ],
)
def test_hours_hold_from_their_first_minute_up_to_their_end(text: str, inside: list[str], outside: list[str]):
    hours = Hours.parse(text)
    assert [hours.hold(at(clock)) for clock in inside] == [True] * len(inside)
    assert [hours.hold(at(clock)) for clock in outside] == [False] * len(outside)


@pytest.mark.parametrize("text", ["", "22", "22-", "a-b", "25-06", "22-25", "22:60-06", "22-06-08", "22-22", "24-06", "-1-06"])
def test_what_is_no_hours_is_a_sentence(text: str):
    with pytest.raises(ConfigError):
        Hours.parse(text)


@given(st.integers(0, 1439), st.integers(1, 1440))
def test_hours_are_read_as_they_are_written(begin: int, end: int):
    if begin != end % 1440 or (begin, end) == (0, 1440):
        hours = Hours(begin, end)
        assert Hours.parse(str(hours).replace("-00:00", "-24:00")) == hours


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("hours", "now", "then"),
    [
        ("22-06", "2026-11-23T12:00", "2026-11-23T22:00"),
        ("22-06", "2026-11-23T23:00:30", "2026-11-24T06:00"),
        ("22-06", "2026-03-28T23:00", "2026-03-29T06:00"),  # a night of seven hours
        ("02:30-06", "2026-03-29T01:00", "2026-03-29T03:00"),  # that minute is left out of the day: the first after it
        ("22-02:30", "2026-10-25T01:00", "2026-10-25T02:30"),
    ],
)
def test_the_next_change_is_when_the_clock_on_the_wall_says_so(hours: str, now: str, then: str):
    seconds = datetime.fromisoformat(now).timestamp()
    changes = changes_at(Hours.parse(hours).hold, seconds)
    assert changes is not None
    assert datetime.fromtimestamp(changes) == datetime.fromisoformat(then)


@pytest.mark.usefixtures("berlin")
def test_an_hour_that_the_clock_shows_twice_is_twice():
    hours, minute = Hours.parse("22-02:30"), 60
    midnight = datetime.fromisoformat("2026-10-25T00:00").timestamp()
    changes, now = [], midnight
    while (now := changes_at(hours.hold, now) or 0.0) < midnight + 5 * 3600:
        changes.append(int(now - midnight) // minute)
    assert changes == [150, 180, 210], "until half past two, from two again, until half past two"


def test_what_holds_all_day_does_not_change():
    assert changes_at(Hours.parse("0-24").hold, time.time()) is None


def test_a_rate_by_day_and_another_by_night():
    rates = parse_rates(["20mbit@08-22", "8mbit@22-23", "100mbit"], "--upload")
    assert [rates.bytes_per_second(at(clock)) for clock in ("12:00", "22:30", "03:00")] == [2.5e6, 1e6, 12.5e6]
    assert parse_rates(["20mbit@08-22"], "--upload").bytes_per_second(at("03:00")) is None
    assert parse_rates([], "--upload") == Rates()
    assert bits_per_second("1.5 gbit", "--lan") == 1.5e9


@pytest.mark.parametrize("text", ["fast", "20", "20mbit@", "20mbit@25-26", "100kbit", "-1mbit", "0mbit", "20mbit@08-22@1-2"])
def test_what_is_no_rate_is_a_sentence_that_names_its_option(text: str):
    with pytest.raises(ConfigError) as wrong:
        parse_rates([text], "--upload")
    assert "--upload" in str(wrong.value) or "hour" in str(wrong.value)


def test_two_rates_for_the_same_hours_are_none():
    with pytest.raises(ConfigError, match="twice"):
        parse_rates(["1mbit", "2mbit"], "--upload")


async def test_a_line_carries_what_the_hour_lets_it():
    now = [datetime(2026, 11, 23, 12).timestamp()]
    limit = Limit(parse_rates(["1mbit@08-22"], "--upload"), clock=lambda: now[0])
    assert (limit.now().bytes_per_second, datetime.fromtimestamp(limit.now().until or 0)) == (125e3, datetime(2026, 11, 23, 22))
    assert await limit.spend(1250) == pytest.approx(0.01, rel=0.5)
    now[0] += 10 * 3600
    assert limit.now().bytes_per_second is None
    assert await limit.spend(1 << 30) == 0.0


async def test_who_sends_much_at_once_lets_others_in_between():
    limit = Limit(parse_rates(["80mbit"], "--upload"))
    large = asyncio.create_task(limit.spend(1 << 40))  # a day and more
    await asyncio.sleep(0)
    await limit.spend(1000)
    assert not large.done()
    large.cancel()


def test_bytes_are_told_by_what_they_were_and_by_round():
    traffic = Traffic()
    assert kind_of("/dilocox.v1.Peer/Fetch") == "blob"
    assert kind_of("/dilocox.v1.Coordinator/Submit") == "coordination"
    assert kind_of("/dilocox.v1.Lead/Follow") == "cluster"
    send = traffic.counting("sent", "/dilocox.v1.Peer/Push", lambda text: text.encode())
    send("before")
    traffic.closed(3)
    assert traffic.last_round is None, "it was not here from the beginning of round 3"
    send("four")
    traffic.counting("received", "/dilocox.v1.Coordinator/Watch", lambda raw: raw)(b"12")
    traffic.closed(4)
    assert traffic.last_round == (4, 4, 2)
    assert (traffic.of("sent"), traffic.of("received")) == ({"blob": 10}, {"coordination": 2})
    traffic.closed(6)
    assert traffic.last_round == (4, 4, 2), "rounds 5 and 6 are not told apart"
