"""`dilocox hold --join LINK`: keep payloads for peers that cannot be dialled."""

import asyncio
from typing import Annotated

import typer

from dilocox.cli.common import (
    THIS_MACHINE,
    ApiOption,
    DhtOption,
    DhtPortOption,
    HomeOption,
    HostOption,
    JoinOption,
    NameOption,
    PortOption,
    UploadLimitOption,
    bytes_per_second,
    read_link,
    set_up_logging,
)
from dilocox.node.holder import HolderSettings, run_holder
from dilocox.transport.health import base_folder
from dilocox.transport.network import Listen
from dilocox.transport.parent_pipe import exit_with_parent

__all__ = ["hold"]


def hold(
    join: JoinOption,
    home: HomeOption = None,
    name: NameOption = THIS_MACHINE,
    host: HostOption = "127.0.0.1",
    port: PortOption = 0,
    dht_port: DhtPortOption = 0,
    dht: DhtOption = True,
    api: ApiOption = "127.0.0.1:0",
    upload_limit: UploadLimitOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Keep payloads and states for peers that cannot be dialled; train nothing. The run names this peer in `run.holders`."""
    exit_with_parent()
    set_up_logging(verbose)
    settings = HolderSettings(
        join=read_link(join),
        home=home or base_folder() / "holder",
        name=name,
        listen=Listen(host, port, dht_port, dht),
        api=api,
        upload_bytes_per_second=bytes_per_second(upload_limit),
    )
    asyncio.run(run_holder(settings))
