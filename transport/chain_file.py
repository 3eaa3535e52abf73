"""The commit chain on disk: an append-only SQLite table, the same file at a node and at the coordinator.

Beside each commit stands what people see of it (views/rows.py), written once when it is appended.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.protocol import chain
from dilocox.protocol.head import Head, advance, initial_head
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ChainFile", "find_chains", "open_database"]

Describe = Callable[[Head, Statement[pb.Commit]], tuple[dict[str, Any], dict[str, Any]]]
"""(the head before, a commit) -> its line in a table, and everything about it."""


def open_database(path: Path) -> sqlite3.Connection:
    """A connection that commits every statement and survives `kill -9` and power loss."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    return database


def find_chains(home: Path) -> list[Path]:
    """The chain files in a daemon's folder."""
    return sorted(home.glob("runs/*/chain.db"))


class ChainFile:
    """Verified commits 0 … n-1, and the head they imply."""

    def __init__(self, path: Path, manifest: Manifest, coordinator: str, describe: Describe | None = None) -> None:
        self.manifest, self.coordinator, self._describe = manifest, coordinator, describe
        self.database = open_database(path)
        self._reader = open_database(path)  # a reader never waits for a writer's fsync
        self.database.execute("CREATE TABLE IF NOT EXISTS commits (round INTEGER PRIMARY KEY, envelope BLOB NOT NULL)")
        self.database.execute("CREATE TABLE IF NOT EXISTS views (round INTEGER PRIMARY KEY, row TEXT, detail TEXT)")
        self.database.execute("CREATE TABLE IF NOT EXISTS run (manifest BLOB NOT NULL, coordinator TEXT NOT NULL)")
        if self.database.execute("SELECT 1 FROM run").fetchone() is None:
            self.database.execute("INSERT INTO run VALUES (?, ?)", (manifest.canonical_bytes(), coordinator))
        self.head: Head = initial_head(coordinator)
        newest = self._reader.execute("SELECT envelope FROM commits ORDER BY round DESC LIMIT 1").fetchone()
        if newest:
            self.head = advance(manifest, self._open(newest[0]))

    @classmethod
    @contextmanager
    def for_reading(cls, path: Path) -> Iterator["ChainFile"]:
        """The chain in a file, with the run and coordinator that the file names."""
        database = sqlite3.connect(path)
        manifest, coordinator = database.execute("SELECT manifest, coordinator FROM run").fetchone()
        database.close()
        chain = cls(path, Manifest.from_canonical(manifest), coordinator)
        try:
            yield chain
        finally:
            chain.close()

    def _open(self, raw: bytes) -> Statement[pb.Commit]:
        return open_envelope(raw, self.manifest.run_id, (pb.KIND_COMMIT,))

    @property
    def length(self) -> int:
        """How many commits; the next one's round."""
        return self.head.round

    def append(self, envelope: pb.Envelope) -> Statement[pb.Commit]:
        """Verify completely, then store. Raises RemoteError; the chain is then as before."""
        head, commit = chain.extend(self.manifest, self.head, envelope)
        self.database.execute("BEGIN")
        self.write(self.head, commit)
        self.database.execute("COMMIT")
        self.head = head
        return commit

    def write(self, before: Head, commit: Statement[pb.Commit]) -> None:
        """Within a transaction: store a commit that is known to hold, and what people see of it. `head` is not moved."""
        raw = commit.envelope.SerializeToString(deterministic=True)
        self.database.execute("INSERT INTO commits VALUES (?, ?)", (commit.body.round, raw))
        if self._describe is not None:
            row, detail = self._describe(before, commit)
            self.database.execute(
                "INSERT INTO views VALUES (?, ?, ?)", (commit.body.round, json.dumps(row), json.dumps(detail))
            )

    def raw(self, round: int) -> bytes | None:
        row = self._reader.execute("SELECT envelope FROM commits WHERE round = ?", (round,)).fetchone()
        return None if row is None else bytes(row[0])

    def commit(self, round: int) -> Statement[pb.Commit] | None:
        raw = self.raw(round)
        return None if raw is None else self._open(raw)

    def commits(self, first: int = 0) -> Iterator[Statement[pb.Commit]]:
        for (raw,) in self._reader.execute("SELECT envelope FROM commits WHERE round >= ? ORDER BY round", (first,)):
            yield self._open(raw)

    def rows(self) -> str:
        """What people see of every round, a JSON list."""
        return "[" + ",".join(row for (row,) in self._reader.execute("SELECT row FROM views ORDER BY round")) + "]"

    def detail(self, round: int) -> str | None:
        """Everything that people see of one round, a JSON object."""
        row = self._reader.execute("SELECT detail FROM views WHERE round = ?", (round,)).fetchone()
        return None if row is None else str(row[0])

    def verify(self) -> Iterator[Statement[pb.Commit]]:
        """Recheck everything from the first commit on. Raises RemoteError at the first that does not hold."""
        head = initial_head(self.coordinator)
        for (raw,) in self._reader.execute("SELECT envelope FROM commits ORDER BY round"):
            head, commit = chain.extend(self.manifest, head, bytes(raw))
            yield commit

    def close(self) -> None:
        self._reader.close()
        self.database.close()
