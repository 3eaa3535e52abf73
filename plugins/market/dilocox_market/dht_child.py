"""DHT process of the market: dilocox.transport.net.dht_child with jobs, offers and measured bandwidths in place of peer records.

request    {"id": 1, "announce": BASE64}    {"id": 2, "list": KIND}                   {"id": 3, "measure": true}
reply      {"id": 1, "ok": true}            {"id": 2, "listings": [BASE64, …]}        {"id": 3, "lines": [BASE64, …]}
"""

import asyncio
import base64
import contextlib
import random
import time
from asyncio import StreamReader, StreamWriter
from typing import Any

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import seal
from dilocox.transport.net.dht_child import (
    DHTID,
    FIRST_PAUSE_SECONDS,
    MEET_SECONDS,
    P2P,
    DHTNode,
    DHTRecord,
    Here,
    MSGPackSerializer,
    PeerID,
    RecordValidatorBase,
    get_dht_time,
    main,
)
from dilocox_market import line, listings

__all__ = ["LineMeter", "ListingValidator", "Listings"]

LINE_PROTOCOL = "dilocox/market/line/1"
MEASURE_SECONDS = 60.0
"""Seconds for one peer to measure bandwidth: 256 KiB both ways at 64 kbit/s."""
LINES_AN_HOUR = 12
"""Measurements for others in an hour, of 21 MiB at most; each peer once."""
ASKED = 8
"""Most peers that we ask to measure our bandwidth."""


class ListingValidator(RecordValidatorBase):
    """Validator that stores only valid jobs and offers, each under its signer's key and name, and a limited number of each
    kind."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, tuple[float, int]]] = {kind: {} for kind in listings.KINDS}
        """Expiry and bytes, by kind and peer."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            now = get_dht_time()
            value = bytes(MSGPackSerializer.loads(record.value))
            listing = listings.open_listing(value, now)
            here = record.key == DHTID.generate(source=listings.place_of(listing)).to_bytes()
            named = record.subkey == MSGPackSerializer.dumps(listing.peer)
            lives = record.expiration_time <= listing.body.expires_at
            fits = here and named and lives
            return fits and self._has_room(self._kept[listing.kind], listing.peer, record.expiration_time, len(value), now)
        except (RemoteError, ValueError, TypeError):
            return False
        except Exception:  # as of peer records
            return False

    def _has_room(self, kept: dict[str, tuple[float, int]], peer: str, expires: float, size: int, now: float) -> bool:
        for other in [other for other, (end, _) in kept.items() if end <= now]:
            del kept[other]
        until, most = kept.get(peer, (0.0, 0))
        held = sum(each for other, (_, each) in kept.items() if other != peer)
        if (peer not in kept and len(kept) >= listings.LISTINGS) or held + max(size, most) > listings.LISTINGS_BYTES:
            return False
        kept[peer] = max(expires, until), max(size, most)
        return True


class LineMeter:
    """Meter of the bandwidth of peers that ask for it, one at a time, and within a limit."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._busy = False
        self._since: dict[str, float] = {}
        """Time of the last measurement by peer, by the monotonic clock."""

    async def serve(self, peer: str, reader: StreamReader, writer: StreamWriter) -> None:
        """Measure a peer's bandwidth. A peer that asks too often, or while another is measured, gets no answer."""
        try:
            if self._takes(peer):
                self._busy = True
                try:
                    async with asyncio.timeout(MEASURE_SECONDS):
                        upload, download = await line.measure(reader, writer)
                        said = pb.Line(peer=peer, upload_bits=upload, download_bits=download, measured_at=int(get_dht_time()))
                        signed = seal(self._identity, pb.KIND_LINE, listings.MARKET, said).envelope
                        await line.answer(writer, signed.SerializeToString())
                finally:
                    self._busy = False
        except (RemoteError, EOFError, OSError):
            pass  # it is not measured, then
        finally:
            writer.close()

    def _takes(self, peer: str) -> bool:
        now = time.monotonic()
        self._since = {other: at for other, at in self._since.items() if at > now - 3600}
        if self._busy or peer in self._since or len(self._since) >= LINES_AN_HOUR:
            return False
        self._since[peer] = now
        return True


class Listings:
    """The jobs and offers of the market."""

    def __init__(self, run_id: bytes) -> None:
        """Store the id. `run_id`: that of the market, which is no run's."""
        self.validator = ListingValidator()

    async def serve(self, p2p: P2P, identity: Identity) -> None:
        meter = LineMeter(identity)
        await p2p.add_binary_stream_handler(
            LINE_PROTOCOL, lambda info, reader, writer: meter.serve(info.peer_id.to_base58(), reader, writer)
        )

    def know(self, peers: list[str]) -> None:
        """Ignore the peers: the market has no known peers in advance."""

    async def answer(self, here: Here, request: dict[str, Any]) -> dict[str, Any]:
        if announced := request.get("announce"):
            value = base64.b64decode(announced)
            listing = listings.open_listing(value, get_dht_time())
            place, expires = listings.place_of(listing), listing.body.expires_at
            return {"ok": here.is_kept(bool(await here.node.store(place, value, expires, subkey=listing.peer)))}
        if kind := request.get("list"):
            return {"listings": [base64.b64encode(value).decode() for value in await _listings(here.node, kind)]}
        return {"lines": [base64.b64encode(value).decode() for value in await _lines(here)]}


async def _listings(node: DHTNode, kind: int) -> list[bytes]:
    """Return the listings of all buckets; a random choice up to the maximum if there are more."""
    keys = [listings.key_of(kind, bucket) for bucket in range(listings.BUCKETS)]
    found = await node.get_many(keys, sufficient_expiration_time=float("inf"))
    by_key = [each.value for each in found.values() if each is not None and isinstance(each.value, dict)]
    values = [each.value for listed in by_key for each in listed.values() if isinstance(each.value, bytes)]
    return random.sample(values, min(len(values), listings.LISTINGS))


async def _lines(here: Here) -> list[bytes]:
    """Return some peers' measurements of our bandwidth, one after the other: together they would measure less."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0 if here.begins else MEET_SECONDS):
            while not here.others:
                await asyncio.sleep(FIRST_PAUSE_SECONDS)
    found: list[bytes] = []
    for peer in random.sample(here.others, min(ASKED, len(here.others))):
        if len(found) < limits.LINES:
            with contextlib.suppress(Exception):  # as of meeting them: whatever it is, the next may do it
                found.append(await _line(here.p2p, peer))
    return found


async def _line(p2p: P2P, peer: PeerID) -> bytes:
    """Return this peer's measurement of our bandwidth, signed by it."""
    async with asyncio.timeout(MEASURE_SECONDS):
        _, reader, writer = await p2p.call_binary_stream_handler(peer, LINE_PROTOCOL)
        with contextlib.closing(writer):
            said = await line.measured(reader, writer)
    signed = listings.open_line(pb.Envelope.FromString(said), p2p.peer_id.to_base58(), get_dht_time())
    if signed.peer != peer.to_base58():
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "another peer signed it")
    return said


if __name__ == "__main__":
    main(Listings)
