"""Network of a daemon, the same for node and coordinator: a gRPC server, a published record, and an optional DHT child.

The DHT is a way to find changed addresses, not a condition. The daemon chooses its DHT port and computes its DHT
address, so it never waits for the child, and the child retries for ever in the background.
"""

import errno
import ipaddress
import logging
import random
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import grpc.aio

from dilocox.protocol.errors import LocalError, PortError
from dilocox.protocol.ids import host_port
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.limits.caller_auth import CallerAuth
from dilocox.transport.limits.connection_limits import ConnectionLimits
from dilocox.transport.limits.head_gossip import HeadGossip
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net import tls
from dilocox.transport.net.dht import Dht, DhtSettings
from dilocox.transport.net.peer_directory import PeerDirectory, cached_records
from dilocox.transport.net.reachability import Reachability, ReachService
from dilocox.transport.net.rpc import ChannelPool, create_server
from dilocox.transport.net.tls import Certificate
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.store.data_directory import DataDirectory

__all__ = ["Listen", "Network", "choose_port", "multiaddr", "open_network"]

log = logging.getLogger(__name__)

STOP_SECONDS = 0.5
"""Grace for calls in progress when the server stops."""
OWN_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: a port that is free when we look is free when libp2p binds it."""


@dataclass(frozen=True)
class Listen:
    host: str
    """Address by which others reach this machine; IPv6 without brackets."""
    port: int
    """gRPC; 0: any, kept over restarts."""
    dht_port: int
    """DHT port; rules as for `port`."""
    dht: bool = True
    """Whether to take part in one: a swarm whose coordinator does not move needs none."""
    announced: bool = True
    """True if the record contains an address: not for a daemon whose bandwidth is too low to serve all peers."""
    first_port: int = 0
    """gRPC port of a daemon without an option and without an earlier port; 0: any."""
    first_dht_port: int = 0
    """DHT port; rules as for `first_port`."""


@dataclass(frozen=True)
class Endpoint:
    """Addresses by which peers reach this daemon."""

    address: str
    """host:port of the server."""
    certificate: Certificate
    """Certificate of the server."""
    dht_addresses: tuple[str, ...]
    """Published DHT addresses; the child need not listen there yet."""
    ports: dict[str, int]
    """Ports that a restart reuses, because the join link and other peers' records contain them."""


class OwnRecord:
    """This peer's signed record: its content, and its publication."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        announced: bool,
        directory: PeerDirectory,
        reach: Reachability,
        on_record: Callable[[Statement], None],
        begin: Callable[[Callable[[], Statement]], None],
    ) -> None:
        """Publish the record. `announced`: it contains an address. `begin`: starts to publish the result of a function, in
        the background."""
        self._endpoint, self._name, self._announced = endpoint, name, announced
        self._directory, self._reach, self._on_record, self._begin = directory, reach, on_record, begin

    def make(self) -> Statement[pb.PeerRecord]:
        """Sign a new record. It has no address where peers cannot dial us, or are not to."""
        hidden = self._reach.reachable is False or not self._announced
        sealed = self._seal("" if hidden else self._endpoint.address, self._name, self._endpoint.dht_addresses)
        self._on_record(sealed)
        return sealed

    def for_probe(self) -> Statement[pb.PeerRecord]:
        """Sign a record with the address that we believe to have."""
        return self._seal(self._endpoint.address, "", ())

    def _seal(self, address: str, name: str, dht_addresses: Sequence[str]) -> Statement[pb.PeerRecord]:
        return self._directory.seal_record(address, self._endpoint.certificate.certificate_der, name, dht_addresses)

    def renew(self) -> None:
        """Sign our record again, at once."""
        self._directory.renew(self.make())

    def publish(self) -> None:
        """Make our record known, from now on."""
        self.renew()
        self._begin(self.make)


@dataclass(frozen=True)
class Network:
    server: grpc.aio.Server
    """Server that is not started: services are added first."""
    endpoint: Endpoint
    own: OwnRecord
    """Record; published already, unless `open_network` was called without `publish`."""
    directory: PeerDirectory
    callers: CallerAuth
    reach: Reachability

    @property
    def address(self) -> str:
        """host:port of the server."""
        return self.endpoint.address

    async def watch_reach(self, channels: ChannelPool) -> None:
        """Find out whether others dial us, and have our record say it; for ever."""

        def others() -> list[pb.PeerRecord]:
            return [known.body for peer in self.directory.known if (known := self.directory.records.get(peer))]

        await self.reach.watch(channels, others, self.own.for_probe)


def choose_port() -> int:
    """A free TCP port for another process. Raises LocalError."""
    for port in random.sample(OWN_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    raise LocalError("no free TCP port was found. Use one with --dht-port.")


def _look_for(port: int, what: str, option: str) -> None:
    """Raise PortError if a port is not available: the gRPC library would print a page of its own first."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen()
        except OSError as error:
            why = error.strerror if error.errno != errno.EADDRINUSE else "another program uses it"
            raise PortError(f"cannot use {what} port {port}: {why}. Use another with {option}.") from error


def multiaddr(host: str, port: int, peer: str) -> str:
    """The libp2p address of a peer's DHT node."""
    kind = "dns4"
    with suppress(ValueError):
        kind = f"ip{ipaddress.ip_address(host).version}"
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"


async def open_network(
    home: DataDirectory,
    run_id: bytes,
    listen: Listen,
    name: str,
    tasks: Tasks,
    closing: AsyncExitStack,
    bootstrap: Iterable[str] = (),
    on_record: Callable[[Statement], None] = lambda record: None,
    heads: HeadGossip | None = None,
    traffic: Traffic | None = None,
    publish: bool = True,
) -> Network:
    """Serve, and publish this peer's record in the run's DHT, beginning with peers known before and `bootstrap`.
    `publish`: at once."""
    certificate = tls.load_or_create(home.folder)
    kept = home.remembered()
    wanted = listen.port or kept.get("port") or listen.first_port
    _look_for(wanted, "gRPC", "--port")
    dht_port = listen.dht_port or kept.get("dht_port") or listen.first_dht_port or choose_port()
    if listen.dht:
        try:
            _look_for(dht_port, "DHT", "--dht-port")
        except PortError as error:  # an earlier DHT process may be ending
            log.warning("%s Until then other peers do not find this daemon in the DHT.", error)
    known = home.run_folder(run_id) / "peers.json"
    everywhere = "/ip6/::" if ":" in listen.host else "/ip4/0.0.0.0"
    settings = DhtSettings(run_id, home.identity, home.folder, f"{everywhere}/tcp/{dht_port}", tuple(bootstrap))
    dht = Dht(settings) if listen.dht else None
    directory = PeerDirectory(dht, home.identity, run_id, home.start_number())
    for seen in cached_records(known, run_id):
        directory.learn(seen)
    callers = CallerAuth(run_id, certificate.certificate_der, directory.takes_part)
    connections = ConnectionLimits(directory.takes_part)
    server, port = await create_server(f"0.0.0.0:{wanted}", certificate, traffic, callers, connections)
    closing.push_async_callback(server.stop, STOP_SECONDS)
    rpc.add_ReachServicer_to_server(ReachService(run_id, callers, heads or HeadGossip()), server)
    reach = Reachability(directory.changed.set)
    addresses = (multiaddr(listen.host, dht_port, home.identity.peer),) if listen.dht else ()
    ports = {"port": port, "dht_port": dht_port} if listen.dht else {"port": port}
    endpoint = Endpoint(host_port(listen.host, port), certificate, addresses, ports)
    closing.push_async_callback(tasks.close)
    tasks.start(connections.watch(port), "connections")

    def begin(record: Callable[[], Statement]) -> None:
        if dht is not None:
            tasks.start(dht.run(), "dht")
        tasks.start(directory.publish_forever(record), "publish")
        tasks.start(directory.cache_forever(known), "cache")

    own = OwnRecord(endpoint, name, listen.announced, directory, reach, on_record, begin)
    if publish:
        own.publish()
    return Network(server, endpoint, own, directory, callers, reach)
