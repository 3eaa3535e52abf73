"""`dilocox node`: composition root. Joins a run, supervises the stage workers, leaves cleanly."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dilocox.node.api.server import Sources, create_node_app
from dilocox.node.attest.attesters import choose_attester, no_attester
from dilocox.node.attest.kinds import require_kinds
from dilocox.node.attest.prover import Challenger, Prover, prove
from dilocox.node.cluster.cluster_hosts import ClusterSettings
from dilocox.node.cluster.factory import (
    HostWorkers,
    admission,
    follow_lead,
    has_trained,
    lead_cluster,
    open_workplace,
    worker_pool,
)
from dilocox.node.cluster.private_data import PrivateData, open_private_data
from dilocox.node.context.peer import (
    MANIFEST,
    Daemon,
    PeerRuntime,
    find_relays,
    keep_manifest,
    open_chain,
    open_relay_store,
    run_peer,
)
from dilocox.node.context.run_context import RunContext
from dilocox.node.context.settings import NodeSettings
from dilocox.node.data.imported_weights import import_weights
from dilocox.node.data.supply import Supply
from dilocox.node.data.verify import check_corpus
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.exchange.downloader import Downloader, Restores
from dilocox.node.exchange.forks import check_forks, follow_owner
from dilocox.node.exchange.relay_store import RelayStore
from dilocox.node.exchange.relays import Relays
from dilocox.node.exchange.shards import OwnShards, Shards, find_shards
from dilocox.node.hosts.cluster_link import address_on, exposed
from dilocox.node.hosts.lead_connection import LeadConnection, hello_of
from dilocox.node.member.checks import CorpusStore, Loops, Parts
from dilocox.node.member.checks import loops as loops_of_checks
from dilocox.node.member.driver import MemberDriver
from dilocox.node.member.judging import Judging
from dilocox.node.member.participant import Participant, Workers
from dilocox.node.member.participation import ParticipationSchedule
from dilocox.node.preflight.machine import of_room
from dilocox.node.state.run_data import RunData, open_run_data
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.node.workers.devices import Devices, this_machine
from dilocox.node.workers.pool import LOOPBACK, WorkerPool
from dilocox.node.workers.progress import ClusterProgress
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.member import member, phase
from dilocox.protocol.member.node_status import FEWER_MACHINES, FINISHED, REMINDER_SECONDS
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.run_lint import Level
from dilocox.protocol.wire.attestation import SIMULATED, AttestationError
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.archive.source import ArchiveSource
from dilocox.transport.notify.event_sinks import open_event_log
from dilocox.transport.process.disk_pressure import lack_of_space
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import ExposedCorpus, named_store
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account

__all__ = ["remind", "run_node", "warn_of_room"]

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""Most seconds for the departure of a stopping node."""


async def run_node(settings: NodeSettings) -> None:
    """Take part until SIGTERM or SIGINT, then leave. Raises LocalError when this node cannot take part."""
    await run_peer(settings, partial(_take_part, settings))


async def _take_part(settings: NodeSettings, daemon: Daemon) -> None:
    """Learn the run from its coordinator, put the workers together, and start what takes part."""
    run = await _open_run(settings, daemon)
    storage = await _open_storage(settings, daemon, run)
    cluster = await _open_cluster(settings, daemon, run, storage)
    prover = await _serve(settings, daemon, run, storage, cluster)
    for name, loop in _loops(settings, daemon, run, storage, cluster, prover).items():
        daemon.tasks.start(loop, name)


@dataclass(frozen=True)
class OpenRun:
    """The run, as far as this machine knows it."""

    machine: Devices
    coordinator: CoordinatorLink
    chain: ChainFile
    shards: Shards | None
    """Erasure shards of the run. None: it has no availability check."""
    data: BlobStore
    """Store with its corpus."""
    own_text: PrivateData | None
    """Corpus that this node trains on; None: the run's."""
    pool: WorkerPool
    events: EventLog
    own: SignedStatementLog

    @property
    def account(self) -> "Account | None":
        """Return the privacy account of the private data."""
        return self.own_text.account if self.own_text is not None else None

    @property
    def own_digest(self) -> bytes:
        """Return the digest of the private data; empty if there are none."""
        return self.own_text.digest if self.own_text is not None else b""


async def _open_run(settings: NodeSettings, daemon: Daemon) -> OpenRun:
    """Learn the manifest and the chain. Raises LocalError where this machine cannot take part."""
    home, tasks, place = daemon.home, daemon.tasks, daemon.place
    devices = settings.devices if settings.budget is None else 1
    machine = await asyncio.to_thread(this_machine, devices)
    if settings.interface and (warning := exposed(settings.interface, address_on(settings.interface))):
        log.warning("%s", warning)
    coordinator = CoordinatorLink(settings.join, place.network.directory, place.channels)
    manifest, appointment = await tasks.race(coordinator.run(place.door.show_wait))
    shards = await asyncio.to_thread(find_shards, manifest)
    if settings.account and manifest.settlement is None:
        raise ConfigError("remove --account: this run has no settlement and pays no account")
    if settings.boxes == 1 and settings.cluster is None:
        await asyncio.to_thread(warn_of_room, manifest, home.folder, devices, shards)
    own_text = await asyncio.to_thread(open_private_data, settings, home.folder, manifest)
    place.door.show_wait(f"checking the run's data in {settings.data.get(manifest.data.name, home.folder / 'data')}")
    data = await asyncio.to_thread(_open_data, settings, home, manifest)
    # The folder that an operator named is not for peers, unless they find it with the coordinator.
    keep_manifest(place, manifest, () if settings.data else [ExposedCorpus(data, bytes.fromhex(manifest.data.digest))])
    place.door.show_wait("reading the chain")
    pool = worker_pool(settings, machine, home, place, data, own_text)
    daemon.closing.push_async_callback(pool.close)
    await pool.open()
    chain = await _open_chain(settings, daemon, coordinator, manifest, appointment)
    if own_text is not None:
        from dilocox.node.data.privacy_budget import steps_left

        steps, trained = steps_left(manifest, chain.head.trained), has_trained(place.folder)
        await asyncio.to_thread(own_text.account.lay_out, steps, manifest.rounds.inner_steps, trained)
    open_chain(place, chain, tasks)
    place.network.directory.know(chain.parties)
    events = await _open_events(settings, daemon, coordinator, manifest)
    own = await asyncio.to_thread(SignedStatementLog, place.folder / "own.db", manifest.run_id)
    daemon.files.callback(own.close)
    return OpenRun(machine, coordinator, chain, shards, data, own_text, pool, events, own)


async def _open_chain(
    settings: NodeSettings,
    daemon: Daemon,
    coordinator: CoordinatorLink,
    manifest: Manifest,
    appointment: Statement[pb.Appointment] | None,
) -> ChainFile:
    """Return the chain of the run, as its owner has it, with the weights that a first start needs."""
    place, tasks = daemon.place, daemon.tasks
    chain = await asyncio.to_thread(ChainFile, place.folder / "chain.db", manifest, views.describe)
    daemon.files.callback(chain.close)
    await tasks.race(follow_owner(chain, settings.join.coordinator, appointment, coordinator.commit))
    await asyncio.to_thread(check_forks, chain)
    if settings.begin is not None and (manifest.model.lora is not None or not chain.length):
        await tasks.race(_take_weights(settings.begin, place, daemon.home, manifest))
    return chain


async def _open_events(settings: NodeSettings, daemon: Daemon, coordinator: CoordinatorLink, manifest: Manifest) -> EventLog:
    run_id, peer = manifest.run_id.hex(), daemon.home.identity.peer
    about = {"name": settings.name, "run": manifest.run.name, "run_id": run_id, "peer": peer, "role": "node"}
    folder, home, connected = daemon.place.folder, daemon.home.folder, lambda: coordinator.connected
    return await open_event_log(folder, home, settings.notice, about, daemon.tasks, daemon.files, connected)


@dataclass(frozen=True)
class Storage:
    """Data of the run that this machine downloads and stores, for itself and for peers."""

    run_data: RunData
    corpus: CorpusStore
    fetching_into: Callable[[BlobStore], Downloader]
    shards: OwnShards | None
    relay_store: RelayStore
    relays: Relays


async def _open_storage(settings: NodeSettings, daemon: Daemon, run: OpenRun) -> Storage:
    """Open what is stored, and serve it to peers."""
    home, place, chain = daemon.home, daemon.place, run.chain
    archive = ArchiveSource(settings.archive, chain.manifest.run_id) if settings.archive is not None else None
    own_shards = await asyncio.to_thread(_open_shards, run.shards, place, chain) if run.shards is not None else None

    def fetching_into(store: BlobStore, restorer: Restores | None = None) -> Downloader:
        me, directory = home.identity.peer, place.network.directory
        return Downloader(me, store, directory, place.channels, lambda: chain.head.roster, archive, restorer)

    downloader = fetching_into(place.store, own_shards.restorer if own_shards is not None else None)
    run_data = open_run_data(chain, downloader, shards=run.shards)
    corpus = CorpusStore(run.data, bool(settings.data), fetching_into(run.data))
    relay_store = await asyncio.to_thread(open_relay_store, place, home, chain)
    relays = find_relays(place, home, chain, settings.upload_copies, _lead_host(settings))
    place.blobs.serve(replace(place.blobs.run, keeper=relay_store))
    return Storage(run_data, corpus, fetching_into, own_shards, relay_store, relays)


def _open_shards(shards: Shards, place: PeerRuntime, chain: ChainFile) -> OwnShards:
    """Open the erasure shards of this node, and serve them. Blocking."""
    found = shards.open(place.folder, place.network.directory, place.channels, chain)
    run = place.blobs.run
    place.blobs.serve(replace(run, shelves=(*run.shelves, found.shelf), share=found.share))
    return found


def _lead_host(settings: NodeSettings) -> str:
    """Return the peer id of our cluster's lead host; empty where we lead it."""
    return settings.cluster.lead.coordinator if settings.cluster else ""


@dataclass(frozen=True)
class OpenCluster:
    """This host's part in its cluster, and its cluster's in the run."""

    node: MemberDriver
    employment: HostWorkers
    participant: Participant
    attendance: ParticipationSchedule


async def _open_cluster(settings: NodeSettings, daemon: Daemon, run: OpenRun, storage: Storage) -> OpenCluster:
    """Connect the member machine and the workers, and replay the machine's signed statements. No worker runs yet."""
    tasks, place, me = daemon.tasks, daemon.place, daemon.home.identity
    context = RunContext(me, run.chain, place.store, tasks)
    crew = ClusterProgress(tells_loss=run.account is None or not run.account.budget.bounds)
    lead, account = _lead_host(settings), settings.account
    state = member.start(run.chain.manifest, me.peer, run.chain.head, lead=lead, account=account)
    node = MemberDriver(context, state, run.own, crew, run.events)
    workplace = open_workplace(
        context, storage.run_data, storage.relay_store, storage.relays, run.pool, crew, node, node.cluster
    )
    if settings.cluster is not None:
        hello = hello_of(settings.cluster, me.peer, run.machine, run.own_digest)
        line = LeadConnection(settings.cluster, place.channels, hello)
        employment = follow_lead(context, node, line, workplace, settings.interface)
    else:
        if settings.boxes > 1:
            place.lead.admit(admission(settings, me, place, run.machine.cuda, run.own_digest))
        cluster = ClusterSettings(settings.boxes - 1, settings.interface or LOOPBACK, settings.box_patience)
        employment = lead_cluster(context, node, run.machine, place.lead, workplace, cluster, run.account)
    directory, traffic = place.network.directory, place.channels.traffic
    participant = Participant(context, node, employment.workers, run.coordinator, directory, run.own, traffic)
    node.resume()
    attendance = ParticipationSchedule(node, employment.workers, tasks, place.folder, settings.hours, run.account)
    await attendance.update()
    return OpenCluster(node, employment, participant, attendance)


async def _serve(settings: NodeSettings, daemon: Daemon, run: OpenRun, storage: Storage, cluster: OpenCluster) -> Prover | None:
    """Serve the page and the API, and answer challenges; return the prover, if the run requires evidence."""
    home, place, closing, network = daemon.home, daemon.place, daemon.closing, daemon.place.network
    manifest = run.chain.manifest
    prover = prover_for(settings, home, manifest)
    place.attestor.serve(prover)
    challenger = Challenger(manifest, network.directory, place.channels)
    sources = Sources(settings.name, network, storage.relays, storage.run_data.downloader, run.coordinator, prover)
    app = create_node_app(cluster.participant, cluster.attendance, home.api_key(), challenger, sources)
    await place.door.show(app)
    closing.push_async_callback(place.door.wait, "it ends")
    run_id = settings.join.run_id.hex()
    home.announce(role="node", api=place.door.url, run_id=run_id, name=settings.name, **network.endpoint.ports)
    me, url = home.identity.peer, place.door.url
    log.info("%s is %s, serving on %s, page and API %s", settings.name, me, network.address, url)
    closing.push_async_callback(place.lead.close)
    closing.push_async_exit(partial(_leave, cluster.employment.workers, cluster.attendance))
    return prover


def _loops(
    settings: NodeSettings,
    daemon: Daemon,
    run: OpenRun,
    storage: Storage,
    cluster: OpenCluster,
    prover: Prover | None,
) -> Loops:
    """Return what runs until the daemon ends, by name of the task."""
    node, employment = cluster.node, cluster.employment
    participant, attendance = cluster.participant, cluster.attendance
    tasks, corpus, starts = daemon.tasks, storage.corpus, storage.run_data.starts
    supply = Supply(node.manifest, corpus.store, corpus.supplies, lambda: node.chain.parties, node.show, corpus.named)
    place, home, fetching_into = daemon.place, daemon.home.folder, storage.fetching_into
    parts = Parts(node, run.machine, place, home, corpus, fetching_into, starts, storage.shards)
    return {
        "watch": participant.watch(),
        "offer": participant.offer(),
        "hours": attendance.update_forever(),
        "attendance": attendance.follow(),
        "supervise": _train(supply, participant, attendance, tasks, run.own_text),
        "beat": participant.beat(),
        "remind": remind(participant),
        "finish": _finish(node, attendance, settings.exit_when_finished),
        "supply relays": storage.relays.supply(starts.newest_snapshot),
        **({"judge": Judging(node, employment.judge, tasks).run()} if employment.judge is not None else {}),
        **employment.loops,
        **({"attest": prover.stay_attested(run.coordinator), "prove": prove(prover, node)} if prover is not None else {}),
        **loops_of_checks(parts),
    }


async def remind(participant: Participant) -> None:
    """Log which setting decides how many clusters begin the run, while it waits for them."""
    while not participant.machine.state.head.round:
        await asyncio.sleep(REMINDER_SECONDS)
        if not participant.machine.state.head.round and participant.machine.state.connected:
            log.warning("%s: %s", participant.round_why, FEWER_MACHINES)


async def _finish(node: MemberDriver, attendance: ParticipationSchedule, ends: bool) -> None:
    """Once the run is finished, log what comes next, or end the daemon."""
    await node.finished.wait()
    log.info("the run is finished. Next: %s", "this node ends (--exit-when-finished)" if ends else FINISHED)
    if ends:
        await attendance.leave(at_once=False)


def warn_of_room(manifest: Manifest, home: Path, devices: int | None, shards: Shards | None = None) -> None:
    """Warn about memory and disk. Blocking."""
    for finding in of_room(manifest, home, devices, shards=shards):
        if finding.level is not Level.FINE:
            log.warning("%s: %s", finding.about, finding.says)


async def _take_weights(folder: Path, place: PeerRuntime, home: DataDirectory, manifest: Manifest) -> None:
    """The run's imported ones, from a Hugging Face folder."""
    place.door.show_wait(f"importing the run's weights from {folder}")
    await import_weights(manifest.model, place.folder / MANIFEST, folder, place.store, home.folder, place.door.show_wait)


def _open_data(settings: NodeSettings, home: DataDirectory, manifest: Manifest) -> BlobStore:
    """Return the store of the run's corpus, complete or not. Checks a named folder before any claim. Blocking."""
    if named_store(manifest.data, settings.data) is None:
        return BlobStore(home.folder / "data")
    folder = settings.data[manifest.data.name]
    log.info("checking the run's data in %s", folder)
    return check_corpus(manifest, folder)


async def _train(
    supply: Supply, participant: Participant, attendance: ParticipationSchedule, tasks: Tasks, own_text: PrivateData | None
) -> None:
    corpus = await supply.begin()
    if own_text is not None:
        await asyncio.to_thread(own_text.check, participant.manifest, corpus)
    reading = partial(phase.reading, participant.manifest, participant.machine.cluster)
    following = supply.follow(
        corpus, lambda: reading(participant.chain.head), lambda: participant.progress.waiting == phase.SAMPLES_COMING
    )
    tasks.start(following, "supply data")
    await attendance.work()


async def _leave(
    workers: Workers, attendance: ParticipationSchedule, kind: object, error: BaseException | None, trace: object
) -> None:
    """Leave the run. A node that waits for disk space does not leave: it returns, perhaps within two commits."""
    if error is not None and lack_of_space(error):
        await workers.stop()
    else:
        await attendance.go(GOODBYE_SECONDS)


def prover_for(settings: NodeSettings, home: DataDirectory, manifest: Manifest) -> Prover | None:
    """Return this machine's prover, if the run requires evidence. The coordinator rejects a machine without any.

    Raises ConfigError if a kind that the run requires is not installed.
    """
    kinds = manifest.attestation.kinds
    if not kinds:
        return None
    require_kinds(manifest.attestation)
    version = metadata.version("dilocox")
    try:
        kind, attester = choose_attester(kinds, version, settings.simulated_measurement, settings.collateral)
    except AttestationError as error:
        return Prover(home.identity, manifest, kinds[0], no_attester(error))
    if kind != SIMULATED and not home.identity_is_new:
        raise LocalError(
            "this run admits only keys made inside the measured process, but this folder's key is older. Use an empty --home."
        )
    return Prover(home.identity, manifest, kind, attester)
