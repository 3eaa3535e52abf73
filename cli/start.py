"""Where the command begins: before everything else is loaded, which takes seconds, Ctrl-C has an end without a traceback."""

import os
import signal
from types import FrameType

__all__ = ["main"]

INTERRUPTED = 130
"""As exits.py has it, which is not loaded yet."""


def main() -> None:
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if ours:
        signal.signal(signal.SIGINT, _leave)  # nothing has begun that would have to end well
    from dilocox.cli.main import main as run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        if ours:
            signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
