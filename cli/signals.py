"""Signals of a daemon's process: from start to exit, SIGTERM and Ctrl-C interrupt no work halfway.

A loop that closes restores the default signal handlers. A later signal, while the interpreter exits, would then end the
process as if it had failed (bootstrap.py decides the exit code from there on).
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

__all__ = ["live"]


class _Loop(asyncio.SelectorEventLoop):
    def remove_signal_handler(self, sig: int) -> bool:
        """Keep the handler: a second signal changes nothing."""
        signal.set_wakeup_fd(-1)
        return False


def live(daemon: Coroutine[Any, Any, None]) -> None:
    """Run a daemon, as asyncio.run does."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(daemon)
