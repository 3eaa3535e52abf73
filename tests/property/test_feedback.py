"""Error feedback as a ledger: the sum equals the sent part plus the rest, and nothing else ever leaves it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.node.outer.state import StageState
from dilocox.protocol.consensus.weighting import clip
from dilocox.protocol.norms import clip_factor, norm_code, norm_of
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import manifest
from tests.property.test_codec import CODECS

ROUNDING = 2e-6
"""Relative to the largest value: two float32 operations."""


def small(compression: dict[str, object]) -> Manifest:
    return manifest(model={"vocab_size": 64}, compression=compression)


def state_owing(run: Manifest, seed: int, norm: float = 1.0) -> StageState:
    state = StageState(run, 1)
    state.feedback.copy_(direction(state.size, seed) * norm)
    return state


def direction(size: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm()


def decoded(state: StageState, raw: bytes) -> torch.Tensor:
    """Return the payload's values, as float32, flat."""
    silent = StageState(state.manifest, state.stage)
    silent.return_to_feedback(memoryview(raw))
    return silent.feedback


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(CODECS), st.sampled_from([0.0, 0.25, 1.0]))
def test_what_was_owed_is_what_is_sent_plus_what_is_left(seed: int, compression: dict[str, object], share: float):
    run = small(compression)
    state = state_owing(run, seed)
    before = state.feedback.clone()
    encoded = state.encode()
    assert encoded.norm == pytest.approx(wire.decoded_norm(wire.parse(encoded.raw, state.layout())))
    assert 0 <= encoded.error < 1
    after, said = state.feedback.clone(), decoded(state, encoded.raw)
    rounding = ROUNDING * float(before.abs().max())
    assert float((after + said - before).abs().max()) <= rounding
    state.return_to_feedback(memoryview(encoded.raw), shares=[share] * len(state.specs))  # so much of it no commit took
    assert float((state.feedback - after - share * said).abs().max()) <= rounding


def swarm_round(states: list[StageState], work: list[torch.Tensor], medians: list[float]) -> None:
    """Add every cluster's work and send; the clipped part returns. `medians` gains the round's median."""
    run, sent = states[0].manifest, {}
    for index, (state, part) in enumerate(zip(states, work, strict=True)):
        state.feedback.add_(part)
        sent[str(index)] = state.encode()
    median, clips = clip(run, {name: norm_code(encoded.norm) for name, encoded in sent.items()}, {})
    medians.append(norm_of(median))
    for name, encoded in sent.items():
        factor = clip_factor(clips[name])
        assert encoded.norm * factor <= 1.1 * run.rounds.clip_ratio * medians[-1], "it counts for too much"
        states[int(name)].return_to_feedback(memoryview(encoded.raw), shares=[1 - factor] * len(states[0].specs))


@pytest.mark.parametrize("compression", [CODECS[2], CODECS[5]])
def test_a_cluster_of_three_medians_keeps_a_bounded_backlog(compression: dict[str, object]):
    """Check a cluster of three medians: part of the work has the same direction each round, as in training; the rest is
    new.

    The constant part must fit into a bounded payload of this codec with a dense direction. A larger part could not be
    bounded without forgetting.
    """
    run = small(compression)
    states = [StageState(run, 1) for _ in range(3)]
    drift = direction(states[0].size, 10**6)
    medians: list[float] = []
    backlog = []
    for number in range(200):
        news = [direction(states[0].size, 3 * number + index) for index in range(3)]
        work = [(3.0 if index == 0 else 1.0) * (drift / 6 + part) for index, part in enumerate(news)]
        swarm_round(states, work, medians)
        backlog.append(float(states[0].feedback.norm()) / medians[-1])
    assert max(backlog[150:]) < 1.1 * max(backlog[50:150]), "it grows without end"
    assert max(backlog) < 12


def test_a_cluster_that_was_excluded_for_five_rounds_comes_back_in():
    run = small({"codec": "topk-int2", "k": 1000, "entropy_coding": True})
    states = [StageState(run, 1) for _ in range(3)]
    drift = direction(states[0].size, 10**6)
    medians: list[float] = []
    backlog: list[float] = []
    for number in range(60):
        work = [drift / 3 + direction(states[0].size, 3 * number + index) for index in range(3)]
        away = states[0] if 20 <= number < 25 else None
        if away is not None:  # its payload is not counted: all of it returns
            away.feedback.add_(work[0])
            owed = away.feedback.clone()
            away.return_to_feedback(memoryview(away.encode().raw))
            assert torch.allclose(away.feedback, owed, atol=1e-6)
            swarm_round(states[1:], work[1:], medians)
        else:
            swarm_round(states, work, medians)
        backlog.append(float(states[0].feedback.norm()) / float(states[1].feedback.norm()))
    assert backlog[24] > 1.2, "five rounds of work waited"
    assert backlog[-1] < 1.1, "and were sent"
