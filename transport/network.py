"""A daemon's place in the network, the same for node and coordinator: a gRPC server, a DHT child, a published record."""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio

from dilocox.protocol.messages import Statement
from dilocox.transport import tls
from dilocox.transport.data_directory import DataDirectory
from dilocox.transport.dht import Dht, DhtSettings
from dilocox.transport.presence import Directory, cached_addresses
from dilocox.transport.rpc import create_server
from dilocox.transport.tasks import Tasks

__all__ = ["Listen", "Network", "open_network"]

STOP_SECONDS = 0.5
"""Grace for calls in progress when the server stops."""


@dataclass(frozen=True)
class Listen:
    host: str
    """Address by which others reach this machine."""
    port: int
    """gRPC; 0: any, kept over restarts."""
    dht_port: int
    """As `port`."""


@dataclass(frozen=True)
class Network:
    server: grpc.aio.Server
    """Not started: services are added first."""
    address: str
    """host:port of the server."""
    dht_addresses: tuple[str, ...]
    """As announced."""
    ports: dict[str, int]
    """Kept over restarts, because the join link and other peers' records name them."""
    directory: Directory


async def open_network(
    home: DataDirectory,
    run_id: bytes,
    listen: Listen,
    name: str,
    tasks: Tasks,
    closing: AsyncExitStack,
    bootstrap: Iterable[str] = (),
    announced: Callable[[list[str]], list[str]] = list,
    on_record: Callable[[Statement], None] = lambda record: None,
) -> Network:
    """Join the run's DHT and keep our record there. `announced`: which of our DHT addresses others are told.

    A daemon that restarts finds the DHT again through the peers it knew, even when its first contact has forgotten it.
    """
    certificate = tls.load_or_create(home.folder)
    kept = home.remembered()
    server, port = await create_server(f"0.0.0.0:{listen.port or kept.get('port', 0)}", certificate)
    closing.push_async_callback(server.stop, STOP_SECONDS)
    known = home.run_folder(run_id) / "dht-peers.json"
    dht = Dht(
        DhtSettings(
            run_id=run_id,
            identity=home.identity,
            folder=home.folder,
            listen=[f"/ip4/0.0.0.0/tcp/{listen.dht_port or kept.get('dht_port', 0)}"],
            announce=[],
            bootstrap=list(dict.fromkeys([*bootstrap, *cached_addresses(known)])),
        )
    )
    closing.push_async_callback(tasks.close)
    tasks.start(dht.run(), "dht")
    addresses = announced(await dht.started())
    address = f"{listen.host}:{port}"
    directory = Directory(dht, home.identity, run_id)

    def record() -> Statement:
        sealed = directory.seal_record(address, certificate.certificate_der, name, addresses)
        on_record(sealed)
        return sealed

    record()
    tasks.start(directory.publish_forever(record), "publish")
    tasks.start(directory.refresh_forever(), "refresh")
    tasks.start(directory.cache_forever(known), "cache")
    ports = {"port": port, "dht_port": int(addresses[0].split("/")[4])}
    return Network(server, address, tuple(addresses), ports, directory)
