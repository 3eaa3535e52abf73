"""The commit chain on disk: an append-only SQLite table, the same file at a node and at the coordinator."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dilocox.protocol import chain
from dilocox.protocol.chain import Head
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["ChainFile", "find_chains", "open_database"]


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

    def __init__(self, path: Path, manifest: Manifest, coordinator: str) -> None:
        self.manifest, self.coordinator = manifest, coordinator
        self._database = open_database(path)
        self._database.execute("CREATE TABLE IF NOT EXISTS commits (round INTEGER PRIMARY KEY, envelope BLOB NOT NULL)")
        self._database.execute("CREATE TABLE IF NOT EXISTS run (manifest BLOB NOT NULL, coordinator TEXT NOT NULL)")
        if self._database.execute("SELECT 1 FROM run").fetchone() is None:
            self._database.execute("INSERT INTO run VALUES (?, ?)", (manifest.canonical_bytes(), coordinator))
        self.head: Head = chain.initial_head()
        newest = self._database.execute("SELECT envelope FROM commits ORDER BY round DESC LIMIT 1").fetchone()
        if newest:
            self.head = chain.advance(manifest, self._open(newest[0]))

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

    def _open(self, raw: bytes) -> Statement:
        return open_envelope(raw, self.manifest.run_id, (pb.KIND_COMMIT,))

    @property
    def length(self) -> int:
        """How many commits; the next one's round."""
        return self.head.round

    def append(self, envelope: pb.Envelope) -> Statement:
        """Verify completely, then store. Raises RemoteError; the chain is then as before."""
        head, commit = chain.extend(self.manifest, self.coordinator, self.head, envelope)
        self._database.execute(
            "INSERT INTO commits VALUES (?, ?)", (commit.body.round, envelope.SerializeToString(deterministic=True))
        )
        self.head = head
        return commit

    def raw(self, round: int) -> bytes | None:
        row = self._database.execute("SELECT envelope FROM commits WHERE round = ?", (round,)).fetchone()
        return None if row is None else bytes(row[0])

    def commit(self, round: int) -> Statement | None:
        raw = self.raw(round)
        return None if raw is None else self._open(raw)

    def commits(self, first: int = 0) -> Iterator[Statement]:
        for (raw,) in self._database.execute("SELECT envelope FROM commits WHERE round >= ? ORDER BY round", (first,)):
            yield self._open(raw)

    def verify(self) -> Iterator[Statement]:
        """Recheck everything from the first commit on. Raises RemoteError at the first that does not hold."""
        head = chain.initial_head()
        for (raw,) in self._database.execute("SELECT envelope FROM commits ORDER BY round"):
            head, commit = chain.extend(self.manifest, self.coordinator, head, bytes(raw))
            yield commit

    def close(self) -> None:
        self._database.close()
