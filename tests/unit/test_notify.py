"""Tests of notifications: their recipients, and that no code waits for them."""

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dilocox.protocol import events
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.events import NOTABLE
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.notify import notify
from dilocox.transport.notify.notify import Command, Notifier, Webhook, parse_notice
from dilocox.transport.process import monitors
from dilocox.transport.process.monitors import LastingCondition
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.event_log import EVENTS, EventLog
from dilocox.views.api_listener import ApiListener
from tests.helpers import Family, until

ABOUT = {"name": "attic", "run": "test", "peer": "12D3", "role": "node"}
MISSED = events.NotCounted(4, pb.REASON_LATE, "")


class Heard:
    """A notice that remembers."""

    name = "a test"

    def __init__(self, why: str = "") -> None:
        self.why, self.bodies = why, list[dict[str, Any]]()

    async def deliver(self, body: bytes) -> str:
        self.bodies.append(json.loads(body))
        return self.why


class Life:
    """Incarnation of a daemon that sends its events to a command."""

    def __init__(self, folder: Path, heard: Heard) -> None:
        self.log, self.tasks, self.now = EventLog(folder / EVENTS), Tasks(), 0.0
        self.tasks.start(self.log.run(), "events")
        self.tasks.start(Notifier(heard, self.log, ABOUT, lambda: self.now).run(), "notify")

    async def __aenter__(self) -> "Life":
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.tasks.close()
        self.log.close()

    async def looked_at(self, folder: Path) -> None:
        """Wait until all events so far are processed."""
        self.log.flush()
        await until(lambda: (folder / notify.TOLD).exists() and int((folder / notify.TOLD).read_text()) == self.log.newest)


async def test_what_is_notable_is_told_and_nothing_else(tmp_path: Path):
    heard = Heard()
    async with Life(tmp_path, heard) as life:
        for event in (events.StateChanged("training", "on the roster"), MISSED, events.RunFinished(9)):
            life.log.add(event)
        await until(lambda: len(heard.bodies) == 2)
    missed, finished = heard.bodies
    assert missed["text"] == f"attic: {MISSED.line()}"
    assert (missed["event"], missed["round"], missed["reason"], missed["run"]) == ("not-counted", 4, "late", "test")
    assert finished["event"] == "run-finished"


async def test_of_one_kind_one_is_told_and_then_the_newest_with_how_many_there_were(tmp_path: Path):
    heard = Heard()
    async with Life(tmp_path, heard) as life:
        for _ in range(4):
            life.log.add(MISSED)
        await life.looked_at(tmp_path)
        assert len(heard.bodies) == 1
        newest = life.log.newest
        life.now += notify.AGAIN_SECONDS
        life.log.add(events.StateChanged("training", "on the roster"))  # it looks again
        await until(lambda: len(heard.bodies) == 2)
    assert heard.bodies[1]["text"].endswith("(and 2 times before)")
    assert heard.bodies[1]["id"] == newest, "whoever only hears the first of each kind hears the wrong last word"


async def test_what_a_daemon_died_of_is_told_by_its_next_life(tmp_path: Path):
    heard = Heard()
    async with Life(tmp_path, heard) as life:
        life.log.add(events.StateChanged("training", "on the roster"))
        await life.looked_at(tmp_path)
    log = EventLog(tmp_path / EVENTS)
    log.add(events.Diverged(3, "bits"))
    log.close()
    async with Life(tmp_path, heard):
        await until(lambda: heard.bodies)
    assert heard.bodies[0]["event"] == "diverged"


async def test_who_begins_to_be_told_hears_nothing_old(tmp_path: Path):
    log = EventLog(tmp_path / EVENTS)
    log.add(MISSED)
    log.close()
    heard = Heard()
    async with Life(tmp_path, heard) as life:
        life.log.add(events.RunFinished(9))
        await until(lambda: heard.bodies)
    assert [each["event"] for each in heard.bodies] == ["run-finished"]


async def test_what_could_not_be_told_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    heard = Heard("it answered 500")
    async with Life(tmp_path, heard) as life:
        life.log.add(MISSED)
        await life.looked_at(tmp_path)
    assert [each.getMessage() for each in caplog.records] == ["could not notify a test of not-counted: it answered 500"]


async def test_a_webhook_is_posted_to_and_its_secret_stays_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    bodies: list[Any] = []

    async def hook(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=int(request.query["answer"]), headers={"Location": "http://127.0.0.1:1/elsewhere"})

    app = web.Application()
    app.router.add_post("/SECRET", hook)
    door = ApiListener("127.0.0.1:0")
    await door.show(app)
    (tmp_path / "hook").write_text(f"{door.url}/SECRET?answer=200\n")
    notice = parse_notice(f"@{tmp_path / 'hook'}")
    assert isinstance(notice, Webhook)
    assert await notice.deliver(b'{"a": 1}') == ""
    assert bodies == [{"a": 1}]
    assert await Webhook(f"{door.url}/SECRET?answer=500").deliver(b"{}") == "it answered 500"
    assert await Webhook(f"{door.url}/SECRET?answer=302").deliver(b"{}") == "it answered 302", "it is not followed elsewhere"
    await door.close()
    with caplog.at_level(logging.DEBUG):
        for wrong in (Webhook(f"{door.url}/SECRET"), Webhook("http://user:SECRET@[::1/")):
            why = await wrong.deliver(b"{}")
            assert why
            assert "SECRET" not in why
        assert "SECRET" not in notice.name
    assert "SECRET" not in caplog.text


async def test_a_command_reads_the_event_and_no_shell_reads_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "tell me.py"
    script.write_text("import sys\nopen(sys.argv[1], 'w').write(sys.argv[2] + sys.stdin.read())\n")
    notice = parse_notice(f"{sys.executable} '{script}' {tmp_path / 'told'} $HOME;`id`")
    assert isinstance(notice, Command)
    assert await notice.deliver(b'{"a": 1}') == ""
    assert (tmp_path / "told").read_text() == '$HOME;`id`{"a": 1}'
    assert await Command((sys.executable, "-c", "exit(3)")).deliver(b"{}") == "it ended with 3"
    assert await Command((sys.executable, "-c", "exit(0)")).deliver(b"x" * (1 << 20)) == "", "it need not read"
    assert "o such file" in await Command((str(tmp_path / "nowhere"),)).deliver(b"{}")
    monkeypatch.setattr(notify, "TELL_SECONDS", 0.2)
    assert "did not end" in await Command((sys.executable, "-c", "import time; time.sleep(1000)")).deliver(b"{}")


@pytest.mark.parametrize("how", ["it takes too long", "the daemon ends"])
async def test_a_command_that_is_ended_takes_along_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str):
    family = Family(tmp_path)
    command = Command((str(family.program),))
    if how == "the daemon ends":
        telling = asyncio.create_task(command.deliver(b"{}"))
        await until(family.began)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    else:
        monkeypatch.setattr(notify, "TELL_SECONDS", 0.1)
        while not family.began():  # it was too slow to start anything
            monkeypatch.setattr(notify, "TELL_SECONDS", 2 * notify.TELL_SECONDS)
            assert "did not end" in await command.deliver(b"{}")
    assert not await asyncio.to_thread(family.left)


@pytest.mark.parametrize(
    "text", ["", "   ", "http://", "https:///SECRET", "no-such-command-here SECRET", "'SECRET", "@nowhere"]
)
def test_what_cannot_be_told_is_a_sentence_at_the_start(text: str):
    with pytest.raises(ConfigError) as wrong:
        parse_notice(text)
    assert "--notify" in str(wrong.value)
    assert "SECRET" not in str(wrong.value)


def test_every_notable_kind_is_an_event():
    assert {each.kind for each in events.Event.__subclasses__()} >= NOTABLE


def test_what_lasts_is_told_once_and_again_after_it_was_over():
    lasting = LastingCondition(60)
    looks = [(True, 0), (True, 59), (True, 61), (True, 200), (False, 210), (True, 220), (True, 279), (True, 281)]
    assert [lasting.begins(holds, now) for holds, now in looks] == [None, None, 61, None, None, None, None, 61]


async def test_a_disk_that_fills_and_a_coordinator_that_is_away_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free, connected, now, told, looks = [50], [True], [0.0], list[events.Event](), [0]

    def clock() -> float:
        looks[0] += 1
        return now[0]

    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Disk", (), {"free": free[0], "total": 1000}))
    watching = asyncio.create_task(monitors.watch(tmp_path, told.append, lambda: connected[0], clock, pause=0.001))

    async def later(seconds: float) -> None:
        """Advance the clock and check: everything due has been sent."""
        now[0] += seconds
        before = looks[0]
        await until(lambda: looks[0] > before + 1)

    await later(1000)
    assert told == [], "five hundredths are not less than that"
    free[0], connected[0] = 49, False
    await later(1)
    await later(61)
    await until(lambda: told)
    assert told == [events.DiskLow(49, str(tmp_path))]
    await later(60)
    await until(lambda: len(told) == 2)
    assert isinstance(told[1], events.CoordinatorAway)
    connected[0] = True
    await until(lambda: len(told) == 3)
    assert told[2] == events.CoordinatorBack()
    watching.cancel()
