"""Event log of a daemon in a known run, with its sinks: the operator's notices and the machine's monitors."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from dilocox.transport.notify.notify import Notice, Notifier
from dilocox.transport.process.monitors import watch
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.event_log import EVENTS, EventLog

__all__ = ["open_event_log"]


async def open_event_log(
    folder: Path,
    home: Path,
    notice: Notice | None,
    about: dict[str, str],
    tasks: Tasks,
    files: AsyncExitStack,
    connected: Callable[[], bool] = lambda: True,
) -> EventLog:
    """Open the event log and start its sinks. `folder`: of the run. `home`: the daemon's, whose disk may fill. `about`:
    fields that identify this daemon in notices. `files`: closed after every task. `connected`: whether the coordinator
    is live."""
    events = await asyncio.to_thread(EventLog, folder / EVENTS)
    files.callback(events.close)
    tasks.start(events.run(), "events")
    tasks.start(watch(home, events.say, connected), "watch machine")
    if notice is not None:
        tasks.start(Notifier(notice, events, about).run(), "notify")
    return events
