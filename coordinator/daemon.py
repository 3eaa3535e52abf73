"""`dilocox coordinator`: composition root. One asyncio process, and its DHT child where one is wanted."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry

from dilocox.coordinator.frontend import CoordinatorFrontend
from dilocox.coordinator.kv_store import StorePlace
from dilocox.coordinator.leadership import Leadership, campaign, lead_alone, write_down_store
from dilocox.coordinator.service import Contacts, CoordinatorService
from dilocox.coordinator.shared_log import Candidate, DeposedError, SharedLog
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink, Way
from dilocox.protocol.member.node_status import FEWER_MACHINES, REMINDER_SECONDS
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.run_lint import Level, initial_state
from dilocox.protocol.run.tensors import trained_count
from dilocox.protocol.wire.attestation import Appraiser
from dilocox.protocol.wire.messages import seal
from dilocox.transport.limits.rate_limits import Rates
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.blob_server import PeerService, Served, ServedRun
from dilocox.transport.net.network import Listen, Network, open_network
from dilocox.transport.notify.event_sinks import open_event_log
from dilocox.transport.notify.notify import Notice
from dilocox.transport.process.disk_pressure import restart_when_writable
from dilocox.transport.process.tasks import Stopped, Tasks
from dilocox.transport.store.appointment_bundle import take_over
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import ExposedCorpus, corpus_in, weights_shelf
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views.api_listener import ApiListener, open_listener
from dilocox.views.health import answers_of_coordinator
from dilocox.views.http import add_run_routes, create_app
from dilocox.views.metrics import RunMetrics

__all__ = ["ComputeState", "CoordinatorSettings", "create_coordinator_app", "make_link", "remind", "run_coordinator"]

log = logging.getLogger(__name__)

AT_ONCE_PARAMETERS = 250_000_000
"""Most for which a start waits until their initial state is compared: two or three seconds of one core."""


class ComputeState(Protocol):
    """Compute the initial state's root, on at most so many threads; end with what `progress` raises. Blocking."""

    def __call__(self, model: Model, progress: Callable[[int], None], threads: int | None = None) -> bytes: ...


@dataclass(frozen=True)
class CoordinatorSettings:
    manifest: Manifest
    owner: Identity | None
    """Key that signs the manifest. None: the run folder, or the appointment bundle, contains the signed manifest."""
    key: Path
    """The owner's key file, which need not be there."""
    handover: Path | None
    """The owner's appointment bundle, if it appointed this coordinator."""
    signer: str
    """Peer id of who signs the commits, by run file or handover."""
    home: Path
    name: str
    """Name shown to people."""
    listen: Listen
    api: str
    """host:port of the HTTP API."""
    data: BlobStore | None
    """Store with the run's corpus, for nodes that have none. None: this machine has no copy."""
    weights: BlobStore | None
    """Store with the run's imported weights. None: this machine has no copy, or the run has none."""
    upload: Rates
    """Most that is uploaded."""
    notice: Notice | None
    """Receiver of notable events."""
    store: StorePlace | None
    """Store that several coordinators share. None: this coordinator is the only one."""

    @property
    def identity(self) -> Identity | None:
        """Return the identity that serves the run: its owner, if the owner signs commits itself. None: the key file is in
        `home`."""
        return self.owner if self.owner is not None and self.signer == self.owner.peer else None


async def run_coordinator(
    settings: CoordinatorSettings, announce: Callable[[JoinLink], None], appraise: Appraiser, compute: ComputeState
) -> None:
    """Serve the run until SIGTERM or SIGINT. `announce` gets the join link once others can use it; `appraise` judges evidence;
    `compute` verifies the initial state that the manifest names, before the run begins."""
    manifest, owner = settings.manifest, settings.owner
    if owner is not None and owner.peer != manifest.owner:
        raise ConfigError("the owner key beside the run file does not match run.owner")
    home = DataDirectory(settings.home, settings.identity)
    shared_before = write_down_store(home.run_folder(manifest.run_id), settings.store)
    async with open_listener(settings.api, home, manifest.run_id, settings.name) as door:

        async def live(stopped: asyncio.Event) -> None:
            nonlocal shared_before
            while not stopped.is_set():
                try:
                    await _live(settings, home, announce, appraise, compute, stopped, door, shared_before)
                    return
                except Stopped:
                    return
                except DeposedError as error:
                    log.warning("this coordinator lost its leadership and is a standby now: %s", error)
                    shared_before = True

        await restart_when_writable(home.folder, live, door.no_room)


@dataclass(frozen=True)
class Daemon:
    """Parts of this coordinator from its start on, until a write fails."""

    settings: CoordinatorSettings
    home: DataDirectory
    door: ApiListener
    tasks: Tasks
    closing: AsyncExitStack

    @property
    def folder(self) -> Path:
        """Everything of this run."""
        return self.home.run_folder(self.settings.manifest.run_id)

    @property
    def facts(self) -> dict[str, str]:
        return {"run_id": self.settings.manifest.run_id.hex(), "name": self.settings.name}


async def _live(
    settings: CoordinatorSettings,
    home: DataDirectory,
    announce: Callable[[JoinLink], None],
    appraise: Appraiser,
    compute: ComputeState,
    stopped: asyncio.Event,
    door: ApiListener,
    shared_before: bool,
) -> None:
    """`run_coordinator`, until a write fails."""
    tasks = Tasks()
    tasks.stop_with(stopped)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(tasks.close)
        daemon = Daemon(settings, home, door, tasks, closing)
        chain, signed = await _open_run(daemon, compute)
        served = await _open_network(daemon, chain)

        def tell_link(others: Sequence[Candidate] = ()) -> None:
            link = make_link(settings.manifest, home, served.network, others)
            served.desk.publish_link(link)
            ports = served.network.endpoint.ports
            home.announce(role="coordinator", api=door.url, link=str(link), **daemon.facts, **ports)
            announce(link)

        office = await _serve_as_leader(daemon, chain, served, tell_link, shared_before)
        service, events = await _open_service(daemon, chain, signed, appraise, served, office)
        await _serve(daemon, service, events, served, office)
        if office.log is None:
            tell_link()
        await tasks.wait()


async def _open_run(daemon: Daemon, compute: ComputeState) -> tuple[ChainFile, pb.Envelope]:
    """Return the chain and the signed manifest, where we sign the run's commits. Raises LocalError where another does."""
    manifest = daemon.settings.manifest
    daemon.door.show_wait("reading the chain")
    chain = await asyncio.to_thread(ChainFile, daemon.folder / "chain.db", manifest, views.describe)
    daemon.closing.callback(chain.close)
    signed = await asyncio.to_thread(_take_office, daemon.settings, daemon.home, chain)
    if not chain.length and manifest.model.seed_state is not None:  # else the first commit's clusters made it
        daemon.door.show_wait("computing the initial state")
        await verify_initial_state(manifest.model, compute, daemon.tasks, daemon.closing)
    return chain, signed


@dataclass(frozen=True)
class Server:
    """Server of this coordinator, and its parts before this coordinator leads."""

    desk: CoordinatorFrontend
    network: Network
    traffic: Traffic


async def _open_network(daemon: Daemon, chain: ChainFile) -> Server:
    settings, desk, traffic = daemon.settings, CoordinatorFrontend(), Traffic(daemon.settings.upload)
    network = await open_network(
        daemon.home,
        settings.manifest.run_id,
        settings.listen,
        settings.name,
        daemon.tasks,
        daemon.closing,
        on_record=desk.learn_own_record,
        traffic=traffic,
        publish=settings.store is None,
    )
    rpc.add_CoordinatorServicer_to_server(desk, network.server)
    _serve_data(settings, daemon.home, network, chain, traffic)
    return Server(desk, network, traffic)


async def _serve_as_leader(
    daemon: Daemon,
    chain: ChainFile,
    served: Server,
    tell_link: Callable[[Sequence[Candidate]], None],
    shared_before: bool,
) -> Leadership:
    """Return when this coordinator leads: at once where it is the only one."""
    settings, network, desk = daemon.settings, served.network, served.desk
    if settings.store is None:
        return await lead_alone(daemon.home, chain, network, desk)
    await daemon.door.wait("it reads the store")
    return await campaign(
        settings.store,
        settings.name,
        daemon.home,
        chain,
        network,
        desk,
        daemon.tasks,
        daemon.closing,
        partial(daemon.door.show_wait, stands_by=True),
        tell_link,
        shared_before,
    )


async def _open_service(
    daemon: Daemon, chain: ChainFile, signed: pb.Envelope, appraise: Appraiser, served: Server, office: Leadership
) -> tuple[CoordinatorService, EventLog]:
    """Continue the open round, and serve it."""
    settings, home = daemon.settings, daemon.home
    run, peer = settings.manifest.run.name, home.identity.peer
    about = {**daemon.facts, "run": run, "peer": peer, "role": "coordinator"}
    events = await open_event_log(daemon.folder, home.folder, settings.notice, about, daemon.tasks, daemon.closing)
    contacts = Contacts(served.network.callers, served.network.directory)
    service = CoordinatorService(home.identity, chain, signed, appraise, rounds=office.log, contacts=contacts, events=events)
    service.resume()
    office.open(service)
    return service, events


async def _serve(daemon: Daemon, service: CoordinatorService, events: EventLog, served: Server, office: Leadership) -> None:
    """Start the loops, the page and the API."""
    tasks, door, name = daemon.tasks, daemon.door, daemon.settings.name
    tasks.start(service.driver.run(), "rounds")
    tasks.start(service.run(), "liveness")
    tasks.start(remind(service), "remind")
    await door.show(create_coordinator_app(service, events, served.traffic, name, office.log))
    daemon.closing.push_async_callback(door.wait, "it ends")
    log.info("%s is serving on %s, page and API %s", name, served.network.address, door.url)


async def verify_initial_state(model: Model, compute: ComputeState, tasks: Tasks, closing: AsyncExitStack) -> None:
    """Compare the initial state that a manifest names with what its model and seed make; a large model's on one thread, while the
    run is served. Raises ConfigError, then or in `tasks`, where they differ."""
    closed = threading.Event()
    closing.callback(closed.set)

    def progress(count: int) -> None:
        if closed.is_set():
            raise Stopped

    def compare(threads: int | None = None) -> None:
        found = initial_state(model, compute(model, progress, threads).hex())
        if found.level is Level.WRONG:
            raise ConfigError(f"{found.about} {found.says}. In the run file, {found.do}")

    if (parameters := trained_count(model)) <= AT_ONCE_PARAMETERS:
        await tasks.race(asyncio.to_thread(compare))
    else:
        log.info(
            "computing the initial state of %s parameters in the background; if it differs, this coordinator ends",
            f"{parameters:,}",
        )
        tasks.start(asyncio.to_thread(compare, 1), "initial state")


async def remind(service: CoordinatorService) -> None:
    """Log which setting decides how many clusters begin the run, while it waits for them."""
    while not service.state.head.round:
        await asyncio.sleep(REMINDER_SECONDS)
        if not service.state.head.round:
            log.warning("%s: %s", round_machine.why_open(service.state), FEWER_MACHINES)


def make_link(manifest: Manifest, home: DataDirectory, network: Network, others: Sequence[Candidate]) -> JoinLink:
    """Return the join link to this coordinator and to the standbys with its key; the next version of its record names
    them, too."""
    digest, dht = sha256(network.endpoint.certificate.certificate_der), list(network.endpoint.dht_addresses)
    ways = tuple(Way(other.address, bytes.fromhex(other.certificate)) for other in others)
    dht += [address for other in others for address in other.dht]
    network.directory.share_key_with(ways)
    return JoinLink(manifest.run_id, home.identity.peer, network.address, digest, tuple(dht), ways)


def _serve_data(
    settings: CoordinatorSettings, home: DataDirectory, network: Network, chain: ChainFile, traffic: Traffic
) -> None:
    digest = bytes.fromhex(settings.manifest.data.digest)
    # Its own store stays empty: no peer uploads to a coordinator.
    service = PeerService(BlobStore(home.folder / "blobs"), network.callers, traffic)
    shelves: list[Served] = []
    if settings.weights is not None:
        shelves.append(weights_shelf(settings.weights, settings.manifest.model.imported))
    if settings.data is None:
        log.warning(
            "the run's data %s are not on this disk: nodes fetch them from each other, or use a copy",
            settings.manifest.data.name,
        )
    else:
        shelves.append(ExposedCorpus(settings.data, digest))
        corpus = corpus_in(settings.data, digest)
        missing = [blob for blob, _ in corpus.blobs if blob not in settings.data] if corpus is not None else [digest]
        if missing:
            log.warning(
                "%d files of the run's data are missing in %s: nodes cannot fetch them here", len(missing), settings.data.folder
            )

    def is_member(peer: str) -> bool:
        return peer in chain.head.cluster_by_peer

    service.serve(ServedRun(may_read=settings.manifest.may_read, is_member=is_member, shelves=tuple(shelves)))
    rpc.add_PeerServicer_to_server(service, network.server)


def _take_office(settings: CoordinatorSettings, home: DataDirectory, chain: ChainFile) -> pb.Envelope:
    """Return the signed manifest, if this identity signs the run's commits now. Blocking. Raises LocalError if another one
    does."""
    manifest, me = settings.manifest, home.identity.peer
    try:
        if settings.handover is not None and take_over(settings.handover, chain):
            log.warning("the owner's appointment replaces some commits of this disk: they were moved to %s", chain.path)
    except RemoteError as error:
        raise ConfigError(f"cannot follow {settings.handover}: {error}") from error
    unsigned = chain.head.coordinator == manifest.owner or chain.signed_manifest is None
    if settings.owner is None and settings.handover is None and unsigned and manifest.owner != me:
        raise ConfigError(
            f"{settings.key} is missing, and only the owner's key can start this run. Copy it here, beside the "
            "run file, or make a new run with `dilocox init`."
        )
    if settings.owner is not None:
        signed = seal(settings.owner, pb.KIND_MANIFEST, manifest.run_id, manifest.canonical_bytes())
        chain.keep_signed_manifest(signed.envelope)
    if chain.head.coordinator != me:
        raise ConfigError(
            f"round {chain.length} is signed by {chain.head.coordinator}, but the identity in {home.folder} is "
            f"{me}. Use --home of that identity, or let the owner run `dilocox owner appoint` for this one."
        )
    if (kept := chain.signed_manifest) is None:
        raise ConfigError(
            "no owner key beside the run file, and no signed manifest on this disk: start once with the key, or with RUN.chain"
        )
    return kept


def _last_rows(chain: ChainFile) -> list[views.View]:
    rows: list[views.View] = json.loads(chain.rows(max(0, chain.length - views.USUAL)))
    return rows


def create_coordinator_app(
    service: CoordinatorService, events: EventLog, traffic: Traffic, name: str, shared: SharedLog | None = None
) -> web.Application:
    """`shared`: where there are several coordinators."""

    def coordinators() -> list[views.View]:
        places = shared.places if shared is not None else ()
        return [{"name": at.name, "address": at.address, "leads": shared is not None and at == shared.leader} for at in places]

    def peers_by_state() -> dict[str, int]:
        roster, absent = service.state.head.roster.keys(), service.state.absent
        return {
            "roster": len(roster),
            "heard": len(roster - absent),
            "absent": len(roster & absent),
            "claiming": len(service.state.gathered.claims.keys() - roster),
        }

    registry = CollectorRegistry()
    metrics = RunMetrics("coordinator", service.chain, events, peers_by_state, traffic)
    registry.register(metrics)

    async def status() -> views.View:
        state = service.state
        phase, why, still = round_machine.phase_of(state), round_machine.why_open(state), state.stands_still
        return {
            "role": "coordinator",
            "name": name,
            "peer": service.identity.peer,
            "run": views.run(service.chain.manifest),
            "round": state.head.round,
            "finished": state.head.finished,
            "phase": phase,
            "why": why,
            "answers": answers_of_coordinator(phase, still, why),
            "contributions": len(state.gathered.contributions),
            "receipts": len(state.gathered.receipts),
            "roster": sorted(state.head.roster),
            "absent": sorted(state.absent),
            "refused": views.exclusions(state.gathered.refusals),
            "network": views.network(traffic),
            "coordinators": coordinators(),
            "seconds_left": views.seconds_left(service.chain.manifest, state.head, _last_rows(service.chain), still),
        }

    async def peers() -> list[views.View]:
        records = {peer: record.body for peer, record in service.records.items()}
        return views.peers(service.chain.manifest, service.chain.head, service.liveness.view(), records, service.identity.peer)

    app = create_app(registry, status, metrics.refresh)
    add_run_routes(app, service.chain, peers, events)
    return app
