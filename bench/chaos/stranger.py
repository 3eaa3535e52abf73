"""Unknown peer that knows the join link and attacks every daemon until it ends: `python -c … ADDRESS…`.

It opens idle connections, follows the run on streams that it never reads, and sends invalid protocol. It calls as fast
as allowed: for the run, for blobs that no peer has, and with meaningless statements. Its last line has the results.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter

import grpc.aio

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.net.tls import fetch_certificate
from dilocox.transport.process.parent_pipe import exit_with_parent

__all__ = ["main"]

SILENT = 32
"""Silent connections to each port."""
STREAMS = 8
"""Streams of events and of blobs to each daemon."""
CALLS_PER_SECOND = 10.0
"""Calls a second to each daemon: a flood that leaves the machine to the measured nodes."""
JUNK_SECONDS = 1.0
JUNK_BYTES = 1 << 14
PAUSE_SECONDS = 1.0
"""Seconds before the next attempt if a daemon does not answer."""
CALL_SECONDS = 10.0
IDLE_SECONDS = 600.0


class Stranger:
    def __init__(self, link: JoinLink) -> None:
        self.link, self.done = link, Counter[str]()
        self.channels = ChannelPool(Identity(os.urandom(32)), link.run_id)

    async def again(self, what: str, address: str, act: str) -> None:
        """Do it for ever; a daemon that is away is tried again."""
        while True:
            try:
                await getattr(self, act)(address)
                self.done[what] += 1
            except (OSError, RemoteError, grpc.aio.AioRpcError, TimeoutError, asyncio.IncompleteReadError):
                self.done[f"{what} refused"] += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def silence(self, address: str) -> None:
        """Open a silent connection until the other side ends it."""
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        try:
            while await reader.read(1 << 16):
                pass
        finally:
            writer.close()
        await asyncio.sleep(PAUSE_SECONDS)

    async def junk(self, address: str) -> None:
        _, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        try:
            writer.write(os.urandom(JUNK_BYTES))
            await writer.drain()
        finally:
            writer.close()
        await asyncio.sleep(JUNK_SECONDS)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        host, port = address.rsplit(":", 1)
        certificate = await asyncio.to_thread(fetch_certificate, host, int(port), CALL_SECONDS)
        return self.channels.channel(pb.PeerRecord(address=address, certificate=certificate))

    async def idle_stream(self, address: str) -> None:
        """Open one stream without reads and one without writes, until the other side ends them."""
        channel = await self._channel(address)
        events = rpc.CoordinatorStub(channel).Watch(services.WatchRequest(), timeout=IDLE_SECONDS)
        blob = rpc.PeerStub(channel).Push(timeout=IDLE_SECONDS)
        await asyncio.gather(events.code(), blob.code())
        await asyncio.sleep(PAUSE_SECONDS)

    async def flood(self, address: str) -> None:
        channel = await self._channel(address)
        junk = pb.Envelope(kind=pb.KIND_CONTRIBUTION, body=os.urandom(200), key=os.urandom(32), signature=os.urandom(64))
        while True:
            calls = (
                rpc.CoordinatorStub(channel).GetRun(services.GetRunRequest(), timeout=CALL_SECONDS),
                rpc.CoordinatorStub(channel).Submit(junk, timeout=CALL_SECONDS),
                rpc.PeerStub(channel).GetCommit(services.CommitRequest(round=1), timeout=CALL_SECONDS),
                rpc.PeerStub(channel).Fetch(services.FetchRequest(digest=os.urandom(32)), timeout=CALL_SECONDS),
            )
            codes = await asyncio.gather(*(call.code() for call in calls))
            self.done["calls"] += len(calls)
            if grpc.StatusCode.UNAVAILABLE in codes:
                raise RemoteError(pb.REASON_UNAVAILABLE, "it is away")
            await asyncio.sleep(len(calls) / CALLS_PER_SECOND)

    async def run(self, addresses: list[str], dht_addresses: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for address in [*addresses, *dht_addresses]:
                tasks.create_task(self.again("junk", address, "junk"))
                for _ in range(SILENT):
                    tasks.create_task(self.again("silent connections", address, "silence"))
            for address in addresses:
                tasks.create_task(self.again("floods", address, "flood"))
                for _ in range(STREAMS):
                    tasks.create_task(self.again("idle streams", address, "idle_stream"))
            tasks.create_task(self.tell())

    async def tell(self) -> None:
        while True:
            await asyncio.sleep(10)
            print(json.dumps(self.done), flush=True)


def main() -> None:
    """Read the arguments: the join link, gRPC addresses joined by commas, DHT addresses joined by commas."""
    exit_with_parent()
    link, addresses, dht_addresses = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Stranger(JoinLink.parse(link)).run(addresses.split(","), dht_addresses.split(",")))
