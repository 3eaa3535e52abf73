"""Disperser of 0G's data availability: it accepts a blob, nodes of its network sign for its parts, and a chain records
this."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as reasons
from dilocox_zerog.pb import disperser_pb2 as pb
from dilocox_zerog.pb import disperser_pb2_grpc as rpc

__all__ = ["BLOB_BYTES", "Disperser", "Place", "opened"]

T = TypeVar("T")

BLOB_BYTES = 31_744 << 10
"""Most in one."""
ANSWER_SECONDS = 120.0
"""Seconds that a blob of that size takes on a link of 2 Mbit/s."""
MESSAGE_BYTES = BLOB_BYTES + (1 << 16)
ENDED = {pb.FAILED: "it failed", pb.INSUFFICIENT_SIGNATURES: "too few nodes signed for it"}


class Place(NamedTuple):
    """Address of a blob."""

    root: bytes
    epoch: int
    quorum: int


class Disperser:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = rpc.DisperserStub(channel)

    async def disperse(self, data: bytes, wait: Callable[[], Awaitable[None]]) -> Place:
        """Send a blob and wait until it is final on the disperser's chain. `wait` is awaited before each check, and raises
        to end the wait. Raises RemoteError."""
        asked = await _answer(self._stub.DisperseBlob(pb.DisperseBlobRequest(data=data), timeout=ANSWER_SECONDS))
        status, info = asked.result, pb.BlobInfo()
        while status != pb.FINALIZED:
            if status in ENDED:
                raise RemoteError(reasons.REASON_UNAVAILABLE, f"the disperser gave up the blob: {ENDED[status]}")
            await wait()
            said = await _answer(
                self._stub.GetBlobStatus(pb.BlobStatusRequest(request_id=asked.request_id), timeout=ANSWER_SECONDS)
            )
            status, info = said.status, said.info
        header = info.blob_header
        if len(header.storage_root) != 32:
            raise RemoteError(reasons.REASON_MALFORMED, "the disperser reports the blob as final, but not its location")
        return Place(header.storage_root, header.epoch, header.quorum_id)

    async def retrieve(self, place: Place) -> bytes:
        """Return the blob that the disperser serves, unverified. Raises RemoteError."""
        request = pb.RetrieveBlobRequest(storage_root=place.root, epoch=place.epoch, quorum_id=place.quorum)
        return (await _answer(self._stub.RetrieveBlob(request, timeout=ANSWER_SECONDS))).data


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        detail = f"the disperser answered {error.code().name.lower()}: {error.details()}"[:300]
        raise RemoteError(reasons.REASON_UNAVAILABLE, detail) from error


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Disperser]:
    """Open `grpcs://HOST:PORT`, or `grpc://HOST:PORT` without TLS. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or not parts.netloc or parts.path.strip("/"):
        raise ConfigError(f"--da {url}: use grpcs://HOST:PORT, or grpc://HOST:PORT on a trusted network")
    options = [(f"grpc.max_{way}_message_length", MESSAGE_BYTES) for way in ("send", "receive")]
    secure = grpc.ssl_channel_credentials()
    plain = parts.scheme == "grpc"
    channel = (
        grpc.aio.insecure_channel(parts.netloc, options) if plain else grpc.aio.secure_channel(parts.netloc, secure, options)
    )
    async with channel:
        yield Disperser(channel)
