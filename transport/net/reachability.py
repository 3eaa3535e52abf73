"""Reachability: peers connect back to this peer and report the result. An unreachable peer has no address in its record."""

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc.aio

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import host_port, printable
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.limits.addresses import endpoint_of, endpoint_of_socket, network_of
from dilocox.transport.limits.caller_auth import CallerAuth, Context
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.net.rpc import ChannelPool

__all__ = ["ReachService", "Reachability"]

log = logging.getLogger(__name__)

DIAL_SECONDS = 5.0
"""A TLS handshake across the world takes under two."""
ASK_SECONDS = 2 * DIAL_SECONDS
ASKED = 3
"""So many others are asked: one that reaches us decides, for it a router lets in."""
AGAIN_SECONDS = 300.0
"""Routers restart, and addresses change."""
SOON_SECONDS = 5.0
"""Interval of requests before the first answer."""


_RESOLVERS = ThreadPoolExecutor(2, "resolve")
"""Threads for names from unknown peers: a lookup may take long, and must not block the threads that write files."""


class ReachService(rpc.ReachServicer):
    """Service that connects back to a caller, only at its own address: no caller can scan other networks with it."""

    def __init__(self, run_id: bytes, callers: CallerAuth, heads: HeadGossip) -> None:
        self._run_id, self._callers, self._heads = run_id, callers, heads
        self._dialling: set[str] = set()

    async def DialBack(self, request: services.DialBackRequest, context: Context) -> services.DialBackReply:
        caller = endpoint_of(context.peer())
        here = "" if caller is None else caller.address
        at = network_of(here)
        try:
            record = open_envelope(request.record, self._run_id, (pb.KIND_PEER_RECORD,))
            if record.peer != self._callers.peer(context):
                raise RemoteError(pb.REASON_BAD_SIGNATURE, "a peer may ask about itself only")
            self._heads.take(record.peer, context.invocation_metadata())
            if at in self._dialling or len(self._dialling) >= limits.DIALS_AT_ONCE:
                raise RemoteError(pb.REASON_RATE, "other peers are being checked")
        except RemoteError as error:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if error.reason == pb.REASON_RATE else grpc.StatusCode.UNAUTHENTICATED
            await context.abort(code, error.detail)
        self._dialling.add(at)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await dial(record.body, here)
        except (RemoteError, TimeoutError) as error:
            why = error.detail if isinstance(error, RemoteError) else f"{record.body.address} does not answer"
            return services.DialBackReply(why=why)
        finally:
            self._dialling.discard(at)
        return services.DialBackReply(reachable=True)


async def dial(record: pb.PeerRecord, caller: str) -> None:
    """Raise RemoteError unless the record's certificate answers at its address, and that is the caller's. `caller`: an IP
    address, empty where the caller has none."""
    host, _, port = record.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if int(port) not in range(1, 1 << 16):  # the resolver takes it modulo that, and who dials then does not
            raise ValueError("no port")
        resolve = partial(socket.getaddrinfo, host, int(port), type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, resolve)
    except (OSError, ValueError) as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"{record.address} is not an address") from error
    if not caller or caller not in {endpoint_of_socket(place[4]).address for place in found}:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"its calls come from {caller}, but its record names {host}")
    if await presented(caller, int(port)) != record.certificate:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"another server answers at {record.address}")


async def presented(host: str, port: int) -> bytes:
    """The certificate of a TLS server, DER. Raises RemoteError where none answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is compared, not believed
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except OSError as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"no TLS server answers at {host_port(host, port)}") from error
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return bytes(certificate or b"")


class Reachability:
    """Reports of peers about this peer's address."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        """Collect reports. `changed`: called when the result changes."""
        self._changed = changed
        self.reachable: bool | None = None
        """Result of the reports. None: no peer has reported yet."""
        self.why = ""

    async def watch(
        self, channels: ChannelPool, others: Callable[[], list[pb.PeerRecord]], record: Callable[[], Statement[pb.PeerRecord]]
    ) -> None:
        """Ask `others` now and again; for ever. `record`: with the address that we believe to have."""
        while True:
            before = self.reachable
            await self.ask(channels, others(), record())
            if self.reachable is not before:
                log.info("%s", self.sentence)
                self._changed()
            await asyncio.sleep(SOON_SECONDS if self.reachable is None else AGAIN_SECONDS)

    @property
    def sentence(self) -> str:
        if self.reachable is None:
            return "no peer has tried to reach this peer yet"
        return "reachable: other peers can open a connection" if self.reachable else f"not reachable: {self.why}"

    async def ask(self, channels: ChannelPool, others: list[pb.PeerRecord], record: Statement[pb.PeerRecord]) -> None:
        """Ask some peers. One that reaches this peer decides; otherwise the reports do. A peer that does not answer does
        not count."""
        there = [other for other in others if other.address and other.address != record.body.address]
        answers = []
        for other in [*there[:1], *random.sample(there[1:], min(ASKED, len(there)) - 1 if there else 0)]:
            try:
                stub = rpc.ReachStub(channels.channel(other))
                reply = await stub.DialBack(services.DialBackRequest(record=record.envelope), timeout=ASK_SECONDS)
            except (RemoteError, grpc.aio.AioRpcError):
                continue
            if reply.reachable:
                self.reachable, self.why = True, ""
                return
            answers.append(printable(reply.why[: limits.TEXT_CHARACTERS]))
        if answers and len(answers) >= min(2, len(there)):  # one alone may lie
            self.reachable, self.why = False, answers[0]
