"""Real runs of the registered comparison: each kind of algorithm trains, and counts the bytes that it sends."""

import math

import pytest

from bench.study.design import Cell, Trial, drawn
from bench.study.trial import found, run_all
from bench.texts import stdlib

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    "name", ["AllReduce, Muon", "CocktailSGD", "muon | alone", "muon | int2 | rebase", "adamw | low rank | none"]
)
def test_a_run_of_the_study_is_measured_on_two_sets_and_kept(tmp_path, name: str):
    trial = Trial(Cell("small", 2, 24, 0.2), name, drawn(0), 1, stdlib())
    assert found(trial, tmp_path) is None
    [ran] = run_all([trial], 1, math.inf, tmp_path)
    result = found(trial, tmp_path)
    assert result is not None
    assert ran == trial
    assert 2.0 < result.test < 6.0
    assert 2.0 < result.tuning < 6.0
    assert result.tuning != result.test, "two texts"
    assert [point.test for point in result.curve][-1] == result.test
    assert 8 <= result.steps <= 28
    if trial.definition.uses_line:
        assert result.bits <= 0.21
        assert result.seconds > result.steps - 1, "steps take a second, and the last commit comes after them"
    else:
        assert (result.bits, result.seconds, result.steps) == (32 * trial.definition.is_reference, 24, 24)
    assert result.curve[-1].tokens == result.steps * trial.clusters * trial.run.tokens_per_step
    assert list(run_all([trial], 1, math.inf, tmp_path)) == [], "it is kept"
