"""Shares of a blob: as many as are needed restore it, whichever they are, and what does not belong to them is refused."""

import io
import random
from itertools import combinations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.store.blobs import digest_of
from dilocox_availability import shards as shares
from dilocox_availability.shards import Code

CODES = st.integers(2, limits.SHARES).flatmap(lambda n: st.builds(Code, st.just(n), st.integers(1, n - 1)))
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 5 * shares.UNIT_BYTES))


def blob_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def made(blob: bytes, code: Code) -> list[bytes]:
    erasure = coder()
    parts = list(erasure.stripes([blob[at : at + 9999] for at in range(0, len(blob), 9999)], len(blob), code))
    return [b"".join(stripe[index] for stripe in parts) for index in range(code.shares)]


def coder():
    from dilocox_availability import erasure

    return erasure


def proved(blob: bytes, code: Code) -> list[services.Share]:
    digests = [digest_of([b"%d" % index, blob]) for index in range(code.shares)]
    return shares.make_shares(digest_of([blob]), len(blob), code, digests)


@settings(deadline=None, max_examples=60)
@given(code=CODES, size=SIZES, choice=st.randoms(use_true_random=False))
def test_any_that_are_enough_restore_and_one_fewer_do_not(code: Code, size: int, choice: random.Random):
    blob = blob_of(size)
    whole = made(blob, code)
    assert {len(each) for each in whole} == {code.share_size(size)}
    some = choice.sample(range(code.shares), code.needed)
    files = {index: io.BytesIO(whole[index]) for index in some}
    assert b"".join(coder().restored(size, code, files)) == blob
    too_few = {index: io.BytesIO(whole[index]) for index in some[1:]}
    with pytest.raises(RemoteError, match=r"\d+ shards .* \d+$"):
        list(coder().restored(size, code, too_few))


def test_every_choice_restores():
    """Check every choice of a code that is small enough to try them all, and not by copies alone."""
    code, blob = Code(7, 3), blob_of(1000)
    whole = made(blob, code)
    for some in combinations(range(code.shares), code.needed):
        assert b"".join(coder().restored(1000, code, {index: io.BytesIO(whole[index]) for index in some})) == blob


def times(a: int, b: int) -> int:
    """Multiply in GF(2^8) with the polynomial 0x11d."""
    product = 0
    while b:
        product ^= a * (b & 1)
        a, b = (a << 1) ^ (0x11D * (a >> 7)), b >> 1
    return product


def test_the_shares_are_a_formula():
    """Check the formula, because peers have shards from other library versions: of the later shards, i sums stripe j by 1
    / (i ^ j)."""
    code, blob = Code(7, 3), blob_of(3 * shares.GRAIN_BYTES)
    whole = made(blob, code)
    data = [blob[at : at + shares.GRAIN_BYTES] for at in range(0, len(blob), shares.GRAIN_BYTES)]
    assert whole[: code.needed] == data
    inverse = {a: b for a in range(1, 256) for b in range(1, 256) if times(a, b) == 1}
    for i in range(code.needed, code.shares):
        for at in range(shares.GRAIN_BYTES):
            total = 0
            for j in range(code.needed):
                total ^= times(inverse[i ^ j], data[j][at])
            assert whole[i][at] == total


@given(code=CODES, index=st.integers(0), at=st.integers(0), bit=st.integers(0, 7), size=st.integers(0, 100))
def test_a_share_is_proved_and_one_with_a_flipped_bit_is_not(code: Code, index: int, at: int, bit: int, size: int):
    blob = blob_of(size)
    good = proved(blob, code)[index % code.shares]
    assert shares.check_share(good, digest_of([blob])) == code
    raw = bytearray(good.digest)
    raw[at % 32] ^= 1 << bit
    bad = services.Share.FromString(good.SerializeToString())
    bad.digest = bytes(raw)
    with pytest.raises(RemoteError, match=r"^digest-mismatch: .*root"):
        shares.check_share(bad, digest_of([blob]))
    if code.shares > 1:
        bad = services.Share.FromString(good.SerializeToString())
        bad.index = (good.index + 1) % code.shares
        with pytest.raises(RemoteError, match=r"^digest-mismatch: .*root"):
            shares.check_share(bad, digest_of([blob]))


@given(code=CODES, size=st.integers(1, 100))
def test_a_share_of_another_blob_or_of_another_code_is_refused(code: Code, size: int):
    blob, other = blob_of(size), blob_of(size, seed=1) + b"!"
    good = proved(blob, code)[0]
    with pytest.raises(RemoteError, match=r"^digest-mismatch: .*blob"):
        shares.check_share(good, digest_of([other]))
    moved = services.Share.FromString(good.SerializeToString())
    moved.blob = digest_of([other])
    with pytest.raises(RemoteError, match=r"^digest-mismatch: .*root"):
        shares.check_share(moved, digest_of([other]))
    for field, value in (("size", good.size + 1), ("needed", good.needed + 1), ("shares", good.shares + 1)):
        lie = services.Share.FromString(good.SerializeToString())
        setattr(lie, field, value)
        with pytest.raises(RemoteError):
            shares.check_share(lie, digest_of([blob]))


@given(st.binary(max_size=400))
def test_garbage_proves_nothing(raw: bytes):
    try:
        share = services.Share.FromString(raw)
    except DecodeError:
        return
    with pytest.raises(RemoteError):
        shares.check_share(share, bytes(32))


@given(st.integers(0, 100), st.sampled_from([0.25, 0.5, 0.9]), st.integers(0, 1000))
def test_every_share_is_held_and_half_may_go(count: int, needed: float, seed: int):
    peers = [f"peer-{number}" for number in range(count)]
    code = shares.code_of(count, needed)
    if count < 2:
        assert code is None
        return
    assert code is not None
    assert 1 <= code.needed < code.shares <= limits.SHARES
    commit, blob = sha256(b"commit", b"%d" % seed), sha256(b"blob")
    held = {peer: shares.share_of(commit, blob, peers, peer, code) for peer in peers}
    assert set(held.values()) == set(range(code.shares))
    assert shares.share_of(commit, blob, peers, "a stranger", code) is None
    if needed <= 0.5 and count <= limits.SHARES:
        left = random.Random(seed).sample(peers, count - count // 2)
        assert len({held[peer] for peer in left}) >= code.needed


@pytest.mark.parametrize(("code", "samples"), [(Code(32, 16), 16), (Code(32, 29), 16), (Code(10, 8), 16), (Code(10, 5), 4)])
def test_who_withholds_too_many_is_found_as_often_as_said(code: Code, samples: int):
    draws, dice = 10_000, random.Random(16)
    there = code.needed - 1
    unnoticed = sum(all(dice.randrange(code.shares) < there for _ in range(samples)) for _ in range(draws))
    said = shares.chance(code, samples, 0)
    assert said == pytest.approx((there / code.shares) ** samples)
    assert abs(unnoticed - draws * said) <= 5 * (draws * said * (1 - said)) ** 0.5 + 1


def test_chances_are_of_at_most_so_many():
    code = Code(10, 5)
    assert shares.chance(code, 16, 16) == pytest.approx(1)
    assert shares.chance(code, 16, 3) > shares.chance(code, 16, 2) > shares.chance(code, 16, 0)
    assert shares.chance(code, 0, 0) == 1
