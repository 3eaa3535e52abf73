"""Adaptive compression and H: follows what is measured, either way, within bounds; holds on missing or absurd measurements."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol.adaptive import STEP, next_inner_steps, next_rank_or_k
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import messages_pb2 as pb
from tests.helpers import Table, manifest

RANK = {"rank": 16, "adapt": "effective-rank", "min_keep": 4, "max_keep": 32}
BUDGET = {"codec": "topk-int2", "k": 256, "adapt": "error-budget", "error_budget": 0.6, "min_keep": 64, "max_keep": 1024}


def counted(*measurements: tuple[float, float]) -> list[pb.Contribution]:
    return [pb.Contribution(effective_rank=rank, error=error) for rank, error in measurements]


def test_the_rank_is_the_mean_of_the_effective_rank_over_a_window():
    run = manifest(compression={**RANK, "rank_window": 5})
    assert next_rank_or_k(run, 16, counted((26.0, 0), (25.0, 0), (27.0, 0))) == 18
    assert next_rank_or_k(run, 16, counted((16.0, 0))) == 16
    assert next_rank_or_k(run, 16, counted((6.0, 0))) == 14
    assert next_rank_or_k(run, 16, counted((200.0, 0))) == 20, "a step at most"
    assert next_rank_or_k(run, 32, counted((40.0, 0))) == 32
    assert next_rank_or_k(run, 4, counted((1.0, 0))) == 4
    reached, rank = [], 16
    for _ in range(12):
        rank = next_rank_or_k(run, rank, counted((9.0, 0)))
        reached.append(rank)
    assert reached[:3] == [14, 13, 12]
    assert reached[-1] == 9, "it gets to where it is measured to be"


def test_error_budget_moves_k_either_way():
    run = manifest(compression=BUDGET)
    assert next_rank_or_k(run, 256, counted((0, 0.9))) == 320
    assert next_rank_or_k(run, 256, counted((0, 0.6))) == 256
    assert next_rank_or_k(run, 256, counted((0, 0.3))) == 204
    assert next_rank_or_k(run, 64, counted((0, 0.1))) == 64


def test_fixed_never_moves():
    assert next_rank_or_k(manifest(), 8, counted((1.0, 1.9))) == 8


@given(st.lists(st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 2), max_size=5), st.integers(4, 32))
def test_any_measurements_stay_within_bounds_and_one_step(measurements, keep):
    for settings in (RANK, {**RANK, "adapt": "error-budget"}):
        moved = next_rank_or_k(manifest(compression=settings), keep, counted(*measurements))
        assert 4 <= moved <= 32
        assert math.floor(keep / STEP) <= moved <= math.ceil(keep * STEP)


def test_absurd_or_missing_measurements_hold():
    run = manifest(compression=RANK)
    for absurd in (0.0, -1.0, 1e9, math.nan, math.inf):
        assert next_rank_or_k(run, 16, counted((absurd, 0), (absurd, 0), (8.0, 0))) == 16
    assert next_rank_or_k(run, 16, []) == 16


def test_h_follows_in_proportion_within_its_bounds():
    run = manifest(compression=RANK, rounds={"inner_steps": 40, "max_inner_steps": 60, "min_inner_steps": 15})
    assert [next_inner_steps(run, 3, keep) for keep in (16, 8, 4, 24, 32)] == [40, 20, 15, 60, 60]
    fixed = manifest(compression=RANK, rounds={"inner_steps": 4})
    assert next_inner_steps(fixed, 3, 8) == 4


def test_the_commit_records_the_decision_and_anyone_recomputes_it():
    table = Table(manifest(compression={**RANK, "rank": 8, "max_keep": 16})).genesis()
    assert table.head.rank_or_k == 8
    for number in range(3):
        table.submit(table.contribution(number, effective_rank=8.0))
    table.vote()
    assert table.head.rank_or_k == 8
    for number in range(3):
        table.submit(table.contribution(number, effective_rank=17.5))
    table.vote()
    assert table.head.rank_or_k == 10
    assert table.commits[-1].body.inner_steps == table.run.inner_steps(table.head.round)
    table.verify()


def test_bounds_that_make_no_sense_are_refused():
    def refuses(**compression: object) -> None:
        with pytest.raises((ValueError, ConfigError)):
            manifest(compression=compression)

    refuses(rank=8, adapt="effective-rank", min_keep=9)
    refuses(rank=8, adapt="effective-rank", max_keep=4)
    refuses(codec="int4", adapt="error-budget")
    refuses(codec="topk-int2", k=64, adapt="effective-rank")


def test_momentum_rises_over_its_warm_up():
    run: Manifest = manifest(outer={"momentum": 0.8, "momentum_warmup_rounds": 4})
    assert [round(run.momentum(n), 3) for n in (1, 2, 4, 9)] == [0.2, 0.4, 0.8, 0.8]


def test_a_time_boxed_round_stands_where_its_steps_would_be():
    run = manifest(rounds={"inner_steps": 8, "max_inner_steps": 24, "synchronous_rounds": 2, "first_inner_steps": 4})
    assert [run.nominal_steps(n) for n in (1, 2, 3, 4)] == [0, 4, 10, 18]
