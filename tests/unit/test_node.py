"""Small decisions of the node, without processes."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.node.outer.background import Background
from dilocox.node.training.worker.throttle import Pace
from dilocox.node.workers import devices as machine
from dilocox.node.workers.devices import Devices, this_machine
from dilocox.node.workers.environment import WorkerSettings
from dilocox.protocol import events
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.member import member
from dilocox.protocol.member.node_status import Status, status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.views import json_views as views
from tests.helpers import COORDINATOR, Table, identity, manifest


def test_a_box_holds_as_many_workers_as_it_has_devices(monkeypatch: pytest.MonkeyPatch):
    found = []
    for cards in ("", "0,1,2,3,4,5,6,7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
        found += [this_machine(None).devices, this_machine(2).devices]
    assert found == [1, 2, 8, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"this machine has 1 CUDA device$"):
        this_machine(2)


def test_a_box_knows_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "GRANTED", tmp_path / "memory.max")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    whole = this_machine(1).host_bytes
    assert whole > 1 << 30
    for granted, bytes_ in (("max\n", whole), (f"{1 << 29}\n", 1 << 29), (f"{1 << 60}\n", whole)):
        (tmp_path / "memory.max").write_text(granted)
        assert this_machine(1) == Devices(1, host_bytes=bytes_)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine(None).device_bytes == 0, "no driver says"
    command = tmp_path / "nvidia-smi"  # a double of the driver's command
    command.write_text("#!/bin/sh\necho 81559\necho 81559\n")
    command.chmod(0o700)
    assert this_machine(None) == Devices(2, cuda=True, device_bytes=81559 << 20, host_bytes=whole)
    command.write_text("#!/bin/sh\necho 81559\necho 2048\n")
    assert this_machine(None).device_bytes == 0, "which of the cards are ours is not said"


def test_worker_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch):
    settings = WorkerSettings("/s", Path("/m"), Path("/b"), Path("/st"), "cluster", "cpu", 4, 2, (1, 3), Path("/d=a,t"), 0.1)
    settings = replace(settings, microbatches=8, recompute=True)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings.from_environment() == settings


class Time(threading.Event):
    """Clock that only waiting moves. `sets_at` has the times of a set during a wait, in order. A wait without a set wakes
    `late`."""

    def __init__(self, *sets_at: float, late: float = 0.0) -> None:
        super().__init__()
        self.now, self.sets_at, self.late = 0.0, list(sets_at), late

    def clock(self) -> float:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        end = self.now + timeout
        if self.sets_at and self.sets_at[0] <= end:
            end = self.sets_at.pop(0)
            self.set()
        self.now = end + (0.0 if self.is_set() else self.late)
        return self.is_set()


def test_a_paced_step_begins_no_sooner_and_hears_commands_meanwhile():
    time, heard = Time(2.5, 2.75), list[float]()
    pace = Pace(1.0, time, time.clock)

    def take(stop_at: float) -> bool:
        heard.append(time.now)
        return time.now >= stop_at

    begun = []
    for worked in (0.0, 0.25, 3.0, 0.0):  # a step that took longer than the pace is followed at once
        pace.rest(lambda: take(math.inf))
        begun.append(time.now)
        time.now += worked
    assert begun == [0.0, 1.0, 2.0, 5.0]
    assert heard == [1.0, 2.0]
    time = Time(0.5, 0.75)
    pace, heard = Pace(1.0, time, time.clock), []
    pace.rest(lambda: take(0.75))
    pace.rest(lambda: take(0.75))
    assert heard == [0.5, 0.75], "a command is taken when it comes, and one to stop ends the rest"


def test_who_is_woken_late_makes_no_later_step_late():
    time = Time(late=0.125)
    pace, begun = Pace(1.0, time, time.clock), []
    for worked in (0.25, 0.25, 1.0, 0.25):
        pace.rest(lambda: False)
        begun.append(time.now)
        time.now += worked
    assert begun == [0.0, 1.125, 2.125, 3.125], "the third one ended after its time, and is followed at once"


def test_what_a_command_takes_is_no_rest():
    time, begun = Time(0.75), []
    pace = Pace(1.0, time, time.clock)

    def take() -> bool:
        time.now += 5.0 if time.now < 1 else 0.0
        return False

    for _ in range(3):
        pace.rest(take)
        begun.append(time.now)
        time.now += 0.25
    assert begun == [0.0, 6.0, 7.0]


def test_the_rest_of_a_step_s_time_is_had_after_work_beside_it_too():
    begun: dict[float, list[float]] = {}
    for computes in (0.25, 0.5, 1.5):
        time = Time()
        pace, begun[computes] = Pace(1.0, time, time.clock), []
        for beside in (0.0, 0.75, 0.0, 0.0):
            pace.rest(lambda: False)
            begun[computes].append(time.now)
            time.now += computes
            with pace.no_rest():
                time.now += beside
    assert begun[0.25] == begun[0.5] == [0.0, 1.0, 2.75, 3.75], "what it costs is the same whatever a step computes for"
    assert begun[1.5] == [0.0, 1.5, 3.75, 5.25]


def test_without_a_pace_nobody_rests():
    time = Time()
    pace = Pace(0.0, time, time.clock)
    for _ in range(3):
        pace.rest(lambda: pytest.fail("there was nothing to wait for"))
    assert time.now == 0


def test_what_a_background_job_raises_is_not_swallowed():
    background = Background()
    assert background.idle
    with pytest.raises(ZeroDivisionError):
        background.submit(lambda: 1 / 0).result(timeout=600)
    with pytest.raises(ZeroDivisionError):
        _ = background.idle
    assert background.idle


def test_every_event_has_a_sentence_and_a_view():
    samples = [
        events.StateChanged("training", "on the roster"),
        events.PhaseEnded(3, 20, 2.5, 1000),
        events.CommitApplied(3, True, 4, 7, "abcd"),
        events.NotCounted(3, pb.REASON_LATE, "too slow"),
        events.Diverged(3, "bits"),
        events.WorkersEnded("a process died"),
        events.RunFinished(12),
    ]
    for event in samples:
        assert event.view()["line"] == event.line()
        assert event.line() != event.kind
    assert "late: too slow" in samples[3].line()


def test_who_was_taken_off_the_roster_is_told_until_when():
    table = Table(manifest()).genesis()
    me, training = identity(2).peer, Status("training", "on the roster")
    table.absent(2)
    table.train(2, numbers=[0, 1])
    rest = table.head.resting[me]
    resting = status(member.start(table.run, me, table.head), training)
    assert resting.name == "resting"
    assert f"commit {rest.until} may" in resting.why
    over = replace(table.head, round=rest.until)
    assert status(member.start(table.run, me, over), training).name == "warming up"


def test_views_tell_who_counted_who_did_not_and_why():
    table = Table(manifest()).genesis()
    before = table.head
    table.contribute().vote(reject={2: pb.REASON_NORM_TOO_LARGE})
    row, detail = views.describe(before, table.commits[-1])
    assert row.items() <= detail.items()
    assert detail["counted"] == 2
    assert detail["roster"] == 3
    assert [(item["peer"], item["reason"]) for item in detail["excluded"]] == [(identity(2).peer, "norm-too-large")]
    presence = services.PresenceList(peers=[services.Presence(peer=identity(0).peer, present=True, round=2, step=5)])
    rows = views.peers(table.run, table.head, presence, {COORDINATOR.peer: pb.PeerRecord()}, COORDINATOR.peer)
    assert [row["peer"] for row in rows] == sorted(identity(n).peer for n in range(3))
    assert [row["step"] for row in rows if row["peer"] == identity(0).peer] == [5]
    assert [row["replicas"] for row in views.stages(table.run, table.head)] == [3, 3]
    assert views.stages(table.run, initial_head(COORDINATOR.peer))[0]["replicas"] == 0
