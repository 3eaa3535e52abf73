"""Blob server: serves blobs and commits, and stores uploads. Each member of the roster has its own limit; all unknown
peers share a small one; no stream lasts for ever."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.limits.addresses import address_of
from dilocox.transport.limits.caller_auth import CallerAuth, Context
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.limits.priority_semaphore import PrioritySemaphore
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.rpc import in_thread
from dilocox.transport.store.blobs import PUSHED, BlobStore, PartialBlob, blob_digest

__all__ = ["PeerService", "ServedRun", "send"]

GRACE_SECONDS = 10.0
"""A reader may pause for this beside the slowest rate."""
WAIT_SECONDS = 30.0
"""Longest wait for a turn."""
_CODES = {
    pb.REASON_UNAVAILABLE: grpc.StatusCode.NOT_FOUND,
    pb.REASON_RATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REASON_NOT_ADMITTED: grpc.StatusCode.PERMISSION_DENIED,
}


class StreamQuota:
    """Quota of streams, per caller and in total. Further requests wait, up to the same number per caller, and for a
    limited time.

    A caller's share of the streams is its share of the full reputation, at least one stream, and callers with more
    reputation go first: a hundred new identities delay no peer whose work has counted for long. As many may wait as for
    any caller.
    """

    def __init__(self, each: int, total: int, waiting: float = math.inf) -> None:
        """`waiting`: at most so many in all."""
        self._each, self._most = each, total + waiting
        self._all = PrioritySemaphore(total)
        self.own: dict[str, asyncio.Semaphore] = {}
        self.here: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, caller: str, earned: float = 1.0) -> AsyncIterator[None]:
        """`earned`: of what there is to earn. Raises RemoteError when too many wait, or it takes too long."""
        each = max(1, int(self._each * earned))
        if self.here.total() >= self._most or self.here[caller] >= 2 * self._each:
            raise RemoteError(pb.REASON_RATE, "too many calls wait here")
        own = self.own.setdefault(caller, asyncio.Semaphore(each))
        self.here[caller] += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WAIT_SECONDS):
                        await held.enter_async_context(own)
                        await held.enter_async_context(self._all.one(-earned))
                except TimeoutError as error:
                    raise RemoteError(pb.REASON_RATE, "the call waited too long") from error
                yield
        finally:
            self.here[caller] -= 1
            if not self.here[caller]:
                del self.here[caller], self.own[caller]


class Keeper(Protocol):
    """Decides what is stored for peers."""

    def admit(self, author: str, digest: bytes, size: int) -> None:
        """Raises RemoteError where it is not kept."""

    def acknowledge(self, digest: bytes) -> pb.Envelope: ...


class Served(Protocol):
    """Source of blobs beside the store: the run's data, imported weights, shards."""

    store: BlobStore

    def holds(self, digest: bytes) -> bool:
        """Whether a blob of that store is for others, here, and right. Blocking."""


def _nobody(peer: str) -> bool:
    return False


def _everybody(peer: str) -> bool:
    return True


def _no_commit(round: int) -> bytes | None:
    return None


def _no_share(blob: bytes) -> services.Share | None:
    return None


def _all(peer: str) -> float:
    return 1.0


@dataclass(frozen=True)
class ServedRun:
    """Stored parts of a run that peers may download. A daemon that starts replaces this as a whole with each step."""

    may_read: Callable[[str], bool] = _everybody
    """True where a peer may download what we store, also when it is not on the roster; empty: it does not say which peer it is."""
    is_member: Callable[[str], bool] = _nobody
    """True where a peer is on the roster."""
    earned: Callable[[str], float] = _all
    """Share of the full reputation of a member's cluster."""
    commit: Callable[[int], bytes | None] = _no_commit
    """The chain's commits. Blocking."""
    share: Callable[[bytes], services.Share | None] = _no_share
    """Our erasure shard of a blob. Blocking."""
    shelves: tuple[Served, ...] = ()
    """Further stores that are served; uploads never go there."""
    keeper: Keeper | None = None
    """Store for uploads of peers. None: this peer stores nothing for others."""


class Coming:
    """A blob that is being pushed here. Several peers may push it at once: each sends all of it, and who is first with a chunk
    adds it, so that nobody waits for one who is slow."""

    def __init__(self, store: BlobStore) -> None:
        self.pushes = 0
        self._store, self._lock = store, asyncio.Lock()
        self._partial: PartialBlob | None = None

    def begin(self) -> None:
        """One peer more pushes it."""
        self.pushes += 1

    def end(self) -> bool:
        """Return whether the last peer that pushed it is done."""
        self.pushes -= 1
        return not self.pushes

    async def add(self, what: services.PushIndex, chunk: bytes, at: int) -> bool:
        """A whole chunk, or nothing, from byte `at` on; whether the blob is complete now. Raises RemoteError where it is wrong."""
        async with self._lock:  # never over the network
            if what.digest in self._store:
                return True
            try:
                if self._partial is None:
                    hashes = list(what.index.chunk_hashes)
                    self._partial = await in_thread(PartialBlob, self._store, what.digest, what.index.size, hashes, PUSHED)
                if self._partial.held < at:
                    raise RemoteError(pb.REASON_UNAVAILABLE, "the bytes received so far were deleted in the meantime")
                await in_thread(self._partial.feed_from_start, chunk, at)
                if complete := self._partial.complete:
                    await in_thread(self._partial.finish)
                    self._partial = None
            except RemoteError as error:
                if error.reason == pb.REASON_UNAVAILABLE:
                    self._partial = None  # begin with what is there now
                raise
            return complete


class PeerService(rpc.PeerServicer):
    """Service for the blobs of one store, the run's data, and the chain; it stores what its keeper admits."""

    def __init__(
        self, store: BlobStore, callers: CallerAuth, traffic: Traffic | None = None, heads: HeadGossip | None = None
    ) -> None:
        self._store, self.callers, self._heads = store, callers, heads or HeadGossip()
        self.run = ServedRun()
        self._members = StreamQuota(limits.STREAMS_PER_MEMBER, limits.STREAMS_TO_MEMBERS)
        self._strangers = StreamQuota(limits.STREAMS_PER_ADDRESS, limits.STREAMS_TO_STRANGERS, limits.STRANGERS_WAITING)
        self.traffic = traffic or Traffic()
        """Its limits are of everything that comes and leaves, pushes too."""
        self._coming: dict[bytes, Coming] = {}

    def serve(self, run: ServedRun) -> None:
        """Serve this from now on: more of the run became known here."""
        self.run = run

    @property
    def coming(self) -> set[bytes]:
        """Return the blobs that are being uploaded now."""
        return set(self._coming)

    @property
    def bytes_sent(self) -> int:
        return self.traffic.upload.spent

    async def Fetch(self, request: services.FetchRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        async with self._turn(context):
            await self._serve(request, context)

    async def GetCommit(self, request: services.CommitRequest, context: Context) -> pb.Envelope:
        async with self._turn(context):
            raw = await asyncio.to_thread(self.run.commit, request.round)
            if raw is None:
                raise RemoteError(pb.REASON_UNAVAILABLE, "this peer does not have that commit")
            await self.traffic.upload.spend(len(raw))
            return pb.Envelope.FromString(raw)
        raise AssertionError  # what `_turn` catches ends the call

    async def GetShare(self, request: services.ShareRequest, context: Context) -> services.Share:
        async with self._turn(context):
            found = await asyncio.to_thread(self.run.share, request.blob) if len(request.blob) == 32 else None
            if found is None:
                raise RemoteError(pb.REASON_UNAVAILABLE, "this peer stores no erasure shard of that blob")
            await self.traffic.upload.spend(found.ByteSize())
            return found
        raise AssertionError  # what `_turn` catches ends the call

    async def Push(self, request_iterator: AsyncIterator[services.PushRequest], context: Context) -> pb.Envelope:
        async with self._turn(context) as caller:
            try:
                return await self._receive_push(caller, request_iterator)
            except (TimeoutError, StopAsyncIteration) as error:
                raise RemoteError(pb.REASON_UNAVAILABLE, "the upload stopped") from error
        raise AssertionError  # what `_turn` catches ends the call

    async def _receive_push(self, author: str, parts: AsyncIterator[services.PushRequest]) -> pb.Envelope:
        """Raises RemoteError where the blob is not kept, or is not what was announced."""
        async with asyncio.timeout(GRACE_SECONDS):
            what = (await anext(parts)).index
        if len(what.digest) != 32:
            raise RemoteError(pb.REASON_MALFORMED, "a digest has 32 bytes")
        if self.run.keeper is None or not author:
            raise RemoteError(pb.REASON_UNAVAILABLE, "this peer does not relay")
        self.run.keeper.admit(author, what.digest, what.index.size)
        if blob_digest(what.index.size, what.index.chunk_hashes) != what.digest:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the chunk hashes do not match the digest")
        coming = self._coming.setdefault(what.digest, Coming(self._store))
        coming.begin()
        try:
            if not await asyncio.to_thread(self._store.sound, what.digest):
                async with asyncio.timeout(GRACE_SECONDS + what.index.size / limits.TRANSFER_BYTES_PER_SECOND) as allowed:
                    await self._receive(coming, what, parts, allowed)
        finally:
            if coming.end():
                del self._coming[what.digest]
        return self.run.keeper.acknowledge(what.digest)

    async def _receive(
        self, coming: Coming, what: services.PushIndex, parts: AsyncIterator[services.PushRequest], allowed: asyncio.Timeout
    ) -> None:
        pending, sent, complete = bytearray(), 0, await coming.add(what, b"", 0)
        while not complete:
            async with asyncio.timeout(GRACE_SECONDS):
                data = (await anext(parts)).data
            if not data:
                raise RemoteError(pb.REASON_MALFORMED, "a part without bytes")
            allowed.reschedule((allowed.when() or 0.0) + await self.traffic.download.spend(len(data)))
            pending += data
            while not complete and len(pending) >= (size := min(limits.CHUNK_BYTES, what.index.size - sent)):
                complete = await coming.add(what, bytes(pending[:size]), sent)
                del pending[:size]
                sent += size

    @asynccontextmanager
    async def _turn(self, context: Context) -> AsyncIterator[str]:
        """The caller's turn, with heads exchanged; gives its peer id. Ends the call where there is none."""
        try:
            caller = self.callers.peer(context)
            member = self.run.is_member(caller)
            if not member and not self.run.may_read(caller):
                raise RemoteError(pb.REASON_NOT_ADMITTED, "this run is not public")
            mine = (
                self._members.turn(caller, self.run.earned(caller))
                if member
                else self._strangers.turn(address_of(context.peer()))
            )
            async with mine:
                if caller:
                    self._heads.take(caller, context.invocation_metadata())
                await context.send_initial_metadata(self._heads.metadata())
                yield caller
        except RemoteError as error:
            await context.abort(_CODES.get(error.reason, grpc.StatusCode.UNAUTHENTICATED), error.detail)

    def _store_with(self, digest: bytes) -> BlobStore:
        """Return the store that contains the blob. Blocking. Raises RemoteError if none does."""
        if len(digest) == 32:
            if self._store.sound(digest):
                return self._store
            for shelf in self.run.shelves:
                if shelf.holds(digest):
                    return shelf.store
        raise RemoteError(pb.REASON_UNAVAILABLE, "this peer does not have that blob")

    async def _serve(self, request: services.FetchRequest, context: Context) -> None:
        """Raises RemoteError when the blob is not here."""
        store = await asyncio.to_thread(self._store_with, request.digest)
        hashes = await asyncio.to_thread(store.index, request.digest)
        size = store.size(request.digest)
        await send(context, services.FetchReply(index=services.BlobIndex(size=size, chunk_hashes=hashes)))
        with store.path(request.digest).open("rb") as file:
            file.seek(min(size, request.first_chunk * limits.CHUNK_BYTES))
            while data := await asyncio.to_thread(file.read, limits.FRAME_BYTES):
                await self.traffic.upload.spend(len(data))
                await send(context, services.FetchReply(data=data))


async def send(context: Context, reply: Message) -> None:
    """The next message of a stream. A caller that does not take it loses the stream."""
    try:
        async with asyncio.timeout(GRACE_SECONDS + reply.ByteSize() / limits.TRANSFER_BYTES_PER_SECOND):
            await context.write(reply)
    except TimeoutError:
        # Not `abort`: its answer would wait behind what is not taken, and the call with it.
        raise asyncio.CancelledError("the caller stopped reading") from None
