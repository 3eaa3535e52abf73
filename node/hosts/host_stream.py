"""Common parts of both ends of a stream between two hosts: its timeout, and bytes of a connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from dilocox.protocol.pb import boxes_pb2 as boxes

__all__ = ["ALIVE_SECONDS", "Silence", "pump"]

ALIVE_SECONDS = 0.25
"""Interval of a message that shows life, while there is no other."""
SILENT_LOOKS = 8
"""Checks without a message after which the other end counts as gone: two seconds. A suspended machine makes no checks, so
it misjudges no other one."""


class Silence:
    """`heard()` for whatever comes; `lasts()` returns after two seconds without."""

    def __init__(self) -> None:
        self._looks = 0

    def heard(self) -> None:
        self._looks = 0

    async def lasts(self) -> None:
        """Wait until the other end was silent for too long."""
        while self._looks < SILENT_LOOKS:
            await asyncio.sleep(ALIVE_SECONDS)
            self._looks += 1


async def pump(parts: AsyncIterator[boxes.Bytes], writer: asyncio.StreamWriter) -> None:
    """Write arriving bytes to a connection, until the end."""
    try:
        with suppress(ConnectionError):
            async for part in parts:
                writer.write(part.data)
                await writer.drain()
    finally:
        writer.close()
