"""A daemon's events once its run is known: kept, told to whom its operator named, and watched for on its machine."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from dilocox.transport.event_log import EVENTS, EventLog
from dilocox.transport.notify import Notice, Notifier
from dilocox.transport.tasks import Tasks
from dilocox.transport.watch import watch

__all__ = ["open_diary"]


async def open_diary(
    folder: Path,
    home: Path,
    notice: Notice | None,
    about: dict[str, str],
    tasks: Tasks,
    files: AsyncExitStack,
    connected: Callable[[], bool] = lambda: True,
) -> EventLog:
    """`folder`: of the run. `home`: the daemon's, whose disk may fill. `about`: what tells this daemon from others, for `notice`.
    `files`: is closed after every task. `connected`: whether the coordinator is heard."""
    events = await asyncio.to_thread(EventLog, folder / EVENTS)
    files.callback(events.close)
    tasks.start(events.run(), "events")
    tasks.start(watch(home, events.say, connected), "watch machine")
    if notice is not None:
        tasks.start(Notifier(notice, events, about).run(), "notify")
    return events
