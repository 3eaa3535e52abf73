"""The accepted sockets of one listening port of this process: what the kernel counted on each, and how they are reset."""

import ctypes
import os
import resource
import socket
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dilocox.transport.limits.addresses import Endpoint, endpoint_of_socket

__all__ = ["NOTHING", "Received", "ServerSockets"]

TCP_INFO_BYTES = 136
_BYTES_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_BYTES_OFFSET = 120
"""Offset of tcpi_bytes_acked in struct tcp_info. Source: linux/tcp.h, since Linux 4.1."""
MOST_DESCRIPTORS = 1 << 16
"""Tried one by one where they cannot be listed."""


class Received(NamedTuple):
    """Bytes of a connection so far, as the kernel counts them; zeros where it counts none."""

    received: int
    acknowledged: int
    """Sent by us, and acknowledged by the remote end."""


NOTHING = Received(0, 0)


class _Connection(NamedTuple):
    endpoint: Endpoint
    name: bytes
    """The remote end as the kernel writes it (struct sockaddr)."""


class ServerSockets:
    """Sockets of a server, found through this process's descriptors, which gRPC and the event loop own."""

    def __init__(self, port: int, folder: str = "/proc/self/fd") -> None:
        self._port, self._folder = port, folder
        self._connections: dict[tuple[int, int], _Connection | None] = {}
        """Connections by descriptor and inode; None: another kind of descriptor."""
        self._descriptors: dict[Endpoint, int] = {}
        self._names: dict[Endpoint, bytes] = {}

    def read(self) -> Mapping[Endpoint, Received]:
        """Return what arrived on each connection. Blocking, for some microseconds each."""
        found: dict[Endpoint, Received] = {}
        descriptors: dict[Endpoint, int] = {}
        names: dict[Endpoint, bytes] = {}
        seen: dict[tuple[int, int], _Connection | None] = {}
        for descriptor in self._all_descriptors():
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                if key not in self._connections:
                    self._connections[key] = self._connection(descriptor)
                connection = seen[key] = self._connections[key]
                if connection is not None:
                    found[connection.endpoint] = _bytes_of(descriptor)
                    descriptors[connection.endpoint], names[connection.endpoint] = descriptor, connection.name
            except OSError:  # gRPC has closed it since
                continue
        self._connections, self._descriptors, self._names = seen, descriptors, names
        return found

    def _all_descriptors(self) -> Iterable[int]:
        try:
            return map(int, os.listdir(self._folder))
        except OSError:  # no descriptor is free for the listing, or the system has no such folder
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return range(MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MOST_DESCRIPTORS))

    def _connection(self, descriptor: int) -> _Connection | None:
        connection = socket.socket(fileno=descriptor)  # not a duplicate: no descriptor may be free
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return None
            if connection.getsockname()[1] != self._port:
                return None
            name = _remote_name(descriptor)
            return None if name is None else _Connection(endpoint_of_socket(connection.getpeername()), name)
        except OSError:  # the listening socket has no remote end
            return None
        finally:
            connection.detach()

    def reset(self, endpoints: Iterable[Endpoint]) -> None:
        """Reset connections, and drop received bytes that were not read: after a shutdown alone gRPC would read them all.
        A descriptor that has been reused since is left alone."""
        for endpoint in endpoints:
            descriptor = self._descriptors.get(endpoint)
            if descriptor is not None and _remote_name(descriptor) == self._names[endpoint]:
                _LIBC.connect(descriptor, _UNSPECIFIED, len(_UNSPECIFIED))


_LIBC = ctypes.PyDLL(None)
"""Called without releasing the interpreter lock: a flood continues until the last of its connections is reset."""
_UNSPECIFIED = struct.pack("=H14x", socket.AF_UNSPEC)
"""An address: a TCP socket that connects to it is disconnected. Source: connect(2)."""


def _remote_name(descriptor: int) -> bytes | None:
    """Return the remote end of a socket as the kernel writes it; None where there is none."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_uint(128)
    if _LIBC.getpeername(descriptor, name, ctypes.byref(size)) != 0:
        return None
    return name.raw[: size.value]


def _bytes_of(descriptor: int) -> Received:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    finally:
        connection.detach()
    if len(info) < _BYTES_OFFSET + _BYTES_ACKED_AND_RECEIVED.size:  # an older kernel
        return NOTHING
    acknowledged, received = _BYTES_ACKED_AND_RECEIVED.unpack_from(info, _BYTES_OFFSET)
    return Received(received, acknowledged)
