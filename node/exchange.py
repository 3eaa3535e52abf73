"""Payloads between peers: fetch, check, vote. Everything heavy runs in threads; nothing here imports torch."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dilocox.protocol import limits
from dilocox.protocol import payload as wire
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.tensors import stage_tensors
from dilocox.transport.blobs import BlobStore
from dilocox.transport.presence import Directory
from dilocox.transport.rpc import ChannelPool, fetch_blob

__all__ = ["Exchange", "FetchStatistics", "Verdict"]

log = logging.getLogger(__name__)

Verdict = tuple[pb.Reason, int]
"""Why not (REASON_UNSPECIFIED: accepted), and the first stage the reason is about."""
NORM_TOLERANCE = 1e-4
"""Relative difference allowed between an announced norm and ours: summation order."""
RETRY_SECONDS = 0.5
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


class Exchange:
    def __init__(
        self,
        manifest: Manifest,
        stages: Iterable[int],
        store: BlobStore,
        directory: Directory,
        channels: ChannelPool,
        me: str,
    ) -> None:
        self._manifest, self._store, self._directory, self._channels, self._me = (
            manifest,
            store,
            directory,
            channels,
            me,
        )
        self._shapes = {stage: [spec.shape for spec in stage_tensors(manifest.model, stage)] for stage in stages}
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)
        self._counts: Counter[str] = Counter()
        self._held: dict[bytes, tuple[int, int]] = {}
        """(bytes on disk, size) of each download that goes on."""

    def statistics(self) -> FetchStatistics:
        held, wanted = (sum(part) for part in zip((0, 0), *self._held.values(), strict=True))
        return FetchStatistics(self._counts["bytes"], self._counts["fetches"], self._counts["failures"], held, wanted)

    async def fetch(self, digest: bytes, providers: Iterable[str], max_size: int = limits.BLOB_BYTES) -> None:
        """Have the blob, and right. Concurrent calls for one digest share a download. Raises RemoteError when nobody served it."""
        while not await asyncio.to_thread(self._store.sound, digest):
            task = self._fetching.get(digest)
            if task is None:
                task = asyncio.create_task(self._fetch(digest, list(providers), max_size), name=f"fetch {digest.hex()[:8]}")
                self._fetching[digest] = task
                task.add_done_callback(lambda _: self._fetching.pop(digest, None))
            await asyncio.shield(task)

    async def _fetch(self, digest: bytes, providers: list[str], max_size: int) -> None:
        def watch(held: int, size: int) -> None:
            self._held[digest] = held, size

        last = RemoteError(pb.REASON_UNAVAILABLE, "nobody is known to hold it")
        random.shuffle(providers)  # uploads spread
        for peer in providers:
            record = await self._directory.find(peer) if peer != self._me else None
            if record is None or not record.address:
                continue
            try:
                async with self._slots:
                    received = await fetch_blob(self._channels.channel(record), self._store, digest, max_size, watch)
                self._counts.update(bytes=received, fetches=1)
                return
            except RemoteError as error:
                self._counts["failures"] += 1
                log.debug("fetching %s from %s: %s", digest.hex()[:8], short(peer), error)
                last = error
            finally:
                self._held.pop(digest, None)
        raise last

    async def fetch_forever(self, digest: bytes, providers: Iterable[str], max_size: int = limits.BLOB_BYTES) -> None:
        """`fetch` until somebody serves it. Raises RemoteError when what is served breaks a rule."""
        providers = list(providers)
        while True:
            try:
                return await self.fetch(digest, providers, max_size)
            except RemoteError as error:
                if error.reason != pb.REASON_UNAVAILABLE:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def judge(
        self, contribution: Statement, bases: Mapping[int, bytes], medians: Mapping[int, float], keep: int
    ) -> Verdict:
        """Fetch and check every payload of our stages; `keep`: the round's rank or k. Fetches until cancelled."""
        for announced in contribution.body.payloads:
            if announced.stage not in self._shapes:
                continue
            layout = wire.stage_layout(self._shapes[announced.stage], self._manifest.compression, keep)
            try:
                if bases.get(announced.stage) != announced.base_state:
                    raise RemoteError(pb.REASON_WRONG_BASE, "it built on another state than ours")
                layout.check_size(announced.size)
                await self.fetch_forever(announced.digest, [contribution.peer], announced.size)
                await asyncio.to_thread(self._check, announced, layout, medians.get(announced.stage, 0.0))
            except RemoteError as error:
                log.info("payload of %s, stage %d: %s", short(contribution.peer), announced.stage, error)
                return error.reason, announced.stage
        return pb.REASON_UNSPECIFIED, 0

    def _check(self, announced: pb.StagePayload, layout: wire.StageLayout, median: float) -> None:
        """Digest was checked on arrival; here layout, finiteness and norm. Raises RemoteError."""
        if self._store.size(announced.digest) != announced.size:
            raise RemoteError(pb.REASON_SIZE_MISMATCH, "not the announced size")
        norm = wire.decoded_norm(wire.parse(self._store.view(announced.digest), layout))
        if abs(norm - announced.norm) > NORM_TOLERANCE * max(norm, 1e-30):
            raise RemoteError(pb.REASON_NORM_MISMATCH, f"its norm is {norm:.4g}, announced {announced.norm:.4g}")
        bound = self._manifest.rounds.max_norm_ratio * median
        if median and norm > bound:
            raise RemoteError(pb.REASON_NORM_TOO_LARGE, f"norm {norm:.4g} is above {bound:.4g}")
