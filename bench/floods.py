"""Floods from one unknown address: calls on every method, repeated connections, headers without an end, HTTP requests.

An honest caller without a credential calls from the same address, over gRPC and HTTP. The bench measures the fate of
its calls.
"""

import asyncio
import itertools
import multiprocessing
import os
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil

from bench import http2
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.net import tls

__all__ = ["FLOODS", "Flood", "flood_rows", "missed_floods", "run_flood"]

LEAST_ANSWERED = 0.99
MOST_MEDIAN_SECONDS = 0.020
MOST_GROWTH_BYTES = 50 << 20
UNFINISHED_BYTES = 160 << 20
"""Bytes while an address has 6,400 calls in progress, its maximum: gRPC and Python take about 18 KiB for each."""
UNFINISHED_LEFT_BYTES = 100 << 20
"""Bytes left of these after `BACK_SECONDS`: fragments of the heap, which the next flood reuses."""
MOST_LEFT_BYTES = 20 << 20
"""Bytes above the daemon's memory before a flood, this many seconds after it."""
BACK_SECONDS = 10.0
CALLS_PER_SECOND = 3000
CONNECTIONS = 60
"""Connections that send headers without an end at once."""
CONNECTION_BYTES = 40 << 20
"""Bytes on each of them."""
STREAMS = 100
MESSAGE_BYTES = 4 << 20
PART_BYTES = 16_000
"""Bytes of a message in one frame: a little less than the largest that every server accepts."""
POLL_SECONDS = 0.001
"""Pause of the attacker while a socket takes nothing."""
PACE_SECONDS = 0.002
"""Pause of an attacker that limits its rate, or has written all that windows allow."""
RECONNECT_SECONDS = 1.0
"""Pause of the attacker after a connection was shut, unless the flood connects again at once."""
ASK_SECONDS = 0.05
"""Seconds between two calls of the honest caller."""


@dataclass(frozen=True)
class Flood:
    name: str
    kind: str
    """calls, headers, messages or http."""
    path: str = ""
    again: bool = False
    """Open a connection again as soon as one was shut."""
    growth: int = MOST_GROWTH_BYTES
    """Most bytes that a daemon may grow by."""
    left: int = MOST_LEFT_BYTES
    """Most bytes above those before the flood, `BACK_SECONDS` after it."""


METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in services.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
SUBMIT = "/dilocox.v1.Coordinator/Submit"
GET_RUN = "/dilocox.v1.Coordinator/GetRun"
FLOODS = [
    *(Flood(f"calls of {path.rpartition('.')[2]}", "calls", path) for path in METHODS),
    Flood("calls of a method that is not there", "calls", "/dilocox.v1.Nobody/Nothing"),
    Flood("calls, connected again", "calls", GET_RUN, again=True),
    Flood("headers without an end", "headers", GET_RUN),
    Flood("headers without an end after a call", "headers after a call", GET_RUN),
    Flood("headers without an end beside an open call", "headers beside a call", GET_RUN),
    Flood("messages without an end", "messages", SUBMIT, again=True, growth=UNFINISHED_BYTES, left=UNFINISHED_LEFT_BYTES),
    Flood("HTTP requests", "http"),
    Flood("HTTP requests, connected again", "http", again=True),
]


# The flood, in a separate process.


def _calls(path: str) -> Iterator[bytes]:
    for first in itertools.count(1, 200):
        yield b"".join(http2.call(path, stream) for stream in range(first, first + 200, 2))


def _send_calls(flood: Flood, address: str, ends: float) -> int:
    """Send calls at a steady rate; return how many."""
    sent = 0
    while time.monotonic() < ends:
        with suppress(OSError), http2.connect(address) as connection:
            connection.setblocking(False)
            began, here = time.monotonic(), 0
            for frames in _calls(flood.path):
                while (now := time.monotonic()) < ends and here > CALLS_PER_SECOND * (now - began):
                    time.sleep(PACE_SECONDS)
                    with suppress(BlockingIOError, OSError):
                        if connection.recv(1 << 18) == b"":
                            raise ConnectionResetError
                if now >= ends or not _send(connection, frames, ends):
                    break
                here, sent = here + 100, sent + 100
        if not flood.again:
            time.sleep(RECONNECT_SECONDS)
    return sent


def _send(connection: socket.socket, data: bytes, ends: float) -> bool:
    """Send all; return whether time was left. Raises OSError if the connection was shut."""
    while data:
        if time.monotonic() >= ends:
            return False
        try:
            data = data[connection.send(data) :]
        except (BlockingIOError, InterruptedError):
            time.sleep(POLL_SECONDS)
        except OSError as error:
            if "want" not in type(error).__name__.lower():  # TLS waits for the socket
                raise
            time.sleep(POLL_SECONDS)
    return True


def _send_headers(flood: Flood, address: str, ends: float) -> int:
    """Send headers without an end on many connections at once; return the MiB that were taken."""
    first = {
        "headers": b"",
        "headers after a call": http2.call(flood.path, 1),
        "headers beside a call": http2.headers(flood.path, 1),
    }[flood.kind]
    frame, sent = http2.continuation(3), 0
    connections = []
    for _ in range(CONNECTIONS):
        with suppress(OSError):
            connection = http2.connect(address)
            connection.sendall(first + http2.open_headers(flood.path, 3))
            connections.append(connection)
    left = CONNECTION_BYTES // len(frame)
    while connections and left and time.monotonic() < ends:
        left -= 1
        for connection in list(connections):
            try:
                connection.sendall(frame)
                sent += len(frame)
            except OSError:
                connections.remove(connection)
                connection.close()
    for connection in connections:
        connection.close()
    return sent >> 20


def _send_messages(flood: Flood, address: str, ends: float) -> int:
    """Begin a large message on every stream of many connections, and finish none; return the MiB that were taken."""
    streams, sent = range(1, 2 * STREAMS, 2), 0
    open_: dict[ssl.SSLSocket, tuple[http2.Windows, dict[int, int]]] = {}
    while time.monotonic() < ends:
        while len(open_) < CONNECTIONS:
            try:
                connection = http2.connect(address)
                connection.sendall(b"".join(http2.headers(flood.path, stream) for stream in streams))
                connection.setblocking(False)
            except OSError:
                break
            open_[connection] = http2.Windows(), dict.fromkeys(streams, 0)
        for connection, (windows, begun) in list(open_.items()):
            try:
                sent += _send_parts(connection, windows, begun, ends)
            except OSError:
                del open_[connection]
                connection.close()
        time.sleep(PACE_SECONDS)
    for connection in open_:
        connection.close()
    return sent >> 20


def _send_parts(connection: socket.socket, windows: http2.Windows, begun: dict[int, int], ends: float) -> int:
    """Send a part of each stream's message as far as the windows go; return the bytes. Raises OSError."""
    sent = 0
    try:
        if not (data := connection.recv(1 << 18)):
            raise ConnectionResetError
        windows.read(data)
    except OSError as error:
        if not isinstance(error, BlockingIOError) and "want" not in type(error).__name__.lower():
            raise
    for stream, size in begun.items():
        part = min(windows.of(stream), PART_BYTES, MESSAGE_BYTES - 1 - size)
        if part >= 5:
            _send(connection, http2.part_of_message(stream, part, not size, MESSAGE_BYTES), ends)
            windows.spend(stream, part)
            begun[stream] += part
            sent += part
    return sent


def _send_http(flood: Flood, address: str, ends: float) -> int:
    """Send HTTP requests one after the other without waiting for answers; return how many."""
    host, _, port = address.rpartition(":")
    request, sent = f"GET /v1/status HTTP/1.1\r\nHost: {address}\r\n\r\n".encode() * 50, 0
    while time.monotonic() < ends:
        with suppress(OSError), socket.create_connection((host, int(port))) as connection:
            connection.setblocking(False)
            while _send(connection, request, ends):
                sent += 50
                with suppress(BlockingIOError):
                    while connection.recv(1 << 18):
                        pass
        if not flood.again:
            time.sleep(RECONNECT_SECONDS)
    return sent


def _attack(flood: Flood, address: str, seconds: float, pipe: Connection) -> None:
    os.nice(5)  # the machine is small: the daemon is measured, not the attacker
    send: Callable[[Flood, str, float], int] = {"calls": _send_calls, "http": _send_http, "messages": _send_messages}.get(
        flood.kind, _send_headers
    )
    pipe.send(send(flood, address, time.monotonic() + seconds))


# The honest caller


@dataclass
class Asked:
    seconds: list[float] = field(default_factory=list)
    """Seconds of each answered call."""
    failed: int = 0

    async def one(self, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            await call()
            self.seconds.append(time.monotonic() - began)
        except (grpc.aio.AioRpcError, aiohttp.ClientError, OSError):
            self.failed += 1

    @property
    def answered(self) -> float:
        return len(self.seconds) / max(1, len(self.seconds) + self.failed)


async def run_flood(
    flood: Flood, address: str, certificate: bytes, api: str, process: psutil.Process, seconds: float
) -> dict[str, Any]:
    """Flood a daemon for some seconds, and return what became of honest calls and of its memory. `api`: URL of its HTTP API."""
    credentials = grpc.ssl_channel_credentials(tls.pem_of(certificate))
    options = [("grpc.ssl_target_name_override", tls.SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
    target = api.removeprefix("http://") if flood.kind == "http" else address
    calls, requests = Asked(), Asked()
    async with grpc.aio.secure_channel(address, credentials, options) as channel, aiohttp.ClientSession() as session:
        stub = rpc.CoordinatorStub(channel)

        async def call() -> None:
            await stub.GetRun(services.GetRunRequest(), timeout=5)

        async def request() -> None:
            async with session.get(f"{api}/v1/status", timeout=aiohttp.ClientTimeout(5)) as response:
                response.raise_for_status()
                await response.read()

        await call()
        await request()
        before, peak = process.memory_info().rss, 0
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=_attack, args=(flood, target, seconds, theirs), daemon=True)
        child.start()
        theirs.close()
        told = asyncio.create_task(asyncio.to_thread(ours.recv))
        try:
            while not told.done():
                await asyncio.gather(calls.one(call), requests.one(request))
                peak = max(peak, process.memory_info().rss)
                await asyncio.sleep(ASK_SECONDS)
            sent = told.result()
        finally:
            child.kill()
            child.join()
    ends = time.monotonic() + BACK_SECONDS
    while (left := process.memory_info().rss) > before + flood.left and time.monotonic() < ends:
        await asyncio.sleep(0.5)
    return {
        "flood": flood.name,
        "most_growth": flood.growth,
        "most_left": flood.left,
        "sent": sent,
        "calls": len(calls.seconds) + calls.failed,
        "calls_answered": calls.answered,
        "calls_median": statistics.median(calls.seconds or [float("inf")]),
        "requests_answered": requests.answered,
        "requests_median": statistics.median(requests.seconds or [float("inf")]),
        "growth": peak - before,
        "left": left - before,
    }


def flood_rows(floods: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            each["flood"],
            f"{each['sent']:,}",
            *(f"{100 * each[key]:.1f}%" for key in ("calls_answered", "requests_answered")),
            *(f"{1000 * each[key]:.1f}" for key in ("calls_median", "requests_median")),
            *(f"{each[key] >> 20}" for key in ("growth", "left")),
        ]
        for each in floods
    ]


def missed_floods(floods: list[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    found = []
    for each in floods:
        name = each["flood"]
        for what in ("calls", "requests"):
            if each[f"{what}_answered"] < LEAST_ANSWERED:
                found.append(f"{name}: {100 * each[f'{what}_answered']:.1f}% of honest {what} answered; at least 99%")
            if each[f"{what}_median"] > MOST_MEDIAN_SECONDS:
                found.append(f"{name}: honest {what} take {1000 * each[f'{what}_median']:.0f} ms in the median; at most 20")
        if each["growth"] > each["most_growth"]:
            found.append(f"{name}: {each['growth'] >> 20} MiB more; at most {each['most_growth'] >> 20}")
        if each["left"] > each["most_left"]:
            found.append(f"{name}: {each['left'] >> 20} MiB more {BACK_SECONDS:.0f} s later; at most {each['most_left'] >> 20}")
    return found
