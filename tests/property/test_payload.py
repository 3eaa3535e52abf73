"""The payload: its size is what the layout says, and any bytes parse or raise the remote-fault error, nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import payload as wire
from protocol.errors import RemoteError

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 40), st.integers(1, 40))), min_size=1, max_size=4
)


def random_array(rng: np.random.Generator, rows: int, columns: int) -> wire.Array:
    blocks = -(-columns // wire.BLOCK)
    return wire.Array(
        rows,
        columns,
        int(rng.integers(wire.MIN_BASE, wire.MAX_BASE + 1)),
        rng.integers(0, 16, (rows, blocks)).astype(np.uint8),
        rng.integers(-7, 8, (rows, columns)).astype(np.int8),
    )


def random_payload(layouts: list[wire.Layout], seed: int) -> list[wire.Tensor]:
    rng = np.random.default_rng(seed)
    return [(layout, tuple(random_array(rng, *shape) for shape in layout.arrays)) for layout in layouts]


@given(SHAPES, st.integers(1, 12), st.integers(0, 2**32))
def test_round_trip_and_size(shapes, rank, seed):
    layouts = wire.tensor_layouts(shapes, rank)
    tensors = random_payload(layouts, seed)
    raw = wire.pack(tensors)
    assert len(raw) == wire.payload_size(layouts)
    for (layout, arrays), (expected_layout, expected) in zip(wire.parse(raw, layouts), tensors, strict=True):
        assert layout == expected_layout
        for array, other in zip(arrays, expected, strict=True):
            assert array.base == other.base
            assert np.array_equal(array.codes, other.codes)
            assert np.array_equal(array.offsets, other.offsets)


@given(st.binary(max_size=400))
def test_any_bytes_parse_or_raise_the_remote_fault(raw):
    layouts = wire.tensor_layouts([(20, 12), (5,)], 2)
    with pytest.raises(RemoteError):
        wire.parse(raw, layouts)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.data())
def test_mutated_payloads_parse_or_raise_and_stay_finite(seed, data):
    layouts = wire.tensor_layouts([(20, 12), (5,)], 2)
    raw = bytearray(wire.pack(random_payload(layouts, seed)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = wire.parse(bytes(raw), layouts)
    except RemoteError:
        return
    assert np.isfinite(wire.decoded_norm(tensors))
    for _, arrays in tensors:
        with np.errstate(over="raise"):
            assert all(np.isfinite(array.values().astype(np.float32)).all() for array in arrays)


def test_the_layout_is_low_rank_only_where_that_is_smaller():
    forms = [layout.form for layout in wire.tensor_layouts([(128, 128), (128,), (8, 8), (4, 512)], 16)]
    assert forms == [wire.LOWRANK, wire.INT4, wire.INT4, wire.INT4]


def test_invalid_codes_and_exponents_are_refused():
    layouts = wire.tensor_layouts([(3,)], 1)
    (tensor,) = random_payload(layouts, 1)
    raw = wire.pack([tensor])
    start = len(raw) - 4
    assert len(wire.parse(raw, layouts)) == 1
    for position, value in ((start, 127), (start + 2, 0x88), (start + 3, 0xF0)):
        spoiled = bytearray(raw)
        spoiled[position] = value
        with pytest.raises(RemoteError):
            wire.parse(bytes(spoiled), layouts)
