"""Payloads of peers that cannot be dialled: who can be dialled keeps them, and serves them as its own.

Such a peer pushes what it contributes to the holders that the run names, then to members of the roster, in the order of a hash that
changes with every round, until enough of them have signed that they keep it; its contribution names them, and everybody else
fetches from them. It gives the run's holders the states that joiners start from, too: nobody else could. Of a cluster of several
boxes each that cannot be dialled does so with its own stages.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from dilocox.node.downloader import Finder
from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import peer_id, short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import author, open_envelope, parse, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.tensors import stage_tensors
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.rpc import ChannelPool, push_blob

__all__ = ["Holding", "failing_holders"]

log = logging.getLogger(__name__)

HOLDERS = 2
"""Members that keep a payload beside its author: one may go before it is fetched. Its line carries it so often, and never more."""
ROUNDS_KEPT = 2
"""A push may come before the commit that opens its round; then it is named by a contribution, or not worth keeping."""
ROUNDS_PASSED_OVER = 8
"""So long who kept a payload that nobody could have is asked after everybody else."""
STATE_COPIES = 2
"""A state is the parameters and the outer momentum."""
RETRY_SECONDS = 2.0
SUPPLY_SECONDS = 5.0
"""How often it is looked whether the run's holders lack a state."""


def failing_holders(commit: pb.Commit, cluster: str) -> set[str]:
    """Who kept this cluster's payloads, where a commit leaves them out because voters could not have them."""
    if not any((item.peer, item.reason) == (cluster, pb.REASON_UNAVAILABLE) for item in commit.excluded):
        return set()
    own = [signed for signed in commit.contributions if peer_id(author(commit, signed)) == cluster]
    return {name for signed in own for name in parse(pb.Contribution, signed.body).holders}


class Holding:
    """What we keep for others (only members of the roster, two rounds' payloads each), and who keeps ours."""

    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        chain: ChainFile,
        store: BlobStore,
        directory: Finder,
        channels: ChannelPool,
        dialable: Callable[[], bool],
        spend: Callable[[int], Awaitable[object]],
        copies: int | None = None,
        cluster: str = "",
    ) -> None:
        """`dialable`: whether others can dial us; `spend` waits until so many bytes may be sent; `copies`: how many are to keep a
        payload, and nobody is to have it from us; None: where we cannot be dialled some keep it, else everybody asks us; `cluster`:
        of which we are a box, our own unless said."""
        self._identity, self._manifest, self._chain, self._store = identity, manifest, chain, store
        self._directory, self._channels, self.dialable, self._spend = directory, channels, dialable, spend
        self._copies, self._cluster = copies, cluster or identity.peer
        self.agreed: Callable[[bytes], bool] = lambda digest: False
        """Whether a blob is of a state that the run agreed on and joiners start from: kept by the run's holders."""
        stages = [stage_tensors(manifest.model, stage) for stage in range(manifest.model.stages)]
        self._largest = max(4 * sum(tensor.elements for tensor in tensors) for tensors in stages)
        self._most = max(self._largest, limits.LEAVES_BYTES)
        """Bytes of what may be a payload, or its leaves."""
        self._kept: dict[str, dict[bytes, int]] = {}
        """By cluster: digests, and the round that was open."""
        self._forgotten: set[bytes] = set()
        self.alone = False
        """Nobody keeps what we pushed for the open round: nobody else can be dialled either."""

    def remember(self) -> None:
        """What an earlier life kept: for as long as if it came now, whoever pushed it. Blocking.

        Nothing says who did: everything here that could be a payload, our own too. States are known by the chain.
        """
        kept = self._kept.setdefault("", {})
        for digest, size in self._store.sizes().items():
            if size <= self._most:
                kept[digest] = self._chain.head.round

    def serves_its_own(self) -> bool:
        """Whether others are to have our payloads from us."""
        return self._copies is None and self.dialable()

    def admit(self, author: str, digest: bytes, size: int) -> None:
        """Raises RemoteError where we do not keep that for this peer."""
        head = self._chain.head
        if author not in head.cluster_by_peer:
            raise RemoteError(pb.REASON_NOT_ON_ROSTER, "only members of the roster are kept for")
        if size <= STATE_COPIES * self._largest + limits.LEAVES_BYTES and self.agreed(digest):
            return
        if size > self._most:
            raise RemoteError(pb.REASON_OVERSIZE, f"{size} bytes are no payload of this run")
        cluster = head.cluster_by_peer[author].cluster
        kept = self._recent(cluster)
        places = ROUNDS_KEPT * (self._manifest.model.stages + 1) + 1  # one for a state's root that our chain does not name yet
        if digest not in kept and len(kept) >= places:
            raise RemoteError(pb.REASON_RATE, f"that is more than the payloads of {ROUNDS_KEPT} rounds")
        self._kept[cluster] = {**kept, digest: head.round}

    def _recent(self, cluster: str) -> dict[bytes, int]:
        """Without what no contribution can name any more."""
        oldest = self._chain.head.round - ROUNDS_KEPT
        return {digest: round for digest, round in self._kept.get(cluster, {}).items() if round > oldest}

    def blobs(self) -> set[bytes]:
        """What is worth keeping for others, whether a contribution names it yet or not."""
        before = {digest for kept in self._kept.values() for digest in kept}
        recent = {cluster: self._recent(cluster) for cluster in self._kept}
        self._kept = {cluster: kept for cluster, kept in recent.items() if kept}
        now = {digest for kept in self._kept.values() for digest in kept}
        self._forgotten |= before - now
        return now

    def forgotten(self) -> set[bytes]:
        """What was kept, and is not any more: told once."""
        gone, self._forgotten = self._forgotten, set()
        return gone

    def acknowledge(self, digest: bytes) -> pb.Envelope:
        body = pb.Held(blob=digest, round=self._chain.head.round)
        return seal(self._identity, pb.KIND_HELD, self._manifest.run_id, body).envelope

    async def find(self, blobs: Sequence[bytes]) -> tuple[str, ...]:
        """Push these to members of the roster until enough of them keep all; fewer where there are no more, none where the round
        closes first."""
        began, named, copies = self._chain.head, self._manifest.run.holders, self._copies or HOLDERS
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
        """Who kept payloads of ours that nobody could have, in the rounds before this one. Blocking."""
        commits = [self._chain.commit(number) for number in range(max(0, round - ROUNDS_PASSED_OVER), round)]
        return {name for c in commits if c is not None for name in failing_holders(c.body, self._cluster)}

    async def supply(self, state: Callable[[], Sequence[bytes]]) -> None:
        """Where we cannot be dialled: see to it that the run's holders have the blobs of its newest agreed state, until cancelled.
        `state`: its root, then the stages that we host; empty where they are not here. Who has them already is sent none."""
        done: dict[str, list[bytes]] = {}
        while self._manifest.run.holders:
            blobs = list(await asyncio.to_thread(state))
            for name in self._manifest.run.holders:
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
                    raise RemoteError(pb.REASON_BAD_SIGNATURE, "it signed for something else")
        except RemoteError as error:
            log.info("%s does not keep our payload: %s", short(name), error.detail)
            return False
        except FileNotFoundError:  # its round is long over
            return False
        return True
