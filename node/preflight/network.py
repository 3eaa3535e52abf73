"""Preflight checks of the network: coordinator, clocks, and reachability."""

import asyncio
import ssl
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from dilocox.node.exchange.coordinator_client import clock_ahead
from dilocox.node.preflight.machine import Here, Role, of_part
from dilocox.protocol.consensus import terms
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.ids import JoinLink, Way, host_port
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.run.manifest import Manifest, open_manifest
from dilocox.protocol.run.run_lint import Finding, Level
from dilocox.protocol.wire.messages import open_envelope
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.net import tls
from dilocox.transport.net.peer_directory import PeerDirectory
from dilocox.transport.net.reachability import Reachability
from dilocox.transport.net.rpc import ChannelPool, record_of
from dilocox.transport.store.data_directory import DataDirectory

__all__ = ["Seen", "rounds_trained", "see_run"]

CALL_SECONDS = 10.0
LAST_ROUND = 2**32 - 1
"""First round of which no run has commits: for it a coordinator sends only its position."""
LARGEST_OFFSET_SECONDS = 60.0
"""Largest offset between clocks: beyond it certificates and times for people suffer. No wait depends on wall clocks."""


NOT_LOCAL = "its owner must start the coordinator with --host ADDRESS, by which other machines reach it, and send the new link"


@dataclass(frozen=True)
class Seen:
    """Facts about a run, from its link."""

    findings: tuple[Finding, ...]
    manifest: Manifest | None = None
    """Manifest of the run. None: it could not be fetched."""
    trained: int = 0
    """Counted rounds so far."""


async def see_run(link: JoinLink, here: Here) -> Seen:
    """The run's manifest from its coordinator; whether clocks agree, whether it can dial us back, and whether we may take part."""
    whys = []
    with tempfile.TemporaryDirectory(prefix="dilocox-check-") as scratch, closing(_folder(here.home, Path(scratch))) as home:
        channels = ChannelPool(home.identity, link.run_id, HeadGossip())
        try:
            for way in link.ways:
                try:
                    return await _ask(link, way, home, channels, here)
                except RemoteError as error:
                    whys.append(f"{way.at}: {error.detail}")
                except grpc.aio.AioRpcError as error:
                    whys.append(f"{way.at}: {error.details() or error.code().name.lower()}")
        finally:
            await channels.close()
    advice = NOT_LOCAL if link.is_local else "use a newer link, or check your firewall"
    return Seen((Finding(Level.WRONG, "coordinator", "; ".join(whys), advice),))


def _folder(home: Path, scratch: Path) -> DataDirectory:
    """Ours where no daemon runs on it: its identity is who would join. Else one that is forgotten."""
    if (home / "identity.key").exists():
        try:
            return DataDirectory(home)
        except LocalError:
            pass
    return DataDirectory(scratch)


async def _ask(link: JoinLink, way: Way, home: DataDirectory, channels: ChannelPool, here: Here) -> Seen:
    """Raises RemoteError, AioRpcError."""
    record = await record_of(way)
    began = time.time()
    run: services.Run = await rpc.CoordinatorStub(channels.channel(record)).GetRun(
        services.GetRunRequest(), timeout=CALL_SECONDS
    )
    ahead = clock_ahead(run, began)
    manifest = open_manifest(run.manifest, link.run_id)
    appointment = terms.open_appointment(manifest, run.appointment) if run.HasField("appointment") else None
    found = [Finding(Level.FINE, "coordinator", f"{way.at} serves {manifest.run.name}, {manifest.rounds.count:,} rounds")]
    if terms.coordinator_of(manifest, appointment) != link.coordinator:
        found = [Finding(Level.WRONG, "coordinator", "the run's owner has named another one", "use a newer link")]
    open_envelope(run.coordinator, link.run_id, (pb.KIND_PEER_RECORD,))
    if link.is_local:
        found.append(Finding(Level.ODD, "link", f"names {way.at}: it works on this machine only", NOT_LOCAL))
    found += [
        _clock(ahead),
        *of_part(manifest, here),
        await _reached(link, record, home, channels, here, manifest),
    ]
    return Seen(tuple(found), manifest, await rounds_trained(rpc.CoordinatorStub(channels.channel(record)), link.run_id))


async def rounds_trained(coordinator: rpc.CoordinatorStub, run_id: bytes) -> int:
    """Return the counted rounds so far, from the newest commit; 0 if the coordinator does not answer us. Raises
    RemoteError."""
    try:
        where = await _event(coordinator, LAST_ROUND, lambda event: event.HasField("tip"))
        if where is None or not where.tip.round:
            return 0
        told = await _event(coordinator, where.tip.round - 1, lambda event: event.statement.kind == pb.KIND_COMMIT)
    except grpc.aio.AioRpcError:  # that we may not follow the run is found where it is asked who may take part
        return 0
    return open_envelope(told.statement, run_id, (pb.KIND_COMMIT,)).body.trained if told is not None else 0


async def _event(
    coordinator: rpc.CoordinatorStub, from_round: int, wanted: Callable[[services.WatchEvent], bool]
) -> services.WatchEvent | None:
    """Return the first matching event that the coordinator sends to a spectator from a round on."""
    call = coordinator.Watch(services.WatchRequest(from_round=from_round), timeout=CALL_SECONDS)
    try:
        event: services.WatchEvent
        async for event in call:
            if wanted(event):
                return event
    finally:
        call.cancel()
    return None


def _clock(ahead: float) -> Finding:
    says = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
    if abs(ahead) > LARGEST_OFFSET_SECONDS:
        return Finding(Level.ODD, "clock", says, "synchronise this machine's clock: evidence and log times depend on it")
    return Finding(Level.FINE, "clock", says)


async def _reached(
    link: JoinLink, record: pb.PeerRecord, home: DataDirectory, channels: ChannelPool, here: Here, manifest: Manifest
) -> Finding:
    """Whether the coordinator can dial us where we would listen."""
    kept = home.remembered()
    port = here.port or int(kept.get("port", 0)) or here.usual_port
    certificate = tls.load_or_create(home.folder)
    try:
        everywhere = "::" if ":" in here.host else "0.0.0.0"
        server = await asyncio.start_server(lambda reader, writer: writer.close(), everywhere, port, ssl=_served(home.folder))
    except OSError as error:
        return Finding(Level.ODD, "reachable", f"not checked: cannot use port {port} ({error.strerror})")
    async with server:
        at = host_port(here.host, server.sockets[0].getsockname()[1])
        directory = PeerDirectory(None, home.identity, link.run_id, home.start_number())
        reach = Reachability()
        await reach.ask(channels, [record], directory.seal_record(at, certificate.certificate_der, "", []))
    if reach.reachable:
        return Finding(Level.FINE, "reachable", f"the coordinator reaches {at}")
    why = reach.why or "the coordinator gave no reason"
    wrong, effect = _unseen(manifest, here)
    return Finding(
        Level.WRONG if wrong else Level.ODD,
        "reachable",
        f"other peers cannot reach {at}: {why}. {effect}",
        "pass the address by which other peers reach this machine (--host), and forward --port at your router",
    )


def _unseen(manifest: Manifest, here: Here) -> tuple[bool, str]:
    """Whether it is wrong that others cannot dial us, and what follows."""
    if here.role is Role.RELAY or here.peer in manifest.run.relays:
        return True, "This run needs its relays, and no peer could fetch the blobs of this one"
    if here.role is Role.ARCHIVE:
        return False, "An archive does not need to be reachable"
    if manifest.audit.segments:
        return True, "This run audits, and counts no node whose states auditors cannot fetch"
    return False, "Relays store this node's payloads"


def _served(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context
