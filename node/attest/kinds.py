"""Kinds of evidence: the simulated one, and those of plugins, by the entry-point group `dilocox.attestation`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Protocol, runtime_checkable

from dilocox.node.attest import simulated
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import printable
from dilocox.protocol.run.manifest import Attestation
from dilocox.protocol.wire.attestation import NVIDIA, SEV_SNP, SIMULATED, Claims, Evidence, GpuClaims
from dilocox.transport.plugins import call, installed

__all__ = ["GROUP", "Kind", "MachineKind", "Terms", "asked_kinds", "find_kind", "kind_names", "missing", "require_kinds"]

GROUP = "dilocox.attestation"
"""An entry point's name is a kind. Its value is a function without arguments that returns a `Kind` or a `MachineKind`."""
DISTRIBUTIONS = dict.fromkeys(("tdx", SEV_SNP, NVIDIA), "dilocox-tee")
"""By kind: the distribution of this project that has it."""


@dataclass(frozen=True)
class Terms:
    """Terms of a verification, beside the evidence and the time."""

    tcb_statuses: Sequence[str] = ("UpToDate",)
    """Statuses that the run admits, in the vendor's words."""
    nonce: bytes | None = None
    """32 bytes that a GPU's report must carry; None: any."""


@runtime_checkable
class Kind(Protocol):
    """A verifier of one kind of evidence. It uses no network."""

    def verify(self, evidence: Evidence, now: int, terms: Terms) -> Claims | GpuClaims:
        """Return what the evidence says. `now`: Unix seconds. Blocking; raises AttestationError and nothing else."""
        ...


@runtime_checkable
class MachineKind(Kind, Protocol):
    """A kind that a confidential guest can show. Methods block."""

    def is_here(self) -> bool:
        """Return whether this machine has the hardware."""
        ...

    def attest(self, report_data: bytes, collateral: Path | None) -> Evidence:
        """Return fresh evidence. `collateral`: a file of the operator for verifiers. Raises AttestationError."""
        ...

    def measurement(self, evidence: Evidence) -> tuple[str, ...]:
        """Return the measurement that evidence names, not verified. Raises AttestationError."""
        ...


class _Simulated:
    def verify(self, evidence: Evidence, now: int, terms: Terms) -> Claims:
        return simulated.verify(evidence, now)


@cache
def plug_ins() -> dict[str, metadata.EntryPoint]:
    return installed(GROUP)


def kind_names() -> tuple[str, ...]:
    """Return the kinds that are installed, the simulated one last."""
    return (*sorted(plug_ins().keys() - {SIMULATED}), SIMULATED)


def find_kind(name: str) -> Kind | None:
    """Return a kind, None if it is not installed. A plugin cannot replace the simulated kind; it is loaded for its own kinds alone.

    Raises ConfigError if the plugin cannot be used.
    """
    if name == SIMULATED:
        return _Simulated()
    entry = plug_ins().get(name)
    if entry is None:
        return None
    if not isinstance(kind := call(entry), Kind):
        raise ConfigError(
            f"the plugin for evidence of kind {printable(name)!r} returns no kind. Install it again, or uninstall it"
        )
    return kind


def missing(kinds: Iterable[str]) -> str:
    """Return the first kind that is not installed and how to get it, for people; empty if all are installed."""
    for kind in kinds:
        if kind not in kind_names():
            distribution = DISTRIBUTIONS.get(kind)
            how = f"install {distribution}" if distribution else f"install its plugin; installed: {', '.join(kind_names())}"
            return f"no plugin on this machine has evidence of kind {printable(kind)!r}: {how}"
    return ""


def asked_kinds(settings: Attestation) -> tuple[str, ...]:
    """Return the kinds that a run needs installed where evidence is made or verified."""
    return (*settings.kinds, *((NVIDIA,) if settings.require_gpu else ()))


def require_kinds(settings: Attestation) -> None:
    """Raise ConfigError if the run asks for a kind that is not installed, or whose plugin cannot be used."""
    if lacking := missing(asked_kinds(settings)):
        raise ConfigError(f"the run requires evidence, but {lacking}")
    for kind in asked_kinds(settings):
        find_kind(kind)
