"""Serving blobs: each member of the roster by its own measure, all strangers together by a small one, nobody for ever."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import grpc
import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.blobs import BlobStore
from dilocox.transport.callers import Callers, address_of

__all__ = ["BlobService"]

GRACE_SECONDS = 10.0
"""A reader may pause for this beside the slowest rate."""
_CODES = {
    pb.REASON_UNAVAILABLE: grpc.StatusCode.NOT_FOUND,
    pb.REASON_BAD_SIGNATURE: grpc.StatusCode.UNAUTHENTICATED,
    pb.REASON_RATE: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class UploadLimit:
    """A token bucket over everything this peer serves; None: unlimited."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def spend(self, size: int) -> None:
        if self._rate is None:
            return
        now, seconds = time.monotonic(), size / self._rate
        self._free_at = max(self._free_at, now) + seconds
        try:
            await asyncio.sleep(self._free_at - now)
        except asyncio.CancelledError:
            self._free_at -= seconds  # it was not sent
            raise


class Turns:
    """So many streams at once for each caller, and in all; who comes then waits, at most `waiting` of them."""

    def __init__(self, each: int, total: float = math.inf, waiting: float = math.inf) -> None:
        self._each, self._most = each, total + waiting
        self._all = nullcontext() if math.isinf(total) else asyncio.Semaphore(int(total))
        self._own: dict[str, asyncio.Semaphore] = {}
        self._here: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Raises RemoteError when too many wait."""
        if self._here.total() >= self._most:
            raise RemoteError(pb.REASON_RATE, "too many strangers wait for their turn here")
        own = self._own.setdefault(caller, asyncio.Semaphore(self._each))
        self._here[caller] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._here[caller] -= 1
            if not self._here[caller]:
                del self._here[caller], self._own[caller]


class BlobService(rpc.PeerServicer):
    """Serves the blobs of one store."""

    def __init__(self, store: BlobStore, callers: Callers, bytes_per_second: float | None = None) -> None:
        self._store, self._callers = store, callers
        self.is_member: Callable[[str], bool] = lambda peer: False
        """Whether a peer is on the roster, as soon as the run is known here."""
        self._members = Turns(limits.STREAMS_PER_MEMBER)  # only its own streams keep a member waiting
        self._strangers = Turns(limits.STREAMS_PER_ADDRESS, limits.STREAMS_TO_STRANGERS, limits.STRANGERS_WAITING)
        self._limit = UploadLimit(bytes_per_second)
        self.bytes_sent = 0

    async def Fetch(self, request: services.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            caller = self._callers.peer(context)
            member = self.is_member(caller)
            turns = self._members if member else self._strangers
            async with turns.turn(caller if member else address_of(context)):
                await self._serve(request, context)
        except RemoteError as error:
            await context.abort(_CODES[error.reason], error.detail)
        except TimeoutError:
            slow = f"slower than {limits.TRANSFER_BYTES_PER_SECOND} bytes a second"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the caller takes {slow}")

    async def _serve(self, request: services.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Raises RemoteError when the blob is not here, TimeoutError when it is taken too slowly."""
        if len(request.digest) != 32 or not await asyncio.to_thread(self._store.sound, request.digest):
            raise RemoteError(pb.REASON_UNAVAILABLE, "this peer does not hold that blob")
        hashes = await asyncio.to_thread(self._store.index, request.digest)
        size = self._store.size(request.digest)
        await _write(context, services.FetchReply(index=services.BlobIndex(size=size, chunk_hashes=hashes)))
        with self._store.path(request.digest).open("rb") as file:
            file.seek(min(size, request.first_chunk * limits.CHUNK_BYTES))
            while data := await asyncio.to_thread(file.read, limits.FRAME_BYTES):
                await self._limit.spend(len(data))
                self.bytes_sent += len(data)
                await _write(context, services.FetchReply(data=data))


async def _write(context: grpc.aio.ServicerContext, reply: services.FetchReply) -> None:
    """Raises TimeoutError when the caller does not take it."""
    async with asyncio.timeout(GRACE_SECONDS + reply.ByteSize() / limits.TRANSFER_BYTES_PER_SECOND):
        await context.write(reply)
