"""Limits of connections: decided by a table without I/O, and applied to a real server's sockets."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from bench import http2
from dilocox.protocol import limits
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport import tls
from dilocox.transport.connection_limits import ConnectionLimits, ConnectionTable, Endpoint, Received, endpoint_of
from dilocox.transport.rpc import create_server

GET_RUN = "/dilocox.v1.Coordinator/GetRun"
MOST = 1 << 30
"""Bytes after which a flood counts as not cut short."""
FLOOD = Endpoint("192.0.2.1", 40_000)
HONEST = Endpoint("192.0.2.1", 40_001)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> ConnectionTable:
    return ConnectionTable(clock)


def quiet(*endpoints: Endpoint) -> dict[Endpoint, Received]:
    return dict.fromkeys(endpoints, Received(1000, 0))


def test_endpoint_of_grpc_peer_parses_both_families():
    assert endpoint_of("ipv4:192.0.2.1:40000") == Endpoint("192.0.2.1", 40_000)
    assert endpoint_of("ipv6:%5B2001:db8::1%5D:40000") == Endpoint("2001:db8::1", 40_000)
    assert endpoint_of("ipv6:[::ffff:192.0.2.1]:40000") == Endpoint("192.0.2.1", 40_000)
    assert endpoint_of("unix:/tmp/socket") is None


def test_admit_flood_on_one_connection_leaves_another_its_budget(table: ConnectionTable, clock: Clock):
    table.admit(HONEST, "")
    flood, honest = Counter[bool](), Counter[float | None]()
    for step in range(10_000):
        clock.now += 0.001
        flood[table.admit(FLOOD, "") is not None] += 1
        if step % 50 == 0:
            honest[table.admit(HONEST, "")] += 1
    assert honest.keys() == {0.0}
    assert flood[True] <= limits.CALLS_BURST + 10 * limits.CALLS_PER_SECOND + limits.CALLS_WAITING + 1
    assert table.observe(quiet(FLOOD, HONEST)) == [FLOOD]


def test_admit_reconnecting_flood_gets_less_and_less(table: ConnectionTable):
    at_once = sum(table.admit(Endpoint("192.0.2.1", port), "") == 0 for port in range(1000, 2000) for _ in range(300))
    assert at_once == limits.FRESH_CONNECTIONS * limits.CALLS_BURST


def test_admit_beyond_the_burst_waits_its_turn(table: ConnectionTable, clock: Clock):
    waits = [table.admit(HONEST, "") for _ in range(limits.CALLS_BURST + limits.CALLS_WAITING)]
    assert waits[: limits.CALLS_BURST] == [0.0] * limits.CALLS_BURST
    assert waits[-1] == pytest.approx(limits.CALLS_WAITING / limits.CALLS_PER_SECOND)
    assert table.admit(HONEST, "") is None
    clock.now += 1.0
    assert table.admit(HONEST, "") is not None


def test_admit_known_peer_has_its_own_budget_on_any_connection(table: ConnectionTable):
    for _ in range(1000):
        table.admit(FLOOD, "")
    assert {table.admit(FLOOD, "peer") for _ in range(limits.CALLS_BURST_KNOWN)} == {0.0}
    assert table.admit(HONEST, "peer") != 0.0, "on another connection it has the same budget"


def test_observe_bytes_before_the_first_call_shuts_the_connection_down(table: ConnectionTable):
    table.admit(HONEST, "")
    received = Received(limits.FIRST_CALL_BYTES + limits.CALL_HEADER_BYTES, 0)
    assert table.observe({FLOOD: received, HONEST: received}) == [FLOOD]


def test_observe_bytes_that_calls_account_for_are_no_excess(table: ConnectionTable):
    table.admit(HONEST, "")
    total = 0
    for _ in range(100):
        table.account(HONEST, limits.MIB)
        total += limits.MIB + limits.MIB // 16
        assert table.observe({HONEST: Received(total, 0)}) == []
    assert table.observe({HONEST: Received(total + 20 * limits.MIB, 0)}) == [HONEST]


def test_observe_acknowledgements_of_a_long_download_are_no_excess(table: ConnectionTable, clock: Clock):
    table.admit(HONEST, "")
    for minute in range(1, 100):
        clock.now += 60
        assert table.observe({HONEST: Received(minute << 20, minute << 30)}) == []


def test_observe_many_unknown_connections_shuts_the_heaviest_down(table: ConnectionTable):
    sockets = {Endpoint(f"192.0.2.{n}", 1): Received(n * 4096, 0) for n in range(1, 12)}
    many = {Endpoint(f"198.51.{n >> 8}.{n & 255}", 1): Received(60 << 10, 0) for n in range(200)}
    shut = table.observe({**sockets, **many})
    left = sum(bytes_.received for endpoint, bytes_ in {**sockets, **many}.items() if endpoint not in shut)
    assert set(shut) <= many.keys()
    assert left <= limits.UNACCOUNTED_BYTES_OF_UNKNOWN


def test_observe_more_connections_than_an_address_may_have_shuts_the_newest_down(table: ConnectionTable):
    ports = [Endpoint("192.0.2.1", port) for port in range(limits.CONNECTIONS_PER_ADDRESS)]
    assert table.observe(quiet(*ports)) == []
    newest, elsewhere = Endpoint("192.0.2.1", 9999), Endpoint("192.0.2.2", 9999)
    known = Endpoint("192.0.2.1", 9998)
    table.admit(known, "peer")
    assert table.observe(quiet(*ports, elsewhere, known, newest)) == [newest]


def test_observe_forgets_connections_that_closed(table: ConnectionTable, clock: Clock):
    while table.admit(FLOOD, "") is not None:
        pass
    table.observe(quiet(FLOOD))
    table.observe({})
    clock.now += 60
    assert table.admit(FLOOD, "") == 0.0  # another connection with the same port


# A real server


async def answer(request: services.GetRunRequest, context: object) -> services.Run:
    return services.Run(wall_ms=1)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, tls.Certificate, ConnectionLimits]]:
    certificate, connections = tls.load_or_create(folder), ConnectionLimits()
    server, port = await create_server("127.0.0.1:0", certificate, connections=connections)
    handler = grpc.unary_unary_rpc_method_handler(answer, services.GetRunRequest.FromString, services.Run.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("dilocox.v1.Coordinator", {"GetRun": handler}),))
    await server.start()
    watching = asyncio.create_task(connections.watch(port))
    try:
        yield f"127.0.0.1:{port}", certificate, connections
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await server.stop(None)


@asynccontextmanager
async def calling(address: str, certificate: tls.Certificate) -> AsyncIterator[rpc.CoordinatorStub]:
    credentials = grpc.ssl_channel_credentials(tls.pem_of(certificate.certificate_der))
    options = [("grpc.ssl_target_name_override", tls.SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        yield rpc.CoordinatorStub(channel)


def send_until_shut(address: str, frames: Iterator[bytes], most: int) -> int:
    """Return the bytes sent before the server ended the connection; `most` or more where it did not."""
    with http2.connect(address) as connection:
        sent = 0
        with contextlib.suppress(OSError):
            for frame in frames:
                connection.sendall(frame)
                sent += len(frame)
                if sent >= most:
                    break
        return sent


def endless_headers() -> Iterator[bytes]:
    yield http2.open_headers(GET_RUN, 1)
    yield from itertools.repeat(http2.continuation(1))


def endless_calls() -> Iterator[bytes]:
    """A thousand calls a frame, as fast as the socket takes them."""
    for first in itertools.count(1, 2000):
        yield b"".join(http2.call(GET_RUN, stream) for stream in range(first, first + 2000, 2))


async def test_headers_without_end_are_cut_short(tmp_path: Path):
    async with serving(tmp_path) as (address, certificate, connections):
        assert await asyncio.to_thread(send_until_shut, address, endless_headers(), MOST) < MOST
        assert connections.shut_down >= 1
        async with calling(address, certificate) as stub:
            assert (await stub.GetRun(services.GetRunRequest())).wall_ms == 1


async def test_flood_of_calls_is_cut_short_and_honest_calls_are_answered(tmp_path: Path):
    async with serving(tmp_path) as (address, certificate, connections), calling(address, certificate) as stub:
        await stub.GetRun(services.GetRunRequest())
        flood = asyncio.create_task(asyncio.to_thread(send_until_shut, address, endless_calls(), MOST))
        answered = 0
        while not flood.done() or not answered:
            assert (await stub.GetRun(services.GetRunRequest())).wall_ms == 1
            answered += 1
            await asyncio.sleep(1 / limits.CALLS_PER_SECOND)
        assert await flood < MOST
        assert connections.shut_down >= 1


async def test_largest_honest_burst_is_answered_whole(tmp_path: Path):
    """A server that limits streams resets those of a client that did not read its settings yet."""
    async with serving(tmp_path) as (address, certificate, _), calling(address, certificate) as stub:
        replies = await asyncio.gather(*(stub.GetRun(services.GetRunRequest()) for _ in range(limits.CALLS_BURST)))
        assert [reply.wall_ms for reply in replies] == [1] * limits.CALLS_BURST
