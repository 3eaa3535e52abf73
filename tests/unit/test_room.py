"""A disk that is full for a while ends no daemon."""

import asyncio
import errno
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from dilocox.protocol.errors import LocalError
from dilocox.transport.process import disk_pressure
from dilocox.transport.process.disk_pressure import lack_of_space, probe, restart_when_writable
from dilocox.views.api_listener import ApiListener
from tests.helpers import PATIENCE_SECONDS


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def caused(error: BaseException) -> LocalError:
    """Return our error, caused by another library's."""
    try:
        try:
            raise error
        except Exception as cause:
            raise LocalError("the chain cannot be written") from cause
    except LocalError as ours:
        return ours


def locked() -> sqlite3.Error:
    """Return SQLite's error for a file that it may not write."""
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA query_only = 1")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("CREATE TABLE t (n)")
    database.close()
    return caught.value


def test_what_is_lack_of_room_and_what_is_not():
    assert lack_of_space(full()) == lack_of_space(caused(full())) == "disk full"
    assert lack_of_space(OSError(errno.EROFS, "")) == lack_of_space(locked()) == "disk read-only"
    assert lack_of_space(OSError(errno.EMFILE, "")) == "too many open files"
    for other in (OSError(errno.EACCES, ""), LocalError("of its own"), sqlite3.OperationalError("no such table"), ValueError()):
        assert lack_of_space(other) is None
    looped = ValueError()
    looped.__context__ = OSError(errno.EACCES, "")
    looped.__context__.__context__ = looped
    assert lack_of_space(looped) is None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the results of the next checks for space; after them there is space."""
    found: list[bool] = []
    monkeypatch.setattr(disk_pressure, "FIRST_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(disk_pressure, "PROBE_BYTES", 10)

    def look(folder: Path) -> None:
        if found and not found.pop(0):
            raise full()

    monkeypatch.setattr(disk_pressure, "probe", look)
    return found


async def test_a_daemon_waits_with_a_sentence_and_lives_again(tmp_path: Path, looks: list[bool]):
    looks += [False, False, True]
    lives: list[BaseException | None] = [full(), caused(locked()), None]
    said: list[str] = []

    async def life(stopped: asyncio.Event) -> None:
        if (error := lives.pop(0)) is not None:
            raise error

    @asynccontextmanager
    async def waiting(why: str) -> AsyncIterator[None]:
        said.append(why)
        yield
        said.append("on again")

    await restart_when_writable(tmp_path, life, waiting)
    assert not lives
    assert not looks
    assert said == [
        f"disk full: waiting for free space in {tmp_path}",
        "on again",
        f"disk read-only: waiting for free space in {tmp_path}",
        "on again",
    ]
    lives.append(LocalError("something else"))
    with pytest.raises(LocalError, match="something else"):
        await restart_when_writable(tmp_path, life, waiting)


async def test_who_waits_can_be_stopped(tmp_path: Path, looks: list[bool]):
    looks += [False] * 1_000_000
    waits = asyncio.Event()

    async def life(stopped: asyncio.Event) -> None:
        raise full()

    @asynccontextmanager
    async def waiting(why: str) -> AsyncIterator[None]:
        waits.set()
        yield

    async with asyncio.timeout(PATIENCE_SECONDS):
        running = asyncio.create_task(restart_when_writable(tmp_path, life, waiting))
        await waits.wait()
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await running


async def test_a_signal_between_waiting_and_living_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_pressure, "FIRST_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(disk_pressure, "probe", lambda folder: os.kill(os.getpid(), signal.SIGTERM))
    lives: list[bool] = []

    async def life(stopped: asyncio.Event) -> None:
        lives.append(stopped.is_set())
        raise full()

    @asynccontextmanager
    async def waiting(why: str) -> AsyncIterator[None]:
        yield
        await asyncio.sleep(0.01)  # a page takes a while to close

    async with asyncio.timeout(PATIENCE_SECONDS):
        await restart_when_writable(tmp_path, life, waiting)
    assert lives == [False]


async def test_a_door_that_cannot_say_so_ends_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    door = ApiListener("127.0.0.1:0")

    async def no_file(site: web.SockSite) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(web.SockSite, "start", no_file)
        async with door.no_room("too many open files"):
            pass
    assert "the API cannot answer" in caplog.text
    await door.close()


def test_a_probe_leaves_nothing_behind(tmp_path: Path):
    probe(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        probe(tmp_path / "nowhere")
