"""The clock: what a step and a round take follows from bytes, copies, both directions, fixed costs and max_inner_steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.node.planning import time_model
from dilocox.node.planning.time_model import HEADERS, SEVERAL_FILL, Line, Method, Site, Step, Timeline, estimate

SITE = Site(10**9, Step(1.0), 1000, clusters=3, line=Line.both_ways(1e8), boxes=2)
METHOD = Method("x", 100e6, 50, 150)
BY_LINE = 8 * HEADERS * 100e6 / 2 * 2 / 1e8 / SEVERAL_FILL
"""Seconds: half of a payload, to two others."""


def test_a_box_sends_its_share_once_to_every_other_cluster():
    found = estimate(SITE, METHOD)
    assert found.line_seconds == pytest.approx(BY_LINE)
    assert found.box_bytes == 100e6
    assert estimate(replace(SITE, clusters=5), METHOD).line_seconds == pytest.approx(2 * BY_LINE)
    assert estimate(replace(SITE, boxes=1), METHOD).line_seconds == pytest.approx(2 * BY_LINE)


def test_one_transfer_each_way_fills_a_line_and_several_do_not():
    assert estimate(replace(SITE, clusters=2), METHOD).line_seconds == pytest.approx(BY_LINE / 2 * SEVERAL_FILL)


def test_the_slower_direction_counts():
    for line in (Line(1e8, 1e9), Line(1e9, 1e8)):
        assert estimate(replace(SITE, line=line), METHOD).line_seconds == pytest.approx(BY_LINE)


def test_what_a_round_costs_does_not_shrink_with_its_bytes():
    costly = replace(SITE, fixed_seconds=10.0)
    for size in (METHOD.payload_bytes, 0.0):
        method = replace(METHOD, payload_bytes=size, encode_seconds=2.0, apply_seconds=1.0)
        found = estimate(costly, method)
        assert found.exchange_seconds == pytest.approx(10 + 2 + 3 * 1.0 + found.line_seconds)


def test_hidden_behind_computing_it_costs_nothing_and_waited_for_its_whole_time():
    found = estimate(SITE, METHOD)
    assert (found.utilisation, found.tokens_per_second, found.round.waited) == (1.0, 1000.0, 0.0)
    assert found.arrival_step == 11
    waiting = estimate(SITE, replace(METHOD, overlap="none"))
    assert waiting.round.seconds == pytest.approx(50 + BY_LINE)
    assert waiting.tokens_per_second == pytest.approx(1000 * 50 / (50 + BY_LINE))


@pytest.mark.parametrize("overlap", ["delayed", "rebase"])
def test_while_a_commit_is_late_a_cluster_trains_on_and_then_waits(overlap: time_model.Overlap):
    late = replace(METHOD, payload_bytes=1e9, overlap=overlap)
    found = estimate(SITE, late)
    assert found.arrival_step == found.round.steps == 105
    assert (found.utilisation, found.tokens_per_second) == (1.0, 1000.0)
    held = estimate(SITE, replace(late, max_inner_steps=60))
    assert held.round.steps == 60
    assert held.round.waited == pytest.approx(held.exchange_seconds - 60)
    assert held.utilisation == pytest.approx(60 / held.exchange_seconds)


def test_a_step_is_its_bubble_too_or_its_activations():
    assert Step(2.0, bubble=0.5).seconds == 4.0
    assert Step(2.0, bubble=0.5, activations=5.0).seconds == 5.0
    found = estimate(replace(SITE, step=Step(2.0, 0.5, 5.0)), replace(METHOD, payload_bytes=0.0))
    assert found.utilisation == pytest.approx(4 / 5)
    assert found.tokens_per_second == pytest.approx(1000 / 5)


def test_a_ring_moves_a_gradient_nearly_twice_in_every_step():
    found = time_model.ring(SITE)
    assert found.line_seconds == pytest.approx(8 * HEADERS * 2e9 / 2 * 4 / 3 / 1e8)
    assert found.tokens_per_second == pytest.approx(1000 / (1 + found.line_seconds))


@given(
    st.floats(1e-3, 1e3),
    st.floats(0, 1e4),
    st.integers(1, 500),
    st.integers(0, 500),
    st.sampled_from(("none", "delayed", "rebase")),
)
def test_a_timeline_of_equal_rounds_is_the_estimated_round(
    step: float, fixed: float, inner: int, more: int, overlap: time_model.Overlap
):
    """Compare the lab's phases with `plan`'s formula: both are one clock."""
    site = replace(SITE, step=Step(step), fixed_seconds=fixed)
    method = replace(METHOD, inner_steps=inner, max_inner_steps=inner + more, overlap=overlap)
    taken, timeline = estimate(site, method).round, Timeline(site)
    timeline.phase(inner, method, synchronous=False)
    for _ in range(3):
        before = timeline.ended
        timeline.phase(taken.steps, method, synchronous=overlap == "none")
        assert timeline.ended - before == pytest.approx(taken.seconds)
        assert timeline.committed - timeline.ended == pytest.approx(time_model.exchange_seconds(site, method))


@given(st.floats(1e-3, 1e3), st.floats(0, 1e5))
def test_a_commit_is_there_at_its_arrival_step_and_not_before(step: float, exchange: float):
    arrival = time_model.arrival_step(step, exchange)
    assert arrival * step >= exchange * (1 - 1e-9) - 1e-9, "but for what a float cannot say"
    assert (arrival - 1) * step < exchange or arrival == 0
