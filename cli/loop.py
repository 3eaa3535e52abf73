"""The loop of a daemon's process: from its first moment to the process's last, SIGTERM and Ctrl-C end nothing in the middle.

A loop that closes gives the signals back that it heard, and what comes then, while the interpreter goes and the daemon has done all
that it was told, would end the process as if it had done nothing (start.py says how a command ended from its last line on).
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

__all__ = ["live"]


class _Loop(asyncio.SelectorEventLoop):
    def remove_signal_handler(self, sig: int) -> bool:
        """What was heard here stays heard, and changes nothing any more."""
        signal.set_wakeup_fd(-1)
        return False


def live(daemon: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run does."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(daemon)
