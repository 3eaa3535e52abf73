"""What this machine lacks to take part in a run: looked at before minutes are lost. Blocking, but for the network."""

import asyncio
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from dilocox.node.boxes.link import address_on, exposed
from dilocox.node.clock import layouts_of, payload_bytes
from dilocox.node.coordinator_link import clock_ahead, record_of
from dilocox.node.data.check import check_corpus, check_whole, must_bring_own
from dilocox.node.machine import Machine, this_machine
from dilocox.node.memory import host_bytes, lacks, stage_bytes
from dilocox.node.starts import BOUNDARIES_KEPT, RECENT_STATES, SNAPSHOTS_KEPT
from dilocox.node.tiling import tile
from dilocox.protocol import auditing, terms
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.findings import Finding, Level
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.manifest import Manifest, open_manifest
from dilocox.protocol.messages import open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.tensors import imported_bytes, stage_tensors, state_bytes
from dilocox.transport import tls
from dilocox.transport.blobs import BlobStore
from dilocox.transport.corpora import last_built
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.heads import Heads
from dilocox.transport.presence import Directory
from dilocox.transport.reach import Reach
from dilocox.transport.rpc import ChannelPool

__all__ = ["Here", "Seen", "disk_bytes", "of_machine", "of_own_data", "of_room", "see_run"]

CALL_SECONDS = 10.0
LARGEST_OFFSET_SECONDS = 60.0
"""Of clocks: certificates and people's numbers suffer beyond it. No wait depends on wall clocks."""


@dataclass(frozen=True)
class Here:
    """What an operator would say to `dilocox node`."""

    home: Path
    host: str
    port: int
    """0: any."""
    devices: int | None
    data: dict[str, Path]
    interface: str | None
    private: Path | None = None


def of_machine(manifest: Manifest, here: Here) -> Iterator[Finding]:
    """Devices and memory, disk, ports, data, and the interface of a cluster."""
    yield from of_room(manifest, here.home, here.devices)
    yield _port(here.port)
    yield from _data(manifest, here)
    if here.interface is not None:
        yield _interface(here.interface)


def of_room(manifest: Manifest, home: Path, devices: int | None) -> Iterator[Finding]:
    """Devices, memory, disk: of a machine that is a cluster by itself."""
    yield from _devices(manifest, devices)
    yield _disk(manifest, home)


def _devices(manifest: Manifest, devices: int | None) -> Iterator[Finding]:
    try:
        machine = this_machine(devices)
        tiling = tile([machine.devices], manifest.model.stages, manifest.training.microbatches, manifest.training.schedule)
    except ConfigError as error:
        yield Finding(Level.WRONG, "devices", str(error))
        return
    kind = "CUDA device" if machine.cuda else "stage worker on CPUs"
    used, more = tiling.length * tiling.copies, "" if machine.devices == 1 else "s"
    yield Finding(
        Level.FINE, "devices", f"{machine.devices} {kind}{more}, of which {used} train {manifest.model.stages} stages"
    )
    lacking = lacks(manifest, tiling, [machine])
    for lack in lacking:
        yield Finding(
            Level.WRONG,
            "memory",
            lack.sentence("this machine"),
            "share the stages with other machines (--cluster-boxes), or train a smaller model",
        )
    if not lacking:
        yield _memory(manifest, machine)


def _memory(manifest: Manifest, machine: Machine) -> Finding:
    needed = host_bytes(manifest, range(manifest.model.stages)) / 1e9
    if not machine.host_bytes:
        return Finding(Level.ODD, "memory", f"is not known here; outer state takes {needed:,.1f} GB of it")
    return Finding(Level.FINE, "memory", f"{machine.host_bytes / 1e9:,.1f} GB; outer state takes {needed:,.1f} of it")


def disk_bytes(manifest: Manifest, clusters: int) -> int:
    """That a box which holds all stages fills at most, beside data and chain: states that it keeps (with one that arrives),
    boundaries (with one that is being written), states of phases that may be audited, weights that adapters are added to, and the
    payloads of so many clusters until two later snapshots are agreed."""
    model, stages = manifest.model, range(manifest.model.stages)
    states = (SNAPSHOTS_KEPT + RECENT_STATES + 1) * sum(state_bytes(model, stage) for stage in stages)
    held = stage_bytes(manifest, stages, half=False)
    boundaries = (BOUNDARIES_KEPT + 1) * (2 * held.gradients + held.moments)  # anchor, feedback; moments
    shapes = [[spec.shape for spec in stage_tensors(model, stage)] for stage in stages]
    payload = payload_bytes(layouts_of(shapes, manifest.compression))
    rounds = (SNAPSHOTS_KEPT + 1) * manifest.rounds.snapshot_every
    marks = (auditing.WAIT + 2) * (manifest.audit.segments + 1) * manifest.phase_bytes if manifest.audit.segments else 0
    frozen = sum(max(imported_bytes(model, stage)) for stage in stages) if model.lora is not None else 0
    return int(states + boundaries + marks + frozen + clusters * rounds * payload)


def _disk(manifest: Manifest, home: Path) -> Finding:
    there = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())
    free, wanted = shutil.disk_usage(there).free, disk_bytes(manifest, manifest.start_clusters)
    says = f"{free / 1e9:,.1f} GB free at {home}; states, boundaries and payloads of {manifest.start_clusters} clusters take"
    says = f"{says} {wanted / 1e9:,.1f}"
    if free < wanted:
        return Finding(Level.WRONG, "disk", says, "make room, or name another folder with --home")
    return Finding(Level.FINE, "disk", says)


def _port(port: int) -> Finding:
    if not port:
        return Finding(Level.FINE, "port", "any that is free: name one (--port) that your router lets in, to be reached")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            return Finding(
                Level.WRONG,
                "port",
                f"{port} cannot be had: {error.strerror}",
                "stop what listens there, or name another --port",
            )
    return Finding(Level.FINE, "port", f"{port} is free")


def _data(manifest: Manifest, here: Here) -> Iterator[Finding]:
    name = manifest.data.name
    for other in sorted(here.data.keys() - {name}):
        yield Finding(
            Level.ODD, f"--data {other}", f"the run's data are called {name}: nobody reads {other}", f"--data {name}=DIR"
        )
    if name not in here.data:
        return
    try:
        check_corpus(manifest, here.data[name])
    except (ConfigError, OSError) as error:
        yield Finding(Level.WRONG, f"--data {name}", str(error), "leave it out: a node fetches the data from peers")
    else:
        yield Finding(Level.FINE, f"--data {name}", "whole, and the run's")


def of_own_data(manifest: Manifest, private: Path | None) -> Iterator[Finding]:
    """What a node brings to a run on private data. Whether it was built with the run's tokenizer shows when it joins."""
    try:
        must_bring_own(manifest, private)
        if private is not None:
            store = BlobStore(private, ours=False)
            corpus = check_whole(store, last_built(private))
            yield Finding(Level.FINE, "--private", f"{corpus.tokens:,} tokens, built with tokenizer {corpus.tokenizer}")
    except (ConfigError, OSError) as error:
        yield Finding(Level.WRONG, "--private", str(error))


def _interface(name: str) -> Finding:
    try:
        address = address_on(name)
    except LocalError as error:
        return Finding(Level.WRONG, "cluster interface", str(error))
    if warning := exposed(name, address):
        return Finding(Level.ODD, "cluster interface", warning)
    return Finding(Level.FINE, "cluster interface", f"{name} has {address}")


# The network: from a join link.


@dataclass(frozen=True)
class Seen:
    """Of a run, through its link."""

    findings: tuple[Finding, ...]
    manifest: Manifest | None = None
    """None: it could not be had."""


async def see_run(link: JoinLink, here: Here) -> Seen:
    """The run's manifest from its coordinator; whether clocks agree, whether it can dial us back, and whether we may take part."""
    try:
        record = await record_of(link)
    except RemoteError as error:
        return Seen(
            (
                Finding(
                    Level.WRONG, "coordinator", f"{link.at}: {error.detail}", "ask for a newer link, or look at your firewall"
                ),
            )
        )
    with tempfile.TemporaryDirectory(prefix="dilocox-check-") as scratch, closing(_folder(here.home, Path(scratch))) as home:
        channels = ChannelPool(home.identity, link.run_id, Heads())
        try:
            return await _ask(link, record, home, channels, here)
        except (RemoteError, grpc.aio.AioRpcError) as error:
            why = error.detail if isinstance(error, RemoteError) else error.code().name.lower()
            return Seen((Finding(Level.WRONG, "coordinator", f"{link.at}: {why}", "ask for a newer link"),))
        finally:
            await channels.close()


def _folder(home: Path, scratch: Path) -> DataDirectory:
    """Ours where no daemon runs on it: its identity is who would join. Else one that is forgotten."""
    if (home / "identity.key").exists():
        try:
            return DataDirectory(home)
        except LocalError:
            pass
    return DataDirectory(scratch)


async def _ask(link: JoinLink, record: pb.PeerRecord, home: DataDirectory, channels: ChannelPool, here: Here) -> Seen:
    """Raises RemoteError, AioRpcError."""
    began = time.time()
    run: services.Run = await rpc.CoordinatorStub(channels.channel(record)).GetRun(
        services.GetRunRequest(), timeout=CALL_SECONDS
    )
    ahead = clock_ahead(run, began)
    manifest = open_manifest(run.manifest, link.run_id)
    appointment = terms.open_appointment(manifest, run.appointment) if run.HasField("appointment") else None
    found = [Finding(Level.FINE, "coordinator", f"{link.at} serves {manifest.run.name}, {manifest.rounds.count:,} rounds")]
    if terms.coordinator_of(manifest, appointment) != link.coordinator:
        found = [Finding(Level.WRONG, "coordinator", "the run's owner has named another one", "ask for a newer link")]
    open_envelope(run.coordinator, link.run_id, (pb.KIND_PEER_RECORD,))
    found += [
        _clock(ahead),
        _admitted(manifest, home),
        await _reached(link, record, home, channels, here, bool(manifest.audit.segments)),
    ]
    return Seen(tuple(found), manifest)


def _clock(ahead: float) -> Finding:
    says = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
    if abs(ahead) > LARGEST_OFFSET_SECONDS:
        return Finding(
            Level.ODD, "clock", says, "let this machine follow a time server: evidence and what you read go by the clock"
        )
    return Finding(Level.FINE, "clock", says)


def _admitted(manifest: Manifest, home: DataDirectory) -> Finding:
    me, admission = home.identity.peer, manifest.admission
    if admission.policy == "allow-list" and me not in admission.allow:
        return Finding(
            Level.WRONG,
            "admission",
            f"{me} is not on the run's allow-list",
            "its owner must name that id, or name the --home that has another",
        )
    if manifest.attestation.kinds:
        kinds = " or ".join(manifest.attestation.kinds)
        return Finding(
            Level.ODD, "admission", f"the run asks for evidence ({kinds}): `dilocox attest self` says what this machine has"
        )
    return Finding(Level.FINE, "admission", "open to anybody" if admission.policy == "open" else "on the allow-list")


async def _reached(
    link: JoinLink, record: pb.PeerRecord, home: DataDirectory, channels: ChannelPool, here: Here, audits: bool
) -> Finding:
    """Whether the coordinator can dial us where we would listen. `audits`: whether the run does."""
    kept = home.remembered()
    port = here.port or int(kept.get("port", 0))
    certificate = tls.load_or_create(home.folder)
    try:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", port, ssl=_served(home.folder))
    except OSError as error:
        return Finding(Level.ODD, "reachable", f"not asked: port {port} cannot be had ({error.strerror})")
    async with server:
        at = f"{here.host}:{server.sockets[0].getsockname()[1]}"
        directory = Directory(None, home.identity, link.run_id, home.start_number())
        reach = Reach()
        await reach.ask(channels, [record], directory.seal_record(at, certificate.certificate_der, "", []))
    if reach.reachable:
        return Finding(Level.FINE, "reachable", f"the coordinator can dial {at}")
    why = reach.why or "the coordinator did not say"
    stored = "Payloads go to peers that keep them for you"
    unseen = "This run audits, and who cannot be asked for the states of its phases is refused for that"
    return Finding(
        Level.WRONG if audits else Level.ODD,
        "reachable",
        f"others cannot dial {at}: {why}. {unseen if audits else stored}",
        "name the address by which others reach you (--host), and let --port in at your router",
    )


def _served(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.pem")
    return context
