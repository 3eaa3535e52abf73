"""Leader election: from start-up to the lease, and keeping the lease."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.driver import clock
from dilocox.coordinator.frontend import CoordinatorFrontend, ElectionService
from dilocox.coordinator.kv_store import StorePlace
from dilocox.coordinator.service import CoordinatorService
from dilocox.coordinator.shared_log import Candidate, SharedLog
from dilocox.coordinator.standby import stand_by
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.net.network import Network
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.process.malloc import freeze_startup
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import write_atomically

__all__ = ["Leadership", "campaign", "lead_alone", "write_down_store"]

MARKER = "shared-store"
"""File in the run's folder of a coordinator that was started with a store."""


def write_down_store(folder: Path, place: StorePlace | None) -> bool:
    """That the coordinator of this folder shares its open round with others: without the store it would sign beside them what none
    of them knows. Raises ConfigError where it is started so. Returns whether it did before: others may have signed more than it
    holds."""
    marker = folder / MARKER
    before = marker.exists()
    if place is not None:
        write_atomically(marker, f"{place.label}\n".encode())
    elif before:
        shared = marker.read_text(errors="replace").strip()
        raise ConfigError(
            f"the coordinator of {folder} shares its rounds with others at {shared}: pass --store. If no other "
            f"coordinator exists any more, delete {marker} to continue alone"
        )
    return before


class OwnIncarnation:
    """Implementation of frontend.Incarnation."""

    def __init__(self, home: DataDirectory, network: Network, log: SharedLog | None) -> None:
        """`log`: None where this is the only coordinator."""
        self._home, self._network, self._log = home, network, log

    async def rise(self, above: int) -> None:
        number = await self._log.number_of_life(above + 1) if self._log is not None else above + 1
        number = await asyncio.to_thread(self._home.start_number, number - 1)
        self._network.directory.number_from(number)
        self._network.own.renew()


@dataclass(frozen=True)
class Leadership:
    """Parts of a coordinator that leads."""

    desk: CoordinatorFrontend
    election: ElectionService
    log: SharedLog | None
    """Log in the store. None: this is the only coordinator, and it leads from its start."""

    def open(self, service: CoordinatorService) -> None:
        """Serve, and answer the peers that wait for a leader."""
        self.desk.serve(service)
        self.election.start_leading()


async def lead_alone(home: DataDirectory, chain: ChainFile, network: Network, desk: CoordinatorFrontend) -> Leadership:
    """Make the only coordinator leader. Nodes may have records of earlier coordinators."""
    election = ElectionService(desk, chain, network.callers, OwnIncarnation(home, network, None))
    rpc.add_ElectionServicer_to_server(election, network.server)
    await network.server.start()
    freeze_startup()
    return Leadership(desk, election, None)


async def campaign(
    place: StorePlace,
    name: str,
    home: DataDirectory,
    chain: ChainFile,
    network: Network,
    desk: CoordinatorFrontend,
    tasks: Tasks,
    closing: AsyncExitStack,
    tell: Callable[[str], None],
    tell_places: Callable[[Sequence[Candidate]], None],
    shared_before: bool,
) -> Leadership:
    """Stand by until this coordinator leads. From then on `tasks` renew the lease, and fail with DeposedError once it is
    lost. `tell` receives sentences about progress, `tell_places` the coordinators' addresses. `shared_before`: see
    `SharedLog`. Raises Stopped, ConfigError."""
    digest = sha256(network.endpoint.certificate.certificate_der)
    store, channels = place.open(), ChannelPool(home.identity, chain.manifest.run_id)
    closing.push_async_callback(store.close)
    me = Candidate(name, network.address, digest.hex(), network.endpoint.dht_addresses)
    log = SharedLog(store, place.prefix, chain, me, clock, shared_before, tell_places)
    closing.push_async_callback(log.resign)
    closing.push_async_callback(channels.close)
    closing.push_async_callback(tasks.close)  # first of all: what is written after we resigned is refused
    election = ElectionService(desk, chain, network.callers, OwnIncarnation(home, network, log))
    rpc.add_ElectionServicer_to_server(election, network.server)
    await network.server.start()
    freeze_startup()

    def says(sentence: str) -> None:
        desk.stand_by(sentence)
        tell(sentence)

    await tasks.race(stand_by(log, chain, channels, says))
    tasks.start(log.keep_office(), "lease")
    mine = home.start_number()
    number = await tasks.race(log.number_of_life(mine))
    if number > mine:
        home.start_number(above=number - 1)
    network.directory.number_from(number)
    network.own.publish()
    return Leadership(desk, election, log)
