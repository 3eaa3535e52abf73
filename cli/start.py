"""Where the command begins and ends: Ctrl-C has no traceback before everything is loaded, which takes seconds, and once all is done
neither that nor SIGTERM changes how it ended."""

import os
import signal
import sys
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
    except SystemExit as leaving:
        _stays(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
        raise
    _stays(0)


def _stays(status: int) -> None:
    """What the interpreter still does takes a while, and nobody needs it."""

    def end(number: int, frame: FrameType | None) -> None:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
