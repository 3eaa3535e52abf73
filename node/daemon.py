"""`dilocox node`: composition root. Joins a run, supervises the stage workers, leaves cleanly."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

from dilocox.node.api.server import Sources, create_node_app
from dilocox.node.attendance import Attendance
from dilocox.node.attest.attesters import choose_attester, no_attester
from dilocox.node.attest.prover import Challenger, Prover, prove
from dilocox.node.boxes.lead_line import LeadLine, hello_of
from dilocox.node.boxes.link import address_on, exposed
from dilocox.node.boxes.team import ClusterSettings
from dilocox.node.check import of_room
from dilocox.node.checks import CorpusStore, Parts, open_restoring
from dilocox.node.checks import loops as loops_of_checks
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.crew import Crew
from dilocox.node.data.check import check_corpus
from dilocox.node.data.supply import Supply
from dilocox.node.downloader import Downloader, Restores
from dilocox.node.employed import admission, follow_lead, has_trained, lead_cluster, open_workplace, worker_pool
from dilocox.node.forks import check_forks, follow_owner
from dilocox.node.imported import import_weights
from dilocox.node.judging import Judging
from dilocox.node.machine import this_machine
from dilocox.node.member_driver import MemberDriver
from dilocox.node.own import OwnStatements
from dilocox.node.own_text import OwnText, open_own_text
from dilocox.node.participant import Participant, Workers
from dilocox.node.place import MANIFEST, Place, find_relays, keep_manifest, open_chain, open_relay_store, run_peer
from dilocox.node.run_context import RunContext
from dilocox.node.run_data import open_run_data
from dilocox.node.settings import NodeSettings
from dilocox.node.workers import LOOPBACK
from dilocox.protocol import member, phase
from dilocox.protocol.attestation import SIMULATED, AttestationError
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.findings import Level
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.status import FEWER_MACHINES, FINISHED, REMINDER_SECONDS
from dilocox.transport.archive.source import ArchiveSource
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import Shelf, named_store
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.diary import open_diary
from dilocox.transport.room import lack_of_room
from dilocox.transport.tasks import Tasks
from dilocox.views import rows as views

__all__ = ["remind", "run_node", "warn_of_room"]

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""How long a leaving node tries to tell the coordinator."""


async def run_node(settings: NodeSettings) -> None:
    """Take part until SIGTERM or SIGINT, then leave. Raises LocalError when this node cannot take part."""
    await run_peer(settings, partial(_take_part, settings))


async def _take_part(
    settings: NodeSettings, home: DataDirectory, tasks: Tasks, place: Place, files: AsyncExitStack, closing: AsyncExitStack
) -> None:
    """Learn the run from its coordinator, start the workers and the participant's loops. `files` is closed after every task."""
    devices = settings.devices if settings.budget is None else 1
    machine = await asyncio.to_thread(this_machine, devices)
    link, me, network = settings.join, home.identity, place.network
    if settings.interface and (warning := exposed(settings.interface, address_on(settings.interface))):
        log.warning("%s", warning)
    coordinator = CoordinatorLink(link, network.directory, place.channels)
    manifest, appointment = await tasks.race(coordinator.run(place.door.tell))
    if settings.account and manifest.settlement is None:
        raise ConfigError("--account names who is paid, and this run settles nothing: leave it away")
    if settings.boxes == 1 and settings.cluster is None:
        await asyncio.to_thread(warn_of_room, manifest, home.folder, devices)
    own_text = await asyncio.to_thread(open_own_text, settings, home.folder, manifest)
    place.door.tell(f"checking the run's data in {settings.data.get(manifest.data.name, home.folder / 'data')}")
    data = await asyncio.to_thread(_open_data, settings, home, manifest)
    # The folder that an operator named is not for peers, unless they find it with the coordinator.
    keep_manifest(place, manifest, () if settings.data else [Shelf(data, bytes.fromhex(manifest.data.digest))])
    place.door.tell("reading the chain")
    pool = worker_pool(settings, machine, home, place, data, own_text)
    closing.push_async_callback(pool.close)
    await pool.open()
    chain = await asyncio.to_thread(ChainFile, place.folder / "chain.db", manifest, views.describe)
    files.callback(chain.close)
    await tasks.race(follow_owner(chain, link.coordinator, appointment, coordinator.commit))
    await asyncio.to_thread(check_forks, chain)
    if settings.begin is not None and (manifest.model.lora is not None or not chain.length):
        await tasks.race(_take_weights(settings.begin, place, home, manifest))
    if own_text is not None:
        from dilocox.node.privacy import steps_left

        steps, trained = steps_left(manifest, chain.head.trained), has_trained(place.folder)
        await asyncio.to_thread(own_text.account.lay_out, steps, manifest.rounds.inner_steps, trained)
    open_chain(place, chain, tasks)
    network.directory.know(chain.parties)
    about = {"name": settings.name, "run": manifest.run.name, "run_id": link.run_id.hex(), "peer": me.peer, "role": "node"}
    events = await open_diary(place.folder, home.folder, settings.notice, about, tasks, files, lambda: coordinator.connected)
    own = await asyncio.to_thread(OwnStatements, place.folder / "own.db", manifest.run_id)
    files.callback(own.close)
    archive = ArchiveSource(settings.archive, manifest.run_id) if settings.archive is not None else None
    restoring = await asyncio.to_thread(open_restoring, place, chain)
    restorer = restoring.restorer if restoring is not None else None

    def fetching_into(store: BlobStore, shares: Restores | None = None) -> Downloader:
        return Downloader(me.peer, store, network.directory, place.channels, lambda: chain.head.roster, archive, shares)

    run_data, supplies = open_run_data(chain, fetching_into(place.store, restorer)), fetching_into(data)
    starts = run_data.starts
    lead = settings.cluster.lead.coordinator if settings.cluster else ""
    relay_store = await asyncio.to_thread(open_relay_store, place, home, chain)
    relays = find_relays(place, home, chain, settings.upload_copies, lead)
    place.blobs.serve(replace(place.blobs.run, keeper=relay_store))
    prover = prover_for(settings, home, manifest)
    place.attestor.serve(prover)
    account = own_text.account if own_text is not None else None
    context = RunContext(me, chain, place.store, tasks)
    crew = Crew(tells_loss=account is None or not account.budget.bounds)
    state = member.start(manifest, me.peer, chain.head, lead=lead, account=settings.account)
    node = MemberDriver(context, state, own, crew, events)
    workplace = open_workplace(context, run_data, relay_store, relays, pool, crew, node, node.cluster)
    if settings.cluster is not None:
        hello = hello_of(settings.cluster, me.peer, machine, own_text.digest if own_text is not None else b"")
        line = LeadLine(settings.cluster, place.channels, hello)
        employment = follow_lead(context, node, line, workplace, settings.interface)
    else:
        if settings.boxes > 1:
            place.lead.admit(admission(settings, me, place, machine.cuda, own_text.digest if own_text is not None else b""))
        cluster = ClusterSettings(settings.boxes - 1, settings.interface or LOOPBACK, settings.box_patience)
        employment = lead_cluster(context, node, machine, place.lead, workplace, cluster, account)
    traffic = place.channels.traffic
    participant = Participant(context, node, employment.workers, coordinator, network.directory, own, traffic)
    node.resume()
    supply = Supply(manifest, data, supplies, lambda: chain.parties, node.show, bool(settings.data))
    challenger = Challenger(manifest, network.directory, place.channels)
    attendance = Attendance(node, employment.workers, tasks, place.folder, settings.hours, account)
    await attendance.look()
    sources = Sources(settings.name, network, relays, run_data.downloader, coordinator, prover)
    app = create_node_app(participant, attendance, home.api_key(), challenger, sources)
    await place.door.show(app)
    closing.push_async_callback(place.door.wait, "it ends")
    home.announce(role="node", api=place.door.url, run_id=link.run_id.hex(), name=settings.name, **network.endpoint.ports)
    log.info("%s is %s, serving on %s, page and API %s", settings.name, me.peer, network.address, place.door.url)
    closing.push_async_callback(place.lead.close)
    closing.push_async_exit(partial(_leave, employment.workers, attendance))
    corpus = CorpusStore(data, bool(settings.data), supplies)
    parts = Parts(node, machine, place, home.folder, corpus, fetching_into, starts, restoring)
    loops = {
        "watch": participant.watch(),
        "offer": participant.offer(),
        "hours": attendance.keep(),
        "attendance": attendance.follow(),
        "supervise": _train(supply, participant, attendance, tasks, own_text),
        "beat": participant.beat(),
        "remind": remind(participant),
        "finish": _finish(node, attendance, settings.exit_when_finished),
        "supply holders": relays.supply(starts.newest_snapshot),
        **({"judge": Judging(node, employment.judge, tasks).run()} if employment.judge is not None else {}),
        **employment.loops,
        **({"attest": prover.stay_attested(coordinator), "prove": prove(prover, node)} if prover is not None else {}),
        **loops_of_checks(parts),
    }
    for name, loop in loops.items():
        tasks.start(loop, name)


async def remind(participant: Participant) -> None:
    """While the run waits for its first clusters, log which setting says how many."""
    while not participant.machine.state.head.round:
        await asyncio.sleep(REMINDER_SECONDS)
        if not participant.machine.state.head.round and participant.machine.state.connected:
            log.warning("%s: %s", participant.round_why, FEWER_MACHINES)


async def _finish(node: MemberDriver, attendance: Attendance, ends: bool) -> None:
    """Once the run is finished, log what comes next, or end the daemon."""
    await node.finished.wait()
    log.info("the run is finished. Next: %s", "this node ends (--exit-when-finished)" if ends else FINISHED)
    if ends:
        await attendance.leave(at_once=False)


def warn_of_room(manifest: Manifest, home: Path, devices: int | None) -> None:
    """Of memory and disk. Blocking."""
    for finding in of_room(manifest, home, devices):
        if finding.level is not Level.FINE:
            log.warning("%s: %s", finding.about, finding.says)


async def _take_weights(folder: Path, place: Place, home: DataDirectory, manifest: Manifest) -> None:
    """The run's imported ones, from a Hugging Face folder."""
    place.door.tell(f"taking the run's imported weights from {folder}")
    await import_weights(manifest.model, place.folder / MANIFEST, folder, place.store, home.folder, place.door.tell)


def _open_data(settings: NodeSettings, home: DataDirectory, manifest: Manifest) -> BlobStore:
    """Where the run's corpus lies, or will lie. What an operator named is checked here, before anything is claimed. Blocking."""
    if named_store(manifest.data, settings.data) is None:
        return BlobStore(home.folder / "data")
    folder = settings.data[manifest.data.name]
    log.info("checking the run's data in %s", folder)
    return check_corpus(manifest, folder)


async def _train(
    supply: Supply, participant: Participant, attendance: Attendance, tasks: Tasks, own_text: OwnText | None
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


async def _leave(workers: Workers, attendance: Attendance, kind: object, error: BaseException | None, trace: object) -> None:
    """Who only waits for room says no goodbye: it comes back, perhaps before two commits came without it."""
    if error is not None and lack_of_room(error):
        await workers.stop()
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
