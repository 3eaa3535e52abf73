"""Tests of the payload: its size follows from the layout, and any bytes parse or raise the remote-fault error, nothing
else."""

import itertools
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload import arrays
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Compression

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 90), st.integers(1, 90))), min_size=1, max_size=4
)
COMPRESSIONS = st.builds(
    Compression,
    codec=st.sampled_from(["lowrank-int4", "int4", "int2", "topk-int2", "fp32"]),
    rank=st.integers(1, 12),
    k=st.integers(1, 4096),
    entropy_coding=st.booleans(),
)


def random_int4(rng: np.random.Generator, rows: int, columns: int) -> arrays.BlockInt4:
    return arrays.BlockInt4(
        rows,
        columns,
        int(rng.integers(arrays.MIN_BASE, arrays.MAX_BASE + 1)),
        rng.integers(0, 16, (rows, arrays.blocks(columns))).astype(np.uint8),
        rng.integers(-7, 8, (rows, columns)).astype(np.int8),
    )


def random_magnitudes(rng: np.random.Generator, elements: int) -> npt.NDArray[np.float32]:
    drawn = rng.lognormal(size=(arrays.groups(elements), 2)).astype(np.float32)
    return (drawn.view(np.uint32) >> 16 << 16).view(np.float32)


def random_bits(rng: np.random.Generator, count: int) -> npt.NDArray[np.bool_]:
    return rng.integers(0, 2, count).astype(bool)


def random_tensor(rng: np.random.Generator, layout: wire.Layout, keep: int) -> wire.Tensor:
    size = layout.elements
    match layout.form:
        case wire.Form.LOWRANK:
            return layout, (random_int4(rng, layout.rows, layout.rank), random_int4(rng, layout.columns, layout.rank))
        case wire.Form.INT4:
            return layout, (random_int4(rng, 1, size),)
        case wire.Form.INT2:
            codes = rng.integers(0, 4, size).astype(np.uint8)
            packed = np.pad(codes, (0, -size % arrays.PER_BYTE)).reshape(-1, arrays.PER_BYTE) << np.arange(0, 8, 2)
            return layout, (arrays.Levels(size, random_magnitudes(rng, size), packed.sum(axis=1).astype(np.uint8)),)
        case wire.Form.SPARSE:
            kept = size * keep // arrays.GROUP
            positions = np.sort(rng.choice(size, kept, replace=False)).astype(np.int64)
            drawn = random_magnitudes(rng, size)
            return layout, (arrays.Sparse(size, drawn, positions, random_bits(rng, kept), random_bits(rng, kept)),)
    return layout, (arrays.Floats(rng.normal(size=size).astype(np.float32)),)


def random_payload(layout: wire.StageLayout, seed: int, keep: int = 100) -> list[wire.Tensor]:
    rng = np.random.default_rng(seed)
    return [random_tensor(rng, tensor, keep) for tensor in layout.tensors]


def same(left: wire.Tensor, right: wire.Tensor) -> bool:
    pairs = zip(left[1], right[1], strict=True)
    return left[0] == right[0] and all(np.array_equal(a.values(), b.values()) for a, b in pairs)


@settings(deadline=None)
@given(SHAPES, COMPRESSIONS, st.integers(0, 2**32))
def test_round_trip_and_size(shapes, compression, seed):
    layout = wire.stage_layout(shapes, compression, compression.keep)
    tensors = random_payload(layout, seed, compression.keep)
    raw = wire.pack(tensors, compression.entropy_coding)
    assert len(raw) == layout.largest if layout.exact else len(raw) <= layout.largest
    parsed = wire.parse(raw, layout)
    assert all(same(left, right) for left, right in zip(parsed, tensors, strict=True))
    for _, single in ((layout, found) for layout, found in parsed if len(found) == 1):
        whole = single[0].values().ravel()
        cuts = [*range(0, whole.size, arrays.GROUP), whole.size]
        parts = [single[0].part(start, stop) for start, stop in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)
    dense = np.concatenate([(a[0].values() @ a[1].values().T if len(a) == 2 else a[0].values()).ravel() for _, a in parsed])
    assert wire.decoded_norm(parsed) == pytest.approx(float(np.linalg.norm(dense)), rel=1e-6)


@given(COMPRESSIONS, st.binary(max_size=400))
def test_any_bytes_parse_or_raise_the_remote_fault(compression, raw):
    with pytest.raises(RemoteError):
        wire.parse(raw, wire.stage_layout([(20, 12), (5,)], compression, compression.keep))


@settings(max_examples=500, deadline=None)
@given(COMPRESSIONS, st.integers(0, 2**32), st.data())
def test_mutated_payloads_parse_or_raise_and_stay_finite(compression, seed, data):
    layout = wire.stage_layout([(20, 12), (5,)], compression, compression.keep)
    raw = bytearray(wire.pack(random_payload(layout, seed, compression.keep), compression.entropy_coding))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    try:
        tensors = wire.parse(bytes(raw[: len(raw) - cut]), layout)
    except RemoteError:
        return
    assert np.isfinite(wire.decoded_norm(tensors))
    for _, parts in tensors:
        with np.errstate(over="raise"):
            assert all(np.isfinite(array.values().astype(np.float32)).all() for array in parts)
        for sizes in (np.abs(array.values()) for array in parts):
            assert ((sizes == 0) | (sizes >= np.finfo(np.float32).tiny)).all(), "subnormal numbers differ between machines"


@pytest.mark.parametrize("value", [1e-45, 1e-40, -1e-39, 2.0**-73])
def test_parse_of_a_subnormal_or_tiny_float_is_rejected(value: float):
    layout = wire.stage_layout([(3,)], Compression(codec="fp32"), 0)
    tensor = layout.tensors[0], (arrays.Floats(np.array([1.0, value, 0.0], np.float32)),)
    with pytest.raises(RemoteError) as refused:
        wire.parse(wire.pack([tensor], False), layout)
    assert refused.value.reason == pb.REASON_NON_FINITE


def test_the_layout_is_low_rank_only_where_that_is_smaller():
    layout = wire.stage_layout([(128, 128), (128,), (8, 8), (4, 512)], Compression(rank=16), 16)
    assert [tensor.form for tensor in layout.tensors] == [wire.Form.LOWRANK, wire.Form.INT4, wire.Form.INT4, wire.Form.INT4]


def test_invalid_codes_and_exponents_are_refused():
    layout = wire.stage_layout([(3,)], Compression(codec="int4"), 0)
    (tensor,) = random_payload(layout, 1)
    raw = wire.pack([tensor], entropy=False)
    heads = 40 + 12 + 8  # header, one tensor, the first section's sizes
    codes = heads + 2 + 8
    assert len(wire.parse(raw, layout)) == 1
    for position, value in ((heads, 127), (codes, 0x88), (codes + 1, 0xF0)):
        spoiled = bytearray(raw)
        spoiled[position] = value
        with pytest.raises(RemoteError):
            wire.parse(bytes(spoiled), layout)


def test_two_bit_codes_are_read_where_they_lie_and_pad_with_nothing():
    """Check payloads without entropy coding: a round has many, and each unpacked one would take eight times the memory."""
    layout = wire.stage_layout([(4097,)], Compression(codec="int2"), 0)
    raw = wire.pack(random_payload(layout, 0), entropy=False)
    [(_, [levels])] = wire.parse(raw, layout)
    assert isinstance(levels, arrays.Levels)
    assert np.shares_memory(levels.codes, np.frombuffer(raw, dtype=np.uint8))
    spoiled = bytearray(raw)
    last = len(raw) - 3 * 8 - 1  # three empty sections follow
    spoiled[last] ^= 4
    with pytest.raises(RemoteError, match=r"^malformed: .*padding"):
        wire.parse(bytes(spoiled), layout)


def test_more_values_than_allowed_are_refused():
    compression = Compression(codec="topk-int2", k=64)
    generous = wire.stage_layout([(64, 64)], compression, 128)
    raw = wire.pack(random_payload(generous, 0, 128), entropy=False)
    assert wire.parse(raw, generous)
    with pytest.raises(RemoteError):
        wire.parse(raw, wire.stage_layout([(64, 64)], compression, 64))


def test_a_small_stream_that_inflates_to_much_is_refused_before_it_does():
    compression = Compression(codec="int4", entropy_coding=True)
    layout = wire.stage_layout([(64, 64)], compression, 0)
    raw = bytearray(wire.pack(random_payload(layout, 0), entropy=True))
    struct.pack_into("<I", raw, 40 + 12, 1 << 31)  # HEADS claims 2 GiB
    with pytest.raises(RemoteError):
        wire.parse(bytes(raw), layout)
