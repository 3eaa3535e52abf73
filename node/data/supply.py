"""The run's corpus onto this machine, from peers: what is held out before the workers start, each shard before it is read."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence

from dilocox.node.data.verify import check_shard
from dilocox.node.exchange.downloader import Downloader
from dilocox.protocol import limits
from dilocox.protocol.consensus.data_leases import Span
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.member.node_status import Status
from dilocox.protocol.run.corpus import BYTES, Corpus, Order, Shard, check_fits, order_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in

__all__ = ["Supply"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
LOOK_SECONDS = 0.5
"""Interval of checks of a download, and of upcoming reads."""
LOOKS_UNTIL_DOUBT = 4
"""Workers wait for a moment while they read a shard for the first time."""


class Supply:
    def __init__(
        self,
        manifest: Manifest,
        store: BlobStore,
        downloader: Downloader,
        providers: Callable[[], list[str]],
        tell: Callable[[Status], None],
        named: bool = False,
    ) -> None:
        """Supply the data. `downloader`: fetches into `store`. `providers`: returns peers that may have the corpus now.
        `named`: the operator named the store's folder, so nothing is written there."""
        self._manifest, self._store, self._downloader = manifest, store, downloader
        self._providers, self._tell, self._named = providers, tell, named
        self._checked: set[Shard] = set()
        self._begun = self._warned = False
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

    async def follow(self, corpus: Corpus, reading: Callable[[], Sequence[Span]], waiting: Callable[[], bool]) -> None:
        """Have the shards of the positions that are read soon, before they are, and those that were: a worker may be some commits
        behind. `waiting`: whether the workers wait for one. Until cancelled; raises ConfigError where one is not what the corpus
        says."""
        order = order_of(self._manifest, corpus)
        wanted: dict[Shard, None] = {}
        having: dict[Shard, asyncio.Task[None]] = {}
        known: Sequence[Span] = ()
        waited = 0
        try:
            while True:
                if (spans := reading()) != known:
                    known, before = spans, len(wanted)
                    wanted.update(dict.fromkeys(await asyncio.to_thread(self._shards, corpus, order, spans)))
                    if len(wanted) > before:
                        log.info(
                            "the run's data: %d of %d shards are in use, soon or already", len(wanted), len(corpus.training)
                        )
                waited = waited + 1 if waiting() else 0
                if waited == LOOKS_UNTIL_DOUBT:
                    self._doubt(wanted)
                lacking = await asyncio.to_thread(self._lacking, list(wanted))
                for shard in await asyncio.to_thread(self._fitting, corpus, lacking):
                    if shard not in having:
                        having[shard] = asyncio.create_task(self._have_shard(corpus, shard))
                await asyncio.sleep(LOOK_SECONDS)
                for shard, task in list(having.items()):
                    if task.done():
                        having.pop(shard).result()
        finally:
            for task in having.values():
                task.cancel()

    @staticmethod
    def _shards(corpus: Corpus, order: Order, spans: Sequence[Span]) -> list[Shard]:
        """Return the shards in reading order. Blocking: an epoch of many shards takes a while."""
        return [corpus.training[number] for first, end in spans for number in order.shards(first, end)]

    def _lacking(self, shards: Sequence[Shard]) -> list[Shard]:
        """Blocking."""
        return [each for each in shards if each not in self._checked or bytes.fromhex(each.digest) not in self._store]

    def _doubt(self, shards: Iterable[Shard]) -> None:
        """Check shards again: workers wait although they seem to be here."""
        for shard in shards:
            self._store.doubt(bytes.fromhex(shard.digest))
            self._checked.discard(shard)

    async def _have(self, corpus: Corpus, shards: Sequence[Shard]) -> None:
        """All of them, and right; several at once."""
        while len(await asyncio.to_thread(self._fitting, corpus, shards)) < len(shards):
            await asyncio.sleep(RETRY_SECONDS)
        self._there, self._total = 0, sum(corpus.size(shard) for shard in shards)
        having = [asyncio.create_task(self._have_shard(corpus, shard)) for shard in shards]
        try:
            await asyncio.gather(*having)
        finally:
            for task in having:
                task.cancel()

    async def _have_shard(self, corpus: Corpus, shard: Shard) -> None:
        digest = bytes.fromhex(shard.digest)
        while shard not in self._checked or digest not in self._store:
            if not self._named:
                await self._fetch(digest, corpus.size(shard))
            elif not await asyncio.to_thread(self._store.sound, digest):
                raise ConfigError(f"shard {shard.digest} of the run's data in {self._store.folder} is missing or damaged")
            try:
                await asyncio.to_thread(check_shard, self._store, corpus, shard)
                self._checked.add(shard)
            except FileNotFoundError:
                continue  # set aside meanwhile
            except ConfigError:
                self._store.doubt(digest)
                if await asyncio.to_thread(self._store.sound, digest):
                    raise  # the corpus names it, so its maker is wrong
        self._there += corpus.size(shard)

    def _fitting(self, corpus: Corpus, shards: Sequence[Shard]) -> list[Shard]:
        """Return the first shards that fit on the disk, which also contains the chain. Blocking."""
        free = left = shutil.disk_usage(self._store.folder).free
        fitting: list[Shard] = []
        for shard in shards:
            left -= self._store.missing(bytes.fromhex(shard.digest), corpus.size(shard))
            if left < 0:
                why = (
                    f"the run's data need {-left / 1e6:,.0f} MB more than the {free / 1e6:,.0f} MB free in {self._store.folder}"
                )
                self._report_wait(why, "free some space, or use another --home")
                return fitting
            fitting.append(shard)
        self._warned = False
        return fitting

    async def _corpus(self) -> Corpus:
        digest = bytes.fromhex(self._manifest.data.digest)
        while True:
            await self._fetch(digest, limits.CORPUS_BYTES)
            if (corpus := await asyncio.to_thread(corpus_in, self._store, digest)) is not None:
                return corpus
            if await asyncio.to_thread(self._store.sound, digest):
                raise ConfigError(f"the run's data.digest {digest.hex()} is not a corpus: its owner has to name another")

    async def _fetch(self, digest: bytes, most: int) -> None:
        warn = log.warning  # once, however long no peer serves it
        while True:
            fetching = asyncio.create_task(self._downloader.fetch(digest, self._providers(), most))
            try:
                while not fetching.done():
                    held = self._there + self._downloader.statistics().held
                    progress = f": {held / 1e6:,.1f} of {self._total / 1e6:,.1f} MB" if self._total else ""
                    self._report_wait(f"fetching the run's data{progress}")
                    await asyncio.wait({fetching}, timeout=LOOK_SECONDS)
                return await fetching
            except RemoteError as error:
                warn("cannot fetch the run's data yet: %s", error)
                warn = log.debug
                self._report_wait(f"no peer serves the run's data yet ({error.detail}); retrying")
                await asyncio.sleep(RETRY_SECONDS)
            finally:
                fetching.cancel()

    def _report_wait(self, why: str, todo: str = "") -> None:
        """Report while workers cannot start without it; later they report their own waits, and the log has the reason."""
        if not self._begun:
            self._tell(Status("synchronising", why, todo))
        elif todo and not self._warned:
            self._warned = True
            log.warning("%s: %s", why, todo)
