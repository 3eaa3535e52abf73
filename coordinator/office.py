"""One of several coordinators over a store: its way from the start to the lead, and what it does to keep it."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dilocox.coordinator.desk import Desk, ElectionService
from dilocox.coordinator.driver import clock
from dilocox.coordinator.etcd import Etcd, EtcdPlace
from dilocox.coordinator.service import CoordinatorService
from dilocox.coordinator.shared_log import Holder, SharedLog
from dilocox.coordinator.standing_by import stand_by
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.files import write_atomically
from dilocox.transport.network import Network
from dilocox.transport.rpc import ChannelPool
from dilocox.transport.tasks import Tasks

__all__ = ["Office", "win_office", "write_down_store"]

MARKER = "shared-store"
"""In the run's folder of who was started with a store."""


def write_down_store(folder: Path, place: EtcdPlace | None) -> None:
    """That the coordinator of this folder shares its open round with others: without the store it would sign beside them what none
    of them knows. Raises ConfigError where it is started so."""
    marker = folder / MARKER
    if place is not None:
        write_atomically(marker, f"{','.join(place.endpoints)}/{place.prefix}\n".encode())
    elif marker.exists():
        shared = marker.read_text(errors="replace").strip()
        raise ConfigError(
            f"the coordinator of {folder} shares its rounds with others at {shared}: say --store."
            f" Where none of them is left, remove {marker}, and it goes on alone"
        )


@dataclass(frozen=True)
class Office:
    """What who leads has."""

    log: SharedLog
    election: ElectionService

    def open(self, desk: Desk, service: CoordinatorService) -> None:
        """Serve, and tell who waited for it."""
        service.fence = self.log.fence
        desk.serve(service)
        self.election.lead(self.log.fence)


async def win_office(
    place: EtcdPlace,
    name: str,
    home: DataDirectory,
    chain: ChainFile,
    network: Network,
    desk: Desk,
    tasks: Tasks,
    closing: AsyncExitStack,
    tell: Callable[[str], None],
    tell_places: Callable[[Sequence[Holder]], None],
) -> Office:
    """Stand by until we lead; from then on `tasks` keep the lease, and fail with DeposedError once it is gone. `tell` hears what we
    do meanwhile, `tell_places` where the coordinators are. Raises Stopped, ConfigError."""
    digest = sha256(network.certificate.certificate_der)
    store, channels = Etcd(place), ChannelPool(home.identity, chain.manifest.run_id)
    closing.push_async_callback(store.close)
    log = SharedLog(store, place.prefix, chain, Holder(name, network.address, digest.hex(), network.dht_addresses), clock)
    log.tell_places = tell_places
    closing.push_async_callback(log.resign)
    closing.push_async_callback(channels.close)
    closing.push_async_callback(tasks.close)  # first of all: what is written after we resigned is refused
    election = ElectionService(chain, network.callers)
    rpc.add_ElectionServicer_to_server(election, network.server)
    await network.server.start()

    def says(sentence: str) -> None:
        desk.says = sentence
        tell(sentence)

    await tasks.race(stand_by(log, chain, channels, says))
    tasks.start(log.keep_office(), "lease")
    mine = home.start_number()
    number = await tasks.race(log.number_of_life(mine))
    if number > mine:
        home.start_number(above=number - 1)
    network.directory.number_from(number)
    network.publish()
    return Office(log, election)
