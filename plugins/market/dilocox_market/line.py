"""Measurement of a peer's bandwidth by another peer, over a stream between both.

    measuring peer   U, bytes, seed      measured peer   so many bytes, which follow from the seed: none was sent before it
    measuring peer   D, bytes, …, bytes  measured peer   their SHA-256, which only a receiver of all of them knows
    measuring peer   E, bytes, answer    end

Each direction begins with few bytes, and sends more until it takes long enough. Rates are the bytes that arrived over all seconds,
with first round trip and slow start: they are a lower bound of the bandwidth.
"""

import struct
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from secrets import token_bytes

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["DOWNLOAD", "FEWEST", "MOST", "TRANSFERS", "UPLOAD", "answer", "measure", "measured"]

FEWEST, MOST = 128 * limits.KIB, 8 * limits.MIB
"""Bytes one way at a time: four times as many until it takes long enough."""
LONG_SECONDS = 0.5
TRANSFERS = 16
"""Limit of transfers, above any real need."""
CHUNK = 64 * limits.KIB
_ORDER = struct.Struct(">cI32s")
UPLOAD, DOWNLOAD, END = b"U", b"D", b"E"


async def measure(reader: StreamReader, writer: StreamWriter) -> tuple[int, int]:
    """Measure the other end's upload and download, in bits a second. Raises RemoteError if it breaks the protocol,
    IncompleteReadError, OSError."""

    async def upload(size: int) -> None:
        seed = token_bytes(32)
        writer.write(_ORDER.pack(UPLOAD, size, seed))
        await writer.drain()
        for chunk in _stream(seed, size):
            if await reader.readexactly(len(chunk)) != chunk:
                raise RemoteError(pb.REASON_MALFORMED, "the answer does not match the request")

    async def download(size: int) -> None:
        writer.write(_ORDER.pack(DOWNLOAD, size, bytes(32)))
        digest = sha256()
        for chunk in _stream(token_bytes(32), size):
            digest.update(chunk)
            writer.write(chunk)
            await writer.drain()
        if await reader.readexactly(digest.digest_size) != digest.digest():
            raise RemoteError(pb.REASON_MALFORMED, "not all sent bytes arrived")

    return await _rate(upload), await _rate(download)


async def answer(writer: StreamWriter, data: bytes) -> None:
    """Write the measured peer's response: at most `limits.LINE_BYTES` and a signature."""
    writer.write(_ORDER.pack(END, len(data), bytes(32)) + data)
    await writer.drain()


async def measured(reader: StreamReader, writer: StreamWriter) -> bytes:
    """Let the other end measure this peer; return its answer. Raises RemoteError if it requests more than allowed,
    IncompleteReadError, OSError."""
    for _ in range(TRANSFERS):
        order, size, seed = _ORDER.unpack(await reader.readexactly(_ORDER.size))
        if size > (2 * limits.LINE_BYTES if order == END else MOST):
            break
        if order == END:
            return await reader.readexactly(size)
        if order == UPLOAD:
            for chunk in _stream(seed, size):
                writer.write(chunk)
                await writer.drain()
        else:
            digest = sha256()
            while size:
                chunk = await reader.readexactly(min(CHUNK, size))
                digest.update(chunk)
                size -= len(chunk)
            writer.write(digest.digest())
            await writer.drain()
    raise RemoteError(pb.REASON_MALFORMED, "the measuring peer asks for too much")


async def _rate(transfer: Callable[[int], Awaitable[None]]) -> int:
    """Return the bits a second."""
    size = FEWEST
    while True:
        began = time.monotonic()
        await transfer(size)
        seconds = time.monotonic() - began
        if seconds >= LONG_SECONDS or size >= MOST:
            return int(8 * size / seconds)
        size *= 4


def _stream(seed: bytes, size: int) -> Iterator[bytes]:
    """Yield bytes that no peer knows before the seed, and that take almost no time to make."""
    cipher = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    for start in range(0, size, CHUNK):
        yield cipher.update(bytes(min(CHUNK, size - start)))
