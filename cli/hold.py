"""`dilocox hold --join LINK`: keep payloads for peers that cannot be dialled."""

import asyncio

from dilocox.cli.common import JoinOption, read_link
from dilocox.cli.options import PeerOptions, grouped
from dilocox.node.holder import HolderSettings, run_holder

__all__ = ["hold"]


@grouped
def hold(join: JoinOption, peer: PeerOptions) -> None:
    """Keep payloads and states for peers that cannot be dialled; train nothing. The run names this peer in `run.holders`."""
    peer.begin()
    asyncio.run(run_holder(HolderSettings(**peer.settings("holder"), join=read_link(join))))
