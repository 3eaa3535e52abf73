"""HTTP/2 frames made by hand: what a client sends that follows no library's rules. Source: RFC 9113, RFC 7541."""

import socket
import ssl
import struct

__all__ = ["PREFACE", "call", "connect", "continuation", "open_headers"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""How a client begins: the magic, and a SETTINGS frame without settings."""
DATA, HEADERS, CONTINUATION = 0, 1, 9
END_STREAM, END_HEADERS = 1, 4
CONTINUATION_BYTES = 16_000
"""Bytes of one frame: a little less than the largest that every server accepts."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header field without indexing; both parts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(path: str, stream: int, message: bytes = b"") -> bytes:
    """Encode one whole gRPC call on a stream of its own."""
    return frame(HEADERS, END_HEADERS, stream, _fields(path)) + frame(
        DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message
    )


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
