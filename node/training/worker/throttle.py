"""Steps that take at least so long, where the operator asks for it: the rest of the time the machine is left to others."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Pace"]


class Pace:
    def __init__(self, step_seconds: float, wake: threading.Event, clock: Callable[[], float] = time.monotonic) -> None:
        """`wake` is set whenever a command has arrived. 0: steps follow each other at once."""
        self.step_seconds, self._wake, self._clock = step_seconds, wake, clock
        self._next_at = -math.inf
        """When the next step may begin."""

    def rest(self, take_commands: Callable[[], bool]) -> None:
        """Wait until the next step may begin. Commands are taken as they arrive; if one says so, the step begins at once.
        A late wake-up is not added to the next step's time, or delays would accumulate; time for commands is no rest."""
        late = 0.0
        while (left := self._next_at - self._clock()) > 0:
            late = 0.0 if self._wake.wait(left) else self._clock() - self._next_at
            self._wake.clear()
            with self.no_rest():
                stop = take_commands()
            if stop:
                break
        self._next_at = self._clock() - late + self.step_seconds

    @contextmanager
    def no_rest(self) -> Iterator[None]:
        """Work beside the steps, as an evaluation is: others have the rest of a step's time all the same, after it."""
        began = self._clock()
        yield
        self._next_at += self._clock() - began
