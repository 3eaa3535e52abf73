"""Relay daemon, `dilocox relay`: stores payloads and states for peers that are not reachable; it trains nothing.

The run's manifest names it. It follows the chain, stores uploads of roster members, serves them to every peer, and
keeps them as long as a joiner or a restart may need them. `dilocox archive` is the same with an archive (archiver.py);
without a place in the manifest, it only reads.
"""

import asyncio
import logging
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from dilocox.node.archive.archiver import Archiver, ArchiveSettings, check_sealing, make_archiver
from dilocox.node.context.peer import (
    Daemon,
    PeerRuntime,
    PeerSettings,
    keep_manifest,
    open_chain,
    open_relay_store,
    run_peer,
)
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.exchange.downloader import Downloader
from dilocox.node.exchange.forks import check_forks, follow_owner, is_ours, replaced
from dilocox.node.exchange.relay_store import AgreedStates, RelayStore
from dilocox.node.preflight.machine import Role, no_part
from dilocox.node.state.resume_points import ResumePlanner
from dilocox.node.state.run_data import RunData, open_run_data
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.events import CommitFollowed, NobodyCounted, RunFinished, StateChanged
from dilocox.protocol.ids import several
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.net.blob_server import PeerService
from dilocox.transport.net.peer_directory import PeerDirectory, same_place
from dilocox.transport.notify.event_sinks import open_event_log
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog
from dilocox.views import json_views as views
from dilocox.views.health import answers_of_holder
from dilocox.views.http import add_run_routes, create_app
from dilocox.views.metrics import RunMetrics

__all__ = ["HolderSettings", "run_holder"]

log = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Interval of heartbeats, for people: no round waits for a relay."""


@dataclass(frozen=True, kw_only=True)
class HolderSettings(PeerSettings):
    archive: ArchiveSettings | None = None


async def run_holder(settings: HolderSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises LocalError if the run does not name this peer, and it has no archive either."""
    await run_peer(settings, partial(_relay, settings))


async def _relay(settings: HolderSettings, daemon: Daemon) -> None:
    home, tasks, place, files = daemon.home, daemon.tasks, daemon.place, daemon.files
    coordinator = CoordinatorLink(settings.join, place.network.directory, place.channels)
    chain = await _open_chain(settings, daemon, coordinator)
    role = "relay" if settings.archive is None else "archive"
    events = await _open_events(settings, daemon, coordinator, chain, role)
    own = await asyncio.to_thread(SignedStatementLog, place.folder / "own.db", chain.manifest.run_id)
    files.callback(own.close)
    me, directory, named = home.identity, place.network.directory, home.identity.peer in chain.manifest.run.relays
    agreed = AgreedStates(place.store)
    relay_store = await asyncio.to_thread(open_relay_store, place, home, chain, agreed)
    downloader = Downloader(me.peer, place.store, directory, place.channels, lambda: chain.head.roster)
    run_data = open_run_data(chain, downloader, None if settings.archive else ())
    archiver, pinned = await _open_archiver(settings, daemon, chain, run_data, coordinator, events)
    retention = Retention(place.store, run_data.starts, relay_store, agreed, place.blobs, pinned)
    announcement = Announcement(me, chain, own, coordinator, directory) if named else None
    holder = RelayDaemon(chain, directory, coordinator, events, retention, archiver, announcement)
    await asyncio.to_thread(lambda: place.store.sweep(place.store.partials()))  # of what was coming, half is here for ever
    await retention.retain()
    if named:
        place.blobs.serve(replace(place.blobs.run, keeper=relay_store))
    page = HolderPage(settings.name, me.peer, place, chain, coordinator, events, archiver, named)
    await place.door.show(page.app())
    daemon.closing.push_async_callback(place.door.wait, "it ends")
    run_id = settings.join.run_id.hex()
    home.announce(role=role, api=place.door.url, run_id=run_id, name=settings.name, **place.network.endpoint.ports)
    what = f"archiving to {settings.archive.place.url}" if settings.archive else f"relaying on {place.network.address}"
    log.info("%s is %s, %s, page and API %s", settings.name, me.peer, what, place.door.url)
    tasks.start(holder.follow(), "follow")
    if announcement is not None:
        tasks.start(announcement.beat(), "beat")
    if archiver is not None:
        tasks.start(archiver.run(), "archive")
        tasks.start(archiver.carry_data(), "archive data")


async def _open_chain(settings: HolderSettings, daemon: Daemon, coordinator: CoordinatorLink) -> ChainFile:
    """Return the chain of the link's run, as its owner decided. Raises LocalError if the run has no place for this peer."""
    home, tasks, place, files = daemon.home, daemon.tasks, daemon.place, daemon.files
    manifest, appointment = await tasks.race(coordinator.run(place.door.show_wait))
    _check_part(settings, manifest, home.identity.peer)
    keep_manifest(place, manifest)
    place.door.show_wait("reading the chain")
    chain = await asyncio.to_thread(ChainFile, place.folder / "chain.db", manifest, views.describe)
    files.callback(chain.close)
    await tasks.race(follow_owner(chain, settings.join.coordinator, appointment, coordinator.commit))
    await asyncio.to_thread(check_forks, chain)
    place.door.show_wait("scanning the stored blobs")
    open_chain(place, chain, tasks)
    return chain


async def _open_events(
    settings: HolderSettings, daemon: Daemon, coordinator: CoordinatorLink, chain: ChainFile, role: str
) -> EventLog:
    home, tasks, place, files = daemon.home, daemon.tasks, daemon.place, daemon.files
    run, run_id = chain.manifest.run.name, chain.manifest.run_id.hex()
    about = {"name": settings.name, "run": run, "run_id": run_id, "peer": home.identity.peer, "role": role}
    return await open_event_log(place.folder, home.folder, settings.notice, about, tasks, files, lambda: coordinator.connected)


async def _open_archiver(
    settings: HolderSettings,
    daemon: Daemon,
    chain: ChainFile,
    run_data: RunData,
    coordinator: CoordinatorLink,
    events: EventLog,
) -> tuple[Archiver | None, Container[bytes]]:
    """Return the archiver, where there is an archive, and what stays in the store while it is being archived."""
    if settings.archive is None:
        return None, ()

    def tell(why: str) -> None:
        events.say(StateChanged("archiving", why or "everything is archived"))

    assert coordinator.signed_manifest is not None, "it sent the run's manifest"
    await asyncio.to_thread(chain.keep_signed_manifest, coordinator.signed_manifest)
    return make_archiver(settings.archive, daemon.home, daemon.place, chain, run_data, tell)


def _check_part(settings: HolderSettings, manifest: Manifest, me: str) -> None:
    """Raise LocalError if the run has no place for this peer, ConfigError if its archive must be sealed."""
    if why := no_part(manifest, me, Role.RELAY if settings.archive is None else Role.ARCHIVE):
        raise LocalError(why)
    if settings.archive is not None:
        check_sealing(manifest, settings.archive.place.key, settings.archive.plain)


class Announcement:
    """Record and heartbeats of this peer, for peers and people. No round waits for it."""

    def __init__(
        self,
        identity: Identity,
        chain: ChainFile,
        own: SignedStatementLog,
        coordinator: CoordinatorLink,
        directory: PeerDirectory,
    ) -> None:
        self._identity, self._chain, self._own = identity, chain, own
        self._coordinator, self._directory = coordinator, directory
        self._told: pb.PeerRecord | None = None
        """Our record, as the coordinator passes it on."""

    def again(self) -> None:
        """Offer our record again: the coordinator may have forgotten it."""
        self._told = None

    def hello(self) -> Statement[pb.Heartbeat]:
        head = self._chain.head
        body = pb.Heartbeat(sequence=self._own.next_sequence(), round=head.round, head=head.digest)
        return seal(self._identity, pb.KIND_HEARTBEAT, self._chain.manifest.run_id, body)

    async def beat(self) -> None:
        """Say that we are here, and how to dial us, which the coordinator passes on."""
        while True:
            await self._coordinator.submit_once(self.hello().envelope)
            own = self._directory.own
            if own is not None and (self._told is None or not same_place(self._told, own.body)):
                answer = await self._coordinator.submit_once(own.envelope)
                if answer is not None and answer.reason == pb.REASON_UNSPECIFIED:
                    self._told = own.body
            await asyncio.sleep(BEAT_SECONDS)


class Retention:
    """Deletes what no joiner and no restart can need any more."""

    def __init__(
        self,
        store: BlobStore,
        starts: ResumePlanner,
        relay_store: RelayStore,
        agreed: AgreedStates,
        pushed: PeerService,
        pinned: Container[bytes] = (),
    ) -> None:
        """`pushed`: knows what peers are pushing now. `pinned`: what stays while it is being archived."""
        self._store, self._starts, self._relay_store = store, starts, relay_store
        self._agreed, self._pushed, self._pinned = agreed, pushed, pinned

    async def retain(self) -> None:
        self._agreed.name(await asyncio.to_thread(self._starts.agreed_roots))
        store = self._store
        # Read first: later arrivals are not considered.
        here = await asyncio.to_thread(store.digests) | await asyncio.to_thread(store.partials)
        keep = await asyncio.to_thread(self._starts.worth_keeping) | self._relay_store.blobs()
        for digest in here - keep - self._pushed.coming:
            if digest in self._pinned:  # or a part of it is coming
                continue
            await asyncio.to_thread(store.remove, digest)


class RelayDaemon:
    """Follows the chain, commit by commit."""

    def __init__(
        self,
        chain: ChainFile,
        directory: PeerDirectory,
        coordinator: CoordinatorLink,
        events: EventLog,
        retention: Retention,
        archiver: Archiver | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        """Follow the run. `announcement`: None for a spectator, which the manifest does not name and which publishes
        nothing."""
        self._chain, self._directory, self._coordinator, self._events = chain, directory, coordinator, events
        self._retention, self._archiver, self._announcement = retention, archiver, announcement

    async def follow(self) -> None:
        """Follow until cancelled. Raises LocalError if the run's owner has appointed another coordinator."""
        self._directory.know(self._chain.parties)
        hello = self._announcement.hello if self._announcement is not None else None
        async for event in self._coordinator.watch(lambda: self._chain.length, hello, self._away):
            if event.HasField("tip"):
                self._away()
                if (error := replaced(self._chain, event.tip.appointment)) is not None:
                    raise error
            elif event.HasField("statement"):
                try:
                    await self._accept(event.statement)
                except RemoteError as error:
                    log.warning("the coordinator sent an invalid message: %s", error)

    def _away(self) -> None:
        if self._announcement is not None:
            self._announcement.again()

    async def _accept(self, envelope: pb.Envelope) -> None:
        run_id = self._chain.manifest.run_id
        if envelope.kind == pb.KIND_PEER_RECORD:
            self._directory.learn(open_envelope(envelope, run_id, (pb.KIND_PEER_RECORD,)))
        if envelope.kind != pb.KIND_COMMIT:
            return
        if await is_ours(self._chain, open_envelope(envelope, run_id, (pb.KIND_COMMIT,))):
            return
        commit = await asyncio.to_thread(self._chain.append, envelope)
        self._events.say(CommitFollowed(commit.body.round, len(commit.body.counted)))
        for told in NobodyCounted.by(commit.body):
            self._events.say(told)
        if self._chain.head.finished:
            self._events.say(RunFinished(commit.body.trained))
        self._directory.know(self._chain.parties)
        await self._retention.retain()
        if self._archiver is not None:
            self._archiver.grew.set()


class HolderPage:
    """Rows for the page and the API."""

    def __init__(
        self,
        name: str,
        peer: str,
        place: PeerRuntime,
        chain: ChainFile,
        coordinator: CoordinatorLink,
        events: EventLog,
        archiver: Archiver | None = None,
        named: bool = True,
    ) -> None:
        """`peer`: our peer id. `named`: by the manifest."""
        self._name, self._peer, self._place, self._chain = name, peer, place, chain
        self._coordinator, self._events, self._archiver, self._named = coordinator, events, archiver, named

    def app(self) -> web.Application:
        network, role = self._place.network, "relay" if self._archiver is None else "archive"
        traffic, registry = self._place.channels.traffic, CollectorRegistry()
        metrics = RunMetrics(role, self._chain, self._events, lambda: {"roster": len(self._chain.head.roster)}, traffic)
        registry.register(metrics)

        def status() -> dict[str, Any]:
            kept = self._place.store.sizes()
            size = sum(kept.values())
            reach, connected, archive = network.reach, self._coordinator.connected, self._archiver
            why = archive.why if archive is not None else ""
            return {
                "role": role,
                "state": "archiving" if archive is not None else "keeping",
                "why": why or f"{several(len(kept), 'blob')}, {size:,} bytes",
                "answers": answers_of_holder(reach.reachable, reach.sentence, connected, why, self._named),
                "run": views.run(self._chain.manifest),
                "peer": self._peer,
                "name": self._name,
                "address": network.address,
                "reachable": network.reach.reachable,
                "reach": network.reach.sentence,
                "coordinator_connected": self._coordinator.connected,
                "round": self._chain.head.round,
                "finished": self._chain.head.finished,
                "kept_blobs": len(kept),
                "kept_bytes": size,
                "network": views.network(traffic),
                "archive": None if self._archiver is None else self._archiver.status(),
            }

        async def peers() -> list[views.View]:
            records = {peer: record.body for peer, record in network.directory.records.items()}
            return views.peers(
                self._chain.manifest,
                self._chain.head,
                await self._coordinator.presence(),
                records,
                self._chain.head.coordinator,
            )

        app = create_app(registry, lambda: asyncio.to_thread(status), metrics.refresh)
        add_run_routes(app, self._chain, peers, self._events)
        return app
