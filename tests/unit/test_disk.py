"""What a run takes of a disk, by hand; what a round really writes: test_boundaries.py."""

from typing import Any

import pytest

from dilocox.node import disk, memory
from dilocox.node.plan import inside, most_written
from dilocox.protocol.auditing import WAIT
from tests.helpers import manifest

WIDE: dict[str, Any] = {"compression": {"codec": "fp32", "rank": None}, "rounds": {"snapshot_every": 4}}
"""Payloads are as large as what they stand for."""
RUN = manifest(**WIDE)
WEIGHTS = memory.stage_bytes(RUN, range(RUN.model.stages), half=False).weights


def test_it_is_filled_with_states_boundaries_and_payloads():
    expected = 5 * 2 * WEIGHTS + 3 * (2 + 2) * WEIGHTS + 7 * 3 * 4 * WEIGHTS
    assert disk.disk_bytes(RUN, 7) == pytest.approx(expected, rel=0.02)


def test_who_keeps_for_others_writes_no_boundaries():
    assert disk.held_bytes(RUN, 7) == pytest.approx(5 * 2 * WEIGHTS + 7 * 3 * 4 * WEIGHTS, rel=0.02)


def test_a_run_that_audits_writes_the_states_of_each_phase():
    audited = manifest(**WIDE, audit={"segments": 2})
    marks = 3 * audited.phase_bytes
    assert disk.written(audited, 7).marks == marks
    assert disk.written(audited, 7).each(1) == disk.written(RUN, 7).each(1) + marks
    assert disk.disk_bytes(audited, 7) == disk.disk_bytes(RUN, 7) + (WAIT + 2) * marks


def test_boxes_of_a_cluster_write_what_their_stages_take():
    whole, parts = disk.written(RUN, 7), [disk.written(RUN, 7, [stage]) for stage in range(RUN.model.stages)]
    for name in vars(whole):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert most_written(RUN, inside(RUN, [1, 1]), 7) == max(parts, key=lambda part: part.waited_for)
