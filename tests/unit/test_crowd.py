"""Runs of an arm that train together have the losses that each has by itself."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bench.lab import CPU
from bench.study import runners, together, trial
from bench.study.crowd import Crowd
from bench.study.design import ARMS, Cell, Trial, drawn
from bench.study.search import Budget
from bench.study.together import Job, fits
from bench.texts import stdlib
from dilocox.node.training.trainer import Trainer
from tests.helpers import manifest

CELL = Cell("small", 2, 12, 0.5)
RUN = manifest(
    model={"stages": 1, "vocabulary_size": 64},
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
    """Each in a run of its own."""
    crowd = Crowd(RUN, count, count, RUN.training.batch_size, CPU)
    trainers = [Trainer(RUN) for _ in range(count)]
    for trainer in trainers:
        trainer.load_initial()
        crowd.join(trainer)
    return crowd, trainers


def trained(crowd: Crowd, trainer: Trainer, phases: list[int]) -> torch.Tensor:
    """After so many steps, and so many, …"""
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
    ran = together._run(job)
    assert (len(ran.trials), ran.failed) == (2, "MemoryError()")
    assert [job.known(each) for each in ran.trials] == [
        trial.Found(1.0, 2.0, 12, 12.0, 0.1, 1, 1, 0.0, [], 1.0, "a device")
    ] * 2
    assert together._run(Job(**{**vars(job), "until": time.monotonic()})).trials == [], "no wave begins after its time"


def test_fragments_and_compressed_gradients_train_one_run_at_a_time():
    assert [name for name in ARMS if not fits(name)] == [
        name for name, arm in ARMS.items() if "fragments" in name or arm.published == "CocktailSGD"
    ]
