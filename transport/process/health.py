"""Does a daemon run on a folder, and does it answer? `python -m dilocox.transport.process.health` is the container's health check.

Nothing but the standard library: a probe that runs every few seconds must not cost what it watches.
"""

import fcntl
import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

__all__ = ["FOLDERS", "base_folder", "running_daemon", "runs"]

FOLDERS = ("node", "coordinator", "relay", "archive")
"""Folders of daemons, in `base_folder`."""

ANSWER_SECONDS = 10.0


def base_folder() -> Path:
    """Return where daemons have their folders: $DILOCOX_HOME, or ~/.dilocox. Raises RuntimeError for a user of no home folder."""
    named = os.environ.get("DILOCOX_HOME")
    return Path(named) if named else Path.home() / ".dilocox"


def running_daemon(folder: Path) -> dict[str, Any] | None:
    """Return what the daemon on this folder published; None if no daemon runs there, or it has published nothing yet."""
    if not runs(folder):
        return None
    try:
        facts = json.loads((folder / "daemon.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return facts if isinstance(facts, dict) and facts.get("pid") else None


def runs(folder: Path) -> bool:
    """Whether a daemon does on this folder, also one that only starts."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False


def _problem(answer: urllib.error.HTTPError) -> dict[str, Any] | None:
    """Return a daemon's description of its problem; None if the answer is something else."""
    try:
        said = json.load(answer)
    except (OSError, HTTPException, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and {"code", "title"} <= said.keys() else None


def main() -> None:
    """Exit 0 unless no daemon runs on this machine, or its /readyz reports that it is not healthy."""
    try:
        base_folder()
    except RuntimeError as error:
        sys.exit(f"{error} Set DILOCOX_HOME to the folder of the daemon.")
    for name in FOLDERS:
        if (facts := running_daemon(base_folder() / name)) is not None:
            try:
                with urllib.request.urlopen(facts["api"] + "/readyz", timeout=ANSWER_SECONDS):
                    return print("well")
            except urllib.error.HTTPError as error:
                if (said := _problem(error)) is None:
                    sys.exit(f"it answers with {error.code} and no reason: read its log")
                if said["code"] == "not-well":
                    sys.exit(said["title"])
                return print(f"not known yet: {said['title']}")
            except (OSError, HTTPException) as error:
                sys.exit(f"it does not answer: {error}")
    sys.exit("no daemon runs here")


if __name__ == "__main__":
    main()
