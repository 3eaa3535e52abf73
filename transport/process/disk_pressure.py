"""Restart after a lack of space: a full disk, a read-only one, too many open files. The daemon stops as if it were killed,
reports what it waits for, and starts again when a write succeeds.

Everything in progress at the failed write is lost as by `kill -9`, which every part is written for.
"""

import asyncio
import errno
import logging
import os
import signal
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from dilocox.protocol.errors import LocalError

__all__ = ["lack_of_space", "probe", "restart_when_writable"]

log = logging.getLogger(__name__)

PROBE_BYTES = 16 << 20
"""Bytes of the test write: some payloads of a small model, so that the next write does not fail again."""
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 30.0
"""Pause between two tests; it doubles from one failure to the next, so that a nearly full disk does not restart the daemon
in a loop."""
SENTENCES = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EROFS: "disk read-only",
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files on this machine",
}
_DATABASE = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}


def lack_of_space(error: BaseException) -> str | None:
    """Return the missing resource, if that is the error or its cause."""
    for each in _causes(error):
        number = each.errno if isinstance(each, OSError) else None
        if isinstance(each, sqlite3.Error):
            code = getattr(each, "sqlite_errorcode", 0) & 0xFF
            number = _why_not_opened() if code == sqlite3.SQLITE_CANTOPEN else _DATABASE.get(code)
        if number in SENTENCES:
            return SENTENCES[number]
    return None


def _why_not_opened() -> int | None:
    """Return the errno of a failed open: SQLite does not report it."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def probe(folder: Path) -> None:
    """Raises OSError unless a file can be made and filled there. Blocking."""
    scratch = folder / ".room"
    try:
        with scratch.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        scratch.unlink(missing_ok=True)


async def restart_when_writable(
    folder: Path,
    life: Callable[[asyncio.Event], Awaitable[None]],
    waiting: Callable[[str], AbstractAsyncContextManager[object]],
) -> None:
    """Run `life`. If a write fails for lack of space, wait inside `waiting(sentence)` until there is some, and run it
    again. SIGTERM and SIGINT set the event of each life, and end the loop. Raises what `life` raises for any other
    reason."""
    stopped, pause = asyncio.Event(), FIRST_LOOK_SECONDS
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    while not stopped.is_set():
        began = asyncio.get_running_loop().time()
        try:
            await life(stopped)
            return
        except (OSError, sqlite3.Error, LocalError) as error:
            what = lack_of_space(error)
            if what is None:
                raise
            lived = asyncio.get_running_loop().time() - began
            log.warning("%s: waiting for free space in %s (%s)", what, folder, error)
        pause = FIRST_LOOK_SECONDS if lived > LONGEST_LOOK_SECONDS else min(LONGEST_LOOK_SECONDS, 2 * pause)
        async with waiting(f"{what}: waiting for free space in {folder}"):
            while not await _is_set_within(stopped, pause) and not await asyncio.to_thread(_has_room, folder):
                pass


def _has_room(folder: Path) -> bool:
    try:
        probe(folder)
    except OSError:
        return False
    log.info("%s has free space again", folder)
    return True


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether it was set within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
