"""Many hostile connections to a coordinator and to a peer, in one process: idle, half open, slow, greedy, busy.

Each has its own loopback address (127.0.1.1 … 127.0.4.250), so limits of one address do not limit them here. gRPC's
connections pass through a relay that binds these addresses. A rejected connection opens again.
"""

import asyncio
import itertools
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import grpc
import grpc.aio

from bench.mutation import Mutator
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import seal
from dilocox.transport.limits.caller_auth import Credentials
from dilocox.transport.net import tls
from dilocox.transport.net.rpc import allow_open_files

__all__ = ["attack"]

AGAIN_SECONDS = 2.0
"""Before a connection that was ended, or a call that was refused, is made again."""
DRIP_SECONDS = 1.0
"""Seconds between two bytes of a slow request."""
TALK_PER_SECOND = 50
"""Junk calls of all talkers together."""
HANDSHAKE_SECONDS = 30.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""Start of an HTTP/2 client, then a frame header that promises more bytes than ever arrive."""
HELLO = bytes.fromhex("160301020001000 1fc0303".replace(" ", "")) + bytes(32)
"""The first 43 bytes of a TLS handshake."""


@dataclass
class Attack:
    run_id: bytes
    servers: list[pb.PeerRecord]
    """The coordinator's, then a peer's."""
    blob: bytes
    """Digest of a large blob that the peer has."""
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    """Outcomes of the attempts."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        self.tls.set_alpn_protocols(["h2"])
        self.sources = itertools.cycle([f"127.0.{net}.{host}" for net in range(1, 5) for host in range(1, 251)])
        self.relays: dict[str, socket.socket] = {}
        self.relaying: set[asyncio.Task[None]] = set()

    async def open_socket(
        self, record: pb.PeerRecord, encrypted: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = record.address.rpartition(":")
        return await asyncio.open_connection(
            host, int(port), local_addr=(next(self.sources), 0), ssl=self.tls if encrypted else None, limit=1 << 14
        )

    # On sockets

    async def idle(self, record: pb.PeerRecord) -> None:
        await self._hold(*await self.open_socket(record))

    async def half_open(self, record: pb.PeerRecord) -> None:
        reader, writer = await self.open_socket(record)
        writer.write(HELLO)
        await self._hold(reader, writer)

    async def slow(self, record: pb.PeerRecord) -> None:
        reader, writer = await self.open_socket(record, encrypted=True)
        writer.write(PREFACE)
        dripping = asyncio.create_task(self._drip(writer))
        try:
            await self._hold(reader, writer)
        finally:
            dripping.cancel()

    async def _drip(self, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            for byte in bytes((0, 64, 0, 1, 4, 0, 0, 0, 1)) + bytes(1 << 14):
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(DRIP_SECONDS)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 14):
                pass
        finally:
            writer.transport.abort()
        self.counts["connections ended by the server"] += 1

    # Through gRPC

    def relay(self, record: pb.PeerRecord) -> None:
        """Open a local port that leads to the server, from another address each time."""
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listening.setblocking(False)
        self.relays[record.address] = listening

        def let_in() -> None:
            with suppress(BlockingIOError, ConnectionAbortedError):
                while True:
                    connection, _ = listening.accept()
                    self.relaying.add(task := asyncio.create_task(self._relay(connection, record)))
                    task.add_done_callback(self.relaying.discard)
                    task.add_done_callback(lambda _, connection=connection: connection.close())  # type: ignore[misc]

        asyncio.get_running_loop().add_reader(listening, let_in)

    async def _relay(self, connection: socket.socket, record: pb.PeerRecord) -> None:
        ends: list[asyncio.StreamWriter] = []
        with suppress(OSError, asyncio.CancelledError):
            reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 14)
            ends.append(writer)
            there, back = await self.open_socket(record)
            ends.append(back)
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        for end in ends:
            end.transport.abort()

    def channel(self, record: pb.PeerRecord) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(tls.pem_of(record.certificate))
        options = [("grpc.ssl_target_name_override", tls.SERVER_NAME), ("grpc.use_local_subchannel_pool", 1)]
        port = self.relays[record.address].getsockname()[1]
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)

    def metadata(self, identity: Identity, record: pb.PeerRecord) -> tuple[tuple[str, bytes], ...]:
        return Credentials(identity, self.run_id, record.certificate).metadata

    def stranger(self) -> Identity:
        return Identity(self.random.randbytes(32))

    async def stream(self, record: pb.PeerRecord, known: bool) -> None:
        """Follow the coordinator, or ask a peer for a blob; read one message, and no more."""
        channel = self.channel(record)
        metadata = self.metadata(self.stranger(), record) if known else ()
        try:
            call: grpc.aio.UnaryStreamCall[Any, Any]
            if record is self.servers[0]:
                call = rpc.CoordinatorStub(channel).Watch(services.WatchRequest(from_round=0), metadata=metadata)
            else:
                call = rpc.PeerStub(channel).Fetch(services.FetchRequest(digest=self.blob), metadata=metadata)
            await call.read()
            while True:
                await asyncio.sleep(AGAIN_SECONDS)
                if call.done():
                    self.counts[f"streams: {(await call.code()).name}"] += 1
                    return
        except grpc.aio.AioRpcError as error:
            self.counts[f"streams: {error.code().name}"] += 1
        finally:
            await channel.close()

    async def talk(self, record: pb.PeerRecord, pause: float) -> None:
        """Send invalid calls, each from another peer."""
        channel, mutator = self.channel(record), Mutator(self.random.randrange(1 << 32))
        try:
            while True:
                await asyncio.sleep(pause * self.random.uniform(0.5, 1.5))
                identity = self.stranger()
                path, raw = self._junk(identity, mutator, record is self.servers[0])
                try:
                    method: Any = channel.unary_unary(path)
                    await method(raw, metadata=self.metadata(identity, record), timeout=HANDSHAKE_SECONDS)
                    self.counts["calls: OK"] += 1
                except grpc.aio.AioRpcError as error:
                    self.counts[f"calls: {error.code().name}"] += 1
        finally:
            await channel.close()

    def _junk(self, identity: Identity, mutator: Mutator, coordinator: bool) -> tuple[str, bytes]:
        if not coordinator:
            request = services.CommitRequest(round=mutator.random.randrange(100)).SerializeToString()
            return "/dilocox.v1.Peer/GetCommit", request
        claim = pb.Claim(serial=1, round=1, state=sha256(identity.key))
        body = claim.SerializeToString(deterministic=True)
        body = mutator.spoil(body, [body], pb.Claim)
        method = mutator.random.choice(("Submit", "Submit", "Submit", "GetRun", "GetPresence", "GetChallenge"))
        if method != "Submit":
            return f"/dilocox.v1.Coordinator/{method}", mutator.spoil(b"", [b""])
        return "/dilocox.v1.Coordinator/Submit", seal(identity, pb.KIND_CLAIM, self.run_id, body).envelope.SerializeToString()

    # All of them

    async def forever(self, act: Callable[[], Awaitable[None]], name: str) -> None:
        while True:
            self.counts[f"{name}, times"] += 1
            try:
                await act()
            except OSError:
                self.counts[f"{name}, refused"] += 1
            await asyncio.sleep(AGAIN_SECONDS * self.random.uniform(0.5, 1.5))

    async def start(self, connections: int) -> list[asyncio.Task[None]]:
        """Start a fifth of each kind: idle, half a handshake, slow, streams with a credential and without, calls. A third
        of them attack the peer."""
        for server in {server.address: server for server in self.servers}.values():
            self.relay(server)
        pause = connections / 5 / TALK_PER_SECOND
        acts: list[tuple[str, Callable[[pb.PeerRecord], Awaitable[None]]]] = [
            ("idle", self.idle),
            ("half a handshake", self.half_open),
            ("slow", self.slow),
            ("stream", lambda record: self.stream(record, self.random.random() < 0.5)),
            ("talk", lambda record: self.talk(record, pause)),
        ]
        tasks = []
        for number in range(connections):
            name, act = acts[number % len(acts)]
            record = self.servers[number // len(acts) % 3 == 2]
            tasks.append(asyncio.create_task(self.forever(lambda act=act, record=record: act(record), name)))  # type: ignore[misc]
        return tasks

    async def end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Leave, all of them."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self.relays.values():
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        relaying = list(self.relaying)
        for relayed in relaying:
            relayed.cancel()
        await asyncio.gather(*relaying, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 14):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def _attack(run_id: bytes, servers: list[bytes], blob: bytes, connections: int, seed: int, pipe: Connection) -> None:
    attack = Attack(run_id, [pb.PeerRecord.FromString(raw) for raw in servers], blob, seed)
    tasks = await attack.start(connections)
    await asyncio.sleep(AGAIN_SECONDS)  # by then each has come
    pipe.send(None)
    await asyncio.to_thread(pipe.recv)
    failed = [str(task.exception()) for task in tasks if task.done()]
    pipe.send({**attack.counts, **{f"ended by {why}": failed.count(why) for why in failed}})
    await asyncio.Event().wait()


def attack(run_id: bytes, servers: list[bytes], blob: bytes, connections: int, seed: int, pipe: Connection) -> None:
    """Attack in a child process, which reports when all connections are open. At the next message it reports their
    outcomes; then it waits for its kill."""
    allow_open_files(16 * connections)
    os.nice(5)  # the machine is small: the bench measures the servers, not the attacker
    asyncio.run(_attack(run_id, servers, blob, connections, seed, pipe))
