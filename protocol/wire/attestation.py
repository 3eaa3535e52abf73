"""Attestation without I/O: evidence, its binding, and the run's policy for verified claims.

A verifier (node/attest) turns Evidence into Claims or raises AttestationError; `Policy.appraise` turns Claims into a
Verdict. The 64 bytes that the hardware signs bind evidence to one peer, one run and one challenge:

    report_data = SHA-512("dilocox-attest-v1\\0" ‖ lp(kind) ‖ lp(Ed25519 key) ‖ lp(run id) ‖ lp(nonce)),  lp = u32 length prefix
    gpu_nonce   = SHA-256("dilocox-gpu-v1\\0" ‖ report_data)

Evidence raises the cost of cheating; it does not prove training. Quotes are malleable (trailing bytes, ECDSA's n - s).
So no record uses a quote's hash as its key: a verdict belongs to (key, run, nonce).
"""

import functools
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast

from dilocox.protocol import limits
from dilocox.protocol.crypto import length_prefixed
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import printable
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Attestation as Settings

__all__ = [
    "Appraiser",
    "AttestationError",
    "Claims",
    "Code",
    "Evidence",
    "GpuClaims",
    "Policy",
    "Verdict",
    "check_binding",
    "deny_unexpected",
    "gpu_nonce",
    "report_data",
    "summary",
]

REPORT_DATA_BYTES = 64
NONCE_BYTES = 32
SIMULATED = "simulated"
SEV_SNP = "sev-snp"
NVIDIA = "nvidia"
"""GPU evidence: never admits without a CPU TEE's."""


class Code(StrEnum):
    """Code of a failed verification. Every failure has one."""

    OK = "ok"
    """The evidence holds."""
    MALFORMED = "malformed"
    """The bytes do not parse as their kind."""
    OVERSIZE = "oversize"
    """The evidence is larger than its caps."""
    UNKNOWN_KIND = "unknown-kind"
    """No verifier for this kind is installed here."""
    KIND = "kind"
    """The policy does not name this kind."""
    VERSION = "version"
    """The format has another version."""
    SIGNATURE = "signature"
    """A signature does not verify."""
    CHAIN = "chain"
    """A certificate is not signed by the next one."""
    ROOT = "root"
    """The chain does not end at the vendor's root."""
    NAMES = "names"
    """A certificate's issuer is not the next one's subject, or the names are not the vendor's."""
    NOT_YET_VALID = "not-yet-valid"
    """A certificate or the collateral is not valid yet."""
    EXPIRED = "expired"
    """A certificate or the collateral has expired."""
    REVOKED = "revoked"
    """A certificate is revoked."""
    PRODUCT = "product"
    """Certificate, CPUID and root name different products."""
    CHIP = "chip"
    """The report is of another chip than the certificate."""
    TCB = "tcb"
    """The report's security versions differ from the certificate's, or are below the policy's minimum."""
    TCB_STATUS = "tcb-status"
    """The policy does not allow this TCB status."""
    RESERVED = "reserved"
    """Bits that must be zero are not."""
    PEER = "peer"
    """The evidence was made for another peer."""
    RUN = "run"
    """The evidence was made for another run."""
    NONCE = "nonce"
    """The nonce is not this verifier's challenge, or was used before."""
    REPORT_DATA = "report-data"
    """The hardware signed something else than this peer, run and nonce."""
    MEASUREMENT = "measurement"
    """The policy does not allow this measurement."""
    DEBUG = "debug"
    """The guest can be debugged."""
    MIGRATABLE = "migratable"
    """The guest can migrate."""
    VMPL = "vmpl"
    """The report is of a higher VMPL than allowed."""
    FIRMWARE = "firmware"
    """A GPU's report and certificate name different firmware."""
    GPU = "gpu"
    """The policy asks for GPU evidence, or a GPU's measurements are not on its list."""
    UNAVAILABLE = "unavailable"
    """This machine has no such hardware, or the peer gave no evidence."""
    INTERNAL = "internal"
    """A verifier failed unexpectedly, which denies."""


class AttestationError(RemoteError):
    """Error: evidence that does not hold, with its code. `detail` is for logs and commits; an unknown peer may have
    written parts of it."""

    def __init__(self, code: Code, detail: str) -> None:
        self.code, self.cause = code, printable(detail[: limits.TEXT_CHARACTERS])
        super().__init__(pb.REASON_ATTESTATION, f"{code}: {self.cause}")


Checked = TypeVar("Checked", bound=Callable[..., Any])


def deny_unexpected(verify: Checked) -> Checked:
    """A verifier that raises anything but AttestationError has failed, and that denies."""

    @functools.wraps(verify)
    def guarded(*arguments: Any, **options: Any) -> Any:
        try:
            return verify(*arguments, **options)
        except AttestationError:
            raise
        except Exception as error:
            raise AttestationError(Code.INTERNAL, f"{type(error).__name__}: {error}") from error

    return cast(Checked, guarded)


@dataclass(frozen=True)
class Evidence:
    """Signed report of hardware, with everything needed to verify it offline. Raises AttestationError if it is larger than
    its caps."""

    kind: str
    blob: bytes
    """Quote or report."""
    certs: tuple[bytes, ...] = ()
    """PEM or DER, any order."""
    collateral: bytes = b""
    """TDX: JSON of CRLs, TCB info and QE identity."""
    gpu: tuple["Evidence", ...] = ()
    """One per GPU, of kind `nvidia`."""

    def __post_init__(self) -> None:
        sizes = [
            (len(self.blob), limits.EVIDENCE_BLOB_BYTES, "blob"),
            (len(self.collateral), limits.COLLATERAL_BYTES, "collateral"),
        ]
        sizes += [(len(cert), limits.EVIDENCE_CERTIFICATE_BYTES, "certificate") for cert in self.certs]
        for size, limit, what in sizes:
            if size > limit:
                raise AttestationError(Code.OVERSIZE, f"{what} of {size} bytes; the limit is {limit}")
        if len(self.certs) > limits.EVIDENCE_CERTIFICATES or len(self.gpu) > limits.EVIDENCE_GPUS:
            raise AttestationError(Code.OVERSIZE, "too many certificates or GPUs")
        if len(self.kind) > limits.TEXT_CHARACTERS or any(item.gpu or item.kind != NVIDIA for item in self.gpu):
            raise AttestationError(Code.MALFORMED, "GPU evidence inside GPU evidence, or of another kind")

    def message(self) -> pb.Evidence:
        return pb.Evidence(
            kind=self.kind,
            blob=self.blob,
            certificates=self.certs,
            collateral=self.collateral,
            gpus=[item.message() for item in self.gpu],
        )

    @classmethod
    def from_message(cls, message: pb.Evidence, depth: int = 1) -> "Evidence":
        if depth < 0 or len(message.gpus) > limits.EVIDENCE_GPUS:
            raise AttestationError(Code.MALFORMED, "GPU evidence inside GPU evidence, or too many GPUs")
        gpus = tuple(cls.from_message(item, depth - 1) for item in message.gpus)
        return cls(message.kind, message.blob, tuple(message.certificates), message.collateral, gpus)


@dataclass(frozen=True)
class GpuClaims:
    """Verified content of a GPU's report."""

    architecture: str
    driver: str
    vbios: str
    nonce: bytes
    """32 bytes, chosen by the peer that requested the report."""
    measurements: Mapping[int, str]
    """Hexadecimal SHA-384 by index."""
    valid_until: int
    """Unix seconds."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claims:
    """Verified content of evidence; the hardware signed every field."""

    kind: str
    measurement: tuple[str, ...]
    """Hexadecimal. TDX: MRTD, RTMR0 … RTMR3; SEV-SNP: the launch measurement."""
    report_data: bytes
    """64 bytes."""
    valid_until: int
    """Unix seconds: the earliest expiry of certificates and collateral."""
    tcb_status: str = ""
    """Intel's TCB status for TDX; empty for other vendors."""
    tcb: Mapping[str, int] = field(default_factory=dict)
    """Security versions by component; TDX: `evaluation`, the number of the TCB info used."""
    debug: bool = False
    migratable: bool = False
    vmpl: int = 0
    product: str = ""
    version: int = 0
    """Version of the report format."""
    gpus: tuple[GpuClaims, ...] = ()
    notes: tuple[str, ...] = ()
    """Properties that this evidence does not prove, as sentences."""

    @property
    def simulated(self) -> bool:
        return self.kind == SIMULATED


@dataclass(frozen=True)
class Verdict:
    ok: bool
    code: Code
    reason: str
    valid_until: int
    """Unix seconds; 0 when not ok."""


def report_data(kind: str, key: bytes, run_id: bytes, nonce: bytes) -> bytes:
    """Return the 64 bytes that evidence for this peer, run and challenge contains."""
    parts = (kind.encode(), key, run_id, nonce)
    return hashlib.sha512(b"dilocox-attest-v1\0" + b"".join(length_prefixed(part) for part in parts)).digest()


def gpu_nonce(data: bytes) -> bytes:
    """The 32 bytes that the GPUs' reports carry, from the CPU's report data."""
    return hashlib.sha256(b"dilocox-gpu-v1\0" + data).digest()


def check_binding(bound: pb.BoundEvidence, key: bytes, run_id: bytes, nonce: bytes) -> None:
    """Check the sender's statement of peer, run and challenge before any hardware signature. Raises AttestationError."""
    if bound.key != key:
        raise AttestationError(Code.PEER, "this evidence was made for another peer")
    if bound.run != run_id:
        raise AttestationError(Code.RUN, "this evidence was made for another run")
    if not hmac.compare_digest(bound.nonce, nonce):
        raise AttestationError(Code.NONCE, "this evidence answers another challenge")


def summary(claims: Claims, peer: str, nonce: bytes, valid_until: int) -> pb.Attestation:
    """Return the part of a verdict that a commit records."""
    return pb.Attestation(
        peer=peer,
        nonce=nonce,
        kind=claims.kind,
        measurement=":".join(claims.measurement),
        tcb_status=claims.tcb_status,
        gpus=len(claims.gpus),
        valid_until_ms=1000 * valid_until,
    )


@dataclass(frozen=True)
class Policy:
    """The manifest's [attestation] section, applied."""

    settings: Settings

    def appraise(self, claims: Claims, expected_report_data: bytes, now: int) -> Verdict:
        """Never raises. `now`: Unix seconds."""
        try:
            self._check(claims, expected_report_data, now)
        except AttestationError as error:
            return Verdict(False, error.code, error.cause, 0)
        except Exception as error:  # any exception denies
            return Verdict(False, Code.INTERNAL, f"{type(error).__name__}: {error}", 0)
        ends = [now + self.settings.lifetime_seconds, claims.valid_until, *(gpu.valid_until for gpu in claims.gpus)]
        return Verdict(True, Code.OK, "", min(ends))

    def _check(self, claims: Claims, expected: bytes, now: int) -> None:
        settings, kind = self.settings, claims.kind
        _require(kind in settings.kinds, Code.KIND, f"the run admits {', '.join(settings.kinds) or 'no kind'}, not {kind}")
        same = len(expected) == REPORT_DATA_BYTES and hmac.compare_digest(claims.report_data, expected)
        _require(same, Code.REPORT_DATA, "the hardware signed another peer, run or nonce")
        nameless = kind == SEV_SNP and claims.version == 2
        _require(not nameless, Code.VERSION, "a version 2 report does not name its CPU")
        _require(not claims.debug, Code.DEBUG, "the guest can be debugged by its host")
        _require(not claims.migratable, Code.MIGRATABLE, "the guest can be migrated")
        _require(claims.vmpl <= settings.vmpl, Code.VMPL, f"VMPL {claims.vmpl}; at most {settings.vmpl}")
        allowed = settings.measurements.get(kind, ())
        _require(
            any(_matches(entry, claims.measurement) for entry in allowed),
            Code.MEASUREMENT,
            f"{':'.join(claims.measurement)[:64]}… is not among the {len(allowed)} measurements that the run admits for {kind}",
        )
        if claims.tcb_status:
            _require(
                claims.tcb_status in settings.tcb_statuses,
                Code.TCB_STATUS,
                f"TCB status {claims.tcb_status}; the run admits {', '.join(settings.tcb_statuses)}",
            )
        for component, least in settings.minimum_tcb.get(kind, {}).items():
            found = claims.tcb.get(component, -1)
            _require(found >= least, Code.TCB, f"TCB component {component} is {found}; at least {least}")
        _require(claims.valid_until > now, Code.EXPIRED, "its certificates or collateral have expired")
        self._check_gpus(claims, now)

    def _check_gpus(self, claims: Claims, now: int) -> None:
        _require(bool(claims.gpus) or not self.settings.require_gpu, Code.GPU, "the run requires GPU evidence")
        nonce = gpu_nonce(claims.report_data)
        for gpu in claims.gpus:
            _require(hmac.compare_digest(gpu.nonce, nonce), Code.NONCE, "a GPU's report answers another challenge")
            _require(gpu.valid_until > now, Code.EXPIRED, "a GPU's certificate has expired")
            name = f"{gpu.driver}/{gpu.vbios}"
            allowed = self.settings.gpu_measurements.get(name)
            _require(allowed is not None, Code.GPU, f"no measurements are listed for driver/VBIOS {name}")
            for index, values in (allowed or {}).items():
                found = gpu.measurements.get(int(index), "")
                _require(found in values, Code.GPU, f"GPU measurement {index} is not on the list for {name}")


Appraiser = Callable[[Policy, Evidence, bytes, int], tuple[Verdict, Claims | None]]
"""(policy, evidence, expected report data, Unix seconds): verify and appraise. Blocking; never raises."""


def _require(condition: bool, code: Code, reason: str) -> None:
    if not condition:
        raise AttestationError(code, reason)


def _matches(entry: str, measurement: tuple[str, ...]) -> bool:
    """An entry names every register, joined by colons; `*` admits any value of one."""
    registers = entry.lower().split(":")
    pairs = zip(registers, measurement, strict=False)
    return len(registers) == len(measurement) and all(wanted in ("*", found) for wanted, found in pairs)
