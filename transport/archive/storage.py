"""Storage of an archive's objects: a folder of this machine, or a bucket with the S3 API. All calls block."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import printable
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.plugins import call, installed
from dilocox.transport.store.files import fsync_directory, open_regular, write_atomically, write_new

__all__ = ["BucketStorage", "FolderStorage", "Storage", "open_storage"]

T = TypeVar("T")

SCHEMES = "dilocox.archives"
"""Group of entry points: by URL scheme a function that returns the Storage of a URL, or raises ConfigError."""
SHOWN_CHARACTERS = 200
"""Most that an error repeats of a path."""
LISTED = 1 << 20
"""Names in one folder, at most: a blob of the largest size has fewer parts."""
ATTEMPTS = 4
"""A bucket's servers are busy now and then; who asks in vain so often asks again in half a minute."""
CONNECT_SECONDS = 10
"""A handshake across the world takes under two seconds."""
ANSWER_SECONDS = 60
"""An object of 4 MiB takes half of this on a line of 1 Mbit/s."""


CONFLICTS = 5
"""Most retries after a conflict: S3 may reject both of two simultaneous writes of an object (409,
ConditionalRequestConflict)."""
CONFLICT_SECONDS = 0.1
"""Pause before the first retry; it doubles each time."""


class Storage(Protocol):
    """Objects by name, of a few MiB at most. Every call raises RemoteError (unavailable) where the storage does not do it."""

    url: str

    def get(self, name: str, most: int) -> bytes:
        """Raises FileNotFoundError where there is none, RemoteError (oversize) where it has more bytes than `most`."""

    def put(self, name: str, data: bytes) -> None:
        """Whole or not at all, over what was there; it survives a loss of power when this returns."""

    def put_new(self, name: str, data: bytes) -> bool:
        """`put`, unless there is one: whether there was none."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of all objects in a folder, by their names in it; of the whole archive if the folder is empty."""

    def size(self, name: str) -> int | None: ...

    def delete(self, name: str) -> None:
        """Delete an object; does nothing if it does not exist."""


def open_storage(url: str, option: str = "--archive") -> Storage:
    """Return the storage of `file:///PATH`, a path, `s3://BUCKET/PREFIX`, or a plugin's scheme. `option`: the option that names it,
    for the sentence. Raises ConfigError."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return _folder(Path(url), option)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"{option} {printable(url)[:SHOWN_CHARACTERS]} is not a URL: {error}. Use file:///PATH or s3://BUCKET/PREFIX"
        ) from error
    if scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return _folder(Path(unquote(parts.path)), option)
    if scheme == "s3" and parts.netloc and not parts.query and not parts.fragment and "@" not in parts.netloc:
        return BucketStorage(parts.netloc, parts.path.strip("/"))
    if scheme not in ("file", "s3") and (entry := installed(SCHEMES).get(scheme)) is not None:
        return cast("Storage", call(entry, url))
    raise ConfigError(
        f"{option} {printable(url)[:SHOWN_CHARACTERS]} is not an archive: use a folder, file:///PATH or "
        "s3://BUCKET/PREFIX. Set the bucket's server and credentials with AWS_ENDPOINT_URL, AWS_REGION, "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
    )


def _folder(path: Path, option: str) -> "FolderStorage":
    """Raises ConfigError where there cannot be such a folder."""
    shown = printable(str(path))[:SHOWN_CHARACTERS]
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    except (OSError, ValueError) as error:  # too long a name, a zero byte, half of a character
        why = error.strerror if isinstance(error, OSError) else "it contains characters that a path cannot have"
        raise ConfigError(f"{option} {shown}: {why}. Use another folder") from error
    if not there.is_dir():
        raise ConfigError(f"{option} {shown}: {there} is a file. Use a folder, or file:///PATH or s3://BUCKET/PREFIX")
    return FolderStorage(path)


def _unavailable(url: str, why: str) -> RemoteError:
    return RemoteError(pb.REASON_UNAVAILABLE, f"cannot use the archive {url}: {why}")


def _oversize(url: str, name: str, size: int, most: int) -> RemoteError:
    return RemoteError(pb.REASON_OVERSIZE, f"{name} in the archive {url} has {size} bytes, expected at most {most}")


class FolderStorage:
    """Files below a folder."""

    SCRATCH = re.compile(r"\..+\.\d+\.tmp")
    """Names of files that `write_atomically` leaves when the process is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.url = self.folder.as_uri()

    def _doing(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except OSError as error:
            raise _unavailable(self.url, f"{error.filename or 'a file'}: {error.strerror}") from error

    def get(self, name: str, most: int) -> bytes:
        def read() -> bytes | None:
            try:
                with open_regular(self.folder / name) as file:
                    if (size := os.fstat(file.fileno()).st_size) > most:
                        raise _oversize(self.url, name, size, most)
                    return file.read(size)
            except FileNotFoundError:
                return None
            except ConfigError as error:
                raise _unavailable(self.url, str(error)) from error

        if (data := self._doing(read)) is None:
            raise FileNotFoundError(name)
        return data

    def _ready(self, path: Path) -> Path:
        """Its folders on disk."""
        missing = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            fsync_directory(folder.parent)
        return path

    def put(self, name: str, data: bytes) -> None:
        def write() -> None:
            path = self._ready(self.folder / name)
            write_atomically(path, data)
            if path.read_bytes() != data:
                raise _unavailable(self.url, f"{name} was written, but reading it gives other bytes")

        self._doing(write)

    def put_new(self, name: str, data: bytes) -> bool:
        def write() -> bool:
            try:
                write_new(self._ready(self.folder / name), data)
            except FileExistsError:
                return False
            return True

        return self._doing(write)

    def sizes(self, folder: str) -> dict[str, int]:
        root = self.folder / folder if folder else self.folder

        def look() -> dict[str, int]:
            found: dict[str, int] = {}
            for path in root.rglob("*"):
                with suppress(FileNotFoundError):  # it was removed during the listing
                    if not self.SCRATCH.fullmatch(path.name) and path.is_file():
                        found[path.relative_to(root).as_posix()] = path.stat().st_size
            return found

        return self._doing(look)

    def size(self, name: str) -> int | None:
        def look() -> int | None:
            try:
                return (self.folder / name).stat().st_size
            except FileNotFoundError:
                return None

        return self._doing(look)

    def delete(self, name: str) -> None:
        def remove() -> None:
            path = self.folder / name
            path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                if all(self.SCRATCH.fullmatch(left.name) for left in path.parent.iterdir()):
                    for left in list(path.parent.iterdir()):
                        left.unlink(missing_ok=True)
                    path.parent.rmdir()

        self._doing(remove)


class BucketStorage:
    """Objects of a bucket, below a prefix. The server rejects changed data: requests are signed over the hash of their
    bytes."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Raises ConfigError where the environment names no bucket that can be asked."""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        local = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                client_options={
                    "allow_http": local,
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=ANSWER_SECONDS),
                },
                retry_config={"max_retries": ATTEMPTS, "retry_timeout": timedelta(seconds=2 * ANSWER_SECONDS)},
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"--archive {self.url}: {_first_line(error)}") from error

    def _doing(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except FileNotFoundError as error:
            raise _unavailable(self.url, "no such bucket") from error
        except BaseError as error:
            raise _unavailable(self.url, _first_line(error)) from error

    def get(self, name: str, most: int) -> bytes:
        def read() -> bytes | None:
            try:
                result = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            if (size := result.meta["size"]) > most:
                raise _oversize(self.url, name, size, most)
            return bytes(result.bytes())

        if (data := self._doing(read)) is None:
            raise FileNotFoundError(name)
        return data

    def put(self, name: str, data: bytes) -> None:
        self._doing(lambda: obstore.put(self._store, name, data, use_multipart=False))

    def upload(self, name: str, path: Path) -> None:
        """A file of any size, whole or not at all."""
        self._doing(lambda: obstore.put(self._store, name, path))

    def put_new(self, name: str, data: bytes) -> bool:
        def write() -> bool:
            try:
                obstore.put(self._store, name, data, use_multipart=False, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        for attempt in range(CONFLICTS):
            if self._doing(write):
                return True
            if self.size(name) is not None:
                return False
            time.sleep(CONFLICT_SECONDS * 2**attempt)  # obstore also reports a conflict as an existing object
        raise _unavailable(self.url, f"other processes write {name} all the time")

    def sizes(self, folder: str) -> dict[str, int]:
        def look() -> dict[str, int]:
            below = f"{folder}/" if folder else ""
            found: dict[str, int] = {}
            for batch in obstore.list(self._store, folder or None):
                for item in batch:
                    found[item["path"].removeprefix(below)] = item["size"]
                if len(found) > LISTED:
                    raise RemoteError(pb.REASON_OVERSIZE, f"listing {folder} does not end")
            return found

        return self._doing(look)

    def size(self, name: str) -> int | None:
        def look() -> int | None:
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                return None

        return self._doing(look)

    def delete(self, name: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        self._doing(remove)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
