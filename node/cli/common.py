"""What the verbs share: where the daemon is, JSON or tables, errors and exit codes."""

import json
import logging
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from protocol.transport.home import running_daemon

__all__ = ["HomeOption", "JsonOption", "api_get", "default_home", "fail", "print_json", "print_table", "set_up_logging"]

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_NOT_RUNNING = 1, 2, 3
API_SECONDS = 10.0

console = Console()
errors = Console(stderr=True)

HomeOption = Annotated[
    Path | None, typer.Option("--home", envvar="DILOCOX_HOME", help="The daemon's folder (default: ~/.dilocox).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def default_home() -> Path:
    return Path(os.environ.get("DILOCOX_HOME", Path.home() / ".dilocox"))


def testnet_folder() -> Path:
    return default_home() / "testnet"


def fail(message: str, code: int = EXIT_UNEXPECTED, help: str | None = None) -> NoReturn:
    """Say what failed and one thing to do, and exit."""
    errors.print(f"[bold red]error[/]: {message}", highlight=False, soft_wrap=True)
    if help:
        errors.print(f"  help  {help}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def set_up_logging(verbose: bool) -> None:
    """To stderr: in colour on a terminal, one plain line per record elsewhere."""
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("aiohttp", "asyncio", "hivemind", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def find_daemon(home: Path | None) -> dict[str, Any]:
    """The daemon on `home`; without one, on the default home, else a running testnet's first node, else its coordinator."""
    if home is not None:
        candidates = [home]
    else:
        testnet = testnet_folder()
        members = sorted(testnet.glob("node-*")) if testnet.is_dir() else []
        candidates = [default_home(), *members, testnet / "coordinator"]
    for folder in candidates:
        if (facts := running_daemon(folder)) is not None:
            if folder != candidates[0]:
                errors.print(f"[dim]reading {folder}[/]", highlight=False)
            return facts
    fail(
        f"no daemon runs on {candidates[0]}",
        EXIT_NOT_RUNNING,
        "start one with `dilocox node --join LINK`, or name its --home",
    )


def api_get(home: Path | None, path: str) -> Any:
    """GET a JSON document of the running daemon's API; exits with the right code when there is none."""
    url = find_daemon(home)["api"] + path
    try:
        with urllib.request.urlopen(url, timeout=API_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        problem = json.load(error)
        fail(problem["title"], EXIT_USAGE if error.code == 404 else EXIT_UNEXPECTED)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        fail(f"the daemon does not answer at {url}: {error}", EXIT_NOT_RUNNING)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Right-aligned where every cell of a column is a number."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = all(cell.replace(",", "").replace(".", "").lstrip("-").isdigit() for cell in cells if cell != "–")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
