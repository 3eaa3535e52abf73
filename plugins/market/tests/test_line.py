"""Tests of the measurement of bandwidth: its result, and the gain of a hostile end."""

import asyncio
import contextlib
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import sha256

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.net.dht_child import get_dht_time
from dilocox_market import line
from dilocox_market.dht_child import LINES_AN_HOUR, LineMeter
from dilocox_market.listings import open_line
from tests.helpers import identity

Ends = tuple[tuple[StreamReader, StreamWriter], tuple[StreamReader, StreamWriter]]
ME, OTHER = identity(1), identity(2)


@contextlib.asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    both = await asyncio.open_connection(sock=ours), await asyncio.open_connection(sock=theirs)
    yield both
    for _, writer in both:
        writer.close()


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "MOST", 4 * line.FEWEST)


async def test_a_line_is_measured_both_ways_and_gets_its_answer(little: None):
    async with ends() as (mine, theirs):
        asked = asyncio.create_task(line.measured(*theirs))
        upload, download = await line.measure(*mine)
        assert min(upload, download) > 0
        await line.answer(mine[1], b"so fast")
        assert await asked == b"so fast"


ORDER = struct.Struct(">cI32s")


async def orders(reader: StreamReader, writer: StreamWriter) -> list[tuple[bytes, int]]:
    """Return the requests received, with answers that follow the protocol."""
    seen = list[tuple[bytes, int]]()
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            order, size, seed = ORDER.unpack(await reader.readexactly(ORDER.size))
            seen.append((order, size))
            if order == line.UPLOAD:
                writer.write(Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(size)))
            else:
                writer.write(sha256(await reader.readexactly(size)).digest())
    return seen


@pytest.mark.parametrize(("long", "transfers"), [(0.0, 1), (1e9, 4)])
async def test_more_is_sent_until_it_takes_long_enough_or_is_enough(
    long: float, transfers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(line, "LONG_SECONDS", long)
    async with ends() as (mine, theirs):
        answering = asyncio.create_task(orders(*theirs))
        await line.measure(*mine)
        mine[1].close()
        sizes = [line.FEWEST * 4**n for n in range(transfers)]
        assert await answering == [(order, size) for order in (line.UPLOAD, line.DOWNLOAD) for size in sizes]
        assert sizes[-1] <= line.MOST


async def cheat_upload(reader: StreamReader, writer: StreamWriter) -> None:
    """Send before the request names the bytes."""
    writer.write(bytes(line.FEWEST))
    await reader.read()


async def cheat_download(reader: StreamReader, writer: StreamWriter) -> None:
    """Answer that all bytes arrived before they did."""
    while True:
        order, size, seed = ORDER.unpack(await reader.readexactly(ORDER.size))
        if order == line.DOWNLOAD:
            writer.write(bytes(32))
            await reader.read()
            return
        writer.write(Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(size)))


@pytest.mark.parametrize("cheat", [cheat_upload, cheat_download])
async def test_who_sends_too_early_is_not_measured(cheat: Callable[..., Awaitable[None]], little: None):
    async with ends() as (mine, theirs):
        cheating = asyncio.ensure_future(cheat(*theirs))
        with pytest.raises(RemoteError):
            await line.measure(*mine)
        mine[1].close()
        await asyncio.wait([cheating])


@pytest.mark.parametrize(
    "asked",
    [
        [ORDER.pack(b"U", line.MOST + 1, bytes(32))],
        [ORDER.pack(b"D", 2**32 - 1, bytes(32))],
        [ORDER.pack(b"E", 2 * limits.LINE_BYTES + 1, bytes(32))],
        [ORDER.pack(b"U", 1, bytes(32))] * (line.TRANSFERS + 1),
    ],
)
async def test_who_measures_gets_no_more_than_a_measurement_takes(asked: list[bytes]):
    async with ends() as (mine, theirs):
        mine[1].write(b"".join(asked))
        with pytest.raises(RemoteError, match=r"^malformed: .*asks"):
            await line.measured(*theirs)


async def ask(meter: LineMeter, peer: str) -> bytes | None:
    async with ends() as (mine, theirs):
        serving = asyncio.create_task(meter.serve(peer, *mine))
        try:
            return await line.measured(*theirs)
        except asyncio.IncompleteReadError:
            return None
        finally:
            await serving


async def test_a_measurement_is_signed_and_each_gets_one(little: None):
    meter = LineMeter(OTHER)
    said = await ask(meter, ME.peer)
    assert said is not None
    found = open_line(pb.Envelope.FromString(said), ME.peer, get_dht_time())
    assert found.peer == OTHER.peer
    assert found.body.upload_bits > 0
    assert found.body.download_bits > 0
    assert await ask(meter, ME.peer) is None, "not so soon again"
    others = [identity(number).peer for number in range(10, 10 + LINES_AN_HOUR)]
    assert [await ask(meter, other) is not None for other in others] == [True] * (LINES_AN_HOUR - 1) + [False]


async def test_one_line_is_measured_at_a_time(little: None):
    meter = LineMeter(OTHER)
    async with ends() as (mine, _):
        hanging = asyncio.create_task(meter.serve(identity(3).peer, *mine))
        await asyncio.sleep(0)
        assert await ask(meter, ME.peer) is None
        hanging.cancel()
        await asyncio.wait([hanging])
    assert await ask(meter, ME.peer) is not None, "it was refused, not measured"
