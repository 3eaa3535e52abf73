"""Signed statements: sealing them, and opening them with every bound checked.

`open_envelope` is the only door: what it returns has a valid signature for this run and fields inside their bounds; what it cannot
return raises RemoteError with the reason it is recorded under. It never raises anything else, whatever the bytes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError

from dilocox.protocol import limits
from dilocox.protocol.attestation import Evidence
from dilocox.protocol.crypto import Identity, sha256, verify
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import peer_id
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["Statement", "open_envelope", "seal"]


@dataclass(frozen=True)
class Statement:
    """A verified statement. `body` is the parsed message; never mutate it."""

    kind: pb.Kind
    peer: str
    body: Any
    envelope: pb.Envelope

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the signed body: how other statements refer to this one."""
        return sha256(self.envelope.body)


_BODIES: dict[int, type[Any]] = {
    pb.KIND_PEER_RECORD: pb.PeerRecord,
    pb.KIND_CLAIM: pb.Claim,
    pb.KIND_CONTRIBUTION: pb.Contribution,
    pb.KIND_BALLOT: pb.Ballot,
    pb.KIND_RECEIPT: pb.Receipt,
    pb.KIND_COMMIT: pb.Commit,
    pb.KIND_STATE_REPORT: pb.StateReport,
    pb.KIND_LEAVE: pb.Leave,
    pb.KIND_HEARTBEAT: pb.Heartbeat,
    pb.KIND_EVIDENCE: pb.BoundEvidence,
}
_FROM_COORDINATOR = {pb.KIND_COMMIT: limits.MESSAGE_BYTES, pb.KIND_BALLOT: limits.STATEMENT_BYTES}
_SIZES = {pb.KIND_PEER_RECORD: limits.RECORD_BYTES, **_FROM_COORDINATOR}


def seal(identity: Identity, kind: pb.Kind, run_id: bytes, body: Any) -> Statement:
    """Sign a message (or, for the manifest, raw bytes) for this run."""
    raw = body if isinstance(body, bytes) else body.SerializeToString(deterministic=True)
    signature = identity.sign(kind, run_id, raw)
    envelope = pb.Envelope(kind=kind, key=identity.key, body=raw, signature=signature)
    return Statement(kind, identity.peer, body, envelope)


def open_envelope(envelope: pb.Envelope | bytes, run_id: bytes, kinds: Iterable[int]) -> Statement:
    """Verify and parse a statement of one of `kinds`. Raises RemoteError, whatever the input."""
    parsed: pb.Envelope = _parse(pb.Envelope, envelope) if isinstance(envelope, bytes) else envelope
    return _open(parsed, run_id, kinds)


def _open(envelope: pb.Envelope, run_id: bytes, kinds: Iterable[int]) -> Statement:
    kind = envelope.kind
    if kind not in kinds or kind not in _BODIES:
        raise RemoteError(pb.REASON_MALFORMED, f"a statement of kind {kind} does not belong here")
    limit = _SIZES.get(kind, limits.STATEMENT_BYTES)
    if len(envelope.body) > limit:
        raise RemoteError(pb.REASON_OVERSIZE, f"{len(envelope.body)} bytes; the limit for its kind is {limit}")
    if len(envelope.key) != 32 or len(envelope.signature) != 64:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "key or signature has the wrong length")
    if not verify(envelope.key, envelope.signature, kind, run_id, envelope.body):
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "the signature is not this key's over this statement in this run")
    body = _parse(_BODIES[kind], envelope.body)
    _CHECKS[kind](body)
    return Statement(kind, peer_id(envelope.key), body, envelope)


def _parse(kind: type[Any], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except (DecodeError, ValueError, RecursionError) as error:
        raise RemoteError(pb.REASON_MALFORMED, f"does not parse as {kind.__name__}") from error


def _require(condition: bool, detail: str, reason: pb.Reason = pb.REASON_MALFORMED) -> None:
    if not condition:
        raise RemoteError(reason, detail)


def _check_digest(value: bytes, what: str, optional: bool = False) -> None:
    _require(len(value) == 32 or (optional and not value), f"{what} is not 32 bytes")


def _check_number(value: float, what: str) -> None:
    _require(math.isfinite(value), f"{what} is not finite", pb.REASON_NON_FINITE)


def _check_round(body: Any) -> None:
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_digest(body.head, "head", optional=True)


def _check_text(value: str, what: str) -> None:
    _require(len(value) <= limits.TEXT_CHARACTERS and value.isprintable(), f"{what} is too long or not printable")


def _check_states(states: Any) -> None:
    stages = [state.stage for state in states]
    _require(len(stages) <= limits.STAGES and stages == sorted(set(stages)), "stages are not distinct and in order")
    for state in states:
        _check_digest(state.digest, "state digest")


def _check_peer_record(body: pb.PeerRecord) -> None:
    for text, what in ((body.address, "address"), (body.name, "name"), (body.version, "version")):
        _check_text(text, what)
    _require(len(body.certificate) <= limits.CERTIFICATE_BYTES, "certificate too large", pb.REASON_OVERSIZE)
    _require(len(body.dht_addresses) <= limits.DHT_ADDRESSES, "too many DHT addresses", pb.REASON_OVERSIZE)
    for address in body.dht_addresses:
        _check_text(address, "DHT address")


def _check_claim(body: pb.Claim) -> None:
    _check_round(body)
    _check_text(body.cluster, "cluster")
    _require(0 < body.stage_count <= limits.STAGES and body.first_stage < limits.STAGES, "stage range out of bounds")
    _check_states(body.states)
    claimed = list(range(body.first_stage, body.first_stage + body.stage_count))
    _require([state.stage for state in body.states] == claimed, "states do not match the claimed stages")


def _check_contribution(body: pb.Contribution) -> None:
    _check_round(body)
    _check_digest(body.head, "head")
    _check_text(body.cluster, "cluster")
    _check_number(body.loss, "loss")
    _require(body.loss >= 0, "loss is negative")
    _check_digest(body.attestation, "attestation", optional=True)
    stages = [payload.stage for payload in body.payloads]
    _require(0 < len(stages) <= limits.STAGES and stages == sorted(set(stages)), "stages are not distinct and in order")
    for payload in body.payloads:
        _check_digest(payload.base_state, "base state")
        _check_digest(payload.digest, "payload digest")
        _require(0 < payload.size <= limits.BLOB_BYTES, "payload size out of bounds", pb.REASON_OVERSIZE)
        _check_number(payload.norm, "norm")
        _check_number(payload.effective_rank, "effective rank")
        _check_number(payload.error, "relative error")
        measured = min(payload.norm, payload.effective_rank, payload.error)
        _require(measured >= 0, "norm, effective rank or relative error is negative")


def _check_ballot(body: pb.Ballot) -> None:
    _check_round(body)
    _require(len(body.contributions) <= limits.CLUSTERS * limits.STAGES, "too many contributions", pb.REASON_OVERSIZE)
    for digest in body.contributions:
        _check_digest(digest, "contribution digest")


def _check_receipt(body: pb.Receipt) -> None:
    _check_round(body)
    _check_digest(body.head, "head")
    digests = [verdict.contribution for verdict in body.verdicts]
    _require(len(digests) == len(set(digests)) <= limits.CLUSTERS, "verdicts repeat or are too many")
    for verdict in body.verdicts:
        _check_digest(verdict.contribution, "contribution digest")
        _require(verdict.reason in pb.Reason.values(), "unknown reason")


def _check_state_report(body: pb.StateReport) -> None:
    _check_round(body)
    _check_states(body.states)
    _check_number(body.evaluation_loss, "evaluation loss")


def _check_commit(body: pb.Commit) -> None:
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_digest(body.previous, "previous commit", optional=body.round == 0)
    _require(len(body.roster) <= limits.CLUSTERS, "roster too large", pb.REASON_OVERSIZE)
    _require(len(body.attested) <= limits.ATTESTATIONS, "too many attestations", pb.REASON_OVERSIZE)


def _check_leave(body: pb.Leave) -> None:
    _check_digest(body.head, "head", optional=True)


def _check_heartbeat(body: pb.Heartbeat) -> None:
    _check_digest(body.head, "head", optional=True)
    _check_number(body.loss, "loss")
    _check_number(body.tokens_per_second, "tokens per second")


def _check_evidence(body: pb.BoundEvidence) -> None:
    for value, what in ((body.key, "key"), (body.run, "run id"), (body.nonce, "nonce")):
        _check_digest(value, what)
    Evidence.from_message(body.evidence)


_CHECKS: dict[int, Callable[[Any], None]] = {
    pb.KIND_PEER_RECORD: _check_peer_record,
    pb.KIND_CLAIM: _check_claim,
    pb.KIND_CONTRIBUTION: _check_contribution,
    pb.KIND_BALLOT: _check_ballot,
    pb.KIND_RECEIPT: _check_receipt,
    pb.KIND_COMMIT: _check_commit,
    pb.KIND_STATE_REPORT: _check_state_report,
    pb.KIND_LEAVE: _check_leave,
    pb.KIND_HEARTBEAT: _check_heartbeat,
    pb.KIND_EVIDENCE: _check_evidence,
}
