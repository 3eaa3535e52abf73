"""Put a node's workers together, as our cluster's lead host or as one of its other hosts."""

import logging
import os
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilocox.node.cluster.cluster_hosts import ClusterHosts, ClusterSettings
from dilocox.node.cluster.follower import Follower
from dilocox.node.cluster.own_host import OwnHost
from dilocox.node.cluster.private_data import PrivateData
from dilocox.node.cluster.supervisor import WorkerSupervisor, contributions_of
from dilocox.node.context.peer import MANIFEST, PeerRuntime
from dilocox.node.context.run_context import RunContext
from dilocox.node.context.settings import NodeSettings
from dilocox.node.exchange.payload_checker import PayloadChecker
from dilocox.node.exchange.relay_store import RelayStore
from dilocox.node.exchange.relays import Relays
from dilocox.node.hosts.cluster_link import CLUSTER_LINK, ClusterLink, address_on, load_or_create_secret
from dilocox.node.hosts.lead import BoxAdmission, LeadService
from dilocox.node.hosts.lead_connection import LeadConnection
from dilocox.node.member.driver import MemberPort
from dilocox.node.member.judging import Judge
from dilocox.node.member.participant import Workers
from dilocox.node.state.retention import BlobRetention
from dilocox.node.state.run_data import RunData
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.environment import WorkerSettings
from dilocox.node.workers.pool import LOOPBACK, Launch, WorkerPool
from dilocox.node.workers.progress import ClusterProgress
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.ids import JoinLink, several
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import write_atomically

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account

__all__ = [
    "HostWorkers",
    "Workplace",
    "admission",
    "follow_lead",
    "has_trained",
    "lead_cluster",
    "open_workplace",
    "worker_pool",
]

STAGES = "stages"
"""Folder of the workers' checkpoints, in a run's folder."""

log = logging.getLogger(__name__)


def has_trained(folder: Path) -> bool:
    """Return whether this node trained in the run of that folder, in any incarnation. Blocking."""
    return any((folder / STAGES).glob("*"))


def worker_pool(
    settings: NodeSettings,
    machine: Devices,
    home: DataDirectory,
    place: PeerRuntime,
    data: BlobStore,
    own_text: PrivateData | None,
) -> WorkerPool:
    def environment(socket: str, launch: Launch) -> dict[str, str]:
        return WorkerSettings(
            socket=socket,
            manifest=place.folder / MANIFEST,
            blobs=place.store.folder,
            stages=place.folder / STAGES,
            cluster=settings.cluster.lead.coordinator if settings.cluster else home.identity.peer,
            devices="cuda" if machine.cuda else "cpu",
            copies=launch.copies,
            microbatches=launch.microbatches,
            recompute=launch.recompute,
            threads=settings.threads or max(1, (os.cpu_count() or 1) // len(launch.ranks)),
            codec_cpus=settings.codec_cpus,
            data=data.folder,
            step_seconds=settings.step_seconds,
            checkpoint_seconds=settings.checkpoint_seconds,
            outer_state=settings.outer_state,
            private=own_text.folder if own_text is not None else None,
            private_digest=own_text.digest.hex() if own_text is not None else "",
            clip=own_text.account.budget.clip if own_text is not None else 0.0,
            noise=own_text.account.noise if own_text is not None else 0.0,
        ).environment()

    return WorkerPool(home.folder, environment)


@dataclass(frozen=True)
class HostWorkers:
    workers: Workers
    judge: Judge | None
    """The machine of a lead host asks it; None: another host leads, and its machine asks nothing."""
    loops: dict[str, Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Workplace:
    """Parts that the workers of this host use."""

    run_data: RunData
    own_host: OwnHost
    keeping: BlobRetention
    pool: WorkerPool
    crew: ClusterProgress


def open_workplace(
    context: RunContext,
    run_data: RunData,
    relay_store: RelayStore,
    relays: Relays,
    pool: WorkerPool,
    crew: ClusterProgress,
    member: MemberPort,
    cluster: str,
) -> Workplace:
    """`cluster`: the peer id of its lead host."""
    chain, downloader, hosted = context.chain, run_data.downloader, run_data.hosted

    def roster() -> Mapping[str, Cluster]:
        return chain.head.roster

    def contributions() -> Iterable[pb.Contribution]:
        return contributions_of(member.state) if cluster == context.me else ()

    checker = PayloadChecker(context.manifest, downloader, hosted, roster, run_data.roots)
    own_host = OwnHost(hosted, checker, run_data.applies, run_data.starts, run_data.roots, relays)
    keeping = BlobRetention(context.store, relay_store, run_data.starts, crew.progress, contributions, cluster)
    return Workplace(run_data, own_host, keeping, pool, crew)


def follow_lead(
    context: RunContext, member: MemberPort, line: LeadConnection, place: Workplace, interface: str | None
) -> HostWorkers:
    """Return workers of this host that follow its cluster's lead host."""
    keeping, crew = place.keeping, place.crew
    follower = Follower(context, member, line, place.pool, place.own_host, keeping, crew, interface or LOOPBACK)
    return HostWorkers(follower, None, {})


def lead_cluster(
    context: RunContext,
    member: MemberPort,
    machine: Devices,
    lead: LeadService,
    place: Workplace,
    settings: ClusterSettings,
    account: "Account | None",
) -> HostWorkers:
    """Return workers of this host and of hosts that join it, with this host as lead. `account`: privacy account of the
    private data."""
    team = ClusterHosts(context, member, machine, place.pool, place.own_host, lead, settings)
    generations = WorkerSupervisor(context, member, team, place.run_data.starts, place.keeping, place.crew, account)
    return HostWorkers(generations, generations, {"hosts": team.watch_hosts(), "claim": team.watch_claim()})


def admission(settings: NodeSettings, identity: Identity, place: PeerRuntime, cuda: bool, corpus: bytes) -> BoxAdmission:
    """Return what the cluster's other hosts must show, and write the link that they need. `corpus`: digest of the private
    data."""
    join, network, others = settings.join, place.network, settings.boxes - 1
    secret = load_or_create_secret(place.folder / "cluster.secret")
    port = network.address.rpartition(":")[2]
    at = f"{address_on(settings.interface or LOOPBACK)}:{port}"
    lead = JoinLink(join.run_id, identity.peer, at, sha256(network.endpoint.certificate.certificate_der))
    path = settings.home / CLUSTER_LINK
    write_atomically(path, f"{ClusterLink(secret, lead, join)}\n".encode(), mode=0o600)
    start = "dilocox node --cluster cluster.link --cluster-interface INTERFACE --host ITS.ADDRESS"
    log.info("copy %s to the other %s of this cluster, and start each with: %s", path, several(others, "host", "hosts"), start)
    return BoxAdmission(join.run_id, identity.peer, secret, cuda, others, corpus)
