"""The commands of this plugin: the entry point `settlement` of the group `dilocox.commands`."""

from dilocox_settlement.commands import app
from dilocox_settlement.contract_commands import app as contract

__all__ = ["app"]

app.add_typer(contract, name="contract")
