"""The codec: decoding is bit-equal in any summation order and thread count; encoding is as good as it claims."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.node.outer import codec, int2
from dilocox.node.outer.state import StageState
from dilocox.node.outer.state_device import STRETCH
from dilocox.protocol.errors import Diverged
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.payload.arrays import GROUP, RANK_EXACT
from tests.helpers import manifest
from tests.property.test_payload import random_tensor

CPU = torch.device("cpu")


def decoded(tensor: wire.Tensor) -> torch.Tensor:
    layout, _ = tensor
    decoder = codec.Decoder([tensor], CPU)
    parts = [(decoder.parts(start, stop)[0], decoder.weighted_sum([1.0], start, stop)) for start, stop in decoder.stretches()]
    assert all(torch.equal(part, total) for part, total in parts)
    return torch.cat([part for part, _ in parts]).view(layout.rows, layout.columns)


def encode(x: torch.Tensor, layout: wire.Layout, warm: torch.Tensor | None = None) -> codec.Encoded:
    stage = wire.StageLayout((layout,), 0, False)
    return codec.StageEncoder(x.flatten(), stage).encode(x, layout, warm)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.integers(2, 60), st.integers(1, 40), st.integers(0, 2**32))
def test_decoding_is_exact_in_any_summation_order(rows, columns, rank, seed):
    layout = wire.Layout(wire.Form.LOWRANK, rows, columns, rank)
    tensor = random_tensor(np.random.default_rng(seed), layout, 0)
    p, q = (array.values() for array in tensor[1])
    order = np.random.default_rng(seed).permutation(rank)
    one_by_one = np.zeros((rows, columns))
    for index in order:
        one_by_one += np.outer(p[:, index], q[:, index])
    by_blocks = sum(p[:, s : s + 16] @ q[:, s : s + 16].T for s in range(0, rank, 16))
    result = decoded(tensor).numpy()
    assert np.array_equal(result, one_by_one)
    assert np.array_equal(result, by_blocks)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([wire.Form.SPARSE, wire.Form.INT2, wire.Form.INT4]),
    st.integers(1, 9000),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_a_weighted_sum_has_the_bits_of_its_parts_added_in_order(form, elements, count, seed):
    random, layout = np.random.default_rng(seed), wire.Layout(form, 1, elements)
    tensors = [random_tensor(random, layout, elements // 3) for _ in range(count)]
    decoder = codec.Decoder(tensors, CPU)
    weights = random.uniform(0.01, 3, count).tolist()
    for start in range(0, elements, GROUP):
        stop = min(elements, start + GROUP)
        total = torch.zeros(stop - start, dtype=torch.float64)
        for part, tensor, weight in zip(decoder.parts(start, stop), tensors, weights, strict=True):
            assert np.array_equal(part.numpy(), tensor[1][0].part(start, stop)), "what checks payloads decodes to the same bits"
            total = total + part * weight
        assert torch.equal(decoder.weighted_sum(weights, start, stop), total)


def test_decoding_at_the_highest_rank_is_exact():
    layout = wire.Layout(wire.Form.LOWRANK, 4, 5, RANK_EXACT)
    tensor = random_tensor(np.random.default_rng(3), layout, 0)
    p, q = (array.values() for array in tensor[1])
    from fractions import Fraction

    exact = [[sum(Fraction(a) * Fraction(b) for a, b in zip(row, col, strict=True)) for col in q] for row in p]
    assert [[Fraction(float(v)) for v in row] for row in decoded(tensor)] == exact


def test_decoding_and_applying_do_not_depend_on_the_thread_count():
    run = manifest(model={"hidden_size": 64, "intermediate_size": 128})
    states: list[tuple[torch.Tensor, bytes]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        state = StageState(run, 0)
        state.feedback.copy_(torch.randn(state.size, generator=torch.Generator().manual_seed(0)))
        raw = state.encode().raw if not states else states[0][1]
        state.apply([memoryview(raw), memoryview(raw)], [100, 300])
        states.append((state.committed.clone(), raw))
    torch.set_num_threads(1)
    assert torch.equal(states[0][0], states[1][0])


def test_an_apply_measures_the_effective_rank_of_the_mean():
    """Compare the rank with the singular values of the whole matrices; no rank without a request, or without a low rank."""

    def applied(**compression: object) -> StageState:
        run = manifest(model={"hidden_size": 64, "intermediate_size": 96}, compression=compression)
        states = [StageState(run, 0) for _ in range(3)]
        payloads = []
        for seed, state in enumerate(states[1:]):
            state.feedback.copy_(torch.randn(state.size, generator=torch.Generator().manual_seed(seed)))
            payloads.append(memoryview(state.encode().raw))
        assert states[0].encode().effective_rank == 0, "no commit was applied"
        states[0].apply(payloads, [100, 300])
        return states[0]

    state = applied(codec="lowrank-int4", rank=12, adapt="effective-rank")
    ranks = []
    for (_, theta), layout in zip(state.views(state.committed[0]), state.layout().tensors, strict=True):
        if layout.form == wire.Form.LOWRANK:
            shares = torch.linalg.svdvals(theta.double()).square()
            shares = shares / shares.sum()
            ranks.append(math.exp(-float((shares * shares.clamp_min(1e-30).log()).sum())))
    assert 12 < state.effective_rank < 24, "two clusters' work is of a higher rank than one's"
    assert state.effective_rank == pytest.approx(sum(ranks) / len(ranks), rel=1e-4)
    assert state.encode().effective_rank == state.effective_rank
    assert applied(codec="lowrank-int4", rank=12).effective_rank == 0
    assert applied(codec="int4").effective_rank == 0


CODECS = [
    {"codec": "lowrank-int4", "rank": 16},
    {"codec": "lowrank-int4", "rank": 20, "entropy_coding": True},
    {"codec": "int4"},
    {"codec": "int2"},
    {"codec": "topk-int2", "k": 300, "entropy_coding": True},
    {"codec": "fp32", "entropy_coding": True},
]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CODECS))
def test_what_is_encoded_parses_and_leaves_the_rest_in_the_feedback(seed, compression):
    run = manifest(model={"hidden_size": 64, "intermediate_size": 128}, compression=compression)
    state = StageState(run, 1)
    state.feedback.copy_(torch.randn(state.size, generator=torch.Generator().manual_seed(seed)))
    before = state.feedback.clone()
    encoded = state.encode()
    state.layout().check_size(len(encoded.raw))
    tensors = wire.parse(encoded.raw, state.layout())
    assert encoded.norm == pytest.approx(wire.decoded_norm(tensors))
    state.return_to_feedback(memoryview(encoded.raw))
    assert torch.allclose(state.feedback, before, atol=1e-5)


def test_low_rank_plus_int4_error_is_near_the_truncation_error():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 16, generator=generator) @ torch.randn(16, 96, generator=generator)
    x += 0.02 * x.std() * torch.randn(128, 96, generator=generator)
    layout = wire.Layout(wire.Form.LOWRANK, 128, 96, 16)
    encoded = encode(x, layout)
    error = float((decoded(encoded.packed).float() - x).norm() / x.norm())
    assert error < 0.16


def test_the_even_rotated_grid_beats_the_plain_one():
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(256, 256, generator=generator)).Q for _ in range(2))
    x = left / torch.arange(1, 257) @ right.T  # singular values 1, 1/2, 1/3, …
    layout = wire.Layout(wire.Form.LOWRANK, 256, 256, 32)
    start = q = torch.randn(256, 32, generator=generator)
    for _ in range(2):
        p = torch.linalg.qr(x @ q).Q
        q = x.T @ p
    plain = decoded((layout, (codec.quantize(p), codec.quantize(q)))).float()
    ours = decoded(encode(x, layout, start).packed).float()
    best = p @ q.T
    assert float((ours - best).norm()) < 0.6 * float((plain - best).norm())


@pytest.mark.parametrize("elements", [1, 2, 3, GROUP - 1, GROUP, GROUP + 1, STRETCH + 2 * GROUP + 7])
def test_two_bits_take_what_they_can_of_bell_curves_of_any_length(elements: int):
    """Compare with Lloyd's quantiser of four levels, which leaves 0.343 of a bell curve (Max 1960). A group of one or two
    values leaves only bfloat16's rounding."""
    x = torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * (1 + torch.arange(elements) // GROUP)
    back = decoded(encode(x, wire.Layout(wire.Form.INT2, 1, elements)).packed).flatten()
    assert torch.equal(back < 0, x < 0)
    for of, values in zip(back.split(GROUP), x.split(GROUP), strict=True):
        error = float((of - values).norm() / values.norm())
        assert error < 0.01 if len(values) < 3 else error < 0.38


def test_dense_and_sparse_payloads_place_their_levels_alike():
    x = torch.randn(5, GROUP, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100, 0.01, 7, 50])[:, None]
    even, ragged = int2.Even(x), int2.Ragged(x.abs().flatten().numpy(), np.arange(0, 6 * GROUP, GROUP))
    (dense, boundaries), (sparse, others) = int2.place_levels(even), int2.place_levels(ragged)
    assert np.allclose(dense, sparse, rtol=1e-2)  # bfloat16 rounds by less
    assert np.allclose(boundaries, others, rtol=1e-3)
    codes = even.packed(boundaries)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    assert np.array_equal(codes.ravel() >> 1, ragged.levels(boundaries))
    assert np.array_equal(codes.ravel() & 1, x.flatten().numpy() < 0)


def test_zeros_and_tiny_and_huge_values_survive():
    for scale in (0.0, 1e-30, 1e-12, 1.0, 1e9):
        x = scale * torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
        for layout in (wire.Layout(wire.Form.LOWRANK, 40, 40, 8), wire.Layout(wire.Form.INT4, 40, 40)):
            encoded = encode(x, layout)
            result = decoded(encoded.packed)
            assert torch.isfinite(result).all()
            assert float(result.norm()) <= 1.3 * scale * 40 + 1e-12


def test_what_is_not_finite_is_our_own_fault():
    state = StageState(manifest(), 0)
    state.feedback[-1] = float("nan")
    with pytest.raises(Diverged):
        state.encode()


def test_subnormal_results_become_zero():
    run = manifest(outer={"learning_rate": 1.0, "momentum": 0.5})
    state = StageState(run, 0)
    state.committed.fill_(1.2e-38)
    state.feedback.fill_(1e-3)
    raw = state.encode().raw
    state.apply([memoryview(raw)], [1])
    values = state.committed.abs()
    assert not ((values > 0) & (values < 2.0**-126)).any()


def test_a_bad_payload_changes_nothing():
    from dilocox.protocol.errors import RemoteError

    state = StageState(manifest(), 0)
    state.feedback.normal_(generator=torch.Generator().manual_seed(0))
    raw = state.encode().raw
    before = state.committed.clone()
    with pytest.raises(RemoteError):
        state.apply([memoryview(raw), memoryview(raw[:-1])], [1, 1])
    assert torch.equal(state.committed, before)
