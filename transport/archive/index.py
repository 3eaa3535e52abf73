"""Head of an archive, and everything derived from it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["COMMITS", "ArchiveHead", "Marker", "Segment", "Snapshot", "Span", "covered", "cut", "due", "joined"]

COMMITS = 64
"""Most commits in a segment: what is read at once is a few MiB."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Round = Annotated[int, Field(ge=0, lt=limits.ROUNDS)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Marker(_Record):
    """Mark of an archive: its run."""

    format: Literal["dilocox-archive-1"]
    run: Digest
    check: str = Field(max_length=64)
    """Check value of its key; empty: it is not sealed."""


class Segment(_Record):
    """Consecutive commits in one blob."""

    first: Round
    count: Annotated[int, Field(gt=0, le=COMMITS)]
    blob: Digest
    last: Digest
    """Digest of the last of these commits."""

    @property
    def end(self) -> int:
        return self.first + self.count


class Snapshot(_Record):
    """The state that a round starts from: all stages of it are here."""

    round: Round
    root: Digest


Span = tuple[Round, Round]
"""First and last of consecutive rounds."""


class ArchiveHead(_Record):
    """Everything that it names is in the archive."""

    sequence: Annotated[int, Field(ge=0, lt=10**12)]
    run: Digest
    manifest: Digest
    """Blob with the manifest in the owner's signature."""
    appointment: Digest | None = None
    """Blob of the latest appointment, if there is one."""
    segments: tuple[Segment, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    """Snapshots by round, the oldest first."""
    coming: Snapshot | None = None
    """State whose root is here, and perhaps some stages: a restart continues it, or removes it."""
    payloads: tuple[Span, ...] = ()
    """Rounds of which every payload that counted is here, and its leaves."""
    data: bool = False
    """All of the run's data are here, with their tokenizer."""
    imported: bool = False
    """The run's imported weights are here, where it has some."""
    retired: tuple[Digest, ...] = ()
    """Blobs that no head names any more, and that may still lie here: removed before the next head."""

    @classmethod
    def parse(cls, raw: bytes) -> "ArchiveHead":
        """Raises RemoteError where the bytes are no head, or its commits have a gap."""
        try:
            head = cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            raise RemoteError(pb.REASON_MALFORMED, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        ends = [0, *(segment.end for segment in head.segments)]
        if [segment.first for segment in head.segments] != ends[:-1]:
            raise RemoteError(pb.REASON_MALFORMED, "its commits have a gap")
        return head

    @property
    def length(self) -> int:
        """Return the number of commits."""
        return self.segments[-1].end if self.segments else 0

    @property
    def roots(self) -> list[bytes]:
        """Return the roots of all states with at least one object here."""
        named = [*self.snapshots, *((self.coming,) if self.coming is not None else ())]
        return [bytes.fromhex(item.root) for item in named]

    @property
    def states(self) -> dict[int, bytes]:
        """State roots by round, the newest first."""
        return {item.round: bytes.fromhex(item.root) for item in sorted(self.snapshots, key=lambda item: -item.round)}


def due(head: ArchiveHead, agreed: Mapping[int, bytes], every: int) -> list[int]:
    """Rounds whose state is due, the newest first: of those that the run agreed on, such that one in `every` is kept."""
    kept = {snapshot.round // every for snapshot in head.snapshots}
    newest = max((snapshot.round for snapshot in head.snapshots), default=-1)
    return sorted((round for round in agreed if round > newest and round // every not in kept), reverse=True)


def joined(spans: Iterable[Span], round: int) -> tuple[Span, ...]:
    """The spans with one round more."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted([*spans, (round, round)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def covered(spans: Sequence[Span], round: int) -> bool:
    return any(first <= round <= last for first, last in spans)


def cut(spans: Iterable[Span], first: int, last: int) -> tuple[Span, ...]:
    """Return the parts of the spans within first … last."""
    inside = ((max(a, first), min(b, last)) for a, b in spans)
    return tuple((a, b) for a, b in inside if a <= b)
