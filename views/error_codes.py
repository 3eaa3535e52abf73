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


_ELSEWHERE = "use a folder on another disk (for a daemon: --home)"

FAULTS: Mapping[str, Fault] = {
    "usage": Fault("an option, a variable or a file cannot be used as it is", "correct what the message names", lasts=True),
    "ours": Fault("this machine cannot continue", "follow the message"),
    "theirs": Fault("data from another peer break a rule; the message begins with the rule's name", "see that reason below"),
    "disk-full": Fault(
        "a write failed: the disk is full", f"free space on that disk, or {_ELSEWHERE}; everything that was announced is stored"
    ),
    "quota": Fault("the user's quota on that disk is used up", f"free space within the quota, or {_ELSEWHERE}"),
    "read-only": Fault("that disk is read-only", _ELSEWHERE),
    "no-permission": Fault(
        "this user does not have the permission",
        "use a folder of this user, or run it as the user that owns the folder",
        lasts=True,
    ),
    "no-such-file": Fault("a file or folder that was named does not exist", "name another, or create it first"),
    "wrong-kind": Fault(
        "a file was found where a folder is needed, or a folder where a file is needed", "name another", lasts=True
    ),
    "taken-port": Fault(
        "another program uses the port, or this user or machine may not open it",
        "stop that program, or use another port with --port, --dht-port or --api",
    ),
    "too-many-files": Fault("the process reached its limit of open files", "raise the limit: `ulimit -n 65536`"),
    "not-text": Fault("a file is not text in UTF-8", "pass another, or convert it", lasts=True),
    "no-memory": Fault(
        "the machine has too little memory", "stop other programs; run `dilocox check LINK` to see what a run needs"
    ),
    "locked": Fault("another program has locked a database of the daemon", "stop it, or wait until it is done"),
    "database": Fault(
        "a database cannot be read or written", f"check whether that disk is full, read-only or broken, or {_ELSEWHERE}"
    ),
    "not-running": Fault(
        "no daemon runs there, it is still starting, or it does not answer",
        "start one with `dilocox node --join LINK`, or pass its --home",
    ),
    "wrong-host": Fault(
        "the API answers only requests for its address", "use the IP address, localhost, or the name in --api", 403
    ),
    "wrong-origin": Fault("the page of another site sent the request", "open the daemon's page", 403),
    "not-the-operator": Fault(
        "only a user who can read api.key in the daemon's folder may pause or end it",
        "run the command as the daemon's user",
        403,
    ),
    "not-here": Fault("this daemon cannot do that", "follow the message", 409),
    "no-number": Fault("a number was expected", "use /v1/rounds?last=NUMBER", 400),
    "no-round": Fault("a round's number was expected", "end the path with the number of a round", 400),
    "no-peer": Fault("an id was expected, or its beginning", "run `dilocox peers` to list them", 400),
    "no-event-id": Fault("an event's number was expected", "use /v1/events?after=NUMBER", 400),
    "no-such-round": Fault("no commit closed that round yet, or it was deleted", "run `dilocox rounds` to list them", 404),
    "no-such-peer": Fault("an id was expected, or its beginning", "run `dilocox peers` to list them", 404),
    "no-attestation": Fault("this run requires no evidence", "nothing", 404),
    "no-such-path": Fault("the API has no such path", "/openapi.json lists all paths", 404),
    "wrong-method": Fault("that path needs another method", "/openapi.json lists the methods", 405),
    "too-many-requests": Fault("one connection sent too many requests", "wait a second, and send fewer requests", 429),
    "too-many-readers": Fault("the limit of event streams is reached", "close one of them", 503),
    "waiting": Fault(
        "the daemon starts, or waits for its coordinator or for free space", "run `dilocox status` for the reason", 503
    ),
    "not-known": Fault("the health of the daemon is not known yet", "wait: the first check is in progress", 503),
    "not-well": Fault("the daemon is not healthy; the message has the reason", "run `dilocox status` for the remedy", 503),
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
