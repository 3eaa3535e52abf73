"""Blobs that nobody serves any more, put together from the shares that peers keep of them."""

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

from dilocox.node.downloader import Finder
from dilocox.protocol import limits
from dilocox.protocol.chain import NamedBy, taken
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.head import Cluster, advance
from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.blobs import BlobStore, digest_of
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.rpc import ChannelPool, fetch_blob, fetch_chunk, in_thread
from dilocox_availability import erasure
from dilocox_availability.shards import Code, check_share, code_in, hosts, kept_since, most_shared, order, places
from dilocox_availability.store import ShareStore, share_bytes

__all__ = ["ASKED_AT_ONCE", "Answer", "Due", "Holders", "Restorer"]

log = logging.getLogger(__name__)

ASK_SECONDS = 10.0
ASKED_AT_ONCE = 16
"""As many as with the default restore a blob of the largest roster, so that mostly nobody else is asked."""
ROSTERS_REMEMBERED = 8
SIZES_REMEMBERED = 1 << 14
"""By round; a number each. Nobody is asked for shares of older ones."""


class Answer(NamedTuple):
    """A share that a peer says it keeps, and that proves itself."""

    peer: str
    """Empty: ourselves."""
    share: services.Share


class Due(NamedTuple):
    """What should be there of a blob."""

    peers: list[str]
    """Who should have shares, in their order: the peer at place i share i modulo their number."""
    code: Code | None
    """None: the roster of that round was one peer, and shared nothing."""
    root: bytes
    """That proves them; empty: the commit names none."""


class Holders:
    """Who is to keep which share, as the chain says."""

    def __init__(self, chain: ChainFile) -> None:
        self._chain, self._round = chain, lru_cache(ROSTERS_REMEMBERED)(self._read)
        self._shared = lru_cache(SIZES_REMEMBERED)(self._most_shared)

    def _read(self, round: int) -> tuple[bytes, bytes, Mapping[str, Cluster], dict[str, int]]:
        """Digest and data root of a round's commit, the roster on which it was made, and whom it counts, with the bytes of each
        one's payloads. Raises RemoteError where the chain has it not."""
        commit, before = self._chain.commit(round), self._chain.commit(round - 1) if round else None
        if commit is None or before is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, f"no commit {round} is here that would say who keeps shares")
        counted = {item.cluster: item.contribution.size for item in taken(commit.body)}
        return commit.digest, commit.body.data_root, advance(self._chain.manifest, before).roster, counted

    def _most_shared(self, round: int) -> int:
        _, _, roster, counted = self._read(round)
        return most_shared(self._chain.manifest, roster, counted.values())

    def kept_since(self, head: int) -> int:
        """The first round of which everybody is to have its shares of what was counted, if it had a seat; `head`, the open one: of
        none. By the chain alone: what we keep says little of what others have room for. Blocking. Raises RemoteError."""
        settings = self._chain.manifest.availability
        if settings is None:
            return head
        oldest = max(1, head - min(settings.rounds, SIZES_REMEMBERED))
        rounds = ((round, self._shared(round)) for round in range(head - 1, oldest - 1, -1))
        return kept_since(rounds, head, settings.most_bytes)

    def of(self, by: NamedBy, blob: bytes, stage: int | None) -> Due:
        """Blocking. Raises RemoteError."""
        commit, root, roster, _ = self._round(by.round)
        peers = order(commit, blob, hosts(roster, stage))
        return Due(peers, code_in(self._chain.manifest, roster, stage), b"" if by.state else root)

    def in_cluster(self, ours: services.Share, me: str, cluster: str) -> tuple[dict[str, frozenset[int]], bytes]:
        """Of a blob of which we keep a share: by box of a cluster the index of its own, or several where what we keep does not say
        of which stage it is; and the root that proves them. Nobody where it was not counted then (it need not have had the blob)
        or the chain names no such blob. Blocking. Raises RemoteError."""
        commit, root, roster, counted = self._round(ours.round)
        if cluster not in counted or cluster not in roster or ours.root != root:
            return {}, root
        return places(self._chain.manifest, roster, commit, ours, me, roster[cluster].peers), root

    def everybody(self) -> list[str]:
        """Of the roster now: a share that somebody keeps for a later commit may be wanted for an earlier one."""
        return sorted(self._chain.head.cluster_by_peer)


@dataclass
class Gathering:
    """The shares of a blob under one root."""

    size: int
    code: Code
    offered: list[Answer] = field(default_factory=list)
    have: dict[int, services.Share] = field(default_factory=dict)
    """That are here, by index."""
    begun: set[bytes] = field(default_factory=set)
    """Digests of those that are here, and of those that broke off: of these, too, a part lies here."""
    lie: bool = False
    """They were put together, and are of something else."""

    @property
    def reach(self) -> int:
        """How many different ones are here or offered."""
        return len(self.have.keys() | {answer.share.index for answer in self.offered})


class Restorer:
    def __init__(
        self, scratch: Path, directory: Finder, channels: ChannelPool, chain: ChainFile, own: ShareStore | None = None
    ) -> None:
        """`scratch`: a folder of ours, where shares lie until they are put together; `own`: what we keep ourselves."""
        self._scratch = BlobStore(scratch)
        self._scratch.sweep(self._scratch.digests() | self._scratch.partials())
        self._directory, self._channels, self._own = directory, channels, own
        self.holders = Holders(chain)

    async def ask(self, blob: bytes, peers: Iterable[str], largest: int = limits.BLOB_BYTES, root: bytes = b"") -> list[Answer]:
        """What of these peers those say that have a share, and can be dialled. All are asked at once. `root`: that proves it, where
        that is known."""

        async def one(peer: str) -> Answer | None:
            try:
                return Answer(peer, await self._ask_one(peer, blob, largest, root))
            except RemoteError as error:
                log.debug("%s has no share of %s: %s", short(peer), blob.hex()[:8], error)
                return None

        found = await asyncio.gather(*(one(peer) for peer in peers))
        return [answer for answer in found if answer is not None]

    async def _ask_one(self, peer: str, blob: bytes, largest: int, root: bytes) -> services.Share:
        """Raises RemoteError where it has none, or it proves nothing."""
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
        """Raises RemoteError where nobody can dial it."""
        record = await self._directory.find(peer)
        if record is None or not record.address:
            raise RemoteError(pb.REASON_UNAVAILABLE, "nobody knows how to dial it")
        return self._channels.channel(record)

    async def try_chunk(self, answer: Answer, draw: Callable[[int], int]) -> None:
        """Have a chunk of a share, the one that `draw` picks of so many; it is thrown away. Raises RemoteError."""
        if size := share_bytes(answer.share):
            chunk = draw(-(-size // limits.CHUNK_BYTES))
            await fetch_chunk(await self._channel(answer.peer), answer.share.digest, size, chunk)

    async def fetch(self, blob: bytes, by: NamedBy, stage: int | None, store: BlobStore, max_size: int) -> int:
        """Restore a blob into the store; the bytes received. Raises RemoteError where too few shares are to be had."""
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
        """Ours; then of some peers at a time, those first that should have one. Raises RemoteError."""
        due = await asyncio.to_thread(self.holders.of, by, blob, stage)
        own = await asyncio.to_thread(self._own.get, blob) if self._own is not None else None
        if own is not None and own.size <= largest and due.root in (b"", own.root):
            yield [Answer("", own)]
        peers = list(dict.fromkeys([*due.peers, *self.holders.everybody()]))
        for first in range(0, len(peers), ASKED_AT_ONCE):
            yield await self.ask(blob, peers[first : first + ASKED_AT_ONCE], largest, due.root)

    async def _try(self, blob: bytes, group: Gathering, store: BlobStore) -> tuple[int, bool]:
        """The bytes that came, and whether the blob is in the store."""
        if group.lie or group.reach < group.code.needed:
            return 0, False
        received = await self._gather(group)
        if len(group.have) < group.code.needed:
            return received, False
        restored = await in_thread(self._restore, blob, group, store)
        group.lie = not restored
        if restored:
            log.info("restored %s from %d of %d shares", blob.hex()[:8], group.code.needed, group.code.shares)
        return received, restored

    async def _gather(self, group: Gathering) -> int:
        """Have as many as restore, where they are to be had; the bytes received. Who did not send what it offered is not asked
        again."""
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
                log.info("share %d of %s from %s: %s", share.index, share.blob.hex()[:8], short(peer), error)
        return received

    async def _have(self, peer: str, share: services.Share) -> int:
        if not peer:
            return 0
        spend, channel = self._channels.traffic.download.spend, await self._channel(peer)
        return await fetch_blob(channel, self._scratch, share.digest, share_bytes(share), spend=spend)

    def _restore(self, blob: bytes, group: Gathering, store: BlobStore) -> bool:
        """Whether they are of it: it is in the store then, and else nothing is. Blocking."""

        def parts(opened: ExitStack) -> Iterator[bytes]:
            files = {index: opened.enter_context(self._path(share).open("rb")) for index, share in group.have.items()}
            return erasure.restored(group.size, group.code, files)

        try:
            with ExitStack() as opened:
                if digest_of(parts(opened)) != blob:  # before it is written: a lie may be any blob, and fill a disk
                    return False
            with ExitStack() as opened:
                return store.put(parts(opened)) == blob
        except (RemoteError, FileNotFoundError):  # one is too short, or ours was let go
            return False

    def _path(self, share: services.Share) -> Path:
        ours = self._own is not None and share.digest in self._own.store
        return (self._own.store if ours and self._own is not None else self._scratch).path(share.digest)


def _why(groups: Iterable[Gathering]) -> str:
    """It was not restored."""
    best = max(groups, key=lambda group: (not group.lie, group.reach), default=None)
    if best is None:
        return "nobody answers with a share of it"
    if best.lie:
        return "its shares are of something else"
    return f"{best.reach} of its shares are to be had, and {best.code.needed} restore it"
