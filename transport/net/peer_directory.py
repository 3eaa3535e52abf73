"""Peer directory: publishes this peer's signed record, and stores those of other peers, across restarts."""

import asyncio
import base64
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import DilocoxError, RemoteError
from dilocox.protocol.ids import Way
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.net.dht import Dht
from dilocox.transport.store.files import read_checked, write_atomically

__all__ = ["PeerDirectory", "cached_records", "is_overtaken", "life_of", "same_place"]

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 60.0
"""Records live 300 s: four republications may fail before a peer disappears."""
REFRESH_SECONDS = 10.0
SEQUENCE_BITS = 24
"""Bits of a record's sequence within one incarnation: one record a minute for thirty years."""
CACHED_RECORDS = 256
"""Most records in the cache, about 1 KiB each: one of these peers will be there after a restart."""
LOOKUP_SECONDS = 1.0
"""Shortest interval of lookups of a peer's record."""
SOON_SECONDS = 2.0


def cached_records(path: Path, run_id: bytes) -> list[Statement]:
    """Return verified records of peers known before: a restarted daemon finds the swarm even without its first contact."""

    def parse(raw: bytes) -> list[Statement]:
        try:
            envelopes = [base64.b64decode(text, validate=True) for text in json.loads(raw)]
            return [open_envelope(envelope, run_id, (pb.KIND_PEER_RECORD,)) for envelope in envelopes]
        except (TypeError, RemoteError) as error:
            raise ValueError(str(error)) from error

    return read_checked(path, parse) or []


def same_place(one: pb.PeerRecord, other: pb.PeerRecord) -> bool:
    """Whether two records of a peer say the same, whichever is newer."""
    bare = [pb.PeerRecord.FromString(record.SerializeToString()) for record in (one, other)]
    for record in bare:
        record.ClearField("sequence")
    return bare[0] == bare[1]


def life_of(record: pb.PeerRecord) -> int:
    """Return the incarnation in which a daemon signed its record."""
    return record.sequence >> SEQUENCE_BITS


def is_overtaken(record: pb.PeerRecord, known: pb.PeerRecord) -> bool:
    """Return whether the first of two records with one key is from an incarnation that another one replaced, or cannot be
    distinguished from. A store's revision is no evidence: stores are restored, replaced and abandoned."""
    life, other = life_of(record), life_of(known)
    return life < other or (life == other and record.certificate != known.certificate)


class PeerDirectory:
    """Peer records by peer id, newest sequence first. The coordinator passes on those of its roster; who is not among them, or
    does not answer where it was, is looked up in the DHT, one at a time and by name: what strangers put there is never seen."""

    def __init__(self, dht: Dht | None, identity: Identity, run_id: bytes, start_number: int) -> None:
        """Open the directory. `dht`: None if the operator wants none. `start_number`: of this incarnation; its records are
        newer than those of all earlier ones."""
        self._dht, self._identity, self._run_id = dht, identity, run_id
        self._sequence = itertools.count(start_number << SEQUENCE_BITS)
        self.records: dict[str, Statement] = {}
        self.known: tuple[str, ...] = ()
        self._parties: frozenset[str] = frozenset()
        """`known`, for `takes_part`."""
        self.own_hosts: set[str] = set()
        """Peer ids of the other hosts of our cluster, as long as they follow us."""
        self.own: Statement[pb.PeerRecord] | None = None
        """Our newest."""
        self._looked_up_at: dict[str, float] = {}
        self.changed = asyncio.Event()
        """Event, set when this peer's record changed."""
        self.elsewhere: tuple[Way, ...] = ()
        """Addresses of standbys with this peer's key."""

    def seal_record(self, address: str, certificate: bytes, name: str, dht_addresses: Sequence[str]) -> Statement:
        body = pb.PeerRecord(
            address=address,
            certificate=certificate,
            dht_addresses=dht_addresses,
            sequence=next(self._sequence),
            name=name,
            version=version("dilocox"),
            elsewhere=[pb.Elsewhere(address=way.at, certificate=way.certificate) for way in self.elsewhere],
        )
        return seal(self._identity, pb.KIND_PEER_RECORD, self._run_id, body)

    def share_key_with(self, ways: tuple[Way, ...]) -> None:
        """Publish the addresses of standbys with this peer's key."""
        self.elsewhere = ways
        self.changed.set()

    def renew(self, own: Statement) -> None:
        """Publish this record of ours at once."""
        self.own = own
        self.changed.set()

    def number_from(self, start_number: int) -> None:
        """Number this peer's records above all incarnations with a smaller number, wherever they ran."""
        self._sequence = itertools.count(start_number << SEQUENCE_BITS)

    async def publish_forever(self, make: Callable[[], Statement]) -> None:
        """Publish now and again; a DHT that is not there yet is tried again soon."""
        while True:
            self.own, pause = make(), PUBLISH_SECONDS
            if self._dht is not None:
                try:
                    pause = PUBLISH_SECONDS if await self._dht.publish(self.own) else SOON_SECONDS
                except (DilocoxError, OSError):
                    pause = SOON_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.changed.wait()
            self.changed.clear()

    async def cache_forever(self, path: Path) -> None:
        """Write the newest records down, for `cached_records` after a restart."""
        written = b""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            records = [record for peer, record in self.records.items() if peer != self._identity.peer]
            newest = sorted(records, key=lambda record: -record.body.sequence)[:CACHED_RECORDS]
            raw = json.dumps([base64.b64encode(record.envelope.SerializeToString()).decode() for record in newest]).encode()
            if newest and raw != written:
                with contextlib.suppress(OSError):  # a full disk costs the cache, not the daemon
                    await asyncio.to_thread(write_atomically, path, raw)
                    written = raw

    def know(self, peers: Sequence[str]) -> None:
        """Replace the peers that take part, the coordinator first. Records of others are forgotten, the oldest first, if there
        are many."""
        self.known, self._parties = tuple(peers), frozenset(peers)
        self._forget()
        if self._dht is not None:
            self._dht.know(peers)

    def takes_part(self, peer: str) -> bool:
        """Return whether the run knows this peer."""
        return peer in self._parties or peer in self.own_hosts

    def _forget(self) -> None:
        here = set(self.known)
        others = [peer for peer in self.records if peer not in here]
        for peer in others[: max(0, len(others) - CACHED_RECORDS)]:
            del self.records[peer]

    def learn(self, record: Statement) -> None:
        """Store the newer of two records of a peer. A coordinator may send those of any number of peers."""
        known = self.records.get(record.peer)
        if known is None or known.body.sequence < record.body.sequence:
            self.records[record.peer] = record
            if len(self.records) > len(self.known) + CACHED_RECORDS:
                self._forget()
            if self._dht is not None:
                self._dht.remember(list(record.body.dht_addresses))

    async def find(self, peer: str) -> pb.PeerRecord | None:
        """Return the peer's record; looks it up if it is unknown."""
        if peer not in self.records:
            await self.look_up(peer)
        record = self.records.get(peer)
        return None if record is None else record.body

    async def look_up(self, peer: str) -> None:
        """Look a record up in the DHT, at most once per interval: it may be newer there."""
        now = time.monotonic()
        self._looked_up_at = {known: at for known, at in self._looked_up_at.items() if now - at < LOOKUP_SECONDS}
        if self._dht is None or peer in self._looked_up_at:
            return
        self._looked_up_at[peer] = now
        try:
            if (record := await self._dht.find(peer)) is not None:
                self.learn(record)
        except (DilocoxError, OSError) as error:
            log.debug("DHT lookup failed: %s", error)
