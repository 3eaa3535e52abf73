"""The commit chain on disk: an append-only SQLite table, the same file at a node and at the coordinator.

A damaged file is set aside and begun again with the commits that hold, from the first on: a node gets the others from its
coordinator, a coordinator makes them again from its log, the same bits.
"""

import logging
import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from dilocox.protocol import chain
from dilocox.protocol.chain import Head
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.files import quarantine

__all__ = ["ChainFile", "DamagedError", "find_chains", "open_database"]

log = logging.getLogger(__name__)

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Of SQLite's errors, those that say that the file is not what was written; others are the disk's."""


class DamagedError(LocalError):
    """A database does not hold what was written to it."""


def open_database(path: Path) -> sqlite3.Connection:
    """A connection that commits every statement and survives `kill -9` and power loss. Reads the whole file once.

    Raises DamagedError, or LocalError when the disk does not let it be opened.
    """
    with _sentences(path):
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            if (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise DamagedError(f"{path} is damaged: {found}. Restore it from a backup.")
        except (sqlite3.Error, DamagedError):
            database.close()
            raise
    return database


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in DAMAGE:
            raise DamagedError(f"{path} is damaged: {error}. Restore it from a backup.") from error
        raise LocalError(f"{path} cannot be used: {error}. Look whether the disk is full or read-only.") from error


def find_chains(home: Path) -> list[Path]:
    """The chain files in a daemon's folder."""
    return sorted(home.glob("runs/*/chain.db"))


class ChainFile:
    """Verified commits 0 … n-1, and the head they imply."""

    def __init__(self, path: Path, manifest: Manifest, coordinator: str) -> None:
        """Opens or heals: every commit's signature, number and predecessor are checked. Blocking: reads the whole file."""
        self._path, self.manifest, self.coordinator = path, manifest, coordinator
        try:
            self._load()
        except DamagedError as error:
            self._heal(str(error))
            self._load()
            log.warning("%d of its commits hold", self.length)

    def _load(self) -> None:
        """Raises DamagedError."""
        self._database = open_database(self._path)
        try:
            self._lay_out()
            newest = deque(self._holding(self._database), maxlen=1)
        except LocalError:
            self._database.close()
            raise
        self.head: Head = chain.advance(self.manifest, newest[0]) if newest else chain.initial_head()

    def _lay_out(self) -> None:
        mine = (self.manifest.canonical_bytes(), self.coordinator)
        with _sentences(self._path):
            self._database.execute("CREATE TABLE IF NOT EXISTS commits (round INTEGER PRIMARY KEY, envelope BLOB NOT NULL)")
            self._database.execute("CREATE TABLE IF NOT EXISTS run (manifest BLOB NOT NULL, coordinator TEXT NOT NULL)")
            found = self._database.execute("SELECT manifest, coordinator FROM run").fetchone()
            if found is None:
                self._database.execute("INSERT INTO run VALUES (?, ?)", mine)
        if found not in (None, mine):
            raise DamagedError(f"{self._path} is damaged: it is of another run.")

    def _holding(self, database: sqlite3.Connection) -> Iterator[Statement]:
        """The stored commits, the coordinator's, each following the one before. Raises DamagedError at the first that is not."""
        previous = b""
        with _sentences(self._path):
            rows = database.execute("SELECT round, envelope FROM commits ORDER BY round")
            for number, (round, raw) in enumerate(rows):
                try:
                    commit = self._open(raw)
                except (RemoteError, TypeError) as error:
                    raise DamagedError(f"{self._path} is damaged: commit {number}: {error}.") from error
                found = (round, commit.body.round, commit.peer, commit.body.previous)
                if found != (number, number, self.coordinator, previous):
                    raise DamagedError(f"{self._path} is damaged: commit {number} does not follow the one before.")
                previous = commit.digest
                yield commit

    def _heal(self, why: str) -> None:
        """Set the damaged file aside and begin another with the commits that hold."""
        aside = quarantine(self._path, why, ("-wal", "-shm"))
        with closing(open_database(self._path)) as self._database, closing(sqlite3.connect(aside)) as old:
            self._lay_out()
            with suppress(DamagedError):
                for commit in self._holding(old):
                    self._store(commit)

    def _store(self, commit: Statement) -> None:
        raw = commit.envelope.SerializeToString(deterministic=True)
        self._database.execute("INSERT INTO commits VALUES (?, ?)", (commit.body.round, raw))

    @classmethod
    @contextmanager
    def for_reading(cls, path: Path) -> Iterator["ChainFile"]:
        """The chain in a file, with the run and coordinator that the file names. Changes nothing. Raises LocalError."""
        chain = cls.__new__(cls)
        try:
            with _sentences(path), closing(sqlite3.connect(path)) as database:
                manifest, coordinator = database.execute("SELECT manifest, coordinator FROM run").fetchone()
            chain._path, chain.manifest, chain.coordinator = path, Manifest.from_canonical(manifest), coordinator
            chain._load()
        except (DamagedError, RemoteError, TypeError) as error:
            raise LocalError(f"{path} cannot be read: {error} Its daemon heals it when it starts.") from error
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
        self._store(commit)
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
