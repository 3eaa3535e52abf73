"""An archive as one more holder, for daemons: asked when no peer serves a blob."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dilocox.protocol.errors import DilocoxError, LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.archive.archive import Archive, open_archive
from dilocox.transport.archive.chain import check_commits
from dilocox.transport.net.rpc import in_thread
from dilocox.transport.process.tasks import wait_out
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["ArchivePlace", "ArchiveSource", "stoppable"]

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_SECONDS = 30.0
"""Seconds before another request for a missing blob, or to an unusable archive. A round's payloads are requested several
times a second until their author serves them, and each would be a request to a bucket."""
MISSES_KEPT = 4096


@dataclass(frozen=True)
class ArchivePlace:
    """An operator's options for an archive."""

    url: str
    key: Path | None
    """File with the key that it is sealed with."""


async def stoppable(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments, stop)` in a thread; when we are cancelled `stop` is set, and we end with the thread."""
    stop = threading.Event()
    running = asyncio.create_task(in_thread(function, *arguments, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await wait_out(running)
        raise


class ArchiveSource:
    def __init__(self, place: ArchivePlace, run_id: bytes) -> None:
        self._place, self._run_id = place, run_id
        self._archive: Archive | None = None
        self._why: RemoteError | None = None
        """Why it cannot be used …"""
        self._why_until = 0.0
        """End of the time for which that reason is trusted."""
        self._missing: dict[bytes, float] = {}
        """Missing blobs, with the end of the time for which that is trusted."""
        self._opening, self._told = asyncio.Lock(), False

    async def _opened(self) -> Archive:
        """Raises RemoteError where it cannot be used, now and for a while."""
        async with self._opening:
            if self._archive is None:
                if self._why is not None and time.monotonic() < self._why_until:
                    raise self._why
                try:
                    self._archive = await asyncio.to_thread(open_archive, self._place.url, self._place.key, self._run_id)
                except DilocoxError as error:
                    detail = error.detail if isinstance(error, RemoteError) else str(error)
                    if self._why is None or self._why.detail != detail:
                        log.warning("%s", detail)
                    self._why, self._why_until = RemoteError(pb.REASON_UNAVAILABLE, detail), time.monotonic() + AGAIN_SECONDS
                    raise self._why from error
            return self._archive

    async def fetch(self, digest: bytes, store: BlobStore, most: int) -> int:
        """Have the blob in `store`, and right; returns the bytes received. Raises RemoteError."""
        if time.monotonic() < self._missing.get(digest, 0.0):
            raise RemoteError(pb.REASON_UNAVAILABLE, "the archive did not have it at the last request")
        archive = await self._opened()
        try:
            received = await stoppable(archive.fetch, digest, store, most)
        except RemoteError as error:
            if error.reason == pb.REASON_UNAVAILABLE:
                self._missing[digest] = time.monotonic() + AGAIN_SECONDS
                while len(self._missing) > MISSES_KEPT:
                    self._missing.pop(next(iter(self._missing)))
            raise
        if not self._told:
            self._told = True
            log.info("fetching from the archive %s, because no peer serves the blobs", archive.url)
        return received

    async def check_commits(self, chain: ChainFile) -> None:
        """Check that it has every commit that it names. Raises LocalError, RemoteError."""
        await asyncio.to_thread(check_commits, await self._opened(), chain)

    async def states(self) -> Mapping[int, bytes]:
        """Return the roots of its states by round, the newest first; empty if it is unusable."""
        try:
            archive = await self._opened()
            head = await asyncio.to_thread(archive.head)
        except (LocalError, RemoteError):
            return {}
        return {} if head is None else head.states
