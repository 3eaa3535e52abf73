"""Signed statements: sealing, and opening with every bound checked.

`open_envelope` is the only entrance. Its result has a valid signature for this run, is in its one canonical form,
and has all fields within their bounds. Everything else raises RemoteError with the reason for the record; no bytes
raise any other error.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple

from google.protobuf.message import DecodeError, Message
from typing_extensions import TypeVar

from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity, sha256, verify
from dilocox.protocol.errors import DilocoxError, RemoteError
from dilocox.protocol.ids import JoinLink, key_of_peer, peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.attestation import Evidence

__all__ = ["Statement", "author", "canonical", "open_envelope", "parse", "seal", "stages_in", "unpacked", "unsigned"]

Body = TypeVar("Body", covariant=True, default=Any)
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Statement(Generic[Body]):
    """A verified statement. `body` is the parsed message; never mutate it."""

    kind: pb.Kind
    peer: str
    body: Body
    envelope: pb.Envelope

    @cached_property
    def digest(self) -> bytes:
        """Return SHA-256 of the signer's key and the signed body: other statements refer to it. The same body of another
        signer is another statement."""
        return sha256(self.envelope.key, self.envelope.body)

    @cached_property
    def signing(self) -> bytes:
        """SHA-256 of key, body and signature: of a body its signer can make many signatures, and what is drawn from one is of no
        other."""
        return sha256(self.digest, self.envelope.signature)


def canonical(message: Message) -> bytes:
    """The one form in which a message is signed and hashed."""
    return message.SerializeToString(deterministic=True)


def seal(identity: Identity, kind: pb.Kind, run_id: bytes, body: Any) -> Statement[Any]:
    """Sign a message (or, for the manifest, raw bytes) for this run."""
    raw = body if isinstance(body, bytes) else canonical(body)
    signature = identity.sign(kind, run_id, raw)
    envelope = pb.Envelope(kind=kind, key=identity.key, body=raw, signature=signature)
    return Statement(kind, identity.peer, body, envelope)


def unsigned(kind: pb.Kind, peer: str, body: Any) -> Statement[Any]:
    """A statement that its author has yet to sign: its digest is already the one it will have."""
    return Statement(kind, peer, body, pb.Envelope(kind=kind, key=key_of_peer(peer), body=canonical(body)))


def open_envelope(envelope: pb.Envelope | bytes, run_id: bytes, kinds: Iterable[int]) -> Statement[Any]:
    """Verify and parse a statement of one of `kinds`. Raises RemoteError, whatever the input."""
    parsed: pb.Envelope = _from_bytes(pb.Envelope, envelope) if isinstance(envelope, bytes) else envelope
    kind = parsed.kind
    if kind not in kinds or kind not in _KINDS:
        raise RemoteError(pb.REASON_MALFORMED, f"a statement of kind {kind} is not allowed here")
    row = _KINDS[kind]
    if len(parsed.body) > row.largest:
        raise RemoteError(pb.REASON_OVERSIZE, f"{len(parsed.body)} bytes; the limit for its kind is {row.largest}")
    if len(parsed.key) != 32 or len(parsed.signature) != 64:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "key or signature has the wrong length")
    if not verify(parsed.key, parsed.signature, kind, run_id, parsed.body):
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "the signature is not this key's over this statement in this run")
    body = parse(row.body, parsed.body)
    row.check(body)
    bare = pb.Envelope(kind=kind, key=parsed.key, body=parsed.body, signature=parsed.signature)  # and no bytes beside these
    return Statement(kind, peer_id(parsed.key), body, bare)


def author(commit: pb.Commit, signed: pb.Signed) -> bytes:
    """Return the key that signed this statement of a commit. Raises RemoteError if the commit does not contain it."""
    if signed.signer >= len(commit.signers):
        raise RemoteError(
            pb.REASON_MALFORMED, f"statement of signer {signed.signer}, but the commit has {len(commit.signers)} signers"
        )
    return commit.signers[signed.signer]


def unpacked(commit: pb.Commit, kind: pb.Kind, signed: pb.Signed) -> pb.Envelope:
    """Return the envelope in which this statement of a commit arrived. Raises RemoteError if the commit does not contain
    its key."""
    return pb.Envelope(kind=kind, key=author(commit, signed), body=signed.body, signature=signed.signature)


def parse(kind: type[M], raw: bytes) -> M:
    """Return a message in canonical form. Raises RemoteError, also for unknown fields: they would be bytes that no rule
    judges."""
    message = _from_bytes(kind, raw)
    message.DiscardUnknownFields()
    if canonical(message) != raw:
        raise RemoteError(
            pb.REASON_MALFORMED, f"not the canonical form of its {kind.__name__}: unknown fields, or another order"
        )
    return message


def stages_in(raw: bytes) -> list[bytes]:
    """Return the digests of a state's stages, in order, from the list under its root. A root alone does not prove that
    such a list exists. Raises RemoteError."""
    digests = list(parse(pb.StageStates, raw).digests)
    for digest in digests:
        _check_digest(digest, "a stage of a state")
    return digests


def _from_bytes(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except (DecodeError, ValueError, RecursionError) as error:
        raise RemoteError(pb.REASON_MALFORMED, f"does not parse as {kind.__name__}") from error


def _require(condition: bool, detail: str, reason: pb.Reason = pb.REASON_MALFORMED) -> None:
    if not condition:
        raise RemoteError(reason, detail)


def _check_digest(value: bytes, what: str, optional: bool = False) -> None:
    _require(len(value) == 32 or (optional and not value), f"{what} is not 32 bytes")


def _check_number(value: float, what: str, largest: float = math.inf) -> None:
    _require(math.isfinite(value), f"{what} is not finite", pb.REASON_NON_FINITE)
    _require(0 <= value <= largest, f"{what} is outside its bounds")


def _check_round(body: Any) -> None:
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_digest(body.head, "head", optional=body.round <= 1)


def _check_peer(value: str, what: str) -> None:
    try:
        key_of_peer(value)
    except ValueError as error:
        raise RemoteError(pb.REASON_MALFORMED, f"{what} is not a peer id") from error


def _check_text(value: str, what: str) -> None:
    _require(len(value) <= limits.TEXT_CHARACTERS and value.isprintable(), f"{what} is too long or not printable")


def _check_peer_record(body: pb.PeerRecord) -> None:
    for text, what in ((body.address, "address"), (body.name, "name"), (body.version, "version")):
        _check_text(text, what)
    _require(len(body.certificate) <= limits.CERTIFICATE_BYTES, "certificate too large", pb.REASON_OVERSIZE)
    _require(len(body.dht_addresses) <= limits.DHT_ADDRESSES, "too many DHT addresses", pb.REASON_OVERSIZE)
    for address in body.dht_addresses:
        _check_text(address, "DHT address")
    _require(len(body.elsewhere) <= limits.COORDINATORS, "too many coordinators", pb.REASON_OVERSIZE)
    for other in body.elsewhere:
        _check_text(other.address, "address")
        _check_digest(other.certificate, "certificate")


def _check_claim(body: pb.Claim) -> None:
    _check_round(body)
    _check_digest(body.state, "state", optional=True)
    _check_digest(body.cluster, "cluster", optional=True)
    _require(len(body.account) in (0, 20), "the account is not 20 bytes")


def _check_cluster(body: pb.Cluster) -> None:
    _check_round(body)
    _require(0 < len(body.hosts) <= limits.HOSTS, "too many hosts, or none", pb.REASON_OVERSIZE)
    for host in body.hosts:
        _check_peer(host.peer, "host")
        _require(not host.HasField("attestation"), "a layout contains no attestations")
        _require(0 < host.stage_count <= limits.STAGES and host.first_stage < limits.STAGES, "stage range out of bounds")
        _require(host.copy < limits.HOSTS, "copy out of bounds")
    named = {(host.peer, host.first_stage) for host in body.hosts}
    _require(len(named) == len(body.hosts), "a layout names a host twice for a stage")


def _check_contribution(body: pb.Contribution) -> None:
    _check_round(body)
    for value, what in ((body.leaves, "payload index"), (body.base_state, "base state")):
        _check_digest(value, what)
    for value, what in ((body.attestation, "attestation"), (body.audit, "audit root"), (body.shares, "shares")):
        _check_digest(value, what, optional=True)
    _check_number(body.loss, "loss", limits.LOSS)
    _check_number(body.effective_rank, "effective rank")
    _check_number(body.error, "relative error")
    _require(body.norm <= 255, "the norm code is not 8 bits")
    _require(0 < body.size <= limits.BLOB_BYTES, "payload bytes out of bounds", pb.REASON_OVERSIZE)
    _require(len(body.holders) <= limits.HOLDERS, "too many relays", pb.REASON_OVERSIZE)
    for peer in body.holders:
        _check_peer(peer, "relay")


def _check_ballot(body: pb.Ballot) -> None:
    _check_round(body)
    _require(len(body.contributions) <= limits.CLUSTERS, "too many contributions", pb.REASON_OVERSIZE)
    for digest in body.contributions:
        _check_digest(digest, "contribution digest")
    _require(list(body.contributions) == sorted(set(body.contributions)), "contributions repeat or are not in order")
    _check_number(body.seconds, "seconds")


_REASONS = frozenset(pb.Reason.values())
_VERDICTS = frozenset(pb.AuditVerdict.values())


def _check_receipt(body: pb.Receipt) -> None:
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_digest(body.ballot, "ballot")
    _check_digest(body.scores, "scores", optional=True)
    _require(max(len(body.accepted), len(body.measured)) <= limits.CLUSTERS // 8, "too many bits", pb.REASON_OVERSIZE)
    _require(len(body.findings) + len(body.scored) <= limits.FINDINGS, "too many findings", pb.REASON_OVERSIZE)
    for indices in ([finding.index for finding in body.findings], list(body.scored)):
        _require(indices == sorted(set(indices)), "findings repeat or are not in order")
    _require(len(body.score) == len(body.scored), "it must score each contribution that it was drawn for")
    _require(len(body.audits) <= limits.AUDITS_TOLD, "too many audits", pb.REASON_OVERSIZE)
    _require(len(body.lacking) <= limits.SAMPLES_TOLD, "too many availability probes", pb.REASON_OVERSIZE)
    _require(list(body.lacking) == sorted(set(body.lacking)), "availability probes repeat or are not in order")
    audited = [result.index for result in body.audits]
    _require(audited == sorted(set(audited)), "audits repeat or are not in order")
    for result in body.audits:
        _require(result.verdict in _VERDICTS and bool(result.verdict), "unknown verdict")
        _check_number(result.distance, "distance", limits.AUDIT_DISTANCE)
    for finding in body.findings:
        _require(finding.reason in _REASONS and bool(finding.reason), "unknown reason")
        _require(finding.stage < limits.STAGES, "stage out of bounds")


def _check_state_report(body: pb.StateReport) -> None:
    _check_round(body)
    _check_digest(body.state, "state")
    _check_number(body.evaluation_loss, "evaluation loss", limits.LOSS)
    _require(body.evaluated or not body.evaluation_loss, "an evaluation loss that was not measured")


def _check_commit(body: pb.Commit) -> None:
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_digest(body.previous, "previous commit", optional=body.round == 0)
    _require(len(body.roster) <= limits.CLUSTERS, "roster too large", pb.REASON_OVERSIZE)
    _require(len(body.attested) <= limits.ATTESTATIONS, "too many attestations", pb.REASON_OVERSIZE)
    most = limits.REFUSALS_PER_ROUND + 2 * limits.CLUSTERS + limits.CLAIMS
    _require(len(body.refusals) <= most, "too many refusals", pb.REASON_OVERSIZE)
    _require(all(item.reason in _REASONS for item in body.refusals), "a refusal without a known reason")
    _check_digest(body.merit_root, "merit root", optional=True)
    _check_digest(body.data_root, "data root", optional=True)
    _require(len(body.merits) <= limits.ACCOUNTS, "too many accounts", pb.REASON_OVERSIZE)
    _require(all(len(item.account) == 20 for item in body.merits), "an account is not 20 bytes")


def _check_leave(body: pb.Leave) -> None:
    _check_round(body)


def _check_heartbeat(body: pb.Heartbeat) -> None:
    _check_digest(body.head, "head", optional=True)
    _require(body.round < limits.ROUNDS, "round number out of range")
    _check_number(body.loss, "loss", limits.LOSS)
    _check_number(body.tokens_per_second, "tokens per second")


def _check_evidence(body: pb.BoundEvidence) -> None:
    for value, what in ((body.key, "key"), (body.run, "run id"), (body.nonce, "nonce")):
        _check_digest(value, what)
    Evidence.from_message(body.evidence)


def _check_call(body: pb.Call) -> None:
    _check_digest(body.certificate, "certificate digest")


def _check_answer(body: pb.Answer) -> None:
    _check_digest(body.statement, "statement")
    _check_text(body.detail, "detail")
    _require(body.outcome in _OUTCOMES and body.reason in _REASONS, "unknown outcome or reason")
    _check_round(body)


def _check_held(body: pb.Held) -> None:
    _check_digest(body.blob, "blob")
    _require(body.round < limits.ROUNDS, "round number out of range")


def _check_appointment(body: pb.Appointment) -> None:
    _require(0 < body.term < limits.TERMS, "term out of range")
    _check_peer(body.coordinator, "coordinator")
    _require(body.round < limits.ROUNDS, "round number out of range")
    _require(len(body.head) == (32 if body.round else 0), "head is not 32 bytes, or not empty before the genesis commit")
    _require(len(body.state) in ((0, 32) if body.round else (0,)), "state is not 32 bytes, or is set before the genesis commit")


def _check_job(body: pb.Job) -> None:
    try:
        written = str(JoinLink.parse(body.link))
    except DilocoxError as error:
        raise RemoteError(pb.REASON_MALFORMED, "the link is not a join link") from error
    _require(written == body.link, "the link is not in its canonical form")  # people see it, and paste it into shells


def _check_offer(body: pb.Offer) -> None:
    _check_text(body.name, "name")
    _check_text(body.hours, "hours")
    _require(0 < body.devices <= limits.HOSTS, "devices out of bounds")
    _require(len(body.account) in (0, 20), "the account is not 20 bytes")
    if body.HasField("evidence"):
        _check_evidence(body.evidence)
    _require(len(body.lines) <= limits.LINES, "too many bandwidth measurements", pb.REASON_OVERSIZE)


def _check_line(body: pb.Line) -> None:
    _check_peer(body.peer, "peer")


_OUTCOMES = frozenset((pb.OUTCOME_ACCEPT, pb.OUTCOME_IGNORE, pb.OUTCOME_REJECT))


class _Kind(NamedTuple):
    body: type[Any]
    largest: int
    """Bytes of the body."""
    check: Callable[[Any], None]


_KINDS: Mapping[int, _Kind] = {
    pb.KIND_PEER_RECORD: _Kind(pb.PeerRecord, limits.RECORD_BYTES, _check_peer_record),
    pb.KIND_CLAIM: _Kind(pb.Claim, limits.CLAIM_BYTES, _check_claim),
    pb.KIND_CLUSTER: _Kind(pb.Cluster, limits.CLUSTER_BYTES, _check_cluster),
    pb.KIND_CONTRIBUTION: _Kind(pb.Contribution, limits.CONTRIBUTION_BYTES, _check_contribution),
    pb.KIND_BALLOT: _Kind(pb.Ballot, limits.BALLOT_BYTES, _check_ballot),
    pb.KIND_RECEIPT: _Kind(pb.Receipt, limits.RECEIPT_BYTES, _check_receipt),
    pb.KIND_COMMIT: _Kind(pb.Commit, limits.COMMIT_BYTES, _check_commit),
    pb.KIND_STATE_REPORT: _Kind(pb.StateReport, limits.REPORT_BYTES, _check_state_report),
    pb.KIND_LEAVE: _Kind(pb.Leave, limits.LEAVE_BYTES, _check_leave),
    pb.KIND_HEARTBEAT: _Kind(pb.Heartbeat, limits.HEARTBEAT_BYTES, _check_heartbeat),
    pb.KIND_EVIDENCE: _Kind(pb.BoundEvidence, limits.EVIDENCE_BYTES, _check_evidence),
    pb.KIND_CALL: _Kind(pb.Call, limits.CALL_BYTES, _check_call),
    pb.KIND_ANSWER: _Kind(pb.Answer, limits.ANSWER_BYTES, _check_answer),
    pb.KIND_HELD: _Kind(pb.Held, limits.HELD_BYTES, _check_held),
    pb.KIND_APPOINTMENT: _Kind(pb.Appointment, limits.APPOINTMENT_BYTES, _check_appointment),
    pb.KIND_JOB: _Kind(pb.Job, limits.JOB_BYTES, _check_job),
    pb.KIND_OFFER: _Kind(pb.Offer, limits.OFFER_BYTES, _check_offer),
    pb.KIND_LINE: _Kind(pb.Line, limits.LINE_BYTES, _check_line),
}
