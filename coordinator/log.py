"""The open round on disk: the inputs of the round machine since the last commit, in the same database as the chain.

One transaction writes a batch of inputs; a commit and the cutting off of the inputs before it are one transaction too. So a restart
stands where the last batch ended, whatever was happening; what a crash takes away, its senders say again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dilocox.protocol.head import Head
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.round import Absent, Attested, Input, Moment, Present, Received, Refused, Resumed, Returning, Tick
from dilocox.protocol.rules import JUDGES
from dilocox.transport.chain_file import INPUTS, ChainFile

__all__ = ["Committed", "Entry", "InputLog"]


@dataclass(frozen=True)
class Entry:
    """An input that changed something."""

    event: Input
    moment: Moment


@dataclass(frozen=True)
class Committed:
    """A commit that we signed, or that nodes gave back to us."""

    before: Head
    commit: Statement[pb.Commit]
    after: Head


Row = tuple[str, str | None, int | None, str | None, bytes | None]


class InputLog:
    def __init__(self, chain: ChainFile) -> None:
        self._chain, self._run_id = chain, chain.manifest.run_id
        chain.database.execute(
            f"CREATE TABLE IF NOT EXISTS {INPUTS} (number INTEGER PRIMARY KEY, seconds REAL NOT NULL, wall_ms INTEGER NOT NULL,"
            " kind TEXT NOT NULL, peer TEXT, reason INTEGER, detail TEXT, envelope BLOB)"
        )

    def write(self, batch: Sequence[Entry | Committed]) -> None:
        """Durable when this returns. Blocking."""
        database = self._chain.database
        database.execute("BEGIN")
        for item in batch:
            if isinstance(item, Entry):
                self._insert(item)
            else:
                self._chain.write(item.before, item.commit)
                database.execute(f"DELETE FROM {INPUTS}")
        database.execute("COMMIT")

    def _insert(self, entry: Entry) -> None:
        self._chain.database.execute(
            f"INSERT INTO {INPUTS} (seconds, wall_ms, kind, peer, reason, detail, envelope) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*entry.moment, *self._row(entry.event)),
        )

    def _row(self, event: Input) -> Row:
        match event:
            case Received(statement):
                return "received", None, None, None, statement.envelope.SerializeToString(deterministic=True)
            case Refused(peer, reason, detail):
                return "refused", peer, reason, detail, None
            case Absent(peer):
                return "absent", peer, None, None, None
            case Present(peer):
                return "present", peer, None, None, None
            case Resumed(healed):
                return "resumed", None, int(healed), None, None
            case Returning(until):
                return "returning", None, None, repr(until), None
            case Attested(attestation):
                return "attested", None, None, None, attestation.SerializeToString(deterministic=True)
            case Tick():
                return "tick", None, None, None, None

    def replay(self) -> Iterator[Entry]:
        """The inputs since the last commit."""
        query = f"SELECT seconds, wall_ms, kind, peer, reason, detail, envelope FROM {INPUTS} ORDER BY number"
        for seconds, wall_ms, kind, peer, reason, detail, envelope in self._chain.database.execute(query):
            yield Entry(self._input(kind, peer, reason, detail, envelope), Moment(seconds, wall_ms))

    def keep_first(self, count: int) -> None:
        """Forget the inputs after so many. Blocking."""
        kept = f"SELECT number FROM {INPUTS} ORDER BY number LIMIT ?"
        self._chain.database.execute(f"DELETE FROM {INPUTS} WHERE number NOT IN ({kept})", (count,))

    def _input(self, kind: str, peer: str, reason: pb.Reason, detail: str, envelope: bytes) -> Input:
        match kind:
            case "received":
                return Received(open_envelope(envelope, self._run_id, JUDGES))
            case "refused":
                return Refused(peer, reason, detail)
            case "absent":
                return Absent(peer)
            case "present":
                return Present(peer)
            case "resumed":
                return Resumed(bool(reason))
            case "returning":
                return Returning(float(detail))
            case "attested":
                return Attested(pb.Attestation.FromString(envelope))
            case _:
                return Tick()
