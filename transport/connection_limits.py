"""Limits of the connections to one server: how many an address opens, what each sends, how many calls it makes.

The server's sockets belong to gRPC's own threads, which bound none of this. So the limits are applied from outside.
The kernel counts what arrived on each connection, and calls account for it. A connection beyond its limits is shut down.
"""

import asyncio
import ctypes
import logging
import os
import socket
import stat
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dilocox.protocol import limits
from dilocox.transport.token_bucket import TokenBucket

__all__ = ["ConnectionLimits", "ConnectionTable", "Endpoint", "Received", "ServerSockets", "endpoint_of", "endpoint_of_socket"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Between two looks at the sockets."""
SOON_SECONDS = 0.005
"""Between two looks while bytes arrive that no call accounts for: at 1 Gbit/s another 0.6 MiB."""
LOOK_SHARE = 0.1
"""Most of a core that looking may take; with thousands of connections the pauses grow."""
SOON_BYTES = 256 << 10
"""More than this unaccounted for, and the next look is soon."""
AGAIN_SECONDS = 1.0
"""Before sockets that could not be listed are listed again."""
TRIM_BYTES = 4 << 20
TRIM_CONNECTIONS = 16
"""Freed memory returns to the system once so much was received on connections that closed, or once so many closed."""
TRIM_SECONDS = 2.0
"""From the first close to the trim: those that close meanwhile are part of it."""
TCP_INFO_BYTES = 136
_BYTES_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_BYTES_OFFSET = 120
"""Of tcpi_bytes_acked in struct tcp_info. Source: linux/tcp.h, since Linux 4.1."""


class Endpoint(NamedTuple):
    """The remote end of a connection."""

    address: str
    port: int


class Received(NamedTuple):
    """Bytes of a connection so far, as the kernel counts them."""

    received: int
    acknowledged: int
    """Sent by us, and acknowledged by the remote end."""


def endpoint_of(peer: str) -> Endpoint | None:
    """Parse what gRPC calls a peer, such as `ipv4:192.0.2.1:40000`; None where it is no TCP address."""
    family, _, rest = peer.partition(":")
    address, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Endpoint(_plain(address.replace("%5B", "").replace("%5D", "").strip("[]")), int(port))


def endpoint_of_socket(peer: Sequence[Any]) -> Endpoint:
    """Convert what the socket module calls a peer's name."""
    return Endpoint(_plain(str(peer[0])), int(peer[1]))


def _plain(address: str) -> str:
    """Write an IPv4 address the same way, whichever family its socket has."""
    return address.removeprefix("::ffff:") if "." in address else address


@dataclass
class _Connection:
    number: int
    """Counts connections: a larger number is a newer one."""
    opened_at: float
    calls: TokenBucket
    refused: int = 0
    """Calls refused, less those that were not."""
    accounted: int = 0
    """Bytes that calls account for."""
    known: bool = False
    """Whether the newest call came from a known peer."""
    unaccounted: int = 0
    received: int = 0
    seen: bool = False
    """Whether the kernel listed it at least once."""


@dataclass
class ConnectionTable:
    """Decides which calls run and which connections are shut down. Does no I/O."""

    clock: Callable[[], float] = time.monotonic
    per_address: int = limits.CONNECTIONS_PER_ADDRESS
    """Most connections of unknown peers at one address."""
    fresh: int = limits.FRESH_CONNECTIONS
    """Connections of an address that begin at once with a full budget of calls."""
    fresh_per_second: float = limits.FRESH_CONNECTIONS_PER_SECOND
    _connections: dict[Endpoint, _Connection] = field(default_factory=dict)
    _addresses: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)
    """By address, how many connections may still begin with a full budget of calls."""
    _peers: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)
    """By known peer, how many calls it may make."""
    _count: int = 0

    def admit(self, endpoint: Endpoint, known_peer: str) -> float | None:
        """Return the seconds that a call waits before it runs; None: it is refused. `known_peer`: the caller's verified id where
        the run knows it, else empty."""
        now = self.clock()
        connection = self._connection(endpoint, now)
        connection.known = bool(known_peer)
        budget = self._peer_budget(known_peer, now) if known_peer else connection.calls
        if (seconds := budget.borrow(now, limits.CALLS_WAITING)) is None:
            connection.refused += 1
            return None
        connection.refused = max(0, connection.refused - 1)
        connection.accounted += limits.CALL_HEADER_BYTES
        return seconds

    def account(self, endpoint: Endpoint, size: int) -> None:
        """Account for a request's bytes, which a handler has now."""
        if (connection := self._connections.get(endpoint)) is not None:
            connection.accounted += size + size // 8  # frames and TLS records add less than an eighth

    def trust(self, endpoint: Endpoint) -> None:
        """Take a connection for a known peer's, whose first call here was just verified."""
        if (connection := self._connections.get(endpoint)) is not None:
            connection.known = True

    def is_excessive(self, endpoint: Endpoint) -> bool:
        """Return whether a connection goes on calling although its calls are refused."""
        connection = self._connections.get(endpoint)
        return connection is not None and connection.refused > limits.CALLS_REFUSED

    def observe(self, sockets: Mapping[Endpoint, Received]) -> list[Endpoint]:
        """Update from what the kernel counted, and return the connections to shut down."""
        now = self.clock()
        for endpoint, bytes_ in sockets.items():
            connection = self._connection(endpoint, now)
            connection.seen, connection.received = True, bytes_.received
            granted = int((now - connection.opened_at) * limits.UNACCOUNTED_BYTES_PER_SECOND) + bytes_.acknowledged // 8
            connection.unaccounted = max(0, bytes_.received - connection.accounted - granted)
        for endpoint in [e for e, c in self._connections.items() if e not in sockets and (c.seen or now - c.opened_at > 1.0)]:
            del self._connections[endpoint]
        return self._beyond()

    @property
    def unaccounted(self) -> int:
        """Bytes on connections of unknown peers that no call accounts for."""
        return sum(connection.unaccounted for connection in self._connections.values() if not connection.known)

    def _beyond(self) -> list[Endpoint]:
        found = {e for e, c in self._connections.items() if c.refused > limits.CALLS_REFUSED}
        found |= {e for e, c in self._connections.items() if c.unaccounted > _most_unaccounted(c)}
        unknown = sorted(((c.number, e) for e, c in self._connections.items() if not c.known and e not in found))
        by_address: Counter[str] = Counter()
        for place, (_, endpoint) in enumerate(unknown):
            by_address[endpoint.address] += 1
            if by_address[endpoint.address] > self.per_address or place >= limits.CONNECTIONS_OF_UNKNOWN:
                found.add(endpoint)
        heaviest = sorted((e for _, e in unknown if e not in found), key=lambda e: -self._connections[e].unaccounted)
        total = sum(self._connections[e].unaccounted for e in heaviest)
        if total > limits.UNACCOUNTED_BYTES_OF_UNKNOWN:
            for endpoint in heaviest:
                if total <= limits.UNACCOUNTED_BYTES_OF_UNKNOWN // 8:  # with less they would be over it again at the next look
                    break
                total -= self._connections[endpoint].unaccounted
                found.add(endpoint)
        return sorted(found)

    def _connection(self, endpoint: Endpoint, now: float) -> _Connection:
        if (connection := self._connections.get(endpoint)) is None:
            self._count += 1
            full = _bucket(self._addresses, endpoint.address, (self.fresh_per_second, self.fresh), now).take(now)
            calls = TokenBucket(limits.CALLS_PER_SECOND, limits.CALLS_BURST, now, None if full else 0.0)
            connection = self._connections[endpoint] = _Connection(self._count, now, calls)
        return connection

    def _peer_budget(self, peer: str, now: float) -> TokenBucket:
        return _bucket(self._peers, peer, (limits.CALLS_PER_SECOND_KNOWN, limits.CALLS_BURST_KNOWN), now)


def _most_unaccounted(connection: _Connection) -> int:
    if connection.known:
        return limits.UNACCOUNTED_BYTES_KNOWN
    return limits.UNACCOUNTED_BYTES if connection.accounted else limits.FIRST_CALL_BYTES


def _bucket(buckets: OrderedDict[str, TokenBucket], key: str, rate: tuple[float, float], now: float) -> TokenBucket:
    """Return the bucket of a key; of many, those used longest ago are forgotten."""
    bucket = buckets.setdefault(key, TokenBucket(*rate, now))
    buckets.move_to_end(key)
    if len(buckets) > limits.KNOWN_PEERS:
        buckets.popitem(last=False)
    return bucket


class ServerSockets:
    """The accepted sockets of one listening port of this process, found through /proc."""

    def __init__(self, port: int, folder: str = "/proc/self/fd") -> None:
        self._port, self._folder = port, folder
        self._endpoints: dict[tuple[int, int], Endpoint | None] = {}
        """By descriptor and inode; None: no connection to that port."""
        self._descriptors: dict[Endpoint, int] = {}

    def look(self) -> dict[Endpoint, Received]:
        """Return what arrived on each connection. Blocking, for some microseconds each."""
        found: dict[Endpoint, Received] = {}
        descriptors: dict[Endpoint, int] = {}
        seen: dict[tuple[int, int], Endpoint | None] = {}
        for descriptor in map(int, os.listdir(self._folder)):
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                if key not in self._endpoints:
                    self._endpoints[key] = self._endpoint(descriptor)
                endpoint = seen[key] = self._endpoints[key]
                if endpoint is not None:
                    found[endpoint] = _bytes_of(descriptor)
                    descriptors[endpoint] = descriptor
            except OSError:  # gRPC closed it meanwhile
                continue
        self._endpoints, self._descriptors = seen, descriptors
        return found

    def _endpoint(self, descriptor: int) -> Endpoint | None:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            if connection.getsockname()[1] != self._port:
                return None
            try:
                return endpoint_of_socket(connection.getpeername())
            except OSError:  # the listening socket has no remote end
                return None

    def shut(self, endpoints: Iterable[Endpoint]) -> None:
        """Reset connections, and drop what they received and nobody read: after a shutdown alone gRPC would read it all. A
        descriptor that means another connection by now is left alone."""
        for endpoint in endpoints:
            descriptor = self._descriptors.get(endpoint)
            if descriptor is not None and _remote_port(descriptor) == endpoint.port:
                _LIBC.connect(descriptor, _UNSPECIFIED, len(_UNSPECIFIED))


_LIBC = ctypes.PyDLL(None)
"""Called without giving the interpreter to another thread: a flood goes on until the last of its connections is reset."""
_UNSPECIFIED = struct.pack("=H14x", socket.AF_UNSPEC)
"""An address: a TCP socket that connects to it is disconnected. Source: connect(2)."""


def _remote_port(descriptor: int) -> int | None:
    """Return the remote port of a TCP connection; None for any other descriptor."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if _LIBC.getpeername(descriptor, name, ctypes.byref(size)) != 0:
        return None
    family, port = struct.unpack_from("=H", name.raw)[0], struct.unpack_from("!H", name.raw, 2)[0]
    return port if family in (socket.AF_INET, socket.AF_INET6) else None


def _bytes_of(descriptor: int) -> Received:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    finally:
        connection.detach()
    acknowledged, received = _BYTES_ACKED_AND_RECEIVED.unpack_from(info, _BYTES_OFFSET)
    return Received(received, acknowledged)


def trim_memory() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ConnectionLimits:
    """The table of one server, and the loop that applies it to the server's sockets."""

    def __init__(self, is_known: Callable[[str], bool] = lambda peer: False, table: ConnectionTable | None = None) -> None:
        """`is_known`: whether a verified caller takes part in the run."""
        self.is_known = is_known
        self.table = table or ConnectionTable()
        self.shut_down = 0
        """Connections that were beyond their limits."""
        self._open: dict[Endpoint, Received] = {}
        self._closed, self._closed_bytes = 0, 0
        """Connections that closed since the last trim, and what was received on them."""
        self._trim = asyncio.Event()

    async def watch(self, port: int) -> None:
        """Apply the limits to a port's connections, until cancelled."""
        trim = asyncio.create_task(self._trim_after_closes(), name="trim")
        try:
            await self._look_for_ever(ServerSockets(port))
        finally:
            trim.cancel()

    async def _look_for_ever(self, sockets: ServerSockets) -> None:
        while True:
            began = time.monotonic()
            try:
                here = sockets.look()
            except (OSError, struct.error) as error:  # no /proc, no descriptor free, or a kernel that counts no bytes
                log.debug("the sockets of this process cannot be listed: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            beyond = self.table.observe(here)
            if beyond:
                sockets.shut(beyond)
            self.shut_down += len(beyond)
            self._note_closed(here)
            pause = SOON_SECONDS if self.table.unaccounted > SOON_BYTES else LOOK_SECONDS
            await asyncio.sleep(max(pause, (time.monotonic() - began) / LOOK_SHARE))

    def _note_closed(self, here: dict[Endpoint, Received]) -> None:
        closed = self._open.keys() - here.keys()
        self._closed += len(closed)
        self._closed_bytes += sum(self._open[endpoint].received for endpoint in closed)
        self._open = here
        if self._closed >= TRIM_CONNECTIONS or self._closed_bytes >= TRIM_BYTES:
            self._trim.set()

    async def _trim_after_closes(self) -> None:
        while True:
            await self._trim.wait()
            await asyncio.sleep(TRIM_SECONDS)
            self._closed, self._closed_bytes = 0, 0
            self._trim.clear()
            await asyncio.to_thread(trim_memory)
