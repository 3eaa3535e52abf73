"""Records of the part of a run that is stored at 0G, in a file that a person owns. It may contain anything when it is
read."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.transport.store.files import read_at_most, write_atomically

__all__ = ["Part", "read_record", "write_record"]

RECORD_BYTES = 256 * limits.MIB
"""Record of a run of a million rounds: about 300 bytes for each batch of 64 commits, 70 for each object of its archive."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Record = TypeVar("Record", bound=Part)


def read_record(path: Path, kind: type[Record], what: str) -> Record:
    """Read a record. `what`: its name, for an error. Raises ConfigError if it is invalid, OSError."""
    try:
        return kind.model_validate_json(read_at_most(path, RECORD_BYTES))
    except ValidationError as error:
        raise ConfigError(f"{path} is not a record of {what}: {error.errors()[0]['msg']}") from error


def write_record(path: Path, record: Part) -> None:
    write_atomically(path, record.model_dump_json(indent=1).encode() + b"\n")
