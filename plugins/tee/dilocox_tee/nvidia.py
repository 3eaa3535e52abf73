"""NVIDIA Hopper and Blackwell GPUs: SPDM 1.1 measurement reports (DMTF DSP0274), request and response as the driver
returns them.

The signature is ECDSA P-384 over request ‖ response without signature. The leaf certificate's firmware id (FWID, TCG
DICE) must be the report's. The operator's allow-list decides which measurements are good, by driver and VBIOS: NVIDIA's
reference values need its service. Revocation is not checked offline, and the claims report this.
"""

import struct
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

from dilocox.protocol.wire.attestation import NVIDIA, AttestationError, Code, Evidence, GpuClaims, deny_unexpected
from dilocox_tee.certificates import check_chain, common_name, expiry, load_certificates

__all__ = ["verify"]

ROOT = "102bf659d5419614c9d8e6aecebc80454eb26b1df6a769ac720b9a690b167b48"
"""SHA-256 of NVIDIA's device identity root certificate."""
SPDM_1_1, GET_MEASUREMENTS, MEASUREMENTS = 0x11, 0xE0, 0x60
REQUEST_BYTES = 37
"""Version, code, two parameters, 32-byte nonce, slot."""
NONCE = slice(4, 36)
SIGNATURE_BYTES = 96
DIGEST_BYTES = 48
DMTF = 1
OPAQUE_DRIVER, OPAQUE_VBIOS, OPAQUE_FWID = 3, 6, 20
FWID_OIDS = ("2.23.133.5.4.1", "2.23.133.5.4.1.1")
"""TCG DICE: composite device id (Hopper) and TCB info (Blackwell, whose first firmware id is the one that runs)."""
FWID_DIGEST = b"\x06\x09\x60\x86\x48\x01\x65\x03\x04\x02\x02\x04\x30"
"""DER in front of the digest: the OID of SHA-384, and an octet string of 48 bytes."""
ARCHITECTURES = {"GH100": "Hopper", "GB1": "Blackwell", "GB2": "Blackwell"}


class _Cursor:
    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def take(self, count: int) -> bytes:
        part = self.raw[self.at : self.at + count]
        if len(part) != count:
            raise AttestationError(Code.MALFORMED, "the report ends too early")
        self.at += count
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")


@deny_unexpected
def verify(evidence: Evidence, now: int, nonce: bytes | None = None, root: str = ROOT) -> GpuClaims:
    """Verify evidence. Raises AttestationError. `nonce`: the request's expected one, 32 bytes; None: any, and the claims
    name it."""
    if evidence.kind != NVIDIA:
        raise AttestationError(Code.KIND, f"{evidence.kind} is not GPU evidence")
    cursor = _Cursor(evidence.blob)
    request = cursor.take(REQUEST_BYTES)
    if request[0] != SPDM_1_1 or request[1] != GET_MEASUREMENTS:
        raise AttestationError(Code.MALFORMED, "not an SPDM 1.1 request for measurements")
    if nonce is not None and request[NONCE] != nonce:
        raise AttestationError(Code.NONCE, "the report answers another challenge")
    if cursor.number(1) != SPDM_1_1 or cursor.number(1) != MEASUREMENTS:
        raise AttestationError(Code.MALFORMED, "not an SPDM 1.1 response with measurements")
    cursor.take(2)
    blocks = cursor.number(1)
    measurements = _measurements(cursor.take(cursor.number(3)), blocks)
    cursor.take(32)  # the responder's nonce
    opaque = _opaque(cursor.take(cursor.number(2)))
    signed = evidence.blob[: cursor.at]
    signature = cursor.take(SIGNATURE_BYTES)
    if cursor.at != len(evidence.blob):
        raise AttestationError(Code.MALFORMED, "bytes follow the signature")
    chain = load_certificates(evidence.certs)
    if not chain:
        raise AttestationError(Code.CHAIN, "no certificates")
    chain = _ordered(chain)
    check_chain(chain, [root], now)
    _check_signature(chain[0], signed, signature)
    if opaque.get(OPAQUE_FWID) != _fwid(chain[0]):
        raise AttestationError(Code.FIRMWARE, "report and certificate name different firmware")
    return GpuClaims(
        architecture=_architecture(chain),
        driver=_printable(opaque.get(OPAQUE_DRIVER, b"")),
        vbios=_vbios(opaque.get(OPAQUE_VBIOS, b"")),
        nonce=request[NONCE],
        measurements=measurements,
        valid_until=expiry(chain),
        notes=("revocation was not checked: NVIDIA's OCSP service is not consulted offline",),
    )


def _measurements(record: bytes, blocks: int) -> dict[int, str]:
    """Return index -> hexadecimal digest, of DMTF measurement blocks."""
    cursor, found = _Cursor(record), {}
    for _ in range(blocks):
        index, specification = cursor.number(1), cursor.number(1)
        inner = _Cursor(cursor.take(cursor.number(2)))
        inner.take(1)  # the value's type
        value = inner.take(inner.number(2))
        if specification != DMTF or len(value) != DIGEST_BYTES or inner.at != len(inner.raw) or index in found:
            raise AttestationError(Code.MALFORMED, f"measurement {index} is not one SHA-384 digest")
        found[index] = value.hex()
    if cursor.at != len(record):
        raise AttestationError(Code.MALFORMED, "bytes follow the last measurement")
    return found


def _opaque(raw: bytes) -> dict[int, bytes]:
    """Return NVIDIA's fields: id -> value."""
    cursor, found = _Cursor(raw), {}
    while cursor.at < len(raw):
        field = cursor.number(2)
        found[field] = cursor.take(cursor.number(2))
    return found


def _ordered(certificates: Sequence[x509.Certificate]) -> list[x509.Certificate]:
    """Return the certificates, leaf first: each certificate's issuer follows it."""
    by_subject = {certificate.subject: certificate for certificate in certificates}
    issuers = {certificate.issuer for certificate in certificates if certificate.issuer != certificate.subject}
    leaves = [certificate for certificate in certificates if certificate.subject not in issuers]
    if len(by_subject) != len(certificates) or len(leaves) != 1:
        raise AttestationError(Code.CHAIN, "the certificates are not one chain")
    chain = [leaves[0]]
    while chain[-1].issuer != chain[-1].subject and len(chain) <= len(certificates):
        following = by_subject.get(chain[-1].issuer)
        if following is None:
            raise AttestationError(Code.NAMES, f"the issuer of {common_name(chain[-1].subject)} is missing")
        chain.append(following)
    if len(chain) != len(certificates):
        raise AttestationError(Code.CHAIN, "the certificates are not one chain")
    return chain


def _check_signature(leaf: x509.Certificate, signed: bytes, signature: bytes) -> None:
    key = leaf.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AttestationError(Code.CHAIN, "the certificate's key is not on P-384")
    half = SIGNATURE_BYTES // 2
    r, s = int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big")
    try:
        key.verify(utils.encode_dss_signature(r, s), signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise AttestationError(Code.SIGNATURE, "the report is not signed by the certificate's key") from error


def _fwid(leaf: x509.Certificate) -> bytes:
    values = [item.value for item in leaf.extensions if item.oid.dotted_string in FWID_OIDS]
    if len(values) != 1 or not isinstance(values[0], x509.UnrecognizedExtension):
        raise AttestationError(Code.FIRMWARE, "the certificate names no firmware")
    _, mark, digest = values[0].value.partition(FWID_DIGEST)
    if not mark or len(digest) < DIGEST_BYTES:
        raise AttestationError(Code.FIRMWARE, "the certificate's firmware id is not a SHA-384 digest")
    return digest[:DIGEST_BYTES]


def _architecture(chain: Sequence[x509.Certificate]) -> str:
    names = " ".join(common_name(certificate.subject) for certificate in chain)
    return next((kind for chip, kind in ARCHITECTURES.items() if chip in names), "unknown")


def _printable(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", errors="replace")


def _vbios(raw: bytes) -> str:
    """Return the VBIOS version, as `96.00.5E.00.01`: four bytes little endian, then the OEM's number in the last byte of
    the second four."""
    if len(raw) != struct.calcsize("<II"):
        return raw.hex()
    version, oem = struct.unpack("<II", raw)
    return ".".join(f"{part:02X}" for part in (*version.to_bytes(4, "big"), oem & 0xFF))
