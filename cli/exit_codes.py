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

    FINE = 0, "it did what it was told. SIGTERM and Ctrl-C end a daemon so, once it left the roster, or before it came to it"
    UNEXPECTED = 1, "something failed; the sentence says what, and whose fault it was"
    USAGE = 2, "an option, a variable, a run file or a folder cannot be used: another try would end the same way"
    NOT_RUNNING = 3, "no daemon runs, or it only starts: it has nothing to tell yet"
    UNKNOWN = 4, "`status --check`: whether the daemon is well is not known yet"
    FAILED = 5, "`check` found something wrong"
    DEGRADED = 6, "`status --check`: the daemon is not well"
    INTERRUPTED = 130, "Ctrl-C, of any verb but a daemon"
