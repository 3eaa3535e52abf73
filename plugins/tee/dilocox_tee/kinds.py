"""The kinds of evidence of this distribution, as `dilocox.attestation` names them."""

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

from dilocox.node.attest.kinds import Terms
from dilocox.protocol.wire.attestation import Claims, Evidence, GpuClaims, gpu_nonce
from dilocox_tee import nvidia, snp, tdx
from dilocox_tee.machine import gpu_evidence, tsm_evidence, tsm_provider

__all__ = ["Nvidia", "SevSnp", "Tdx"]

NVIDIA_GPUS = "/proc/driver/nvidia/gpus"


class Guest(ABC):
    """A confidential guest, with the GPUs that it has."""

    kind: str

    def is_here(self) -> bool:
        return tsm_provider() == self.kind

    def attest(self, report_data: bytes, collateral: Path | None) -> Evidence:
        evidence = tsm_evidence(report_data, self.kind, collateral=collateral)
        return replace(evidence, gpu=gpu_evidence(gpu_nonce(report_data)) if os.path.exists(NVIDIA_GPUS) else ())

    @abstractmethod
    def verify(self, evidence: Evidence, now: int, terms: Terms) -> Claims: ...

    @abstractmethod
    def measurement(self, evidence: Evidence) -> tuple[str, ...]: ...


class Tdx(Guest):
    kind = tdx.KIND

    def verify(self, evidence: Evidence, now: int, terms: Terms) -> Claims:
        return tdx.verify(evidence, now, terms.tcb_statuses)

    def measurement(self, evidence: Evidence) -> tuple[str, ...]:
        return tdx.registers(evidence.blob)


class SevSnp(Guest):
    kind = snp.KIND

    def verify(self, evidence: Evidence, now: int, terms: Terms) -> Claims:
        return snp.verify(evidence, now)

    def measurement(self, evidence: Evidence) -> tuple[str, ...]:
        return (snp.parse(evidence.blob).measurement.hex(),)


class Nvidia:
    """GPUs, whose evidence is part of a guest's."""

    def verify(self, evidence: Evidence, now: int, terms: Terms) -> GpuClaims:
        return nvidia.verify(evidence, now, terms.nonce)
