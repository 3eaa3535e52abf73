"""Loop that submits a node's statements until the coordinator acknowledges or rejects them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dilocox.protocol.wire.messages import Statement

__all__ = ["AGAIN_SECONDS", "resubmit_until_acknowledged"]

AGAIN_SECONDS = 3.0
"""Interval between two submissions of a statement that the coordinator may have lost."""


async def resubmit_until_acknowledged(
    speak: asyncio.Event,
    offers: Callable[[], Sequence[Statement[Any]]],
    offer: Callable[[Statement[Any]], Awaitable[bool]],
    first: Callable[[], Awaitable[None]],
    again_seconds: float = AGAIN_SECONDS,
) -> None:
    """Submit for ever. `speak`: set when `offers` may have new statements, also during a submission; `offer`: returns
    whether an answer arrived; `first`: runs before each pass. Each statement is submitted once, and all are again after
    some seconds."""
    while True:
        await first()
        said: set[bytes] = set()
        while fresh := [statement for statement in offers() if statement.digest not in said]:
            said.add(fresh[0].digest)
            if not await offer(fresh[0]):
                break
        speak.clear()  # nothing was waited for since the last look: what is signed from here on sets it again
        try:
            async with asyncio.timeout(again_seconds):
                await speak.wait()
        except TimeoutError:
            pass
