"""X.509 as vendors use it: chains in any order and encoding, each link checked for names, signature and validity."""

import warnings
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.wire.attestation import AttestationError, Code

__all__ = ["check_chain", "common_name", "expiry", "fingerprint", "load_certificates"]


def load_certificates(blobs: Iterable[bytes]) -> list[x509.Certificate]:
    """Load certificates from PEM (one or many) or DER. Raises AttestationError."""
    certificates: list[x509.Certificate] = []
    for blob in blobs:
        certificates += _load(blob)
        if len(certificates) > limits.EVIDENCE_CERTIFICATES:
            raise AttestationError(Code.OVERSIZE, f"more than {limits.EVIDENCE_CERTIFICATES} certificates")
    return certificates


def _load(blob: bytes) -> list[x509.Certificate]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AMD's chip certificates have serial number 0
        try:
            pem = b"-----BEGIN" in blob
            found = x509.load_pem_x509_certificates(blob) if pem else [x509.load_der_x509_certificate(blob)]
            for certificate in found:  # parsed when first asked for: better here than later
                _ = certificate.public_key(), certificate.subject, certificate.issuer, list(certificate.extensions)
            return found
        except Exception as error:
            raise AttestationError(Code.MALFORMED, f"a certificate does not parse: {error}") from error


def fingerprint(certificate: x509.Certificate) -> str:
    """Return the hexadecimal SHA-256 of the DER form."""
    return sha256(certificate.public_bytes(Encoding.DER)).hex()


def common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def check_chain(chain: Sequence[x509.Certificate], roots: Iterable[str], now: int) -> None:
    """Check a chain: leaf first, root last. Raises AttestationError unless every certificate is valid at `now` and signed
    by the next one. The last one must be self-signed, with its SHA-256 among `roots` (hexadecimal)."""
    moment = datetime.fromtimestamp(now, UTC)
    for subject, issuer in zip(chain, [*chain[1:], chain[-1]], strict=True):
        name = common_name(subject.subject)
        if subject.issuer != issuer.subject:
            found = common_name(issuer.subject)
            raise AttestationError(Code.NAMES, f"{name} is issued by {common_name(subject.issuer)}, not {found}")
        if subject is not issuer and not _may_sign(issuer):
            raise AttestationError(Code.CHAIN, f"{common_name(issuer.subject)} may not sign certificates")
        try:
            subject.verify_directly_issued_by(issuer)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise AttestationError(Code.CHAIN, f"{name} is not signed by {common_name(issuer.subject)}") from error
        if moment < subject.not_valid_before_utc:
            raise AttestationError(Code.NOT_YET_VALID, f"{name} is valid from {subject.not_valid_before_utc:%Y-%m-%d}")
        if moment > subject.not_valid_after_utc:
            raise AttestationError(Code.EXPIRED, f"{name} expired on {subject.not_valid_after_utc:%Y-%m-%d}")
    if fingerprint(chain[-1]) not in roots:
        raise AttestationError(Code.ROOT, f"{common_name(chain[-1].subject)} is not the vendor's root")


def _may_sign(certificate: x509.Certificate) -> bool:
    """Return whether the basic constraints, if any, say CA."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return True
    except ValueError:
        return False


def expiry(chain: Iterable[x509.Certificate]) -> int:
    """Return the earliest end of validity, in Unix seconds."""
    return min(int(certificate.not_valid_after_utc.timestamp()) for certificate in chain)
