"""HTTP/2 frames made by hand: what a client sends that follows no library's rules. Source: RFC 9113, RFC 7541."""

import socket
import ssl
import struct
from collections import defaultdict

__all__ = ["PREFACE", "Windows", "call", "connect", "continuation", "headers", "open_headers", "part_of_message"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""Start of a client: the magic, and a SETTINGS frame without settings."""
DATA, HEADERS, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 4, 8, 9
INITIAL_WINDOW_SIZE = 4
FIRST_WINDOW = 65_535
END_STREAM, END_HEADERS = 1, 4
CONTINUATION_BYTES = 16_000
"""Bytes of one frame: a little less than the largest that every server accepts."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header field without indexing; both parts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(path: str, stream: int, message: bytes = b"") -> bytes:
    """Encode one whole gRPC call on a separate stream."""
    return frame(HEADERS, END_HEADERS, stream, _fields(path)) + frame(
        DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message
    )


def headers(path: str, stream: int) -> bytes:
    """Encode the whole headers of a call whose message follows."""
    return frame(HEADERS, END_HEADERS, stream, _fields(path))


def part_of_message(stream: int, size: int, first: bool, message_bytes: int) -> bytes:
    """Encode `size` bytes of a call's message. `first`: the first five bytes contain the whole message's size."""
    payload = b"\0" + struct.pack(">I", message_bytes) + bytes(size - 5) if first else bytes(size)
    return frame(DATA, 0, stream, payload)


class Windows:
    """Bytes that a server still takes, on a connection and on each of its streams."""

    def __init__(self) -> None:
        self.connection, self._initial, self._granted = FIRST_WINDOW, FIRST_WINDOW, defaultdict[int, int](int)
        self._unread = bytearray()

    def of(self, stream: int) -> int:
        return min(self.connection, self._initial + self._granted[stream])

    def spend(self, stream: int, size: int) -> None:
        self.connection -= size
        self._granted[stream] -= size

    def read(self, data: bytes) -> None:
        """Take what the server sent."""
        self._unread += data
        while len(self._unread) >= 9 and len(self._unread) >= 9 + (size := int.from_bytes(self._unread[:3])):
            kind, stream = self._unread[3], int.from_bytes(self._unread[5:9])
            self._take(kind, stream, bytes(self._unread[9 : 9 + size]))
            del self._unread[: 9 + size]

    def _take(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE and stream == 0:
            self.connection += int.from_bytes(payload)
        elif kind == WINDOW_UPDATE:
            self._granted[stream] += int.from_bytes(payload)
        elif kind == SETTINGS:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self._initial = value


def open_headers(path: str, stream: int) -> bytes:
    """Encode the headers of a call that continue in another frame."""
    return frame(HEADERS, 0, stream, _fields(path))


def continuation(stream: int) -> bytes:
    """Encode many small header fields that continue in another frame."""
    field = literal(b"x-field", b"v" * 100)
    return frame(CONTINUATION, 0, stream, field * (CONTINUATION_BYTES // len(field)))


def _fields(path: str) -> bytes:
    indexed = b"\x83\x87"  # :method POST, :scheme https
    fields = [
        (b":path", path.encode()),
        (b":authority", b"dilocox"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    return indexed + b"".join(literal(name, value) for name, value in fields)


def connect(address: str, source: str = "127.0.0.1", seconds: float = 30.0) -> ssl.SSLSocket:
    """Open a TLS connection to host:port from a local address, and send the preface. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=seconds, source_address=(source, 0))
    try:
        connection = context.wrap_socket(plain)
        connection.sendall(PREFACE)
    except OSError:
        plain.close()
        raise
    return connection
