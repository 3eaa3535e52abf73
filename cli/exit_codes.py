"""Exit codes of the command."""

from enum import IntEnum

__all__ = ["Exit"]


class Exit(IntEnum):
    """Exit code, with a sentence for docs/reference/codes.md."""

    says: str

    def __new__(cls, code: int, says: str) -> "Exit":
        made = int.__new__(cls, code)
        made._value_ = code
        made.says = says
        return made

    FINE = 0, "success. SIGTERM and Ctrl-C end a daemon with 0 after it left the roster, or before it was on it"
    UNEXPECTED = 1, "an error; the message names it, and the side that caused it"
    USAGE = 2, "an option, a variable, a run file or a folder cannot be used: another try would also fail"
    NOT_RUNNING = 3, "no daemon runs, or it is still starting"
    UNKNOWN = 4, "`status --check`: the health of the daemon is not known yet"
    FAILED = 5, "`check` found an error"
    DEGRADED = 6, "`status --check`: the daemon is not healthy"
    INTERRUPTED = 130, "Ctrl-C, in any command except a daemon"
