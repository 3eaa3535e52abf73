"""The verbs, and where each is found. One is loaded when it is said, or when all are listed: `dilocox status` comes up in half the
time of `dilocox node`."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

__all__ = ["VERBS", "Verbs"]

VERBS = {
    "init": "init.init",
    "check": "check.check",
    "coordinator": "coordinator.coordinator",
    "node": "node.node",
    "hold": "hold.hold",
    "archive": "archive.archive",
    "appoint": "appoint.appoint",
    "pause": "attend.pause",
    "resume": "attend.resume",
    "leave": "attend.leave",
    "id": "identity.identity",
    "status": "show.status",
    "peers": "show.peers",
    "stages": "show.stages",
    "rounds": "show.rounds",
    "events": "events.events",
    "explain": "explain.explain",
    "top": "top.top",
    "plan": "plan.plan",
    "verify": "verify.verify",
    "shares": "shares.shares",
    "account": "settlement.account",
    "stake": "settlement.stake",
    "settle": "settlement.settle",
    "claim": "settlement.claim",
    "contract": "contract.app",
    "runs": "runs.runs",
    "offer": "offer.offer",
    "hire": "hire.hire",
    "zerog": "zerog.app",
    "export": "export.export",
    "generate": "generate.generate",
    "data": "data.app",
    "config": "config.app",
    "testnet": "testnet.app",
    "attest": "attest.app",
}
"""In the order of the help: the function, or the group of verbs, and the module here that has it."""


class Verbs(Mapping[str, Any]):
    """click's commands by name."""

    def __init__(self, places: Mapping[str, str], prepare: Callable[[str, Any], None]) -> None:
        """`prepare`: does what is to be done to a verb once it is loaded, by name."""
        self._places, self._prepare = places, prepare
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, _, attribute = self._places[name].partition(".")
            command = _command(name, getattr(import_module(f"dilocox.cli.{module}"), attribute))
            self._prepare(name, command)
            self._loaded[name] = command
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _command(name: str, found: Any) -> Any:
    """As typer makes it of a verb in an app."""
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        app.command(name)(found)
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
