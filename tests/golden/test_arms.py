"""The convergence bench: every kind of arm really trains, counts the bytes it sends, and sees the same tokens."""

import pytest

from bench import convergence, unequal
from bench.arms import ARMS, CLUSTERS
from bench.convergence import Job
from bench.texts import stdlib
from dilocox.node.outer.state import StageState

STEPS = 8

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "RUNS", tmp_path)


@pytest.mark.parametrize("name", ["AllReduce", "CocktailSGD", "SparseLoCo", "DiLoCoX", "ours"])
def test_an_arm_runs_and_its_result_is_kept(runs, name: str):
    job = Job(name, 0, seed=1, steps=STEPS, text=stdlib(), ratio=0.5)
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
    low, high = {"allreduce": (32 * STEPS, 32 * STEPS + 1), "cocktail": (0.02 * STEPS, 0.2 * STEPS)}.get(
        arm.runner, (0.3 * rounds, 1.0 * rounds)
    )
    assert low <= bits <= high


def test_every_arm_has_equally_many_choices_and_a_valid_manifest():
    assert len({len(arm.choices) for arm in ARMS}) == 1
    for arm in ARMS:
        for choice in arm.choices:
            run = arm.manifest(choice, 600, 0)
            assert sum(run.inner_steps(number) for number in range(1, run.rounds.count + 1)) == 600


def test_a_commit_arrives_at_the_step_that_its_bytes_earn():
    arm = next(arm for arm in ARMS if arm.name == "DiLoCoX")
    run = arm.manifest(arm.choices[0], 600, 0)  # one stage
    size = StageState(run, 0).layout().largest
    assert convergence.arrival_steps(run, 0.5, size) == 10
    assert convergence.arrival_steps(run, 0.5, size / 2) == 5


@pytest.mark.parametrize(("rule", "steps"), [("waiting", (10, 10)), ("fixed H", (25, 10)), ("time-boxed", (40, 16))])
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
