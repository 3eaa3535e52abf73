"""`dilocox relay --join LINK`: store payloads and states for peers that are not reachable."""

from dilocox.cli.common import JoinOption, read_link
from dilocox.cli.options import PeerOptions, grouped
from dilocox.cli.signals import live
from dilocox.node.relay_daemon import HolderSettings, run_holder

__all__ = ["relay"]


@grouped
def relay(join: JoinOption, peer: PeerOptions) -> None:
    """Store payloads and states for unreachable peers, without training. The run must name this peer in `run.relays`."""
    peer.begin()
    live(run_holder(HolderSettings(**peer.settings("relay"), join=read_link(join))))
