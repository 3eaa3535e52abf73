"""TLS for gRPC: each peer makes one P-256 certificate. Its signed record contains it, and callers trust exactly that one.

The certificate does not use the Ed25519 identity: the BoringSSL in grpcio rejects Ed25519 certificates.
"""

import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.store.files import read_checked, write_atomically

__all__ = ["SERVER_NAME", "Certificate", "fetch_certificate", "load_or_create", "pem_of"]

SERVER_NAME = "dilocox"
"""Name in every certificate: a peer's identity is in its signed record, not in DNS."""
_YEARS = 30


@dataclass(frozen=True)
class Certificate:
    key_pem: bytes
    certificate_pem: bytes
    certificate_der: bytes


def load_or_create(folder: Path) -> Certificate:
    """The certificate in `folder`, made on first use, and again when the file is damaged. It has mode 0600."""
    path = folder / "tls.pem"
    if (kept := read_checked(path, _parse)) is not None:
        os.chmod(path, 0o600)
        return kept
    key = ec.generate_private_key(ec.SECP256R1())
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    raw = key_pem + _self_signed(key).public_bytes(serialization.Encoding.PEM)
    write_atomically(path, raw, mode=0o600)
    return _parse(raw)


def _parse(raw: bytes) -> Certificate:
    """A key and its certificate. Raises ValueError."""
    split = raw.index(b"-----BEGIN CERTIFICATE")
    try:
        certificate = x509.load_pem_x509_certificate(raw[split:])
        key = serialization.load_pem_private_key(raw[:split], password=None)
        ours = key.public_key() == certificate.public_key()
    except Exception as error:  # as in `pem_of`
        raise ValueError(str(error)) from error
    if not ours or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key does not belong to the certificate")
    return Certificate(raw[:split], raw[split:], certificate.public_bytes(serialization.Encoding.DER))


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)  # fixed: a peer's wrong clock must not matter
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )


def fetch_certificate(host: str, port: int, seconds: float) -> bytes:
    """Return the certificate that a TLS server presents, DER, untrusted: the caller compares its digest. Blocking. Raises
    RemoteError."""
    try:
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, port), timeout=seconds))
    except (OSError, ValueError) as error:
        raise RemoteError(pb.REASON_UNAVAILABLE, f"no TLS server answers at {host}:{port}: {error}") from error


def pem_of(der: bytes) -> bytes:
    """Raises ValueError when `der` is not a certificate."""
    try:
        return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)
    except Exception as error:  # cryptography raises its own family for bytes that are almost a certificate
        raise ValueError(str(error)) from error
