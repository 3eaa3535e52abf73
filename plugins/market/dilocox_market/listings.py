"""Listings of the market: runs that look for machines, and machines for hire, as signed statements in a separate DHT.

    key      dilocox/market/KIND/BUCKET, a fixed number of buckets for each kind
    subkey   the signer's peer id: each has one job, and one offer; the one that expires last counts
    signed   for MARKET in place of a run's id: no signature of a run is valid here, nor the reverse

Peers that store listings for others apply these checks, and store a limited number of each kind: the first to arrive
stay until they expire.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress

from dilocox.protocol import limits
from dilocox.protocol.consensus import terms
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest, open_manifest
from dilocox.protocol.wire.messages import Statement, open_envelope

__all__ = [
    "BUCKETS",
    "KINDS",
    "MARKET",
    "bucket_of",
    "key_of",
    "lines_of",
    "manifest_of",
    "middle_line",
    "nonce_of",
    "open_line",
    "open_listing",
    "place_of",
]

MARKET = sha256(b"dilocox-market-v1")
LINE_SECONDS = 24 * 3600
"""Seconds for which a measurement of bandwidth counts."""
LISTING_SECONDS = 2 * 3600
"""Longest life of a job or an offer: the listing of an absent peer expires with it."""
LISTINGS = 512
"""Jobs, and as many offers, that one peer of the market stores for others, and that one reader reads."""
LISTINGS_BYTES = 3 * limits.MIB
"""Bytes of jobs, and as much of offers, that one peer stores: libp2p carries 4 MiB in an answer, and drops a larger one."""
KINDS = (pb.KIND_JOB, pb.KIND_OFFER)
BUCKETS = 16
"""Keys of a kind: different peers store each, and each is a separate listing."""


def key_of(kind: int, bucket: int) -> str:
    return f"dilocox/market/{kind}/{bucket}"


def bucket_of(peer: str) -> int:
    return sha256(b"dilocox-market-bucket", peer.encode())[0] % BUCKETS


def place_of(listing: Statement) -> str:
    """Return the key under which it is stored."""
    return key_of(listing.kind, bucket_of(listing.peer))


def open_listing(raw: bytes, now: float, kinds: tuple[int, ...] = KINDS) -> Statement:
    """Return a job or an offer that counts at `now`, Unix seconds. Raises RemoteError if it does not."""
    listing = open_envelope(raw, MARKET, kinds)
    expires = listing.body.expires_at
    if not now < expires <= now + LISTING_SECONDS:
        raise RemoteError(pb.REASON_STALE_ROUND, "it is expired, or expires too late")
    if listing.kind == pb.KIND_JOB:
        manifest_of(listing.body, listing.peer)
    return listing


def manifest_of(job: pb.Job, signer: str) -> Manifest:
    """Return the run's manifest, as its owner signed it. Raises RemoteError if it is not that of the link, or names
    another coordinator."""
    link = JoinLink.parse(job.link)
    manifest = open_manifest(job.manifest, link.run_id)
    appointment = terms.open_appointment(manifest, job.appointment) if job.HasField("appointment") else None
    if {link.coordinator, signer} != {terms.coordinator_of(manifest, appointment)}:
        raise RemoteError(pb.REASON_MALFORMED, "only the coordinator that the run's owner names can announce the run")
    return manifest


def open_line(envelope: pb.Envelope, peer: str, now: float) -> Statement[pb.Line]:
    """Return the bandwidth that another peer measured. Raises RemoteError if it does not count at `now`, Unix seconds."""
    line = open_envelope(envelope, MARKET, (pb.KIND_LINE,))
    if line.peer == peer or line.body.peer != peer:
        raise RemoteError(pb.REASON_MALFORMED, "it is not another peer's report on this peer's bandwidth")
    if not now - LINE_SECONDS < line.body.measured_at <= now + LISTING_SECONDS:
        raise RemoteError(pb.REASON_STALE_ROUND, "its measurement is too old, or in the future")
    return line


def lines_of(offer: Statement[pb.Offer], now: float) -> list[Statement[pb.Line]]:
    """Return the valid measurements of an offer's bandwidth, one of each peer."""
    found: dict[str, Statement[pb.Line]] = {}
    for envelope in offer.body.lines:
        with suppress(RemoteError):
            line = open_line(envelope, offer.peer, now)
            found[line.peer] = line
    return list(found.values())


def middle_line(lines: Sequence[Statement[pb.Line]]) -> tuple[int, int]:
    """Return upload and download in bits a second: the lower median of each. `lines` has at least one element."""
    rates = [sorted(getattr(line.body, name) for line in lines) for name in ("upload_bits", "download_bits")]
    middle = (len(lines) - 1) // 2
    return rates[0][middle], rates[1][middle]


def nonce_of(expires_at: int) -> bytes:
    """Return the nonce of an offer's evidence: it proves that the evidence was made for this short-lived offer, and for no
    older one."""
    return sha256(b"dilocox-offer", struct.pack(">Q", expires_at))
