"""gRPC front end of a coordinator. The leader serves requests; a standby refuses them and sends a newer join link.

The leader elected last has the highest incarnation number in its signed record. The store counts incarnations, and may
be restored, replaced or abandoned. So callers send the newest record they know, and the leader numbers its incarnation
above it. Only the leader can do that, and only for a record that this run's coordinator signed.
"""

import asyncio
from typing import Protocol

import grpc
import grpc.aio

from dilocox.coordinator.service import CoordinatorService
from dilocox.coordinator.stream_limits import Streams
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.limits.addresses import address_of
from dilocox.transport.limits.caller_auth import CallerAuth, Context
from dilocox.transport.net.peer_directory import is_overtaken, life_of
from dilocox.transport.net.rpc import LINK_HEADER
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["CoordinatorFrontend", "ElectionService", "Incarnation"]


class CoordinatorFrontend(rpc.CoordinatorServicer):
    def __init__(self) -> None:
        self.service: CoordinatorService | None = None
        """Service of the leader. None: this coordinator does not lead."""
        self.says = "this coordinator starts"
        """Why we do not, and who does."""
        self.link: JoinLink | None = None
        """Newest join link, with the addresses of all coordinators. None: the store was not read yet."""
        self.record: Statement[pb.PeerRecord] | None = None
        """Our newest."""
        self.changed = asyncio.Event()
        """Event, set and replaced when this coordinator's record changed or it became leader."""

    def learn_own_record(self, record: Statement[pb.PeerRecord]) -> None:
        """Our newest."""
        self.record = record
        if self.service is not None:
            self.service.learn_own_record(record)
        self.notify_change()

    def publish_link(self, link: JoinLink) -> None:
        """Send this link, from now on, to callers that this coordinator refuses."""
        self.link = link

    def stand_by(self, why: str) -> None:
        """Answer that we do not lead, and why."""
        self.says = why

    def notify_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def serve(self, service: CoordinatorService) -> None:
        """We lead, from now on."""
        if self.record is not None:
            service.learn_own_record(self.record)
        self.service = service

    async def _served(self, context: Context) -> CoordinatorService:
        if self.service is None:
            link = () if self.link is None else ((LINK_HEADER, str(self.link)),)
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.says, link)
            raise AssertionError("unreachable")
        return self.service

    async def GetRun(self, request: services.GetRunRequest, context: Context) -> services.Run:
        return await (await self._served(context)).GetRun(request, context)

    async def GetPresence(self, request: services.GetPresenceRequest, context: Context) -> services.PresenceList:
        return await (await self._served(context)).GetPresence(request, context)

    async def Submit(self, request: pb.Envelope, context: Context) -> pb.Envelope:
        return await (await self._served(context)).Submit(request, context)

    async def GetChallenge(self, request: services.ChallengeRequest, context: Context) -> services.Challenge:
        return await (await self._served(context)).GetChallenge(request, context)

    async def Watch(self, request: services.WatchRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        await (await self._served(context)).Watch(request, context)


class Incarnation(Protocol):
    """Incarnation of the daemon, as its record numbers it."""

    async def rise(self, above: int) -> None:
        """Number the incarnation above another one. On return the record contains the number. Raises LocalError if this
        coordinator does not lead any more."""


class ElectionService(rpc.ElectionServicer):
    def __init__(self, desk: CoordinatorFrontend, chain: ChainFile, callers: CallerAuth, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._desk, self._callers, self._run_id = desk, callers, chain.manifest.run_id
        self._streams = Streams(lambda peer: peer in chain.head.cluster_by_peer, chain.manifest.may_read)
        self._leads = False
        self._rising = asyncio.Lock()

    def start_leading(self) -> None:
        """Answer that we lead, from now on."""
        self._leads = True
        self._desk.notify_change()

    async def Await(self, request: services.LeadRequest, context: Context) -> services.LeadReply:
        try:
            with self._streams.joined(self._callers.peer(context), address_of(context.peer())):
                return services.LeadReply(record=(await self._leading(request)).envelope)
        except RemoteError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.detail)
            raise
        except LocalError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise

    async def _leading(self, request: services.LeadRequest) -> Statement[pb.PeerRecord]:
        """Return the leader's record, once it differs from the caller's copy. Raises RemoteError if the caller's copy is
        no record."""
        shown = open_envelope(request.newest, self._run_id, (pb.KIND_PEER_RECORD,)) if request.HasField("newest") else None
        while not self._leads or self._desk.record is None:
            await self._desk.changed.wait()
        if shown is not None and shown.peer == self._desk.record.peer:
            await self._rise_above(shown.body)
        while life_of(self._desk.record.body) <= request.above:  # else who asks knows it, and waits for the end of this server
            await self._desk.changed.wait()
        return self._desk.record

    async def _rise_above(self, shown: pb.PeerRecord) -> None:
        async with self._rising:  # the number that one caller caused serves all callers
            if self._desk.record is not None and is_overtaken(self._desk.record.body, shown):
                await self._incarnation.rise(life_of(shown))
