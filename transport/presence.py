"""A daemon's place in the DHT: its own signed record kept published, everyone else's kept known."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import DilocoxError
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.blobs import write_atomically
from dilocox.transport.dht import Dht

__all__ = ["Directory", "cached_addresses"]

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0
"""Records live 300 s: four republications may fail before a peer disappears."""
REFRESH_SECONDS = 10.0
CACHED_ADDRESSES = 64
LOOKUP_SECONDS = 1.0
"""A missing record is looked up at most so often."""


def cached_addresses(path: Path) -> list[str]:
    """DHT addresses of peers known before: a daemon that restarts finds the swarm even when its first contact is gone."""
    addresses: list[str] = json.loads(path.read_text()) if path.exists() else []
    return addresses


class Directory:
    """Peer records by peer id, newest sequence first."""

    def __init__(self, dht: Dht, identity: Identity, run_id: bytes) -> None:
        self._dht, self._identity, self._run_id = dht, identity, run_id
        self.records: dict[str, Statement] = {}
        self._looked_up_at = 0.0
        self._looking = asyncio.Lock()

    def seal_record(self, address: str, certificate: bytes, name: str, dht_addresses: Sequence[str]) -> Statement:
        body = pb.PeerRecord(
            address=address,
            certificate=certificate,
            dht_addresses=dht_addresses,
            sequence=int(time.time() * 1000),
            name=name,
            version=version("dilocox"),
        )
        return seal(self._identity, pb.KIND_PEER_RECORD, self._run_id, body)

    async def publish_forever(self, make: Callable[[], Statement]) -> None:
        """Publish now and again; a DHT that is not there yet is tried again soon."""
        while True:
            pause = 2.0
            with contextlib.suppress(DilocoxError, OSError):
                if await self._dht.publish(make()):
                    pause = PUBLISH_SECONDS
            await asyncio.sleep(pause)

    async def cache_forever(self, path: Path) -> None:
        """Write down where the peers' DHT nodes are, for `cached_addresses` after a restart."""
        written: list[str] = []
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            records = [record for peer, record in self.records.items() if peer != self._identity.peer]
            addresses = sorted({address for record in records for address in record.body.dht_addresses})[:CACHED_ADDRESSES]
            if addresses and addresses != written:
                write_atomically(path, json.dumps(addresses).encode())
                written = addresses

    async def refresh_forever(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    async def refresh(self) -> None:
        try:
            found = await self._dht.peers()
        except (DilocoxError, OSError) as error:
            log.debug("DHT lookup failed: %s", error)
            return
        for record in found.values():
            self.learn(record)

    def learn(self, record: Statement) -> None:
        """Keep the newer of two records of a peer."""
        known = self.records.get(record.peer)
        if known is None or known.body.sequence < record.body.sequence:
            self.records[record.peer] = record
            self._dht.remember(list(record.body.dht_addresses))

    async def find(self, peer: str) -> pb.PeerRecord | None:
        """The peer's record, looked up when it is not known."""
        if peer not in self.records:
            async with self._looking:
                if peer not in self.records and time.monotonic() - self._looked_up_at > LOOKUP_SECONDS:
                    self._looked_up_at = time.monotonic()
                    await self.refresh()
        record = self.records.get(peer)
        return None if record is None else record.body
