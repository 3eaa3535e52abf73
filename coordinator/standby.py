"""A coordinator that does not lead: it follows who does, and is ready to."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from dilocox.coordinator.kv_store import StoreError
from dilocox.coordinator.shared_log import FOLLOW_SECONDS, BehindError, Candidate, SharedLog, UnreadableError
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import Way
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.net.rpc import ChannelPool, record_of
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["stand_by"]

log = logging.getLogger(__name__)

STALL_SECONDS = 10.0
"""A leader from which no commit comes for so long is asked again."""
UNREADABLE_SECONDS = 5.0
"""Interval between two full reads of an unreadable log: an operator must repair it."""


async def stand_by(shared: SharedLog, chain: ChainFile, channels: ChannelPool, tell: Callable[[str], None]) -> None:
    """Wait until this coordinator leads. `tell` receives sentences about progress. Raises ConfigError if it never can
    lead."""
    await shared.enter()
    said = ""
    while True:
        pause = FOLLOW_SECONDS
        try:
            if await shared.stand():
                return
            says = (
                f"standby: {shared.leader} leads"
                if shared.leader is not None
                else "no coordinator leads: it starts an election"
            )
        except BehindError as error:
            says = await _catch_up(shared, chain, channels, error.round)
        except (StoreError, UnreadableError) as error:
            says = f"standby, but it follows no leader: {error}"
            pause = FOLLOW_SECONDS if isinstance(error, StoreError) else UNREADABLE_SECONDS
        if says != said:
            log.info("%s", says)
            tell(says)
            said = says
        await asyncio.sleep(pause)


async def _catch_up(shared: SharedLog, chain: ChainFile, channels: ChannelPool, until: int) -> str:
    """Fetch commits that the log does not contain any more from the leader. Return a sentence about it."""
    missing = f"commits {chain.length} to {until - 1} are missing here, and the store no longer has them"
    if shared.leader is None:
        return f"{missing}; no coordinator leads: start one that has them, or copy its chain.db"
    try:
        await _fetch(shared.leader, chain, channels, until)
    except (RemoteError, grpc.aio.AioRpcError, TimeoutError) as error:
        return f"{missing}; {shared.leader} did not send them: {error}"
    return f"standby: {shared.leader} leads"


async def _fetch(leader: Candidate, chain: ChainFile, channels: ChannelPool, until: int) -> None:
    record = await record_of(Way(leader.address, bytes.fromhex(leader.certificate)))
    stream = rpc.CoordinatorStub(channels.channel(record)).Watch(services.WatchRequest(from_round=chain.length))
    try:
        while chain.length < until:
            async with asyncio.timeout(STALL_SECONDS):
                event = await stream.read()
            if not isinstance(event, services.WatchEvent):
                raise RemoteError(pb.REASON_UNAVAILABLE, "it stopped sending")
            if event.HasField("statement") and event.statement.kind == pb.KIND_COMMIT:
                await asyncio.to_thread(chain.append, event.statement)
    finally:
        stream.cancel()
