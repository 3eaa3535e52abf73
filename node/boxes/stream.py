"""What both ends of a stream between two boxes share: when the other is taken for gone, and bytes of a connection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from dilocox.protocol.pb import boxes_pb2 as boxes

__all__ = ["ALIVE_SECONDS", "Silence", "pump"]

ALIVE_SECONDS = 0.25
"""Each end says that it is alive as often as this, while it has nothing else to say."""
SILENT_LOOKS = 8
"""After so many looks at which nothing had come the other end is gone: two seconds. A machine that is itself suspended looks no
more often, so it takes nobody else for gone."""


class Silence:
    """`heard()` for whatever comes; `lasts()` returns after two seconds without."""

    def __init__(self) -> None:
        self._looks = 0

    def heard(self) -> None:
        self._looks = 0

    async def lasts(self) -> None:
        """Returns when nothing was heard for too long."""
        while self._looks < SILENT_LOOKS:
            await asyncio.sleep(ALIVE_SECONDS)
            self._looks += 1


async def pump(parts: AsyncIterator[boxes.Bytes], writer: asyncio.StreamWriter) -> None:
    """What comes, onto a connection, until it ends."""
    try:
        with suppress(ConnectionError):
            async for part in parts:
                writer.write(part.data)
                await writer.drain()
    finally:
        writer.close()
