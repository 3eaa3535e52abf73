"""`dilocox shares --join LINK --sample N`: requests for random shards of what the run's commits name."""

import asyncio
from collections import Counter
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dilocox.cli.common import HomeOption, JoinOption, JsonOption, console, print_json, print_table
from dilocox.cli.sources import fetching, following
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import short

if TYPE_CHECKING:
    from dilocox_availability.probes import Sample

__all__ = ["shares"]


def shares(
    join: JoinOption,
    sample: Annotated[
        int, typer.Option("--sample", min=1, max=10_000, metavar="N", help="Number of erasure shards to request.")
    ] = 16,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Probe peers for random erasure shards, and print how likely it is that too few exist. Any command that reads the run
    restores from shards what no peer serves: `export --join`, `verify --replay --join`, a node that joins."""
    found = asyncio.run(_sample(join, home, sample))
    if as_json:
        print_json(told(found))
    else:
        show(found)


async def _sample(join: str, home: Path | None, count: int) -> "list[Sample]":
    """Return the probes. Raises ConfigError if the run has no availability."""
    from dilocox.node.exchange.shards import find_shards
    from dilocox_availability.probes import Sampler
    from dilocox_availability.restoring import Restorer

    async with following(join, home) as reader:
        if find_shards(reader.manifest) is None:
            raise ConfigError("this run uses no erasure shards: its run file has no [availability]")
        assert isinstance(reader.restorer, Restorer), "the plugin makes it"
        parts = reader.manifest, reader.chain, reader.store, reader.data.applies, reader.restorer
        sampler = await asyncio.to_thread(Sampler, *parts, SystemRandom())
        async with fetching(reader):
            return [await sampler.draw() for _ in range(count)]


def told(found: "list[Sample]") -> dict[str, Any]:
    """Return the probes as JSON. `chance`: `shards.chance` of the code that hides most, of all blobs and of half of them."""
    from dilocox_availability.shards import chance

    unanswered = [each for each in found if each.why]
    hides = max({each.code for each in found}, key=lambda code: code.needed / code.shares)
    return {
        "samples": len(found),
        "unanswered": [
            {"round": each.round, "blob": each.blob.hex(), "share": each.index, "peer": each.peer, "why": each.why}
            for each in unanswered
        ],
        "shares": hides.shares,
        "needed": hides.needed,
        "chance": {name: chance(hides, len(found), len(unanswered), part) for name, part in (("all", 1.0), ("half", 0.5))},
    }


def show(found: "list[Sample]") -> None:
    asked, failed = Counter(each.peer for each in found), Counter(each.peer for each in found if each.why)
    why = {each.peer: each.why for each in found if each.why}
    rows = [[short(peer), str(asked[peer]), str(asked[peer] - failed[peer]), why.get(peer, "")] for peer in sorted(asked)]
    print_table(["peer", "asked", "answered", "reason"], rows)
    said = told(found)
    console.print(
        f"{len(found) - failed.total()} of {len(found)} answered. With fewer than {said['needed']} of "
        f"{said['shares']} shards available, so many answers have a probability of at most "
        f"{said['chance']['all']:.2g}. With half of the blobs in that state it is {said['chance']['half']:.2g}.",
        highlight=False,
    )
