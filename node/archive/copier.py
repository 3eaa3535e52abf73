"""Blobs from the run's peers into its archive, one after the other through this disk."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import holders, taken
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import imported_bytes, state_bytes
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.archive.archive import Archive
from dilocox.transport.archive.source import stoppable
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in

__all__ = ["BlobCopier"]


class BlobCopier:
    def __init__(
        self,
        manifest: Manifest,
        starts: ResumePlanner,
        downloader: Downloader,
        applies: ApplyBuilder,
        data: BlobStore,
        supplies: Downloader | None,
    ) -> None:
        """`supplies` downloads the run's data into `data`; None: the operator's folder contains them, for us to read only."""
        self._manifest, self._starts, self._store = manifest, starts, downloader.store
        self._downloader, self._applies = downloader, applies
        self._data, self._supplies = data, supplies
        self.pinned: set[bytes] = set()
        """Blobs that stay in `store` until they are archived."""
        self._archive: Archive | None = None
        """Archive, once it is open."""

    def carry_into(self, archive: Archive) -> None:
        """Write into this archive from now on."""
        self._archive = archive

    @contextmanager
    def _pinned(self, digest: bytes) -> Iterator[None]:
        self.pinned.add(digest)
        try:
            yield
        finally:
            self.pinned.discard(digest)

    async def _carry(self, store: BlobStore, digest: bytes, fetch: Callable[[], Awaitable[None]] | None = None) -> None:
        """Have a blob in the archive; `fetch` has it in `store`, None: it is there. Raises RemoteError."""
        assert self._archive is not None, "nothing is archived before"
        if await asyncio.to_thread(self._archive.__contains__, digest):
            return
        if fetch is not None:
            await fetch()
        try:
            size = store.size(digest)
            await self._downloader.traffic.upload.spend(size)
            await stoppable(self._archive.put, store, digest)
            self._downloader.traffic.bytes["sent", "archive"] += size
        except FileNotFoundError as error:
            raise RemoteError(pb.REASON_UNAVAILABLE, "it was deleted while it was being archived") from error

    async def root(self, round: int, root: bytes) -> list[bytes]:
        """Copy and return the list of an agreed state's stages. Raises RemoteError if no peer serves it."""
        with self._pinned(root):
            digests = await self._starts.stages_of(round, root)
            await self._carry(self._store, root)
        return digests

    async def stages(self, round: int, digests: Sequence[bytes]) -> None:
        """Copy the stages of a state. Raises RemoteError if no peer serves one."""
        keepers = self._starts.keepers(round)
        for stage, digest in enumerate(digests):
            model = self._manifest.model
            size = state_bytes(model, stage) if round else max(imported_bytes(model, stage))
            with self._pinned(digest):
                await self._carry(self._store, digest, partial(self._downloader.fetch, digest, keepers, size, stage))

    async def payloads(self, commit: Statement[pb.Commit]) -> None:
        """Copy the counted payloads, and the list of the state on which they build: enough to replay the round before, and
        to verify it. Raises RemoteError if no peer serves one."""
        keepers = holders(commit.body)
        if commit.body.state:
            await self.root(commit.body.round, commit.body.state)
        for item in taken(commit.body):
            providers = keepers[item.cluster]
            with self._pinned(item.contribution.leaves):
                for leaf in await self._applies.payload_index(item.contribution, providers):
                    fetch = partial(self._downloader.fetch, leaf.digest, providers, leaf.size, leaf.stage)
                    with self._pinned(leaf.digest):
                        await self._carry(self._store, leaf.digest, fetch)
                await self._carry(self._store, item.contribution.leaves)

    async def data(self, providers: Sequence[str]) -> None:
        """The run's data, their tokenizer among them; what was fetched for it goes. Raises RemoteError."""
        document = bytes.fromhex(self._manifest.data.digest)
        await self._have_data(document, providers, limits.CORPUS_BYTES)
        corpus = await asyncio.to_thread(corpus_in, self._data, document)
        if corpus is None:
            raise RemoteError(pb.REASON_MALFORMED, "the digest that the run names as its data is not a corpus")
        for blob, size in corpus.blobs:
            fetch = partial(self._have_data, blob, providers, size or limits.TOKENIZER_BYTES)
            lay_here = await asyncio.to_thread(self._data.sound, blob)
            await self._carry(self._data, blob, fetch)
            if self._supplies is not None and not lay_here:
                await asyncio.to_thread(self._data.remove, blob)
        await self._carry(self._data, document)

    async def _have_data(self, digest: bytes, providers: Iterable[str], most: int) -> None:
        if self._supplies is not None:
            await self._supplies.fetch(digest, providers, most)
        elif not await asyncio.to_thread(self._data.sound, digest):
            raise RemoteError(pb.REASON_UNAVAILABLE, f"{digest.hex()[:16]}… is missing or damaged in {self._data.folder}")
