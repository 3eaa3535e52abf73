"""Processes that we start end with us, and with what they started."""

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

from dilocox.transport.process.child_environment import child_environment
from dilocox.transport.process.tasks import wait_out

__all__ = ["end_process", "start_process"]


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process that leads its own group; `options`: as asyncio's. Without `env` it gets what a child may inherit. A
    cancelled caller leaves no process behind; asyncio alone would. Raises OSError."""
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
    """Kill the rest of its group, and collect it, however often the caller is cancelled: a process that is not collected
    stays a zombie with its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    cancelled = False
    while process.returncode is None:
        try:
            await process.wait()  # no separate task: code that ends all tasks would cancel it, too
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
