"""Options of daemons from a file, and `dilocox config show VERB …`: the options of a daemon and their sources.

Precedence: default < file < environment < flag.
"""

import difflib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import JsonOption, fail, print_json, print_table
from dilocox.cli.environment import said_in
from dilocox.cli.exit_codes import Exit
from dilocox.protocol.errors import ConfigError
from dilocox.transport.notify.notify import parse_notice
from dilocox.transport.store.files import read_named

__all__ = ["ConfigOption", "app", "validated"]

ORIGINS = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
SECRET: dict[str, Callable[[str], Any]] = {"notify": parse_notice}
"""Options whose value may contain a secret; only its public part is printed."""
DAEMONS = ("node", "coordinator", "relay", "archive")

app = typer.Typer(help="Show the settings of a daemon, and where each comes from.", no_args_is_help=True)


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values as defaults. Raises ConfigError."""
    if path is None:
        return None
    try:
        values = tomllib.loads(read_named(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from error
    options = {name.lstrip("-"): each for each in context.command.params for name in each.opts}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in options:
            near = difflib.get_close_matches(key, options, 1)
            raise ConfigError(f"{path}: no option {key}{f'; did you mean {near[0]}?' if near else ''}")
        each: Any = options[key]
        found[each.name] = [value] if getattr(each, "multiple", False) and not isinstance(value, list) else value
    context.default_map = found
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_read,
        help='TOML file with options by name, such as hours = "22-06"; environment and flags win.',
    ),
]


def validated(parse: Callable[[Any], Any]) -> Callable[[typer.Context, typer.CallbackParam, Any], Any]:
    """Return a callback that validates an option with its reader, also if it is only printed. `parse` raises ConfigError."""

    def check(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        try:
            if value:
                parse(value)
        except ConfigError as error:
            raise ConfigError(f"{said_in(context, param)}{error}") from error
        return value

    return check


@app.callback()
def _config() -> None:
    """Show the options of a daemon, and their sources."""


@app.command("show", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def show(
    context: typer.Context,
    verb: Annotated[str, typer.Argument(help=f"One of {', '.join(DAEMONS)}, with its options.")],
    as_json: JsonOption = False,
) -> None:
    """Show each option of a daemon, its value and its source: default, file, environment or flag."""
    if verb not in DAEMONS:
        fail(f"{verb!r} is not a daemon", Exit.USAGE, f"use one of {', '.join(DAEMONS)}")
    root: Any = context.find_root().command
    command = root.commands[verb]
    told = command.make_context(verb, list(context.args), parent=context.find_root(), **command.context_settings)
    rows = []
    for each in command.params:
        if each.name in told.params:
            source = told.get_parameter_source(each.name)
            value, origin = told.params[each.name], ORIGINS.get(source.name, "default") if source else "default"
            row = {"option": each.opts[0].lstrip("-"), "value": _shown(each.name, value), "origin": origin}
            rows.append({**row, "file": str(told.params["config"]) if origin == "file" else None, "variable": each.envvar})
    if as_json:
        print_json(rows)
    else:
        columns = ["option", "value", "origin", "in the environment"]
        print_table(columns, [["–" if cell is None else cell for cell in _cells(row)] for row in rows])


def _cells(row: dict[str, Any]) -> list[str | None]:
    value = None if row["value"] is None else str(row["value"])
    return [row["option"], value, f"file {row['file']}" if row["file"] else row["origin"], row["variable"]]


def _shown(name: str, value: Any) -> Any:
    """Without secrets."""
    if name in SECRET and value is not None:
        return SECRET[name](value).name
    if value is None or isinstance(value, str | int | float):
        return value
    return ", ".join(map(str, value)) or None if isinstance(value, list | tuple) else str(value)
