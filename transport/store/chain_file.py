"""Commit chain on disk: an append-only SQLite table, the same file at a node and at the coordinator.

Each row has a commit, its checksum, and its view for people (views/json_views.py), all written once. A daemon trusts its own
file as far as the checksums reach; `verify` trusts nothing. A damaged file is set aside, and a new one begins with the
leading valid commits. A node fetches the rest from its coordinator; a coordinator receives its own commits back from
nodes.
"""

import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from dilocox.protocol.consensus import chain, terms
from dilocox.protocol.consensus.head import Head, advance, initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.limits import ROUNDS
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest, open_manifest
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.store.files import quarantine

__all__ = ["INPUTS", "ChainFile", "DamagedError", "Describe", "open_database", "sentences", "transaction"]

log = logging.getLogger(__name__)

INPUTS = "inputs"
"""Table in which a coordinator stores the open round (coordinator/round_log.py), always for the head after the last commit."""

DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLite errors that mean a damaged file, including its tables; all others are the disk's."""

Describe = Callable[[Head, Statement[pb.Commit]], tuple[dict[str, Any], dict[str, Any]]]
"""(the head before, a commit) -> its line in a table, and everything about it."""


EMPTY = "{path} is damaged: it is empty."


class DamagedError(LocalError):
    """Error: a database does not contain what was written to it."""


def open_database(path: Path, check: bool = True) -> sqlite3.Connection:
    """A connection that commits every statement and survives `kill -9` and power loss. `check` reads the whole file once.

    Raises DamagedError, or LocalError when the disk does not let it be opened.
    """
    with sentences(path):
        if _emptied(path):
            if not check:
                raise DamagedError(EMPTY.format(path=path))
            path.write_bytes(b"\0\0")  # with these bytes SQLite reports damage; otherwise it would read the log
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            if check and (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise DamagedError(f"{path} is damaged: {found}. Restore it from a backup.")
        except (sqlite3.Error, DamagedError):
            database.close()
            raise
    return database


def _emptied(path: Path) -> bool:
    """Return whether the file was truncated to nothing. SQLite would treat it as new, and remove the log beside it."""
    with suppress(FileNotFoundError):
        return not path.stat().st_size
    return False


@contextmanager
def sentences(path: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in DAMAGE:  # none where Python could not read it
            raise DamagedError(f"{path} is damaged: {error}. Restore it from a backup.") from error
        raise LocalError(f"cannot use {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} is damaged: a name in it is not text. Restore it from a backup.") from error


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Write everything in the context, or nothing. A thread that closes the connection must wait for the end: SQLite would
    crash."""
    database.execute("BEGIN")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:  # a full disk has ended it already, and the caller must receive that error
            database.execute("ROLLBACK")
        raise


class ChainFile:
    """Verified commits 0 … n-1, and the head they imply."""

    def __init__(self, path: Path, manifest: Manifest, describe: Describe | None = None) -> None:
        """Opens or heals: every commit's checksum and number are checked. Blocking: reads the whole file."""
        self.path, self.manifest, self._describe = path, manifest, describe
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self.appointment: Statement[pb.Appointment] | None = None
        """The owner's newest that we know, also where our chain does not reach it yet."""
        self.healed = False
        """Commits may be missing at the end."""
        try:
            self._load()
        except DamagedError as error:
            self._heal(str(error))
            self._load()
            self.healed = True
            log.warning("%d of its commits are valid", self.length)

    def _load(self) -> None:
        """Raises DamagedError."""
        self.database = open_database(self.path)
        self._reader = open_database(self.path, check=False)  # a reader never waits for a writer's fsync
        try:
            self._lay_out()
            newest = None
            for newest in self._holding(self.database):  # noqa: B007
                pass
            self._stand_at(self._first_head() if newest is None else self._head_after(newest))
            if self.head.term > self.term:
                raise DamagedError(f"{self.path} is damaged: the appointment of term {self.head.term} is missing.")
        except LocalError:
            self._reader.close()
            self.database.close()
            raise

    def _first_head(self) -> Head:
        return initial_head(self.manifest.coordinator, self.manifest.model.root)

    def _lay_out(self) -> None:
        mine = (self.manifest.canonical_bytes(),)
        with sentences(self.path):
            for table in (
                "commits (round INTEGER PRIMARY KEY, envelope BLOB NOT NULL, checksum BLOB NOT NULL)",
                "views (round INTEGER PRIMARY KEY, row TEXT, detail TEXT)",
                "run (manifest BLOB NOT NULL)",
                "appointments (term INTEGER PRIMARY KEY, envelope BLOB NOT NULL)",
                "signed_manifest (envelope BLOB NOT NULL)",
                "given_up (term INTEGER NOT NULL, round INTEGER NOT NULL, envelope BLOB NOT NULL)",
            ):
                self.database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            found = self.database.execute("SELECT manifest FROM run").fetchone()
            if found is None:
                self.database.execute("INSERT INTO run VALUES (?)", mine)
            appointed = self.database.execute("SELECT envelope FROM appointments ORDER BY term DESC LIMIT 1").fetchone()
        if found not in (None, mine):
            raise DamagedError(f"{self.path} is damaged: it belongs to another run.")
        try:
            self.appointment = None if appointed is None else terms.open_appointment(self.manifest, bytes(appointed[0]))
        except RemoteError as error:
            raise DamagedError(f"{self.path} is damaged: its newest appointment: {error}.") from error

    def _holding(self, database: sqlite3.Connection) -> Iterator[bytes]:
        """The stored commits, as they were written, without a gap. Raises DamagedError at the first that is not."""
        with sentences(self.path):
            rows = database.execute("SELECT round, envelope, checksum FROM commits ORDER BY round")
            for number, (round, raw, checksum) in enumerate(rows):
                if round != number or not isinstance(raw, bytes) or sha256(raw) != checksum:
                    raise DamagedError(f"{self.path} is damaged: commit {number} does not match its checksum.")
                yield raw

    def _head_after(self, raw: bytes) -> Head:
        try:
            commit = self._open(raw)
        except RemoteError as error:
            raise DamagedError(f"{self.path} is damaged: its last commit: {error}.") from error
        if commit.peer != self.manifest.coordinator and not commit.body.term:
            raise DamagedError(f"{self.path} is damaged: the coordinator did not sign its last commit.")
        return advance(self.manifest, commit)

    def _heal(self, why: str) -> None:
        """Move the damaged file aside, and begin a new one with the valid commits."""
        aside = quarantine(self.path, why, ("-wal", "-shm"))
        with closing(open_database(self.path)) as self.database, closing(sqlite3.connect(aside)) as old:
            self._lay_out()
            self.head = self._first_head()
            for table, take in (("appointments", self.appoint), ("signed_manifest", self.keep_signed_manifest)):
                with suppress(LocalError, RemoteError, DecodeError, TypeError), sentences(aside):
                    for (raw,) in old.execute(f"SELECT envelope FROM {table} ORDER BY rowid"):
                        take(pb.Envelope.FromString(raw))
            with suppress(DamagedError, RemoteError):
                for raw in self._holding(old):
                    self.append(pb.Envelope.FromString(raw))

    @classmethod
    @contextmanager
    def for_reading(cls, path: Path) -> Iterator["ChainFile"]:
        """The chain in a file, of the run that the file names. Changes nothing. Raises LocalError."""
        chain = cls.__new__(cls)
        try:
            if _emptied(path):
                raise DamagedError(EMPTY.format(path=path))
            with sentences(path), closing(sqlite3.connect(path)) as database:
                (manifest,) = database.execute("SELECT manifest FROM run").fetchone()
            chain.path, chain.manifest = path, Manifest.from_canonical(manifest)
            chain._describe, chain.healed, chain.appointment = None, False, None
            chain._reading, chain._writing = threading.Lock(), threading.Lock()
            chain._load()
        except (DamagedError, RemoteError, TypeError) as error:
            raise LocalError(f"cannot read {path}: {error} Start its daemon, which repairs it.") from error
        try:
            yield chain
        finally:
            chain.close()

    def _open(self, raw: bytes) -> Statement[pb.Commit]:
        return open_envelope(raw, self.manifest.run_id, (pb.KIND_COMMIT,))

    @property
    def length(self) -> int:
        """Return the number of commits: the next one's round."""
        return self.head.round

    def append(self, envelope: pb.Envelope) -> Statement[pb.Commit]:
        """Verify completely, then store. Raises RemoteError; the chain is then as before."""
        head, commit = chain.extend(self.manifest, self.head, envelope)
        self._check_named(commit)
        with self.transaction():
            self.write(self.head, commit)
        self._stand_at(head)
        return commit

    def _check_named(self, commit: Statement[pb.Commit]) -> None:
        """Raise RemoteError for a commit that follows, or replaces, the last one that the latest appointment accepts."""
        newest, body = self.appointment, commit.body
        if newest is None or newest.body.term <= body.term:
            return
        named = newest.body
        if body.round >= named.round or (body.round == named.round - 1 and commit.digest != named.head):
            raise RemoteError(
                pb.REASON_WRONG_HEAD, f"the run's owner named another commit {named.round - 1} than this chain contains"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """`transaction` of the database. Others wait for its end, in any thread, and so does `close`."""
        with self._writing, transaction(self.database):
            yield

    def move_to(self, head: Head) -> None:
        """Have this head: its commit was written with `write`."""
        self.head = head

    def _stand_at(self, head: Head) -> None:
        """Apply the latest appointment if it names this head: its coordinator signs from here on."""
        newest = self.appointment
        if (
            newest is not None
            and (newest.body.round, newest.body.head) == (head.round, head.digest)
            and newest.body.term > head.term
        ):
            head = terms.appoint(self.manifest, head, newest.envelope)
        self.head = head

    # Coordinator and appointments

    @property
    def signed_manifest(self) -> pb.Envelope | None:
        """Return the manifest with the owner's signature, if a peer sent it."""
        rows = self._read("SELECT envelope FROM signed_manifest")
        return pb.Envelope.FromString(bytes(rows[0][0])) if rows else None

    def keep_signed_manifest(self, envelope: pb.Envelope) -> None:
        """Store the signed manifest: with it, a peer can serve the run without the owner's key. Raises RemoteError for
        another run's."""
        open_manifest(envelope, self.manifest.run_id)
        with self.transaction():
            self.database.execute("DELETE FROM signed_manifest")
            raw = envelope.SerializeToString(deterministic=True)
            self.database.execute("INSERT INTO signed_manifest VALUES (?)", (raw,))

    @property
    def newest_word(self) -> pb.Envelope | None:
        """The appointment, for others."""
        return self.appointment.envelope if self.appointment is not None else None

    def appointment_of(self, term: int) -> Statement[pb.Appointment] | None:
        """Return the appointment that began this term."""
        rows = self._read("SELECT envelope FROM appointments WHERE term = ?", term)
        return terms.open_appointment(self.manifest, bytes(rows[0][0])) if rows else None

    @property
    def signer(self) -> str:
        """Peer id of who signs the run's commits now, as far as we know."""
        newest = self.appointment
        return newest.body.coordinator if newest is not None and newest.body.term > self.head.term else self.head.coordinator

    @property
    def term(self) -> int:
        """The newest that we know of."""
        return self.appointment.body.term if self.appointment is not None else 0

    @property
    def parties(self) -> list[str]:
        """Peer ids of those whom one must know how to dial: the coordinator, the run's holders, the roster."""
        return [self.head.coordinator, *self.manifest.run.relays, *self.head.cluster_by_peer]

    def appoint(self, envelope: pb.Envelope) -> bool:
        """Apply the owner's appointment. Return whether it rejects commits here. Those are set aside: the chain then ends
        with the last accepted one, or begins again if it was another chain. Raises RemoteError if the owner did not
        sign it."""
        appointment = terms.open_appointment(self.manifest, envelope)
        body = appointment.body
        if body.term <= self.term:
            return False
        stand = self.length
        if body.round <= self.length:
            last = self.commit(body.round - 1) if body.round else None
            stand = body.round if last is not None and last.digest == body.head else 0
        before = self.length
        self._give_up(stand, appointment)
        return stand < before

    def give_up_from(self, round: int) -> None:
        """Reject all commits from this round on: they stay in the file, and are never read again."""
        self._give_up(round, None)

    def _give_up(self, stand: int, appointment: Statement[pb.Appointment] | None) -> None:
        """Store the appointment, and remove rejected commits and the round that was open on them, in one transaction."""
        before, term = self.appointment, appointment.body.term if appointment is not None else self.term
        with self._writing:
            try:
                with transaction(self.database):
                    if appointment is not None:
                        self._keep_appointment(appointment)
                    kept_aside = "INSERT INTO given_up SELECT ?, round, envelope FROM commits WHERE round >= ?"
                    if self.database.execute(kept_aside, (term, stand)).rowcount:
                        for table in ("commits", "views"):
                            self.database.execute(f"DELETE FROM {table} WHERE round >= ?", (stand,))
                        if self.database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (INPUTS,)).fetchone():
                            self.database.execute(f"DELETE FROM {INPUTS}")
            except BaseException:
                self.appointment = before
                raise
        newest = self.raw(stand - 1) if stand else None
        self._stand_at(self._first_head() if newest is None else self._head_after(newest))

    def _keep_appointment(self, appointment: Statement[pb.Appointment]) -> None:
        raw = appointment.envelope.SerializeToString(deterministic=True)
        self.database.execute("INSERT OR REPLACE INTO appointments VALUES (?, ?)", (appointment.body.term, raw))
        if appointment.body.term > self.term:
            self.appointment = appointment

    def write(self, before: Head, commit: Statement[pb.Commit]) -> None:
        """Store a verified commit and its view, within a transaction. Does not move `head`."""
        raw = commit.envelope.SerializeToString(deterministic=True)
        self.database.execute("INSERT INTO commits VALUES (?, ?, ?)", (commit.body.round, raw, sha256(raw)))
        if commit.body.HasField("appointment"):
            self._keep_appointment(terms.open_appointment(self.manifest, commit.body.appointment))
        if self._describe is not None:
            row, detail = self._describe(before, commit)
            self.database.execute(
                "INSERT INTO views VALUES (?, ?, ?)", (commit.body.round, json.dumps(row), json.dumps(detail))
            )

    def _read(self, query: str, *arguments: int) -> list[Any]:
        """Run a query from any thread: the file is not closed during it, because SQLite would crash."""
        with self._reading:
            return self._reader.execute(query, arguments).fetchall()

    def raw(self, round: int) -> bytes | None:
        rows = self._read("SELECT envelope FROM commits WHERE round = ?", round)
        return bytes(rows[0][0]) if rows else None

    def commit(self, round: int) -> Statement[pb.Commit] | None:
        raw = self.raw(round)
        return None if raw is None else self._open(raw)

    def commits(self, first: int = 0) -> Iterator[Statement[pb.Commit]]:
        for (raw,) in self._reader.execute("SELECT envelope FROM commits WHERE round >= ? ORDER BY round", (first,)):
            yield self._open(raw)

    def state_before(self, round: int) -> bytes:
        """Return the root of the state that a round starts from, from the chain or an appointment; empty if neither has
        it."""
        commit = self.commit(round)
        if commit is not None:
            return bytes(commit.body.state)
        return self.head.state if round == self.head.round else b""

    def rows(self, first: int = 0, until: int = ROUNDS) -> str:
        """Return the views of all rounds from `first` on and before `until`, as a JSON list."""
        found = self._read("SELECT row FROM views WHERE round >= ? AND round < ? ORDER BY round", first, until)
        return "[" + ",".join(row for (row,) in found) + "]"

    def detail(self, round: int) -> str | None:
        """Everything that people see of one round, a JSON object."""
        rows = self._read("SELECT detail FROM views WHERE round = ?", round)
        return str(rows[0][0]) if rows else None

    def verify(self) -> Iterator[Statement[pb.Commit]]:
        """Verify everything from the first commit on. Raises RemoteError at the first invalid one."""
        head = self._first_head()
        for (raw,) in self._reader.execute("SELECT envelope FROM commits ORDER BY round"):
            head, commit = chain.extend(self.manifest, head, bytes(raw))
            yield commit

    def close(self) -> None:
        with self._reading, self._writing:
            self._reader.close()
            self.database.close()
