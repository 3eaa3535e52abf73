"""Command `dilocox market announce`: the run of this machine's coordinator looks for machines, until Ctrl-C."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import HomeOption, HostOption, console, find_daemon, set_up_logging
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.process.health import base_folder, running_daemon
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity, run_folder
from dilocox_market.options import MarketOption, MarketPortOption, check_addresses, opened_board

__all__ = ["announce"]

log = logging.getLogger(__name__)


def announce(
    market: MarketOption = None,
    market_port: MarketPortOption = None,
    home: HomeOption = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The coordinator's key, if it is the owner's: RUN.key (default: in --home)."),
    ] = None,
    host: HostOption = "127.0.0.1",
) -> None:
    """Announce until Ctrl-C that the run of this machine's coordinator needs machines. Without --market this starts a new
    market; the log contains its address."""
    set_up_logging(verbose=False)
    check_addresses(market or ())
    folder = home or base_folder() / "coordinator"
    facts = find_daemon(folder)
    if facts["role"] != "coordinator":
        raise ConfigError(f"{folder} runs a {facts['role']}: pass --home with the folder of a coordinator")
    identity = _identity(folder, key, JoinLink.parse(_link(folder)))
    console.print("the run is announced until Ctrl-C", highlight=False)
    asyncio.run(_announced(market or (), market_port or 0, host, identity, folder))


def _identity(folder: Path, key: Path | None, link: JoinLink) -> Identity:
    """Return the coordinator's identity. Raises ConfigError if its key is another's, or is missing."""
    path = key or folder / "identity.key"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: pass the key of the run's coordinator with --key, such as RUN.key")
    identity = load_identity(path)
    if identity.peer != link.coordinator:
        raise ConfigError(
            f"{path} is the key of {identity.peer}, but the run's coordinator is {link.coordinator}: pass its key with --key"
        )
    return identity


def _link(folder: Path) -> str:
    """Return the join link of the coordinator on this folder. Raises LocalError while none runs there."""
    facts: dict[str, Any] | None = running_daemon(folder)
    if facts is None or not facts.get("link"):
        raise LocalError(f"the coordinator of {folder} has ended")
    return str(facts["link"])


async def _announced(market: Sequence[str], port: int, host: str, identity: Identity, folder: Path) -> None:
    def job(until: int) -> pb.Job:
        link = _link(folder)
        chain = run_folder(folder, JoinLink.parse(link).run_id) / "chain.db"
        with ChainFile.for_reading(chain) as read:
            return pb.Job(link=link, expires_at=until, manifest=read.signed_manifest, appointment=read.newest_word)

    async with opened_board(market, host, identity, port, folder) as board:
        log.info("this run is announced in the market; other peers can join it at %s", board.address)
        await board.announce_forever(identity, pb.KIND_JOB, job)
