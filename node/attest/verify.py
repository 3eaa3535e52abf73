"""Verification of evidence of every kind, and its appraisal by a run's policy."""

from dataclasses import replace

from dilocox.node.attest.kinds import Terms, find_kind
from dilocox.protocol.wire.attestation import (
    NVIDIA,
    AttestationError,
    Claims,
    Code,
    Evidence,
    GpuClaims,
    Policy,
    Verdict,
    deny_unexpected,
    gpu_nonce,
)

__all__ = ["appraise", "verify_alone", "verify_evidence"]

DEFAULT = Terms()


@deny_unexpected
def verify_alone(evidence: Evidence, now: int, terms: Terms = DEFAULT) -> Claims | GpuClaims:
    """Return what one piece of evidence says, without those in it. Raises AttestationError, nothing else."""
    kind = find_kind(evidence.kind)
    if kind is None:
        raise AttestationError(Code.UNKNOWN_KIND, f"no verifier for kind {evidence.kind[:32]!r}")
    claims = kind.verify(evidence, now, terms)
    if isinstance(claims, Claims) and claims.kind != evidence.kind:
        raise AttestationError(Code.INTERNAL, "the verifier returned another kind")
    return claims


@deny_unexpected
def verify_evidence(evidence: Evidence, now: int, terms: Terms = DEFAULT) -> Claims:
    """Return what a CPU's evidence says, and that of the GPUs in it. Raises AttestationError, nothing else."""
    if evidence.kind == NVIDIA:
        raise AttestationError(Code.KIND, "GPU evidence alone never admits: evidence of the CPU is missing")
    claims = verify_alone(evidence, now, terms)
    if not isinstance(claims, Claims):
        raise AttestationError(Code.INTERNAL, "the verifier of a CPU returned a GPU")
    of_gpus = Terms(nonce=gpu_nonce(claims.report_data))
    return replace(claims, gpus=tuple(_verify_gpu(item, now, of_gpus) for item in evidence.gpu))


def _verify_gpu(evidence: Evidence, now: int, terms: Terms) -> GpuClaims:
    claims = verify_alone(evidence, now, terms)
    if not isinstance(claims, GpuClaims):
        raise AttestationError(Code.INTERNAL, "the verifier of a GPU returned a CPU")
    return claims


def appraise(policy: Policy, evidence: Evidence, expected: bytes, now: int) -> tuple[Verdict, Claims | None]:
    """Verify, then apply the run's policy. Never raises."""
    try:
        if evidence.kind not in policy.settings.kinds:
            raise AttestationError(Code.KIND, f"the run does not admit {evidence.kind[:32]!r}")
        claims = verify_evidence(evidence, now, Terms(policy.settings.tcb_statuses))
    except AttestationError as error:
        return Verdict(False, error.code, error.cause, 0), None
    return policy.appraise(claims, expected, now), claims
