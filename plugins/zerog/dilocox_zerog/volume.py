"""Volumes: objects of an archive in one file, for a storage that addresses files by their root and changes none.

    MAGIC ‖ bytes of the header, u32 ‖ header, JSON ‖ the objects, one after the other

An archive does not change its objects, so a volume contains those that earlier volumes do not. It names the previous
volume by its root. So the last root alone restores the archive. Objects may be sealed, as the archive is: a volume
decodes none.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, Literal

from pydantic import Field, ValidationError, model_validator

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.archive.archive import HEAD_BYTES, HEADS
from dilocox.transport.archive.storage import Storage
from dilocox_zerog.record import Part

__all__ = ["VOLUME_BYTES", "Header", "Stored", "due", "fill", "read_header", "split", "write_volume"]

VOLUME_BYTES = 1 << 30
"""Bytes of objects in one volume: sent again after a broken connection, and on the disk twice."""
MAGIC = b"dilocox-volume-1\n"
_LENGTH = struct.Struct(">I")
HEADER_BYTES = 64 * limits.MIB
OBJECT_BYTES = HEAD_BYTES + limits.KIB
"""Bytes of a sealed head; all other objects are one chunk."""
COPIED = 1 << 20
"""Bytes per copy."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[0-9a-z]+([./-][0-9a-z]+)*$", max_length=200)]


class Header(Part):
    before: Digest | None
    """Root of the volume that this one adds to."""
    objects: list[tuple[Name, Annotated[int, Field(ge=0, le=OBJECT_BYTES)]]]
    """Names and sizes, in their order."""


def split(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the objects of each volume. Heads, and the object with the archive's owner, are in the last one, because it is
    useless without the others."""
    volume, held = list[str](), 0
    for name in sorted(sizes, key=lambda name: (not name.startswith("blobs/"), name)):
        if volume and held + sizes[name] > VOLUME_BYTES:
            yield volume
            volume, held = [], 0
        volume.append(name)
        held += sizes[name]
    if volume:
        yield volume


def write_volume(storage: Storage, names: Sequence[str], before: bytes | None, path: Path) -> None:
    """Write a volume. Blocking. Raises FileNotFoundError if an object disappears, RemoteError."""
    with path.open("wb") as file:
        sizes = [(name, storage.size(name)) for name in names]
        if missing := [name for name, size in sizes if size is None]:
            raise FileNotFoundError(missing[0])
        header = {"before": before.hex() if before is not None else None, "objects": sizes}
        raw = Header.model_validate(header | {"objects": [tuple(each) for each in sizes]}).model_dump_json().encode()
        file.write(MAGIC + _LENGTH.pack(len(raw)) + raw)
        for name, size in sizes:
            data = storage.get(name, OBJECT_BYTES)
            if len(data) != size:
                raise FileNotFoundError(name)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_header(file: BinaryIO, size: int) -> Header:
    """Return the header of a volume of `size` bytes; the objects follow the position after the read. Raises RemoteError if
    it is invalid."""
    start = file.read(len(MAGIC) + _LENGTH.size)
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + _LENGTH.size:
        raise _damaged("it does not begin with a volume's header")
    (length,) = _LENGTH.unpack_from(start, len(MAGIC))
    if length > HEADER_BYTES:
        raise _damaged("its header is too large")
    try:
        header = Header.model_validate_json(file.read(length))
    except ValidationError as error:
        raise _damaged(error.errors()[0]["msg"]) from error
    if len(start) + length + sum(size for _, size in header.objects) != size:
        raise _damaged("its size does not match its objects")
    return header


def _damaged(why: str) -> RemoteError:
    return RemoteError(pb.REASON_MALFORMED, f"the received bytes are not a volume of an archive: {why}")


def fill(file: BinaryIO, header: Header, folder: Path) -> None:
    """Write the missing objects of a volume; `file` is at their start. Blocking. Raises OSError, RemoteError if a name is
    both a file's and a folder's."""
    for name, size in header.objects:
        path = folder / PurePosixPath(name)
        if path.is_dir():
            raise _damaged(f"{name} is a folder, but must be a file")
        if path.exists():
            file.seek(size, os.SEEK_CUR)
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise _damaged(f"{name} is below a path that is a file") from error
        with path.open("wb") as target:
            while size:
                size -= target.write(file.read(min(COPIED, size)))


class Stored(Part):
    """Stored part of an archive."""

    format: Literal["dilocox-stored-1"] = "dilocox-stored-1"
    run: Digest
    root: Digest | None = None
    """Root of the last volume."""
    objects: frozenset[Name] = frozenset()
    """Objects in all volumes."""
    begun: tuple[Name, ...] = ()
    """Objects of a volume that was perhaps sent and paid for: a killed call does not report it."""

    @model_validator(mode="after")
    def _has_a_root_for_objects(self) -> "Stored":
        if bool(self.objects) != (self.root is not None):
            raise ValueError("it names objects without their volume, or a volume without objects")
        return self

    @property
    def last(self) -> bytes | None:
        return bytes.fromhex(self.root) if self.root is not None else None

    def beginning(self, names: Sequence[str]) -> "Stored":
        return self.model_copy(update={"begun": tuple(names)})

    def and_volume(self, root: bytes, names: Sequence[str]) -> "Stored":
        return self.model_copy(update={"root": root.hex(), "objects": self.objects | set(names), "begun": ()})


def due(sizes: Mapping[str, int], stored: Stored) -> list[list[str]]:
    """Return the objects that no volume has, by volume; empty if they include no head, because then the archive has no
    news. A started volume comes first and unchanged: it has the same root, and is not paid for twice."""
    begun = [list(stored.begun)] if stored.begun and all(name in sizes for name in stored.begun) else []
    known = stored.objects.union(*begun)
    found = {name: size for name, size in sizes.items() if name not in known}
    return [*begun, *(split(found) if any(name.startswith(f"{HEADS}/") for name in found) else ())]
