"""An account's key, in a file."""

import os
import re
import secrets
from pathlib import Path

from eth_account import Account
from eth_account.signers.local import LocalAccount

from dilocox.protocol.errors import ConfigError

__all__ = ["make_key", "read_key"]


def make_key(path: Path) -> LocalAccount:
    """Make a new key, readable by this user alone. Raises FileExistsError: no key is ever overwritten."""
    key = secrets.token_bytes(32)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"0x{key.hex()}\n")
        file.flush()
        os.fsync(file.fileno())
    return Account.from_key(key)


def read_key(path: Path) -> LocalAccount:
    """Read a key. Raises ConfigError, also if others may read it; OSError."""
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read {path}: run chmod 600 on it, and replace the key if it may have been read")
    text = path.read_text(errors="replace").strip()
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{64}", text):
        raise ConfigError(
            f"{path} contains no key: use 64 hexadecimal digits in one line (dilocox account --key FILE makes one)"
        )
    try:
        return Account.from_key(text)
    except ValueError as error:
        raise ConfigError(f"{path} contains no key of the chain's curve") from error
