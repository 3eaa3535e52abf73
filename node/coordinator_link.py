"""The node's line to the coordinator: find it, fetch the manifest, follow the run, submit statements. Never gives up.

It is found by its newest signed record, which the DHT, a cache or the coordinator itself gave, or at the address in the join link:
after a failed call the other of the two is tried.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc
import grpc.aio

from dilocox.protocol import terms
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink, short
from dilocox.protocol.manifest import Manifest, open_manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.rules import Outcome
from dilocox.transport.presence import Directory
from dilocox.transport.rpc import ChannelPool
from dilocox.transport.tls import fetch_certificate

__all__ = ["Backoff", "CoordinatorLink", "record_of"]

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
PRESENCE_SECONDS = 2.0
"""A person waits for this answer."""
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
"""A coordinator that restarts is found again within this; jitter keeps a swarm from returning at one instant."""


_OUTCOMES = {
    pb.OUTCOME_ACCEPT: Outcome.ACCEPT,
    pb.OUTCOME_IGNORE: Outcome.IGNORE,
    pb.OUTCOME_REJECT: Outcome.REJECT,
}


class Answer(NamedTuple):
    """What the coordinator made of a statement."""

    outcome: Outcome
    reason: pb.Reason
    detail: str
    signed: pb.Envelope


class Backoff:
    def __init__(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS

    async def wait(self) -> None:
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.0))
        self._seconds = min(MAX_BACKOFF_SECONDS, 2 * self._seconds)

    def reset(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS


async def record_of(link: JoinLink) -> pb.PeerRecord:
    """How to dial whom a link names, at the address in it. Raises RemoteError when nobody, or somebody else, is there."""
    certificate = await asyncio.to_thread(fetch_certificate, *link.endpoint, CALL_SECONDS)
    if sha256(certificate) != link.certificate:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, f"at {link.at} is another server than the link names")
    return pb.PeerRecord(address=link.at, certificate=certificate)


def clock_ahead(run: services.Run, asked: float) -> float:
    """Seconds by which this machine's clock is ahead of that of the coordinator who answered just now what it was `asked` (seconds
    since 1970)."""
    return (asked + time.time()) / 2 - run.wall_ms / 1000


class CoordinatorLink:
    def __init__(self, link: JoinLink, directory: Directory, channels: ChannelPool) -> None:
        self._link, self._directory, self._channels = link, directory, channels
        self.connected = False
        self.clock_offset: float | None = None
        """Seconds by which this machine's clock is ahead of the coordinator's, as `run` found."""
        self.signed_manifest: pb.Envelope | None = None
        """As the owner signed it, once `run` returned."""
        self._doubt_record = False
        """The last call failed, and it went by the coordinator's record."""
        self._pinned: pb.PeerRecord | None = None
        """The link's address with its certificate, once that was seen to have the link's digest."""

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[rpc.CoordinatorStub]:
        """A stub for one call; when the call fails the next one goes the other way."""
        try:
            record = None if self._doubt_record else await self._directory.find(self._link.coordinator)
            yield rpc.CoordinatorStub(self._channels.channel(record or await self._by_link()))
        except (RemoteError, grpc.aio.AioRpcError):
            self._doubt_record = not self._doubt_record
            raise

    async def _by_link(self) -> pb.PeerRecord:
        """How to dial the coordinator where the link says it is. Raises RemoteError when nobody, or somebody else, is there."""
        if self._pinned is None:
            self._pinned = await record_of(self._link)
        return self._pinned

    async def run(
        self, tell: Callable[[str, str], None] = lambda says, advice: None
    ) -> tuple[Manifest, Statement[pb.Appointment] | None]:
        """The manifest, and the owner's newest appointment where there is one, checked against the run id, the owner's signature
        and the link's coordinator; waits until they are there. `tell` hears what for, and what somebody can do."""
        backoff, said = Backoff(), ""
        where = f"the coordinator {short(self._link.coordinator)} at {self._link.at}"
        tell(f"asking {where} what the run is", "")
        while True:
            try:
                async with self._calling() as stub:
                    asked = time.time()
                    run: services.Run = await stub.GetRun(services.GetRunRequest(), timeout=CALL_SECONDS)
                    self.clock_offset = clock_ahead(run, asked)
                    manifest = open_manifest(run.manifest, self._link.run_id)
                    self.signed_manifest = run.manifest
                    appointment = terms.open_appointment(manifest, run.appointment) if run.HasField("appointment") else None
                    if (named := terms.coordinator_of(manifest, appointment)) != self._link.coordinator:
                        detail = f"its owner named {named} as coordinator, the link another"
                        raise RemoteError(pb.REASON_WRONG_RUN, detail)
                    self._learn(run.coordinator)
                return manifest, appointment
            except (RemoteError, grpc.aio.AioRpcError) as error:
                if isinstance(error, RemoteError) and error.reason == pb.REASON_WRONG_RUN:
                    detail = f"the coordinator at {self._link.at} does not serve what the link names: {error.detail}"
                    raise ConfigError(f"{detail}. Ask for a newer link") from error
                why = error.detail if isinstance(error, RemoteError) else error.code().name.lower()
                if why != said:
                    log.info("waiting for %s: %s", where, why)
                    tell(f"waiting for {where}: {why}", "check the link's address, and that the coordinator's port is open")
                    said = why
                await backoff.wait()

    def _learn(self, envelope: pb.Envelope) -> None:
        """The coordinator's own record says where it is better than the link does. Raises RemoteError when it is not its own."""
        record = open_envelope(envelope, self._link.run_id, (pb.KIND_PEER_RECORD,))
        if record.peer != self._link.coordinator:
            raise RemoteError(pb.REASON_BAD_SIGNATURE, f"{record.peer} answers instead of the coordinator")
        self._directory.learn(record)

    async def watch(
        self,
        next_round: Callable[[], int],
        hello: Callable[[], Statement[pb.Heartbeat]] | None = None,
        away: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[services.WatchEvent]:
        """Events for ever; after every reconnect, from the commit that `next_round()` wants. The stream is our sign of life: it
        begins with `hello()`, but for a spectator's; `away()` is called when it breaks."""
        backoff = Backoff()
        while True:
            try:
                async with self._calling() as stub:
                    request = services.WatchRequest(from_round=next_round(), hello=hello().envelope if hello else None)
                    async for event in stub.Watch(request):
                        if not self.connected:
                            self.connected = True
                            log.info("connected to the coordinator")
                        backoff.reset()
                        yield event
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            if self.connected:
                self.connected = False
                log.warning("the coordinator is away%s", "; training goes on" if hello else "")
                away()
            await backoff.wait()
            await self._directory.look_up(self._link.coordinator)

    async def commit(self, round: int) -> Statement[pb.Commit]:
        """A commit that it holds, trying until it has given one. Nothing of it is verified but the signature."""
        backoff = Backoff()
        while True:
            try:
                async with self._calling() as stub:
                    async for event in stub.Watch(services.WatchRequest(from_round=round), timeout=CALL_SECONDS):
                        if event.HasField("statement") and event.statement.kind == pb.KIND_COMMIT:
                            return open_envelope(event.statement, self._link.run_id, (pb.KIND_COMMIT,))
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await backoff.wait()

    async def challenge(self, peer: str) -> bytes:
        """A nonce to answer with evidence; trying until the coordinator has given one."""
        backoff = Backoff()
        while True:
            try:
                request = services.ChallengeRequest(peer=peer)
                async with self._calling() as stub:
                    reply: services.Challenge = await stub.GetChallenge(request, timeout=CALL_SECONDS)
                return reply.nonce
            except (RemoteError, grpc.aio.AioRpcError):
                await backoff.wait()

    async def submit(self, statement: Statement) -> Answer:
        """Deliver a statement, trying again until the coordinator has answered. Cancel to give up."""
        backoff = Backoff()
        while True:
            try:
                answer = await self._ask(statement.envelope)
                if answer.reason != pb.REASON_RATE:
                    return answer
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await backoff.wait()

    async def submit_once(self, envelope: pb.Envelope) -> Answer | None:
        """Deliver once, or not at all: None when no answer came."""
        try:
            return await self._ask(envelope)
        except (RemoteError, grpc.aio.AioRpcError):
            return None

    async def _ask(self, envelope: pb.Envelope) -> Answer:
        """Raises RemoteError where the answer is not the coordinator's to this statement."""
        async with self._calling() as stub:
            signed = await stub.Submit(envelope, timeout=CALL_SECONDS)
        answer: Statement[pb.Answer] = open_envelope(signed, self._link.run_id, (pb.KIND_ANSWER,))
        body = answer.body
        if answer.peer != self._link.coordinator or body.statement != sha256(envelope.key, envelope.body):
            raise RemoteError(pb.REASON_BAD_SIGNATURE, "the answer is not the coordinator's to what was submitted")
        return Answer(_OUTCOMES[body.outcome], body.reason, body.detail, signed)

    async def presence(self) -> services.PresenceList:
        """Who is here, as the coordinator hears it; nobody where it does not answer."""
        try:
            async with self._calling() as stub:
                present: services.PresenceList = await stub.GetPresence(services.GetPresenceRequest(), timeout=PRESENCE_SECONDS)
                return present
        except (RemoteError, grpc.aio.AioRpcError):
            return services.PresenceList()
