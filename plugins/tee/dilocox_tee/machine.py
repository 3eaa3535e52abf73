"""Evidence of this machine: the CPU's through Linux's TSM reports, the GPUs' through NVML.

Each function raises AttestationError with Code.UNAVAILABLE if the machine has no such hardware.
"""

import ctypes
from pathlib import Path
from tempfile import mkdtemp

from dilocox.protocol.wire.attestation import NVIDIA, SEV_SNP, AttestationError, Code, Evidence

__all__ = ["certificate_table", "gpu_evidence", "tsm_evidence", "tsm_provider"]

TSM = Path("/sys/kernel/config/tsm/report")
"""Linux 6.7 and later: a folder made here is a report request (Documentation/ABI/testing/configfs-tsm)."""
PROVIDERS = {"tdx_guest": "tdx", "sev_guest": SEV_SNP}
NVML_CERT_CHAIN_BYTES, NVML_REPORT_BYTES = 0x1000, 0x2000


def unavailable(reason: str) -> AttestationError:
    return AttestationError(Code.UNAVAILABLE, reason)


def tsm_provider(root: Path = TSM) -> str | None:
    """Return the CPU kind of this guest; None if it is no confidential guest."""
    try:
        entry = Path(mkdtemp(prefix="dilocox-", dir=root))
    except OSError:
        return None
    try:
        return PROVIDERS.get((entry / "provider").read_text().strip())
    except OSError:
        return None
    finally:
        _remove(entry)


def _remove(entry: Path) -> None:
    try:
        entry.rmdir()
    except OSError:
        pass


def tsm_evidence(report_data: bytes, kind: str, root: Path = TSM, collateral: Path | None = None) -> Evidence:
    """Return a fresh report with this report data. `collateral`: the file TDX verifiers need, updated by the operator."""
    try:
        entry = Path(mkdtemp(prefix="dilocox-", dir=root))
    except OSError as error:
        raise unavailable(f"no TSM reports under {root}: not a confidential guest, or configfs is not mounted") from error
    try:
        (entry / "inblob").write_bytes(report_data)
        provider = (entry / "provider").read_text().strip()
        if PROVIDERS.get(provider) != kind:
            raise unavailable(f"this guest's reports come from {provider}, not from {kind}")
        blob = (entry / "outblob").read_bytes()
        auxiliary = entry / "auxblob"
        certs = certificate_table(auxiliary.read_bytes()) if kind == SEV_SNP and auxiliary.exists() else ()
        generation = (entry / "generation").read_text().strip()
        if generation != "1":
            raise unavailable("another process used this report request")
        return Evidence(kind, blob, certs, collateral.read_bytes() if collateral else b"")
    except OSError as error:
        raise unavailable(f"the report could not be made: {error}") from error
    finally:
        _remove(entry)


def certificate_table(raw: bytes) -> tuple[bytes, ...]:
    """Return the DER certificates of AMD's table: entries of GUID (16), offset (4), length (4) until a zero GUID."""
    found = []
    for start in range(0, len(raw) - 24, 24):
        entry = raw[start : start + 24]
        if not any(entry[:16]):
            break
        offset, size = int.from_bytes(entry[16:20], "little"), int.from_bytes(entry[20:24], "little")
        found.append(raw[offset : offset + size])
    return tuple(found)


class _Report(ctypes.Structure):
    """nvmlConfComputeGpuAttestationReport_t."""

    _fields_ = (
        ("is_cec_present", ctypes.c_uint),
        ("nonce", ctypes.c_ubyte * 32),
        ("report_size", ctypes.c_uint),
        ("cec_size", ctypes.c_uint),
        ("report", ctypes.c_ubyte * NVML_REPORT_BYTES),
        ("cec", ctypes.c_ubyte * 0x1000),
    )


class _Chain(ctypes.Structure):
    """nvmlConfComputeGpuCertificate_t."""

    _fields_ = (
        ("chain_size", ctypes.c_uint),
        ("attestation_chain_size", ctypes.c_uint),
        ("chain", ctypes.c_ubyte * NVML_CERT_CHAIN_BYTES),
        ("attestation_chain", ctypes.c_ubyte * 0x1400),
    )


def gpu_evidence(nonce: bytes) -> tuple[Evidence, ...]:
    """Return one report per GPU in confidential mode."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise unavailable("no NVIDIA driver here") from error
    if nvml.nvmlInit_v2():
        raise unavailable("NVML does not start")
    try:
        count = ctypes.c_uint()
        _nvml(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "count GPUs")
        return tuple(_gpu_report(nvml, index, nonce) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _gpu_report(nvml: ctypes.CDLL, index: int, nonce: bytes) -> Evidence:
    handle, report, chain = ctypes.c_void_p(), _Report(), _Chain()
    _nvml(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), f"open GPU {index}")
    report.nonce[:] = nonce
    _nvml(nvml.nvmlDeviceGetConfComputeGpuAttestationReport(handle, ctypes.byref(report)), f"get the report of GPU {index}")
    _nvml(nvml.nvmlDeviceGetConfComputeGpuCertificate(handle, ctypes.byref(chain)), f"get the certificates of GPU {index}")
    certificates = bytes(chain.attestation_chain[: chain.attestation_chain_size])
    return Evidence(NVIDIA, bytes(report.report[: report.report_size]), (certificates,))


def _nvml(status: int, what: str) -> None:
    if status:
        raise unavailable(f"NVML could not {what}: error {status}")
