"""Ed25519 identities and domain-separated signatures.

A signature covers `DOMAIN ‖ lp(kind) ‖ lp(run id) ‖ lp(body)` with `lp` a u32 big-endian length prefix, so it is good for one
kind of statement in one run and for nothing else that this key ever signs.
"""

import hashlib
import struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dilocox.protocol import ids

__all__ = ["Identity", "length_prefixed", "sha256", "signed_bytes", "verify"]

DOMAIN = b"dilocox-v1\0"
LIBP2P = b"\x08\x01\x12\x40"
"""Prefix of libp2p's form of a key, before seed ‖ public key: `Type = Ed25519`, `Data` of 64 bytes."""


def sha256(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def length_prefixed(part: bytes) -> bytes:
    return struct.pack(">I", len(part)) + part


def signed_bytes(kind: int, run_id: bytes, body: bytes) -> bytes:
    return DOMAIN + struct.pack(">I", kind) + length_prefixed(run_id) + length_prefixed(body)


def verify(key: bytes, signature: bytes, kind: int, run_id: bytes, body: bytes) -> bool:
    """Whether `signature` (64 bytes) is `key`'s (32 bytes) over this statement."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed_bytes(kind, run_id, body))
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A peer's private key. Build one from its 32-byte seed."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.key = self._private.public_key().public_bytes_raw()
        self.peer = ids.peer_id(self.key)

    def sign(self, kind: int, run_id: bytes, body: bytes) -> bytes:
        return self._private.sign(signed_bytes(kind, run_id, body))

    def libp2p_private_key(self) -> bytes:
        """The protobuf form that libp2p reads from an identity file."""
        return LIBP2P + self.seed + self.key

    @classmethod
    def from_libp2p(cls, form: bytes) -> "Identity":
        """Raises ValueError where it is not that form."""
        if not form.startswith(LIBP2P) or len(form) != len(LIBP2P) + 64:
            raise ValueError("not an Ed25519 key in libp2p's form")
        return cls(form[len(LIBP2P) : len(LIBP2P) + 32])
