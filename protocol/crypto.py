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
        """The protobuf form that libp2p reads from an identity file: `Type = Ed25519, Data = seed ‖ public key`."""
        return b"\x08\x01\x12\x40" + self.seed + self.key
