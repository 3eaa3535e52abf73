"""Table of commands, and the module of each. A module is loaded when its command runs, or when all are listed: `dilocox
status` starts in half the time of `dilocox node`."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module, metadata
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from dilocox.protocol.ids import printable
from dilocox.transport.plugins import installed, load

__all__ = ["PANELS", "VERBS", "Verbs", "listing", "plugins"]

VERBS = {
    "init": "run.init.init",
    "check": "run.check.check",
    "coordinator": "run.coordinator.coordinator",
    "node": "run.node.node",
    "relay": "run.relay.relay",
    "archive": "run.archive.archive",
    "owner": "owner.appoint.app",
    "pause": "run.participation.pause",
    "resume": "run.participation.resume",
    "leave": "run.participation.leave",
    "id": "run.identity.identity",
    "status": "look.status.status",
    "peers": "look.status.peers",
    "rounds": "look.status.rounds",
    "events": "look.events.events",
    "plan": "run.plan.plan",
    "verify": "dev.verify.verify",
    "export": "model.export.export",
    "generate": "model.generate.generate",
    "data": "model.data.app",
    "config": "config.app",
    "testnet": "dev.testnet.app",
    "attest": "dev.attest.app",
}
"""Commands in the order of the help: function, or group, with its module here."""

PANELS: dict[str, dict[str, str]] = {
    "Start": {
        "init": "Make a run file and the owner's key.",
        "check": "Check a run file or a join link and this machine before a start.",
        "coordinator": "Serve a run: admit peers, close rounds, sign commits.",
        "node": "Join a run and train.",
        "testnet": "Try a swarm of real daemons on this machine.",
        "plan": "Estimate a run on given hardware and bandwidth.",
    },
    "Look": {
        "status": "Show the state of a daemon once, or live: reachable, in sync, in this round, counted.",
        "peers": "List the peers of the run, or its stages.",
        "rounds": "List the rounds, or show and explain one.",
        "events": "Show events, oldest first.",
        "verify": "Recheck every signature, vote and hash offline.",
        "attest": "Show and check hardware evidence.",
    },
    "Model": {
        "data": "Build, list and delete corpora.",
        "export": "Write the committed model as a Hugging Face folder.",
        "generate": "Continue a text with the model.",
    },
    "Control": {
        "pause": "Pause until `dilocox resume`.",
        "resume": "Resume training after `dilocox pause`.",
        "leave": "Finish the round, leave the roster, and end the daemon.",
        "relay": "Store payloads and states for peers that are not reachable.",
        "archive": "Store a run's chain, states and data in a folder or bucket.",
        "config": "Show the options of a daemon, and their sources.",
        "id": "Print the peer id of a daemon's folder.",
    },
    "Owner": {
        "owner": "Appoint another coordinator of a run.",
    },
}
"""The root's help by panel: written here, so that listing all verbs loads none of them."""


PLUGINS = "dilocox.commands"
"""Group of entry points: each names a typer app, or a function, of an installed distribution."""


PLUGIN_NAME = re.compile("[a-z][a-z0-9]*")
"""Without a dash: the variables of its options then begin like those of no other command."""


@cache
def plugins() -> dict[str, metadata.EntryPoint]:
    """Return the commands of installed plugins by name. A name that the core has stays the core's."""
    return {name: entry for name, entry in installed(PLUGINS).items() if name not in VERBS and PLUGIN_NAME.fullmatch(name)}


def listing() -> dict[str, Any]:
    """Return a command for each verb that only its help line is taken of. A plugin's line is the summary of its distribution."""
    lines = [(panel, name, line) for panel, verbs in PANELS.items() for name, line in verbs.items()]
    for name, entry in plugins().items():
        summary = (entry.dist.metadata["Summary"] if entry.dist is not None else "") or ""
        lines.append(("Plugins", name, escape(printable(summary))))
    return {name: TyperCommand(name, help=line, short_help=line, rich_help_panel=panel) for panel, name, line in lines}


class Verbs(Mapping[str, Any]):
    """click's commands by name."""

    def __init__(self, places: Mapping[str, str], prepare: Callable[[str, Any], None]) -> None:
        """`prepare`: does what is to be done to a verb once it is loaded, by name."""
        self._places, self._prepare = places, prepare
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            command = _command(name, self._found(name))
            self._prepare(name, command)
            self._loaded[name] = command
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._places, *plugins()))

    def __len__(self) -> int:
        return len(self._places) + len(plugins())

    def _found(self, name: str) -> Any:
        """Load a verb. Raises KeyError if neither the core nor a plugin has it, ConfigError if its plugin cannot be loaded."""
        if name in self._places:
            module, _, attribute = self._places[name].rpartition(".")
            return getattr(import_module(f"dilocox.cli.{module}"), attribute)
        return load(plugins()[name])


class Sectioned(TyperCommand):
    """A command whose help is two columns of plain text, with a heading for each group of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        arguments: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in {"Arguments": arguments, **sections}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _command(name: str, found: Any) -> Any:
    """Return a verb's command, as typer makes it in an app. The root alone shows panels: their narrow columns make options long."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name, cls=Sectioned)(found)
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
