"""The run's corpus onto this machine, from peers: what is held out before the workers start, each shard before it is read."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence

from dilocox.node.data.check import check_shard
from dilocox.node.exchange import Exchange
from dilocox.protocol import limits
from dilocox.protocol.corpus import BYTES, Corpus, Shard, check_fits, order_of
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ledger import Span
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
        self._checked: set[Shard] = set()
        self._begun, self._warned = False, ""
        self._there = self._total = 0
        """Bytes of what is being fetched."""

    async def begin(self) -> Corpus:
        """Have what every worker needs from the first: all but the shards that are trained on. Raises ConfigError where the corpus
        does not fit the run's model."""
        corpus = await self._corpus()
        check_fits(self._manifest, corpus)
        await self._have(corpus, corpus.held_out)
        if corpus.tokenizer != BYTES:
            await self._fetch(bytes.fromhex(corpus.tokenizer), limits.TOKENIZER_BYTES)
        self._begun = True
        return corpus

    async def follow(self, corpus: Corpus, reading: Callable[[], Iterable[Span]]) -> None:
        """Have the shards of the positions that are read soon, before they are. Until cancelled; raises ConfigError where one is
        not what the corpus says."""
        order, said = order_of(self._manifest, corpus), False
        while True:
            numbers = dict.fromkeys(shard for first, end in reading() for shard in order.shards(first, end))
            wanted = [corpus.training[number] for number in numbers]
            lacking = [each for each in wanted if each not in self._checked or bytes.fromhex(each.digest) not in self._store]
            await self._have(corpus, lacking)
            if wanted and not said:
                log.info(
                    "the run's data are here as far as they are read soon: %d of %d shards", len(wanted), len(corpus.training)
                )
                said = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _have(self, corpus: Corpus, shards: Sequence[Shard]) -> None:
        """All of them, and right; several at once."""
        await self._have_room(corpus, shards)
        self._there, self._total = 0, sum(corpus.size(shard) for shard in shards)
        having = [asyncio.create_task(self._have_shard(corpus, shard)) for shard in shards]
        try:
            await asyncio.gather(*having)
        finally:
            for task in having:
                task.cancel()

    async def _have_shard(self, corpus: Corpus, shard: Shard) -> None:
        await self._fetch(bytes.fromhex(shard.digest), corpus.size(shard))
        await asyncio.to_thread(check_shard, self._store, corpus, shard)
        self._checked.add(shard)
        self._there += corpus.size(shard)

    async def _have_room(self, corpus: Corpus, shards: Sequence[Shard]) -> None:
        """Not: fetch until the disk is full, on which the chain lies too."""
        while True:
            needed = sum(corpus.size(shard) for shard in shards if bytes.fromhex(shard.digest) not in self._store)
            free = shutil.disk_usage(self._store.folder).free
            if needed <= free:
                return
            why = f"the run's data need {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {self._store.folder}"
            self._say(why, "free some space, or use another --home")
            await asyncio.sleep(RETRY_SECONDS)

    async def _corpus(self) -> Corpus:
        digest = bytes.fromhex(self._manifest.data.digest)
        while True:
            await self._fetch(digest, limits.CORPUS_BYTES)
            if (corpus := await asyncio.to_thread(corpus_in, self._store, digest)) is not None:
                return corpus
            if await asyncio.to_thread(self._store.sound, digest):
                raise ConfigError(f"the run's data.digest {digest.hex()} names no corpus: its owner has to say another")

    async def _fetch(self, digest: bytes, most: int) -> None:
        while True:
            fetching = asyncio.create_task(self._exchange.fetch(digest, self._providers(), most))
            try:
                while not fetching.done():
                    held = self._there + self._exchange.statistics().held
                    progress = f": {held / 1e6:,.0f} of {self._total / 1e6:,.0f} MB" if self._total else ""
                    self._say(f"fetching the run's data{progress}")
                    await asyncio.wait({fetching}, timeout=LOOK_SECONDS)
                return await fetching
            except RemoteError as error:
                log.warning("the run's data are not to be had yet: %s", error)
                self._say(f"nobody serves the run's data yet ({error.detail}); trying again")
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                fetching.cancel()

    def _say(self, why: str, todo: str = "") -> None:
        """While workers cannot start without it; later they say that they wait, and the log says why."""
        if not self._begun:
            self._tell(Status("synchronising", why, todo))
        elif todo and why != self._warned:
            self._warned = why
            log.warning("%s: %s", why, todo)
