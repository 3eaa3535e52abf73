"""Tests of the cluster's facts, which are reported when every rank has reported its part."""

import math
import os

import pytest

from dilocox.node.workers.process import ticks_of
from dilocox.node.workers.progress import STUCK_SECONDS, STUCK_STEPS, ClusterProgress
from dilocox.protocol.pb import worker_pb2 as pb
from tests.helpers import digest


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def part(stage: int, norm: float = 3.0) -> pb.StagePayload:
    return pb.StagePayload(stage=stage, digest=digest(stage), size=10, norm=norm, effective_rank=stage + 1.0, error=0.5)


def boundary(round: int, *stages: pb.StagePayload) -> pb.Boundary:
    return pb.Boundary(round=round, inner_steps=7, tokens=700, payloads=stages)


def ready(round: int, stages: list[int], loss: float | None = None) -> pb.Ready:
    states = [pb.StageState(stage=stage, digest=digest(stage)) for stage in stages]
    return pb.Ready(round=round, states=states, evaluated=loss is not None, evaluation_loss=loss or 0.0, applied_at_step=4)


def test_a_phase_is_told_when_every_rank_has_told_it_in_stage_order():
    crew = ClusterProgress()
    crew.expect(2)
    assert crew.phase(1, boundary(3, part(2, norm=4.0), part(3, norm=0.0))) is None
    assert crew.phase(1, boundary(4, part(2), part(3))) is None  # a rank may be a phase ahead
    phase = crew.phase(0, boundary(3, part(0, norm=3.0), part(1, norm=0.0)))
    assert phase is not None
    assert [payload.stage for payload in phase.payloads] == [0, 1, 2, 3]
    assert phase.norm == 5.0
    assert phase.effective_rank == 2.5
    assert phase.error == 0.5
    assert crew.progress.tokens == 700
    assert crew.progress.inner_steps == {3: 7}


def test_a_rank_that_says_it_twice_does_not_speak_for_another():
    crew = ClusterProgress()
    crew.expect(2)
    assert crew.phase(0, boundary(3, part(0))) is None
    assert crew.phase(0, boundary(3, part(0))) is None
    assert crew.ready(1, ready(4, [1])) is None
    assert crew.ready(1, ready(4, [1])) is None


def test_what_workers_do_before_their_first_step_is_said_by_step():
    crew = ClusterProgress()
    crew.expect(2)

    def says() -> str | None:
        status = crew.status()
        assert status is None or status.name == "starting"
        return status.why if status is not None else None

    assert says() is None
    crew.hello(0, pb.Hello(rank=0, stages=[0]))
    assert says() == "1 of 2 stage workers are up"
    crew.hello(1, pb.Hello(rank=1, stages=[1]))
    assert says() == "the stage workers are up; what they start from is looked for"
    crew.start(4, 2)
    assert says() == "the stage workers apply the commits since: 0 of 2"
    crew.ready(0, ready(4, [0]))
    crew.ready(1, ready(4, [1]))
    assert says() == "the stage workers apply the commits since: 0 of 2"
    crew.ready(0, ready(5, [0]))
    crew.ready(1, ready(5, [1]))
    assert says() == "the stage workers apply the commits since: 1 of 2"
    crew.ready(0, ready(6, [0]))
    crew.ready(1, ready(6, [1]))
    assert says() == "the stage workers take their first step"
    crew.begin()
    assert says() is None


def test_copies_that_follow_have_nothing_to_tell():
    crew = ClusterProgress()
    crew.expect(4)
    for rank in range(4):
        assert crew.hello(rank, pb.Hello(rank=rank, stages=[rank % 2], copy=rank // 2)) == (rank == 3)
    assert crew.ready(0, ready(4, [0])) is None
    told = crew.ready(1, ready(4, [1]))
    assert told is not None
    assert set(told.digests) == {0, 1}
    assert crew.phase(0, boundary(3, part(0))) is None
    assert crew.phase(1, boundary(3, part(1))) is not None
    assert crew.progress.tokens == 700, "of the cluster, counted once"


def test_a_state_is_told_with_the_loss_of_whoever_measured_it():
    crew = ClusterProgress()
    crew.expect(2)
    assert crew.ready(1, ready(4, [1], loss=2.5)) is None
    told = crew.ready(0, ready(4, [0]))
    assert told is not None
    assert (told.round, told.evaluation_loss, told.applied_at_step) == (4, 2.5, 4)
    assert told.digests == {0: digest(0), 1: digest(1)}


def test_a_replay_is_told_when_every_rank_has_replayed():
    crew = ClusterProgress()
    crew.expect(2)
    results = [pb.Rechecked(round=4, states=[pb.StageState(stage=stage, digest=digest(stage))]) for stage in (0, 1)]
    assert crew.rechecked(0, results[0]) is None
    assert crew.rechecked(1, results[1]) == {0: digest(0), 1: digest(1)}


def test_a_new_generation_forgets_what_the_old_one_half_said():
    crew = ClusterProgress()
    crew.expect(2)
    assert not crew.hello(0, pb.Hello(rank=0))
    crew.phase(0, boundary(3, part(0)))
    crew.begin()
    assert crew.phase(1, boundary(3, part(1))) is None
    assert not crew.hello(1, pb.Hello(rank=1))
    assert crew.hello(0, pb.Hello(rank=0))
    assert not crew.stepped


@pytest.mark.parametrize("step_seconds", [0.01, 5.0])
def test_stuck_is_silence_much_longer_than_a_step(step_seconds: float):
    clock = Clock()
    crew = ClusterProgress(clock)
    crew.expect(1)
    patience = max(STUCK_SECONDS, STUCK_STEPS * step_seconds)
    for seconds in (step_seconds, 1000 * step_seconds, step_seconds):  # one while the machine slept
        crew.step(pb.Step(round=1, step=1, seconds=seconds, tokens=8, loss=3.0))
    clock.now += patience
    crew.computes(10)  # after a first step only steps count as progress, not busy time
    assert not crew.stuck()
    clock.now = math.nextafter(clock.now, math.inf)
    assert crew.stuck()
    crew.step(pb.Step(round=1, step=2, why="commit 1 is on its way"))  # a waiting worker repeats the reason
    assert not crew.stuck()
    assert (status := crew.status()) is not None
    assert status.name == "waiting"


def test_before_the_first_step_who_computes_goes_on_and_who_waits_for_us_may():
    clock = Clock()
    crew = ClusterProgress(clock)
    crew.expect(2)

    def later(ticks: int) -> bool:
        clock.now += STUCK_SECONDS
        crew.computes(ticks)
        clock.now += 1
        return crew.stuck()

    assert not later(5)
    assert not later(6), "a slow import"
    assert later(6), "a hung one"
    crew.hello(0, pb.Hello(rank=0))
    assert later(6), "one hangs, and the other waits for it"
    crew.hello(1, pb.Hello(rank=1))
    assert not later(6), "nobody serves us a state yet"
    crew.started = True
    assert not later(7)
    assert later(7), "it hangs while it loads the state"
    crew.begin()
    assert not crew.stuck()
    assert not later(3), "a new generation"


def test_processor_time_of_a_process_grows_while_it_computes():
    before = ticks_of(os.getpid())
    while ticks_of(os.getpid()) == before:
        sum(range(100_000))
    assert ticks_of(1 << 30) == 0
