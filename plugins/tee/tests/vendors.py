"""Synthetic vendors: certificate chains, reports and quotes shaped like AMD's, NVIDIA's and Intel's, signed by keys made here."""

import datetime as dt
import hashlib
import json
import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from dilocox.protocol.crypto import sha256
from dilocox.protocol.wire.attestation import Evidence
from dilocox_tee import nvidia

NOW = 1_800_000_000
"""Unix seconds at which everything made here is valid."""
START, LATELY, END = (dt.datetime.fromtimestamp(NOW + days * 86400, dt.UTC) for days in (-100, -1, 100))


def name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(c.public_bytes(serialization.Encoding.PEM) for c in certificates)


def certificate(
    subject: str,
    key: Any,
    issuer: str,
    signer: Any,
    extensions: dict[str, bytes] | None = None,
    ca: bool = False,
    end: dt.datetime = END,
    serial: int = 77,
) -> x509.Certificate:
    builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer)).public_key(key.public_key())
    builder = builder.serial_number(serial).not_valid_before(START).not_valid_after(end)
    if ca:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    for oid, value in (extensions or {}).items():
        builder = builder.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value), critical=False)
    if isinstance(signer, rsa.RSAPrivateKey):
        pss = padding.PSS(padding.MGF1(hashes.SHA384()), 48)
        return builder.sign(signer, hashes.SHA384(), rsa_padding=pss)
    algorithm = hashes.SHA384() if signer.curve.name == "secp384r1" else hashes.SHA256()
    return builder.sign(signer, algorithm)


@cache
def root_certificate(common: str, key: Any) -> x509.Certificate:
    """Return the root certificate, made once: verifiers pin its fingerprint."""
    return certificate(common, key, common, key, ca=True)


@cache
def rsa_key(label: str) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@cache
def ec_key(label: str, curve: type[ec.EllipticCurve] = ec.SECP384R1) -> EllipticCurvePrivateKey:
    return ec.generate_private_key(curve())


def integer(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "big")
    return bytes((2, len(raw))) + raw


# AMD


@dataclass
class Amd:
    """An SEV-SNP platform; every field may be wrong on purpose."""

    product: str = "Genoa"
    root: str = "ark"
    leaf_key: str = "vcek"
    signing_key: int = 0
    version: int = 3
    policy: int = 1 << 17
    vmpl: int = 0
    key_info: int = 0
    report_data: bytes = bytes(64)
    measurement: bytes = b"\x11" * 48
    tcb: dict[str, int] = field(default_factory=lambda: {"bl": 3, "tee": 0, "snp": 20, "ucode": 70})
    certificate_tcb: dict[str, int] = field(default_factory=dict)
    cpuid: tuple[int, int] = (0x19, 0x11)
    chip: bytes = b"\x22" * 64
    hwid: bytes = b"\x22" * 64
    certificate_product: str = ""
    end: dt.datetime = END

    OIDS: ClassVar = {"bl": "1", "tee": "2", "snp": "3", "ucode": "8", "fmc": "9"}
    BYTES: ClassVar = {"bl": 0, "tee": 1, "snp": 6, "ucode": 7}

    @property
    def roots(self) -> dict[str, str]:
        return {self.product: sha256(der(self.chain()[2])).hex()}

    def chain(self) -> list[x509.Certificate]:
        ark, ask = rsa_key(self.root), rsa_key(self.root + " ask")
        cloud = self.signing_key == 1
        between = f"SEV-{'VLEK-' if cloud else ''}{self.product}"
        prefix = "1.3.6.1.4.1.3704.1."
        shown = (self.certificate_product or self.product).encode()
        extensions = {prefix + "2": bytes((0x16, len(shown))) + shown}
        if cloud:
            extensions[prefix + "5"] = b"\x16\x05cloud"
        else:
            extensions[prefix + "4"] = self.hwid
        for component, oid in self.OIDS.items():
            value = {**self.tcb, **self.certificate_tcb}.get(component)
            if value is not None:
                extensions[f"{prefix}3.{oid}"] = integer(value)
        leaf = "SEV-VLEK" if cloud else "SEV-VCEK"
        return [
            certificate(leaf, ec_key(self.leaf_key), between, ask, extensions, end=self.end),
            certificate(between, ask, f"ARK-{self.product}", ark, ca=True),
            root_certificate(f"ARK-{self.product}", ark),
        ]

    def body(self) -> bytearray:
        raw = bytearray(1184)
        struct.pack_into("<IIQ", raw, 0, self.version, 0, self.policy)
        struct.pack_into("<II", raw, 0x30, self.vmpl, 1)
        struct.pack_into("<I", raw, 0x48, self.key_info | self.signing_key << 2)
        raw[0x50:0x90], raw[0x90:0xC0], raw[0x1A0:0x1E0] = self.report_data, self.measurement, self.chip
        for component, value in self.tcb.items():
            raw[0x180 + self.BYTES[component]] = value
        if self.version > 2:
            raw[0x188], raw[0x189] = self.cpuid
        return raw

    def report(self) -> bytes:
        raw = self.body()
        r, s = utils.decode_dss_signature(ec_key(self.leaf_key).sign(bytes(raw[:0x2A0]), ec.ECDSA(hashes.SHA384())))
        raw[0x2A0 : 0x2A0 + 72], raw[0x2A0 + 72 : 0x2A0 + 144] = r.to_bytes(72, "little"), s.to_bytes(72, "little")
        return bytes(raw)

    def evidence(self) -> Evidence:
        return Evidence("sev-snp", self.report(), tuple(der(c) for c in self.chain()))


# NVIDIA


@dataclass
class Gpu:
    nonce: bytes = bytes(32)
    driver: str = "999.1"
    fwid: bytes = b"\x33" * 48
    certificate_fwid: bytes = b"\x33" * 48
    measurements: int = 3

    def chain(self) -> list[x509.Certificate]:
        root, between, leaf = (ec_key(f"gpu {part}") for part in ("root", "between", "leaf"))
        extension = b"\x30\x3d" + nvidia.FWID_DIGEST + self.certificate_fwid
        return [
            certificate("GH100 leaf", leaf, "GH100 identity", between, {"2.23.133.5.4.1": extension}),
            certificate("GH100 identity", between, "Device root", root, ca=True),
            root_certificate("Device root", root),
        ]

    @property
    def root(self) -> str:
        return sha256(der(self.chain()[2])).hex()

    def report(self) -> bytes:
        request = bytes((0x11, 0xE0, 1, 0xFF)) + self.nonce + b"\0"
        record = b"".join(
            struct.pack("<BBHBH", index, 1, 51, 1, 48) + bytes([index]) * 48 for index in range(1, self.measurements + 1)
        )
        fields = {3: self.driver.encode() + b"\0", 6: bytes.fromhex("00880097 0f000000"), 20: self.fwid}
        opaque = b"".join(struct.pack("<HH", key, len(value)) + value for key, value in fields.items())
        response = bytes((0x11, 0x60, 0, 0, self.measurements)) + len(record).to_bytes(3, "little") + record
        signed = request + response + b"\x44" * 32 + len(opaque).to_bytes(2, "little") + opaque
        r, s = utils.decode_dss_signature(ec_key("gpu leaf").sign(signed, ec.ECDSA(hashes.SHA384())))
        return signed + r.to_bytes(48, "big") + s.to_bytes(48, "big")

    def evidence(self) -> Evidence:
        return Evidence("nvidia", self.report(), tuple(der(c) for c in self.chain()))


# Intel

P256 = ec.SECP256R1
PCK_CA, ROOT_CA, SIGNING = "Intel SGX PCK Platform CA", "Intel SGX Root CA", "Intel SGX TCB Signing"
SGX = "1.2.840.113741.1.13.1"


def raw_signature(key: EllipticCurvePrivateKey, message: bytes) -> bytes:
    r, s = utils.decode_dss_signature(key.sign(message, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def point(key: EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    return key.public_key().public_bytes(encoding, form)[1:]


def tlv(tag: int, value: bytes) -> bytes:
    size = len(value)
    length = bytes((size,)) if size < 128 else bytes((0x82, *size.to_bytes(2, "big")))
    return bytes((tag,)) + length + value


def oid(dotted: str) -> bytes:
    parts = [int(part) for part in dotted.split(".")]
    raw = bytes((40 * parts[0] + parts[1],))
    for part in parts[2:]:
        digits = [part & 127]
        while part := part >> 7:
            digits.append(part & 127 | 128)
        raw += bytes(reversed(digits))
    return tlv(6, raw)


def pair(dotted: str, value: bytes) -> bytes:
    return tlv(0x30, oid(dotted) + value)


@dataclass
class Intel:
    """A TDX platform; every field may be wrong on purpose."""

    report_data: bytes = bytes(64)
    attributes: int = 1 << 28
    status: str = "UpToDate"
    revoked: bool = False
    root: str = "intel root"
    next_update: str = "2027-06-01T00:00:00Z"
    evaluation: int = 17
    measurement: bytes = b"\x55" * 48

    def keys(self) -> dict[str, EllipticCurvePrivateKey]:
        names = {"root": self.root, "ca": "pck ca", "signing": "tcb signing", "pck": "pck", "attestation": "attestation"}
        return {label: ec_key(key, P256) for label, key in names.items()}

    def certificates(self) -> dict[str, x509.Certificate]:
        keys = self.keys()
        components = b"".join(pair(f"{SGX}.2.{index}", integer(3)) for index in range(1, 17))
        tcb = components + pair(f"{SGX}.2.17", integer(11)) + pair(f"{SGX}.2.18", tlv(4, bytes([3]) * 16))
        fields = pair(f"{SGX}.1", tlv(4, bytes(16))) + pair(f"{SGX}.2", tlv(0x30, tcb)) + pair(f"{SGX}.3", tlv(4, bytes(2)))
        fields += pair(f"{SGX}.4", tlv(4, bytes.fromhex("b0c06f000000"))) + pair(f"{SGX}.5", tlv(10, b"\1"))
        fields += pair(f"{SGX}.6", tlv(4, bytes(16)))
        flags = b"".join(pair(f"{SGX}.7.{index}", b"\x01\x01\xff") for index in (1, 2, 3))
        fields += pair(f"{SGX}.7", tlv(0x30, flags))
        leaf = {SGX: tlv(0x30, fields)}
        return {
            "root": root_certificate(ROOT_CA, keys["root"]),
            "ca": certificate(PCK_CA, keys["ca"], ROOT_CA, keys["root"], ca=True),
            "signing": certificate(SIGNING, keys["signing"], ROOT_CA, keys["root"]),
            "pck": certificate("Intel SGX PCK Certificate", keys["pck"], PCK_CA, keys["ca"], leaf, serial=4242),
        }

    @property
    def root_der(self) -> bytes:
        return der(self.certificates()["root"])

    def quote(self) -> bytes:
        keys, certificates = self.keys(), self.certificates()
        vendor = bytes.fromhex("939a7233f79c4ca9940a0db3957f0607")
        header = struct.pack("<HHIHH", 4, 2, 0x81, 0, 0) + vendor + bytes(20)
        svn = bytes((5, 1, 2)) + bytes(13)
        body = svn + bytes(48 + 48 + 8) + struct.pack("<Q", self.attributes) + bytes.fromhex("e702060000000000")
        body += self.measurement + bytes(48 * 3) + bytes(48 * 4) + self.report_data
        attestation = point(keys["attestation"])
        auth = bytes(32)
        bound = hashlib.sha256(attestation + auth).digest() + bytes(32)
        qe = bytes([3]) * 16 + bytes(4 + 28) + bytes.fromhex("1500000000000000e700000000000000") + b"\x66" * 32 + bytes(32)
        qe += bytes.fromhex("DC9E2A7C6F948F17474E34A7FC43ED030F7C1563F1BABDDF6340C82E0E54A8C5") + bytes(96)
        qe += struct.pack("<HH", 2, 6) + bytes(60) + bound
        chain = pem(certificates["pck"], certificates["ca"], certificates["root"])
        inner = (
            qe
            + raw_signature(keys["pck"], qe)
            + struct.pack("<H", len(auth))
            + auth
            + struct.pack("<HI", 5, len(chain))
            + chain
        )
        signed = raw_signature(keys["attestation"], header + body) + attestation + struct.pack("<HI", 6, len(inner)) + inner
        return header + body + struct.pack("<I", len(signed)) + signed

    def collateral(self) -> bytes:
        keys, certificates = self.keys(), self.certificates()
        dates = {"issueDate": "2026-12-01T00:00:00Z", "nextUpdate": self.next_update}
        level = {"tcbDate": "2024-03-13T00:00:00Z", "tcbStatus": self.status}
        good = {"tcbDate": "2024-03-13T00:00:00Z", "tcbStatus": "UpToDate"}
        module = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
        tcb = {
            "sgxtcbcomponents": [{"svn": 2}] * 16,
            "pcesvn": 11,
            "tdxtcbcomponents": [{"svn": 1}, {"svn": 0}] + [{"svn": 0}] * 14,
        }
        info = json.dumps(
            {"id": "TDX", "version": 3, **dates, "fmspc": "B0C06F000000", "pceId": "0000", "tcbType": 0}
            | {"tcbEvaluationDataNumber": self.evaluation, "tdxModule": module}
            | {"tdxModuleIdentities": [{"id": "TDX_01", **module, "tcbLevels": [{"tcb": {"isvsvn": 4}, **good}]}]}
            | {"tcbLevels": [{"tcb": tcb, **level}]}
        )
        identity = json.dumps(
            {"id": "TD_QE", "version": 2, **dates, "tcbEvaluationDataNumber": self.evaluation, "miscselect": "00" * 4}
            | {"miscselectMask": "FF" * 4, "attributes": "11" + "00" * 15, "attributesMask": "FBFFFFFFFFFFFFFF0000000000000000"}
            | {"mrsigner": "DC9E2A7C6F948F17474E34A7FC43ED030F7C1563F1BABDDF6340C82E0E54A8C5", "isvprodid": 2}
            | {"tcbLevels": [{"tcb": {"isvsvn": 4}, **good}]}
        )
        issuers = pem(certificates["signing"], certificates["root"]).decode()
        return json.dumps(
            {
                "pck_crl_issuer_chain": pem(certificates["ca"], certificates["root"]).decode(),
                "root_ca_crl": self._crl(ROOT_CA, keys["root"], None).hex(),
                "pck_crl": self._crl(PCK_CA, keys["ca"], 4242 if self.revoked else None).hex(),
                "tcb_info_issuer_chain": issuers,
                "tcb_info": info,
                "tcb_info_signature": raw_signature(keys["signing"], info.encode()).hex(),
                "qe_identity_issuer_chain": issuers,
                "qe_identity": identity,
                "qe_identity_signature": raw_signature(keys["signing"], identity.encode()).hex(),
            }
        ).encode()

    def _crl(self, issuer: str, key: EllipticCurvePrivateKey, serial: int | None) -> bytes:
        builder = x509.CertificateRevocationListBuilder().issuer_name(name(issuer)).last_update(START).next_update(END)
        builder = builder.add_extension(x509.CRLNumber(1), critical=False)
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        if serial is not None:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(START).build()
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def evidence(self) -> Evidence:
        return Evidence("tdx", self.quote(), (), self.collateral())
