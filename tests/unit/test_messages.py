import dataclasses

import pytest

from dilocox.protocol import limits
from dilocox.protocol.crypto import verify
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink, Way, key_of_peer, peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import open_envelope, seal
from tests.helpers import digest, identity

RUN = digest("run")


def heartbeat(number: int = 1):
    return seal(identity(number), pb.KIND_HEARTBEAT, RUN, pb.Heartbeat(sequence=1))


def reason(envelope: pb.Envelope, run: bytes = RUN, kinds=(pb.KIND_HEARTBEAT,)) -> int:
    with pytest.raises(RemoteError) as caught:
        open_envelope(envelope, run, kinds)
    return caught.value.reason


def test_what_was_sealed_opens():
    statement = open_envelope(heartbeat().envelope.SerializeToString(), RUN, (pb.KIND_HEARTBEAT,))
    assert statement.peer == identity(1).peer
    assert statement.body.sequence == 1


def test_a_signature_is_good_for_one_run_and_one_kind():
    sealed = heartbeat()
    assert reason(sealed.envelope, run=digest("another run")) == pb.REASON_BAD_SIGNATURE
    moved = pb.Envelope.FromString(sealed.envelope.SerializeToString())
    moved.kind = pb.KIND_LEAVE
    assert reason(moved, kinds=(pb.KIND_LEAVE,)) == pb.REASON_BAD_SIGNATURE


def test_another_key_or_body_does_not_verify():
    for change in ({"key": identity(2).key}, {"body": b""}, {"signature": b"\0" * 64}, {"signature": b""}, {"key": b"short"}):
        envelope = pb.Envelope.FromString(heartbeat().envelope.SerializeToString())
        for name, value in change.items():
            setattr(envelope, name, value)
        assert reason(envelope) == pb.REASON_BAD_SIGNATURE


def test_kinds_that_do_not_belong_and_oversize_bodies_are_refused():
    assert reason(heartbeat().envelope, kinds=(pb.KIND_CLAIM,)) == pb.REASON_MALFORMED
    large = pb.Envelope(kind=pb.KIND_HEARTBEAT, key=b"k" * 32, body=b"x" * (2 << 20), signature=b"s" * 64)
    assert reason(large) == pb.REASON_OVERSIZE


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: setattr(b, "error", float("nan")), pb.REASON_NON_FINITE),
        (lambda b: setattr(b, "loss", float("inf")), pb.REASON_NON_FINITE),
        (lambda b: setattr(b, "loss", 1e30), pb.REASON_MALFORMED),
        (lambda b: setattr(b, "loss", -1.0), pb.REASON_MALFORMED),
        (lambda b: setattr(b, "size", 0), pb.REASON_OVERSIZE),
        (lambda b: setattr(b, "norm", 256), pb.REASON_MALFORMED),
        (lambda b: setattr(b, "leaves", b"x"), pb.REASON_MALFORMED),
        (lambda b: setattr(b, "attestation", b"x"), pb.REASON_MALFORMED),
        (lambda b: b.holders.append("nobody"), pb.REASON_MALFORMED),
        (lambda b: b.holders.extend([identity(1).peer] * 9), pb.REASON_OVERSIZE),
        (lambda b: b.MergeFromString(b"\xfa\x06\x03abc"), pb.REASON_MALFORMED),  # field 111, which is unknown
    ],
)
def test_fields_are_bounded(change, expected):
    body = pb.Contribution(round=2, head=digest(0), loss=1.0, leaves=digest(1), base_state=digest(2), norm=128, size=5)
    change(body)
    assert reason(seal(identity(1), pb.KIND_CONTRIBUTION, RUN, body).envelope, kinds=(pb.KIND_CONTRIBUTION,)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.findings.add(index=1), pb.REASON_MALFORMED),  # refused without a reason
        (lambda b: b.findings.add(index=1, reason=pb.REASON_RATE, stage=limits.STAGES), pb.REASON_MALFORMED),
        (lambda b: b.findings.extend([pb.Finding(index=1, reason=pb.REASON_RATE)] * 2), pb.REASON_MALFORMED),
        (lambda b: b.scored.append(1), pb.REASON_MALFORMED),  # without a score
        (lambda b: b.score.append(1), pb.REASON_MALFORMED),  # of nothing
        (lambda b: (b.scored.extend([2, 1]), b.score.extend([3, 4])), pb.REASON_MALFORMED),
        (lambda b: (b.scored.extend(range(limits.FINDINGS)), b.score.extend([0] * limits.FINDINGS)), pb.REASON_OVERSIZE),
        (lambda b: setattr(b, "accepted", bytes(limits.CLUSTERS // 8 + 1)), pb.REASON_OVERSIZE),
    ],
)
def test_receipts_are_bounded(change, expected):
    body = pb.Receipt(round=2, ballot=digest(0), accepted=b"\x01", findings=[pb.Finding(index=0, reason=pb.REASON_RATE)])
    open_envelope(seal(identity(1), pb.KIND_RECEIPT, RUN, body).envelope, RUN, (pb.KIND_RECEIPT,))
    change(body)
    assert reason(seal(identity(1), pb.KIND_RECEIPT, RUN, body).envelope, kinds=(pb.KIND_RECEIPT,)) == expected


def test_peer_ids_are_libp2ps():
    # From the libp2p specification of peer ids: an Ed25519 key and its id.
    key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id(key) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq" or key_of_peer(peer_id(key)) == key
    assert peer_id(identity(1).key).startswith("12D3Koo")
    for bad in ("", "12D3Koo", "0OIl", identity(1).peer[:-1], identity(1).peer + "1", "x" * 5000):
        with pytest.raises(ValueError, match=r".*"):
            key_of_peer(bad)


def test_join_links_round_trip_and_explain_themselves():
    dht = "/ip4/10.0.0.1/tcp/7000/p2p/" + identity(1).peer
    for at, endpoint in (("10.0.0.1:7000", ("10.0.0.1", 7000)), ("[::1]:7000", ("::1", 7000))):
        link = JoinLink(RUN, identity(1).peer, at, b"\xfb" * 32, (dht,))
        assert JoinLink.parse(f"  {link}\n") == link
        assert link.ways[0].endpoint == endpoint
        more = JoinLink(RUN, identity(1).peer, at, b"\xfb" * 32, (dht,), (Way("h:1", b"1" * 32), Way("h:2", b"2" * 32)))
        assert JoinLink.parse(str(more)) == more
        assert more.ways == (Way(at, b"\xfb" * 32), *more.others)
    start, cert = f"dilocox://{RUN.hex()}@{identity(1).peer}", "cert=" + "A" * 43
    nobody = [f"dilocox://{RUN.hex()}@nobody?at=h:1&{cert}", f"dilocox://ab@{identity(1).peer}?at=h:1&{cert}"]
    nowhere = [
        f"{start}?at=h:port&{cert}",
        f"{start}?at=h:1&cert={'!' * 43}",
        f"dilocox://{RUN.hex()}@{'l' * 52}?at=h:1&{cert}",
        f"{start}?{cert}",
        f"{start}?at=:1&{cert}",
        f"{start}?at=h&{cert}",
        f"{start}?at=h:65536&{cert}",
        f"{start}?at=h:1",
        f"{start}?at=h:1&at=h:2&{cert}",
        f"{start}?at=h:1&at=h:x&{cert}&{cert}",
        start + "?" + "&".join([f"at=h:1&{cert}"] * (limits.COORDINATORS + 1)),
    ]
    for bad in ("http://x", "dilocox://zz@x", *nobody, *nowhere, f"{start}?at=h:1&cert=AAAA", f"{start}?at=h:1&cert=é"):
        why = r"not a join link: (it does|the run id is|cert= is|at= is|not the peer id|too long|use one cert=)"
        with pytest.raises(ConfigError, match=why):
            JoinLink.parse(bad)


def test_signed_bytes_are_domain_separated():
    sealed = heartbeat()
    signature, body = sealed.envelope.signature, sealed.envelope.body
    assert verify(identity(1).key, signature, pb.KIND_HEARTBEAT, RUN, body)
    assert not verify(identity(1).key, signature, pb.KIND_HEARTBEAT, RUN[:-1], RUN[-1:] + body)


def test_statements_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        heartbeat().peer = "somebody else"


def test_who_repeats_another_s_words_says_something_else():
    mine, copied = (seal(identity(n), pb.KIND_HEARTBEAT, RUN, pb.Heartbeat(sequence=1)) for n in (1, 2))
    assert mine.envelope.body == copied.envelope.body
    assert mine.digest != copied.digest


def test_who_signs_the_same_again_says_the_same_by_another_signing():
    """Check draws from a ballot's signature: each belongs to that one signature, because its signer can make many."""
    first = heartbeat()
    again = dataclasses.replace(first, envelope=pb.Envelope.FromString(first.envelope.SerializeToString()))
    again.envelope.signature = first.envelope.signature[::-1]
    assert again.digest == first.digest
    assert again.signing != first.signing
    assert heartbeat().signing == first.signing


def test_bytes_beside_an_envelope_s_fields_travel_no_further():
    envelope = heartbeat().envelope
    envelope.MergeFromString(b"\xfa\x06\x03abc")
    opened = open_envelope(envelope, RUN, (pb.KIND_HEARTBEAT,))
    assert b"abc" not in opened.envelope.SerializeToString()
