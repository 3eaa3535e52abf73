"""`dilocox node`: composition root. Joins a run, supervises the stage workers, leaves cleanly."""

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from dilocox.node.api.server import create_node_app
from dilocox.node.attendance import Attendance
from dilocox.node.attest.attesters import choose_attester, no_attester
from dilocox.node.attest.prover import Challenger, Prover
from dilocox.node.auditor import Auditor, Lies
from dilocox.node.boxes.follower import Follower
from dilocox.node.boxes.lead import BoxAdmission
from dilocox.node.boxes.link import CLUSTER_LINK, ClusterLink, address_on, exposed, load_or_create_secret
from dilocox.node.boxes.team import Team
from dilocox.node.check import of_room
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.data.check import check_corpus, check_own, must_bring_own
from dilocox.node.data.supply import Supply
from dilocox.node.exchange import Exchange
from dilocox.node.forks import check_forks, follow_owner
from dilocox.node.generations import Generations
from dilocox.node.holding import Holding
from dilocox.node.imported import import_state
from dilocox.node.machine import Machine, this_machine
from dilocox.node.own import OwnStatements
from dilocox.node.participant import Participant, Workers
from dilocox.node.place import MANIFEST, PeerSettings, Place, keep_manifest, make_holding, open_chain, run_peer
from dilocox.node.starts import Starts
from dilocox.node.worker_settings import WorkerSettings
from dilocox.node.workers import LOOPBACK, Launch, WorkerPool
from dilocox.protocol import member, phase
from dilocox.protocol.attestation import SIMULATED, AttestationError
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import LocalError
from dilocox.protocol.findings import Level
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.manifest import Manifest
from dilocox.transport.archive.source import ArchivePlace, ArchiveSource
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import Shelf, last_built, named_store
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.event_log import EVENTS, EventLog
from dilocox.transport.files import write_atomically
from dilocox.transport.hours import Hours
from dilocox.transport.notify import Notifier
from dilocox.transport.room import lack_of_room
from dilocox.transport.tasks import Tasks
from dilocox.transport.watch import watch
from dilocox.views import rows as views
from dilocox.views.http import serve_http

__all__ = ["NodeSettings", "run_node"]

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""How long a leaving node tries to tell the coordinator."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings(PeerSettings):
    devices: int | None
    """How many stage workers; None: one per CUDA device, else one."""
    threads: int | None
    """CPU threads per worker; None: cores divided by workers."""
    codec_cpus: tuple[int, ...]
    simulated_measurement: Path | None
    """File with the measurement that simulated evidence names, in hexadecimal."""
    collateral: Path | None
    """File with the collateral that verifiers of this machine's TDX quotes need."""
    upload_copies: int | None
    """How often each payload may leave this machine; None: as often as it is asked for."""
    data: dict[str, Path]
    """Where corpora lie on this machine, by name."""
    archive: ArchivePlace | None
    """Asked for what no peer serves."""
    begin: Path | None
    """A Hugging Face folder with the model that the run begins with; None: it is fetched."""
    step_seconds: float
    """An inner step takes at least this long."""
    checkpoint_every: int
    """Boundaries are written complete in rounds that this divides."""
    boxes: int = 1
    """Of our cluster, which we lead."""
    cluster: ClusterLink | None = None
    """Of the cluster whose box we are; None: our own."""
    interface: str | None = None
    """On which the boxes of a cluster exchange tensors."""
    private: Path | None = None
    """Where our own corpus lies; None: the run's data are what we train on."""
    hours: Hours | None = None
    """Of the day, in which this node takes part; None: always."""
    box_patience: float = 60.0
    """Seconds for which a box of our cluster that is gone is waited for; then the others share out its stages."""


async def run_node(settings: NodeSettings) -> None:
    """Take part until SIGTERM or SIGINT, then leave. Raises LocalError when this node cannot take part."""
    await run_peer(settings, partial(_take_part, settings))


async def _take_part(
    settings: NodeSettings, home: DataDirectory, tasks: Tasks, place: Place, files: AsyncExitStack, closing: AsyncExitStack
) -> None:
    """Learn the run from its coordinator, start the workers and the participant's loops. `files` is closed after every task."""
    machine = await asyncio.to_thread(this_machine, settings.devices)
    link, me, network = settings.join, home.identity, place.network
    if settings.interface and (warning := exposed(settings.interface, address_on(settings.interface))):
        log.warning("%s", warning)
    coordinator = CoordinatorLink(link, network.directory, place.channels)
    manifest, appointment = await tasks.race(coordinator.run())
    if settings.boxes == 1 and settings.cluster is None:
        for finding in await asyncio.to_thread(lambda: [*of_room(manifest, home.folder, settings.devices)]):
            if finding.level is not Level.FINE:
                log.warning("%s: %s", finding.about, finding.says)
    must_bring_own(manifest, settings.private)
    own_text = await asyncio.to_thread(last_built, settings.private) if settings.private is not None else b""
    data = await asyncio.to_thread(_open_data, settings, home, manifest)
    keep_manifest(place, manifest)
    if not settings.data:  # what an operator named is not for others, unless they find it with the coordinator
        place.blobs.shelves = (Shelf(data, bytes.fromhex(manifest.data.digest)),)
    pool = _worker_pool(settings, machine, home, place, data, own_text)
    closing.push_async_callback(pool.close)
    await pool.open()
    chain = await asyncio.to_thread(ChainFile, place.folder / "chain.db", manifest, views.describe)
    files.callback(chain.close)
    await tasks.race(follow_owner(chain, link.coordinator, appointment, coordinator.commit))
    await asyncio.to_thread(check_forks, chain)
    if settings.begin is not None and (manifest.model.lora is not None or not chain.length):
        await tasks.race(import_state(manifest.model, place.folder / MANIFEST, settings.begin, place.store, home.folder))
    open_chain(place, chain, tasks)
    network.directory.know(chain.parties)
    events = await asyncio.to_thread(EventLog, place.folder / EVENTS)
    files.callback(events.close)
    tasks.start(events.run(), "events")
    if settings.notice is not None:
        about = {"name": settings.name, "run": manifest.run.name, "peer": me.peer, "role": "node"}
        tasks.start(Notifier(settings.notice, events, about).run(), "notify")
    own = OwnStatements(place.folder / "own.db", manifest.run_id)
    files.callback(own.close)
    stages = range(manifest.model.stages)
    archive = ArchiveSource(settings.archive, manifest.run_id) if settings.archive is not None else None
    states = BlobStore(place.folder / "audits")
    exchange, supplies, audits = (
        Exchange(
            manifest, stages, store, network.directory, place.channels, me.peer, place.heads, lambda: chain.head.roster, archive
        )
        for store in (place.store, data, states)
    )
    starts = Starts(manifest, chain, place.store, exchange)
    lead = settings.cluster.lead.coordinator if settings.cluster else ""
    holding = await asyncio.to_thread(make_holding, place, home, manifest, chain, settings.upload_copies, lead)
    place.blobs.keeper = holding
    prover = prover_for(settings, home, manifest)
    place.attestor.prover = prover
    crew = Employed(settings, machine, home.folder, me, manifest, place, chain, exchange, starts, holding, pool, tasks)
    participant = Participant(
        me, manifest, chain, own, coordinator, network.directory, exchange, tasks, events, prover, crew.workers, lead
    )
    supply = Supply(manifest, data, supplies, lambda: chain.parties, participant.tell, bool(settings.data))
    challenger = Challenger(manifest, network.directory, place.channels)
    attendance = Attendance(participant, tasks, place.folder, settings.hours)
    await attendance.look()
    app = create_node_app(
        participant,
        attendance,
        home.api_key(),
        network.directory,
        place.blobs,
        challenger,
        settings.name,
        network.address,
        network.reach,
        coordinator,
    )
    runner, url = await serve_http(app, settings.api)
    closing.push_async_callback(runner.cleanup)
    home.announce(role="node", api=url, run_id=link.run_id.hex(), name=settings.name, **network.ports)
    log.info("%s is %s, serving on %s, page and API %s", settings.name, me.peer, network.address, url)
    closing.push_async_callback(place.lead.close)
    closing.push_async_exit(partial(_leave, participant, attendance))
    tasks.start(participant.watch(), "watch")
    tasks.start(participant.offer(), "offer")
    tasks.start(attendance.keep(), "hours")
    tasks.start(_train(supply, participant, attendance, tasks, settings.private, own_text), "supervise")
    tasks.start(participant.beat(), "beat")
    tasks.start(watch(home.folder, participant.emit, lambda: coordinator.connected), "watch machine")
    tasks.start(holding.supply(starts.newest_snapshot), "supply holders")
    lies = Lies(home.folder, place.folder / MANIFEST, data, place.store, states, bool(settings.data))
    tasks.start(Auditor(participant, machine, lies, audits, supplies).run(), "audit")
    if prover is not None:
        tasks.start(participant.prove(), "prove")


def _open_data(settings: NodeSettings, home: DataDirectory, manifest: Manifest) -> BlobStore:
    """Where the run's corpus lies, or will lie. What an operator named is checked here, before anything is claimed. Blocking."""
    if named_store(manifest.data, settings.data) is None:
        return BlobStore(home.folder / "data")
    folder = settings.data[manifest.data.name]
    log.info("checking the run's data in %s", folder)
    return check_corpus(manifest, folder)


async def _train(
    supply: Supply, participant: Participant, attendance: Attendance, tasks: Tasks, private: Path | None, own_text: bytes
) -> None:
    corpus = await supply.begin()
    if private is not None:
        await asyncio.to_thread(check_own, participant.manifest, corpus, private, own_text)
    reading = partial(phase.reading, participant.manifest, participant.cluster)
    following = supply.follow(
        corpus, lambda: reading(participant.chain.head), lambda: participant.progress.waiting == phase.SAMPLES_COMING
    )
    tasks.start(following, "supply data")
    await attendance.work()


async def _leave(
    participant: Participant, attendance: Attendance, kind: object, error: BaseException | None, trace: object
) -> None:
    """Who only waits for room says no goodbye: it comes back, perhaps before two commits came without it."""
    if error is not None and lack_of_room(error):
        await participant.workers.stop()
    else:
        await attendance.go(GOODBYE_SECONDS)


def prover_for(settings: NodeSettings, home: DataDirectory, manifest: Manifest) -> Prover | None:
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


def _worker_pool(
    settings: NodeSettings, machine: Machine, home: DataDirectory, place: Place, data: BlobStore, own_text: bytes
) -> WorkerPool:
    def environment(socket: str, launch: Launch) -> dict[str, str]:
        return WorkerSettings(
            socket=socket,
            manifest=place.folder / MANIFEST,
            blobs=place.store.folder,
            stages=place.folder / "stages",
            cluster=settings.cluster.lead.coordinator if settings.cluster else home.identity.peer,
            devices="cuda" if machine.cuda else "cpu",
            copies=launch.copies,
            threads=settings.threads or max(1, (os.cpu_count() or 1) // len(launch.ranks)),
            codec_cpus=settings.codec_cpus,
            data=data.folder,
            step_seconds=settings.step_seconds,
            checkpoint_every=settings.checkpoint_every,
            private=settings.private,
            private_digest=own_text.hex(),
        ).environment()

    return WorkerPool(home.folder, environment)


@dataclass(frozen=True)
class Employed:
    """What workers are made of, for the participant that has them."""

    settings: NodeSettings
    machine: Machine
    home: Path
    identity: Identity
    manifest: Manifest
    place: Place
    chain: ChainFile
    exchange: Exchange
    starts: Starts
    holding: Holding
    pool: WorkerPool
    tasks: Tasks

    def workers(self, participant: Participant) -> Workers:
        machine, interface = self.machine, self.settings.interface or LOOPBACK
        manifest, me, chain, place = self.manifest, self.identity.peer, self.chain, self.place
        if self.settings.cluster is not None:
            return Follower(
                manifest,
                me,
                self.settings.cluster,
                place.channels,
                chain,
                place.store,
                self.holding,
                self.exchange,
                self.starts,
                self.pool,
                machine,
                interface,
                self.tasks,
                participant.feed,
                participant.tell,
            )
        others = self.settings.boxes - 1
        if others:
            place.lead.admission = self._admission(machine.cuda, others)
        patience = self.settings.box_patience
        team = Team(
            manifest, me, machine, self.pool, self.exchange, self.starts, self.holding, place.lead, others, interface, patience
        )
        team.laid = lambda hosts: participant.feed(member.Laid(hosts))
        team.whole = lambda here: participant.feed(member.Whole(here))
        team.tell = participant.tell
        return Generations(
            manifest,
            me,
            chain,
            place.store,
            self.holding,
            self.starts,
            team,
            self.tasks,
            lambda: participant.state,
            participant.feed,
            participant.emit,
            participant.tell,
        )

    def _admission(self, cuda: bool, others: int) -> BoxAdmission:
        """And write the link that our other boxes need."""
        join, network = self.settings.join, self.place.network
        secret = load_or_create_secret(self.place.folder / "cluster.secret")
        port = network.address.rpartition(":")[2]
        at = f"{address_on(self.settings.interface or LOOPBACK)}:{port}"
        lead = JoinLink(join.run_id, self.identity.peer, at, sha256(network.certificate.certificate_der))
        path = self.home / CLUSTER_LINK
        write_atomically(path, f"{ClusterLink(secret, lead, join)}\n".encode(), mode=0o600)
        start = "dilocox node --cluster cluster.link --cluster-interface INTERFACE --host ITS.ADDRESS"
        log.info("copy %s to the other %d boxes of this cluster, and start each with: %s", path, others, start)
        return BoxAdmission(join.run_id, self.identity.peer, secret, cuda, others)
