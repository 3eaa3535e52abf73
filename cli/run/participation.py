"""`dilocox pause | resume | leave`: stop taking part, come back, go."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    HomeOption,
    JsonOption,
    api_address,
    api_call,
    console,
    fail,
    find_daemon,
    print_json,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.progress import working
from dilocox.transport.process.health import running_daemon

__all__ = ["leave", "pause", "resume"]

LOOK_SECONDS = 0.5

NowOption = Annotated[bool, typer.Option("--now", help="Give up the open round, instead of finishing it.")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done. Ctrl-C cancels nothing.")]


def pause(now: NowOption = False, wait: WaitOption = True, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Pause until `dilocox resume`: finish the round, leave the roster, free the devices. The daemon continues to run."""
    folder = _ask("pause", now, home, as_json)
    with working("finishing the round"):
        while wait and running_daemon(folder) is not None and api_call(folder, "/v1/status")["state"] == "finishing":
            time.sleep(LOOK_SECONDS)


def resume(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Resume training from the checkpoint of the last phase, with its uncommitted work."""
    _ask("resume", False, home, as_json)


def leave(now: NowOption = False, wait: WaitOption = True, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Finish the round, leave the roster, and end the daemon."""
    folder = _ask("leave", now, home, as_json)
    with working("finishing the round"):
        while wait and running_daemon(folder) is not None:
            time.sleep(LOOK_SECONDS)


def _ask(what: str, now: bool, home: Path | None, as_json: bool) -> Path:
    """Return the folder of the node that confirmed the request."""
    if api_address(home) is not None:
        fail(
            f"--home {home}: a user who may {what} a node must be able to read api.key in its folder",
            Exit.USAGE,
            "pass the node's folder",
        )
    facts = find_daemon(home)
    if facts["role"] not in ("node", "waiting"):
        fail(f"{facts['home']} runs a {facts['role']}: only a node trains", Exit.USAGE, "pass --home with the folder of a node")
    folder = Path(facts["home"])
    answer = api_call(folder, f"/v1/{what}{'?now=yes' if now else ''}", "POST")
    if as_json:
        print_json(answer)
    else:
        console.print(answer["says"], highlight=False, soft_wrap=True)
    return folder
