"""A run's chain in its archive: the owner's signed manifest, and the commits, some in each blob. All calls block."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest, open_manifest
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.archive.archive import Archive
from dilocox.transport.archive.index import COMMITS, ArchiveHead, Segment
from dilocox.transport.store.chain_file import ChainFile

__all__ = [
    "Common",
    "archived_manifest",
    "check_commits",
    "commits_of",
    "fill_chain",
    "in_common",
    "packed",
    "packs",
    "some_head",
    "unpacked",
    "word_of",
    "write_commits",
]

SEGMENT_BYTES = limits.CHUNK_BYTES
"""Most bytes in a segment, but for a single larger commit."""
LOOSE = 16
"""Most short segments at the end; more are merged into one. Each read by a follower adds one."""
_LENGTH = struct.Struct(">I")


def some_head(archive: Archive) -> ArchiveHead:
    """Return the head. Raises LocalError for an empty archive, RemoteError."""
    head = archive.head()
    if head is None and archive.begun:
        raise RemoteError(
            pb.REASON_DIGEST_MISMATCH,
            f"all heads of the archive {archive.url} are damaged: run `dilocox archive` beside the run to write a new one",
        )
    if head is None:
        raise LocalError(f"the archive {archive.url} is still empty: `dilocox archive` has not written a head yet")
    return head


def signed_manifest(archive: Archive, head: ArchiveHead) -> pb.Envelope:
    """Return the manifest with the owner's signature. Raises RemoteError."""
    return _envelope(archive.read(bytes.fromhex(head.manifest), 2 * limits.MANIFEST_BYTES))


def _envelope(raw: bytes) -> pb.Envelope:
    """Raises RemoteError."""
    try:
        return pb.Envelope.FromString(raw)
    except DecodeError as error:
        raise RemoteError(pb.REASON_MALFORMED, "an entry is not a statement") from error


def archived_manifest(archive: Archive, head: ArchiveHead) -> Manifest:
    """Checked against the run's id and the owner's signature. Raises RemoteError."""
    return open_manifest(signed_manifest(archive, head), archive.run_id)


def fill_chain(archive: Archive, head: ArchiveHead, chain: ChainFile) -> None:
    """Append what the archive has beyond `chain`; every commit is verified. Raises RemoteError if one is invalid: from
    another chain, or damaged."""
    chain.keep_signed_manifest(signed_manifest(archive, head))
    for raw in commits_of(archive, head, chain.length):
        chain.append(_envelope(raw))
    if head.appointment is not None:
        chain.appoint(_envelope(archive.read(bytes.fromhex(head.appointment), limits.KIB)))


def commits_of(archive: Archive, head: ArchiveHead, first: int = 0) -> Iterator[bytes]:
    """Envelopes from `first` on. Raises RemoteError."""
    for segment in head.segments:
        if segment.end > first:
            raws = unpacked(archive.read(bytes.fromhex(segment.blob), SEGMENT_BYTES + limits.MESSAGE_BYTES))
            if len(raws) != segment.count:
                raise RemoteError(pb.REASON_MALFORMED, f"a segment of {len(raws)} commits, expected {segment.count}")
            yield from raws[max(0, first - segment.first) :]


def check_commits(archive: Archive, chain: ChainFile) -> None:
    """Read every commit from the archive, also those that were here already. Raises LocalError, RemoteError where one is missing,
    or another."""
    for number, raw in enumerate(commits_of(archive, some_head(archive))):
        ours = chain.raw(number)
        if ours is not None and _digest(raw) != _digest(ours):
            raise RemoteError(
                pb.REASON_DIGEST_MISMATCH, f"commit {number} in the archive {archive.url} is not valid in this run"
            )


@dataclass(frozen=True)
class Common:
    """Common part of an archive's chain and ours."""

    segments: list[Segment]
    """Whole ones, the first first."""
    commits: int
    """Number of its commits that are also ours."""
    parted: bool
    """Whether others of its commits are not the run's any more: its owner named another chain. Else we may be behind."""


def in_common(archive: Archive, head: ArchiveHead, chain: ChainFile) -> Common:
    """Raises RemoteError."""
    kept: list[Segment] = []
    for segment in head.segments:
        last = chain.commit(segment.end - 1)
        if last is None or last.digest.hex() != segment.last:
            raws = [chain.raw(number) for number in range(segment.first, segment.end)]
            ours = [_digest(raw) for raw in raws if raw is not None]
            theirs = [_digest(raw) for _, raw in zip(ours, commits_of(archive, head, segment.first), strict=False)]
            same = next((n for n, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), len(ours))
            return Common(kept, segment.first + same, same < len(ours))
        kept.append(segment)
    return Common(kept, head.length, False)


def write_commits(archive: Archive, chain: ChainFile, kept: Sequence[Segment]) -> list[Segment]:
    """Return segments for a head: the given ones and those that follow, short ones merged now and then."""
    segments = list(kept)
    short = [segment for segment in segments[-LOOSE:] if segment.count < COMMITS]
    if len(short) == LOOSE:
        del segments[-LOOSE:]
    number = segments[-1].end if segments else 0
    return segments + [
        Segment(first=first, count=len(raws), blob=archive.write(packed(raws)).hex(), last=_digest(raws[-1]))
        for first, raws in packs(chain, number)
    ]


def packs(chain: ChainFile, first: int) -> Iterator[tuple[int, list[bytes]]]:
    """The chain's commits from `first` on, some at a time: the number of the first, and their envelopes."""
    pack: list[bytes] = []
    while (raw := chain.raw(first + len(pack))) is not None:
        if pack and (len(pack) == COMMITS or sum(map(len, pack)) + len(raw) > SEGMENT_BYTES):
            yield first, pack
            first, pack = first + len(pack), []
        pack.append(raw)
    if pack:
        yield first, pack


def packed(raws: Sequence[bytes]) -> bytes:
    """Each behind its length."""
    return b"".join(_LENGTH.pack(len(raw)) + raw for raw in raws)


def _digest(raw: bytes) -> str:
    """Return a commit's digest, as the next commit names it."""
    envelope = _envelope(raw)
    return sha256(envelope.key, envelope.body).hex()


def unpacked(data: bytes) -> list[bytes]:
    """The inverse. Raises RemoteError."""
    raws, at = [], 0
    while at < len(data):
        end = at + _LENGTH.size + (_LENGTH.unpack_from(data, at)[0] if at + _LENGTH.size <= len(data) else len(data))
        if end > len(data):
            raise RemoteError(pb.REASON_MALFORMED, "a segment of commits is truncated")
        raws.append(data[at + _LENGTH.size : end])
        at = end
    return raws


def word_of(archive: Archive, chain: ChainFile) -> str | None:
    """Return the blob of the latest appointment; None without one."""
    word = chain.newest_word
    return None if word is None else archive.write(canonical(word)).hex()
