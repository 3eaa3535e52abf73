"""RunReader of a run: its chain from the coordinator, its states and payloads from any provider. It takes no part.

A cluster's hosts have only parts of the model, and a join link alone has none: a reader fetches what is missing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.exchange.downloader import Downloader, Restores
from dilocox.node.exchange.forks import check_forks, follow_owner
from dilocox.node.exchange.shards import find_restorer
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.state.run_data import RunData, open_run_data
from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import NamedBy
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.corpus import BYTES
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import state_bytes
from dilocox.protocol.wire.messages import open_envelope
from dilocox.transport.archive.archive import Archive, open_archive
from dilocox.transport.archive.chain import archived_manifest, fill_chain, in_common, some_head
from dilocox.transport.archive.index import ArchiveHead
from dilocox.transport.archive.source import ArchivePlace, ArchiveSource
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import corpus_in
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.views import json_views

__all__ = ["RunReader", "open_archived", "open_reader"]

ATTEMPTS = 5
"""Tries of all peers, once the coordinator has sent their addresses."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class RunReader:
    manifest: Manifest
    chain: ChainFile
    data: RunData
    source: ArchiveSource | None = None
    """Source of older states than peers store."""
    restorer: Restores | None = None
    """Reconstruction of lost blobs, in a run with erasure shards."""

    @property
    def store(self) -> BlobStore:
        return self.data.downloader.store

    @property
    def starts(self) -> ResumePlanner:
        return self.data.starts

    def progress(self) -> tuple[int, int]:
        """Bytes that came, and of what is known to be wanted."""
        statistics = self.data.downloader.statistics()
        return statistics.bytes_received + statistics.held, statistics.bytes_received + statistics.wanted

    async def state(self, round: int | None = None) -> int:
        """Fetch all stages of the state that this round starts from, by default of the newest one served; return that
        round. Raises LocalError if that fails."""
        for attempt in range(ATTEMPTS):
            for number, root in (await self._agreed(round)).items():
                try:
                    await self._have_state(number, root)
                    return number
                except RemoteError as error:
                    why = error
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(RETRY_SECONDS)
        raise LocalError(f"no reachable peer serves {_of(round)}: {why.detail}. {self._advice}")

    @property
    def _advice(self) -> str:
        if self.source is not None:
            return "The archive does not have it either: check that `dilocox archive` runs there"
        return "Retry when more nodes of the run are live, or pass --archive URL to read its archive"

    async def check_archived(self) -> None:
        """Verify the whole chain in the archive: a copy from an earlier call proves nothing about the archive. Raises
        LocalError."""
        assert self.source is not None, "an archive is read"
        try:
            await self.source.check_commits(self.chain)
        except RemoteError as error:
            raise LocalError(f"the chain in the archive is not valid: {error}") from error

    async def frozen(self) -> None:
        """Fetch the weights under adapters, in a run on adapters. Raises LocalError if no peer serves them."""
        try:
            await self.starts.have_frozen(lambda text: None)
        except RemoteError as error:
            raise LocalError(
                f"no reachable peer serves the weights under the adapters: {error.detail}. {self._advice}"
            ) from error

    async def tokenizer(self) -> None:
        """Fetch the document of the run's data, and its tokenizer. Raises LocalError if no peer serves them."""
        document = bytes.fromhex(self.manifest.data.digest)
        try:
            await self.data.downloader.fetch(document, self.chain.parties, limits.CORPUS_BYTES)
            corpus = await asyncio.to_thread(corpus_in, self.store, document)
            if corpus is not None and corpus.tokenizer != BYTES:
                await self.data.downloader.fetch(bytes.fromhex(corpus.tokenizer), self.chain.parties, limits.TOKENIZER_BYTES)
        except RemoteError as error:
            raise LocalError(
                f"no reachable peer serves the tokenizer of the run's data: {error.detail}. Pass a copy with "
                f"--data {self.manifest.data.name}=DIR"
            ) from error

    async def _agreed(self, round: int | None) -> Mapping[int, bytes]:
        """Return state roots by round, in the order of the search."""
        if round is None:
            archived = await self.source.states() if self.source is not None else {}
            told = {number: root for number, root in archived.items() if self.chain.state_before(number) == root}
            found = dict(sorted({**told, **self.starts.agreed()}.items(), reverse=True))
        else:
            root = self.chain.state_before(round)
            found = {round: root} if root else {}
        if not found:
            says = f"the run has not agreed on {_of(round)}; its chain has {self.chain.length} commits"
            raise LocalError(says) if round is None else ConfigError(f"{says}: pass an earlier round")
        return found

    async def _have_state(self, round: int, root: bytes) -> None:
        """Raises RemoteError."""
        digests = await self.starts.stages_of(round, root)
        keepers = self.starts.keepers(round)
        sizes = [state_bytes(self.manifest.model, stage) for stage in range(len(digests))]
        fetches = (
            self.data.downloader.fetch(d, keepers, size, stage, NamedBy(round, state=True))
            for stage, (d, size) in enumerate(zip(digests, sizes, strict=True))
        )
        await asyncio.gather(*fetches)

    async def replayable(self, round: int) -> int:
        """Have what replaying a round takes: the state before it, its payloads, and the digests of the state after it; returns
        the round. Raises LocalError where that cannot be had."""
        before, after = (await self._agreed(round))[round], (await self._agreed(round + 1))[round + 1]
        commit = self.chain.commit(round)
        assert commit is not None
        try:
            await asyncio.gather(
                self._have_state(round, before), self.starts.stages_of(round + 1, after), self.data.applies.take(commit)
            )
        except RemoteError as error:
            detail = f"{error.detail}. Peers store the last rounds, and snapshots: pass a later round"
            raise LocalError(f"cannot replay round {round} from what peers serve: {detail}") from error
        return round


def _of(round: int | None) -> str:
    return "a state" if round is None else f"the state before round {round}"


class Nobody:
    """Peers of a run whose peers are all gone: none."""

    async def find(self, peer: str) -> pb.PeerRecord | None:
        return None

    async def look_up(self, peer: str) -> None:
        pass


@asynccontextmanager
async def open_archived(place: ArchivePlace, home: DataDirectory, say: Callable[[str], None]) -> AsyncIterator[RunReader]:
    """Open a reader of the archive alone, with its chain. Raises LocalError if it cannot be read."""
    say("reading the archive")
    try:
        archive = await asyncio.to_thread(open_archive, place.url, place.key)
        head = await asyncio.to_thread(some_head, archive)
        manifest = await asyncio.to_thread(archived_manifest, archive, head)
        path = home.run_folder(archive.run_id)
        chain = await asyncio.to_thread(ChainFile, path / "chain.db", manifest, json_views.describe)
    except RemoteError as error:
        raise LocalError(error.detail) from error
    channels = ChannelPool(home.identity, archive.run_id)
    try:
        try:
            say(f"checking the chain: {head.length} commits")
            await asyncio.to_thread(_follow_archive, archive, head, chain)
        except RemoteError as error:
            raise LocalError(f"the chain in the archive {archive.url} is not valid: {error}") from error
        check_forks(chain)
        source, store = ArchiveSource(place, archive.run_id), BlobStore(path / "blobs")
        downloader = Downloader(home.identity.peer, store, Nobody(), channels, archive=source)
        yield RunReader(manifest, chain, open_run_data(chain, downloader), source)
    finally:
        chain.close()
        await channels.close()


def _follow_archive(archive: Archive, head: ArchiveHead, chain: ChainFile) -> None:
    """Follow the archive's chain: the owner may have rejected commits that were read earlier. Blocking. Raises
    RemoteError."""
    ours = in_common(archive, head, chain)
    if ours.parted:
        chain.give_up_from(ours.commits)
    fill_chain(archive, head, chain)


@asynccontextmanager
async def open_reader(
    link: JoinLink, home: DataDirectory, say: Callable[[str], None], place: ArchivePlace | None = None
) -> AsyncIterator[RunReader]:
    """Open a reader that follows the coordinator's chain. `place`: an archive for what no peer serves. Raises LocalError
    if the coordinator does not serve the link's run, or not to this peer."""
    tasks, heads = Tasks(), HeadGossip()
    channels = ChannelPool(home.identity, link.run_id, heads)
    directory = PeerDirectory(None, home.identity, link.run_id, home.start_number())
    coordinator = CoordinatorLink(link, directory, channels)
    try:
        say("asking the coordinator for the run")
        manifest, appointment = await coordinator.run()
        if not manifest.may_read(home.identity.peer):
            raise LocalError("only admitted peers may read the run: pass --home with the folder of an admitted daemon")
        path = home.run_folder(link.run_id)
        chain = await asyncio.to_thread(ChainFile, path / "chain.db", manifest, json_views.describe)
        try:
            await follow_owner(chain, link.coordinator, appointment, coordinator.commit)
            check_forks(chain)
            read_up = asyncio.Event()
            tasks.start(_follow(coordinator, chain, directory, read_up, say), "follow")
            await tasks.race(read_up.wait())
            source = None if place is None else ArchiveSource(place, link.run_id)
            store, me = BlobStore(path / "blobs"), home.identity.peer
            restorer = await asyncio.to_thread(find_restorer, path, directory, channels, chain)
            downloader = Downloader(me, store, directory, channels, lambda: chain.head.roster, source, restorer)
            yield RunReader(manifest, chain, open_run_data(chain, downloader), source, restorer)
        finally:
            await tasks.close()
            chain.close()
    finally:
        await channels.close()


async def _follow(
    coordinator: CoordinatorLink, chain: ChainFile, directory: PeerDirectory, read_up: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Follow the chain, commit by commit, and its peers' addresses. Raises RemoteError for an invalid commit."""
    target = 0
    async for event in coordinator.watch(lambda: chain.length):
        if event.HasField("tip"):
            target = event.tip.round
        elif event.HasField("statement"):
            kind = event.statement.kind
            if kind == pb.KIND_PEER_RECORD:
                directory.learn(open_envelope(event.statement, chain.manifest.run_id, (kind,)))
            elif kind == pb.KIND_COMMIT:
                await asyncio.to_thread(chain.append, event.statement)
                say(f"checking the chain: commit {chain.length} of {max(target, chain.length)}")
        if chain.length >= target:
            directory.know(chain.parties)
            read_up.set()
