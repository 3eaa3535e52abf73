"""Folder of a daemon: identity, lock, and the file with the addresses of the running daemon."""

import fcntl
import json
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.transport.store.files import read_checked, read_named, write_atomically, write_new

__all__ = ["API_KEY", "DataDirectory", "format_identity", "load_identity", "run_folder"]

API_KEY = "api.key"

LOCK_SECONDS = 1.0
"""Wait for the lock: a health check (health.py) takes it for an instant, a daemon for its whole life."""


def format_identity(secret: bytes) -> bytes:
    """Return the content of an identity file."""
    return secret.hex().encode() + b"\n"


def load_identity(path: Path) -> Identity:
    """The Ed25519 identity in `path` (32 bytes, hexadecimal), made on first use. Mode 0600 is enforced."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, format_identity(os.urandom(32)), mode=0o600)
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read {path}. Run: chmod 600 {path}")
    try:
        return Identity(bytes.fromhex(read_named(path).strip()))
    except ValueError as error:
        raise ConfigError(f"{path} does not contain an identity (64 hexadecimal digits)") from error


def run_folder(home: Path, run_id: bytes) -> Path:
    """Return the folder of a run in a daemon's folder; it need not exist."""
    return home / "runs" / run_id.hex()[:16]


class DataDirectory:
    """Folder with at most one daemon: the lock lasts as long as this object."""

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        """Open the folder. `identity`: the daemon's; default: the folder's own, made on first use.

        Raises LocalError when another daemon runs on this folder.
        """
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("a")
        if not _locked(self._lock):
            self._lock.close()
            raise LocalError(f"another daemon uses {folder}. Stop it, or use another --home.")
        key = self.folder / "identity.key"
        self.identity_is_new = not key.exists()
        """Whether this process made the identity: what attested software may vouch for."""
        try:
            self.identity = identity or load_identity(key)
        except (LocalError, OSError):
            self._lock.close()
            raise
        for leftover in self.folder.glob("parent-*"):
            if leftover.is_fifo():  # parent_pipe.py's
                leftover.unlink()
        kept = self.remembered()
        if kept.get("pid"):  # from an earlier incarnation: it does not listen yet
            with suppress(OSError):
                self._write(**kept | {"pid": 0})

    def start_number(self, above: int = 0) -> int:
        """Return a number larger than at every earlier start on this folder and than `above`, whatever the wall clock is;
        counted on disk. A folder that lost its count begins at the time of day, above what it may have counted."""
        path = self.folder / "starts"
        number = max(read_checked(path, _count) or int(time.time()), above) + 1
        write_atomically(path, str(number).encode())
        return number

    def close(self) -> None:
        """Let another daemon have the folder."""
        self._lock.close()

    def run_folder(self, run_id: bytes) -> Path:
        folder = run_folder(self.folder, run_id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def api_key(self) -> str:
        """A new one, which opens what only this daemon's operator may ask of its API: who may read this folder's files."""
        key = secrets.token_hex(16)
        write_atomically(self.folder / API_KEY, key.encode(), mode=0o600)
        return key

    def announce(self, **facts: Any) -> None:
        """Say where this daemon listens, for the command line."""
        self._write(pid=os.getpid(), **facts)

    def _write(self, **facts: Any) -> None:
        write_atomically(self.folder / "daemon.json", json.dumps(facts).encode())

    def remembered(self) -> dict[str, Any]:
        """Return the addresses that the last daemon on this folder published: a restart reuses them."""
        return read_checked(self.folder / "daemon.json", _facts) or {}


MOST_STARTS = 1 << 40
"""A second's worth of starts for 30,000 years: a larger number was not counted."""


def _count(raw: bytes) -> int:
    """Raises ValueError."""
    number = int(raw)
    if number not in range(MOST_STARTS):
        raise ValueError("more starts than possible")
    return number


def _locked(file: IO[str]) -> bool:
    """Whether the lock is ours now."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(LOCK_SECONDS / 100)


def _facts(raw: bytes) -> dict[str, Any]:
    """A JSON object with ports, if it has any, that can be listened on. Raises ValueError."""
    facts: Any = json.loads(raw)
    ports = [facts.get(key, 1) for key in ("port", "dht_port")] if isinstance(facts, dict) else [None]
    if not all(type(port) is int and port in range(1, 1 << 16) for port in ports):
        raise ValueError("not a daemon's announcement")
    return facts
