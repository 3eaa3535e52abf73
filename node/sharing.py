"""A peer's shares of what the chain's commits name: made while the blob is here, kept for later, and asked for when nobody has it.

Nobody sends a share unasked: each machine makes its own from the blob that it fetched to apply the commit.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from dilocox.node.exchange import Exchange, Finder
from dilocox.node.place import Place
from dilocox.node.starts import Starts
from dilocox.protocol import limits
from dilocox.protocol.chain import taken
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.head import Cluster, advance
from dilocox.protocol.ids import short
from dilocox.protocol.leaves import read_leaves
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.shares import Code, Held, Named, by_root, check_share, code_of, hosts, share_of, worth_keeping
from dilocox.transport import erasure
from dilocox.transport.blobs import BlobStore, digest_of
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.rpc import ChannelPool, fetch_blob, fetch_chunk, in_thread
from dilocox.transport.shares import ShareStore, make_share, share_bytes

__all__ = ["Answer", "Restorer", "Sharing", "ask_share", "named_by", "open_sharing"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often it is looked whether blobs are here of which shares are to be made."""
ASK_SECONDS = 10.0
ASKED_AT_ONCE = 16


def named_by(manifest: Manifest, commit: pb.Commit, store: BlobStore) -> Iterator[Named]:
    """What a commit names of which shares are kept, as far as the lists that say it are in the store. Blocking."""
    if commit.state and manifest.snapshot_round(commit.round) == commit.round:
        yield Named(commit.state, None, state=True)
        yield from (Named(digest, stage, True) for stage, digest in enumerate(store.stage_digests(commit.state)))
    for item in taken(commit):
        yield Named(item.contribution.leaves, None)
        try:
            leaves = read_leaves(manifest, store.read(item.contribution.leaves))
        except (FileNotFoundError, RemoteError):  # not here, or damaged
            continue
        yield from (Named(leaf.digest, leaf.stage) for leaf in leaves)


class Part(NamedTuple):
    """Ours in what a commit names."""

    held: Held
    code: Code
    ours: int
    """The index of our share."""


@dataclass
class Sharing:
    """What we keep for when others are gone."""

    manifest: Manifest
    chain: ChainFile
    store: BlobStore
    shares: ShareStore
    me: str
    oldest: Callable[[], int]
    """The first round whose blobs are kept whole: of older ones no share can be made."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await in_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Make shares of what is here and let go of those whose time is over. Blocking."""
        settings = self.manifest.availability
        assert settings is not None, "the run shares"
        kept = {Held(share.round, share.state, share_bytes(share), share.blob) for share in self.shares.shares()}
        named = {share.blob: share.round for share in self.shares.shares()}
        parts = {part.held.blob: part for part in self._parts(settings.needed, named)}
        head, most = self.chain.head.round, settings.megabytes * 1_000_000
        keep = worth_keeping(kept | {part.held for part in parts.values()}, head, settings.rounds, most)
        for held in kept:
            if held.blob not in keep:  # first: there is to be room
                self.shares.remove(held.blob)
        for blob in keep & parts.keys():
            self._make(parts[blob])

    def _parts(self, needed: float, kept: Mapping[bytes, int]) -> Iterator[Part]:
        """Not of what is kept for as late a round: states of several rounds may have a stage in common. `kept`: rounds by blob."""
        for round in range(max(1, self.oldest()), self.chain.head.round):
            commit = self.chain.commit(round)
            assert commit is not None
            roster = advance(self.manifest, commit).roster
            for named in named_by(self.manifest, commit.body, self.store):
                if kept.get(named.blob, 0) >= round:
                    continue
                peers = hosts(roster, named.stage)
                code = code_of(len(peers), needed)
                index = share_of(commit.digest, named.blob, peers, self.me, code) if code is not None else None
                if code is None or index is None:
                    continue
                try:
                    size = code.share_size(self.store.size(named.blob))
                except FileNotFoundError:  # not here, or its time was over this very moment
                    continue
                yield Part(Held(round, named.state, size, named.blob), code, index)

    def _make(self, part: Part) -> None:
        blob = part.held.blob
        if not self.store.sound(blob):
            return
        try:
            share = make_share(self.store, blob, part.code, part.ours, self.shares.store)
        except FileNotFoundError:  # its time was over meanwhile
            return
        share.round, share.state = part.held.round, part.held.state
        self.shares.add(share)


def open_sharing(
    place: Place, manifest: Manifest, chain: ChainFile, me: str, starts: Starts, exchange: Exchange
) -> Sharing | None:
    """Serve the shares that are here, and restore from shares what nobody serves; None where the run keeps none. Blocking. Raises
    ConfigError where none can be made here."""
    if manifest.availability is None:
        return None
    erasure.need_coder()
    shares = ShareStore(place.folder / "shares")
    place.blobs.shelves = (*place.blobs.shelves, shares)
    place.blobs.share = shares.get
    roster, directory = (lambda: chain.head.roster), place.network.directory
    exchange.shares = Restorer(place.folder / "restoring", directory, place.channels, roster, shares)
    return Sharing(manifest, chain, place.store, shares, me, starts.oldest_kept)


class Answer(NamedTuple):
    """A share that a peer says it keeps, and that proves itself."""

    peer: str
    share: services.Share


async def ask_share(
    directory: Finder, channels: ChannelPool, peer: str, blob: bytes, largest: int = limits.BLOB_BYTES
) -> services.Share:
    """What a peer says of its share. Raises RemoteError where it has none, or it proves nothing."""
    record = await directory.find(peer)
    if record is None or not record.address:
        raise RemoteError(pb.REASON_UNAVAILABLE, "nobody knows how to dial it")
    call = rpc.PeerStub(channels.channel(record)).GetShare(services.ShareRequest(blob=blob), timeout=ASK_SECONDS)
    try:
        share = await call
    except grpc.aio.AioRpcError as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"the peer answered {error.code().name.lower()}") from error
    check_share(share, blob, largest)
    return share


class Restorer:
    """Blobs that nobody serves any more, from shares."""

    def __init__(
        self,
        scratch: Path,
        directory: Finder,
        channels: ChannelPool,
        roster: Callable[[], Mapping[str, Cluster]],
        own: ShareStore | None = None,
    ) -> None:
        """`scratch`: a folder of ours, where shares lie until they are put together; `own`: what we keep ourselves."""
        self._scratch = BlobStore(scratch)
        self._scratch.sweep(self._scratch.digests() | self._scratch.partials())
        self._directory, self._channels, self._roster, self._own = directory, channels, roster, own

    async def answers(self, blob: bytes, largest: int = limits.BLOB_BYTES) -> list[Answer]:
        """Everybody's, ours first."""
        own = await asyncio.to_thread(self._own.get, blob) if self._own is not None else None
        peers = sorted({peer for cluster in self._roster().values() for peer in cluster.peers})
        ours = [Answer("", own)] if own is not None and own.size <= largest else []
        return ours + await self.ask(blob, peers, largest)

    async def ask(self, blob: bytes, peers: Iterable[str], largest: int = limits.BLOB_BYTES) -> list[Answer]:
        """What of these peers those say that have a share, and can be dialled."""
        turn = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(peer: str) -> Answer | None:
            async with turn:
                try:
                    return Answer(peer, await ask_share(self._directory, self._channels, peer, blob, largest))
                except RemoteError as error:
                    log.debug("%s has no share of %s: %s", short(peer), blob.hex()[:8], error)
                    return None

        found = await asyncio.gather(*(one(peer) for peer in peers))
        return [answer for answer in found if answer is not None]

    async def try_chunk(self, answer: Answer, draw: Callable[[int], int]) -> None:
        """Have a chunk of a share, the one that `draw` picks of so many; it is thrown away. Raises RemoteError."""
        size = share_bytes(answer.share)
        record = await self._directory.find(answer.peer)
        if record is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, "nobody knows how to dial it")
        if size:
            chunk = draw(-(-size // limits.CHUNK_BYTES))
            await fetch_chunk(self._channels.channel(record), answer.share.digest, size, chunk)

    async def fetch(self, digest: bytes, store: BlobStore, max_size: int) -> int:
        """Restore a blob into the store; the bytes received. Raises RemoteError where too few shares are to be had."""
        answers = await self.answers(digest, max_size)
        received, why = 0, "nobody answers with a share of it"
        for group in by_root(answers):
            code = Code(group[0][1].shares, group[0][1].needed)
            have, came = await self._gather(group, code)
            received += came
            try:
                if len(have) < code.needed:
                    why = f"{len(have)} of its shares were had, and {code.needed} restore it"
                elif await in_thread(self._restore, digest, group[0][1].size, code, have, store):
                    log.info("restored %s from %d of %d shares", digest.hex()[:8], code.needed, code.shares)
                    return received
                else:
                    why = "its shares are of something else"
            finally:
                for share in have.values():
                    await asyncio.to_thread(self._scratch.remove, share.digest)
        raise RemoteError(pb.REASON_UNAVAILABLE, why)

    async def _gather(self, group: Iterable[tuple[str, services.Share]], code: Code) -> tuple[dict[int, services.Share], int]:
        """So many different shares as restore, by index, and the bytes received."""
        have, received = dict[int, services.Share](), 0
        for peer, share in group:
            if len(have) == code.needed:
                break
            if share.index in have:
                continue
            try:
                received += await self._have(peer, share)
                have[share.index] = share
            except RemoteError as error:
                log.info("share %d of %s from %s: %s", share.index, share.blob.hex()[:8], short(peer), error)
        return have, received

    async def _have(self, peer: str, share: services.Share) -> int:
        if not peer:
            return 0
        record = await self._directory.find(peer)
        if record is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, "nobody knows how to dial it")
        spend = self._channels.traffic.download.spend
        channel = self._channels.channel(record)
        return await fetch_blob(channel, self._scratch, share.digest, share_bytes(share), spend=spend)

    def _restore(self, blob: bytes, size: int, code: Code, have: Mapping[int, services.Share], store: BlobStore) -> bool:
        """Whether they are of it: it is in the store then, and else nothing is. Blocking."""

        def parts(opened: ExitStack) -> Iterator[bytes]:
            files = {index: opened.enter_context(self._path(share).open("rb")) for index, share in have.items()}
            return erasure.restored(size, code, files)

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
