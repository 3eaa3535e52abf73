"""Tests of the codec's fast path: the same bits as the reference, in what is encoded, left, checked and applied."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.node.outer.state import StageState
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload import native
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.payload.arrays import GROUP, BlockInt4
from dilocox.protocol.run.tensors import TensorSpec
from tests.helpers import manifest

BUILT = find_spec("dilocox.protocol.payload._native") is not None
pytestmark = pytest.mark.skipif(not BUILT, reason="no compiler built the fast path")

CODECS = [
    {"codec": "int2"},
    {"codec": "int2", "entropy_coding": True},
    {"codec": "int4"},
    {"codec": "topk-int2", "k": 64},
    {"codec": "topk-int2", "k": 4096},
    {"codec": "fp32"},
    {"codec": "lowrank-int4", "rank": 3},
]
SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3 * GROUP)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
        st.just((GROUP,)),
        st.just((1,)),
    ),
    min_size=1,
    max_size=3,
)
SCALES = st.sampled_from([0.0, 1e-44, 2.0**-126, 1e-30, 1e-6, 1e-3, 1.0, 1e9])


def test_built_library_is_of_this_version():
    """Check that a built library is loaded: `make setup` builds one from a changed native.c."""
    assert native.kernels() is not None


def drawn(size: int, scale: float, random: np.random.Generator) -> torch.Tensor:
    """Return values of a kind: normal ones, some of them zero with either sign, some equal, some on a coarse grid."""
    values = random.standard_normal(size) * scale
    kind = random.integers(4)
    if kind == 1:
        values[random.random(size) < 0.5] *= 0.0
    elif kind == 2:
        values = np.round(values / (scale or 1)) * scale
    elif kind == 3:
        values = values * 2.0 ** random.integers(-20, 20, size)
    return torch.from_numpy(values.astype(np.float32))


def bits(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def run_case(shapes: list[tuple[int, ...]], codec: dict[str, object], scale: float, seed: int, count: int) -> list[object]:
    """Encode, check and apply `count` payloads, and return all that must be equal."""
    random = np.random.default_rng(seed)
    specs = [TensorSpec(f"t{number}", shape, True) for number, shape in enumerate(shapes)]
    run = manifest(compression=codec, outer={"momentum": 0.9, "learning_rate": 0.3})
    state = StageState(run, 0, specs)
    state.committed[0].copy_(drawn(state.size, 1.0, random))
    state.committed[1].copy_(drawn(state.size, scale, random))
    said: list[object] = []
    payloads = []
    for _ in range(count):
        state.feedback.add_(drawn(state.size, scale, random))
        encoded = state.encode()
        payloads.append(memoryview(encoded.raw))
        said += [encoded.raw, bits(state.feedback)]
    weights = random.integers(1, 100, count).tolist()
    factors = [[float(2.0 ** -random.integers(0, 3)) for _ in specs] for _ in range(count)]
    state.return_to_feedback(payloads[0], shares=[1 - factor for factor in factors[0]])
    state.apply(payloads, weights, factors=factors)
    return [*said, bits(state.feedback), bits(state.committed)]


def check_equal(shapes: list[tuple[int, ...]], codec: dict[str, object], scale: float, seed: int, count: int) -> None:
    fast = run_case(shapes, codec, scale, seed, count)
    with native.reference():
        assert native.kernels() is None
        slow = run_case(shapes, codec, scale, seed, count)
    assert fast == slow


CASE = (SHAPES, st.sampled_from(CODECS), SCALES, st.integers(0, 2**32), st.integers(1, 4))


@settings(max_examples=300)
@given(*CASE)
def test_fast_path_of_any_case_has_the_bits_of_the_reference(shapes, codec, scale, seed, count):
    check_equal(shapes, codec, scale, seed, count)


@pytest.mark.thorough
@settings(max_examples=10_000)
@given(*CASE)
def test_fast_path_of_ten_thousand_cases_has_the_bits_of_the_reference(shapes, codec, scale, seed, count):
    check_equal(shapes, codec, scale, seed, count)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_state_that_is_not_finite_stays_so_in_the_same_places(bad: float):
    """Check an imported state: nodes with and without a compiler must not differ."""

    def applied() -> torch.Tensor:
        state = StageState(manifest(compression={"codec": "int2"}), 0)
        state.feedback.copy_(drawn(state.size, 1e-3, np.random.default_rng(0)))
        raw = memoryview(state.encode().raw)
        state.committed[0][3] = bad
        state.committed[1][7] = bad
        state.apply([raw], [1])
        return state.committed.clone()

    fast = applied()
    with native.reference():
        slow = applied()
    assert torch.equal(fast.isnan(), slow.isnan())
    assert torch.equal(fast.nan_to_num(), slow.nan_to_num())


@given(st.integers(0, 70), st.integers(0, 2**32))
def test_int4_of_any_bytes_has_the_reference_s_codes_or_reason(elements, seed):
    """Compare whole payloads of random bytes: most contain a code that is not valid, or padding."""
    layout = wire.StageLayout((wire.Layout(wire.Form.INT4, 1, elements + 1),), 0, False)
    random = np.random.default_rng(seed)
    codes = random.integers(-7, 8, (1, elements + 1)).astype(np.int8)
    offsets = random.integers(0, 16, (1, elements // 16 + 1)).astype(np.uint8)
    raw = bytearray(wire.pack([(layout.tensors[0], (BlockInt4(1, elements + 1, -3, offsets, codes),))], False))
    for at in random.integers(0, len(raw), random.integers(0, 3)):
        raw[at] ^= 1 << int(random.integers(8))

    def outcome() -> object:
        try:
            tensors = wire.parse(bytes(raw), layout)
        except RemoteError as error:
            return error.reason, str(error)
        return tensors[0][1][0].values().tobytes(), wire.decoded_norm(tensors)

    fast = outcome()
    with native.reference():
        assert outcome() == fast
