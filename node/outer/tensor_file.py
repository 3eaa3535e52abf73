"""Files of safetensors. safetensors reports OS errors as text; convert them to OSError, for a full disk."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["save_tensors"]

SYSTEM_SAID = re.compile(r"\(os error (\d+)\)")
"""End of Rust's std::io::Error."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Without waiting for the disk. Raises OSError."""
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        if (said := SYSTEM_SAID.search(str(error))) is None:
            raise
        raise OSError(int(said[1]), os.strerror(int(said[1])), str(path)) from error
