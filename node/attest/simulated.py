"""The simulated kind: for testnets. It has the shape of a quote and proves nothing: its signing key is public, printed below.

blob   report data (64 bytes) ‖ measurement (48 bytes) ‖ Ed25519 signature of both (64 bytes)
"""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dilocox.protocol.crypto import sha256
from dilocox.protocol.wire.attestation import (
    REPORT_DATA_BYTES,
    SIMULATED,
    AttestationError,
    Claims,
    Code,
    Evidence,
)

__all__ = ["MEASUREMENT_BYTES", "make", "verify"]

MEASUREMENT_BYTES = 48
SIGNATURE_BYTES = 64
_DOMAIN = b"dilocox-simulated-v1\0"
_KEY = Ed25519PrivateKey.from_private_bytes(sha256(b"dilocox simulated platform: anybody can sign with this key"))
FOREVER = 253402300799
"""9999-12-31, in Unix seconds."""


def make(report_data: bytes, measurement: bytes) -> Evidence:
    body = report_data + measurement
    return Evidence(SIMULATED, body + _KEY.sign(_DOMAIN + body))


def verify(evidence: Evidence, now: int) -> Claims:
    """Raises AttestationError."""
    size = REPORT_DATA_BYTES + MEASUREMENT_BYTES
    if len(evidence.blob) != size + SIGNATURE_BYTES:
        raise AttestationError(Code.MALFORMED, f"{len(evidence.blob)} bytes; a simulated quote has {size + SIGNATURE_BYTES}")
    body, signature = evidence.blob[:size], evidence.blob[size:]
    try:
        _KEY.public_key().verify(signature, _DOMAIN + body)
    except InvalidSignature as error:
        raise AttestationError(Code.SIGNATURE, "not signed by the simulated platform") from error
    return Claims(
        kind=SIMULATED,
        measurement=(body[REPORT_DATA_BYTES:].hex(),),
        report_data=body[:REPORT_DATA_BYTES],
        valid_until=FOREVER,
        product="simulated",
        notes=("simulated: anybody can make this evidence",),
    )
