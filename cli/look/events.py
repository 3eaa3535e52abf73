"""`dilocox events`: what happened at a daemon, from the daemon or from its folder."""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    AskOption,
    console,
    errors,
    fail,
    find_daemon,
    find_event_log,
    no_answer,
    refused,
    stranger,
    telling_daemon,
)
from dilocox.cli.exit_codes import Exit
from dilocox.transport.store.event_log import QUIET_SECONDS, read_events

__all__ = ["events"]

SILENCE_SECONDS = 6 * QUIET_SECONDS
"""A stream that is silent for longer is broken."""


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events as they happen.")] = False,
    since: Annotated[int, typer.Option(min=0, max=(1 << 53) - 1, metavar="ID", help="Only events after this number.")] = 0,
    home: AskOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one event per line.")] = False,
) -> None:
    """Show events, oldest first: rounds, clusters that joined and left, clusters not counted and why."""
    told = False
    for event in _events(home, since, follow):
        if event["id"] <= since and not follow:  # a daemon whose log started again sends all of it
            break
        told = True
        if as_json:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        else:
            console.print(_line(event), highlight=False, soft_wrap=True)
    if since and not told:
        errors.print(f"no event after {since}", style="dim", highlight=False)


def _line(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    line = "".join(each if each.isprintable() else " " for each in event["line"])
    return f"{event['id']:>7}  {at}  {line}"


def _events(home: Path | None, since: int, follow: bool) -> Iterator[dict[str, Any]]:
    if follow or telling_daemon(home) is not None:
        yield from _stream(find_daemon(home)["api"] + f"/v1/events?after={since}&follow={'yes' if follow else 'no'}")
        return
    path = find_event_log(home)
    errors.print(f"no daemon serves these events; reading {path}", style="dim", highlight=False, soft_wrap=True)
    for each in read_events(path, since):
        yield each.view()


def _stream(url: str) -> Iterator[dict[str, Any]]:
    """Yield server-sent events."""
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_SECONDS) as response:
            if response.headers.get_content_type() != "text/event-stream":
                stranger(url, "it sends no events")
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
    except urllib.error.HTTPError as error:
        refused(url, error)
    except urllib.error.URLError as error:
        no_answer(url, error)
    except HTTPException:
        stranger(url, "or no API")
    except (OSError, ValueError) as error:
        fail(f"the daemon stopped answering: {error}", Exit.NOT_RUNNING, "continue with --since and the last number above")
    if "follow=yes" in url:
        fail("the daemon ended", Exit.NOT_RUNNING, "run it without -f to read the folder")
