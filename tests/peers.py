"""Parts of several nodes that connect to each other: chains, blobs, calls, over real connections; without workers and
coordinator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.forks import Forks
from dilocox.node.exchange.relay_store import RelayStore
from dilocox.node.exchange.relays import Relays
from dilocox.node.exchange.shards import OwnShards, find_shards
from dilocox.node.hosts.lead import LeadService
from dilocox.protocol.errors import LocalError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.pb.boxes_pb2_grpc import add_LeadServicer_to_server
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net import tls
from dilocox.transport.net.blob_server import PeerService
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from tests.exchanges import Exchange, exchange_of
from tests.helpers import identity, serve_also

PATIENCE_SECONDS = 60.0


@dataclass
class Peer:
    """Part of a node that other nodes reach: its chain, its blobs, its calls."""

    number: int
    chain: ChainFile
    store: BlobStore
    tasks: Tasks
    channels: ChannelPool
    forks: Forks
    exchange: Exchange
    relays: Relays
    relay_store: RelayStore
    service: PeerService
    lead: LeadService
    record: pb.PeerRecord
    everybody: "Everybody"
    heads: HeadGossip
    shards: OwnShards | None

    @property
    def own_host(self) -> OwnHost:
        return self.exchange.own_host(self.chain, self.relays)

    async def ended(self) -> LocalError:
        with pytest.raises(LocalError) as caught:
            await asyncio.wait_for(self.tasks.wait(), PATIENCE_SECONDS)
        return caught.value


class Everybody:
    def __init__(self) -> None:
        self.records: dict[str, pb.PeerRecord] = {}

    async def look_up(self, peer: str) -> None:
        pass

    async def find(self, peer: str) -> pb.PeerRecord | None:
        return self.records.get(peer)


@asynccontextmanager
async def meeting(folder: Path, run: Manifest, *chains: list[Statement[pb.Commit]]) -> AsyncIterator[list[Peer]]:
    """Run peers 0, 1, … with these chains, which can reach each other."""
    everybody = Everybody()
    peers: list[Peer] = []
    async with AsyncExitStack() as closing:
        for number, commits in enumerate(chains):
            home = folder / str(number)
            home.mkdir()
            heads, tasks, traffic = HeadGossip(), Tasks(), Traffic()
            closing.push_async_callback(tasks.close)
            file = ChainFile(home / "chain.db", run)
            closing.callback(file.close)
            for commit in commits:
                file.append(commit.envelope)
            store, channels = BlobStore(home / "blobs"), ChannelPool(identity(number), run.run_id, heads, traffic)
            closing.push_async_callback(channels.close)
            certificate = tls.load_or_create(home)
            server, port = await create_server("127.0.0.1:0", certificate)
            callers = CallerAuth(run.run_id, certificate.certificate_der)
            service, lead = PeerService(store, callers, traffic, heads), LeadService(callers, set())
            rpc.add_PeerServicer_to_server(service, server)
            add_LeadServicer_to_server(lead, server)
            await server.start()
            closing.push_async_callback(server.stop, 0)
            forks = Forks(file, everybody, channels, tasks)
            heads.open(forks)
            shards = find_shards(run)
            own = shards.open(home, everybody, channels, file) if shards is not None else None
            restorer = own.restorer if own is not None else None
            downloader = Downloader(identity(number).peer, store, everybody, channels, shares=restorer)
            exchange = exchange_of(run, downloader, range(2))
            record = pb.PeerRecord(address=f"127.0.0.1:{port}", certificate=certificate.certificate_der)
            everybody.records[identity(number).peer] = record
            relays = Relays(identity(number), file, store, everybody, channels, lambda: True)
            relay_store = RelayStore(identity(number), file, store)
            share = {"share": own.share, "shelves": (own.shelf,)} if own is not None else {}
            serve_also(service, commit=file.raw, keeper=relay_store, **share)
            parts = exchange, relays, relay_store, service, lead, record, everybody, heads, own
            peers.append(Peer(number, file, store, tasks, channels, forks, *parts))
        yield peers
