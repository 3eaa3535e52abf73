"""Tests of a run's disk writes, computed by hand; test_boundaries.py measures a round's real writes."""

from typing import Any

import pytest

from dilocox.node.planning import disk_model, memory_model
from dilocox.node.planning.plan import inside, written_by_box
from dilocox.protocol.checks import audit_rules
from dilocox.protocol.checks.audit_rules import WAIT
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.tensors import stage_tensors
from dilocox.protocol.wire.messages import seal
from tests.fake_shards import FakeShards
from tests.helpers import COORDINATOR, digest, manifest

WIDE: dict[str, Any] = {"compression": {"codec": "fp32", "rank": None}, "rounds": {"snapshot_every": 4}}
"""Settings with payloads as large as the tensors that they encode."""
RUN = manifest(**WIDE)
WEIGHTS = memory_model.stage_bytes(RUN, range(RUN.model.stages), half=False).weights


def test_it_is_filled_with_states_boundaries_and_payloads():
    complete = 3 * (2 + 2) * WEIGHTS + 2 * 2 * WEIGHTS
    expected = 5 * 2 * WEIGHTS + 2 * WEIGHTS + complete + 7 * 3 * 4 * WEIGHTS
    assert disk_model.disk_bytes(RUN, 7) == pytest.approx(expected, rel=0.02)


def test_who_keeps_for_others_writes_no_boundaries():
    assert disk_model.held_bytes(RUN, 7) == pytest.approx(5 * 2 * WEIGHTS + 7 * 3 * 4 * WEIGHTS, rel=0.02)


def test_a_round_writes_by_hand():
    """Compute feedback, anchor, moments, Θ with momentum, and three payloads; without anchor and moments in nine rounds of
    ten."""
    for optimizer, kept in (("adamw", 8), ("muon", 4)):
        run = manifest(**WIDE, training={"optimizer": optimizer})
        specs = [spec for stage in range(run.model.stages) for spec in stage_tensors(run.model, stage)]
        moments = sum(spec.elements * (kept if spec.hidden else 8) for spec in specs)
        each = disk_model.written(run, 3)
        complete = each.in_a_round(30, 0)
        assert complete == each.in_a_round(30, 30) == each.in_a_round(900, 300)
        assert complete == pytest.approx(4 * WEIGHTS + moments + 3 * WEIGHTS, rel=0.02)
        assert complete - each.in_a_round(30, 300) == pytest.approx(0.9 * (WEIGHTS + moments), rel=0.02)


def test_a_run_that_audits_writes_states_of_each_phase():
    """Check phases of 4 steps, and of up to 12, in 3 segments: at 0, around a commit, and at the end; in the longest two
    more."""
    audited = manifest(**WIDE, audit={"segments": 3})
    assert (audited.rounds.inner_steps, audited.rounds.max_inner_steps) == (4, 12)
    state = audited.phase_bytes
    each, without = disk_model.written(audited, 7), disk_model.written(RUN, 7)
    assert each.in_a_round(1, 0) - each.audited == without.in_a_round(1, 0) + 4 * state
    assert disk_model.disk_bytes(audited, 7) == disk_model.disk_bytes(RUN, 7) + (WAIT + 2) * 6 * state


@pytest.mark.parametrize("clusters", [4, 6, 8, 20, 400])
def test_who_audits_writes_two_states_of_a_phase_each_time_that_it_is_drawn(clusters: int):
    """Compare with the frequency of the draw, for equal reputations: of 400 clusters no more than a bound are audited."""
    audited = manifest(**WIDE, audit={"segments": 3, "share": 0.25})
    standings, rounds = {str(n): 7 for n in range(clusters)}, 1 + 16_000 // clusters
    ballots = [seal(COORDINATOR, pb.KIND_BALLOT, audited.run_id, pb.Ballot(round=1, head=digest(n))) for n in range(rounds)]
    drawn = sum(len(audit.auditors) for ballot in ballots for audit in audit_rules.drawn(audited, 1, ballot, standings))
    written = disk_model.written(audited, clusters).audited
    assert written == pytest.approx(drawn / rounds / clusters * 2 * audited.phase_bytes, rel=0.06)
    assert disk_model.written(audited, clusters, leads=False).audited == 0
    assert disk_model.written(RUN, clusters).audited == 0


def test_boxes_of_a_cluster_write_what_their_stages_take():
    run = manifest(**WIDE, audit={"segments": 3}, availability={"needed_share": 0.5})
    shards = FakeShards(run)
    whole = disk_model.written(run, 7, shards=shards)
    parts = written_by_box(run, inside(run, [1] * run.model.stages), 7, shards)
    assert whole.shards == shards.bytes_a_round(7, range(run.model.stages)) == whole.for_others - whole.audited
    assert len(parts) == run.model.stages
    assert [bool(part.audited) for part in parts] == [True, *[False] * (len(parts) - 1)], "the lead audits for its cluster"
    for name in vars(whole).keys() - {"marks"}:
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
