"""Options that the verbs of the market share: its address, and the time for a search. Runs that look for machines, and
machines for hire, are no part of any run: README.md."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated

import typer

from dilocox.cli.common import PORTS
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement

if TYPE_CHECKING:
    from dilocox_market.board import Board

__all__ = ["PATIENCE", "MarketOption", "MarketPortOption", "PatienceOption", "check_addresses", "listed", "opened_board"]

log = logging.getLogger(__name__)

MarketOption = Annotated[
    list[str] | None,
    typer.Option("--market", metavar="MULTIADDR", help="Address of a node of the market; repeatable."),
]
MarketPortOption = Annotated[
    int | None, typer.Option("--market-port", **PORTS, help="Port of this machine's node of the market (default, and 0: any).")
]
PatienceOption = Annotated[float, typer.Option("--seconds", min=0, help="Seconds to search while nothing is found.")]
PATIENCE = 30.0
LOOK_SECONDS = 1.0
ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/\d+/p2p/\w+")


def check_addresses(market: Sequence[str]) -> None:
    """Check the addresses. Raises ConfigError."""
    if wrong := [text for text in market if not ADDRESS.fullmatch(text)]:
        raise ConfigError(f"--market {wrong[0]}: use a libp2p address, such as /ip4/192.0.2.7/tcp/7410/p2p/12D3Koo…")


@asynccontextmanager
async def opened_board(
    market: Sequence[str], host: str | None = None, identity: Identity | None = None, port: int = 0, home: Path | None = None
) -> AsyncIterator["Board"]:
    """Open a board with these options. `identity`: None: a temporary one. `home`: its folder. Raises ConfigError."""
    from dilocox_market import board

    check_addresses(market)
    async with board.opened(identity or Identity(token_bytes(32)), market, host, port, home) as opened:
        yield opened


async def listed(board: "Board", kind: pb.Kind, patience: float) -> list[Statement]:
    """Return the listings as soon as there are some; empty at the end of patience."""
    found: list[Statement] = []
    try:
        async with asyncio.timeout(patience):
            while not found:
                try:
                    found = await board.listed(kind)
                except LocalError as error:  # our node is not up yet
                    log.debug("%s", error)
                if not found:
                    await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        pass
    return found
