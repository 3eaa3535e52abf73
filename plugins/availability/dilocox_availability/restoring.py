"""Restoring of blobs that no peer serves whole, from the shards that peers store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from dilocox.node.exchange.downloader import Finder
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import NamedBy, taken
from dilocox.protocol.consensus.head import Cluster, advance
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.net.rpc import ChannelPool, fetch_blob, fetch_chunk, in_thread
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.chain_file import ChainFile
from dilocox_availability import erasure
from dilocox_availability.shards import Code, check_share, code_in, hosts, kept_since, most_shared, order, places
from dilocox_availability.store import ShareStore, share_bytes

__all__ = ["ASKED_AT_ONCE", "Answer", "Due", "Holders", "Restorer"]

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
ASKED_AT_ONCE = 16
"""Peers asked at once: with the default as many as restore a blob of the largest roster, so that most restores ask no other."""
ROSTERS_REMEMBERED = 8
SIZES_REMEMBERED = 1 << 14
"""Rounds whose sizes are remembered, a number each. No peer is asked for shards of older rounds."""


class Answer(NamedTuple):
    """Shard that a peer offers, with a valid proof."""

    peer: str
    """Peer id; empty: it is ours."""
    share: services.Share


class Due(NamedTuple):
    """Shards that should exist of a blob."""

    peers: list[str]
    """Peers that should store shards, in order: the peer at place i stores shard i modulo their number."""
    code: Code | None
    """Code; None: the roster of that round had one peer, and made no shards."""
    root: bytes
    """Root that proves them; empty: the commit names none."""


class Holders:
    """Index of which peer stores which shard, as the chain says."""

    def __init__(self, chain: ChainFile) -> None:
        self._chain, self._round = chain, lru_cache(ROSTERS_REMEMBERED)(self._read)
        self._shared = lru_cache(SIZES_REMEMBERED)(self._most_shared)

    def _read(self, round: int) -> tuple[bytes, bytes, Mapping[str, Cluster], dict[str, int]]:
        """Return digest and data root of a round's commit, the roster on which it was made, and the counted clusters with
        the bytes of their payloads. Raises RemoteError if the chain does not have it."""
        commit, before = self._chain.commit(round), self._chain.commit(round - 1) if round else None
        if commit is None or before is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, f"commit {round}, which names the peers with shards, is not on this disk")
        counted = {item.cluster: item.contribution.size for item in taken(commit.body)}
        return commit.digest, commit.body.data_root, advance(self._chain.manifest, before).roster, counted

    def _most_shared(self, round: int) -> int:
        _, _, roster, counted = self._read(round)
        return most_shared(self._chain.manifest, roster, counted.values())

    def kept_since(self, head: int) -> int:
        """Return the first round of which every peer on the roster should have its shards of counted blobs; `head`, the open
        round, means none. The chain alone says so: what we store says little of other peers' room. Blocking. Raises
        RemoteError."""
        settings = self._chain.manifest.availability
        if settings is None:
            return head
        oldest = max(1, head - min(settings.rounds, SIZES_REMEMBERED))
        rounds = ((round, self._shared(round)) for round in range(head - 1, oldest - 1, -1))
        return kept_since(rounds, head, settings.most_bytes)

    def of(self, by: NamedBy, blob: bytes, stage: int | None) -> Due:
        """Return the shards that should exist of a blob. Blocking. Raises RemoteError."""
        commit, root, roster, _ = self._round(by.round)
        peers = order(commit, blob, hosts(roster, stage))
        return Due(peers, code_in(self._chain.manifest, roster, stage), b"" if by.state else root)

    def in_cluster(self, ours: services.Share, me: str, cluster: str) -> tuple[dict[str, frozenset[int]], bytes]:
        """Return the indices of a cluster's shards of a blob of which we store one, by host, and the root that proves
        them.

        A host has several indices if our shard does not name the blob's stage. There are no hosts if the chain names no
        such blob. There are none either if the cluster was not counted then: it need not have had the blob. Blocking.
        Raises RemoteError.
        """
        commit, root, roster, counted = self._round(ours.round)
        if cluster not in counted or cluster not in roster or ours.root != root:
            return {}, root
        return places(self._chain.manifest, roster, commit, ours, me, roster[cluster].peers), root

    def everybody(self) -> list[str]:
        """Return all peers on the roster now: one may store the shard for a later commit."""
        return sorted(self._chain.head.cluster_by_peer)


@dataclass
class Gathering:
    """Shards of a blob under one root."""

    size: int
    code: Code
    offered: list[Answer] = field(default_factory=list)
    have: dict[int, services.Share] = field(default_factory=dict)
    """Shards that are here, by index."""
    begun: set[bytes] = field(default_factory=set)
    """Digests of shards that are here, and of downloads that broke off, of which a part is here."""
    lie: bool = False
    """True if the shards were put together, and made another blob."""

    @property
    def reach(self) -> int:
        """Return how many different shards are here or offered."""
        return len(self.have.keys() | {answer.share.index for answer in self.offered})


class Restorer:
    def __init__(
        self, scratch: Path, directory: Finder, channels: ChannelPool, chain: ChainFile, own: ShareStore | None = None
    ) -> None:
        """Store the parts. `scratch`: our folder for shards until they are put together; `own`: the shards that we store."""
        self._scratch = BlobStore(scratch)
        self._scratch.sweep(self._scratch.digests() | self._scratch.partials())
        self._directory, self._channels, self._own = directory, channels, own
        self.holders = Holders(chain)

    async def ask(self, blob: bytes, peers: Iterable[str], largest: int = limits.BLOB_BYTES, root: bytes = b"") -> list[Answer]:
        """Return the shards that these peers offer, of those that are reachable. All are asked at once. `root`: the one
        that proves the shards, if known."""

        async def one(peer: str) -> Answer | None:
            try:
                return Answer(peer, await self._ask_one(peer, blob, largest, root))
            except RemoteError as error:
                log.debug("%s has no shard of %s: %s", short(peer), blob.hex()[:8], error)
                return None

        found = await asyncio.gather(*(one(peer) for peer in peers))
        return [answer for answer in found if answer is not None]

    async def _ask_one(self, peer: str, blob: bytes, largest: int, root: bytes) -> services.Share:
        """Return a peer's shard. Raises RemoteError if it has none, or it proves nothing."""
        call = rpc.PeerStub(await self._channel(peer)).GetShare(services.ShareRequest(blob=blob), timeout=ASK_SECONDS)
        try:
            share = await call
        except grpc.aio.AioRpcError as error:
            raise RemoteError(pb.REASON_UNAVAILABLE, f"the peer answered {error.code().name.lower()}") from error
        check_share(share, blob, largest, root)
        return share

    async def can_dial(self, peer: str) -> bool:
        record = await self._directory.find(peer)
        return record is not None and bool(record.address)

    async def _channel(self, peer: str) -> grpc.aio.Channel:
        """Return a channel to a peer. Raises RemoteError if it is not reachable."""
        record = await self._directory.find(peer)
        if record is None or not record.address:
            raise RemoteError(pb.REASON_UNAVAILABLE, "it is not reachable")
        return self._channels.channel(record)

    async def try_chunk(self, answer: Answer, draw: Callable[[int], int]) -> None:
        """Download a chunk of a shard, which `draw` picks by number, and discard it. Raises RemoteError."""
        if size := share_bytes(answer.share):
            chunk = draw(-(-size // limits.CHUNK_BYTES))
            await fetch_chunk(await self._channel(answer.peer), answer.share.digest, size, chunk)

    async def fetch(self, blob: bytes, by: NamedBy, stage: int | None, store: BlobStore, max_size: int) -> int:
        """Restore a blob into the store; return the bytes received. Raises RemoteError if too few shards are available."""
        groups: dict[tuple[bytes, int, Code], Gathering] = {}
        received = 0
        try:
            async for answers in self._answers(blob, by, stage, max_size):
                for answer in answers:
                    share = answer.share
                    of = share.root, share.size, Code(share.shares, share.needed)
                    groups.setdefault(of, Gathering(*of[1:])).offered.append(answer)
                for _, group in sorted(groups.items(), key=lambda item: (-item[1].reach, item[0])):
                    came, restored = await self._try(blob, group, store)
                    received += came
                    if restored:
                        return received
            raise RemoteError(pb.REASON_UNAVAILABLE, _why(groups.values()))
        finally:
            for digest in set[bytes]().union(*(group.begun for group in groups.values())):
                await asyncio.to_thread(self._scratch.remove, digest)

    async def _answers(self, blob: bytes, by: NamedBy, stage: int | None, largest: int) -> AsyncIterator[list[Answer]]:
        """Return our own shard; then the answers of some peers at a time, of those first that should have one. Raises
        RemoteError."""
        due = await asyncio.to_thread(self.holders.of, by, blob, stage)
        own = await asyncio.to_thread(self._own.get, blob) if self._own is not None else None
        if own is not None and own.size <= largest and due.root in (b"", own.root):
            yield [Answer("", own)]
        peers = list(dict.fromkeys([*due.peers, *self.holders.everybody()]))
        for first in range(0, len(peers), ASKED_AT_ONCE):
            yield await self.ask(blob, peers[first : first + ASKED_AT_ONCE], largest, due.root)

    async def _try(self, blob: bytes, group: Gathering, store: BlobStore) -> tuple[int, bool]:
        """Return the bytes received, and whether the blob is in the store."""
        if group.lie or group.reach < group.code.needed:
            return 0, False
        received = await self._gather(group)
        if len(group.have) < group.code.needed:
            return received, False
        restored = await in_thread(self._restore, blob, group, store)
        group.lie = not restored
        if restored:
            log.info("restored %s from %d of %d shards", blob.hex()[:8], group.code.needed, group.code.shares)
        return received, restored

    async def _gather(self, group: Gathering) -> int:
        """Gather as many shards as restore the blob, if they are available; return the bytes received. A peer that did not
        send its offered shard is not asked again."""
        received = 0
        while group.offered and len(group.have) < group.code.needed:
            peer, share = group.offered.pop(0)
            if share.index in group.have:
                continue
            group.begun.add(share.digest)
            try:
                received += await self._have(peer, share)
                group.have[share.index] = share
            except RemoteError as error:
                log.info("shard %d of %s from %s: %s", share.index, share.blob.hex()[:8], short(peer), error)
        return received

    async def _have(self, peer: str, share: services.Share) -> int:
        if not peer:
            return 0
        spend, channel = self._channels.traffic.download.spend, await self._channel(peer)
        return await fetch_blob(channel, self._scratch, share.digest, share_bytes(share), spend=spend)

    def _restore(self, blob: bytes, group: Gathering, store: BlobStore) -> bool:
        """Return whether the shards make the blob, which is in the store then; otherwise nothing is written. Blocking."""

        def parts(opened: ExitStack) -> Iterator[bytes]:
            files = {index: opened.enter_context(self._path(share).open("rb")) for index, share in group.have.items()}
            return erasure.restored(group.size, group.code, files)

        try:
            with ExitStack() as opened:
                if digest_of(parts(opened)) != blob:  # before it is written: wrong shards may make any blob, and fill the disk
                    return False
            with ExitStack() as opened:
                return store.put(parts(opened)) == blob
        except (RemoteError, FileNotFoundError):  # one is too short, or ours was deleted
            return False

    def _path(self, share: services.Share) -> Path:
        ours = self._own is not None and share.digest in self._own.store
        return (self._own.store if ours and self._own is not None else self._scratch).path(share.digest)


def _why(groups: Iterable[Gathering]) -> str:
    """Return why the blob was not restored."""
    best = max(groups, key=lambda group: (not group.lie, group.reach), default=None)
    if best is None:
        return "no peer answers with a shard of it"
    if best.lie:
        return "its shards give another blob"
    return f"{best.reach} of its shards are available, but restoring it needs {best.code.needed}"
