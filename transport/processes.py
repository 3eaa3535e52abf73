"""Processes that we start end with us, and with what they started."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from dilocox.transport.child_environment import child_environment
from dilocox.transport.tasks import wait_out

__all__ = ["end_process", "start_process"]


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process that leads a group of its own; `options`: as asyncio's. Without `env` it gets what a child may inherit.
    A caller that is cancelled meanwhile leaves no process; asyncio alone would. Raises OSError."""
    options.setdefault("env", child_environment())
    starting = asyncio.create_task(asyncio.create_subprocess_exec(*command, start_new_session=True, **options))
    try:
        await wait_out(starting)
    except asyncio.CancelledError:
        if not starting.cancelled() and starting.exception() is None:
            await end_process(starting.result())
        raise
    return starting.result()


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of its group, and collect it, however often we are cancelled meanwhile: whoever is not collected is a
    zombie, and holds its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    cancelled = False
    while process.returncode is None:
        try:
            await process.wait()  # no task of its own, which somebody who ends all tasks would cancel too
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
