"""`dilocox hold`: a peer that keeps payloads and states for those who cannot be dialled, and trains nothing.

The run's manifest names it. It follows the chain, takes what members of the roster push, serves it to everybody, and keeps it as
long as a joiner or a restart may need it. `dilocox archive` is the same with an archive (archiver.py); where the manifest does not
name it, it only reads.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from dilocox.node.archiver import Archiver, ArchiveSettings, check_sealing, make_archiver
from dilocox.node.check import Role, no_part
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.downloader import Downloader
from dilocox.node.forks import check_forks, follow_owner, is_ours, replaced
from dilocox.node.holding import Holding
from dilocox.node.own import OwnStatements
from dilocox.node.place import PeerSettings, Place, keep_manifest, make_holding, open_chain, run_peer
from dilocox.node.run_data import open_run_data
from dilocox.node.starts import Starts
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.events import CommitFollowed, Event, NobodyCounted, RunFinished, StateChanged
from dilocox.protocol.ids import several
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.diary import open_diary
from dilocox.transport.event_log import EventLog
from dilocox.transport.presence import same_place
from dilocox.transport.tasks import Tasks
from dilocox.views import rows as views
from dilocox.views.answers import answers_of_holder
from dilocox.views.http import add_run_routes, create_app
from dilocox.views.metrics import RunMetrics

__all__ = ["HolderSettings", "run_holder"]

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""For the people who watch: nobody waits for a holder."""


@dataclass(frozen=True, kw_only=True)
class HolderSettings(PeerSettings):
    archive: ArchiveSettings | None = None


async def run_holder(settings: HolderSettings) -> None:
    """Keep until SIGTERM or SIGINT. Raises LocalError where the run does not name this peer, and it keeps no archive either."""
    await run_peer(settings, partial(_hold, settings))


async def _hold(
    settings: HolderSettings, home: DataDirectory, tasks: Tasks, place: Place, files: AsyncExitStack, closing: AsyncExitStack
) -> None:
    link, me, directory = settings.join, home.identity, place.network.directory
    coordinator = CoordinatorLink(link, directory, place.channels)
    manifest, appointment = await tasks.race(coordinator.run(place.door.tell))
    named = me.peer in manifest.run.holders
    _check_part(settings, manifest, me.peer)
    keep_manifest(place, manifest)
    place.door.tell("reading the chain")
    chain = await asyncio.to_thread(ChainFile, place.folder / "chain.db", manifest, views.describe)
    files.callback(chain.close)
    await tasks.race(follow_owner(chain, link.coordinator, appointment, coordinator.commit))
    await asyncio.to_thread(check_forks, chain)
    place.door.tell("looking through what it keeps")
    open_chain(place, chain, tasks)
    holding = await asyncio.to_thread(make_holding, place, home, manifest, chain, None)
    downloader = Downloader(me.peer, place.store, directory, place.channels, lambda: chain.head.roster)
    run_data = open_run_data(chain, downloader, None if settings.archive else ())
    starts = run_data.starts
    own = await asyncio.to_thread(OwnStatements, place.folder / "own.db", manifest.run_id)
    files.callback(own.close)
    role = "holder" if settings.archive is None else "archive"
    about = {"name": settings.name, "run": manifest.run.name, "run_id": link.run_id.hex(), "peer": me.peer, "role": role}
    events = await open_diary(place.folder, home.folder, settings.notice, about, tasks, files, lambda: coordinator.connected)
    holder = Holder(me, place, chain, own, holding, starts, coordinator, events, named)
    if settings.archive is not None:
        assert coordinator.signed_manifest is not None, "it said what the run is"
        await asyncio.to_thread(chain.keep_signed_manifest, coordinator.signed_manifest)
        holder.archiver, holder.pinned = make_archiver(settings.archive, home, place, manifest, chain, run_data)
    await asyncio.to_thread(lambda: place.store.sweep(place.store.partials()))  # of what was coming, half is here for ever
    await holder.retain()
    if named:
        place.blobs.keeper = holding
    await place.door.show(holder.app(settings.name))
    closing.push_async_callback(place.door.wait, "it ends")
    home.announce(role=role, api=place.door.url, run_id=link.run_id.hex(), name=settings.name, **place.network.ports)
    what = f"archiving to {settings.archive.place.url}" if settings.archive else f"keeping on {place.network.address}"
    log.info("%s is %s, %s, page and API %s", settings.name, me.peer, what, place.door.url)
    tasks.start(holder.follow(), "follow")
    if named:
        tasks.start(holder.beat(), "beat")
    if holder.archiver is not None:
        holder.archiver.tell = lambda why: holder.emit(StateChanged("archiving", why or "the archive has all that is due"))
        tasks.start(holder.archiver.run(), "archive")
        tasks.start(holder.archiver.carry_data(), "archive data")


def _check_part(settings: HolderSettings, manifest: Manifest, me: str) -> None:
    """Raises LocalError where the run has no place for us, ConfigError where its archive must be sealed."""
    if why := no_part(manifest, me, Role.HOLDER if settings.archive is None else Role.ARCHIVE):
        raise LocalError(why)
    if settings.archive is not None:
        check_sealing(manifest, settings.archive.place.key, settings.archive.plain)


class Holder:
    def __init__(
        self,
        identity: Identity,
        place: Place,
        chain: ChainFile,
        own: OwnStatements,
        holding: Holding,
        starts: Starts,
        coordinator: CoordinatorLink,
        events: EventLog,
        named: bool = True,
    ) -> None:
        """`named`: by the manifest. Else we are a spectator, who says nothing."""
        self._identity, self._place, self.chain, self._own, self._holding = identity, place, chain, own, holding
        self._starts, self._coordinator, self._events = starts, coordinator, events
        self._roots: set[bytes] = set()
        self._told: pb.PeerRecord | None = None
        """Our record, as the coordinator passes it on."""
        self._named = named
        self.archiver: Archiver | None = None
        self.pinned: set[bytes] = set()
        """What stays while it is being archived."""
        holding.agreed = self._agreed

    def _agreed(self, digest: bytes) -> bool:
        """Whether a blob is of a state that joiners start from: a root that the chain names, or a stage that such a root names."""
        return digest in self._roots or any(digest in self._place.store.stage_digests(root) for root in self._roots)

    async def follow(self) -> None:
        """The chain, commit by commit."""
        self._place.network.directory.know(self.chain.parties)
        hello = self._hello if self._named else None
        async for event in self._coordinator.watch(lambda: self.chain.length, hello, self._away):
            if event.HasField("tip"):
                self._away()
                if (error := replaced(self.chain, event.tip.appointment)) is not None:
                    raise error
            elif event.HasField("statement"):
                try:
                    await self._take(event.statement)
                except RemoteError as error:
                    log.warning("the coordinator sent something that does not hold: %s", error)

    def _away(self) -> None:
        """What the coordinator was told, it may have forgotten."""
        self._told = None

    def _hello(self) -> Statement[pb.Heartbeat]:
        """For people: no round waits for a holder."""
        head = self.chain.head
        body = pb.Heartbeat(sequence=self._own.next_sequence(), round=head.round, head=head.digest)
        return seal(self._identity, pb.KIND_HEARTBEAT, self.chain.manifest.run_id, body)

    async def _take(self, envelope: pb.Envelope) -> None:
        run_id = self.chain.manifest.run_id
        if envelope.kind == pb.KIND_PEER_RECORD:
            self._place.network.directory.learn(open_envelope(envelope, run_id, (pb.KIND_PEER_RECORD,)))
        if envelope.kind != pb.KIND_COMMIT:
            return
        if await is_ours(self.chain, open_envelope(envelope, run_id, (pb.KIND_COMMIT,))):
            return
        commit = await asyncio.to_thread(self.chain.append, envelope)
        self.emit(CommitFollowed(commit.body.round, len(commit.body.counted)))
        for told in NobodyCounted.by(commit.body):
            self.emit(told)
        if self.chain.head.finished:
            self.emit(RunFinished(commit.body.trained))
        self._place.network.directory.know(self.chain.parties)
        await self.retain()
        if self.archiver is not None:
            self.archiver.grew.set()

    def emit(self, event: Event) -> None:
        self._events.say(event)

    async def retain(self) -> None:
        """Remove what no joiner and no restart can need any more."""
        self._roots = await asyncio.to_thread(self._starts.agreed_roots)
        store = self._place.store
        # First: what comes meanwhile is not looked at.
        here = await asyncio.to_thread(store.digests) | await asyncio.to_thread(store.partials)
        keep = await asyncio.to_thread(self._starts.worth_keeping) | self._holding.blobs()
        for digest in here - keep - self._place.blobs.coming:
            if digest in self.pinned:  # or a part of it is coming
                continue
            await asyncio.to_thread(store.remove, digest)

    async def beat(self) -> None:
        """Say that we are here, and how to dial us, which the coordinator passes on."""
        while True:
            await self._coordinator.submit_once(self._hello().envelope)
            own = self._place.network.directory.own
            if own is not None and (self._told is None or not same_place(self._told, own.body)):
                answer = await self._coordinator.submit_once(own.envelope)
                if answer is not None and answer.reason == pb.REASON_UNSPECIFIED:
                    self._told = own.body
            await asyncio.sleep(BEAT_SECONDS)

    def app(self, name: str) -> web.Application:
        network, role = self._place.network, "holder" if self.archiver is None else "archive"
        traffic, registry = self._place.channels.traffic, CollectorRegistry()
        metrics = RunMetrics(role, self.chain, self._events, lambda: {"roster": len(self.chain.head.roster)}, traffic)
        registry.register(metrics)

        def status() -> dict[str, Any]:
            kept = self._place.store.sizes()
            size = sum(kept.values())
            reach, connected, archive = network.reach, self._coordinator.connected, self.archiver
            why = archive.why if archive is not None else ""
            return {
                "role": role,
                "state": "archiving" if archive is not None else "keeping",
                "why": why or f"{several(len(kept), 'blob')}, {size:,} bytes",
                "answers": answers_of_holder(reach.reachable, reach.sentence, connected, why, self._named),
                "run": views.run(self.chain.manifest),
                "peer": self._identity.peer,
                "name": name,
                "address": network.address,
                "reachable": network.reach.reachable,
                "reach": network.reach.sentence,
                "coordinator_connected": self._coordinator.connected,
                "round": self.chain.head.round,
                "finished": self.chain.head.finished,
                "kept_blobs": len(kept),
                "kept_bytes": size,
                "network": views.network(traffic),
                "archive": None if self.archiver is None else self.archiver.status(),
            }

        async def peers() -> list[views.View]:
            records = {peer: record.body for peer, record in network.directory.records.items()}
            return views.peers(
                self.chain.manifest, self.chain.head, await self._coordinator.presence(), records, self.chain.head.coordinator
            )

        app = create_app(registry, lambda: asyncio.to_thread(status), metrics.refresh)
        add_run_routes(app, self.chain, peers, self._events)
        return app
