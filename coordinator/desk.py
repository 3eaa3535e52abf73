"""The coordinator's door for gRPC: who leads serves behind it; who stands by says so, and tells who waits when that changes."""

import asyncio

import grpc
import grpc.aio

from dilocox.coordinator.service import CoordinatorService
from dilocox.coordinator.streams import Streams
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.callers import Callers, Context, address_of
from dilocox.transport.chain_file import ChainFile

__all__ = ["Desk", "ElectionService"]


class Desk(rpc.CoordinatorServicer):
    def __init__(self) -> None:
        self.service: CoordinatorService | None = None
        """Of who leads; None: we do not."""
        self.says = "this coordinator starts"
        """Why we do not, and who does."""
        self._record: Statement[pb.PeerRecord] | None = None

    def learn_own_record(self, record: Statement[pb.PeerRecord]) -> None:
        """Our newest."""
        self._record = record
        if self.service is not None:
            self.service.learn_own_record(record)

    def serve(self, service: CoordinatorService) -> None:
        """We lead, from now on."""
        if self._record is not None:
            service.learn_own_record(self._record)
        self.service = service

    async def _served(self, context: Context) -> CoordinatorService:
        if self.service is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.says)
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


class ElectionService(rpc.ElectionServicer):
    def __init__(self, chain: ChainFile, callers: Callers) -> None:
        self._callers = callers
        self._streams = Streams(lambda peer: peer in chain.head.cluster_by_peer, chain.manifest.may_read)
        self._fence, self._elected = 0, asyncio.Event()

    def lead(self, fence: int) -> None:
        """We do, from now on."""
        self._fence = fence
        self._elected.set()

    async def Await(self, request: services.LeadRequest, context: Context) -> services.LeadReply:
        try:
            with self._streams.joined(self._callers.peer(context), address_of(context)):
                await self._elected.wait()
                while self._fence <= request.above:  # who asks knows it already, and waits for the end of this server
                    await asyncio.Event().wait()
        except RemoteError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.detail)
        return services.LeadReply(fence=self._fence)
