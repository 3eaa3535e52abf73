"""`dilocox explain N [PEER]`: why a round was slow, or short, or went without somebody."""

from typing import Annotated
from urllib.parse import quote

import typer

from dilocox.cli.common import AskOption, JsonOption, api_call, console, print_json, print_labelled, telling_daemon
from dilocox.protocol import limits

__all__ = ["explain"]

HELP_LABEL = 12


def explain(
    number: Annotated[int, typer.Argument(metavar="N", min=0, max=limits.ROUNDS - 1, help="The round.")],
    peer: Annotated[
        str, typer.Argument(metavar="[PEER]", help="A cluster: the beginning of its id, or as tables have it, 12D3…k7Qm.")
    ] = "",
    home: AskOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a round was slow or incomplete, or went without this node (or PEER): with numbers, and what to do."""
    asked = f"/v1/explain/{number}?peer={quote(peer)}"
    if telling_daemon(home):
        value = api_call(home, asked)
    else:
        from dilocox.cli import offline  # loads slowly

        value = offline.explain(home, number, peer)
    if as_json:
        print_json(value)
        return
    median, slow = value["usual_seconds"], value["slow_above_seconds"]
    usual = f" (the median of the rounds before is {median:.1f} s; slow is above {slow:.1f} s)" if median is not None else ""
    took = f": {value['seconds']:.1f} s{usual}" if value["seconds"] is not None else ""
    console.print(f"round {value['round']}: {value['verdict']}{took}", style="bold", highlight=False, soft_wrap=True)
    for row in value["findings"]:
        print_labelled(row["about"], row["says"], HELP_LABEL)
        if row["do"]:
            print_labelled("", f"help: {row['do']}", HELP_LABEL)
