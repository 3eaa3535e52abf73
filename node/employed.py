"""What a node's workers are made of, and who has them: our cluster's lead, or a box of another's."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dilocox.node.boxes.follower import Follower
from dilocox.node.boxes.lead import BoxAdmission
from dilocox.node.boxes.link import CLUSTER_LINK, ClusterLink, address_on, load_or_create_secret
from dilocox.node.boxes.own_host import OwnHost
from dilocox.node.boxes.team import Team
from dilocox.node.generations import Generations
from dilocox.node.holding import Holding
from dilocox.node.machine import Machine
from dilocox.node.own_text import OwnText
from dilocox.node.participant import Participant, Workers
from dilocox.node.payload_checker import PayloadChecker
from dilocox.node.place import MANIFEST, Place
from dilocox.node.run_data import RunData
from dilocox.node.settings import NodeSettings
from dilocox.node.shard_roots import ShardRoots
from dilocox.node.worker_settings import WorkerSettings
from dilocox.node.workers import LOOPBACK, Launch, WorkerPool
from dilocox.protocol import member
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.head import Cluster
from dilocox.protocol.ids import JoinLink, several
from dilocox.protocol.manifest import Manifest
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.files import write_atomically
from dilocox.transport.tasks import Tasks

__all__ = ["Employed", "has_trained", "worker_pool"]

STAGES = "stages"
"""In a run's folder: the boundaries of its workers."""

log = logging.getLogger(__name__)


def has_trained(folder: Path) -> bool:
    """Whether this node trained in the run of that folder, in this life or an earlier one. Blocking."""
    return any((folder / STAGES).glob("*"))


def worker_pool(
    settings: NodeSettings,
    machine: Machine,
    home: DataDirectory,
    place: Place,
    data: BlobStore,
    own_text: OwnText | None,
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
            threads=settings.threads or max(1, (os.cpu_count() or 1) // len(launch.ranks)),
            codec_cpus=settings.codec_cpus,
            data=data.folder,
            step_seconds=settings.step_seconds,
            checkpoint_every=settings.checkpoint_every,
            outer_state=settings.outer_state,
            private=own_text.folder if own_text is not None else None,
            private_digest=own_text.digest.hex() if own_text is not None else "",
            clip=own_text.account.budget.clip if own_text is not None else 0.0,
            noise=own_text.account.noise if own_text is not None else 0.0,
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
    run_data: RunData
    holding: Holding
    pool: WorkerPool
    tasks: Tasks
    own_text: OwnText | None
    """None: the run's data are what we train on."""

    @property
    def _own_digest(self) -> bytes:
        """Of that text; empty where there is none."""
        return self.own_text.digest if self.own_text is not None else b""

    def workers(self, participant: Participant) -> Workers:
        machine, interface = self.machine, self.settings.interface or LOOPBACK
        manifest, me, chain, place = self.manifest, self.identity.peer, self.chain, self.place
        starts = self.run_data.starts
        if self.settings.cluster is not None:
            return Follower(
                manifest,
                me,
                self.settings.cluster,
                place.channels,
                chain,
                place.store,
                self.holding,
                self._own_host(),
                starts,
                self.pool,
                machine,
                interface,
                self.tasks,
                participant.feed,
                participant.tell,
                self._own_digest,
            )
        others = self.settings.boxes - 1
        if others:
            place.lead.admission = self._admission(machine.cuda, others)
        patience = self.settings.box_patience
        team = Team(manifest, me, machine, self.pool, self._own_host(), place.lead, others, interface, patience)
        team.laid = lambda hosts: participant.feed(member.Laid(hosts))
        team.whole = lambda here: participant.feed(member.Whole(here))
        team.tell = participant.tell
        return Generations(
            manifest,
            me,
            chain,
            place.store,
            self.holding,
            starts,
            team,
            self.tasks,
            lambda: participant.state,
            participant.feed,
            participant.emit,
            participant.tell,
            self.own_text.account if self.own_text is not None else None,
        )

    def _own_host(self) -> OwnHost:
        manifest, data = self.manifest, self.run_data

        def roster() -> Mapping[str, Cluster]:
            return self.chain.head.roster

        checker = PayloadChecker(manifest, data.downloader, data.hosted, roster)
        roots = ShardRoots(manifest, self.place.store, roster)
        return OwnHost(data.hosted, checker, data.applies, data.starts, roots, self.holding)

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
        log.info(
            "copy %s to the other %s of this cluster, and start each with: %s", path, several(others, "box", "boxes"), start
        )
        return BoxAdmission(join.run_id, self.identity.peer, secret, cuda, others, self._own_digest)
