"""Tests of the limits of a counted contribution: weights and clips from the announcements, to the code."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol.consensus.weighting import Announced, clip, median_norm, tensor_clips, weights
from dilocox.protocol.norms import ratio_codes
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_tensors
from tests.helpers import manifest

RUN = manifest(rounds={"tensor_clip_ratio": 2.0}, standing={"rounds": 0})
TENSORS = [len(stage_tensors(RUN.model, stage)) for stage in range(RUN.model.stages)]
OCTAVE = 8


def capped(cap: float) -> Manifest:
    return manifest(rounds={"weight_cap": cap}, standing={"rounds": 0})


@pytest.mark.parametrize(
    ("cap", "tokens", "expected"),
    [
        (1, (10, 20, 30, 1000), (10, 20, 20, 20)),
        (1, (10, 20, 30), (10, 20, 20)),
        (1, (10, 1000), (10, 10)),
        (1, (7,), (7,)),
        (1.5, (10, 20, 1000), (10, 20, 30)),
        (1.25, (3, 3, 1000), (3, 3, 3)),
        (4, (10, 20, 30, 1000), (10, 20, 30, 80)),
        (0, (10, 1000), (10, 1000)),
    ],
)
def test_a_weight_is_at_most_the_cap_times_the_lower_median(cap: float, tokens: Sequence[int], expected: Sequence[int]):
    found = weights(capped(cap), {str(number): count for number, count in enumerate(tokens)}, {})
    assert tuple(found.values()) == expected


@given(st.lists(st.integers(1, 1 << 40), min_size=3, max_size=9), st.integers(1, 1 << 40))
def test_what_one_announces_of_three_or_more_moves_no_weight_past_what_another_announced(tokens: list[int], inflated: int):
    """Check that no cluster weighs more than some other cluster announced, whatever the last one announces."""
    said = {str(number): count for number, count in enumerate([*tokens[:-1], inflated])}
    assert max(weights(capped(1), said, {}).values()) <= max(tokens[:-1])


def test_who_sends_nothing_has_no_say_in_the_median_and_is_not_clipped():
    assert median_norm([0, 0, 0, 0], [1, 1, 1, 9]) == 0
    assert median_norm([0, 0, 100, 110], [9, 1, 1, 1]) == 100
    assert clip(RUN, {"a": 0, "b": 0, "c": 100, "d": 120}, {}) == (100, {"a": 0, "b": 0, "c": 0, "d": 12})


def announced(*norms: int, of: Sequence[Sequence[int]] | None = None, total: Sequence[int] = ()) -> list[Announced]:
    """Return payloads whose tensors all have the given norm code, or those in `of`, by payload, in the first stage."""
    said = []
    for number, norm in enumerate(norms):
        stages = [bytes([norm] * count) for count in TENSORS]
        if of is not None:
            stages[0] = bytes([*of[number], *stages[0][len(of[number]) :]])
        said.append(Announced(norm, total[number] if total else 0, 1, stages))
    return said


def first(found: Sequence[Sequence[bytes]]) -> list[int]:
    """Return for each payload the clip of the first stage's first tensor."""
    return [stages[0][0] for stages in found]


def test_a_tensor_is_clipped_by_the_median_of_that_tensor():
    said = announced(100, 100, 100, 100, of=[[80], [82], [84], [112]])
    found = tensor_clips(RUN, said)
    assert first(found) == [0, 0, 0, 112 - 82 - OCTAVE]
    assert [sum(map(sum, stages)) for stages in found] == first(found), "nothing else of it is too large"
    assert [len(codes) for codes in found[0]] == TENSORS


def test_what_is_too_large_in_all_is_clipped_by_the_larger_of_the_two():
    said = announced(100, 100, 100, of=[[80], [80], [98]], total=[0, 4, 4])
    found = tensor_clips(RUN, said)
    assert first(found) == [0, 4, 10]
    assert set(found[1][1]) == {4}


def test_tensors_are_clipped_only_in_all_where_the_run_says_so():
    run = manifest(rounds={"tensor_clip_ratio": 0})
    assert first(tensor_clips(run, announced(100, 100, 100, of=[[80], [80], [98]], total=[0, 0, 4]))) == [0, 0, 4]


def test_half_who_send_zeros_do_not_clip_the_others():
    assert first(tensor_clips(RUN, announced(0, 0, 100, 100))) == [0, 0, 0, 0]


def test_half_who_send_nothing_of_a_tensor_do_not_clip_the_others():
    assert first(tensor_clips(RUN, announced(100, 100, 100, 100, of=[[0], [0], [90], [90]]))) == [0, 0, 0, 0]


def test_a_tensor_of_which_most_send_nothing_is_no_free_place():
    """Check the clip of a sender in such a tensor: the median payload's average there, not the loudest payload's
    everywhere."""
    said = announced(100, 100, 100, 100, of=[[0], [0], [0], [130]])
    elements = [spec.elements for stage in range(RUN.model.stages) for spec in stage_tensors(RUN.model, stage)]
    average = 100 + ratio_codes((elements[0] / sum(elements)) ** 0.5)
    assert first(tensor_clips(RUN, said)) == [0, 0, 0, 130 - average - OCTAVE]
    assert first(tensor_clips(RUN, announced(100, 100, 100, 250, of=[[0], [0], [0], [130]]))) == [
        0,
        0,
        0,
        130 - average - OCTAVE,
    ]


Codes = st.lists(st.integers(0, 255), min_size=1, max_size=9)


@given(Codes, Codes)
def test_no_tensor_counts_by_more_than_its_bound_and_no_bound_is_an_outliers(honest: list[int], loud: list[int]):
    """Check loud payloads that are fewer than the other senders: none counts by more than the ratio times the largest of
    these."""
    sending = [code for code in honest if code]
    loud = loud[: max(0, len(sending) - 1)]
    norms = [*honest, *loud]
    if 2 * norms.count(0) > len(norms):
        return
    found = first(tensor_clips(RUN, announced(*([100] * len(norms)), of=[[code] for code in norms])))
    assert all(code - excess <= max(sending, default=0) + OCTAVE for code, excess in zip(norms, found, strict=True))


@given(st.permutations(list(enumerate([60, 70, 0, 90, 255, 71, 72]))))
def test_the_order_in_which_they_are_counted_changes_nothing(order: list[tuple[int, int]]):
    codes = [code for _, code in order]
    found = first(tensor_clips(RUN, announced(*([100] * 7), of=[[code] for code in codes])))
    assert {number: excess for (number, _), excess in zip(order, found, strict=True)} == {
        number: max(0, code - 71 - OCTAVE) for number, code in order
    }
