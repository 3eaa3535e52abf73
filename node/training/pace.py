"""Steps that take at least so long, where the operator asks for it: the rest of the time the machine is left to others."""

import math
import threading
import time
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    def __init__(self, step_seconds: float, wake: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """`wake` is set whenever a command has arrived. 0: steps follow each other at once."""
        self.step_seconds, self._wake, self._clock = step_seconds, wake, clock
        self._next_at = -math.inf
        """When the next step may begin."""

    def rest(self, take_commands: Callable[[], bool]) -> None:
        """Until the next step may begin. Commands are taken as they arrive; where that says so the step begins at once. Who is
        woken late has rested longer, and the step after it not: else a slow machine's timers would add up."""
        due = self._next_at if self._next_at > self._clock() else None
        while (left := self._next_at - self._clock()) > 0:
            self._wake.wait(left)
            self._wake.clear()
            if take_commands():
                due = None
                break
        self._next_at = (self._clock() if due is None else due) + self.step_seconds
