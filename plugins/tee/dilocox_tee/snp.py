"""AMD SEV-SNP attestation reports (AMD publication 56860), versions 3 and 5, and 2 by choice; Milan, Genoa and Turin.

The chain is ARK -> ASK -> VCEK (per chip) or ARK -> ASVK -> VLEK (per cloud); the ARK is pinned by SHA-256. Revocation needs AMD's
CRL, which is not consulted offline.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

from dilocox.protocol.wire.attestation import SEV_SNP, AttestationError, Claims, Code, Evidence, deny_unexpected
from dilocox_tee.certificates import check_chain, common_name, expiry, fingerprint, load_certificates

__all__ = ["KIND", "verify"]

KIND = SEV_SNP
REPORT_BYTES = 1184
SIGNED = slice(0, 0x2A0)
VERSIONS = (3, 5)
"""Versions of reports that name the CPU; version 2 does not: the claims report this, and a run admits it only by choice."""
ECDSA_P384_SHA384 = 1
COORDINATE = 72
"""Bytes of a signature's R and S, little endian; P-384 uses 48."""
CURVE_BYTES = 48
POLICY_MUST_BE_ONE, POLICY_MIGRATE, POLICY_DEBUG = 1 << 17, 1 << 18, 1 << 19
POLICY_BITS = 26
"""Policy bits from here on must be zero; versions below 5 define only 25."""
VCEK, VLEK = 0, 1


@dataclass(frozen=True)
class Product:
    root: str
    """SHA-256 of the ARK, hexadecimal."""
    family: int
    models: tuple[range, ...]
    """CPUID models."""
    components: Mapping[str, int]
    """TCB component -> byte of the 64-bit TCB version."""
    hwid_bytes: int


_CLASSIC = {"bl": 0, "tee": 1, "snp": 6, "ucode": 7}
PRODUCTS = {
    "Milan": Product("69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd", 0x19, (range(0x10),), _CLASSIC, 64),
    "Genoa": Product(
        "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1",
        0x19,
        (range(0x10, 0x20), range(0xA0, 0xB0)),
        _CLASSIC,
        64,
    ),
    "Turin": Product(
        "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a",
        0x1A,
        (range(0x20),),
        {"fmc": 0, "bl": 1, "tee": 2, "snp": 3, "ucode": 7},
        8,
    ),
}

_OID = "1.3.6.1.4.1.3704.1."
_PRODUCT_OID, _HWID_OID, _CSP_OID = _OID + "2", _OID + "4", _OID + "5"
_TCB_OIDS = {"bl": _OID + "3.1", "tee": _OID + "3.2", "snp": _OID + "3.3", "ucode": _OID + "3.8", "fmc": _OID + "3.9"}


@dataclass(frozen=True)
class Report:
    """The fields of the 1,184 bytes that decide something."""

    version: int
    policy: int
    vmpl: int
    mask_chip_key: bool
    signing_key: int
    report_data: bytes
    measurement: bytes
    reported_tcb: bytes
    cpuid: tuple[int, int]
    """(family, model); (0, 0) in version 2."""
    chip_id: bytes
    signature: tuple[int, int]


def parse(raw: bytes) -> Report:
    """Parse a report. Raises AttestationError for anything but a report with all reserved bits zero."""
    if len(raw) != REPORT_BYTES:
        raise AttestationError(Code.MALFORMED, f"{len(raw)} bytes; an SEV-SNP report has {REPORT_BYTES}")
    version, _, policy = struct.unpack_from("<IIQ", raw)
    vmpl, algorithm = struct.unpack_from("<II", raw, 0x30)
    (key_info,) = struct.unpack_from("<I", raw, 0x48)
    if version not in (2, *VERSIONS):
        raise AttestationError(Code.VERSION, f"a report of version {version}")
    if algorithm != ECDSA_P384_SHA384:
        raise AttestationError(Code.SIGNATURE, f"signature algorithm {algorithm}, not ECDSA P-384 with SHA-384")
    reserved = [raw[0x4C:0x50], raw[0x1EB:0x1EC], raw[0x1EF:0x1F0]]
    reserved.append(raw[0x188:0x1A0] if version == 2 else raw[0x18B:0x1A0])
    reserved.append(raw[0x208:0x2A0] if version == 5 else raw[0x1F8:0x2A0])
    bits = POLICY_BITS if version == 5 else POLICY_BITS - 1
    if any(any(part) for part in reserved) or policy >> bits or not policy & POLICY_MUST_BE_ONE or key_info >> 5:
        raise AttestationError(Code.RESERVED, "reserved bits are set")
    signature = raw[0x2A0:]
    r, s = signature[:COORDINATE], signature[COORDINATE : 2 * COORDINATE]
    if any(r[CURVE_BYTES:]) or any(s[CURVE_BYTES:]) or any(signature[2 * COORDINATE :]):
        raise AttestationError(Code.RESERVED, "the signature's padding is not zero")
    return Report(
        version=version,
        policy=policy,
        vmpl=vmpl,
        mask_chip_key=bool(key_info & 2),
        signing_key=key_info >> 2,
        report_data=raw[0x50:0x90],
        measurement=raw[0x90:0xC0],
        reported_tcb=raw[0x180:0x188],
        cpuid=(raw[0x188], raw[0x189]),
        chip_id=raw[0x1A0:0x1E0],
        signature=(int.from_bytes(r, "little"), int.from_bytes(s, "little")),
    )


@deny_unexpected
def verify(evidence: Evidence, now: int, roots: Mapping[str, str] | None = None) -> Claims:
    """Verify evidence. Raises AttestationError. `roots`: product -> SHA-256 of another ARK than AMD's, for tests."""
    report = parse(evidence.blob)
    chain = _order(load_certificates(evidence.certs), report)
    pinned = roots or {name: product.root for name, product in PRODUCTS.items()}
    check_chain(chain, pinned.values(), now)
    name = _product(chain, pinned)
    product = PRODUCTS[name]
    _check_signature(report, evidence.blob, chain[0])
    _check_cpu(report, name)
    tcb = _check_tcb(report, product, chain[0])
    _check_chip(report, product, chain[0])
    notes = ["revocation was not checked: AMD's CRL is not consulted offline"]
    if report.version == 2:
        notes.append("version 2 does not name the CPU: the product comes from the certificate")
    if report.signing_key == VCEK and not any(report.chip_id):
        notes.append("the host masks the chip's id: the chip comes from the certificate")
    return Claims(
        kind=KIND,
        measurement=(report.measurement.hex(),),
        report_data=report.report_data,
        valid_until=expiry(chain),
        tcb=tcb,
        debug=bool(report.policy & POLICY_DEBUG),
        migratable=bool(report.policy & POLICY_MIGRATE),
        vmpl=report.vmpl,
        product=_text(_extension(chain[0], _PRODUCT_OID)) or name,
        version=report.version,
        notes=tuple(notes),
    )


def _order(certificates: Sequence[x509.Certificate], report: Report) -> list[x509.Certificate]:
    """Return leaf, intermediate, root."""
    roots = [c for c in certificates if c.subject == c.issuer]
    leaves = [c for c in certificates if isinstance(c.public_key(), ec.EllipticCurvePublicKey)]
    between = [c for c in certificates if c not in roots and c not in leaves]
    if (len(leaves), len(between), len(roots)) != (1, 1, 1):
        raise AttestationError(
            Code.CHAIN, "an SEV-SNP chain is one chip or cloud key, one intermediate and one root certificate"
        )
    wanted = {VCEK: "SEV-VCEK", VLEK: "SEV-VLEK"}.get(report.signing_key)
    if wanted is None or common_name(leaves[0].subject) != wanted:
        raise AttestationError(
            Code.NAMES, f"the report is signed by {wanted or 'nobody'}, but the certificate belongs to another key"
        )
    return [leaves[0], between[0], roots[0]]


def _product(chain: Sequence[x509.Certificate], roots: Mapping[str, str]) -> str:
    """Return the product that certificate names agree on."""
    mark = fingerprint(chain[-1])
    name = next(name for name, root in roots.items() if root == mark)
    kind = "SEV-VLEK-" if common_name(chain[0].subject) == "SEV-VLEK" else "SEV-"
    if common_name(chain[1].subject) != kind + name or common_name(chain[2].subject) != "ARK-" + name:
        raise AttestationError(Code.NAMES, f"the chain's names are not those of {name}")
    if not _text(_extension(chain[0], _PRODUCT_OID)).startswith(name):
        raise AttestationError(Code.PRODUCT, f"the certificate belongs to another product than {name}")
    return name


def _check_signature(report: Report, raw: bytes, certificate: x509.Certificate) -> None:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise AttestationError(Code.CHAIN, "the certificate's key is not on P-384")
    try:
        key.verify(utils.encode_dss_signature(*report.signature), raw[SIGNED], ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        masked = ": its host masks the chip's key (MASK_CHIP_KEY), and signs nothing" if report.mask_chip_key else ""
        raise AttestationError(Code.SIGNATURE, f"the report is not signed by the certificate's key{masked}") from error


def _check_cpu(report: Report, name: str) -> None:
    product, (family, model) = PRODUCTS[name], report.cpuid
    if report.version > 2 and (family != product.family or not any(model in models for models in product.models)):
        raise AttestationError(Code.PRODUCT, f"CPUID family {family:#x} model {model:#x} is not a {name}")


def _check_tcb(report: Report, product: Product, certificate: x509.Certificate) -> dict[str, int]:
    used = set(product.components.values())
    if any(value for index, value in enumerate(report.reported_tcb) if index not in used):
        raise AttestationError(Code.RESERVED, "reserved bytes of the reported TCB are set")
    tcb = {component: report.reported_tcb[index] for component, index in product.components.items()}
    for component, value in tcb.items():
        if _integer(_extension(certificate, _TCB_OIDS[component])) != value:
            raise AttestationError(Code.TCB, f"the report's {component} version differs from the certificate's")
    return tcb


def _check_chip(report: Report, product: Product, certificate: x509.Certificate) -> None:
    """Check that the chip is the certificate's. Raises AttestationError. A VLEK belongs to a cloud. A host that masks the
    chip's id (MASK_CHIP_ID) reports zeros, although the signing VCEK belongs to one chip."""
    if report.signing_key == VLEK:
        if not _extension(certificate, _CSP_OID):
            raise AttestationError(Code.NAMES, "a VLEK certificate without its cloud's name")
        return
    if not any(report.chip_id):
        return
    hwid = _extension(certificate, _HWID_OID)
    if len(hwid) == product.hwid_bytes + 2 and hwid[:2] == bytes((4, product.hwid_bytes)):
        hwid = hwid[2:]  # some certificates wrap it as a DER octet string
    used, rest = report.chip_id[: product.hwid_bytes], report.chip_id[product.hwid_bytes :]
    if hwid != used or any(rest):
        raise AttestationError(Code.CHIP, "the report belongs to another chip than the certificate")


def _extension(certificate: x509.Certificate, oid: str) -> bytes:
    """Return the raw value; empty if there is none."""
    try:
        found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(oid)).value
    except (x509.ExtensionNotFound, ValueError):
        return b""
    return found.value if isinstance(found, x509.UnrecognizedExtension) else b""


def _integer(der: bytes) -> int:
    """Return a small DER INTEGER; -1 if it is not one."""
    if len(der) < 3 or der[0] != 2 or der[1] != len(der) - 2:
        return -1
    return int.from_bytes(der[2:], "big", signed=True)


def _text(der: bytes) -> str:
    """Return a short DER IA5String; empty if it is not one."""
    if len(der) < 2 or der[0] != 0x16 or der[1] != len(der) - 2:
        return ""
    return der[2:].decode("ascii", errors="replace")
