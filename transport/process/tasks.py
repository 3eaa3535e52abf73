"""Background tasks that cannot fail silently: every task is named, and the first exception ends the daemon."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Stopped", "Tasks", "wait_out"]

T = TypeVar("T")


class Stopped(Exception):
    """Error: a stop was requested before the work was done."""


async def wait_out(work: asyncio.Future[Any]) -> None:
    """Wait until the work is done, however often the caller is cancelled; raises CancelledError only then."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not work.cancelled():
            work.exception()  # seen
        raise asyncio.CancelledError


class Tasks:
    """Start tasks; `wait` returns when one fails (raising its exception) or `stop` is called; `close` cancels the rest."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)

    def stop_with(self, event: asyncio.Event) -> None:
        """`stop` as soon as it is set."""

        async def wait() -> None:
            await event.wait()
            self.stop()

        self.start(wait(), "stop")

    def stop(self) -> None:
        if not self._failure.done():
            self._failure.set_result(None)

    async def wait(self) -> None:
        await asyncio.shield(self._failure)

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Raises Stopped if a stop comes first, or what a task raised."""
        task = self.start(work, "race")
        await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        self._failure.result()
        raise Stopped

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        if self._failure.done() and not self._failure.cancelled():
            self._failure.exception()  # seen
        else:
            self._failure.cancel()
