"""Downloads of blobs from peers, from an archive, and from erasure shards."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import NamedBy
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.archive.source import ArchiveSource
from dilocox.transport.limits.priority_semaphore import PrioritySemaphore
from dilocox.transport.net.rpc import ChannelPool, fetch_blob
from dilocox.transport.store.blobs import BlobStore

__all__ = [
    "FETCHES_AT_ONCE",
    "Downloader",
    "FetchStatistics",
    "Finder",
    "Restores",
    "Roster",
    "had",
    "places_behind",
    "read_index",
]

log = logging.getLogger(__name__)

T = TypeVar("T")
Roster = Callable[[], Mapping[str, Cluster]]
"""Returns the clusters that take part now, by name; each of their hosts serves its own stages."""

RETRY_SECONDS = 0.5
LINGER_SECONDS = 2.0
"""Time for which an unwanted download continues: a commit that counts the judged payload needs it next."""
FETCHES_AT_ONCE = 8
"""Downloads in parallel: enough to fill a link from several providers, few enough to finish one early."""


@dataclass(frozen=True)
class FetchStatistics:
    bytes_received: int
    fetches: int
    failures: int
    held: int
    """Bytes on disk of the downloads in progress."""
    wanted: int
    """Sizes of the downloads in progress."""


class Finder(Protocol):
    """Directory of peers' addresses."""

    async def find(self, peer: str) -> pb.PeerRecord | None: ...

    async def look_up(self, peer: str) -> None:
        """It may be elsewhere by now."""


class Restores(Protocol):
    """Reconstruction of blobs that no provider serves."""

    async def fetch(self, blob: bytes, by: NamedBy, stage: int | None, store: BlobStore, max_size: int) -> int:
        """Into the store; the bytes received. Raises RemoteError where it cannot be had."""


@dataclass
class Download:
    """Download that lives as long as a caller waits for it."""

    task: asyncio.Task[None]
    wanted: int = 0
    ending: bool = False

    def end_unwanted(self) -> None:
        if not self.wanted and not self.ending and not self.task.done():
            self.ending = True
            self.task.cancel()


class Downloader:
    """Downloads into one store. Concurrent calls for one blob share a download."""

    def __init__(
        self,
        me: str,
        store: BlobStore,
        directory: Finder,
        channels: ChannelPool,
        roster: Roster = dict,
        archive: ArchiveSource | None = None,
        shares: Restores | None = None,
    ) -> None:
        """`me`: our peer id. `archive`: asked after all peers; `shares`: asked last, for a blob that a commit names."""
        self._me, self.store, self._directory, self._channels = me, store, directory, channels
        self._heads, self._roster, self._archive, self._shares = channels.heads, roster, archive, shares
        self.traffic = channels.traffic
        self._downloads: dict[bytes, Download] = {}
        self._slots = PrioritySemaphore(FETCHES_AT_ONCE)
        self._counts: Counter[str] = Counter()
        self._held: dict[bytes, tuple[int, int]] = {}
        """(bytes on disk, size) of each download in progress."""

    def statistics(self) -> FetchStatistics:
        held, wanted = (sum(part) for part in zip((0, 0), *self._held.values(), strict=True))
        return FetchStatistics(self._counts["bytes"], self._counts["fetches"], self._counts["failures"], held, wanted)

    async def fetch(
        self,
        digest: bytes,
        providers: Iterable[str],
        max_size: int = limits.BLOB_BYTES,
        stage: int | None = None,
        by: NamedBy | None = None,
    ) -> None:
        """Have the blob, and right, from one of these peers, or a box of the cluster that one leads; `stage`: that it is of.
        `by`: the commit that names it, so that there may be shares of it. Concurrent calls for one digest share a download, which
        ends with the last of them.

        Raises RemoteError when nobody served it, or it is here and larger than `max_size`.
        """
        while not await asyncio.to_thread(self._has, digest, max_size):
            download = self._downloads.get(digest)
            if download is None:
                download = self._begin(digest, list(providers), max_size, stage, by)
            elif download.ending:
                await asyncio.wait({download.task})
                continue
            download.wanted += 1
            try:
                await asyncio.shield(download.task)
            finally:
                download.wanted -= 1
                asyncio.get_running_loop().call_later(LINGER_SECONDS, download.end_unwanted)

    def _has(self, digest: bytes, max_size: int) -> bool:
        """Whether it is here, and right. Blocking. Raises RemoteError where it is something else, and larger: who asks may read it
        whole."""
        try:
            size = self.store.size(digest) if self.store.sound(digest) else None
        except FileNotFoundError:  # it was deleted at this moment
            size = None
        if size is not None and size > max_size:
            raise RemoteError(pb.REASON_OVERSIZE, f"{size} bytes; expected at most {max_size}")
        return size is not None

    def _begin(self, digest: bytes, providers: list[str], max_size: int, stage: int | None, by: NamedBy | None) -> "Download":
        work = self._fetch(digest, providers, max_size, stage, by)
        task = asyncio.create_task(work, name=f"fetch {digest.hex()[:8]}")
        task.add_done_callback(lambda _: self._downloads.pop(digest))
        self._downloads[digest] = Download(task)
        return self._downloads[digest]

    async def _fetch(self, digest: bytes, providers: list[str], max_size: int, stage: int | None, by: NamedBy | None) -> None:
        def watch(held: int, size: int) -> None:
            self._held[digest] = held, size

        last = RemoteError(pb.REASON_UNAVAILABLE, "no known peer has it")
        asked = []
        roster = self._roster()
        behind = places_behind(self._me, next((peer for peer in providers if peer in roster), self._me), roster)
        for peer in self._order(providers, stage):
            asked.append(peer)
            record = await self._directory.find(peer)
            if record is None or not record.address:
                continue
            try:
                async with self._slots.one(behind):
                    heard = partial(self._heads.take, peer)
                    channel = self._channels.channel(record)
                    spend = self.traffic.download.spend
                    received = await fetch_blob(channel, self.store, digest, max_size, watch, heard, spend)
                self._counts.update(bytes=received, fetches=1)
                return
            except RemoteError as error:
                self._counts["failures"] += 1
                log.debug("fetching %s from %s: %s", digest.hex()[:8], short(peer), error)
                last = error
            finally:
                self._held.pop(digest, None)
        if self._archive is not None:
            try:
                received = await self._archive.fetch(digest, self.store, max_size)
                self.traffic.bytes["received", "archive"] += received
                self._counts.update(bytes=received, fetches=1)
                await self.traffic.download.spend(received)
                return
            except RemoteError as error:  # a fault of this provider is no fault of another
                last = RemoteError(pb.REASON_UNAVAILABLE, f"{last.detail}; {error.detail}")
        if self._shares is not None and by is not None:
            try:
                received = await self._shares.fetch(digest, by, stage, self.store, max_size)
                self._counts.update(bytes=received, fetches=1)
                return
            except RemoteError as error:  # a false record is not the fault of the provider
                last = RemoteError(pb.REASON_UNAVAILABLE, f"{last.detail}; {error.detail}")
        await asyncio.gather(*(self._directory.look_up(peer) for peer in asked))  # for the next attempt
        raise last

    async def fetch_forever(
        self, digest: bytes, providers: Iterable[str], max_size: int = limits.BLOB_BYTES, stage: int | None = None
    ) -> None:
        """Fetch until a peer serves the blob. Raises RemoteError when the served data break a rule."""
        providers = list(providers)
        while True:
            try:
                return await self.fetch(digest, providers, max_size, stage)
            except RemoteError as error:
                if error.reason != pb.REASON_UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    def _order(self, peers: Sequence[str], stage: int | None) -> Iterator[str]:
        """Yield peers in the order of requests: of each cluster first one host with the stage, or its lead host, then all
        others, which may have it from before. Otherwise random: uploads spread, and a cluster of many hosts comes no
        earlier than one of one."""
        roster, asked = self._roster(), {self._me}
        shuffled = random.sample(peers, len(peers))

        def first(peer: str) -> list[str]:
            cluster = roster.get(peer)
            hosts = cluster.hosts_of(stage) if cluster is not None and stage is not None else []
            return [random.choice(hosts)] if hosts else [peer]

        def others(peer: str) -> list[str]:
            cluster = roster.get(peer)
            return random.sample(cluster.peers, len(cluster.peers)) if cluster is not None else []

        for boxes in (first, others):
            for peer in shuffled:
                for box in boxes(peer):
                    if box not in asked:
                        asked.add(box)
                        yield box


async def read_index(manifest: Manifest, store: BlobStore, blob: bytes, fetch: Callable[[], Awaitable[None]]) -> list[pb.Leaf]:
    """Return the payload index in a blob that `fetch` downloads. Raises what `fetch` raises, and RemoteError if it is malformed."""
    return read_leaves(manifest, await had(fetch, partial(store.read, blob)))


async def had(fetch: Callable[[], Awaitable[None]], read: Callable[[], T]) -> T:
    """Return what `read`, which blocks, makes of a blob that `fetch` stores. Fetch again if it was deleted between. Raises
    their errors."""
    while True:
        await fetch()
        with suppress(FileNotFoundError):
            return await asyncio.to_thread(read)


def places_behind(us: str, other: str, clusters: Iterable[str]) -> int:
    """Return the distance to another cluster in the ring of these clusters. Each fetches first from its next neighbours,
    so all upload at once. In the order of announcements all would ask the same few, while other links stand idle."""
    ring = sorted({us, other, *clusters})
    return (ring.index(other) - ring.index(us)) % len(ring)
