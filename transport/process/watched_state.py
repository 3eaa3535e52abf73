"""A state that several tasks follow."""

import asyncio

__all__ = ["Changes"]


class Changes:
    """Wakes all who wait for the next change of a state."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Return an event that is set at the next change. Take it before you read the state."""
        return self._next

    def happened(self) -> None:
        changed, self._next = self._next, asyncio.Event()
        changed.set()
