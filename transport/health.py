"""Does a daemon run on a folder, and does it answer? `python -m dilocox.transport.health` is the container's health check.

Nothing but the standard library: a probe that runs every few seconds must not cost what it watches.
"""

import fcntl
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["base_folder", "running_daemon"]

ANSWER_SECONDS = 10.0


def base_folder() -> Path:
    """Where daemons have their folders: $DILOCOX_HOME, or ~/.dilocox."""
    return Path(os.environ.get("DILOCOX_HOME", Path.home() / ".dilocox"))


def running_daemon(folder: Path) -> dict[str, Any] | None:
    """What the daemon on this folder announced, or None when none runs there, or when it has not announced anything yet."""
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        try:
            facts = json.loads((folder / "daemon.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return facts if isinstance(facts, dict) else None
    except FileNotFoundError:
        return None


def main() -> None:
    """Exit 0 while this machine's node or coordinator answers."""
    for name in ("node", "coordinator"):
        if (facts := running_daemon(base_folder() / name)) is not None:
            with urllib.request.urlopen(facts["api"] + "/livez", timeout=ANSWER_SECONDS):
                return
    sys.exit("no daemon runs here")


if __name__ == "__main__":
    main()
