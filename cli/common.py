"""Common parts of the commands: finding the daemon, JSON or tables, errors and exit codes."""

import errno
import ipaddress
import json
import logging
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilocox.cli.exit_codes import Exit
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import JoinLink, printable
from dilocox.transport.process.health import base_folder, running_daemon, runs
from dilocox.transport.store.files import find_chains, find_events, in_order_of_use, read_named
from dilocox.views.error_codes import do_about

if TYPE_CHECKING:
    from dilocox.protocol.run.manifest import Manifest
    from dilocox.transport.archive.source import ArchivePlace

__all__ = [
    "COORDINATOR_PORTS",
    "NODE_PORTS",
    "THIS_MACHINE",
    "ApiOption",
    "ArchiveKeyOption",
    "ArchiveOption",
    "AskOption",
    "DataOption",
    "DhtOption",
    "DhtPortOption",
    "FirstPorts",
    "HomeOption",
    "HostOption",
    "JoinOption",
    "JsonOption",
    "MaybeJoinOption",
    "NameOption",
    "PortOption",
    "ReadArchiveOption",
    "ReadOption",
    "api_call",
    "archive_place",
    "beside",
    "check_place",
    "fail",
    "has_ended",
    "no_answer",
    "print_json",
    "print_labelled",
    "print_table",
    "read_link",
    "read_run",
    "read_run_text",
    "set_up_logging",
]

API_SECONDS = 10.0
CODES = {Exit.UNEXPECTED: "ours", Exit.USAGE: "usage", Exit.NOT_RUNNING: "not-running"}
"""Error codes of exits that have no other."""
ANOTHER_API = "run `dilocox status` to see where its API is; its --port and --dht-port are other ports"

# Off a terminal a table has a fixed width, for grep. No markup: output contains names that unknown peers chose.
console = Console(width=None if sys.stdout.isatty() else 250, markup=False)
errors = Console(stderr=True, width=None if sys.stderr.isatty() else 250, markup=False)

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="The daemon's folder (default: in $DILOCOX_HOME, or ~/.dilocox).")
]
AskOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR|URL",
        help="The daemon's folder, or where its API answers, such as http://127.0.0.1:7402 (default: a daemon of this machine).",
    ),
]
DhtOption = Annotated[
    bool,
    typer.Option("--dht/--no-dht", help="Join the DHT, through which moved peers are found."),
]
THIS_MACHINE = socket.gethostname()
_JOIN = typer.Option("--join", help="The join link, or @FILE with it.")
JoinOption = Annotated[str, _JOIN]
MaybeJoinOption = Annotated[str | None, _JOIN]
ReadOption = Annotated[
    str | None, typer.Option("--join", metavar="LINK", help="Read from the run: its join link, or @FILE with it.")
]
NameOption = Annotated[
    str, typer.Option(callback=lambda text: _name(text), help="Display name of this peer (default: host name).")
]
HostOption = Annotated[
    str, typer.Option(callback=lambda text: _reached_at(text), help="Address by which other machines reach this one.")
]
DEVICES = {"min": 1, "max": limits.STAGES}
"""Bounds of the devices of a host: each device runs at least one stage."""
PORTS = {"min": 0, "max": 65_535}


class FirstPorts(NamedTuple):
    """Default ports of a daemon: fixed, so that a router and a link can name them. 0: any free port."""

    grpc: int = 0
    dht: int = 0
    api: int = 0


COORDINATOR_PORTS = FirstPorts(7400, 7401, 7402)
NODE_PORTS = FirstPorts(7410, 7411, 7412)
"""Others than a coordinator's: both may run on one machine."""


def _first(which: int) -> str:
    return f"{COORDINATOR_PORTS[which]} for a coordinator, {NODE_PORTS[which]} for a node, any for other daemons"


PortOption = Annotated[
    int | None, typer.Option(**PORTS, help=f"gRPC port (default: the one used last; at first {_first(0)}; 0: any).")
]
DhtPortOption = Annotated[
    int | None, typer.Option(**PORTS, help=f"DHT port (default: the one used last; at first {_first(1)}; 0: any).")
]
ApiOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        callback=lambda text: _listen(text),
        help=f"Address of the HTTP API (default: 127.0.0.1, port {_first(2)}; 0: any).",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="NAME=DIR", help="Folder of the run's corpus NAME."),
]
ArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="URL",
        help="The run's archive, read where no peer serves the data: a folder, or s3://BUCKET/PREFIX.",
    ),
]
ReadArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive", metavar="URL", help="Read from the run's archive; with --join: only where no peer serves the data."
    ),
]
ArchiveKeyOption = Annotated[
    Path | None, typer.Option("--archive-key", metavar="FILE", help="File with the key that encrypts the archive.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})|[0-9A-Fa-f:.%]{2,64}")
"""A name, an IPv4 or an IPv6 address: what a join link can carry."""


def _host(text: str) -> str:
    """Return a host name or an address, IPv6 without brackets. Raises BadParameter."""
    bare = text.removeprefix("[").removesuffix("]")
    if "%" in bare:
        raise typer.BadParameter(f"{text!r} names an interface of this machine: pass a global address")
    if not HOST.fullmatch(bare):
        raise typer.BadParameter(f"{text!r} is not a host name and not an address")
    if ":" in bare:
        try:
            return str(ipaddress.IPv6Address(bare))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not an IPv6 address: pass the port with --port") from None
    return bare


def _reached_at(text: str) -> str:
    if text in ("0.0.0.0", "::", "[::]"):
        raise typer.BadParameter(
            f"{text} is not an address that other machines can use: pass the one by which they reach this machine"
        )
    return _host(text)


def _name(text: str) -> str:
    """Others refuse the record of who is called otherwise."""
    if len(text) > limits.TEXT_CHARACTERS or not text.isprintable():
        most = limits.TEXT_CHARACTERS
        raise typer.BadParameter(f"{printable(text[:most])!r} is not a valid name: use up to {most} printable characters")
    return text


def _listen(text: str | None) -> str | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if host:
        _host(host)
    if not port.isdecimal() or not int(port) <= PORTS["max"]:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8080 (port 0: any)")
    return text


def testnet_folder() -> Path:
    return base_folder() / "testnet"


def fail(message: str, exit: Exit = Exit.UNEXPECTED, help: str | None = None, code: str | None = None) -> NoReturn:
    """Say what failed and one thing to do, and exit. `code`: of views/error_codes.py; None: what follows from the exit."""
    code = CODES[exit] if code is None else code
    errors.print(Text.assemble((f"error[{code}]", "bold red"), f": {shown(message)}"), soft_wrap=True)
    if help:
        errors.print(f"  help  {help}", highlight=False, soft_wrap=True)
    raise typer.Exit(exit)


def shown(text: str) -> str:
    """Others' words may be in it: in lines, for a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def read_link(text: str) -> JoinLink:
    """Return a join link, given directly or as @FILE. Raises ConfigError."""
    try:
        return JoinLink.parse(read_named(Path(text[1:]), piped=True) if text.startswith("@") else text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the join link: {error}") from error


def read_run_text(run_file: Path) -> str:
    """Exits where it cannot be read."""
    try:
        return read_named(run_file)
    except FileNotFoundError:
        fail(f"no run file {run_file}", Exit.USAGE, f"run: dilocox init {run_file}")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {run_file}: {error}", Exit.USAGE, "pass a run file in UTF-8, as `dilocox init` writes it")


def beside(run_file: Path, ending: str) -> Path:
    """Return a file beside a run file with the same name, such as the owner's key. Raises ConfigError if there is none."""
    if not run_file.name:
        raise ConfigError(f"{run_file} is a folder: pass a file in it, such as {run_file / 'my-run.toml'}")
    return run_file.with_suffix(ending)


def check_place(file: Path, option: str = "") -> None:
    """Before the work whose outcome goes there. Raises ConfigError where no file can be written."""
    folder = file.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK) or file.is_dir():
        raise ConfigError(f"{option}{file}: cannot write a file there: pass one in an existing folder with write permission")


def read_run(run_file: Path) -> "Manifest":
    """Exit where there is none. Raises ConfigError where it is no run."""
    from dilocox.protocol.run.manifest import Manifest  # loads slowly, and `status` needs none

    return Manifest.from_toml(read_run_text(run_file))


def set_up_logging(verbose: bool) -> None:
    """Log to stderr: coloured on a terminal, one plain line per record elsewhere."""
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    for noisy in ("aiohttp", "asyncio", "hivemind", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def known_homes(home: Path | None) -> list[Path]:
    """The folder a verb is about: `home`; without one this machine's node, a testnet's nodes, then the coordinators."""
    if home is not None:
        if home.exists() and not home.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(home))
        return [home]
    base, testnet = base_folder(), testnet_folder()
    return [
        base / "node",
        *sorted(path for path in testnet.glob("node-*") if path.is_dir()),
        base / "relay",
        base / "archive",
        base / "coordinator",
        testnet / "coordinator",
    ]


def kept_homes(home: Path | None) -> list[Path]:
    """`known_homes`, to read what is kept there: of a testnet's nodes, who all took part in one run, first who was last at work."""
    found = known_homes(home)
    chains = {kept[-1]: folder for folder in found if folder.name.startswith("node-") and (kept := find_chains(folder))}
    newest = iter([chains[path] for path in reversed(in_order_of_use(chains))])
    return [next(newest) if folder in chains.values() else folder for folder in found]


def api_address(home: Path | None) -> str | None:
    """Return the API address, if the option names one instead of a folder."""
    said = re.fullmatch(r"(https?):/{1,2}([^/]+)/?", str(home))  # a Path keeps one of two slashes
    return f"{said[1]}://{said[2]}" if said is not None else None


def some_daemon(home: Path | None) -> dict[str, Any] | None:
    """Return the first running daemon among `known_homes`, or the one at the named address."""
    if (address := api_address(home)) is not None:
        return {"api": address, "role": "there", "home": str(home)}
    for folder in known_homes(home):
        if (facts := running_daemon(folder)) is not None:
            if home is None:
                _say_once(f"reading {folder}")
            return {**facts, "home": str(folder)}
    return None


@cache
def _say_once(text: str) -> None:
    """A verb may ask more than once."""
    errors.print(text, style="dim", highlight=False, soft_wrap=True)


def has_ended(home: Path | None) -> bool:
    """Return whether no daemon is there, nor starts, but what one stored of a run. cli/offline.py reads that."""
    if some_daemon(home) is not None:
        return False
    folders = kept_homes(home)
    return any(map(find_chains, folders)) and not any(map(runs, folders))


def telling_daemon(home: Path | None) -> dict[str, Any] | None:
    """Return `some_daemon`, once it can describe its run."""
    facts = some_daemon(home)
    return facts if facts is not None and facts["role"] != "waiting" else None


def find_daemon(home: Path | None) -> dict[str, Any]:
    """`some_daemon`; exits with the right code when there is none."""
    if (facts := some_daemon(home)) is not None:
        return facts
    for folder in known_homes(home):
        if runs(folder):
            fail(
                f"the daemon of {folder} is starting and does not answer yet",
                Exit.NOT_RUNNING,
                "read its log for what it waits for",
            )
    place = f"for {home}" if home else f"under {base_folder()}"
    fail(f"no daemon runs {place}", Exit.NOT_RUNNING, do_about("not-running"))


def find_chain_files(home: Path | None) -> list[Path]:
    """The commit chains in the first of `known_homes` that has one; that of its last run is the last."""
    for folder in kept_homes(home):
        if chains := find_chains(folder):
            if len(chains) > 1:
                last = chains[-1].parent.name
                errors.print(
                    f"{folder} contains {len(chains)} runs; this command reads the last: {last}",
                    style="dim",
                    highlight=False,
                    soft_wrap=True,
                )
            return chains
    place = f"under {home or base_folder()}"
    fail(f"no commit chain {place}", Exit.USAGE, "pass --home with the folder of a daemon")


def find_event_log(home: Path | None) -> Path:
    """The event log of the last run, in the first of `known_homes` that has one."""
    for folder in kept_homes(home):
        if logs := find_events(folder):
            return logs[-1]
    place = f"under {home or base_folder()}"
    fail(f"no events {place}", Exit.USAGE, "pass --home with the folder of a node or a coordinator")


def api_call(home: Path | None, path: str, method: str = "GET") -> Any:
    """A JSON document of the running daemon's API; exits with the right code when there is none. POST: it does something for it."""
    facts = find_daemon(home)
    url = facts["api"] + path
    request = urllib.request.Request(url, method=method, headers=_operator(Path(facts["home"])) if method != "GET" else {})
    try:
        with urllib.request.urlopen(request, timeout=API_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        refused(url, error)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        no_answer(url, error)
    except (ValueError, HTTPException):
        stranger(url, "or no API")


def no_answer(url: str, error: OSError) -> NoReturn:
    """Report that nothing answers at a daemon's API, and exit. A daemon that accepts a call and then stays silent is
    reported as such."""
    why = getattr(error, "reason", error)
    there = "the process runs, but does not answer: read its log, and its state in `ps`"
    do = there if isinstance(error, TimeoutError) else do_about("not-running")
    fail(f"the daemon does not answer at {url}: {why}", Exit.NOT_RUNNING, do)


def refused(url: str, error: urllib.error.HTTPError) -> NoReturn:
    """Say an API's problem, and exit with the right code."""
    try:
        problem = json.load(error)
        title, code = str(problem["title"]), str(problem["code"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        stranger(url, str(error))
    exit = {404: Exit.USAGE, 503: Exit.NOT_RUNNING}.get(error.code, Exit.UNEXPECTED)
    fail(title, exit, problem.get("do"), code)


def stranger(url: str, why: str) -> NoReturn:
    """Say that something else answers where an API was named, and exit."""
    fail(f"the server at {url} is not a dilocox daemon: {why}", Exit.NOT_RUNNING, ANOTHER_API)


def _operator(home: Path) -> dict[str, str]:
    """Return the header that proves the daemon's operator; empty if the folder has no key, or it is not readable."""
    from dilocox.transport.store.data_directory import API_KEY  # loads slowly

    try:
        return {"Authorization": f"Bearer {(home / API_KEY).read_text()}"}
    except (OSError, UnicodeDecodeError):
        return {}


def archive_place(url: str | None, key: Path | None) -> "ArchivePlace | None":
    """Return the archive that `--archive` and `--archive-key` name. Raises ConfigError."""
    from dilocox.transport.archive.sealing import load_key  # load slowly, and `status` needs none
    from dilocox.transport.archive.source import ArchivePlace
    from dilocox.transport.archive.storage import open_storage

    if url is None:
        if key is not None:
            raise ConfigError("use --archive-key only with --archive URL")
        return None
    open_storage(url)
    if key is not None:
        load_key(key)
    return ArchivePlace(url, key)


def print_labelled(label: str, text: str | Text, width: int) -> None:
    """A line that begins with its bold label."""
    console.print(labelled(label, text, width), soft_wrap=True)


def labelled(label: str, text: str | Text, width: int) -> Text:
    return Text.assemble((f"{label:<{width}}", "bold"), shown(text) if isinstance(text, str) else text)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    console.print(make_table(columns, rows))


def make_table(columns: list[str], rows: list[list[str]]) -> Table:
    """Right-aligned where every cell of a column is a number."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        numeric = all(cell.replace(",", "").replace(".", "").lstrip("-").isdigit() for cell in cells if cell != "–")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(shown, row))
    return table


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
