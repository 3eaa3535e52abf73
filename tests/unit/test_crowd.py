"""Tests that an arm's runs have the same losses together as alone."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.lab import CPU
from bench.study import runners, together, trial
from bench.study.crowd import Crowd, Group, Rates
from bench.study.design import ARMS, Cell, Trial, drawn
from bench.study.search import Budget
from bench.study.together import Job, fits
from bench.texts import stdlib
from dilocox.node.outer.state import EncodedStage
from dilocox.node.training.model.inner import BETAS
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.errors import LocalError
from dilocox.protocol.run.tensors import TensorSpec
from tests.helpers import manifest

CELL = Cell("small", 2, 12, 0.5)
RUN = manifest(
    model={"stages": 1, "vocab_size": 64},
    training={"optimizer": "muon", "precision": "float32", "microbatches": 1, "batch_size": 2},
)


@pytest.mark.parametrize(
    ("arm", "off"),
    [
        ("adamw | int4 | none", 1e-5),
        ("muon | int2 | rebase", 2e-3),  # Muon's products are in bfloat16, in another order
        ("muon | top 540 of chunks | none", 2e-3),
        ("AllReduce", 1e-5),
        ("AllReduce, Muon 0.9", 2e-3),
        ("muon | alone", 2e-3),
    ],
)
def test_runs_that_train_together_end_as_each_by_itself(
    arm: str, off: float, process_group: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runners, "POINTS", 2)
    trials = [Trial(CELL, arm, drawn(number), number, stdlib()) for number in range(2)]
    for one, found in zip(trials, runners.measured_together(trials, CPU), strict=True):
        expected = runners.runner_of(one)(one)
        for said in ("tuning", "test", "error"):
            assert found[said] == pytest.approx(expected[said], rel=off, abs=1e-9)
        for said in ("steps", "inner_steps", "arrival_step"):
            assert found[said] == expected[said]
        assert found["bits"] == pytest.approx(expected["bits"], rel=1e-2)
        assert [point["tokens"] for point in found["curve"]] == [point["tokens"] for point in expected["curve"]]


def crowd_of(count: int) -> tuple[Crowd, list[Trainer]]:
    """Return a crowd with `count` trainers, each in a separate run."""
    crowd = Crowd(RUN, count, count, RUN.training.batch_size, CPU)
    trainers = [Trainer(RUN) for _ in range(count)]
    for trainer in trainers:
        trainer.load_initial()
        crowd.join(trainer)
    return crowd, trainers


def trained(crowd: Crowd, trainer: Trainer, phases: list[int]) -> torch.Tensor:
    """Return the parameters after each phase's number of steps."""
    inputs = torch.arange(2 * 16).view(2, 16)
    with crowd.run():
        for steps in phases:
            for _ in range(steps):
                crowd.ask(trainer, inputs, inputs.roll(1))
            crowd.finish([trainer])
        return torch.cat([tensor.flatten() for _, stage in trainer.pairs() for tensor in trainer.live(stage)]).clone()


@pytest.mark.parametrize("phases", [([3, 1], [1, 3]), ([2, 0, 2], [4]), ([4], [1, 1, 1, 1]), ([0], [4])])
def test_who_asks_for_fewer_steps_stands_still_meanwhile(phases: tuple[list[int], list[int]], process_group: None):
    crowd, trainers = crowd_of(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(trained, [crowd] * 2, trainers, phases))
    for each, asked in zip(found, phases, strict=True):
        alone, (trainer,) = crowd_of(1)
        assert torch.allclose(each, trained(alone, trainer, [sum(asked)]), atol=1e-4)


def test_runs_wait_for_one_another_where_a_phase_ends_and_not_in_every_step(
    process_group: None, monkeypatch: pytest.MonkeyPatch
):
    taken: list[int] = []
    work = Crowd.take_steps

    def counted(crowd: Crowd) -> None:
        taken.append(max(len(one.batches) for one in crowd.asked))
        work(crowd)

    monkeypatch.setattr(Crowd, "take_steps", counted)
    (found,) = runners.measured_together([Trial(CELL, "adamw | int4 | none", drawn(0), 0, stdlib())], CPU)
    assert taken == [found["inner_steps"]] * (found["steps"] // found["inner_steps"])


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (12,)])
def test_a_stack_of_tensors_changes_as_torch_changes_each(optimizer: str, shape: tuple[int, ...]):
    training = RUN.training.model_copy(update={"optimizer": optimizer, "weight_decay": 0.3})
    spec = TensorSpec("model.layers.0.any", shape, 1.0)
    stack, rates = Group(spec, ["one", "other"], 3, training, CPU), [1e-2, 3e-2, 2e-2]
    stack.values.copy_(torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0)))
    each = [torch.nn.Parameter(stack.values[0, model].clone()) for model in range(3)]
    muon, decay = optimizer == "muon" and spec.hidden, 0.3 if len(shape) == 2 else 0.0
    kind = partial(torch.optim.Muon, momentum=training.muon_momentum) if muon else partial(torch.optim.AdamW, betas=BETAS)
    theirs = [kind([one], lr=rate, weight_decay=decay) for one, rate in zip(each, rates, strict=True)]
    taken = [0, 0, 0]
    for step in range(4):
        gradients = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(1 + step))
        told = []
        for model, (one, their, rate) in enumerate(zip(each, theirs, rates, strict=True)):
            if model == 1 and step in (1, 2):
                told.append(Rates.NOTHING)
                continue
            one.grad = gradients[0, model].clone()
            their.step()
            taken[model] += 1
            told.append((1.0, rate, rate, 1 - BETAS[0] ** taken[model], (1 - BETAS[1] ** taken[model]) ** 0.5))
        stack.update(gradients, Rates(torch.tensor(told).T.contiguous()))
    off = 3e-2 * max(rates) if muon else 1e-5  # of a step: Muon's products are in bfloat16
    for model, one in enumerate(each):
        assert (stack.values[0, model] - one.data).abs().max() < off


def test_a_run_that_diverges_is_never_the_best_and_stops_no_other(process_group: None, monkeypatch: pytest.MonkeyPatch):
    encode = Trainer.encode

    def diverge(trainer: Trainer, cluster: str, round: int, rank_or_k: int) -> list[EncodedStage]:
        if trainer.manifest.model.seed == 1:
            trainer.states[0].feedback.fill_(float("nan"))
        return encode(trainer, cluster, round, rank_or_k)

    monkeypatch.setattr(Trainer, "encode", diverge)
    trials = [Trial(CELL, "adamw | int4 | none", drawn(0), seed, stdlib()) for seed in range(3)]
    first, second, third = trial.train_together(trials, "cpu")
    assert second.tuning == second.test == trial.DIVERGED == trial.train(trials[1]).tuning
    assert max(first.test, third.test) < 6


def test_what_else_fails_is_no_divergence(process_group: None, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise LocalError("the disk is full")

    monkeypatch.setattr(Trainer, "encode", fail)
    with pytest.raises(LocalError, match="full"):
        trial.train(Trial(CELL, "adamw | int4 | none", drawn(0), 0, stdlib()))


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"weight_decay": 0.3}, {"muon_momentum": 0.9}])
def test_models_of_a_crowd_differ_in_their_rates_alone(change: dict[str, float], process_group: None):
    crowd = Crowd(RUN, 1, 1, RUN.training.batch_size, CPU)
    with pytest.raises(ValueError, match="rates"):
        crowd.join(Trainer(RUN.model_copy(update={"training": RUN.training.model_copy(update=change)})))
    crowd.join(Trainer(RUN.model_copy(update={"training": RUN.training.model_copy(update={"muon_learning_rate": 0.5})})))


def test_a_step_that_fails_ends_all_runs(process_group: None, monkeypatch: pytest.MonkeyPatch):
    crowd, trainers = crowd_of(2)

    def fail() -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(crowd, "_step", fail)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(trained, crowd, trainer, [1]) for trainer in trainers]
        assert all(isinstance(each.exception(), RuntimeError) for each in running)


def test_what_stops_an_arm_is_said_and_what_it_had_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    waves = iter([[trial.Found(1.0, 2.0, 12, 12.0, 0.1, 1, 1, 0.0, [], 1.0, "a device")] * 2, None])

    def train(trials: list[Trial], device: str) -> list[trial.Found]:
        assert device == "a device"
        if (found := next(waves)) is None:
            raise MemoryError
        return found

    monkeypatch.setattr(together, "train_together", train)
    job = Job(CELL, "adamw | int4 | none", stdlib(), Budget(2, 2), False, "a device", time.monotonic() + 60, tmp_path)
    ran = together.run_job(job)
    assert (len(ran.trials), ran.failed) == (2, "MemoryError()")
    assert [job.known(each) for each in ran.trials] == [
        trial.Found(1.0, 2.0, 12, 12.0, 0.1, 1, 1, 0.0, [], 1.0, "a device")
    ] * 2
    assert together.run_job(Job(**{**vars(job), "until": time.monotonic()})).trials == [], "no wave begins after its time"


def test_fragments_and_compressed_gradients_train_one_run_at_a_time():
    assert [name for name in ARMS if not fits(name)] == [
        name for name, arm in ARMS.items() if "fragments" in name or arm.published == "CocktailSGD"
    ]
