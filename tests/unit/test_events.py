"""Tests of the event log: it survives restarts and damage, is ordered and bounded, and continues from a reader's last
event."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.protocol import events, limits
from dilocox.protocol.errors import LocalError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.transport.store import event_log
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog, read_events
from dilocox.views.api_listener import ApiListener
from dilocox.views.http import add_run_routes, create_app
from tests.helpers import PATIENCE_SECONDS, Told, identity, manifest, no_status, until


def said(number: int) -> events.StateChanged:
    return events.StateChanged("training", f"number {number}")


def kept(log: EventLog) -> list[tuple[int, str]]:
    return [(each.id, each.body["why"]) for each in log.read(0)]


def another_life(path: Path) -> EventLog:
    """Open the log as after `kill -9`, when it closed nothing."""
    return EventLog(path)


async def test_numbers_go_on_over_restarts(tmp_path: Path):
    path = tmp_path / "events.db"
    for number in range(3):
        log = another_life(path)
        log.add(said(number))
        assert len(log.read(0)) == number, "nobody reads what is not on disk"
        log.flush()
    assert kept(log) == [(1, "number 0"), (2, "number 1"), (3, "number 2")]
    assert [each.id for each in read_events(path, 1)] == [2, 3]
    assert log.read(0, round=7) == []
    log.add(events.LeftOut(7))
    log.flush()
    assert [each.id for each in log.read(0, round=7)] == [4]


async def test_the_oldest_go_and_numbers_are_not_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "EVENTS", 3)
    path = tmp_path / "events.db"
    log = EventLog(path)
    for number in range(5):
        log.add(said(number))
        log.flush()
    assert [id for id, _ in kept(log)] == [3, 4, 5]
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM events")
    log = another_life(path)
    log.add(said(9))
    log.flush()
    assert kept(log) == [(6, "number 9")]


@pytest.mark.parametrize("damage", ["garbage", "text", "count"])
async def test_a_damaged_log_is_set_aside_and_numbers_stay_above(tmp_path: Path, damage: str):
    path = tmp_path / "events.db"
    log = EventLog(path)
    for number in range(3):
        log.add(said(number))
    log.close()
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 1000)
    else:
        with sqlite3.connect(path) as database:
            wrong = {"text": "UPDATE events SET body = 7", "count": "UPDATE sqlite_sequence SET seq = 'many'"}
            database.execute(wrong[damage])
            if damage == "text":
                database.execute("UPDATE events SET body = x'00'")
    log = EventLog(path)
    assert (tmp_path / "events.db.bad").exists()
    log.add(said(3))
    log.flush()
    ((number, why),) = kept(log)
    assert (number > 1e12, why) == (True, "number 3")


async def test_what_is_no_event_is_a_sentence(tmp_path: Path):
    path = tmp_path / "events.db"
    log = EventLog(path)
    log.add(said(0))
    log.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE events SET body = '{'")
    with pytest.raises(LocalError, match="not an event"):
        list(read_events(path))


CHILD = """
import asyncio, sys
from pathlib import Path
from dilocox.protocol.events import StateChanged
from dilocox.transport.store.event_log import EventLog

async def main():
    log = EventLog(Path(sys.argv[1]))
    writing = asyncio.create_task(log.run())
    after = log.newest
    async for page in log.follow(after):
        for each in page:
            print(each.id, flush=True)
        for _ in range(100):
            log.add(StateChanged("training", "x" * 50))

asyncio.run(main())
"""


def test_what_was_told_survives_kill_9(tmp_path: Path):
    path, told = tmp_path / "events.db", [0]
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-P", "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        first = int(child.stdout.readline())
        assert first > told[-1]
        told += [first, *(int(child.stdout.readline()) for _ in range(500))]
        child.kill()
        told += [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        on_disk = [each.id for each in read_events(path)]
        assert on_disk == sorted(set(on_disk))
        assert set(told) - {0} <= set(on_disk), "told, and lost"
        told = on_disk


async def test_a_failing_disk_ends_the_writer(tmp_path: Path):
    """Check it, so that the daemon waits for space as for every other write."""
    log = EventLog(tmp_path / "events.db")
    with sqlite3.connect(log.path) as database:
        database.execute("DROP TABLE events")
    log.add(said(0))
    with pytest.raises(sqlite3.Error):
        await log.run()


async def test_long_words_are_cut(tmp_path: Path):
    log = EventLog(tmp_path / "events.db")
    log.add(events.WorkersEnded("x" * 10_000))
    log.flush()
    assert all(len(text) <= limits.EVENT_CHARACTERS for text in log.read(0)[0].body.values())


@pytest.fixture
async def served(tmp_path: Path):
    log, chain = EventLog(tmp_path / "events.db"), ChainFile(tmp_path / "chain.db", manifest())
    writing = asyncio.create_task(log.run())

    async def nobody():
        return []

    application = create_app(CollectorRegistry(), no_status)
    add_run_routes(application, chain, nobody, log)
    door = ApiListener("127.0.0.1:0")
    await door.show(application)
    yield log, door.url
    await door.close()
    writing.cancel()
    log.close()
    chain.close()


async def numbers(response: aiohttp.ClientResponse, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        async with asyncio.timeout(PATIENCE_SECONDS):
            line = (await response.content.readline()).decode()
        assert line, "the stream ended"
        if line.startswith("data: "):
            found.append(json.loads(line.removeprefix("data: "))["id"])
    return found


async def test_a_stream_goes_on_where_it_stopped(served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_log, "QUIET_SECONDS", 10 * PATIENCE_SECONDS)  # a waiting reader is woken
    log, url = served
    for number in range(3):
        log.add(said(number))
    await until(lambda: log.newest == 3)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/events") as response:
            assert await numbers(response, 3) == [1, 2, 3]
            log.add(said(3))
            assert await numbers(response, 1) == [4]
        async with session.get(f"{url}/v1/events", headers={"Last-Event-ID": "2"}) as response:
            assert await numbers(response, 2) == [3, 4]
        async with session.get(f"{url}/v1/events?after=3&follow=no") as response:
            assert [json.loads(line[6:])["why"] for line in (await response.text()).splitlines() if line[:5] == "data:"] == [
                "number 3"
            ]
        async with session.get(f"{url}/v1/events?after=999&follow=no") as response:
            assert (await response.text()).count("data: ") == 4, "its numbers are of a file that is gone"
        for wrong in ("x", "-1", "9" * 30, "²"):
            async with session.get(f"{url}/v1/events", params={"after": wrong}) as response:
                assert response.status == 400


async def test_streams_are_bounded_and_readers_may_go(
    served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    log, url = served
    monkeypatch.setattr(limits, "EVENT_STREAMS", 1)
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/events"), session.get(f"{url}/v1/events") as second:
        assert (second.status, (await second.json())["code"]) == (503, "too-many-readers")

    async def is_served() -> bool:
        log.add(said(0))  # a server notices only at a send that its reader is absent
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/events?follow=no") as third:
            return third.status == 200

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await is_served():
            await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_verb_reads_a_folder(tmp_path: Path):
    folder = tmp_path / "runs" / "ab"
    folder.mkdir(parents=True)
    log = EventLog(folder / "events.db")
    log.add(events.StateChanged("training", "a\x1b[31mred"))
    log.add(said(1))
    log.close()
    shown = CliRunner().invoke(app, ["events", "--home", str(tmp_path)])
    assert shown.exit_code == 0
    assert "training: a [31mred" in shown.stdout
    told = CliRunner().invoke(app, ["events", "--home", str(tmp_path), "--since", "1", "--json"])
    assert [json.loads(line)["why"] for line in told.stdout.splitlines()] == ["number 1"]
    beyond = CliRunner().invoke(app, ["events", "--home", str(tmp_path), "--since", "99"])
    assert (beyond.stdout, beyond.exit_code) == ("", 0)
    assert "no event after 99" in beyond.stderr
    assert CliRunner().invoke(app, ["events", "-f", "--home", str(tmp_path)]).exit_code == 3
    assert CliRunner().invoke(app, ["events", "--home", str(tmp_path / "runs")]).exit_code == 2


def test_a_coordinator_tells_who_came_last_and_who_was_not_counted():
    table = Told(manifest())
    for number in range(3):
        table.feed(round_machine.Received(table.claim(number)))
    assert table.kinds() == ["claimed", "claimed", "round-closed", "roster-changed"]  # the third claim closes the round
    table.feed(round_machine.Absent(identity(2).peer))
    table.feed(round_machine.Present(identity(2).peer))
    assert table.kinds() == ["not-heard", "heard"]
    for number in range(3):
        table.now += 2.0
        table.feed(round_machine.Received(table.contribution(number)))
    (ballot,) = [event for event in table.told if isinstance(event, events.BallotOpened)]
    assert [(each.cluster, each.seconds) for each in ballot.last] == [(identity(n).peer, 2.0 * (n + 1)) for n in range(3)]
    assert "the last from" in ballot.line()
    for receipt in [table.receipt(0), table.receipt(1)]:
        table.now += 1.0
        table.feed(round_machine.Received(receipt))
    table.feed(round_machine.Absent(identity(2).peer))
    closed = next(event for event in table.told if isinstance(event, events.RoundClosed))
    assert (closed.counted, closed.not_counted, [each.reason for each in closed.missed]) == (2, 1, ["did-not-vote"])
    assert closed.last[-1] == events.Arrival(identity(1).peer, 8.0)


def test_strangers_wash_nothing_away():
    table = Told(manifest())
    for number in range(3):
        table.feed(round_machine.Received(table.claim(number)))
    table.kinds()
    for number in range(10, 10 + 2 * limits.STRANGERS_TOLD):
        table.feed(round_machine.Received(table.claim(number)))
    assert table.kinds() == ["claimed"] * limits.STRANGERS_TOLD


def test_a_reason_is_told_by_its_name():
    view = events.NotCounted(3, pb.REASON_LATE, "").view()
    assert (view["event"], view["reason"], view["round"]) == ("not-counted", "late", 3)
