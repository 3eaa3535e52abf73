"""The coordinator's log: every input of the round machine with its time, on disk before the effects leave; a restart replays it."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import open_envelope
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.round import RECEIVED_KINDS, Absent, Attested, Input, Present, Received, Refused, Resumed, Tick
from dilocox.transport.chain_file import open_database

__all__ = ["InputLog"]


class InputLog:
    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._run_id = manifest.run_id
        self._database: sqlite3.Connection = open_database(path)
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS inputs (number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL,"
            " peer TEXT, reason INTEGER, detail TEXT, envelope BLOB)"
        )

    def append(self, event: Input, now: float) -> None:
        """Durable when this returns."""
        row: tuple[str, str | None, int | None, str | None, bytes | None]
        match event:
            case Received(statement):
                row = ("received", None, None, None, statement.envelope.SerializeToString(deterministic=True))
            case Refused(peer, reason, detail):
                row = ("refused", peer, reason, detail, None)
            case Absent(peer):
                row = ("absent", peer, None, None, None)
            case Present(peer):
                row = ("present", peer, None, None, None)
            case Resumed():
                row = ("resumed", None, None, None, None)
            case Attested(attestation):
                row = ("attested", attestation.peer, None, None, attestation.SerializeToString(deterministic=True))
            case Tick():
                row = ("tick", None, None, None, None)
        self._database.execute(
            "INSERT INTO inputs (time, kind, peer, reason, detail, envelope) VALUES (?, ?, ?, ?, ?, ?)", (now, *row)
        )

    def replay(self) -> Iterator[tuple[Input, float]]:
        query = "SELECT time, kind, peer, reason, detail, envelope FROM inputs ORDER BY number"
        for time, kind, peer, reason, detail, envelope in self._database.execute(query):
            yield self._input(kind, peer, reason, detail, envelope), time

    def _input(self, kind: str, peer: str, reason: pb.Reason, detail: str, envelope: bytes) -> Input:
        match kind:
            case "received":
                return Received(open_envelope(envelope, self._run_id, RECEIVED_KINDS))
            case "refused":
                return Refused(peer, reason, detail)
            case "absent":
                return Absent(peer)
            case "present":
                return Present(peer)
            case "resumed":
                return Resumed()
            case "attested":
                return Attested(pb.Attestation.FromString(envelope))
            case _:
                return Tick()

    def close(self) -> None:
        self._database.close()
