"""Pipe to the parent process, so that there are no orphans: only the parent can prevent its end.

The parent creates a FIFO and has the only write end. A child reads from it; the read returns when the parent dies in
any manner, or closes the pipe. It works across intermediate processes, which inherit nothing.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dilocox.transport.process.child_environment import child_environment

__all__ = ["ENVIRONMENT", "ParentPipe", "exit_with_parent"]

ENVIRONMENT = "DILOCOX_PARENT_PIPE"
"""Variable with the FIFO's path, for the children."""


class ParentPipe:
    """The parent's end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"parent-{os.getpid()}-{os.urandom(4).hex()}"
        os.mkfifo(self.path, 0o600)
        self._handle: int | None = os.open(self.path, os.O_RDWR)  # O_RDWR: opening never waits for a reader

    def environment(self) -> dict[str, str]:
        """Return a child's environment, with the pipe's path."""
        return child_environment({ENVIRONMENT: str(self.path)})

    def close(self) -> None:
        """Make every attached child exit. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self.path.unlink(missing_ok=True)


def exit_with_parent(on_end: Callable[[], None] = lambda: os._exit(0)) -> None:
    """Run `on_end` (in a thread; by default exit at once) when the parent is gone. For the child; without a pipe it does
    nothing."""
    path = os.environ.get(ENVIRONMENT)
    if path:
        threading.Thread(target=_wait, args=(path, on_end), name="parent", daemon=True).start()


def _wait(path: str, on_end: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            os.read(handle, 1)  # b"" when the parent has already exited
        except BlockingIOError:
            os.set_blocking(handle, True)
            os.read(handle, 1)
    on_end()
