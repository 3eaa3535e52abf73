"""`dilocox status --watch`: status, the last rounds and the peers, again and again, on one screen."""

import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from dilocox.cli import offline
from dilocox.cli.common import api_call, console, has_ended, labelled, make_table
from dilocox.cli.exit_codes import Exit
from dilocox.cli.look.status import (
    LABEL_WIDTH,
    PEER_COLUMNS,
    ROUND_COLUMNS,
    peer_row,
    round_row,
    status_rows,
)
from dilocox.protocol.ids import short

__all__ = ["frame", "sparkline", "watch"]

BARS = "▁▂▃▄▅▆▇█"
ROUNDS_SHOWN = 10
PEERS_SHOWN = ("peer", "name", "roster", "reputation", "present", "round", "step", "loss", "tok/s")
"""Columns that fit a line of 80 characters."""


def watch(home: Path | None, every: float) -> None:
    """Show status, rounds and peers until Ctrl-C; off a terminal once. `every`: seconds between two reads."""
    if has_ended(home):
        console.print(_ended(home))
        raise typer.Exit(Exit.NOT_RUNNING)
    if not sys.stdout.isatty():
        console.print(_screen(home))
        return
    while True:
        seen = _screen(home)  # it ends here, off the alternate screen, when the daemon is gone
        with suppress(typer.Exit), Live(seen, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(_screen(home), refresh=True)


def _screen(home: Path | None) -> Group:
    status = api_call(home, "/v1/status")
    knows = status["role"] != "waiting"
    rounds = api_call(home, f"/v1/rounds?last={_wanted()}") if knows else []
    return frame(status, rounds, api_call(home, "/v1/peers") if knows else [])


def _ended(home: Path | None) -> Group:
    return frame(offline.status(home), offline.rounds(home, last=_wanted()), offline.peers(home))


def _wanted() -> int:
    """Rounds: so many as there are bars in a line."""
    return max(ROUNDS_SHOWN, shutil.get_terminal_size().columns)


def frame(status: dict[str, Any], rounds: list[dict[str, Any]], peers: list[dict[str, Any]]) -> Group:
    """Return the API's answers as one screen."""
    lines: list[Any] = [labelled(label, text, LABEL_WIDTH) for label, text in status_rows(status)]
    width = max(10, console.width - LABEL_WIDTH - 20)
    for label, key in (("loss", "loss"), ("seconds", "seconds")):
        values = [row[key] for row in rounds if row[key] is not None and row["round"] and not row["closing"]][-width:]
        if len(values) > 1:
            lines.append(labelled(label, f"{sparkline(values)} {values[-1]:.3f}", LABEL_WIDTH))
    if rounds:
        lines += [Text(), make_table(ROUND_COLUMNS, [round_row(row) for row in rounds[-ROUNDS_SHOWN:]])]
    if peers:
        cells = [dict(zip(PEER_COLUMNS, peer_row({**row, "peer": short(row["peer"])}), strict=True)) for row in peers]
        lines += [Text(), make_table(list(PEERS_SHOWN), [[row[column] for column in PEERS_SHOWN] for row in cells])]
    return Group(*lines)


def sparkline(values: list[float]) -> str:
    """A bar for each, between the least and the most."""
    least, most = min(values), max(values)
    step = (most - least) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((value - least) / step)] for value in values)
