"""`dilocox coordinator`: composition root. One asyncio process plus its DHT child."""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from coordinator.log import InputLog
from coordinator.service import CoordinatorService
from protocol import views
from protocol.attestation import Appraiser
from protocol.crypto import Identity
from protocol.errors import ConfigError
from protocol.ids import JoinLink
from protocol.manifest import Manifest
from protocol.messages import Statement, seal
from protocol.pb import messages_pb2 as pb
from protocol.pb import services_pb2_grpc as rpc
from protocol.transport import tls
from protocol.transport.chain_file import ChainFile
from protocol.transport.dht import Dht, DhtSettings
from protocol.transport.home import Home
from protocol.transport.http import add_run_routes, create_app, json_response, serve_http
from protocol.transport.presence import Directory, cached_addresses
from protocol.transport.rpc import create_server
from protocol.transport.tasks import Tasks

__all__ = ["CoordinatorSettings", "run_coordinator"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorSettings:
    manifest: Manifest
    owner: Identity
    home: Path
    host: str
    """Address other machines reach this one by."""
    port: int
    dht_port: int
    api: str
    """host:port of the HTTP API."""


async def run_coordinator(settings: CoordinatorSettings, announce: Callable[[JoinLink], None], appraise: Appraiser) -> None:
    """Serve the run until SIGTERM or SIGINT. `announce` gets the join link once others can use it; `appraise` judges evidence."""
    home = Home(settings.home)
    manifest = settings.manifest
    if settings.owner.key.hex() != manifest.run.owner:
        raise ConfigError("the owner key beside the run file is not the one that run.owner names")
    folder = home.run_folder(manifest.run_id)
    certificate = tls.load_or_create(home.folder)
    # A restart keeps its ports: the join link and the peers' records name them.
    kept = {key: port for key, port in home.remembered().items() if key in ("port", "dht_port")}
    server, port = await create_server(f"0.0.0.0:{settings.port or kept.get('port', 0)}", certificate)
    known = folder / "dht-peers.json"
    dht = Dht(
        DhtSettings(
            run_id=manifest.run_id,
            identity=home.identity,
            folder=home.folder,
            listen=[f"/ip4/0.0.0.0/tcp/{settings.dht_port or kept.get('dht_port', 0)}"],
            announce=[],
            # A coordinator that restarts alone would be a DHT of its own: its peers have forgotten it meanwhile.
            bootstrap=cached_addresses(known),
        )
    )
    directory = Directory(dht, home.identity, manifest.run_id)
    chain = ChainFile(folder / "chain.db", manifest, home.identity.peer)
    signed = seal(settings.owner, pb.KIND_MANIFEST, manifest.run_id, manifest.canonical_bytes())
    service = CoordinatorService(home.identity, chain, InputLog(folder / "inputs.db", manifest), signed.envelope, appraise)
    tasks = Tasks()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, tasks.stop)
    runner: web.AppRunner | None = None
    try:
        tasks.start(dht.run(), "dht")
        addresses = reachable(await dht.started(), settings.host)
        dht_port = int(addresses[0].split("/")[4])

        def record() -> Statement:
            service.record = directory.seal_record(
                f"{settings.host}:{port}", certificate.certificate_der, "coordinator", addresses
            )
            return service.record

        record()
        rpc.add_CoordinatorServicer_to_server(service, server)
        await server.start()
        tasks.start(service.run(), "rounds")
        tasks.start(directory.publish_forever(record), "publish")
        tasks.start(directory.refresh_forever(), "refresh")
        tasks.start(directory.cache_forever(known), "cache")
        link = JoinLink(manifest.run_id, home.identity.peer, tuple(addresses))
        runner, url = await serve_http(_api(service, directory), settings.api)
        home.announce(role="coordinator", api=url, port=port, dht_port=dht_port, link=str(link), run_id=manifest.run_id.hex())
        announce(link)
        await tasks.wait()
    finally:
        if runner is not None:
            await runner.cleanup()
        await server.stop(grace=1.0)
        await tasks.close()
        chain.close()


def reachable(addresses: list[str], host: str) -> list[str]:
    """libp2p lists every interface; the join link wants the one that others reach."""
    first = next((address for address in addresses if f"/{host}/" in address), addresses[0])
    parts = first.split("/")
    kind = "ip4" if host.replace(".", "").isdigit() else "dns4"
    return ["/".join(["", kind, host, *parts[3:]])]


def _api(service: CoordinatorService, directory: Directory) -> web.Application:
    registry = CollectorRegistry()
    Gauge("dilocox_round_current", "The open round", registry=registry).set_function(lambda: service.state.head.round)
    Gauge("dilocox_peers_present", "Peers heard from", registry=registry).set_function(
        lambda: sum(entry.present for entry in service.presence().peers)
    )
    commits = Counter("dilocox_rounds", "Rounds closed", registry=registry)
    commits.inc(service.chain.length)
    app = create_app(registry, lambda: None)

    async def status(request: web.Request) -> web.Response:
        state = service.state
        return json_response(
            {
                "role": "coordinator",
                "peer": service.identity.peer,
                "run": views.run(service.chain.manifest),
                "round": state.head.round,
                "finished": state.head.finished,
                "phase": "finished" if state.head.finished else "voting" if state.ballot_at else "collecting",
                "contributions": len(state.contributions),
                "receipts": len(state.receipts),
                "roster": sorted(state.head.roster),
                "absent": sorted(state.absent),
                "refused": views.exclusions(state.refusals),
            }
        )

    def peers() -> list[views.View]:
        records = {peer: record.body for peer, record in directory.records.items()}
        return views.peers(service.chain.head, service.presence(), records, service.identity.peer)

    add_run_routes(app, service.chain, peers)
    app.router.add_get("/v1/status", status)
    return app
