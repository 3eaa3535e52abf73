"""Chunks of log entries: rows of a batch, in values of at most `PART_BYTES`. Pure.

Chunks of all batches are numbered in sequence, each with a key. The first byte of a chunk tells whether its batch
begins, and ends, there. A batch without an end was never written: its writer failed, and the next batch begins with a
chunk of its own.
"""

from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError

from dilocox.coordinator.round_log import Committed, Entry, LogItem, Row, input_of, row_of
from dilocox.protocol.errors import LocalError
from dilocox.protocol.limits import MIB
from dilocox.protocol.pb import log_pb2 as pb
from dilocox.protocol.rounds.round_machine import Moment, Resumed, Returning

__all__ = ["COMMIT", "KEPT", "PART_BYTES", "Batch", "entry_of", "in_parts", "on_our_clock", "rows_of"]

PART_BYTES = MIB
"""etcd takes requests of 1.5 MiB by default, and its gateway answers of 4 MiB."""
BATCH_PARTS = 256
"""Most chunks of a batch: far more than a round of 1,000 clusters needs."""
BEGINS, ENDS = 1, 2
COMMIT, KEPT = "commit", "kept"
"""Kinds of rows beside those of inputs."""


def rows_of(items: Sequence[LogItem]) -> Iterator[pb.LogRow]:
    for item in items:
        match item:
            case Entry(event, moment):
                filled = {name: value for name, value in row_of(event)._asdict().items() if value is not None}
                yield pb.LogRow(seconds=moment.seconds, wall_ms=moment.wall_ms, **filled)
            case Committed(_, commit):
                yield pb.LogRow(kind=COMMIT, envelope=commit.envelope.SerializeToString(deterministic=True))
            case _:
                yield pb.LogRow(kind=KEPT, reason=item.count)


def entry_of(row: pb.LogRow, run_id: bytes) -> Entry:
    """Return the entry of a row. Raises RemoteError if a statement in it is invalid."""
    columns = Row(row.kind, row.peer, row.reason, row.detail, row.envelope)
    return Entry(input_of(columns, run_id), Moment(row.seconds, row.wall_ms))


def in_parts(rows: Iterator[pb.LogRow]) -> list[bytes]:
    raw = pb.LogBatch(rows=rows).SerializeToString()
    cuts = range(0, len(raw), PART_BYTES) or range(1)
    return [bytes([BEGINS * (at == 0) | ENDS * (at + PART_BYTES >= len(raw))]) + raw[at : at + PART_BYTES] for at in cuts]


class Batch:
    """The batch that is being read."""

    def __init__(self) -> None:
        self.began = 0
        """Number of its first part."""
        self._parts: list[bytes] | None = None

    def take(self, number: int, part: bytes) -> Sequence[pb.LogRow] | None:
        """The next part; the batch's rows once that was its last one. Raises LocalError for what no coordinator wrote."""
        flags = part[0] if part else 0
        if flags & BEGINS:
            self.began, self._parts = number, []
        if self._parts is None or len(self._parts) >= BATCH_PARTS:
            raise LocalError(f"chunk {number} of the log in the store was not written by a coordinator")
        self._parts.append(part[1:])
        if not flags & ENDS:
            return None
        raw, self._parts = b"".join(self._parts), None
        try:
            return list(pb.LogBatch.FromString(raw).rows)
        except DecodeError as error:
            raise LocalError(f"the log in the store is damaged at chunk {number}: {error}") from error


def on_our_clock(entries: Sequence[Entry], now: Moment) -> list[Entry]:
    """Return the same inputs with times of this machine's monotonic clock. Distances between entries of one process stay;
    the last entry matches the wall clocks."""
    moved: list[Entry] = []
    last: Entry | None = None
    shift = 0.0
    for entry in reversed(entries):
        if last is None or isinstance(last.event, Resumed):  # `entry` is the last that its process wrote
            ago = max(0, now.wall_ms - entry.moment.wall_ms) / 1000
            shift = now.seconds - ago - entry.moment.seconds
        event = Returning(entry.event.until + shift) if isinstance(entry.event, Returning) else entry.event
        moved.append(Entry(event, Moment(entry.moment.seconds + shift, entry.moment.wall_ms)))
        last = entry
    return moved[::-1]
