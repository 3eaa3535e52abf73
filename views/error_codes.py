"""Error codes, with meaning and advice. The command line prints them, problem documents of the API
(application/problem+json) contain them, and docs/reference/codes.md lists them.

Reasons of rejected contributions are in reasons.py; codes of invalid evidence are in docs/how-to/attested-runs.md.
"""

import errno
import sqlite3
from collections.abc import Mapping
from typing import NamedTuple

from dilocox.protocol.errors import ConfigError, LocalError, PortError, RemoteError

__all__ = ["FAULTS", "Fault", "code_of", "do_about"]


class Fault(NamedTuple):
    means: str
    do: str
    status: int | None = None
    """HTTP status. None: only the command line uses the code."""
    lasts: bool = False
    """True if another try fails the same way until a person repairs something: a service manager need not restart the
    daemon."""


_ELSEWHERE = "name a place on another one (of a daemon: --home)"

FAULTS: Mapping[str, Fault] = {
    "usage": Fault("an option, a variable or a file cannot be used as it is", "mend what the sentence names", lasts=True),
    "ours": Fault("this machine cannot go on", "do what the sentence says"),
    "theirs": Fault("what another peer said breaks a rule, whose name stands first", "look the reason up below"),
    "disk-full": Fault(
        "a write found no room", f"free some space on that disk, or {_ELSEWHERE}; nothing that was announced is lost"
    ),
    "quota": Fault("your share of that disk is used up", f"free some space within your quota, or {_ELSEWHERE}"),
    "read-only": Fault("that disk is read-only", _ELSEWHERE),
    "no-permission": Fault(
        "this user may not do that", "name a place that is yours, or run it as the user to whom that one belongs", lasts=True
    ),
    "no-such-file": Fault("a file or folder that was named is not there", "name another, or make it first"),
    "wrong-kind": Fault(
        "there is a file where a folder should be, or a folder where a file should be", "name another", lasts=True
    ),
    "taken-port": Fault(
        "another program listens there, or this user or this machine may not",
        "end that program, or use another port with --port, --dht-port or --api",
    ),
    "too-many-files": Fault("the process has as many files open as it may", "raise the limit: `ulimit -n 65536`"),
    "not-text": Fault("a file is no text in UTF-8", "name another, or convert it", lasts=True),
    "no-memory": Fault("the machine has too little memory", "end something else; `dilocox check LINK` says what a run needs"),
    "locked": Fault("another program holds a database of ours", "end it, or wait until it is done"),
    "database": Fault(
        "a database cannot be read or written", f"look whether that disk is full, read-only or broken, or {_ELSEWHERE}"
    ),
    "not-running": Fault(
        "no daemon runs there, it only starts, or it does not answer",
        "start one with `dilocox node --join LINK`, or name its --home",
    ),
    "wrong-host": Fault(
        "the API answers for its own address only", "ask by IP address, by localhost, or by the name in --api", 403
    ),
    "wrong-origin": Fault("another site's page asked", "open the daemon's own page", 403),
    "not-the-operator": Fault(
        "pausing and leaving are for who may read api.key in the daemon's folder", "run the verb as the daemon's user", 403
    ),
    "not-here": Fault("this daemon cannot do that", "do what the sentence says", 409),
    "no-number": Fault("a number was expected", "ask for /v1/rounds?last=NUMBER", 400),
    "no-round": Fault("a round's number was expected", "end the path with the number of a round", 400),
    "no-peer": Fault("an id was expected, or how it begins", "`dilocox peers` has those that there are", 400),
    "no-event-id": Fault("an event's number was expected", "ask for /v1/events?after=NUMBER", 400),
    "no-such-round": Fault(
        "no commit closed that round yet, or it is long gone", "`dilocox rounds` has those that there are", 404
    ),
    "no-such-peer": Fault("an id was expected, or how it begins", "`dilocox peers` has those that there are", 404),
    "no-attestation": Fault("this run asks for no evidence", "nothing", 404),
    "no-such-path": Fault("the API has no such path", "/openapi.json has all of them", 404),
    "wrong-method": Fault("that path is asked in another way", "/openapi.json says which", 405),
    "too-many-requests": Fault("one connection asks more often than it may", "wait a second, and ask less often", 429),
    "too-many-readers": Fault("as many read events as may at once", "end one of them", 503),
    "waiting": Fault("the daemon starts, waits for its coordinator, or for room", "`dilocox status` says what for", 503),
    "not-known": Fault("whether the daemon is well is not known yet", "wait: it is on its way", 503),
    "not-well": Fault("the daemon is not well, and why stands behind it", "`dilocox status` says what to do", 503),
}

_ERRNO = {
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "no-permission",
    errno.EPERM: "no-permission",
    errno.ENOENT: "no-such-file",
    errno.ENOTDIR: "wrong-kind",
    errno.EISDIR: "wrong-kind",
    errno.EEXIST: "wrong-kind",
    errno.EADDRINUSE: "taken-port",
    errno.EMFILE: "too-many-files",
    errno.ENFILE: "too-many-files",
}
_SQLITE = {
    sqlite3.SQLITE_FULL: "disk-full",
    sqlite3.SQLITE_READONLY: "read-only",
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CANTOPEN: "database",
    sqlite3.SQLITE_IOERR: "database",
}


def code_of(error: BaseException) -> str | None:
    """Return the code of an error. None: it was not expected, and its traceback is worth reading."""
    match error:
        case ConfigError():
            return "usage"
        case PortError():
            return "taken-port"
        case LocalError(__cause__=PermissionError() | RemoteError(__cause__=PermissionError())):
            return "no-permission"
        case LocalError(__cause__=cause):
            return _SQLITE.get(_primary(cause), "ours")
        case RemoteError():
            return "theirs"
        case OSError():
            return _ERRNO.get(error.errno or 0, None if error.filename is None else "ours")
        case UnicodeDecodeError():
            return "not-text"
        case MemoryError():
            return "no-memory"
        case sqlite3.OperationalError():
            return _SQLITE.get(_primary(error), "database")
    return None


def _primary(error: BaseException | None) -> int:
    """SQLite's primary result code; 0 where it is no error of SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def do_about(code: str) -> str | None:
    """Return advice for a code. None: the message contains it."""
    return None if code in ("usage", "ours", "theirs", "not-here") else FAULTS[code].do
