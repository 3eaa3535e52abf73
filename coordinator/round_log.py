"""Log of the open round: inputs of the round machine since the last commit, in order, and the commits that end them.

The driver uses `RoundLog`. `InputLog` stores it beside the chain, in the same database. One transaction writes a batch
of inputs; a commit and the removal of the inputs before it are one transaction, too. A restart therefore resumes after
the last batch, and senders repeat what a crash lost. shared_log.py is the other implementation, for several
coordinators.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.rules import JUDGES
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.round_machine import (
    Absent,
    Attested,
    Input,
    Moment,
    Present,
    Received,
    Refused,
    Resumed,
    Returning,
    Tick,
)
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.store.chain_file import INPUTS, ChainFile

__all__ = ["Committed", "Entry", "InputLog", "KeptFirst", "LogItem", "RoundLog", "Row", "input_of", "row_of"]


@dataclass(frozen=True)
class Entry:
    """An input that changed something."""

    event: Input
    moment: Moment


@dataclass(frozen=True)
class Committed:
    """A commit that we signed, or that nodes gave back to us. The inputs before it are cut off."""

    before: Head
    commit: Statement[pb.Commit]
    after: Head


@dataclass(frozen=True)
class KeptFirst:
    """The inputs since the last commit are void after so many."""

    count: int


LogItem = Entry | Committed | KeptFirst


class RoundLog(Protocol):
    @property
    def healed(self) -> bool:
        """Return whether signed statements may be missing in the log. If so, more than half of the roster must be live
        before anything is signed."""
        ...

    def replay(self) -> Iterable[Entry]:
        """The inputs since the last commit, as they were found at the start."""
        ...

    async def write(self, batch: Sequence[LogItem]) -> None:
        """Write a batch. On return it is durable, and the chain file contains its commits. After an exception nothing may
        be signed."""
        ...


NOT_LIVE = 1
"""Reason in the row of a statement whose peer has no stream."""


class Row(NamedTuple):
    """An input, in columns."""

    kind: str
    peer: str | None = None
    reason: int | None = None
    detail: str | None = None
    envelope: bytes | None = None


class InputLog:
    def __init__(self, chain: ChainFile) -> None:
        self._chain, self._run_id = chain, chain.manifest.run_id
        chain.database.execute(
            f"CREATE TABLE IF NOT EXISTS {INPUTS} (number INTEGER PRIMARY KEY, seconds REAL NOT NULL, wall_ms INTEGER NOT NULL,"
            " kind TEXT NOT NULL, peer TEXT, reason INTEGER, detail TEXT, envelope BLOB)"
        )

    @property
    def healed(self) -> bool:
        return self._chain.healed

    async def write(self, batch: Sequence[LogItem]) -> None:
        await asyncio.to_thread(self.write_now, batch)

    def write_now(self, batch: Iterable[LogItem]) -> None:
        """`write`. Blocking."""
        with self._chain.transaction():
            for item in batch:
                match item:
                    case Entry():
                        self._insert(item)
                    case Committed():
                        self._chain.write(item.before, item.commit)
                        self._chain.database.execute(f"DELETE FROM {INPUTS}")
                    case KeptFirst(count):
                        kept = f"SELECT number FROM {INPUTS} ORDER BY number LIMIT ?"
                        self._chain.database.execute(f"DELETE FROM {INPUTS} WHERE number NOT IN ({kept})", (count,))

    def _insert(self, entry: Entry) -> None:
        self._chain.database.execute(
            f"INSERT INTO {INPUTS} (seconds, wall_ms, kind, peer, reason, detail, envelope) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*entry.moment, *row_of(entry.event)),
        )

    def replay(self) -> Iterator[Entry]:
        query = f"SELECT seconds, wall_ms, kind, peer, reason, detail, envelope FROM {INPUTS} ORDER BY number"
        with self._chain.transaction():
            rows = self._chain.database.execute(query).fetchall()
        for seconds, wall_ms, *row in rows:
            yield Entry(input_of(Row(*row), self._run_id), Moment(seconds, wall_ms))


def row_of(event: Input) -> Row:
    match event:
        case Received(statement, live):
            raw = statement.envelope.SerializeToString(deterministic=True)
            return Row("received", envelope=raw) if live else Row("received", reason=NOT_LIVE, envelope=raw)
        case Refused(peer, reason, detail):
            return Row("refused", peer, reason, detail)
        case Absent(peer):
            return Row("absent", peer)
        case Present(peer):
            return Row("present", peer)
        case Resumed(healed):
            return Row("resumed", reason=int(healed))
        case Returning(until):
            return Row("returning", detail=repr(until))
        case Attested(attestation):
            return Row("attested", envelope=attestation.SerializeToString(deterministic=True))
        case Tick():
            return Row("tick")


def input_of(row: Row, run_id: bytes) -> Input:
    """Return the input from which `row_of` made the row. Raises RemoteError if a statement in it is invalid."""
    peer, detail, envelope = row.peer or "", row.detail or "", row.envelope or b""
    match row.kind:
        case "received":
            return Received(open_envelope(envelope, run_id, JUDGES), row.reason != NOT_LIVE)
        case "refused":
            return Refused(peer, cast("pb.Reason", row.reason or 0), detail)
        case "absent":
            return Absent(peer)
        case "present":
            return Present(peer)
        case "resumed":
            return Resumed(bool(row.reason))
        case "returning":
            return Returning(float(detail))
        case "attested":
            return Attested(pb.Attestation.FromString(envelope))
        case _:
            return Tick()
