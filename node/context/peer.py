"""Runtime of a peer in a run: folder, server, record, coordinator client. Nodes and relays are built on it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dilocox.node.attest.prover import AttestorService
from dilocox.node.exchange.forks import Forks
from dilocox.node.exchange.relay_store import RelayStore
from dilocox.node.exchange.relays import Relays
from dilocox.node.hosts.lead import LeadService
from dilocox.protocol.consensus import reputation
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.pb.boxes_pb2_grpc import add_LeadServicer_to_server
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.blob_server import PeerService, Served, ServedRun
from dilocox.transport.net.network import Listen, Network, open_network
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.notify.notify import Notice
from dilocox.transport.process.disk_pressure import restart_when_writable
from dilocox.transport.process.malloc import freeze_startup
from dilocox.transport.process.tasks import Stopped, Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import read_checked, write_atomically
from dilocox.views.api_listener import ApiListener, open_listener

__all__ = [
    "MANIFEST",
    "Daemon",
    "PeerRuntime",
    "PeerSettings",
    "find_relays",
    "keep_manifest",
    "open_chain",
    "open_relay_store",
    "run_peer",
]

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
"""Manifest of the run, in its folder."""


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Settings of a node and of a relay."""

    join: JoinLink
    home: Path
    name: str
    listen: Listen
    api: str
    """host:port of the HTTP API."""
    upload: Rates
    download: Rates
    notice: Notice | None
    """Receiver of notable events."""


@dataclass(frozen=True)
class PeerRuntime:
    """Parts that do not depend on the run's manifest."""

    folder: Path
    """Everything of this run."""
    network: Network
    channels: ChannelPool
    store: BlobStore
    blobs: PeerService
    attestor: AttestorService
    lead: LeadService
    door: ApiListener
    """API socket."""


@dataclass(frozen=True)
class Daemon:
    """Parts of a daemon before it knows its run."""

    home: DataDirectory
    tasks: Tasks
    place: PeerRuntime
    files: AsyncExitStack
    """Closed after every task."""
    closing: AsyncExitStack


TakePart = Callable[[Daemon], Awaitable[None]]
"""Learns the run and starts what this peer does in it."""


async def run_peer(settings: PeerSettings, take_part: TakePart) -> None:
    """Run a peer until SIGTERM or SIGINT; after a full disk it waits for space, and starts again. Raises LocalError when
    it cannot take part."""
    home = DataDirectory(settings.home)

    async def live(stopped: asyncio.Event, door: ApiListener) -> None:
        tasks = Tasks()
        tasks.stop_with(stopped)
        async with AsyncExitStack() as files, AsyncExitStack() as closing:
            place = await _join_network(settings, home, tasks, closing, door)
            try:
                await take_part(Daemon(home, tasks, place, files, closing))
                await tasks.wait()
            except Stopped:
                log.info("stopped before the run was known")

    async with open_listener(settings.api, home, settings.join.run_id, settings.name) as door:
        await restart_when_writable(home.folder, lambda stopped: live(stopped, door), door.no_room)


async def _join_network(
    settings: PeerSettings, home: DataDirectory, tasks: Tasks, closing: AsyncExitStack, door: ApiListener
) -> PeerRuntime:
    """Join the DHT, publish our record, serve what is on disk: also while the coordinator is away."""
    link = settings.join
    folder = home.run_folder(link.run_id)
    store = BlobStore(folder / "blobs")
    heads = HeadGossip()
    traffic = Traffic(settings.upload, settings.download)
    channels = ChannelPool(home.identity, link.run_id, heads, traffic)
    closing.push_async_callback(channels.close)
    network = await open_network(
        home, link.run_id, settings.listen, settings.name, tasks, closing, link.dht_addresses, heads=heads, traffic=traffic
    )
    blobs = PeerService(store, network.callers, traffic, heads)
    attestor, lead = AttestorService(), LeadService(network.callers, network.directory.own_hosts)
    known = read_checked(folder / MANIFEST, lambda raw: _manifest_of(link.run_id, raw))
    blobs.serve(ServedRun(may_read=known.may_read if known is not None else lambda peer: False))
    rpc.add_PeerServicer_to_server(blobs, network.server)
    rpc.add_AttestorServicer_to_server(attestor, network.server)
    add_LeadServicer_to_server(lead, network.server)
    await network.server.start()
    freeze_startup()
    tasks.start(network.watch_reach(channels), "reach")
    return PeerRuntime(folder, network, channels, store, blobs, attestor, lead, door)


def _manifest_of(run_id: bytes, raw: bytes) -> Manifest:
    """Raises ValueError where the bytes are not the run's."""
    try:
        manifest = Manifest.from_canonical(raw)
    except RemoteError as error:
        raise ValueError(str(error)) from error
    if manifest.run_id != run_id:
        raise ValueError("the manifest of another run")
    return manifest


def keep_manifest(place: PeerRuntime, manifest: Manifest, shelves: Iterable[Served] = ()) -> None:
    """Write the manifest for the workers, and for the next start, which serves while the coordinator is away; serve its readers.
    `shelves`: stores that are served, too."""
    write_atomically(place.folder / MANIFEST, manifest.canonical_bytes())
    place.blobs.serve(replace(place.blobs.run, may_read=manifest.may_read, shelves=tuple(shelves)))


def open_chain(place: PeerRuntime, chain: ChainFile, tasks: Tasks) -> None:
    """Serve the chain, and start head gossip, now that the run is known."""
    forks = Forks(chain, place.network.directory, place.channels, tasks)
    place.channels.heads.open(forks)
    known = replace(
        place.blobs.run,
        is_member=lambda peer: peer in chain.head.cluster_by_peer,
        earned=lambda peer: _earned(chain.manifest, chain.head, peer),
        commit=chain.raw,
    )
    place.blobs.serve(known)


def _earned(manifest: Manifest, head: Head, peer: str) -> float:
    """A newcomer's share for one who left the roster just now."""
    cluster = head.cluster_by_peer.get(peer)
    return reputation.share(manifest, head.standings if cluster else {}, cluster.cluster if cluster else peer)


def open_relay_store(place: PeerRuntime, home: DataDirectory, chain: ChainFile, agreed: Container[bytes] = ()) -> RelayStore:
    """Return what is stored for peers, with what an earlier incarnation stored; `agreed`: see `RelayStore`. Blocking."""
    relay_store = RelayStore(home.identity, chain, place.store, agreed)
    relay_store.remember()
    return relay_store


def find_relays(place: PeerRuntime, home: DataDirectory, chain: ChainFile, copies: int | None, cluster: str = "") -> Relays:
    """`copies`, `cluster`: see `Relays`."""
    network = place.network

    def dialable() -> bool:
        return network.reach.reachable is not False

    return Relays(home.identity, chain, place.store, network.directory, place.channels, dialable, copies, cluster)
