"""`dilocox explain N [PEER]`: why a round was slow, or short, or went without somebody."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from dilocox.cli.common import (
    AskOption,
    JsonOption,
    api_call,
    console,
    errors,
    fail,
    find_chain_files,
    print_json,
    print_labelled,
    telling_daemon,
)
from dilocox.cli.exits import Exit
from dilocox.protocol import limits
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.data_directory import load_identity
from dilocox.transport.event_log import EVENTS, Happened, read_page
from dilocox.views.explain import NotThere
from dilocox.views.explain import explain as explained
from dilocox.views.faults import do_about

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
    """Why a round was slow, or short, or went without this node (or PEER): with numbers, and what to do."""
    asked = f"/v1/explain/{number}?peer={quote(peer)}"
    value = api_call(home, asked) if telling_daemon(home) else _offline(home, number, peer)
    if as_json:
        print_json(value)
        return
    usual = f", usually {value['usual_seconds']:.1f} s" if value["usual_seconds"] is not None else ""
    took = f": {value['seconds']:.1f} s{usual}" if value["seconds"] is not None else ""
    console.print(f"round {value['round']}: {value['verdict']}{took}", style="bold", highlight=False, soft_wrap=True)
    for row in value["findings"]:
        print_labelled(row["about"], row["says"], HELP_LABEL)
        if row["do"]:
            print_labelled("", f"help: {row['do']}", HELP_LABEL)


def _offline(home: Path | None, number: int, peer: str) -> dict[str, Any]:
    path = find_chain_files(home)[-1]
    errors.print(f"no daemon tells of it; reading {path}", style="dim", highlight=False, soft_wrap=True)
    kept, key = path.with_name(EVENTS), path.parents[2] / "identity.key"

    def events(round: int) -> list[Happened]:
        return read_page(kept, 0, round) if kept.exists() else []

    with ChainFile.for_reading(path) as chain:
        me = load_identity(key).peer if key.exists() else ""
        try:
            return explained(chain, events, number, peer, me if me != chain.head.coordinator else "")
        except NotThere as error:
            fail(str(error), Exit.USAGE, do_about(error.code), error.code)
