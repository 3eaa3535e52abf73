"""Tests of the mean pseudo-gradient of payloads: bounded, bit-equal for every split of a tensor, and equal to its
definition."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.node.outer import aggregate, codec
from dilocox.node.outer.outer_step import outer_step
from dilocox.node.outer.state import StageState
from dilocox.protocol.run.manifest import Manifest, Outer
from tests.helpers import manifest

RULES = ("mean", "centered-clip")
SIZE = 40_000
"""More than SquareSum has lanes."""


@dataclass(frozen=True)
class Cut:
    """Payloads of these float64 values, which come in stretches that end at `cuts`."""

    values: Sequence[torch.Tensor]
    cuts: Sequence[int] = ()

    def stretches(self) -> Iterable[tuple[int, int]]:
        return itertools.pairwise([0, *self.cuts, self.values[0].numel()])

    def parts(self, start: int, stop: int) -> list[torch.Tensor]:
        return [value[start:stop].clone() for value in self.values]

    def mean_step(
        self, weights: Sequence[float], start: int, stop: int, theta: torch.Tensor, momentum: torch.Tensor, outer: Outer
    ) -> None:
        parts = zip(self.parts(start, stop), weights, strict=True)
        total = sum((weight * part for part, weight in parts), torch.zeros(stop - start, dtype=torch.float64))
        outer_step(theta, momentum, total, outer)


def result(
    rule: str, values: Sequence[torch.Tensor], tokens: Sequence[int], cuts: Sequence[int] = (), **outer: object
) -> torch.Tensor:
    """Return the aggregate, as a step from 0 with rate 1 and without momentum shows it."""
    payloads, theta = Cut(values, cuts), torch.zeros(values[0].numel())
    chosen = Outer(aggregate=rule, learning_rate=1.0, momentum=0.0, **outer)  # type: ignore[arg-type]
    step = aggregate.stepped(chosen, tokens, [1.0] * len(values), payloads)
    for start, stop in payloads.stretches():
        step(start, stop, theta[start:stop], torch.zeros(stop - start))
    return -theta.double()


def drawn(count: int, seed: int, size: int = SIZE) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=random).double() for _ in range(count)]


@pytest.mark.parametrize("rule", RULES)
@given(st.integers(1, 7), st.integers(0, 1000), st.lists(st.integers(1, SIZE - 1), max_size=4, unique=True))
@settings(max_examples=15, deadline=None)
def test_where_a_tensor_is_cut_changes_no_bit(rule: str, count: int, seed: int, cuts: list[int]):
    values, tokens = drawn(count, seed), [64 * (number + 1) for number in range(count)]
    assert torch.equal(result(rule, values, tokens, sorted(cuts)), result(rule, values, tokens))


@pytest.mark.parametrize("rule", RULES)
@given(st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_of_equals_it_is_the_value(rule: str, count: int, seed: int):
    (value,) = drawn(1, seed, 100)
    made = result(rule, [value] * count, [64 + number for number in range(count)])
    assert torch.equal(made.float(), value.float())


@given(st.integers(0, 1000), st.sampled_from([(3, 1), (4, 1), (5, 1), (8, 2)]), st.sampled_from([10.0, 1e4, 1e30]))
@settings(max_examples=20, deadline=None)
def test_a_bounded_share_of_outliers_moves_it_by_a_bounded_amount(seed: int, shares: tuple[int, int], loud: float):
    count, hostile = shares
    values, tokens = drawn(count, seed, 500), [64] * count
    honest = torch.stack(values[hostile:])
    spread = max(float((a - b).norm()) for a, b in itertools.combinations(values[hostile:], 2))
    for value in values[:hostile]:
        value.mul_(loud)
    made = result("centered-clip", values, tokens)
    assert float((made - honest.mean(0)).norm()) <= 2 * spread
    if loud > 1e3:
        assert float((result("mean", values, tokens) - honest.mean(0)).norm()) > 10 * spread, "the mean has no such bound"


def test_centered_clip_takes_of_each_the_distance_of_the_middle_one():
    values = [torch.tensor([v, 0.0], dtype=torch.float64) for v in (0.0, 1.0, 2.0, 50.0, -3.0)]
    # The median is 1; they lie 1, 0, 1, 49 and 4 from it, so none counts from farther than 1.
    made = result("centered-clip", values, [64] * 5)
    assert made.tolist() == pytest.approx([1 + (-1 + 0 + 1 + 1 - 1) / 5, 0])


@given(st.integers(0, 1000), st.lists(st.integers(1, SIZE - 1), max_size=5, unique=True))
@settings(max_examples=20, deadline=None)
def test_a_sum_of_squares_is_the_same_however_the_tensor_comes(seed: int, cuts: list[int]):
    (value,) = drawn(1, seed)
    whole, parts = aggregate.SquareSum(), aggregate.SquareSum()
    whole.add(0, value)
    for start, stop in itertools.pairwise([0, *sorted(cuts), SIZE]):
        parts.add(start, value[start:stop])
    assert whole.value() == parts.value()
    assert whole.value() == pytest.approx(math.fsum(float(v) ** 2 for v in value), rel=1e-12)


def run_with(rule: str, compression: dict[str, object]) -> Manifest:
    return manifest(model={"vocab_size": 64}, outer={"aggregate": rule, "momentum": 0.5}, compression=compression)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "compression", [{"codec": "lowrank-int4", "rank": 4}, {"codec": "topk-int2", "k": 1000}, {"codec": "int2"}]
)
def test_the_apply_has_the_same_bits_at_any_stretch_and_thread_count(
    rule: str, compression: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    run = run_with(rule, compression)
    payloads = []
    for seed in range(5):
        state = StageState(run, 1)
        state.feedback.normal_(std=0.01, generator=torch.Generator().manual_seed(seed))
        payloads.append(memoryview(state.encode().raw))
    factors = [[1.0] * len(state.specs)] * 4 + [[0.5] * len(state.specs)]

    def applied() -> bytes:
        fresh = StageState(run, 1)
        fresh.apply(payloads, [64, 64, 128, 32, 64], None, factors)
        fresh.apply(payloads[::-1], [64, 64, 128, 32, 64], None, factors)
        return bytes(fresh.state_bytes())

    threads = torch.get_num_threads()
    whole = applied()
    monkeypatch.setattr(codec, "STRETCH", 4096)
    monkeypatch.setattr(codec, "PRODUCT", 4096)
    monkeypatch.setattr(aggregate, "SORTED_VALUES", 1000)
    torch.set_num_threads(2)
    try:
        assert applied() == whole
    finally:
        torch.set_num_threads(threads)
