"""Open or heal: every file that a daemon can make or fetch again is checked when it is opened.

A damaged file is set aside as `NAME.bad`, `NAME.2.bad`, … (nothing is overwritten) with one line in the log, and the
daemon continues without it. `identity.key` is no such file: without it a node is another peer, so a person must decide.
"""

import contextlib
import errno
import fcntl
import io
import itertools
import json
import logging
import os
import select
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dilocox.protocol.errors import ConfigError

__all__ = [
    "CHAIN",
    "EVENTS",
    "NAMED_BYTES",
    "find_chains",
    "find_events",
    "fsync_directory",
    "in_order_of_use",
    "leads_out",
    "open_regular",
    "quarantine",
    "read_at_most",
    "read_checked",
    "read_json",
    "read_named",
    "whole_folder",
    "write_atomically",
    "write_new",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

HALF = ".dilocox-part"
"""Suffix of a folder that is being written."""
CHAIN, EVENTS = "chain.db", "events.db"
"""Names of files in the folder of a run."""
PIPE_SECONDS, PIPE_PAUSE_SECONDS = 60.0, 0.05
"""Longest wait for a pipe's last byte, such as for a command on another machine; longest pause between two reads."""
NAMED_BYTES = 1 << 20
"""Largest file that a person names and that contains a line or a page: a run file, link, template, quote."""
JSON_BYTES = 64 << 20
"""Largest JSON file from another source: a model's config, the index of its shards."""


def fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _scratch(path: Path, data: bytes, mode: int, waits: bool = True, scratch: Path | None = None) -> Iterator[Path]:
    """Yield a file beside `path` with `data`, durable if `waits`; it is removed at the end. The name is fixed: in a
    container a restart has the same pid, so it overwrites what a crash left. An OSError names `path`, because people do
    not know the other name."""
    scratch = scratch or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                if waits:
                    os.fsync(file.fileno())
            yield scratch
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, data: bytes, mode: int = 0o644, waits: bool = True, scratch: Path | None = None) -> None:
    """Replace `path` so that after any crash it has the old bytes or the new ones. With `waits` false this holds only for
    a crash of the process: after a power failure the reader must check it. `scratch`: the file beside it that is
    written first."""
    with _scratch(path, data, mode, waits, scratch) as written:
        os.replace(written, path)
    if waits:
        fsync_directory(path.parent)


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Make a file that is not there yet, whole or, after any crash, not at all. Raises FileExistsError: nothing is overwritten."""
    with _scratch(path, data, mode) as scratch:
        os.link(scratch, path)  # exclusive, as O_EXCL is
    fsync_directory(path.parent)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target`, on disk, once all went well: after any crash that is whole or not there.
    Raises OSError where something is there already, FileExistsError where another process writes it."""
    there = next(each for each in target.absolute().parents if each.is_dir())
    with _scratch_folder(there / f".{target.name}{HALF}") as scratch:
        yield scratch
        for path in sorted(scratch.rglob("*"), reverse=True):
            if path.is_dir():
                fsync_directory(path)
            else:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        fsync_directory(scratch)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.rename(target)
    fsync_directory(target.parent)


@contextlib.contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder of this process; it is removed after an error, and after a crash at the next start. Raises
    FileExistsError if it belongs to another process."""
    path.mkdir(exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # where a link leads is not ours to clear
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.is_dir() or not os.path.samestat(os.fstat(handle), path.lstat()):
            raise BlockingIOError  # its owner has just ended
    except BlockingIOError as error:
        os.close(handle)
        raise FileExistsError(f"another process writes {path}: wait for it") from error
    try:
        for left in path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def in_order_of_use(files: Iterable[Path]) -> list[Path]:
    """Return the files by the last write in the folder of each, the newest at the end. A database reader's `-shm` file
    does not count."""

    def used(file: Path) -> tuple[int, Path]:
        beside = (
            each.stat().st_mtime_ns for each in file.parent.iterdir() if each.is_file() and not each.name.endswith("-shm")
        )
        return max(beside, default=0), file

    return sorted(files, key=used)


def find_chains(home: Path) -> list[Path]:
    """Return the chain files in a daemon's folder; the one of its last run is the last."""
    return in_order_of_use(home.glob(f"runs/*/{CHAIN}"))


def find_events(home: Path) -> list[Path]:
    """Return the event logs in a daemon's folder; the one of its last run is the last."""
    return in_order_of_use(home.glob(f"runs/*/{EVENTS}"))


def quarantine(path: Path, why: str, companions: Iterable[str] = ()) -> Path:
    """Move a damaged file aside, with files beside it whose names end in one of `companions`. Return its new path."""
    for number in itertools.count(1):  # one daemon per folder; a corpus may have several readers
        aside = path.with_name(f"{path.name}.bad" if number == 1 else f"{path.name}.{number}.bad")
        if not aside.exists():
            with contextlib.suppress(FileNotFoundError):  # another reader of a corpus was first
                path.rename(aside)
            for ending in companions:
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + ending).rename(aside.with_name(aside.name + ending))
            log.warning("%s is damaged (%s); moved it to %s", path, why, aside.name)
            return aside
    raise AssertionError("unreachable")


def read_checked(path: Path, parse: Callable[[bytes], T]) -> T | None:
    """Return what `parse` makes of the file's bytes. None if there is no file, or after a ValueError or excessive nesting,
    which sets the file aside."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        quarantine(path, str(error))
        return None


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file that a person names or another person made. Raises ConfigError unless it is a regular file, OSError.

    To open a FIFO may wait for ever, and a device may have no end.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            return file
        file.close()
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise ConfigError(f"{path} is {kind}: use a regular file")


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a link in a folder that another person made leads to a file that this person did not put there.

    The cache of the Hugging Face hub is one folder: its `snapshots/REVISION` has links into its `blobs`.
    """
    root = folder.resolve()
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    return not any(path.resolve().is_relative_to(each) for each in roots)


def read_at_most(path: Path, most: int) -> bytes:
    """Return the bytes of a file that a person names or another person made. Raises ConfigError unless it is a regular file of at
    most `most` bytes, OSError."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{path} is longer than the limit of {most >> 20} MiB for such a file")
    return data


def read_named(path: Path, piped: bool = False) -> str:
    """Return the text of a file that a person names, without a byte order mark. `piped`: it may be a pipe, such as a
    shell's <(…).

    Raises ConfigError, OSError, UnicodeDecodeError.
    """
    is_pipe = piped and stat.S_ISFIFO(path.stat().st_mode)
    data = _read_pipe(path, NAMED_BYTES) if is_pipe else read_at_most(path, NAMED_BYTES)
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()


def _read_pipe(path: Path, most: int) -> bytes:
    """Read a pipe until its writers have closed it. Raises ConfigError after PIPE_SECONDS, or beyond `most` bytes, OSError."""
    deadline, data = time.monotonic() + PIPE_SECONDS, bytearray()
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.closing(os.fdopen(handle, "rb", buffering=0)) as file:
        while len(data) <= most:
            try:
                part = os.read(handle, most + 1)
            except BlockingIOError:
                part = None  # it has a writer
            if part:
                data += part
                continue
            if data and part == b"":
                return bytes(data)
            if (left := deadline - time.monotonic()) <= 0:
                raise ConfigError(
                    f"{path} is a pipe that no process closed within {PIPE_SECONDS:g} s: write to it, or use a file"
                )
            # A pipe without a writer reads as if it had ended, and wakes no reader.
            select.select([file] if part is None else [], [], [], min(left, PIPE_PAUSE_SECONDS))
    raise ConfigError(f"{path} has more than the limit of {most >> 20} MiB for such a file")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file from another source. Raises ConfigError."""
    try:
        return json.loads(read_at_most(path, JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
