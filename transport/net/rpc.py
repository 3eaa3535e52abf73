"""gRPC over pinned TLS: servers, channels, and fetching blobs in chunks with resume."""

import asyncio
import resource
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, BinaryIO, TypeVar, cast

import grpc
import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import PortError, RemoteError
from dilocox.protocol.ids import Way, printable
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.limits.caller_auth import CallerAuth, Credentials
from dilocox.transport.limits.connection_limits import ConnectionLimits
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.limits.request_filter import WellFormed
from dilocox.transport.limits.traffic import CountedChannel, Traffic
from dilocox.transport.net.tls import SERVER_NAME, Certificate, fetch_certificate, pem_of
from dilocox.transport.process.tasks import wait_out
from dilocox.transport.store.blobs import BlobStore, PartialBlob, blob_digest, chunk_count

__all__ = ["ChannelPool", "create_server", "fetch_blob", "fetch_chunk", "in_thread", "push_blob", "record_of"]

T = TypeVar("T")
Metadata = Iterable[tuple[str, str | bytes]] | None
Spend = Callable[[int], Awaitable[float]]
"""Waits until so many bytes may pass; the seconds that it took."""

LINK_HEADER = "dilocox-link"
"""Metadata of a refused call: the run's newest join link."""
CONNECT_SECONDS = 10.0
"""A TCP and TLS handshake across the world takes under two seconds; five times that is a dead address."""
STALL_SECONDS = 30.0
"""A blob stream that delivers nothing for so long is given up and resumed elsewhere."""
TLS_RECORD_BYTES = 4096
"""Size of a TLS record buffer of each connection: gRPC's 16 KiB would be a sixth of the memory of an idle unknown peer."""
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.so_reuseport", 0),
]


async def create_server(
    listen: str,
    certificate: Certificate,
    traffic: Traffic | None = None,
    callers: CallerAuth | None = None,
    connections: ConnectionLimits | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Return a server bound to `listen` (host:port, port 0 for any), not started; and its port. Raises PortError.

    `callers` distinguishes known from unknown peers. `connections`: the limits, which the caller applies with `watch`.
    """
    allow_open_files(2 * limits.CONNECTIONS)
    options = [
        *_OPTIONS,
        ("grpc.max_allowed_incoming_connections", limits.CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", 1000 * limits.HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", 1000 * limits.IDLE_SECONDS),
        ("grpc.max_concurrent_streams", limits.CALLS_AT_ONCE),
        ("grpc.tsi.max_frame_size", TLS_RECORD_BYTES),
    ]
    filter = WellFormed(traffic or Traffic(), callers, connections or ConnectionLimits())
    server = grpc.aio.server(options=options, interceptors=[filter])
    credentials = grpc.ssl_server_credentials([(certificate.key_pem, certificate.certificate_pem)])
    try:
        port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise PortError(f"cannot listen on {listen}: another program uses that port, or this user may not open it") from error
    return server, port


def allow_open_files(wanted: int) -> None:
    """Raise the soft limit of open files as far as the system permits: unknown peers' connections must not exhaust it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < granted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))


class ChannelPool:
    """One channel per (address, certificate): dialing trusts exactly the certificate in the peer's signed record. Others say where
    they are, and may say something else every time: of more than `limits.CHANNELS` those that were asked for longest ago are
    closed, but none with a call under way."""

    def __init__(
        self,
        identity: Identity | None = None,
        run_id: bytes = b"",
        heads: HeadGossip | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """`identity`: who calls; None: a spectator, who does not say."""
        self._identity, self._run_id, self.heads = identity, run_id, heads or HeadGossip()
        self.traffic = traffic or Traffic()
        self._channels: OrderedDict[tuple[str, bytes], CountedChannel] = OrderedDict()
        """Channels in the order of their last use."""
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, record: pb.PeerRecord) -> grpc.aio.Channel:
        """Return a channel for a call that begins now. Raises RemoteError if the record has no usable address."""
        key = (record.address, record.certificate)
        if key not in self._channels:
            channel = self._open(record)
            self._make_room()
            self._channels[key] = channel
        self._channels.move_to_end(key)
        return cast("grpc.aio.Channel", self._channels[key])

    def _open(self, record: pb.PeerRecord) -> CountedChannel:
        try:
            credentials = grpc.ssl_channel_credentials(pem_of(record.certificate))
        except ValueError as error:
            raise RemoteError(pb.REASON_MALFORMED, "its record contains no certificate") from error
        if self._identity is not None:
            caller = grpc.metadata_call_credentials(Credentials(self._identity, self._run_id, record.certificate, self.heads))
            credentials = grpc.composite_channel_credentials(credentials, caller)
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
        return CountedChannel(grpc.aio.secure_channel(record.address, credentials, options=options), self.traffic)

    def _make_room(self) -> None:
        """Close the least used channels, to make space for one more."""
        while len(self._channels) >= limits.CHANNELS:
            idle = next((key for key, channel in self._channels.items() if not channel.busy), None)
            if idle is None:
                return
            closing = asyncio.create_task(self._channels.pop(idle).close(), name=f"close {idle[0]}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await asyncio.gather(*self._closing)


async def record_of(way: Way) -> pb.PeerRecord:
    """Return the record of the peer at a link's address. Raises RemoteError if no peer, or another one, answers there."""
    certificate = await asyncio.to_thread(fetch_certificate, *way.endpoint, CONNECT_SECONDS)
    if sha256(certificate) != way.certificate:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, f"the server at {way.at} has another certificate than the link names")
    return pb.PeerRecord(address=way.at, certificate=certificate)


async def _free(size: int) -> float:
    return 0.0


async def fetch_blob(
    channel: grpc.aio.Channel,
    store: BlobStore,
    digest: bytes,
    max_size: int = limits.BLOB_BYTES,
    watch: Callable[[int, int], None] = lambda held, size: None,
    heard: Callable[[Metadata], None] = lambda metadata: None,
    spend: Spend = _free,
) -> int:
    """Download a blob into the store, resuming what is there; returns the bytes received. `watch(bytes held, size)` follows it,
    `heard` gets what came with the answer; `spend` holds us to our own limit.

    Raises RemoteError when the peer does not hold it, stalls, trickles or sends something else; what was right stays for the next
    attempt.
    """
    received = 0
    request = services.FetchRequest(digest=digest)
    stream = rpc.PeerStub(channel).Fetch(request, wait_for_ready=False)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            first = await anext(aiter(stream))
            heard(await stream.initial_metadata())
        if first.index.size > max_size:
            raise RemoteError(pb.REASON_OVERSIZE, f"{first.index.size} bytes; expected at most {max_size}")
        partial = await in_thread(PartialBlob, store, digest, first.index.size, list(first.index.chunk_hashes))
        if partial.next_chunk and not partial.complete:
            stream.cancel()
            request = services.FetchRequest(digest=digest, first_chunk=partial.next_chunk)
            stream = rpc.PeerStub(channel).Fetch(request)
            async with asyncio.timeout(CONNECT_SECONDS):
                await anext(aiter(stream))
        slowest = (partial.size - partial.held) / limits.TRANSFER_BYTES_PER_SECOND
        async with asyncio.timeout(STALL_SECONDS + slowest) as allowed:
            while not partial.complete:
                watch(partial.held, partial.size)
                async with asyncio.timeout(STALL_SECONDS):
                    reply = await anext(aiter(stream))
                received += len(reply.data)
                waited = await spend(len(reply.data))
                allowed.reschedule((allowed.when() or 0.0) + waited)  # that was not the peer's doing
                await in_thread(partial.feed, reply.data)
        watch(partial.held, partial.size)
        await in_thread(partial.finish)
    except grpc.aio.AioRpcError as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"the peer answered {error.code().name.lower()}") from error
    except (TimeoutError, StopAsyncIteration) as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, "the peer stopped sending") from error
    finally:
        stream.cancel()
    return received


async def fetch_chunk(channel: grpc.aio.Channel, digest: bytes, size: int, chunk: int) -> bytes:
    """Return one chunk of a blob of this size. Raises RemoteError if the peer does not have it, stalls, or sends something
    else."""
    stream = rpc.PeerStub(channel).Fetch(services.FetchRequest(digest=digest, first_chunk=chunk), wait_for_ready=False)
    wanted = min(limits.CHUNK_BYTES, size - chunk * limits.CHUNK_BYTES)
    data = bytearray()
    try:
        async with asyncio.timeout(CONNECT_SECONDS + STALL_SECONDS + wanted / limits.TRANSFER_BYTES_PER_SECOND):
            index = (await anext(aiter(stream))).index
            hashes = list(index.chunk_hashes)
            if index.size != size or len(hashes) != chunk_count(size) or blob_digest(size, hashes) != digest:
                raise RemoteError(pb.REASON_DIGEST_MISMATCH, "the chunk hashes do not match the digest")
            while len(data) < wanted:
                data += (await anext(aiter(stream))).data
    except grpc.aio.AioRpcError as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"the peer answered {error.code().name.lower()}") from error
    except (TimeoutError, StopAsyncIteration) as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, "the peer stopped sending") from error
    finally:
        stream.cancel()
    found = bytes(data[:wanted])
    if hashes and sha256(found) != hashes[chunk]:
        raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"chunk {chunk} does not match its hash")
    return found


async def push_blob(
    channel: grpc.aio.Channel, store: BlobStore, digest: bytes, spend: Callable[[int], Awaitable[object]]
) -> pb.Envelope:
    """Upload a blob to a peer that stores it; return the signed receipt. Raises RemoteError if the peer refuses or is too
    slow, and FileNotFoundError if the blob is not here any more."""
    size, hashes = store.size(digest), await asyncio.to_thread(store.index, digest)
    slowest = CONNECT_SECONDS + STALL_SECONDS + size / limits.TRANSFER_BYTES_PER_SECOND

    sent = 0

    async def parts(file: BinaryIO) -> AsyncIterator[services.PushRequest]:
        nonlocal sent
        index = services.BlobIndex(size=size, chunk_hashes=hashes)
        yield services.PushRequest(index=services.PushIndex(digest=digest, index=index))
        while data := await asyncio.to_thread(file.read, limits.FRAME_BYTES):
            await spend(len(data))
            sent += len(data)
            yield services.PushRequest(data=data)

    try:
        with store.path(digest).open("rb") as file:
            call = asyncio.ensure_future(rpc.PeerStub(channel).Push(parts(file), timeout=slowest))
            try:
                before = -1
                while not call.done():
                    if before == sent:
                        raise RemoteError(pb.REASON_UNAVAILABLE, "the peer stopped reading")
                    before = sent
                    await asyncio.wait({call}, timeout=STALL_SECONDS)
                return call.result()
            finally:
                call.cancel()
    except grpc.aio.AioRpcError as error:
        why = printable((error.details() or "")[: limits.TEXT_CHARACTERS])
        raise RemoteError(pb.REASON_UNAVAILABLE, f"the peer answered {error.code().name.lower()}: {why}") from error


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread, and wait for it, however often the caller is cancelled: no other task writes the file
    meanwhile."""
    running = asyncio.create_task(asyncio.to_thread(function, *arguments))
    await wait_out(running)
    return running.result()
