"""The node's line to the coordinator: find it in the DHT, fetch the manifest, follow the run, submit statements. Never gives up."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from dilocox.protocol.crypto import verify
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import JoinLink, peer_id
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.presence import Directory
from dilocox.transport.rpc import ChannelPool

__all__ = ["CoordinatorLink"]

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
"""A coordinator that restarts is found again within this; jitter keeps a swarm from returning at one instant."""


class Backoff:
    def __init__(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS

    async def wait(self) -> None:
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(MAX_BACKOFF_SECONDS, 2 * self._seconds)

    def reset(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS


class CoordinatorLink:
    def __init__(self, link: JoinLink, directory: Directory, channels: ChannelPool) -> None:
        self._link, self._directory, self._channels = link, directory, channels
        self.connected = False

    async def _stub(self) -> rpc.CoordinatorStub:
        record = await self._directory.find(self._link.coordinator)
        if record is None:
            raise RemoteError(pb.REASON_UNAVAILABLE, "the coordinator's record is not in the DHT")
        return rpc.CoordinatorStub(self._channels.channel(record))

    async def manifest(self) -> tuple[Manifest, bytes]:
        """The manifest and its canonical bytes, checked against the run id and the owner's signature; waits until it is there."""
        backoff, said = Backoff(), False
        while True:
            try:
                run: services.Run = await (await self._stub()).GetRun(services.GetRunRequest(), timeout=CALL_SECONDS)
                return self._check(run.manifest)
            except (RemoteError, grpc.aio.AioRpcError) as error:
                if isinstance(error, RemoteError) and error.reason == pb.REASON_WRONG_RUN:
                    raise LocalError(f"the coordinator serves another run than the link names: {error.detail}") from error
                if not said:
                    log.info("waiting for the coordinator %s …", self._link.coordinator)
                    said = True
                await backoff.wait()

    def _check(self, envelope: pb.Envelope) -> tuple[Manifest, bytes]:
        manifest = Manifest.from_canonical(envelope.body)
        if manifest.run_id != self._link.run_id:
            raise RemoteError(pb.REASON_WRONG_RUN, "the manifest does not hash to the run id")
        owner = bytes.fromhex(manifest.run.owner)
        if not verify(owner, envelope.signature, pb.KIND_MANIFEST, manifest.run_id, envelope.body):
            raise RemoteError(pb.REASON_WRONG_RUN, f"the manifest is not signed by its owner {peer_id(owner)}")
        return manifest, envelope.body

    async def watch(self, next_round: Callable[[], int]) -> AsyncIterator[services.WatchEvent]:
        """Events for ever; after every reconnect, from the commit that `next_round()` wants."""
        backoff = Backoff()
        while True:
            try:
                stream = (await self._stub()).Watch(services.WatchRequest(from_round=next_round()))
                async for event in stream:
                    if not self.connected:
                        self.connected = True
                        log.info("connected to the coordinator")
                    backoff.reset()
                    yield event
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            if self.connected:
                self.connected = False
                log.warning("the coordinator is away; training goes on")
            await backoff.wait()
            await self._directory.refresh()

    async def challenge(self, peer: str) -> bytes:
        """A nonce to answer with evidence; trying until the coordinator has given one."""
        backoff = Backoff()
        while True:
            try:
                request = services.ChallengeRequest(peer=peer)
                reply: services.Challenge = await (await self._stub()).GetChallenge(request, timeout=CALL_SECONDS)
                return reply.nonce
            except (RemoteError, grpc.aio.AioRpcError):
                await backoff.wait()

    async def submit(self, statement: Statement) -> services.SubmitReply:
        """Deliver a statement, trying again until the coordinator has answered. Cancel to give up."""
        backoff = Backoff()
        while True:
            try:
                stub = await self._stub()
                reply: services.SubmitReply = await stub.Submit(statement.envelope, timeout=CALL_SECONDS)
                if reply.reason != pb.REASON_RATE:
                    return reply
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await backoff.wait()

    async def try_submit(self, statement: Statement) -> None:
        """Deliver once or not at all: for heartbeats."""
        try:
            await (await self._stub()).Submit(statement.envelope, timeout=CALL_SECONDS)
        except (RemoteError, grpc.aio.AioRpcError):
            pass
