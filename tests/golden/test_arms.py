"""The convergence bench: every kind of arm really trains, counts the bytes it sends, and sees the same tokens."""

import math

import pytest

from bench import convergence, unequal
from bench.arms import ARMS, CLUSTERS, Arm
from bench.convergence import Job
from bench.study.design import Cell, Trial, drawn
from bench.study.trial import found, run_all
from bench.texts import stdlib
from dilocox.node.plan import PAPER_RATIO

STEPS = 8

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "RUNS", tmp_path)


@pytest.mark.parametrize("name", ["AllReduce", "CocktailSGD", "SparseLoCo", "DiLoCoX", "ours"])
def test_an_arm_runs_and_its_result_is_kept(runs, name: str):
    job = Job(name, 0, seed=1, steps=STEPS, text=stdlib(), ratio=0.1)
    assert job.result() is None
    convergence.run_job(job)
    result = job.result()
    assert result is not None
    last = result["points"][-1]
    arm = job.definition
    assert last["tokens"] == CLUSTERS * STEPS * 8 * 64
    assert 2.0 < last["loss"] < 6.0
    rounds = STEPS // min(arm.horizon, STEPS // 2)
    bits = 8 * last["wire_bytes"] / result["parameters"]
    assert last["seconds"] > STEPS, "a step is a second, and none of these exchanges for nothing"
    low, high = {"allreduce": (32 * STEPS, 32 * STEPS + 1), "cocktail": (0.02 * STEPS, 0.2 * STEPS)}.get(
        arm.runner, (0.3 * rounds, 1.0 * rounds)
    )
    assert low <= bits <= high


@pytest.mark.parametrize("name", ["AllReduce, Muon", "muon | alone", "muon | int2 | rebase", "adamw | low rank | none"])
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


def test_every_arm_has_equally_many_choices_and_a_valid_manifest():
    assert len({len(arm.choices) for arm in ARMS}) == 1
    for arm in ARMS:
        for choice in arm.choices:
            run = arm.manifest(choice, 600, 0)
            assert run.nominal_steps(run.rounds.count + 1) == 600


def arm_named(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def test_a_commit_arrives_when_the_paper_s_proportions_say():
    """Two thirds of a round of 20, of which what every round costs is nearly half: half the bytes take more than half as long."""
    arm = arm_named("DiLoCoX")
    clock = convergence.expected(arm.manifest(arm.choices[0], 600, 0), PAPER_RATIO)
    assert clock.arrival_step == 14
    assert clock.line_seconds == pytest.approx(0.536 * clock.exchange_seconds, rel=1e-3)
    dense = convergence.expected(arm_named("DiLoCoX without compression").manifest(arm.choices[0], 600, 0), PAPER_RATIO)
    assert dense.round.steps == 4 * 20, "it trains on to max_inner_steps, and then waits"
    assert dense.round.waited > 100


def test_rounds_that_grow_longer_are_fewer_so_that_every_arm_reads_as_much():
    arm = arm_named("ours, H = 5")
    job = Job(arm.name, 0, seed=1, steps=600, text=stdlib(), ratio=PAPER_RATIO)
    longer = convergence.expected(job.run, PAPER_RATIO).round.steps
    assert 5 < longer <= 10
    assert 600 - longer < 5 + (job.run.rounds.count - 1) * longer <= 600


@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        ("waiting", (10, 10)),
        pytest.param("fixed H", (25, 10), marks=pytest.mark.thorough),
        pytest.param("time-boxed", (40, 16), marks=pytest.mark.thorough),
    ],
)
def test_unequal_boxes_take_the_steps_that_their_rule_allows(monkeypatch, rule: str, steps: tuple[int, int]):
    """In the time of 40 steps of a fast box; (a fast one's, the slow one's)."""
    monkeypatch.setattr(unequal, "STEPS", 40)
    monkeypatch.setattr(unequal, "HORIZON", 5)
    _, tokens = unequal.run(rule, seed=0)
    assert tokens == (3 * steps[0] + steps[1]) * 8 * 64


def test_the_cost_of_a_late_commit_is_nothing_where_waiting_never_gets_as_far():
    def summary(name: str, *losses: float) -> dict[str, object]:
        points = [{"steps": 20.0 * (index + 1), "loss": loss} for index, loss in enumerate(losses)]
        arm = next(arm for arm in ARMS if arm.name == name)
        return {"arm": name, "choice": arm.choices[0], "wire_bytes": 80_000, "curves": [points]}

    waiting = summary("ours without overlap", 3.0, 2.0, 1.5)
    assert convergence.delay_cost([summary("ours", 3.0, 2.0, 1.4), waiting], 0.5, stdlib()) == 0
    behind = convergence.delay_cost([summary("ours", 3.2, 2.2, 1.75), waiting], 0.5, stdlib())
    later = convergence.delay_cost([summary("ours", 3.2, 2.4, 2.0), waiting], 0.5, stdlib())
    assert behind is not None
    assert later is not None
    assert 0 < behind < later
    assert convergence.delay_cost([waiting], 0.5, stdlib()) is None
