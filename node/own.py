"""What this node signed, on disk before it is said: a restart says the same again, and never something else in the same slot."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.messages import Statement, open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.chain_file import DamagedError, open_database, sentences
from dilocox.transport.files import quarantine

__all__ = ["OwnStatements"]

KINDS = (pb.KIND_CLAIM, pb.KIND_CLUSTER, pb.KIND_LEAVE, pb.KIND_CONTRIBUTION, pb.KIND_RECEIPT, pb.KIND_STATE_REPORT)
BLOCK = 1000
"""Sequence numbers reserved at a time: one write for so many heartbeats, and more than a process says in a second. When half of
them are used up, the next are reserved."""

MOST_RESERVED = 1 << 62
"""A counter of the time of day in thousandths is far below this for ever; the wire has twice as much."""


class OwnStatements:
    """The newest statement of each kind, and a counter that never goes back."""

    def __init__(self, path: Path, run_id: bytes) -> None:
        """Opens or heals: a damaged file is set aside; the run's other members still hold what it held."""
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
            # Where the counter was lost, it goes on above what it can have been: the coordinator remembers the old one, and a
            # smaller one would be taken for a replay.
            self._database.execute("INSERT INTO sequence VALUES (?)", (int(time.time()) * BLOCK,))
        (reserved,) = self._database.execute("SELECT reserved FROM sequence").fetchone()
        if type(reserved) is not int or reserved not in range(MOST_RESERVED):
            raise DamagedError(f"{path} is damaged: it counts what cannot be counted.")
        if self._database.execute("SELECT 1 FROM own WHERE typeof(envelope) != 'blob'").fetchone() is not None:
            raise DamagedError(f"{path} is damaged: it holds what is no statement.")
        self._last, self._reserved = reserved, self._reserve(reserved + BLOCK)

    def keep(self, statement: Statement[object]) -> None:
        """Durable when this returns. Blocking."""
        raw = statement.envelope.SerializeToString(deterministic=True)
        with self._writing:
            self._database.execute("INSERT OR REPLACE INTO own VALUES (?, ?)", (statement.kind, raw))

    def all(self) -> Iterable[Statement[object]]:
        """What an earlier life signed."""
        for (raw,) in self._database.execute("SELECT envelope FROM own ORDER BY kind").fetchall():
            try:
                yield open_envelope(raw, self._run_id, KINDS)
            except RemoteError:
                continue  # of a version that bounds it otherwise

    def next_sequence(self) -> int:
        """Larger than every number before, also over restarts: none is said that is not reserved on disk. Waits for the disk only
        where that is slower than a block of numbers. Raises what the disk raises."""
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
