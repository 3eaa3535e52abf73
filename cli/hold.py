"""`dilocox hold --join LINK`: keep payloads for peers that cannot be dialled."""

from dilocox.cli.common import JoinOption, read_link
from dilocox.cli.loop import live
from dilocox.cli.options import PeerOptions, grouped
from dilocox.node.holder import HolderSettings, run_holder

__all__ = ["hold"]


@grouped
def hold(join: JoinOption, peer: PeerOptions) -> None:
    """Keep payloads and states for peers that cannot be dialled; train nothing. The run names this peer in `run.holders`."""
    peer.begin()
    live(run_holder(HolderSettings(**peer.settings("holder"), join=read_link(join))))
