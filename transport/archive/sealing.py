"""Encryption of an archive's objects: none, or sealed with the run's archive key.

A sealed object is ChaCha20-Poly1305 under one key with a random nonce; its name is authenticated, too. An object that
was exchanged or changed does not open. Random nonces of 96 bits are safe for 2^32 objects. Names of blobs are keyed
hashes of their digests, so a reader cannot test whether the archive contains a known blob. Sizes and times are not
hidden.
"""

import hmac
import os
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.store.files import write_new

__all__ = ["PLAIN", "Sealed", "Sealing", "load_key", "make_key"]

KEY_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16


class Sealing(Protocol):
    overhead: int
    """Bytes that an object has more than its content."""
    check: str
    """Check value of the archive's key; empty: it has none."""

    def name(self, digest: bytes) -> str:
        """Return the name of a blob."""

    def seal(self, name: str, content: bytes) -> bytes: ...

    def open(self, name: str, sealed: bytes) -> bytes:
        """Raises RemoteError where these are not the bytes that were sealed under that name."""


class _Plain:
    overhead, check = 0, ""

    def name(self, digest: bytes) -> str:
        return digest.hex()

    def seal(self, name: str, content: bytes) -> bytes:
        return content

    def open(self, name: str, sealed: bytes) -> bytes:
        return sealed


PLAIN: Sealing = _Plain()


class Sealed:
    overhead = NONCE_BYTES + TAG_BYTES

    def __init__(self, key: bytes, run_id: bytes) -> None:
        def derived(what: bytes) -> bytes:
            return HKDF(SHA256(), KEY_BYTES, salt=run_id, info=b"dilocox-archive-v1 " + what).derive(key)

        self._names, self._cipher = derived(b"names"), ChaCha20Poly1305(derived(b"objects"))
        self.check = hmac.digest(derived(b"check"), b"", "sha256").hex()

    def name(self, digest: bytes) -> str:
        return hmac.digest(self._names, digest, "sha256").hex()

    def seal(self, name: str, content: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        try:
            return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"{name} in the archive was changed after it was encrypted") from error


def load_key(path: Path) -> bytes:
    """An archive key: 64 hexadecimal digits in a file of mode 0600. Raises ConfigError."""
    try:
        raw = path.read_bytes()
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"other users can read the archive key {path}. Run: chmod 600 {path}")
        key = bytes.fromhex(raw.decode("ascii").strip())
    except OSError as error:
        raise ConfigError(f"cannot read the archive key {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} does not contain an archive key (64 hexadecimal digits)") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{path} does not contain an archive key (64 hexadecimal digits)")
    return key


def make_key(path: Path) -> None:
    """A new one. Raises FileExistsError: nothing is overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_new(path, os.urandom(KEY_BYTES).hex().encode() + b"\n", mode=0o600)
