"""Payloads between peers: fetch, check, vote. Everything heavy runs in threads; nothing here imports torch."""

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
from dilocox.protocol.chain import Taken, taken
from dilocox.protocol.chain import holders as holders_of
from dilocox.protocol.counting import Announced, tensor_clips
from dilocox.protocol.data_root import check_root, check_work, work_root
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.head import Cluster
from dilocox.protocol.ids import short
from dilocox.protocol.leaves import check_bounds, check_leaves, check_payload, layout_of, read_leaves
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.member import Verdict
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.shares import NamedBy
from dilocox.transport.archive.source import ArchiveSource
from dilocox.transport.blobs import BlobStore
from dilocox.transport.heads import Heads
from dilocox.transport.rpc import ChannelPool, fetch_blob
from dilocox.transport.shares import share_root
from dilocox.transport.slots import Slots

__all__ = ["FETCHES_AT_ONCE", "Exchange", "FetchStatistics", "had", "places_behind", "takes_of"]

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 0.5
LINGER_SECONDS = 2.0
"""A download that nobody wants goes on for this: whoever counts what was being judged wants it next."""
FETCHES_AT_ONCE = 8
"""Downloads in parallel: enough to fill a link from several providers, few enough to finish one early."""


@dataclass(frozen=True)
class FetchStatistics:
    bytes_received: int
    fetches: int
    failures: int
    held: int
    """Of the downloads that are going on: bytes on disk."""
    wanted: int
    """And their sizes."""


class Finder(Protocol):
    """Who knows how to dial peers."""

    async def find(self, peer: str) -> pb.PeerRecord | None: ...

    async def look_up(self, peer: str) -> None:
        """It may be elsewhere by now."""


class Restores(Protocol):
    """Who has a blob that nobody serves any more."""

    async def fetch(self, blob: bytes, by: NamedBy, stage: int | None, store: BlobStore, max_size: int) -> int:
        """Into the store; the bytes received. Raises RemoteError where it cannot be had."""


@dataclass
class Download:
    """Lives as long as somebody wants it."""

    task: asyncio.Task[None]
    wanted: int = 0
    ending: bool = False

    def end_unwanted(self) -> None:
        if not self.wanted and not self.ending and not self.task.done():
            self.ending = True
            self.task.cancel()


class Exchange:
    def __init__(
        self,
        manifest: Manifest,
        stages: Iterable[int],
        store: BlobStore,
        directory: Finder,
        channels: ChannelPool,
        me: str,
        heads: Heads | None = None,
        roster: Callable[[], Mapping[str, Cluster]] = dict,
        archive: ArchiveSource | None = None,
    ) -> None:
        """`roster`: the clusters that take part now, by name, each of whose boxes serves its own stages. `archive`: asked after all
        peers."""
        self._manifest, self._store, self._directory, self._channels, self._me = (
            manifest,
            store,
            directory,
            channels,
            me,
        )
        self._heads, self._roster, self._archive = heads or Heads(), roster, archive
        self.traffic = channels.traffic
        self.shares: Restores | None = None
        """Asked last of all, where the run keeps shares."""
        self.stages = frozenset(stages)
        """Hosted here: of other stages nothing is fetched."""
        self._downloads: dict[bytes, Download] = {}
        self._slots = Slots(FETCHES_AT_ONCE)
        self._counts: Counter[str] = Counter()
        self._held: dict[bytes, tuple[int, int]] = {}
        """(bytes on disk, size) of each download that goes on."""

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
            size = self._store.size(digest) if self._store.sound(digest) else None
        except FileNotFoundError:  # it was let go this very moment
            size = None
        if size is not None and size > max_size:
            raise RemoteError(pb.REASON_OVERSIZE, f"{size} bytes; at most {max_size} expected")
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

        last = RemoteError(pb.REASON_UNAVAILABLE, "nobody is known to hold it")
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
                    received = await fetch_blob(channel, self._store, digest, max_size, watch, heard, spend)
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
                received = await self._archive.fetch(digest, self._store, max_size)
                self.traffic.bytes["received", "archive"] += received
                self._counts.update(bytes=received, fetches=1)
                await self.traffic.download.spend(received)
                return
            except RemoteError as error:  # whatever is wrong with it is nobody else's fault
                last = RemoteError(pb.REASON_UNAVAILABLE, f"{last.detail}; {error.detail}")
        if self.shares is not None and by is not None:
            try:
                received = await self.shares.fetch(digest, by, stage, self._store, max_size)
                self._counts.update(bytes=received, fetches=1)
                return
            except RemoteError as error:  # a lie among them is nobody's whom we asked for the blob
                last = RemoteError(pb.REASON_UNAVAILABLE, f"{last.detail}; {error.detail}")
        await asyncio.gather(*(self._directory.look_up(peer) for peer in asked))  # for the next attempt
        raise last

    async def fetch_forever(
        self, digest: bytes, providers: Iterable[str], max_size: int = limits.BLOB_BYTES, stage: int | None = None
    ) -> None:
        """`fetch` until somebody serves it. Raises RemoteError when what is served breaks a rule."""
        providers = list(providers)
        while True:
            try:
                return await self.fetch(digest, providers, max_size, stage)
            except RemoteError as error:
                if error.reason != pb.REASON_UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    def _order(self, peers: Sequence[str], stage: int | None) -> Iterator[str]:
        """Whom to ask, one after the other: of each cluster one box that hosts the stage, or its lead, before all its others, where
        it may lie from before. In no order otherwise: uploads spread, and a cluster of many boxes is asked no sooner than one of
        one."""
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

    async def leaves(self, contribution: pb.Contribution, providers: Iterable[str]) -> list[pb.Leaf]:
        """What a counted contribution announces, stage by stage. Raises RemoteError when it cannot be had, or is not that."""
        blob, by = contribution.leaves, NamedBy(contribution.round)
        fetch = partial(self.fetch, blob, providers, limits.LEAVES_BYTES, by=by)
        return read_leaves(self._manifest, await had(fetch, partial(self._store.read, blob)))

    async def take(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Have what a commit counts of our stages; what workers need to apply it. Raises RemoteError when it is not to be had."""
        holders, items, by = holders_of(commit.body), taken(commit.body), NamedBy(commit.body.round)
        leaves = []
        for item in items:
            providers = holders[item.cluster]
            announced = await self.leaves(item.contribution, providers)
            ours = [leaf for leaf in announced if leaf.stage in self.stages]
            wanted = (self.fetch(leaf.digest, providers, leaf.size, leaf.stage, by) for leaf in ours)
            await asyncio.gather(*wanted)
            leaves.append(announced)
        takes = await asyncio.to_thread(takes_of, self._manifest, items, leaves)
        return worker.Apply(commit=commit.envelope.SerializeToString(), takes=takes)

    async def counts(self, commit: Statement[pb.Commit]) -> worker.Apply:
        """Whom a commit counts and what it clips of them; no payload is fetched. Where nobody serves the leaves any more, only what
        it clips in total is known."""
        holders, items = holders_of(commit.body), taken(commit.body)
        try:
            leaves = [await self.leaves(item.contribution, holders[item.cluster]) for item in items]
        except RemoteError as error:
            log.info("commit %d: its clips of single tensors are not known: %s", commit.body.round, error)
            takes = [worker.Take(cluster=item.cluster, weight=item.weight, clip=item.clip) for item in items]
        else:
            takes = await asyncio.to_thread(takes_of, self._manifest, items, leaves)
        return worker.Apply(commit=commit.envelope.SerializeToString(), takes=takes)

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Fetch and check the payloads of our stages; `base`: our own state root. Fetches until cancelled."""
        body, stage, roster = contribution.body, 0, self._roster()
        try:
            if body.base_state != base:
                raise RemoteError(pb.REASON_WRONG_BASE, "it built on another state than ours")
            providers = [contribution.peer, *body.holders]
            fetch = partial(self.fetch_forever, body.leaves, providers, limits.LEAVES_BYTES)
            leaves = read_leaves(self._manifest, await had(fetch, partial(self._store.read, body.leaves)))
            check_leaves(body, leaves)
            check_work(body, await had(fetch, partial(self._share_root, roster, body.leaves, None)), leaves)
            for leaf in leaves:
                stage = leaf.stage
                check_bounds(self._manifest, leaf)
                if stage in self.stages:
                    layout_of(self._manifest, stage, rank_or_k).check_size(leaf.size)
                    fetch = partial(self.fetch_forever, leaf.digest, providers, leaf.size, stage)
                    await had(fetch, partial(self._check, contribution, leaf, rank_or_k, roster))
        except RemoteError as error:
            log.info("payload of %s, stage %d: %s", short(contribution.peer), stage, error)
            return error.reason, stage
        return pb.REASON_UNSPECIFIED, 0

    def _check(
        self, contribution: Statement[pb.Contribution], leaf: pb.Leaf, rank_or_k: int, roster: Mapping[str, Cluster]
    ) -> None:
        """And its shares: coding is as fast as reading, and a root that is none would leave nobody with a proof."""
        raw = self._store.view(leaf.digest)
        check_payload(self._manifest, contribution.peer, contribution.body.round, leaf, raw, rank_or_k)
        check_root(leaf, self._share_root(roster, leaf.digest, leaf.stage))

    def _share_root(self, roster: Mapping[str, Cluster], blob: bytes, stage: int | None) -> bytes:
        """Blocking."""
        return share_root(self._manifest, roster, self._store, blob, stage)

    def with_roots(self, boundary: worker.Boundary) -> worker.Boundary:
        """What a worker of ours made in the open round, with the root over the shares of each payload. Blocking. Raises
        FileNotFoundError where one is not here."""
        if self._manifest.availability is None:
            return boundary
        after = worker.Boundary.FromString(boundary.SerializeToString())
        for payload in after.payloads:
            payload.shares = self._share_root(self._roster(), payload.digest, payload.stage)
        return after

    def work_root(self, leaves: bytes, announced: Sequence[pb.Leaf]) -> bytes:
        """Of a contribution to the open round, whose leaves are here; empty where the run keeps no shares. Blocking."""
        if self._manifest.availability is None:
            return b""
        return work_root(self._share_root(self._roster(), leaves, None), announced)


async def had(fetch: Callable[[], Awaitable[None]], read: Callable[[], T]) -> T:
    """What `read`, which blocks, makes of a blob that `fetch` has: again where it was let go in between, as nobody needed it but
    for this. Raises what they raise."""
    while True:
        await fetch()
        with suppress(FileNotFoundError):
            return await asyncio.to_thread(read)


def places_behind(us: str, other: str, clusters: Iterable[str]) -> int:
    """How far behind us another stands in the ring of these clusters. Everybody fetches first from those next to it: so all send at
    once. In the order in which work is announced everybody would ask the same few, while the others' lines stand idle."""
    ring = sorted({us, other, *clusters})
    return (ring.index(other) - ring.index(us)) % len(ring)


def takes_of(manifest: Manifest, items: Sequence[Taken], leaves: Sequence[Sequence[pb.Leaf]]) -> list[worker.Take]:
    """What a commit takes of each of the counted, in their order; `leaves`: what each announced."""
    announced = [
        Announced(item.contribution.norm, item.clip, item.say, [leaf.norms for leaf in each])
        for item, each in zip(items, leaves, strict=True)
    ]
    return [
        worker.Take(
            cluster=item.cluster, weight=item.weight, clip=item.clip, payloads=[leaf.digest for leaf in each], clips=clips
        )
        for item, each, clips in zip(items, leaves, tensor_clips(manifest, announced), strict=True)
    ]
