"""Event log on disk: events with increasing numbers and the time of day, across restarts.

An event is queued at once, and a thread writes batches. Readers see only durable events, so no number is used twice.
The oldest events are deleted. A damaged file is set aside, and a new one begins with numbers above all that it can have
contained.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.errors import LocalError
from dilocox.protocol.events import Event
from dilocox.transport.store.chain_file import DamagedError, open_database, sentences, transaction
from dilocox.transport.store.files import EVENTS, quarantine

__all__ = ["EVENTS", "EventLog", "Happened", "read_events", "read_page"]

log = logging.getLogger(__name__)

"""File in the folder of a run."""
PAGE = 500
"""Events read at once."""
QUIET_SECONDS = 10.0
"""Interval of a message without news to a follower: a server notices only by sending that its reader is gone."""
LARGEST_ID = 1 << 53
"""Largest integer of a browser."""


class Happened(NamedTuple):
    id: int
    """Larger than that of all events before it; at least 1."""
    seconds: float
    """Seconds since 1970."""
    kind: str
    body: Mapping[str, Any]
    """The event's fields and its line."""

    def view(self) -> dict[str, Any]:
        return {"id": self.id, "time": self.seconds, **self.body}


def _clipped(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= limits.EVENT_CHARACTERS else value[: limits.EVENT_CHARACTERS - 1] + "…"
    if isinstance(value, dict):
        return {key: _clipped(each) for key, each in value.items()}
    return [_clipped(each) for each in value] if isinstance(value, list | tuple) else value


def _read(database: sqlite3.Connection, path: Path, after: int, round: int | None) -> list[Happened]:
    """The first events after that number, at most a page; of one round, where it is named. Raises LocalError."""
    chosen = "" if round is None else " AND round = ?"
    query = f"SELECT id, seconds, kind, body FROM events WHERE id > ?{chosen} ORDER BY id LIMIT {PAGE}"
    try:
        with sentences(path):
            rows = database.execute(query, (after,) if round is None else (after, round)).fetchall()
        return [Happened(id, seconds, kind, json.loads(body)) for id, seconds, kind, body in rows]
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{path} is damaged: it contains an entry that is not an event.") from error


class EventLog:
    """Event log of one daemon in one run. On the event loop, except for the file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Opens or heals. `clock`: seconds since 1970. Blocking."""
        self.path, self._clock = path, clock
        self._queue: deque[tuple[float, Event]] = deque()
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        """Event, set and replaced when there is more to read."""
        self.kinds: Counter[str] = Counter()
        """Number of events of this incarnation, by kind."""
        self._writing, self._reading = threading.Lock(), threading.Lock()
        try:
            self._load(first=1)
        except DamagedError as error:
            quarantine(path, str(error), ("-wal", "-shm"))
            self._load(first=int(1000 * clock()))

    def _load(self, first: int) -> None:
        """Raises DamagedError."""
        self._database = open_database(self.path)
        self._reader = open_database(self.path, check=False)  # a reader never waits for a writer's fsync
        try:
            with sentences(self.path):
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS events"
                    " (id INTEGER PRIMARY KEY AUTOINCREMENT, seconds REAL NOT NULL, kind TEXT NOT NULL, round INTEGER,"
                    " body TEXT NOT NULL)"
                )
                self._database.execute("CREATE INDEX IF NOT EXISTS by_round ON events (round)")
                newest = self._database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
                if newest is None and first > 1:
                    self._database.execute("INSERT INTO sqlite_sequence VALUES ('events', ?)", (first - 1,))
                columns = "SELECT count(*) FROM events WHERE typeof(seconds) != 'real' OR typeof(body) != 'text'"
                (wrong,) = self._database.execute(columns).fetchone()
            self.newest = newest[0] if newest is not None else first - 1
            """The number of the last event on disk, or before the first."""
            if wrong or type(self.newest) is not int or self.newest not in range(LARGEST_ID):
                raise DamagedError(f"{self.path} is damaged: its counter or an entry is not valid.")
        except LocalError:
            self._reader.close()
            self._database.close()
            raise

    def add(self, event: Event) -> None:
        """Add an event. Readers see it once it is durable."""
        self._queue.append((self._clock(), event))
        self.kinds[event.kind] += 1
        self._wake.set()

    def say(self, event: Event, level: int = logging.INFO) -> None:
        """`add`, and its line in the log."""
        self.add(event)
        log.log(level, "%s", event.line())

    async def run(self) -> None:
        """Write what was added, until cancelled. Raises what the disk raises."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.to_thread(self.flush)
            self._written.set()
            self._written = asyncio.Event()

    def flush(self) -> None:
        """Everything that was added is on disk when this returns. Blocking."""
        with self._writing:
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            if not batch:
                return
            rows = [(at, event.kind, getattr(event, "round", None), json.dumps(_clipped(event.view()))) for at, event in batch]
            with transaction(self._database):
                self._database.executemany("INSERT INTO events (seconds, kind, round, body) VALUES (?, ?, ?, ?)", rows)
                (newest,) = self._database.execute("SELECT max(id) FROM events").fetchone()
                self._database.execute("DELETE FROM events WHERE id <= ?", (newest - limits.EVENTS,))
            self.newest = newest

    def read(self, after: int, round: int | None = None) -> list[Happened]:
        """The first events on disk after that number, at most `PAGE`; of one round, where it is named. Blocking."""
        with self._reading:
            return _read(self._reader, self.path, after, round)

    async def follow(self, after: int) -> AsyncGenerator[list[Happened]]:
        """Everything after that number, and then what comes; an empty list when there is nothing more yet, and now and then while
        that stays so. A number above all that were given is of a file that is gone: then everything."""
        after = after if after <= self.newest else 0
        while True:
            written = self._written
            page = await asyncio.to_thread(self.read, after)
            yield page
            if page:
                after = page[-1].id
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await written.wait()

    def close(self) -> None:
        """Write queued events, if the disk allows it, and close."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.flush()
        with self._writing, self._reading:
            self._reader.close()
            self._database.close()


def read_events(path: Path, after: int = 0) -> Iterator[Happened]:
    """Yield the events of a file after that number. Changes nothing. Raises LocalError."""
    while page := read_page(path, after):
        yield from page
        after = page[-1].id


def read_page(path: Path, after: int, round: int | None = None) -> list[Happened]:
    """Return a page as `EventLog.read` does, also without a daemon. Changes nothing. Raises LocalError."""
    try:
        with closing(open_database(path, check=False)) as database:
            return _read(database, path, after, round)
    except DamagedError as error:
        raise LocalError(f"cannot read {path}: {error} Start its daemon, which repairs it.") from error
