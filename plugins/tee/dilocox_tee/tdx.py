"""Intel TDX: DCAP quotes, verified by dcap-qvl with its policy; every field is read from the verified result.

Quote and collateral formats: Intel TDX DCAP Quoting Library API; statuses are Intel's words (UpToDate, OutOfDate, …). Peers may
relay old collateral that is still in its validity, so a policy should set a minimum `evaluation` number (the TCB evaluation data
number).
"""

import json
from collections.abc import Sequence
from typing import Any

import dcap_qvl
from cryptography import x509

from dilocox.protocol.wire.attestation import AttestationError, Claims, Code, Evidence, deny_unexpected
from dilocox_tee.certificates import load_certificates

__all__ = ["KIND", "registers", "verify"]

KIND = "tdx"
TDX_TEE_TYPE = 0x81
DEBUG_ATTRIBUTES = 0xFF
"""TD attributes, the byte of untrusted debugging: none may be set."""
MIGRATABLE_ATTRIBUTE = 1 << 29
"""TD attributes, bit 29."""
GRACE_SECONDS = 100 * 365 * 86400
"""A status that the run admits is admitted whatever its age: `evaluation` and the status itself are the policy's."""
REGISTERS = ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3")
_MESSAGES = {
    "debug": Code.DEBUG,
    "migration": Code.MIGRATABLE,
    "expired": Code.EXPIRED,
    "revoked": Code.REVOKED,
    "not yet valid": Code.NOT_YET_VALID,
    "status": Code.TCB_STATUS,
    "tcb": Code.TCB,
    "decode": Code.MALFORMED,
    "parse": Code.MALFORMED,
    "signature": Code.SIGNATURE,
    "mismatch": Code.SIGNATURE,
    "cert": Code.CHAIN,
}
"""Words of dcap-qvl's sentences with their codes, in the order in which they are tried."""


@deny_unexpected
def verify(evidence: Evidence, now: int, statuses: Sequence[str] = ("UpToDate",), root: bytes | None = None) -> Claims:
    """Verify evidence. Raises AttestationError. `statuses`: TCB statuses that pass; `root`: another root (DER) than
    Intel's, for tests."""
    try:
        collateral = dcap_qvl.QuoteCollateralV3.from_json(evidence.collateral.decode())
    except Exception as error:
        raise AttestationError(Code.MALFORMED, f"collateral does not parse: {error}") from error
    policy = dcap_qvl.QuotePolicy.strict(now).allow_dynamic_platform(True).allow_cached_keys(True).allow_smt(True)
    for status in set(statuses) - {"UpToDate"}:
        policy = policy.allow_status(status).platform_grace_period(GRACE_SECONDS).qe_grace_period(GRACE_SECONDS)
    try:
        verifier = dcap_qvl.QuoteVerifier(root) if root else dcap_qvl.QuoteVerifier()
        result = verifier.verify_with_policy(evidence.blob, collateral, now, policy)
        return _claims(json.loads(result.to_json()))
    except AttestationError:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is no Exception
        sentence = str(error).removeprefix("Verification failed: ")
        if _code(sentence) == Code.CHAIN and _listed_as_revoked(evidence.blob, collateral):
            raise AttestationError(Code.REVOKED, "a certificate of the quote's chain is on its revocation list") from error
        raise AttestationError(_code(sentence), sentence) from error


def _listed_as_revoked(blob: bytes, collateral: Any) -> bool:
    """Return whether the blob is listed as revoked, to choose the code only: the library reports a failed chain without a
    reason."""
    try:
        serials = {c.serial_number for c in load_certificates([dcap_qvl.Quote.parse(blob).cert_chain_pem_bytes() or b""])}
        lists = [x509.load_der_x509_crl(raw) for raw in (collateral.pck_crl, collateral.root_ca_crl)]
    except (AttestationError, ValueError):
        return False
    return any(entry.serial_number in serials for crl in lists for entry in crl)


def _code(sentence: str) -> Code:
    lower = sentence.lower()
    return next((code for words, code in _MESSAGES.items() if words in lower), Code.MALFORMED)


def _claims(verified: dict[str, Any]) -> Claims:
    if verified["tee_type"] != TDX_TEE_TYPE:
        raise AttestationError(Code.KIND, "an SGX quote, not a TDX one")
    body = _innermost(next(iter(verified["report"].values())))
    attributes = int.from_bytes(bytes.fromhex(body["td_attributes"]), "little")
    ends = min(verified["earliest_expiration_date"], verified["qe_iden_earliest_expiration_date"])
    advisories = verified["tcb"]["advisory_ids"]
    return Claims(
        kind=KIND,
        measurement=tuple(body[register].lower() for register in REGISTERS),
        report_data=bytes.fromhex(body["report_data"]),
        valid_until=int(ends),
        tcb_status=verified["tcb"]["status"],
        tcb={"evaluation": int(verified["tcb"]["eval_data_number"])},
        debug=bool(attributes & DEBUG_ATTRIBUTES),
        migratable=bool(attributes & MIGRATABLE_ATTRIBUTE),
        product="TDX",
        version=int(verified["header"]["version"]),
        notes=(f"advisories: {', '.join(advisories)}",) if advisories else (),
    )


def registers(blob: bytes) -> tuple[str, ...]:
    """Return MRTD and RTMRs of a quote, not verified: for the operator who writes a policy. Raises AttestationError."""
    try:
        report = dcap_qvl.Quote.parse(blob).report
        return tuple(getattr(report, register).hex() for register in REGISTERS)
    except (AttributeError, ValueError) as error:
        raise AttestationError(Code.MALFORMED, f"not a TDX quote: {error}") from error


def _innermost(report: dict[str, Any]) -> dict[str, Any]:
    """Return the 1.0 body: TD 1.5 reports wrap it."""
    while "base" in report:
        report = report["base"]
    return report
