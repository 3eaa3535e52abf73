"""Write-ahead log of signed statements: durable before they are sent, so a restart never equivocates."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.store.chain_file import DamagedError, open_database, sentences
from dilocox.transport.store.files import quarantine

__all__ = ["SignedStatementLog"]

KINDS = (pb.KIND_CLAIM, pb.KIND_CLUSTER, pb.KIND_LEAVE, pb.KIND_CONTRIBUTION, pb.KIND_RECEIPT, pb.KIND_STATE_REPORT)
BLOCK = 1000
"""Sequence numbers reserved at a time: one write for so many heartbeats, and more than a process sends in a second. The
next block is reserved when half is used."""

MOST_RESERVED = 1 << 62
"""A counter of the time of day in thousandths is far below this for ever; the wire has twice as much."""


class SignedStatementLog:
    """The newest statement of each kind, and a counter that never goes back."""

    def __init__(self, path: Path, run_id: bytes) -> None:
        """Open or heal the log: a damaged file is set aside; the run's other members still have its statements."""
        self._run_id, self._writing, self._counting = run_id, threading.Lock(), threading.Lock()
        self._reserver = ThreadPoolExecutor(1, "sequence")
        self._reserving: Future[int] | None = None
        """The last number that will be reserved."""
        try:
            self._load(path)
        except DamagedError as error:
            quarantine(path, str(error), ("-wal", "-shm"))
            self._load(path)

    def _load(self, path: Path) -> None:
        """Raises DamagedError."""
        self._database = open_database(path)
        try:
            with sentences(path):
                self._lay_out(path)
        except LocalError:
            self._database.close()
            raise

    def _lay_out(self, path: Path) -> None:
        self._database.execute("CREATE TABLE IF NOT EXISTS own (kind INTEGER PRIMARY KEY, envelope BLOB NOT NULL)")
        self._database.execute("CREATE TABLE IF NOT EXISTS sequence (reserved INTEGER NOT NULL)")
        if self._database.execute("SELECT 1 FROM sequence").fetchone() is None:
            # A lost counter continues above every number that it can have reached: the coordinator remembers those, and
            # rejects smaller ones as replays.
            self._database.execute("INSERT INTO sequence VALUES (?)", (int(time.time()) * BLOCK,))
        (reserved,) = self._database.execute("SELECT reserved FROM sequence").fetchone()
        if type(reserved) is not int or reserved not in range(MOST_RESERVED):
            raise DamagedError(f"{path} is damaged: its counter is not valid.")
        if self._database.execute("SELECT 1 FROM own WHERE typeof(envelope) != 'blob'").fetchone() is not None:
            raise DamagedError(f"{path} is damaged: it contains an entry that is not a statement.")
        self._last, self._reserved = reserved, self._reserve(reserved + BLOCK)

    def keep(self, statement: Statement[object]) -> None:
        """Durable when this returns. Blocking."""
        raw = statement.envelope.SerializeToString(deterministic=True)
        with self._writing:
            self._database.execute("INSERT OR REPLACE INTO own VALUES (?, ?)", (statement.kind, raw))

    def all(self) -> Iterable[Statement[object]]:
        """Return the signed statements of earlier incarnations."""
        for (raw,) in self._database.execute("SELECT envelope FROM own ORDER BY kind").fetchall():
            try:
                yield open_envelope(raw, self._run_id, KINDS)
            except RemoteError:
                continue  # of a version that bounds it otherwise

    def next_sequence(self) -> int:
        """Return a number larger than every one before, also across restarts: it is reserved on disk first. Waits for the
        disk only if that is slower than a block of numbers. Raises the disk's errors."""
        with self._counting:
            self._last += 1
            if self._reserving is None and self._reserved - self._last < BLOCK // 2:
                self._reserving = self._reserver.submit(self._reserve, max(self._last, self._reserved) + BLOCK)
            if self._reserving is not None and (self._reserving.done() or self._last > self._reserved):
                reserving, self._reserving = self._reserving, None  # who asks after one that failed tries again
                self._reserved = reserving.result()
            return self._last

    def _reserve(self, until: int) -> int:
        with self._writing:
            self._database.execute("UPDATE sequence SET reserved = ?", (until,))
        return until

    def close(self) -> None:
        self._reserver.shutdown()
        with self._writing:
            self._database.close()
