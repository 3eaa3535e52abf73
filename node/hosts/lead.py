"""Lead host's side of the streams to the follower hosts: their identities, answers and connection state."""

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from dilocox.node.hosts.cluster_link import proof
from dilocox.node.hosts.host_events import HostEvents
from dilocox.node.hosts.host_stream import ALIVE_SECONDS, Silence, pump
from dilocox.node.workers.devices import Devices
from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import short
from dilocox.protocol.pb import boxes_pb2 as boxes
from dilocox.protocol.pb import boxes_pb2_grpc as rpc
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.limits.addresses import address_of
from dilocox.transport.limits.caller_auth import CallerAuth, Context
from dilocox.transport.process.watched_state import Changes

__all__ = ["BoxAdmission", "LeadService", "RemoteBox"]

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""Timeout of a stream's first message."""
WAITING, WAITING_PER_ADDRESS = 64, 4
"""Most streams without a first message, in total and per address."""


class RemoteBox:
    """Another box of our cluster, as long as its stream lasts."""

    def __init__(self, peer: str, hello: boxes.BoxHello, said: Callable[[boxes.WorkerSaid], None]) -> None:
        self.peer, self._said = peer, said
        self.machine = Devices(hello.devices, hello.cuda, hello.device_bytes, hello.host_bytes)
        self.commands: asyncio.Queue[boxes.BoxCommand] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.ticks = 0
        """Processor time of its workers."""
        self.serves = True
        """Whether others are to have its payloads from itself."""
        self._asks: dict[int, asyncio.Future[boxes.BoxAnswer]] = {}
        self._asked = 0
        self._ended = -1
        self._heard = asyncio.Event()

    def send(self, **command: Any) -> None:
        self.commands.put_nowait(boxes.BoxCommand(**command))

    async def ask(self, **what: Any) -> boxes.BoxAnswer:
        """Its answer. Raises RemoteError where it goes before it answers."""
        if self.gone.is_set():
            raise self._away()
        self._asked += 1
        number, answer = self._asked, asyncio.get_running_loop().create_future()
        self._asks[number] = answer
        self.send(ask=boxes.BoxAsk(number=number, **what))
        try:
            return await answer
        finally:
            del self._asks[number]
            if answer.cancelled():  # the caller: a cancelled wait does not cancel the work
                self.send(drop=number)

    async def ended(self, generation: int) -> None:
        """Wait until this worker group has ended there, or the host is gone."""
        while self._ended < generation and not self.gone.is_set():
            self._heard.clear()
            await self._heard.wait()

    def hear(self, event: boxes.BoxEvent) -> None:
        match event.WhichOneof("event"):
            case "alive":
                self.ticks, self.serves = event.alive.ticks, event.alive.serves
            case "said":
                self._said(event.said)
            case "ended":
                self._ended = event.ended
                self._heard.set()
            case "answer":
                answer = self._asks.get(event.answer.ask)
                if answer is not None and not answer.done():
                    answer.set_result(event.answer)

    def leave(self) -> None:
        self.gone.set()
        self._heard.set()
        for answer in self._asks.values():
            if not answer.done():
                answer.set_exception(self._away())

    def _away(self) -> RemoteError:
        return RemoteError(pb.REASON_UNAVAILABLE, f"host {short(self.peer)} of this cluster is away")


@dataclass(frozen=True)
class BoxAdmission:
    """Conditions for a host of this cluster."""

    run_id: bytes
    me: str
    secret: bytes
    cuda: bool
    """Whether ours are GPUs: all boxes are alike."""
    most: int
    """Boxes beside this one."""
    corpus: bytes = b""
    """Digest of this cluster's private data; empty: it trains on the run's."""

    def refusal(self, peer: str, hello: boxes.BoxHello) -> str:
        """Why not; empty where it may."""
        if not hmac.compare_digest(hello.proof, proof(self.secret, self.run_id, self.me, peer)):
            return "the cluster link is of another cluster, or was replaced: copy cluster.link from the lead host again"
        if hello.cuda != self.cuda:
            return "the hosts of a cluster must all have GPUs, or none: the lead host has " + ("some" if self.cuda else "none")
        if not 0 < hello.devices <= limits.STAGES:
            return f"a host has 1 to {limits.STAGES} devices, not {hello.devices}"
        if hello.corpus != self.corpus:
            ours = (
                f"{self.corpus.hex()[:12]}: copy its folder to this host, and pass it with --private" if self.corpus else "none"
            )
            return f"the hosts of a cluster train on the same private data; the lead host has {ours}"
        return ""


class LeadService(rpc.LeadServicer):
    """Serves the other boxes, as soon as there is a cluster that they may join."""

    def __init__(self, callers: CallerAuth, own_hosts: set[str]) -> None:
        """`own_hosts`: kept up to date with the peer ids of the hosts that follow."""
        self._callers, self._own_hosts = callers, own_hosts
        self._admission: BoxAdmission | None = None
        """Conditions for hosts. None: this peer leads no cluster of several hosts."""
        self.heard = HostEvents()
        """Events of the workers of other hosts."""
        self.followers: dict[str, RemoteBox] = {}
        self.changed = asyncio.Event()
        """Event, set when a host came or went."""
        self.moved = Changes()
        """Changes of `followers`."""
        self._closing = False
        self._waiting: Counter[str] = Counter()
        """Streams without a first message, by address."""
        self._refused = ""
        """Reason of the last rejection: sent to that host, and logged once."""
        self._store_port: int | None = None
        """Loopback port of the store at which the current worker group meets."""

    def admit(self, admission: BoxAdmission) -> None:
        """Let hosts join the cluster that this peer leads, from now on."""
        self._admission = admission

    def meet_at(self, port: int | None) -> None:
        """Connect workers of other hosts with this port on loopback; None: no worker group runs."""
        self._store_port = port

    async def Follow(
        self, request_iterator: AsyncIterator[boxes.BoxEvent], context: Context
    ) -> AsyncIterator[boxes.BoxCommand]:
        follower = await self._admit(request_iterator, context)
        silence = Silence()

        async def receive() -> None:
            async for event in request_iterator:
                silence.heard()
                follower.hear(event)

        receiving = asyncio.create_task(receive(), name=f"host {short(follower.peer)}")
        watching = asyncio.create_task(silence.lasts())
        try:
            while not receiving.done() and not watching.done() and not self._closing and not follower.gone.is_set():
                command = boxes.BoxCommand(alive=boxes.BoxAlive())
                with suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_SECONDS):
                        command = await follower.commands.get()
                yield command
            log.warning("host %s: %s", short(follower.peer), "it does not answer" if watching.done() else "its stream ended")
        finally:
            receiving.cancel()
            watching.cancel()
            follower.leave()
            if self.followers.get(follower.peer) is follower:
                del self.followers[follower.peer]
                self._own_hosts.discard(follower.peer)
            self._change()

    async def close(self) -> None:
        """End the streams to the other boxes."""
        self._closing = True
        while self.followers:
            self.changed.clear()
            await self.changed.wait()

    def _change(self) -> None:
        self.changed.set()
        self.moved.happened()

    async def _admit(self, events: AsyncIterator[boxes.BoxEvent], context: Context) -> RemoteBox:
        admission = self._admission
        if admission is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this peer is not the lead host of a cluster")
            raise AssertionError
        peer, first, address = "", boxes.BoxEvent(), address_of(context.peer())
        if self._waiting.total() >= WAITING or self._waiting[address] >= WAITING_PER_ADDRESS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections wait for authentication")
        self._waiting[address] += 1
        with suppress(RemoteError, TimeoutError, StopAsyncIteration):
            try:
                peer = self._callers.peer(context)
                async with asyncio.timeout(HELLO_SECONDS if peer else 0):
                    first = await anext(aiter(events))
            finally:
                self._waiting[address] -= 1
                self._waiting += Counter()  # removes addresses with a count of zero
        why = admission.refusal(peer, first.hello) if peer and peer != admission.me else "it does not authenticate"
        others = self.followers.keys() - {peer}
        if not why and len(others) >= admission.most:
            why = f"the cluster has its {admission.most + 1} hosts: start the lead host with a larger --cluster-boxes"
        if why and why != self._refused:
            self._refused = why
            log.warning("refused a host that requested to join this cluster: %s", why)
        if why:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        if (known := self.followers.get(peer)) is not None:
            known.leave()  # it returned before its loss was noticed
        self._own_hosts.add(peer)
        follower = self.followers[peer] = RemoteBox(peer, first.hello, self.heard.hear)
        self._change()
        log.info("host %s of this cluster joined, with %d devices", short(peer), follower.machine.devices)
        return follower

    async def Meet(self, request_iterator: AsyncIterator[boxes.Bytes], context: Context) -> AsyncIterator[boxes.Bytes]:
        try:
            known = self._callers.peer(context) in self.followers
        except RemoteError:
            known = False
        port = self._store_port
        if not known or port is None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this lead host has no such worker group")
            raise AssertionError
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # the worker group ended meanwhile
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker group ended")
            raise AssertionError from None
        writing = asyncio.create_task(pump(request_iterator, writer))
        try:
            with suppress(ConnectionError):
                while data := await reader.read(limits.FRAME_BYTES):
                    yield boxes.Bytes(data=data)
        finally:
            writing.cancel()
            writer.close()
