"""Tests of every bound of a statement from both sides: a value at the bound opens, a value past it is rejected with one
sentence."""

from typing import Any

import numpy as np
import pytest

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, author, open_envelope, parse, seal, unpacked, unsigned
from tests.helpers import digest, identity
from tests.sentences import Message

RUN = digest("run")
D = digest("a digest")
LAST = limits.ROUNDS - 1
PEERS = [identity(number).peer for number in range(limits.HOSTS + 1)]
HUGE = float(np.finfo(np.float32).max)

BAD = pb.REASON_MALFORMED
LARGE = pb.REASON_OVERSIZE
WORDS = "x" * limits.TEXT_CHARACTERS


def says(*values: object) -> Message:
    """Return the sentence of a refusal that names these values."""
    return Message("protocol/wire/messages.py", *values)


ROUND, FINDINGS, STAGES = says("round number"), says("findings"), says("stage range")


def hosts(count: int, **changes: Any) -> list[pb.Host]:
    return [pb.Host(**{"peer": peer, "stage_count": 1, **changes}) for peer in PEERS[:count]]


def findings(count: int, **changes: Any) -> list[pb.Finding]:
    return [pb.Finding(**{"index": index, "reason": pb.REASON_RATE, **changes}) for index in range(count)]


def digests(count: int) -> list[bytes]:
    return sorted(digest(number) for number in range(count))


REASON_OF_NOBODY: Any = max(pb.Reason.values()) + 1
REFUSALS = limits.REFUSALS_PER_ROUND + 2 * limits.CLUSTERS + limits.CLAIMS

LARGEST: dict[pb.Kind, Any] = {
    pb.KIND_PEER_RECORD: pb.PeerRecord(
        address=WORDS,
        certificate=bytes(limits.CERTIFICATE_BYTES),
        dht_addresses=[WORDS] * limits.DHT_ADDRESSES,
        name="é" * limits.TEXT_CHARACTERS,
        version=WORDS,
    ),
    pb.KIND_CLAIM: pb.Claim(round=LAST, head=D, state=D, cluster=D, account=bytes(20)),
    pb.KIND_CLUSTER: pb.Cluster(
        round=LAST,
        head=D,
        hosts=hosts(limits.HOSTS, first_stage=limits.STAGES - 1, stage_count=limits.STAGES, copy=limits.HOSTS - 1),
    ),
    pb.KIND_CONTRIBUTION: pb.Contribution(
        round=LAST,
        head=D,
        loss=limits.LOSS,
        leaves=D,
        base_state=D,
        norm=255,
        effective_rank=HUGE,
        error=HUGE,
        attestation=D,
        holders=PEERS[: limits.HOLDERS],
        audit=D,
        size=limits.BLOB_BYTES,
    ),
    pb.KIND_BALLOT: pb.Ballot(round=LAST, head=D, contributions=digests(limits.CLUSTERS), seconds=HUGE),
    pb.KIND_RECEIPT: pb.Receipt(
        round=LAST,
        ballot=D,
        accepted=bytes(limits.CLUSTERS // 8),
        findings=findings(9, reason=max(pb.Reason.values()), stage=limits.STAGES - 1, score=-(1 << 31)),
        scores=D,
        scored=range(limits.FINDINGS - 9),
        score=[-(1 << 31)] * (limits.FINDINGS - 9),
        measured=bytes(limits.CLUSTERS // 8),
    ),
    pb.KIND_COMMIT: pb.Commit(
        round=LAST,
        previous=D,
        roster=[pb.Member()] * limits.CLUSTERS,
        attested=[pb.Attestation()] * limits.ATTESTATIONS,
        refusals=[pb.Exclusion()] * REFUSALS,
    ),
    pb.KIND_STATE_REPORT: pb.StateReport(round=LAST, head=D, state=D, evaluated=True, evaluation_loss=limits.LOSS),
    pb.KIND_LEAVE: pb.Leave(round=LAST, head=D),
    pb.KIND_HEARTBEAT: pb.Heartbeat(round=LAST, head=D, loss=limits.LOSS, tokens_per_second=HUGE),
    pb.KIND_EVIDENCE: pb.BoundEvidence(
        key=D, run=D, nonce=D, evidence=pb.Evidence(kind=WORDS, blob=bytes(limits.EVIDENCE_BLOB_BYTES))
    ),
    pb.KIND_CALL: pb.Call(certificate=D),
}
SMALLEST: dict[pb.Kind, Any] = {
    pb.KIND_PEER_RECORD: pb.PeerRecord(),
    pb.KIND_CLAIM: pb.Claim(round=1),
    pb.KIND_CLUSTER: pb.Cluster(round=1, hosts=hosts(1)),
    pb.KIND_CONTRIBUTION: pb.Contribution(round=1, leaves=D, base_state=D, size=1),
    pb.KIND_BALLOT: pb.Ballot(round=1),
    pb.KIND_RECEIPT: pb.Receipt(ballot=D),
    pb.KIND_COMMIT: pb.Commit(),
    pb.KIND_STATE_REPORT: pb.StateReport(round=1, state=D),
    pb.KIND_LEAVE: pb.Leave(round=1),
    pb.KIND_HEARTBEAT: pb.Heartbeat(),
    pb.KIND_EVIDENCE: pb.BoundEvidence(key=D, run=D, nonce=D),
    pb.KIND_CALL: pb.Call(certificate=D),
}
PAST: list[tuple[pb.Kind, dict[str, Any], pb.Reason, str]] = [
    *((pb.KIND_PEER_RECORD, {what: WORDS + "x"}, BAD, says(what)) for what in ("address", "name")),
    *((pb.KIND_PEER_RECORD, {what: "a\nb"}, BAD, says(what)) for what in ("address", "version")),
    (pb.KIND_PEER_RECORD, {"dht_addresses": ["x", WORDS + "x"]}, BAD, says("DHT address")),
    (pb.KIND_PEER_RECORD, {"dht_addresses": ["x", "\0"]}, BAD, says("DHT address")),
    (pb.KIND_PEER_RECORD, {"certificate": bytes(limits.CERTIFICATE_BYTES + 1)}, LARGE, says("certificate")),
    (pb.KIND_PEER_RECORD, {"dht_addresses": ["x"] * (limits.DHT_ADDRESSES + 1)}, LARGE, says("DHT addresses")),
    (pb.KIND_CLAIM, {"account": bytes(19)}, BAD, says("account")),
    (pb.KIND_CLAIM, {"account": bytes(21)}, BAD, says("account")),
    (pb.KIND_CLAIM, {"account": bytes(1)}, BAD, says("account")),
    (pb.KIND_CLUSTER, {"hosts": []}, LARGE, says("hosts")),
    (pb.KIND_CLUSTER, {"hosts": hosts(limits.HOSTS + 1)}, LARGE, says("hosts")),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, peer="nobody")}, BAD, says("host")),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, attestation=pb.Attestation())}, BAD, says("attestations")),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, stage_count=0)}, BAD, STAGES),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, stage_count=limits.STAGES + 1)}, BAD, STAGES),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, first_stage=limits.STAGES)}, BAD, STAGES),
    (pb.KIND_CLUSTER, {"hosts": hosts(1, copy=limits.HOSTS)}, BAD, says("copy")),
    (pb.KIND_CLUSTER, {"hosts": hosts(2) + hosts(1, copy=1)}, BAD, says("twice")),
    (pb.KIND_CLUSTER, {"hosts": hosts(2, first_stage=1) * 2}, BAD, says("twice")),
    (pb.KIND_CONTRIBUTION, {"norm": 256}, BAD, says("norm code")),
    (pb.KIND_CONTRIBUTION, {"size": 0}, LARGE, says("payload bytes")),
    (pb.KIND_CONTRIBUTION, {"size": limits.BLOB_BYTES + 1}, LARGE, says("payload bytes")),
    (pb.KIND_CONTRIBUTION, {"holders": PEERS[: limits.HOLDERS + 1]}, LARGE, says("relays")),
    (pb.KIND_CONTRIBUTION, {"holders": [PEERS[0], "nobody"]}, BAD, says("relay")),
    (pb.KIND_BALLOT, {"contributions": digests(limits.CLUSTERS + 1)}, LARGE, says("contributions")),
    (pb.KIND_BALLOT, {"contributions": [D, b"short"]}, BAD, says("contribution digest")),
    (pb.KIND_BALLOT, {"contributions": [D, b""]}, BAD, says("contribution digest")),
    (pb.KIND_BALLOT, {"contributions": [D, D]}, BAD, says("contributions")),
    (pb.KIND_BALLOT, {"contributions": digests(2)[::-1]}, BAD, says("contributions")),
    (pb.KIND_RECEIPT, {"accepted": bytes(limits.CLUSTERS // 8 + 1)}, LARGE, says("bits")),
    (pb.KIND_RECEIPT, {"measured": bytes(limits.CLUSTERS // 8 + 1)}, LARGE, says("bits")),
    (pb.KIND_RECEIPT, {"findings": findings(limits.FINDINGS - 6)}, LARGE, says("findings")),
    (pb.KIND_RECEIPT, {"findings": findings(limits.FINDINGS + 1), "scored": [], "score": []}, LARGE, says("findings")),
    (pb.KIND_RECEIPT, {"findings": [pb.Finding(index=1, reason=pb.REASON_RATE), *findings(1)]}, BAD, FINDINGS),
    (pb.KIND_RECEIPT, {"findings": findings(2, index=5)}, BAD, FINDINGS),
    (pb.KIND_RECEIPT, {"scored": [2, 1], "score": [0, 0]}, BAD, FINDINGS),
    (pb.KIND_RECEIPT, {"scored": [1, 1], "score": [0, 0]}, BAD, FINDINGS),
    (pb.KIND_RECEIPT, {"scored": [1, 2], "score": [0]}, BAD, says("score")),
    (pb.KIND_RECEIPT, {"scored": [1], "score": [0, 0]}, BAD, says("score")),
    (pb.KIND_RECEIPT, {"findings": findings(1, reason=0)}, BAD, says("reason")),
    (pb.KIND_RECEIPT, {"findings": findings(1, reason=max(pb.Reason.values()) + 1)}, BAD, says("reason")),
    (pb.KIND_RECEIPT, {"findings": findings(1, stage=limits.STAGES)}, BAD, says("stage")),
    (pb.KIND_COMMIT, {"roster": [pb.Member()] * (limits.CLUSTERS + 1)}, LARGE, says("roster")),
    (pb.KIND_COMMIT, {"attested": [pb.Attestation()] * (limits.ATTESTATIONS + 1)}, LARGE, says("attestations")),
    (pb.KIND_COMMIT, {"refusals": [pb.Exclusion()] * (REFUSALS + 1)}, LARGE, says("refusals")),
    (pb.KIND_COMMIT, {"refusals": [pb.Exclusion(reason=REASON_OF_NOBODY)]}, BAD, says("refusal")),
    (pb.KIND_STATE_REPORT, {"evaluated": False}, BAD, says("evaluation loss")),
    (
        pb.KIND_EVIDENCE,
        {"evidence": pb.Evidence(blob=bytes(limits.EVIDENCE_BLOB_BYTES + 1))},
        pb.REASON_ATTESTATION,
        Message("protocol/wire/attestation.py", "oversize", 32769, 32768),
    ),
]
ROUNDS = [kind for kind, body in LARGEST.items() if "round" in body.DESCRIPTOR.fields_by_name]
DIGESTS: list[tuple[pb.Kind, str, str, bool]] = [
    *((kind, "head", "head", kind == pb.KIND_HEARTBEAT) for kind in ROUNDS if kind not in (pb.KIND_RECEIPT, pb.KIND_COMMIT)),
    (pb.KIND_CLAIM, "state", "state", True),
    (pb.KIND_CLAIM, "cluster", "cluster", True),
    (pb.KIND_CONTRIBUTION, "leaves", "payload index", False),
    (pb.KIND_CONTRIBUTION, "base_state", "base state", False),
    (pb.KIND_CONTRIBUTION, "attestation", "attestation", True),
    (pb.KIND_CONTRIBUTION, "audit", "audit root", True),
    (pb.KIND_RECEIPT, "ballot", "ballot", False),
    (pb.KIND_RECEIPT, "scores", "scores", True),
    (pb.KIND_STATE_REPORT, "state", "state", False),
    (pb.KIND_COMMIT, "previous", "previous commit", False),
    (pb.KIND_EVIDENCE, "key", "key", False),
    (pb.KIND_EVIDENCE, "run", "run id", False),
    (pb.KIND_EVIDENCE, "nonce", "nonce", False),
    (pb.KIND_CALL, "certificate", "certificate digest", False),
]
NUMBERS: list[tuple[pb.Kind, str, str, float]] = [
    (pb.KIND_CONTRIBUTION, "loss", "loss", limits.LOSS),
    (pb.KIND_CONTRIBUTION, "effective_rank", "effective rank", np.inf),
    (pb.KIND_CONTRIBUTION, "error", "relative error", np.inf),
    (pb.KIND_BALLOT, "seconds", "seconds", np.inf),
    (pb.KIND_STATE_REPORT, "evaluation_loss", "evaluation loss", limits.LOSS),
    (pb.KIND_HEARTBEAT, "loss", "loss", limits.LOSS),
    (pb.KIND_HEARTBEAT, "tokens_per_second", "tokens per second", np.inf),
]
BYTES = {
    pb.KIND_PEER_RECORD: limits.RECORD_BYTES,
    pb.KIND_CLAIM: limits.CLAIM_BYTES,
    pb.KIND_CLUSTER: limits.CLUSTER_BYTES,
    pb.KIND_CONTRIBUTION: limits.CONTRIBUTION_BYTES,
    pb.KIND_BALLOT: limits.BALLOT_BYTES,
    pb.KIND_RECEIPT: limits.RECEIPT_BYTES,
    pb.KIND_COMMIT: limits.COMMIT_BYTES,
    pb.KIND_STATE_REPORT: limits.REPORT_BYTES,
    pb.KIND_LEAVE: limits.LEAVE_BYTES,
    pb.KIND_HEARTBEAT: limits.HEARTBEAT_BYTES,
    pb.KIND_EVIDENCE: limits.EVIDENCE_BYTES,
    pb.KIND_CALL: limits.CALL_BYTES,
}


def opened(kind: pb.Kind, body: Any) -> Statement:
    return open_envelope(seal(identity(1), kind, RUN, body).envelope, RUN, (kind,))


def refusal(envelope: pb.Envelope | bytes, *kinds: pb.Kind) -> tuple[pb.Reason, str]:
    with pytest.raises(RemoteError) as caught:
        open_envelope(envelope, RUN, kinds)
    return caught.value.reason, caught.value.detail


def refused(kind: pb.Kind, body: Any) -> tuple[pb.Reason, str]:
    return refusal(seal(identity(1), kind, RUN, body).envelope, kind)


def changed(body: Any, /, **fields: Any) -> Any:
    """Return a copy with these fields replaced."""
    copy = type(body).FromString(body.SerializeToString())
    for name in fields:
        copy.ClearField(name)
    copy.MergeFrom(type(body)(**fields))
    return copy


def heartbeat(**changes: Any) -> pb.Envelope:
    return changed(seal(identity(1), pb.KIND_HEARTBEAT, RUN, pb.Heartbeat(sequence=1)).envelope, **changes)


@pytest.mark.parametrize("bodies", [LARGEST, SMALLEST], ids=["largest", "smallest"])
@pytest.mark.parametrize("kind", BYTES, ids=pb.Kind.Name)
def test_what_lies_on_every_bound_opens(kind: pb.Kind, bodies: dict[pb.Kind, Any]):
    sealed = seal(identity(1), kind, RUN, bodies[kind])
    assert open_envelope(sealed.envelope, RUN, (kind,)) == sealed


@pytest.mark.parametrize(("kind", "change", "reason", "sentence"), PAST)
def test_what_lies_past_a_bound_is_refused(kind: pb.Kind, change: dict[str, Any], reason: pb.Reason, sentence: str):
    assert refused(kind, changed(LARGEST[kind], **change)) == (reason, sentence)


@pytest.mark.parametrize("kind", ROUNDS, ids=pb.Kind.Name)
def test_no_round_has_a_larger_number(kind: pb.Kind):
    assert refused(kind, changed(LARGEST[kind], round=limits.ROUNDS)) == (BAD, ROUND)


@pytest.mark.parametrize(("kind", "field", "what", "optional"), DIGESTS)
def test_a_digest_has_32_bytes(kind: pb.Kind, field: str, what: str, optional: bool):
    for length in (1, 31, 33):
        assert refused(kind, changed(LARGEST[kind], **{field: bytes(length)})) == (BAD, says(what, 32))
    missing = changed(LARGEST[kind], **{field: b""})
    if optional:
        assert opened(kind, missing).body == missing
    else:
        assert refused(kind, missing) == (BAD, says(what, 32))


@pytest.mark.parametrize("kind", [pb.KIND_CLAIM, pb.KIND_CLUSTER, pb.KIND_LEAVE, pb.KIND_STATE_REPORT], ids=pb.Kind.Name)
def test_only_before_the_first_commit_there_is_no_head(kind: pb.Kind):
    assert refused(kind, changed(SMALLEST[kind], round=2)) == (BAD, says("head"))


def test_only_the_first_commit_follows_none():
    assert refused(pb.KIND_COMMIT, pb.Commit(round=1)) == (BAD, says("previous commit"))


@pytest.mark.parametrize(("kind", "field", "what", "largest"), NUMBERS)
def test_a_number_is_finite_and_inside_its_bounds(kind: pb.Kind, field: str, what: str, largest: float):
    for value in (np.nan, np.inf, -np.inf):
        assert refused(kind, changed(LARGEST[kind], **{field: value})) == (pb.REASON_NON_FINITE, says(what))
    for value in (-1e-6, np.nextafter(np.float32(largest), np.float32(np.inf))):
        if np.isfinite(value):
            assert refused(kind, changed(LARGEST[kind], **{field: value})) == (BAD, says(what))


@pytest.mark.parametrize(("kind", "largest"), BYTES.items())
def test_a_body_has_its_kind_s_bytes_at_most(kind: pb.Kind, largest: int):
    parsed = type(LARGEST[kind]).__name__
    assert refused(kind, bytes(largest)) == (BAD, says(parsed))
    assert refused(kind, bytes(largest + 1)) == (LARGE, says(largest + 1, largest))


def test_a_statement_opens_only_where_its_kind_belongs():
    envelope = heartbeat()
    assert refusal(envelope, pb.KIND_CLAIM) == (BAD, says(pb.KIND_HEARTBEAT))
    run_file = seal(identity(1), pb.KIND_MANIFEST, RUN, b"{}").envelope
    assert refusal(run_file, pb.KIND_MANIFEST) == (BAD, says(pb.KIND_MANIFEST))


@pytest.mark.parametrize("spoilt", [{"key": bytes(31)}, {"key": bytes(33)}, {"signature": bytes(63)}, {"signature": bytes(65)}])
def test_keys_and_signatures_have_their_length(spoilt: dict[str, bytes]):
    assert refusal(heartbeat(**spoilt), pb.KIND_HEARTBEAT) == (pb.REASON_BAD_SIGNATURE, says("length"))


@pytest.mark.parametrize("spoilt", [{"key": identity(2).key}, {"signature": bytes(64)}, {"body": b""}])
def test_a_signature_is_one_key_s_over_one_body(spoilt: dict[str, bytes]):
    assert refusal(heartbeat(**spoilt), pb.KIND_HEARTBEAT) == (pb.REASON_BAD_SIGNATURE, says("signature"))


def test_bytes_that_are_no_envelope_are_refused():
    assert refusal(b"\0", pb.KIND_HEARTBEAT) == (BAD, says("Envelope"))


@pytest.mark.parametrize("raw", [b"\xfa\x06\x03abc", b"\x10\x01\x08\x01", b"\x08\x00"], ids=["unknown", "order", "default"])
def test_a_body_has_one_form(raw: bytes):
    sentence = says("Heartbeat")
    assert refused(pb.KIND_HEARTBEAT, raw) == (BAD, sentence)
    with pytest.raises(RemoteError) as caught:
        parse(pb.Heartbeat, raw)
    assert caught.value.detail == sentence


def test_who_has_yet_to_sign_says_already_what_will_be_signed():
    signed = seal(identity(1), pb.KIND_LEAVE, RUN, pb.Leave(serial=3))
    waiting = unsigned(pb.KIND_LEAVE, identity(1).peer, pb.Leave(serial=3))
    assert waiting.digest == signed.digest
    assert waiting == Statement(signed.kind, signed.peer, signed.body, changed(signed.envelope, signature=b""))


def test_a_commit_names_the_signers_that_it_holds():
    commit = pb.Commit(signers=[identity(1).key, identity(2).key])
    leave = seal(identity(2), pb.KIND_LEAVE, RUN, pb.Leave(round=1)).envelope
    packed = pb.Signed(signer=1, body=leave.body, signature=leave.signature)
    assert author(commit, packed) == identity(2).key
    assert unpacked(commit, pb.KIND_LEAVE, packed) == leave
    with pytest.raises(RemoteError) as caught:
        author(commit, pb.Signed(signer=2))
    assert (caught.value.reason, caught.value.detail) == (BAD, says(2, 2))
