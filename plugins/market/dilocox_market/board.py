"""Board on which jobs and offers are announced and read: a DHT of all participants in the market, which store them for
each other."""

import asyncio
import base64
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.net.dht import Dht, DhtSettings
from dilocox.transport.net.network import choose_port, multiaddr
from dilocox_market.listings import MARKET, open_listing

__all__ = ["Board", "opened"]

log = logging.getLogger(__name__)

LIFE_SECONDS = 1800
"""Lifetime of our listings after their last announcement."""
AGAIN_SECONDS = 300.0
"""Seconds between announcements: five may fail before a listing expires."""
SOON_SECONDS = 2.0
"""Seconds after an announcement that no peer accepted."""
CHILD = "dilocox_market.dht_child"
"""Module of our DHT process."""
MEASURED_SECONDS = 600.0
"""Seconds for all peers that are asked to measure our bandwidth."""


class Board:
    def __init__(self, dht: Dht, address: str) -> None:
        self._dht = dht
        self.address = address
        """Multiaddr of our node, from which others may join the DHT."""

    async def announce(self, listing: Statement) -> bool:
        """Return whether another node stores it. Raises LocalError while our node is not up."""
        value = base64.b64encode(listing.envelope.SerializeToString()).decode()
        return bool((await self._dht.ask({"announce": value}))["ok"])

    async def announce_forever(
        self, identity: Identity, kind: pb.Kind, make: Callable[[int], pb.Job | pb.Offer], changed: asyncio.Event | None = None
    ) -> None:
        """Announce for ever. `make`: returns the message for a listing until that Unix second; blocking. If no peer
        accepts it, or it cannot be made (LocalError), it is soon announced again; after `changed` at once."""
        changed, why = changed or asyncio.Event(), ""
        while True:
            taken = False
            try:
                said = await asyncio.to_thread(make, int(time.time()) + LIFE_SECONDS)
            except LocalError as error:
                if str(error) != why:
                    why = str(error)
                    log.warning("the market is paused: %s", why)
            else:
                why = ""
                with suppress(LocalError):
                    taken = await self.announce(seal(identity, kind, MARKET, said))
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), AGAIN_SECONDS if taken else SOON_SECONDS)
            changed.clear()

    async def measured(self) -> list[pb.Envelope]:
        """Return the bandwidth that others measure now: some MiB each way, several times. Raises LocalError while our node
        is not up."""
        lines = (await self._dht.ask({"measure": True}, MEASURED_SECONDS))["lines"]
        return [pb.Envelope.FromString(base64.b64decode(line)) for line in lines]

    async def listed(self, kind: pb.Kind) -> list[Statement]:
        """Return the listings that count now, of each signer the one that expires last. Raises LocalError while our node
        is not up."""
        found: dict[str, Statement] = {}
        for text in (await self._dht.ask({"list": kind}))["listings"]:
            with suppress(RemoteError):
                listing = open_listing(base64.b64decode(text), time.time(), (kind,))
                known = found.get(listing.peer)
                if known is None or known.body.expires_at < listing.body.expires_at:
                    found[listing.peer] = listing
        return list(found.values())


@asynccontextmanager
async def opened(
    identity: Identity, bootstrap: Sequence[str], host: str | None = None, port: int = 0, home: Path | None = None
) -> AsyncIterator[Board]:
    """Open a board with a node of the DHT. `identity`: our node's; `bootstrap`: multiaddrs of present peers. `host`:
    address of this machine for other peers; then our node stores their listings, too. Without it the node only asks,
    and listens to this machine alone. `home`: folder of the identity, if any: only there its libp2p form is written, so
    no crash leaves it elsewhere."""
    at, keeps = port or choose_port(), host is not None
    listen = f"/ip4/{'0.0.0.0' if keeps else '127.0.0.1'}/tcp/{at}"
    with ExitStack() as stack:
        folder = home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dilocox-market-")))
        settings = DhtSettings(MARKET, identity, folder, listen, tuple(bootstrap), keeps, CHILD)
        dht = Dht(settings)
        running = asyncio.create_task(dht.run())
        try:
            yield Board(dht, multiaddr(host or "127.0.0.1", at, identity.peer))
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
