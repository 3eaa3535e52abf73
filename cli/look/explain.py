"""`dilocox rounds N --why [PEER]`: print why a round was slow or incomplete, or went without a cluster."""

from pathlib import Path
from urllib.parse import quote

from dilocox.cli.common import api_call, console, print_json, print_labelled, telling_daemon

__all__ = ["print_why"]

HELP_LABEL = 12


def print_why(number: int, peer: str, home: Path | None, as_json: bool) -> None:
    """Print why round `number` went as it did, for this node or for the cluster that `peer` names, with numbers and what to do."""
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
    usual = f" (median of the rounds before: {median:.1f} s; slow: above {slow:.1f} s)" if median is not None else ""
    took = f": {value['seconds']:.1f} s{usual}" if value["seconds"] is not None else ""
    console.print(f"round {value['round']}: {value['verdict']}{took}", style="bold", highlight=False, soft_wrap=True)
    for row in value["findings"]:
        print_labelled(row["about"], row["says"], HELP_LABEL)
        if row["do"]:
            print_labelled("", f"help: {row['do']}", HELP_LABEL)
