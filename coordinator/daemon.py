"""`dilocox coordinator`: composition root. One asyncio process, and its DHT child where one is wanted."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge

from dilocox.coordinator.service import CoordinatorService
from dilocox.protocol import round
from dilocox.protocol.attestation import Appraiser
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.network import Listen, open_network
from dilocox.transport.room import while_there_is_room
from dilocox.transport.tasks import Tasks
from dilocox.views import rows as views
from dilocox.views.http import add_run_routes, create_app, json_response, serve_http
from dilocox.views.waiting import waiting_page

__all__ = ["CoordinatorSettings", "run_coordinator"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorSettings:
    manifest: Manifest
    owner: Identity
    home: Path
    listen: Listen
    api: str
    """host:port of the HTTP API."""


async def run_coordinator(settings: CoordinatorSettings, announce: Callable[[JoinLink], None], appraise: Appraiser) -> None:
    """Serve the run until SIGTERM or SIGINT. `announce` gets the join link once others can use it; `appraise` judges evidence."""
    manifest = settings.manifest
    if settings.owner.key.hex() != manifest.run.owner:
        raise ConfigError("the owner key beside the run file is not the one that run.owner names")
    home = DataDirectory(settings.home, settings.owner if manifest.coordinator == settings.owner.peer else None)
    if home.identity.peer != manifest.coordinator:
        home.close()
        raise ConfigError(
            f"run.coordinator is {manifest.coordinator}, and the identity in {home.folder} is {home.identity.peer}. "
            "Start it with the --home of that identity, or name this one in a new run."
        )
    page = waiting_page(settings.api, home.remembered)
    await while_there_is_room(home.folder, lambda stopped: _live(settings, home, announce, appraise, stopped), page)


async def _live(
    settings: CoordinatorSettings,
    home: DataDirectory,
    announce: Callable[[JoinLink], None],
    appraise: Appraiser,
    stopped: asyncio.Event,
) -> None:
    """`run_coordinator`, until a write fails."""
    manifest, folder = settings.manifest, home.run_folder(settings.manifest.run_id)
    signed = seal(settings.owner, pb.KIND_MANIFEST, manifest.run_id, manifest.canonical_bytes())
    tasks = Tasks()
    tasks.stop_with(stopped)
    async with AsyncExitStack() as closing:
        chain = ChainFile(folder / "chain.db", manifest, views.describe)
        closing.callback(chain.close)
        service = CoordinatorService(home.identity, chain, signed.envelope, appraise)
        network = await open_network(
            home,
            manifest.run_id,
            settings.listen,
            "coordinator",
            tasks,
            closing,
            on_record=service.learn_own_record,
        )
        service.callers, service.know = network.callers, network.directory.know
        rpc.add_CoordinatorServicer_to_server(service, network.server)
        await network.server.start()
        tasks.start(service.driver.run(), "rounds")
        tasks.start(service.run(), "liveness")
        digest = sha256(network.certificate.certificate_der)
        link = JoinLink(manifest.run_id, home.identity.peer, network.address, digest, network.dht_addresses)
        runner, url = await serve_http(_api(service), settings.api)
        closing.push_async_callback(runner.cleanup)
        home.announce(role="coordinator", api=url, link=str(link), run_id=manifest.run_id.hex(), **network.ports)
        announce(link)
        await tasks.wait()


def _api(service: CoordinatorService) -> web.Application:
    registry = CollectorRegistry()
    Gauge("dilocox_round_current", "The open round", registry=registry).set_function(lambda: service.state.head.round)
    Gauge("dilocox_peers_present", "Peers heard from", registry=registry).set_function(
        lambda: sum(entry.present for entry in service.liveness.view().peers)
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
                "phase": round.phase_of(state),
                "why": round.why_open(state),
                "contributions": len(state.gathered.contributions),
                "receipts": len(state.gathered.receipts),
                "roster": sorted(state.head.roster),
                "absent": sorted(state.absent),
                "refused": views.exclusions(state.gathered.refusals),
            }
        )

    async def peers() -> list[views.View]:
        records = {peer: record.body for peer, record in service.records.items()}
        return views.peers(service.chain.head, service.liveness.view(), records, service.identity.peer)

    add_run_routes(app, service.chain, peers)
    app.router.add_get("/v1/status", status)
    return app
