"""`dilocox hold --join LINK`: keep payloads for peers that cannot be dialled."""

import asyncio
import socket
from typing import Annotated

import typer

from dilocox.cli.common import DhtOption, HomeOption, read_link, set_up_logging
from dilocox.node.holder import run_holder
from dilocox.node.place import PeerSettings
from dilocox.transport.health import base_folder
from dilocox.transport.network import Listen
from dilocox.transport.parent_pipe import exit_with_parent

__all__ = ["hold"]


def hold(
    join: Annotated[str, typer.Option("--join", envvar="DILOCOX_NODE__JOIN", help="The join link, or @FILE that holds it.")],
    home: HomeOption = None,
    name: Annotated[str, typer.Option(envvar="DILOCOX_NODE__NAME", help="For people.")] = socket.gethostname(),
    host: Annotated[
        str, typer.Option(envvar="DILOCOX_NETWORK__HOST", help="Address by which the peers reach this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="DILOCOX_NETWORK__PORT", help="gRPC port (0: any, kept).")] = 0,
    dht_port: Annotated[int, typer.Option(envvar="DILOCOX_NETWORK__DHT_PORT", help="DHT port (0: any, kept).")] = 0,
    dht: DhtOption = True,
    api: Annotated[str, typer.Option(envvar="DILOCOX_API__LISTEN", help="host:port of the HTTP API.")] = "127.0.0.1:0",
    upload_limit: Annotated[
        float | None, typer.Option(min=0.25, help="Send at most so many megabits per second (default: no limit).")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Keep payloads and states for peers that cannot be dialled; train nothing. The run names this peer in `run.holders`."""
    exit_with_parent()
    set_up_logging(verbose)
    settings = PeerSettings(
        join=read_link(join),
        home=home or base_folder() / "holder",
        name=name,
        listen=Listen(host, port, dht_port, dht),
        api=api,
        upload_bytes_per_second=None if upload_limit is None else upload_limit * 1e6 / 8,
    )
    asyncio.run(run_holder(settings))
