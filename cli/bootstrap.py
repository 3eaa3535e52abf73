"""Bootstrap of the command. Ctrl-C prints no traceback during the imports, which take seconds; a daemon that is stopped
that early has nothing to stop. After the last line, no signal changes the exit code."""

import atexit
import ctypes
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

__all__ = ["fill_standard_streams", "hide_memory", "main"]

FINE, INTERRUPTED = 0, 130
"""Exit codes as in exit_codes.py, which is not loaded yet."""
PR_SET_DUMPABLE = 4
"""Option of Linux's prctl."""
DAEMONS = ("archive", "coordinator", "node", "relay")
"""Commands that run in signals.py, which handles both signals. Earlier, nothing has started that needs a clean end."""


def main() -> None:
    fill_standard_streams()  # before any file is opened, which would get the number of one of them
    atexit.register(_is_over)  # the first, so that it is called last
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    daemon = next((word for word in sys.argv[1:] if not word.startswith("-")), "") in DAEMONS
    if ours:
        _ends_with(signal.SIGINT, FINE if daemon else INTERRUPTED)  # nothing has started that needs a clean end
    if daemon:
        hide_memory()
    if daemon and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _ends_with(signal.SIGTERM, FINE)
    from dilocox.cli.main import main as run

    if ours and not daemon:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except SystemExit as leaving:
        _stays(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
        raise
    _stays(0)


def hide_memory() -> None:
    """Deny other processes of this user this process's memory and environment, which may contain secrets of an archive:
    its children run as the same user.

    It also writes no core dump, and a debugger needs root. A program that it starts is not affected.
    """
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def fill_standard_streams() -> None:
    """Open /dev/null where a supervisor started the command with a standard stream closed: libraries and children write there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                null = os.open(os.devnull, os.O_RDWR)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
                os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def _stays(status: int) -> None:
    """Exit at once: the interpreter's shutdown takes seconds."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            _ends_with(number, status)


def _is_over() -> None:
    """An interpreter that goes gives back every signal that it handles, and then takes a while: what is ignored stays so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _ends_with(number: signal.Signals, status: int) -> None:
    """Make the signal end the process at once with this status."""

    def end(number: int, frame: FrameType | None) -> None:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)

    signal.signal(number, end)
