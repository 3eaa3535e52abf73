"""All verifiers behind one function. A plug-in adds a kind through the entry-point group `dilocox.attestation`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from typing import cast

from dilocox.node.attest import nvidia, simulated, snp, tdx
from dilocox.protocol.attestation import (
    NVIDIA,
    SIMULATED,
    AttestationError,
    Claims,
    Code,
    Evidence,
    Policy,
    Verdict,
    deny_unexpected,
    gpu_nonce,
)
from dilocox.transport.plugins import installed, load

__all__ = ["GROUP", "appraise", "verifiers", "verify_evidence"]

GROUP = "dilocox.attestation"
"""Each entry point's name is a kind and its value a `Verifier`."""

Verifier = Callable[[Evidence, int], Claims]
"""(evidence, Unix seconds) -> claims; raises AttestationError."""


@cache
def plug_ins() -> dict[str, metadata.EntryPoint]:
    return installed(GROUP)


def _by_plugin(entry: metadata.EntryPoint, evidence: Evidence, now: int) -> Claims:
    """Verify evidence with a plugin, which is loaded now. Raises ConfigError if it cannot be."""
    return cast("Claims", load(entry)(evidence, now))


def verifiers(tcb_statuses: Sequence[str] = ("UpToDate",)) -> dict[str, Verifier]:
    """Return the verifiers by kind. A plugin cannot replace ours, and is loaded for evidence of its own kind alone."""
    ours: dict[str, Verifier] = {
        tdx.KIND: partial(tdx.verify, statuses=tcb_statuses),
        snp.KIND: snp.verify,
        SIMULATED: simulated.verify,
    }
    return {**{kind: partial(_by_plugin, entry) for kind, entry in plug_ins().items()}, **ours}


@deny_unexpected
def verify_evidence(evidence: Evidence, now: int, tcb_statuses: Sequence[str] = ("UpToDate",)) -> Claims:
    """Claims of a CPU's evidence and of the GPUs with it. Raises AttestationError, nothing else: an unexpected failure denies."""
    if evidence.kind == NVIDIA:
        raise AttestationError(Code.KIND, "GPU evidence never admits without a CPU's")
    verifier = verifiers(tcb_statuses).get(evidence.kind)
    if verifier is None:
        raise AttestationError(Code.UNKNOWN_KIND, f"no verifier for kind {evidence.kind[:32]!r}")
    claims = verifier(evidence, now)
    if claims.kind != evidence.kind:
        raise AttestationError(Code.INTERNAL, "the verifier speaks of another kind")
    nonce = gpu_nonce(claims.report_data)
    return replace(claims, gpus=tuple(nvidia.verify(item, now, nonce) for item in evidence.gpu))


def appraise(policy: Policy, evidence: Evidence, expected: bytes, now: int) -> tuple[Verdict, Claims | None]:
    """Verify, then apply the run's policy. Never raises."""
    try:
        if evidence.kind not in policy.settings.kinds:
            raise AttestationError(Code.KIND, f"the run does not admit {evidence.kind[:32]!r}")
        claims = verify_evidence(evidence, now, policy.settings.tcb_statuses)
    except AttestationError as error:
        return Verdict(False, error.code, error.cause, 0), None
    return policy.appraise(claims, expected, now), claims
