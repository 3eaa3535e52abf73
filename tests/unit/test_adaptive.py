"""Tests of the adaptive rank: it follows the measurements, up and down, within bounds, and stays if they are missing or
absurd."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.adaptive import STEP, next_rank_or_k
from tests.helpers import Table, manifest

RANK = {"rank": 16, "adapt": "effective-rank"}


def counted(*ranks: float) -> list[pb.Contribution]:
    return [pb.Contribution(effective_rank=rank) for rank in ranks]


def test_the_rank_is_the_mean_of_the_effective_rank_over_a_window():
    run = manifest(compression=RANK)
    assert next_rank_or_k(run, 16, counted(26.0, 25.0, 27.0)) == 18
    assert next_rank_or_k(run, 16, counted(16.0)) == 16
    assert next_rank_or_k(run, 16, counted(6.0)) == 14
    assert next_rank_or_k(run, 16, counted(200.0)) == 20, "a step at most"
    assert next_rank_or_k(run, limits.RANK, counted(40000.0)) == limits.RANK
    assert next_rank_or_k(run, 1, counted(0.1)) == 1
    reached, rank = [], 16
    for _ in range(12):
        rank = next_rank_or_k(run, rank, counted(9.0))
        reached.append(rank)
    assert reached[:3] == [14, 13, 12]
    assert reached[-1] == 9, "it gets to where it is measured to be"


def test_fixed_never_moves():
    assert next_rank_or_k(manifest(), 8, counted(1.0)) == 8


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5), st.integers(1, limits.RANK))
def test_any_measurements_stay_within_bounds_and_one_step(measurements: list[float], keep: int):
    moved = next_rank_or_k(manifest(compression=RANK), keep, counted(*measurements))
    assert 1 <= moved <= limits.RANK
    assert math.floor(keep / STEP) <= moved <= math.ceil(keep * STEP)


def test_absurd_or_missing_measurements_hold():
    run = manifest(compression=RANK)
    for absurd in (0.0, -1.0, 1e9, math.nan, math.inf):
        assert next_rank_or_k(run, 16, counted(absurd, absurd, 8.0)) == 16
    assert next_rank_or_k(run, 16, []) == 16


def test_the_commit_records_the_decision_and_anyone_recomputes_it():
    table = Table(manifest(compression={**RANK, "rank": 8})).genesis()
    assert table.head.rank_or_k == 8
    for number in range(3):
        table.submit(table.contribution(number, effective_rank=8.0))
    table.vote()
    assert table.head.rank_or_k == 8
    for number in range(3):
        table.submit(table.contribution(number, effective_rank=17.5))
    table.vote()
    assert table.head.rank_or_k == 10
    assert table.commits[-1].body.inner_steps == table.run.rounds.inner_steps
    table.verify()


@pytest.mark.parametrize("codec", [{"codec": "int4"}, {"codec": "topk-int2", "k": 64}])
def test_a_codec_without_a_rank_cannot_adapt(codec: dict[str, object]):
    with pytest.raises(ValueError, match="effective rank"):
        manifest(compression={**codec, "adapt": "effective-rank"})


def test_a_time_boxed_round_stands_where_its_steps_would_be():
    run = manifest(rounds={"inner_steps": 8, "max_inner_steps": 24})
    assert [run.nominal_steps(n) for n in (1, 2, 3)] == [0, 8, 16]
