"""Payloads of unreachable peers: relays and reachable members store and serve them.

An unreachable peer uploads its payloads to the run's relays, then to roster members, in the order of a hash that
changes every round, until enough of them have signed a receipt. Its contribution names them, and all peers fetch there.
It also uploads states for joiners to the run's relays, because no peer could fetch them here. In a cluster of several
hosts, each unreachable one does so for its stages.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from dilocox.node.exchange.downloader import Finder
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import peer_id, short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import author, open_envelope, parse
from dilocox.transport.net.rpc import ChannelPool, push_blob
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["Relays", "failing_holders"]

log = logging.getLogger(__name__)

HOLDERS = 2
"""Members that store a payload beside its author: one may be lost before it is fetched. The upload happens that often, and
never more."""
ROUNDS_PASSED_OVER = 8
"""Rounds for which a peer goes to the end of the order after no peer could fetch a payload from it."""
RETRY_SECONDS = 2.0
SUPPLY_SECONDS = 5.0
"""Interval of checks whether the run's relays miss a state."""


def failing_holders(commit: pb.Commit, cluster: str) -> set[str]:
    """Return the relays of this cluster's payloads if a commit excludes them as unavailable."""
    if not any((item.peer, item.reason) == (cluster, pb.REASON_UNAVAILABLE) for item in commit.excluded):
        return set()
    own = [signed for signed in commit.contributions if peer_id(author(commit, signed)) == cluster]
    return {name for signed in own for name in parse(pb.Contribution, signed.body).holders}


class Relays:
    """Relays of what this host makes, where peers do not download it from here."""

    def __init__(
        self,
        identity: Identity,
        chain: ChainFile,
        store: BlobStore,
        directory: Finder,
        channels: ChannelPool,
        dialable: Callable[[], bool],
        copies: int | None = None,
        cluster: str = "",
    ) -> None:
        """`dialable`: whether peers can dial us. `copies`: how many relays store a payload, and no peer downloads it from us; None:
        where we cannot be dialled some store it, else peers download it from us. `cluster`: of which we are a host; empty: ours."""
        self._identity, self._manifest, self._chain, self._store = identity, chain.manifest, chain, store
        self._directory, self._channels, self.dialable = directory, channels, dialable
        self._spend = channels.traffic.upload.spend
        self._copies, self._cluster = copies, cluster or identity.peer
        self.alone = False
        """No relay stores what we pushed for the open round: no other peer can be dialled either."""

    def serves_its_own(self) -> bool:
        """Return whether peers download our payloads from this host."""
        return self._copies is None and self.dialable()

    async def find(self, blobs: Sequence[bytes]) -> tuple[str, ...]:
        """Upload to roster members until enough of them store all of these; return fewer if there are no more, none if the
        round closes first."""
        began, named, copies = self._chain.head, self._manifest.run.relays, self._copies or HOLDERS
        failed = await asyncio.to_thread(self._failed, began.round)

        def turn(name: str) -> tuple[bool, bool, bytes]:
            return name in failed, name not in named, sha256(began.digest, name.encode())

        names = sorted({*named, *began.roster} - {self._identity.peer, self._cluster}, key=turn)
        held: list[str] = []
        while not held and self._chain.head.round == began.round:
            for name in names:
                if len(held) < copies and await self._push(name, began.round, blobs):
                    held.append(name)
            self.alone = not held
            if not held:
                await asyncio.sleep(RETRY_SECONDS)
        return tuple(held)

    def _failed(self, round: int) -> set[str]:
        """Return the relays whose copies of our payloads were unavailable in earlier rounds. Blocking."""
        commits = [self._chain.commit(number) for number in range(max(0, round - ROUNDS_PASSED_OVER), round)]
        return {name for c in commits if c is not None for name in failing_holders(c.body, self._cluster)}

    async def supply(self, state: Callable[[], Sequence[bytes]]) -> None:
        """Upload the blobs of the newest agreed state to the run's relays, if this host is not reachable, until cancelled.
        `state`: its root, then this host's stages; empty if they are not here. A relay that has them receives none."""
        done: dict[str, list[bytes]] = {}
        while self._manifest.run.relays:
            blobs = list(await asyncio.to_thread(state))
            for name in self._manifest.run.relays:
                wanted = blobs and not self.dialable() and done.get(name) != blobs and name != self._identity.peer
                if wanted and await self._push(name, self._chain.head.round, blobs):
                    done[name] = blobs
            await asyncio.sleep(SUPPLY_SECONDS)

    async def _push(self, name: str, round: int, blobs: Sequence[bytes]) -> bool:
        record = await self._directory.find(name)
        if record is None or not record.address:
            return False
        try:
            for blob in blobs:
                if self._chain.head.round != round:
                    return False
                signed = await push_blob(self._channels.channel(record), self._store, blob, self._spend)
                held = open_envelope(signed, self._manifest.run_id, (pb.KIND_HELD,))
                if (held.peer, held.body.blob) != (name, blob):
                    raise RemoteError(pb.REASON_BAD_SIGNATURE, "its receipt is for another blob")
        except RemoteError as error:
            log.info("%s does not store this node's payload: %s", short(name), error.detail)
            return False
        except FileNotFoundError:  # its round is long over
            return False
        return True
