"""Tests of the bench that compares the clock with real swarms: its predictions, and its missed bars."""

from dataclasses import replace

import pytest

from bench import clock
from bench.clock import Cell, Kind
from dilocox.node.planning.time_model import HEADERS, SEVERAL_FILL
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import identity

CELL = Cell(2, "none", 1000, 1e6, 8e6, 4.0, [3.9, 4.0, 4.2])


def test_it_foretells_computing_what_a_round_costs_and_its_bytes():
    assert clock.foretold(CELL, 0.5).round.seconds == pytest.approx(clock.INNER_STEPS * clock.STEP_SECONDS + 0.5 + HEADERS)
    thrice = replace(CELL, clusters=4)
    assert clock.foretold(thrice, 0.5).line_seconds == pytest.approx(3 * HEADERS / SEVERAL_FILL)


def test_a_round_is_missed_in_either_direction():
    assert not clock.missed([replace(CELL, clock=4.59), replace(CELL, clock=3.41), CELL])
    assert len(clock.missed([replace(CELL, clock=4.61), replace(CELL, clock=3.39)])) == 2


@pytest.mark.parametrize("kind", clock.KINDS)
def test_its_swarms_have_valid_run_files(kind: Kind):
    filled = kind.run.replace("{owner}", identity(0).key.hex()).replace(
        "[data]\n", f'[data]\nname = "x"\ndigest = "{"00" * 32}"\n'
    )
    run = Manifest.from_toml(filled)
    assert run.rounds.start_clusters == kind.clusters
    assert run.rounds.inner_steps == clock.INNER_STEPS
