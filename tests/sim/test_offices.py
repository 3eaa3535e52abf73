"""Explored schedules of several coordinators over one store: paused, killed and cut off, answers lost, late and twice.

No fork, one chain, and no round is lost, whatever happens; what runs is the product's shared log, driver and chain file.
"""

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from tests.helpers import COORDINATOR, manifest
from tests.sim.offices import Faults, World

SCHEDULES = int(os.environ.get("DILOCOX_SCHEDULES", "200"))
OFFICES, PEERS = 3, 3
FAULTS_END = 60.0
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Folder in memory: no power fails in this test, so synced data need no disk."""
PATIENCE = 3000.0
RUN = manifest(rounds={"count": 4, "min_clusters": 2, "start_clusters": 3, "deadline_seconds": 60, "vote_seconds": 20})
NUMBER = st.integers(0, OFFICES - 1)
AT = st.integers(0, 400).map(lambda tenths: tenths / 10)
LONG = st.sampled_from([0.3, 2.0, 3.5, 5.0, 15.0])
FAULT = st.tuples(st.sampled_from(["pause", "kill", "cut", "pause the leader", "kill the leader"]), NUMBER, AT, LONG)
CHANCE = st.sampled_from([0.0, 0.05, 0.3])
HELD_BALLOT = [
    ("kill the leader", 1, 25.2, 0.3),
    ("pause", 0, 34.2, 15.0),
    ("kill", 2, 27.5, 0.3),
    ("kill", 2, 17.0, 5.0),
    ("pause", 2, 1.5, 15.0),
]
"""The store does not answer for ten seconds after a ballot was made."""
SCHEDULE = st.tuples(st.lists(FAULT, max_size=8), CHANCE, CHANCE, CHANCE, st.integers(0, 2**16))


def inflict(world: World, kind: str, number: int, at: float, seconds: float) -> None:
    def begin() -> None:
        leading = [office for office in world.offices if office.driver is not None and office.up]
        office = leading[0] if "leader" in kind and leading else world.offices[number]
        if kind.startswith("pause"):
            office.paused = True
            world.after(seconds, lambda: setattr(office, "paused", False))
        elif kind.startswith("kill"):
            office.kill()
            world.after(seconds, lambda: None if office.up else office.start())
        else:
            office.line.cut = True
            world.after(seconds, lambda: setattr(office.line, "cut", False))

    world.after(at, begin)


def explore(folder: Path, faults: list[Any], loss: float, repeat: float, late: float, seed: int) -> World:
    line = Faults(random.Random(seed), 1000.0 + FAULTS_END, loss, repeat, late)
    world = World(folder, RUN, OFFICES, PEERS, seed, line)
    for fault in faults:
        inflict(world, *fault)
    try:
        world.begin()
        assert world.run_until(1000.0 + PATIENCE, world.finished), "a dead run"
    finally:
        world.close()
    head = initial_head(COORDINATOR.peer, RUN.model.root)
    for number in range(len(world.published)):
        head, commit = chain.extend(RUN, head, world.published[number].envelope)
        assert not 0 < number <= RUN.rounds.count or len(commit.body.counted) >= 2, "a round was lost"
    assert head.finished
    return world


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(SCHEDULE)
@example((HELD_BALLOT, 0.3, 0.3, 0.0, 41))
def test_whatever_happens_to_coordinators_there_is_one_chain_and_no_round_is_lost(schedule):
    folder = Path(tempfile.mkdtemp(prefix="offices-", dir=MEMORY))
    try:
        explore(folder, *schedule)
    finally:
        shutil.rmtree(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pause the leader", "kill the leader", "cut"])
def test_a_takeover_takes_less_than_five_seconds(tmp_path: Path, kind: str):
    """Check a takeover's time on the world's clock: lease, check, election; then the same round continues."""
    faults = Faults(random.Random(1), 0.0)
    world = World(tmp_path, RUN, OFFICES, PEERS, 1, faults)
    world.begin()
    try:
        assert world.run_until(1500.0, lambda: 2 in world.published)
        before = next(office for office in world.offices if office.driver is not None)
        inflict(world, kind, before.number, 0.0, 1000.0)
        fell = world.now

        def led() -> bool:
            return any(office.driver is not None for office in world.offices if office is not before)

        assert world.run_until(fell + 5.0, led), "nobody took over"
        assert world.run_until(fell + 2000.0, world.finished)
    finally:
        world.close()
