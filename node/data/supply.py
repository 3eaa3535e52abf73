"""The run's corpus onto this machine, before the workers start: from a folder that the operator named, or from peers."""

import asyncio
import logging
import shutil
from collections.abc import Callable

from dilocox.node.data.check import check_shard
from dilocox.node.exchange import Exchange
from dilocox.protocol import limits
from dilocox.protocol.corpus import Corpus, check_fits
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.status import Status
from dilocox.transport.blobs import BlobStore
from dilocox.transport.corpora import corpus_in

__all__ = ["Supply"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
LOOK_SECONDS = 0.5
"""Between two looks at a download, for the people who watch."""


class Supply:
    def __init__(
        self,
        manifest: Manifest,
        store: BlobStore,
        exchange: Exchange,
        providers: Callable[[], list[str]],
        tell: Callable[[Status], None],
    ) -> None:
        """`exchange`: fetches into `store`. `providers`: who may hold the corpus, now."""
        self._manifest, self._store, self._exchange = manifest, store, exchange
        self._providers, self._tell = providers, tell

    async def have(self) -> None:
        """Have all of it, and right. Raises ConfigError where it does not fit the run's model."""
        corpus = await self._corpus()
        check_fits(self._manifest, corpus)
        await self._have_room(corpus)
        total = sum(size for _, size in corpus.blobs)
        there = 0
        for digest, size in corpus.blobs:
            await self._fetch(digest, size or limits.TOKENIZER_BYTES, there, total)
            there += size
        for shard in (*corpus.training, *corpus.held_out):
            await asyncio.to_thread(check_shard, self._store, corpus, shard)
        log.info("the run's data are here: %s tokens in %s documents", f"{corpus.tokens:,}", f"{corpus.documents:,}")

    async def _have_room(self, corpus: Corpus) -> None:
        """Not: fetch until the disk is full, on which the chain lies too."""
        while True:
            needed = sum(size for digest, size in corpus.blobs if digest not in self._store)
            free = shutil.disk_usage(self._store.folder).free
            if needed <= free:
                return
            why = f"the run's data need {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {self._store.folder}"
            self._tell(Status("synchronising", why, "free some space, or use another --home"))
            await asyncio.sleep(RETRY_SECONDS)

    async def _corpus(self) -> Corpus:
        digest = bytes.fromhex(self._manifest.data.digest)
        while True:
            await self._fetch(digest, limits.CORPUS_BYTES)
            if (corpus := await asyncio.to_thread(corpus_in, self._store, digest)) is not None:
                return corpus
            if await asyncio.to_thread(self._store.sound, digest):
                raise ConfigError(f"the run's data.digest {digest.hex()} names no corpus: its owner has to say another")

    async def _fetch(self, digest: bytes, most: int, there: int = 0, total: int = 0) -> None:
        """`there`: of the `total` bytes, what came before."""
        while True:
            fetching = asyncio.create_task(self._exchange.fetch(digest, self._providers(), most))
            try:
                while not fetching.done():
                    held = there + self._exchange.statistics().held
                    progress = f": {held / 1e6:,.0f} of {total / 1e6:,.0f} MB" if total else ""
                    self._tell(Status("synchronising", f"fetching the run's data{progress}"))
                    await asyncio.wait({fetching}, timeout=LOOK_SECONDS)
                return await fetching
            except RemoteError as error:
                log.warning("the run's data are not to be had yet: %s", error)
                self._tell(Status("synchronising", f"nobody serves the run's data yet ({error.detail}); trying again"))
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                fetching.cancel()
