"""`dilocox node`: composition root. Joins a run, supervises the stage workers, leaves cleanly."""

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import grpc.aio

from node.api.server import create_node_app
from node.attest.attesters import choose_attester, no_attester
from node.attest.prover import Challenger, Prover
from node.coordinator_link import CoordinatorLink
from node.exchange import Exchange
from node.participant import Participant
from node.worker_settings import WorkerSettings
from node.workers import WorkerPool
from protocol.attestation import SIMULATED, AttestationError
from protocol.errors import ConfigError, LocalError
from protocol.ids import JoinLink
from protocol.manifest import Manifest
from protocol.messages import Statement
from protocol.pb import services_pb2_grpc as rpc
from protocol.transport import tls
from protocol.transport.blobs import BlobStore, write_atomically
from protocol.transport.chain_file import ChainFile
from protocol.transport.dht import Dht, DhtSettings
from protocol.transport.home import Home
from protocol.transport.http import serve_http
from protocol.transport.presence import Directory, cached_addresses
from protocol.transport.rpc import BlobService, ChannelPool, create_server
from protocol.transport.tasks import Stopped, Tasks

__all__ = ["NodeSettings", "run_node"]

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""How long a leaving node tries to tell the coordinator."""


@dataclass(frozen=True)
class NodeSettings:
    join: JoinLink
    home: Path
    name: str
    host: str
    """Address other peers reach this one by."""
    port: int
    dht_port: int
    api: str
    """host:port of the HTTP API."""
    devices: int | None
    """How many stage workers; None: one per CUDA device, else one."""
    threads: int | None
    """CPU threads per worker; None: cores divided by workers."""
    codec_cpus: tuple[int, ...]
    simulated_measurement: Path | None
    """File with the measurement that simulated evidence names, in hexadecimal."""
    collateral: Path | None
    """File with the collateral that verifiers of this machine's TDX quotes need."""
    upload_bytes_per_second: float | None


def count_cuda_devices() -> int:
    """CUDA devices, without loading torch: NVIDIA's driver lists one folder per card; CUDA_VISIBLE_DEVICES narrows it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    cards = Path("/proc/driver/nvidia/gpus")
    return len(list(cards.iterdir())) if cards.is_dir() else 0


def count_workers(wanted: int | None, cuda: int, manifest: Manifest) -> int:
    """Stage workers to start. Raises ConfigError when `wanted` cannot be had."""
    if wanted and cuda and wanted > cuda:
        raise ConfigError(f"--devices {wanted}, but this machine has {cuda} CUDA devices")
    if wanted and wanted > manifest.training.microbatches:
        # torch's 1F1B schedule needs at least one microbatch per worker.
        raise ConfigError(f"--devices {wanted}, but the run's {manifest.training.microbatches} microbatches feed only as many")
    return min(wanted or cuda or 1, manifest.model.stages, manifest.training.microbatches)


async def run_node(settings: NodeSettings) -> None:
    """Take part until SIGTERM or SIGINT, then leave. Raises LocalError when this node cannot take part."""
    home = Home(settings.home)
    tasks = Tasks()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, tasks.stop)
    async with AsyncExitStack() as closing:
        network = await _open_network(settings, home, tasks, closing)
        try:
            await _take_part(settings, home, tasks, network, closing)
            await tasks.wait()
        except Stopped:
            log.info("stopped before the run was known")


@dataclass(frozen=True)
class Network:
    """What does not depend on the run's manifest."""

    folder: Path
    """Everything of this run."""
    address: str
    ports: dict[str, int]
    """Kept over restarts: other peers' records name them."""
    directory: Directory
    channels: ChannelPool
    store: BlobStore
    blobs: BlobService
    server: grpc.aio.Server
    """Not started: what depends on the run may be added first."""


async def _open_network(settings: NodeSettings, home: Home, tasks: Tasks, closing: AsyncExitStack) -> Network:
    """Serve blobs, join the DHT, publish our record."""
    link = settings.join
    folder = home.run_folder(link.run_id)
    store = BlobStore(folder / "blobs")
    blobs = BlobService(store, settings.upload_bytes_per_second)
    certificate = tls.load_or_create(home.folder)
    kept = home.remembered()
    server, port = await create_server(f"0.0.0.0:{settings.port or kept.get('port', 0)}", certificate)
    closing.push_async_callback(server.stop, 0.5)
    rpc.add_PeerServicer_to_server(blobs, server)
    channels = ChannelPool()
    closing.push_async_callback(channels.close)
    known = folder / "dht-peers.json"
    dht = Dht(
        DhtSettings(
            run_id=link.run_id,
            identity=home.identity,
            folder=home.folder,
            listen=[f"/ip4/0.0.0.0/tcp/{settings.dht_port or kept.get('dht_port', 0)}"],
            announce=[],
            bootstrap=list(dict.fromkeys([*link.dht_addresses, *cached_addresses(known)])),
        )
    )
    closing.push_async_callback(tasks.close)
    tasks.start(dht.run(), "dht")
    addresses = await dht.started()
    address = f"{settings.host}:{port}"
    directory = Directory(dht, home.identity, link.run_id)

    def record() -> Statement:
        return directory.seal_record(address, certificate.certificate_der, settings.name, addresses)

    tasks.start(directory.publish_forever(record), "publish")
    tasks.start(directory.refresh_forever(), "refresh")
    tasks.start(directory.cache_forever(known), "cache")
    ports = {"port": port, "dht_port": int(addresses[0].split("/")[4])}
    return Network(folder, address, ports, directory, channels, store, blobs, server)


async def _take_part(settings: NodeSettings, home: Home, tasks: Tasks, network: Network, closing: AsyncExitStack) -> None:
    """Learn the run from its coordinator, start the workers and the participant's loops."""
    link, me = settings.join, home.identity
    coordinator = CoordinatorLink(link, network.directory, network.channels)
    manifest, canonical = await tasks.race(coordinator.manifest())
    write_atomically(network.folder / "manifest.json", canonical)
    pool = _worker_pool(settings, home, network, manifest)
    closing.push_async_callback(pool.close)
    await pool.open()
    chain = ChainFile(network.folder / "chain.db", manifest, link.coordinator)
    stages = range(manifest.model.stages)
    exchange = Exchange(manifest, stages, network.store, network.directory, network.channels, me.peer)
    prover = _prover(settings, home, manifest)
    if prover is not None:
        rpc.add_AttestorServicer_to_server(prover, network.server)
    await network.server.start()
    participant = Participant(me, manifest, network.store, chain, coordinator, exchange, pool, tasks, prover)
    challenger = Challenger(manifest, network.directory, network.channels)
    app = create_node_app(
        participant,
        network.directory,
        network.blobs,
        challenger,
        settings.name,
        network.address,
        lambda: coordinator.connected,
    )
    runner, url = await serve_http(app, settings.api)
    closing.push_async_callback(runner.cleanup)
    home.announce(role="node", api=url, run_id=link.run_id.hex(), name=settings.name, **network.ports)
    log.info("%s is %s, serving on %s, API %s", settings.name, me.peer, network.address, url)
    closing.push_async_callback(participant.leave, GOODBYE_SECONDS)
    tasks.start(participant.watch(), "watch")
    tasks.start(participant.run_workers(), "supervise")
    tasks.start(participant.beat(), "beat")
    if prover is not None:
        tasks.start(participant.prove(), "prove")


def _prover(settings: NodeSettings, home: Home, manifest: Manifest) -> Prover | None:
    """Where the run asks for evidence: what this machine can give. A machine without any is refused by the coordinator."""
    kinds = manifest.attestation.kinds
    if not kinds:
        return None
    version = metadata.version("dilocox")
    try:
        kind, attester = choose_attester(kinds, version, settings.simulated_measurement, settings.collateral)
    except AttestationError as error:
        return Prover(home.identity, manifest, kinds[0], no_attester(error))
    if kind != SIMULATED and not home.identity_is_new:
        raise LocalError(
            "this run admits only keys made inside the measured process, and this folder's key is older. Use an empty --home."
        )
    return Prover(home.identity, manifest, kind, attester)


def _worker_pool(settings: NodeSettings, home: Home, network: Network, manifest: Manifest) -> WorkerPool:
    cuda = count_cuda_devices()
    workers = count_workers(settings.devices, cuda, manifest)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // workers)

    def environment(socket: str) -> dict[str, str]:
        return WorkerSettings(
            socket=socket,
            manifest=network.folder / "manifest.json",
            blobs=network.store.folder,
            stages=network.folder / "stages",
            cluster=home.identity.peer,
            devices="cuda" if cuda else "cpu",
            threads=threads,
            codec_cpus=settings.codec_cpus,
        ).environment()

    return WorkerPool(home.folder, workers, environment)
