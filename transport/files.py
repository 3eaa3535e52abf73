"""Open or heal: every file of a daemon's folder that can be made or fetched again is checked when it is opened.

A damaged one is set aside as `NAME.bad`, `NAME.2.bad`, … (nothing is overwritten), with one line in the log, and the daemon goes on
as if it had never been there. `identity.key` is not such a file: without it a node is somebody else, so a person has to look.
"""

import itertools
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dilocox.transport.blobs import fsync_directory

__all__ = ["quarantine", "read_checked", "read_facts", "write_new"]

log = logging.getLogger(__name__)

T = TypeVar("T")


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Make a file that is not there yet, whole or not at all. Raises FileExistsError: nothing is overwritten."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink()
        raise
    fsync_directory(path.parent)


def quarantine(path: Path, why: str) -> Path:
    """Set a damaged file aside; where it is now."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.bad" if number == 1 else f"{path.name}.{number}.bad")
        if not aside.exists():
            path.rename(aside)
            log.warning("%s is damaged (%s); it lies aside as %s", path, why, aside.name)
            return aside
    raise AssertionError("unreachable")


def read_checked(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """What `parse` makes of the file's bytes; None when there is no file, or after a ValueError, which sets the file aside."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        quarantine(path, str(error))
        return None


def read_facts(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    facts = json.loads(raw)
    if not isinstance(facts, dict):
        raise ValueError("not a JSON object")
    return facts
