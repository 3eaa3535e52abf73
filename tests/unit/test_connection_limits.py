"""Limits of connections: decided by a table without I/O, and applied to a real server's sockets."""

import asyncio
import contextlib
import itertools
import os
import resource
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from bench import http2
from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.limits import connection_limits, server_sockets
from dilocox.transport.limits.addresses import Endpoint, endpoint_of, endpoint_of_socket, network_of
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.connection_limits import ConnectionLimits, ConnectionTable
from dilocox.transport.limits.server_sockets import NOTHING, Received, ServerSockets
from dilocox.transport.net import tls
from dilocox.transport.net.rpc import ChannelPool, create_server
from tests.helpers import digest, identity

RUN_ID = digest("a run")
GET_RUN = "/dilocox.v1.Coordinator/GetRun"
PATIENCE_SECONDS = 60
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


def test_endpoint_of_a_link_local_address_is_the_same_by_grpc_and_by_the_socket():
    expected = Endpoint("fe80::1", 40_000)
    assert endpoint_of("ipv6:%5Bfe80::1%25eth0%5D:40000") == expected
    assert endpoint_of_socket(("fe80::1%eth0", 40_000, 0, 2)) == endpoint_of_socket(("fe80::1", 40_000, 0, 2)) == expected


def test_network_of_one_access_line_is_the_same_for_all_its_addresses():
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::7") != network_of("2001:db8:1:3::1")
    assert network_of("192.0.2.1") != network_of("192.0.2.2")


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


def test_admit_above_the_bound_forgets_the_known_peer_that_called_longest_ago(
    table: ConnectionTable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "KNOWN_PEERS", 2)
    for peer in ("first", "second", "first"):
        for _ in range(limits.CALLS_BURST_KNOWN):
            table.admit(HONEST, peer)
    assert table.admit(HONEST, "third") == 0.0
    assert table.admit(HONEST, "first") != 0.0
    assert table.admit(HONEST, "second") == 0.0, "its budget was deleted, and begins full"


def test_observe_bytes_before_the_first_call_shuts_the_connection_down(table: ConnectionTable):
    table.admit(HONEST, "")
    received = Received(limits.UNACCOUNTED_BYTES + limits.CALL_HEADER_BYTES, 0)
    assert table.observe({FLOOD: received, HONEST: received}) == [FLOOD]


def test_observe_message_under_way_is_no_excess(table: ConnectionTable):
    for endpoint in (FLOOD, HONEST):
        table.admit(endpoint, "")
        table.run(endpoint, 1)
    table.run(FLOOD, -1)
    received = Received(limits.MESSAGE_BYTES, 0)
    assert table.observe({FLOOD: received, HONEST: received}) == [FLOOD]


def test_observe_many_calls_under_way_shut_down_the_connections_with_the_most(table: ConnectionTable):
    crowd = [Endpoint("192.0.2.1", port) for port in range(10)]
    for endpoint in (*crowd, HONEST):
        table.admit(endpoint, "")
        table.run(endpoint, 100 if endpoint in crowd else 1)
    shut = table.observe(quiet(*crowd, HONEST))
    assert len(shut) == len(crowd) - limits.UNACCOUNTED_BYTES_OF_NETWORK // (100 * limits.CALL_HEADER_BYTES)
    assert HONEST not in shut


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


def test_observe_more_connections_than_a_network_may_have_shuts_one_down(table: ConnectionTable):
    ports = [Endpoint("192.0.2.1", port) for port in range(limits.CONNECTIONS_PER_ADDRESS)]
    assert table.observe(quiet(*ports)) == []
    newest, elsewhere = Endpoint("192.0.2.1", 9999), Endpoint("192.0.2.2", 9999)
    known = Endpoint("192.0.2.1", 9998)
    table.admit(known, "peer")
    assert table.observe(quiet(*ports, elsewhere, known, newest)) == [ports[0]]


def test_observe_idle_connections_keep_no_newcomer_out(table: ConnectionTable):
    """Connect a member behind the same router, which calls a little later."""
    idle = [Endpoint("192.0.2.1", port) for port in range(1, 1 + limits.CONNECTIONS_PER_ADDRESS)]
    for endpoint in idle[1:]:
        table.admit(endpoint, "")
    table.observe(quiet(*idle))
    for _ in range(20):
        for endpoint in idle[1:]:
            table.admit(endpoint, "")
        assert HONEST not in table.observe(quiet(*idle, HONEST))
    table.admit(HONEST, "peer")
    assert HONEST not in table.observe(quiet(*idle, HONEST))


def test_observe_new_connections_that_call_end_no_older_one(table: ConnectionTable):
    table.admit(HONEST, "")
    table.observe(quiet(HONEST))
    crowd = [Endpoint("192.0.2.1", port) for port in range(2 * limits.CONNECTIONS_PER_ADDRESS)]
    for endpoint in crowd:
        table.admit(endpoint, "")
    shut = table.observe(quiet(HONEST, *crowd))
    assert len(shut) == limits.CONNECTIONS_PER_ADDRESS + 1
    assert HONEST not in shut


def test_observe_late_calls_of_connections_that_were_reset_take_no_room(table: ConnectionTable):
    for port in range(2 * limits.CONNECTIONS_PER_ADDRESS):
        table.admit(Endpoint("192.0.2.1", port), "")
    newcomer = Endpoint("192.0.2.1", 9999)
    table.admit(newcomer, "")
    assert table.observe(quiet(newcomer)) == []


def test_observe_full_table_makes_room_from_the_network_with_the_most(table: ConnectionTable):
    lone = [Endpoint(f"198.51.100.{n}", 1) for n in range(40)]
    crowd = [Endpoint(f"203.0.{n}.1", port) for n in range(48) for port in range(1, 1 + limits.CONNECTIONS_PER_ADDRESS)]
    assert len(crowd) == limits.CONNECTIONS_OF_UNKNOWN
    shut = table.observe(quiet(*lone, *crowd))
    assert len(shut) == len(lone)
    assert not set(shut) & set(lone)
    assert max(Counter(endpoint.address for endpoint in shut).values()) == 1


def test_observe_full_table_of_lone_connections_shuts_the_oldest_silent_one_down(table: ConnectionTable, clock: Clock):
    """Fill the table with one connection from each of many networks, and add a newcomer whose address sorts first."""
    lone = [Endpoint(f"203.{n >> 8}.{n & 255}.1", 1) for n in range(limits.CONNECTIONS_OF_UNKNOWN)]
    table.admit(lone[0], "")
    assert table.observe(quiet(*lone)) == []
    newcomer = Endpoint("10.0.0.1", 1)
    assert table.observe(quiet(*lone, newcomer)) == [lone[1]]


def test_pause_follows_what_unknown_peers_hold(table: ConnectionTable):
    assert table.pause(0.0) == connection_limits.IDLE_SECONDS
    table.admit(HONEST, "peer")
    assert table.pause(0.0) == connection_limits.IDLE_SECONDS
    table.observe(quiet(HONEST, FLOOD))
    assert table.pause(0.0) == connection_limits.LOOK_SECONDS
    assert table.pause(0.005) == 0.005 / connection_limits.LOOK_SHARE, "looks take a small part of a core"
    assert table.pause(1.0) == connection_limits.LONGEST_SECONDS
    table.run(FLOOD, 100)
    assert table.pause(0.0) == connection_limits.LOOK_SECONDS, "calls that wait bring no bytes"
    table.observe({HONEST: Received(1000, 0), FLOOD: Received(2 * connection_limits.SOON_BYTES, 0)})
    assert table.pause(0.0) == connection_limits.SOON_SECONDS


def test_observe_one_ipv6_network_counts_as_one_address(table: ConnectionTable):
    crowd = [Endpoint(f"2001:db8::{n:x}", 1) for n in range(1000)]
    assert len(table.observe(quiet(*crowd))) == 1000 - limits.CONNECTIONS_PER_ADDRESS


def test_observe_connections_of_one_known_peer_are_bounded(table: ConnectionTable):
    many = [Endpoint("192.0.2.1", port) for port in range(1000)]
    for endpoint in many:
        table.admit(endpoint, "peer")
    assert len(table.observe(quiet(*many))) == 1000 - limits.CONNECTIONS_PER_ADDRESS


def test_observe_heavy_network_costs_another_network_no_upload(table: ConnectionTable):
    """Open many connections just below their limit, while an honest peer uploads its largest message."""
    heavy = {Endpoint("203.0.113.1", port): Received(limits.MESSAGE_BYTES, 0) for port in range(60)}
    upload = {HONEST: Received(limits.MESSAGE_BYTES, 0)}
    for endpoint in {**heavy, **upload}:
        table.admit(endpoint, "")
        table.run(endpoint, 1)
    shut = table.observe({**heavy, **upload})
    assert shut
    assert HONEST not in shut


def test_observe_joiners_behind_one_router_upload_their_evidence(table: ConnectionTable):
    joiners = {Endpoint("203.0.113.1", port): Received(limits.SUBMISSION_BYTES * 9 // 10, 0) for port in range(6)}
    for endpoint in joiners:
        table.admit(endpoint, "")
        table.run(endpoint, 1)
    assert table.observe(joiners) == []


def test_observe_replies_that_nobody_reads_shut_their_connections_down(table: ConnectionTable):
    table.admit(FLOOD, "")
    table.run(FLOOD, 1, limits.UNACCOUNTED_BYTES_OF_NETWORK)
    table.admit(HONEST, "")
    table.run(HONEST, 1, 1000)
    assert table.observe(quiet(FLOOD, HONEST)) == [FLOOD]
    table.run(HONEST, -1, -1000)
    assert table.observe(quiet(HONEST)) == []


def test_observe_newcomer_that_called_stays_where_others_are_idle(table: ConnectionTable, clock: Clock):
    idle = [Endpoint("192.0.2.1", port) for port in range(limits.CONNECTIONS_PER_ADDRESS)]
    for endpoint in idle:
        table.admit(endpoint, "")
    clock.now += 60
    table.admit(HONEST, "")
    (shut,) = table.observe(quiet(*idle, HONEST))
    assert shut in idle


def test_observe_calls_of_a_long_time_allow_no_burst(table: ConnectionTable, clock: Clock):
    received = 0
    for _ in range(10_000):
        clock.now += 1.0
        table.admit(HONEST, "")
        received += 500
        assert table.observe({HONEST: Received(received, received << 10)}) == []
    burst = limits.UNACCOUNTED_BYTES + limits.UNACCOUNTED_BYTES_AHEAD + 1024
    assert table.observe({HONEST: Received(received + burst, received << 10)}) == [HONEST]


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
    """Return the bytes sent before the server ended the connection; `most` or more if it did not."""
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
    """Yield a thousand calls a frame, as fast as the socket takes them."""
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
    """Check a new client: a server with a limit on streams resets those of a client that has not read its settings."""
    async with serving(tmp_path) as (address, certificate, _), calling(address, certificate) as stub:
        replies = await asyncio.gather(*(stub.GetRun(services.GetRunRequest()) for _ in range(limits.CALLS_BURST)))
        assert [reply.wall_ms for reply in replies] == [1] * limits.CALLS_BURST


async def test_push_of_a_known_peer_that_is_read_slowly_is_no_excess(tmp_path: Path):
    certificate, connections, peer = tls.load_or_create(tmp_path), ConnectionLimits(lambda peer: True), identity(1)
    callers = CallerAuth(RUN_ID, certificate.certificate_der, lambda peer: True)
    server, port = await create_server("127.0.0.1:0", certificate, callers=callers, connections=connections)
    sockets, begun, go_on, sent = ServerSockets(port), asyncio.Event(), asyncio.Event(), 0

    async def push(requests: AsyncIterator[services.PushRequest], context: object) -> pb.Envelope:
        async for _ in requests:
            begun.set()
            await go_on.wait()
        return pb.Envelope()

    async def parts() -> AsyncIterator[services.PushRequest]:
        nonlocal sent
        for _ in range(40):
            sent += limits.FRAME_BYTES
            yield services.PushRequest(data=bytes(limits.FRAME_BYTES))

    handler = grpc.stream_unary_rpc_method_handler(push, services.PushRequest.FromString, pb.Envelope.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("dilocox.v1.Peer", {"Push": handler}),))
    await server.start()
    pool = ChannelPool(peer, RUN_ID)
    record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)
    try:
        pushing = asyncio.ensure_future(rpc.PeerStub(pool.channel(record)).Push(parts()))
        await begun.wait()
        before = -1
        while before != (before := sent):  # as long as the window grows
            await asyncio.sleep(0.2)
            assert connections.table.observe(sockets.read()) == []
        go_on.set()
        await pushing
        assert connections.table.observe(sockets.read()) == []
        assert sent == 40 * limits.FRAME_BYTES > limits.UNACCOUNTED_BYTES_OF_CALLS
    finally:
        await pool.close()
        await server.stop(None)


def unread(path: str) -> Iterator[bytes]:
    """Yield calls of a client that reads no byte of a reply: its windows are empty."""
    yield http2.frame(http2.SETTINGS, 0, 0, struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, 0))
    yield from (http2.call(path, stream) for stream in range(1, 200, 2))


async def test_replies_that_nobody_reads_are_counted_until_the_connection_ends(tmp_path: Path):
    async with serving(tmp_path) as (address, _, connections), asyncio.timeout(PATIENCE_SECONDS):
        with await asyncio.to_thread(http2.connect, address) as connection:
            for frames in unread(GET_RUN):
                await asyncio.to_thread(connection.sendall, frames)
            here = endpoint_of_socket(connection.getsockname())
            while (held := connections.table.holds(here)) < 100 * limits.CALL_HEADER_BYTES:
                await asyncio.sleep(0.01)
        assert held > 100 * limits.CALL_HEADER_BYTES, "replies count, too"
        while connections.table.holds(here):
            await asyncio.sleep(0.01)


@pytest.fixture
def accepted() -> Iterator[tuple[int, socket.socket]]:
    """Yield the port of a listening socket, and the far end of a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as there, listening.accept()[0]:
            yield port, there


def test_sockets_are_found_and_reset_without_a_free_descriptor(accepted: tuple[int, socket.socket]):
    port, there = accepted
    sockets, expected = ServerSockets(port), endpoint_of_socket(there.getsockname())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert list(sockets.read()) == [expected]
        sockets.reset([expected])
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(ConnectionResetError):
        there.recv(1)


def test_sockets_of_a_kernel_that_counts_no_bytes_are_found(
    accepted: tuple[int, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_sockets, "TCP_INFO_BYTES", 104)
    port, there = accepted
    assert ServerSockets(port).read() == {endpoint_of_socket(there.getsockname()): NOTHING}
