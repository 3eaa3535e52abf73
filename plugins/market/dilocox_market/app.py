"""The commands of this plugin: the entry point `market` of the group `dilocox.commands`."""

import typer

from dilocox_market.announce import announce
from dilocox_market.hire import hire
from dilocox_market.offer import offer
from dilocox_market.runs import runs

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Announce runs, offer machines, and find both.")
for command in (runs, announce, offer, hire):
    app.command()(command)
