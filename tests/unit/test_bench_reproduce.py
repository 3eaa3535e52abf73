"""Tests of the paper's table: rows share one scale, losses come from measured curves, and bars report when they are
missed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import reproduce
from bench.baselines import decoded_message, encoded_message
from bench.exchange import Row
from bench.exchange import missed as exchange_missed
from bench.methods import METHOD, METHODS, STUDIED_CELL, Method, Scale, toml
from bench.reproduce import Found, Point
from bench.study.design import ARMS, CODECS, INNERS, OVERLAPS
from bench.study.report import default
from bench.texts import Text
from dilocox.node.outer import codec
from dilocox.node.planning.plan import PAPER
from dilocox.node.planning.time_model import Line, Site, Step, model_payload_bytes, ring
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count

SCALE = Scale("", 2, 750, 10, 0.08, None, Text("x", Path(), "00" * 32))
FOUND = Found(100.0, 1.0, 1.0, [Point(0, 0.0, 5.0), Point(100, 10.0, 3.0), Point(200, 30.0, 2.0)])


def test_a_line_has_the_published_run_s_ratio_unless_another_is_asked_for():
    site = Site(parameter_count(SCALE.model.model), Step(0.08), 0.0, 2, Line.both_ways(SCALE.bits_per_second()))
    assert ring(site).line_seconds / 0.08 == pytest.approx(ring(PAPER).line_seconds / PAPER.step.seconds)
    assert replace(SCALE, line=1e6).bits_per_second() == 1e6


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_row_has_a_run_file_that_says_what_its_manifest_says(method: Method):
    run = SCALE.manifest(method)
    assert Manifest.from_toml(toml(run).replace("{owner}", run.run.owner)) == run
    assert run.rounds.start_clusters == SCALE.clusters
    assert run.training.total_steps == SCALE.steps


def test_ours_sends_no_more_than_the_published_payload_for_each_step():
    runs = {name: SCALE.manifest(METHOD[name]) for name in ("ours", "DiLoCoX")}
    sent = {name: model_payload_bytes(run.model, run.compression) / run.rounds.inner_steps for name, run in runs.items()}
    assert 0.95 * sent["DiLoCoX"] < sent["ours"] <= sent["DiLoCoX"]


def test_losses_are_read_between_measured_points():
    assert [FOUND.loss_at(steps, "steps") for steps in (0, 50, 150, 200, 999)] == [5.0, 4.0, 2.5, 2.0, 2.0]
    assert [FOUND.loss_at(seconds, "seconds") for seconds in (5.0, 20.0)] == [4.0, 2.5]


def rows_of(run: Manifest, seconds: list[float], losses: list[float | None]) -> list[dict[str, Any]]:
    """Return rows of rounds with 125 steps of two clusters."""
    same = {"tokens": 2 * 125 * run.tokens_per_step, "payload_bytes": 500}
    return [
        {**same, "round": number, "seconds": taken, "evaluation_loss": loss}
        for number, (taken, loss) in enumerate(zip(seconds, losses, strict=True), 1)
    ]


def test_a_pace_is_the_sum_of_what_nodes_take_by_their_own_clocks():
    before, after = {"a": (100, 7.0), "b": (90, 1000.0)}, {"a": (200, 17.0), "b": (190, 1020.0)}
    assert reproduce.pace(before, after) == 10 + 5


def test_rounds_become_a_curve():
    run = SCALE.manifest(METHOD["DiLoCoX"])
    rows = rows_of(run, [20.0, 5.0, 10.0, 11.0, 9.0], [None, None, 3.0, None, 2.0])
    found = reproduce.found_of(SCALE, run, rows, 25.0, [])
    assert found.curve[1:] == [Point(250, 25.0, 3.0), Point(500, 46.0, 2.0)]
    assert found.tokens_per_second == 25.0 * run.tokens_per_step
    assert found.step_bytes == 250 / 125


@dataclass
class Running:
    manifest: Manifest
    closed: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        return self.closed


@pytest.mark.parametrize(("name", "rounds"), [("DiLoCoX", 8), ("DiLoCoX without overlap", 7)])
def test_a_swarm_trains_until_its_last_loss_and_enough_steady_rounds_are_known(name: str, rounds: int):
    """Check the stop: 750 steps are six rounds of 125, and the seventh reports the last loss; beside an exchange, as many
    must be steady."""
    run = SCALE.manifest(METHOD[name])
    rows = rows_of(run, [10.0] * 9, [2.0] * 9)
    lengths = [length for length in range(len(rows) + 1) if reproduce.trained(Running(run, rows[:length]), SCALE)]  # type: ignore[arg-type]
    assert lengths == list(range(rounds, 10))
    unknown = Running(run, rows_of(run, [10.0] * 9, [2.0] * 6 + [None] * 3))
    assert reproduce.trained(unknown, SCALE) is None  # type: ignore[arg-type]


def test_bars_are_missed_one_by_one():
    full = 2 * 8 * 64 / 0.08
    reference = replace(FOUND, curve=[Point(0, 0.0, 5.0), Point(750, 100.0, 2.0)])
    theirs = replace(reference, tokens_per_second=full, curve=[Point(0, 0.0, 5.0), Point(750, 100.0, 2.4)])
    ours = replace(theirs, curve=[Point(0, 0.0, 5.0), Point(750, 100.0, 2.1)])
    rows = {"AllReduce": reference, "AllReduce (Muon)": reference, "DiLoCoX": theirs, "ours": ours}
    assert reproduce.missed(SCALE, rows) == []
    for worse in (replace(ours, curve=theirs.curve), replace(ours, tokens_per_second=0.98 * full)):
        assert len(reproduce.missed(SCALE, {**rows, "ours": worse})) == 1
    assert len(reproduce.missed(SCALE, {**rows, "ours": replace(ours, tokens_per_second=0.96 * full)})) == 2
    better = replace(theirs, curve=[Point(0, 0.0, 5.0), Point(750, 100.0, 2.15)])
    assert len(reproduce.missed(SCALE, {**rows, "DiLoCoX (other restart)": better})) == 1, "the better reading counts"
    del rows["AllReduce (Muon)"]
    assert len(reproduce.missed(SCALE, rows)) == 1, "what is not known is not met"


def test_a_row_is_kept_under_its_settings_alone():
    method = METHODS[0]
    path = reproduce.path_of(SCALE, method)
    assert path == reproduce.path_of(replace(SCALE, text=Text("x", Path("elsewhere"), "00" * 32)), method)
    others = [replace(SCALE, steps=800), replace(SCALE, line=1e6), replace(SCALE, timed=3), replace(SCALE, step_seconds=0.1)]
    assert len({path, *(reproduce.path_of(other, method) for other in others)}) == 5


@pytest.mark.parametrize(("count", "size"), [(1, 1), (50, 100_000), (2000, 10_000), (4000, 4000)])
def test_a_message_of_cocktail_sgd_is_read_as_it_was_written(count: int, size: int):
    positions = np.sort(np.random.default_rng(0).choice(size, count, replace=False)).astype(np.int64)
    values = codec.quantize(torch.randn(1, count, generator=torch.Generator().manual_seed(0)))
    read, decoded = decoded_message(encoded_message(positions, values))
    assert np.array_equal(read, positions)
    assert np.array_equal(decoded, values.values()[0])


def test_gaps_of_exactly_a_byte_are_read_too():
    positions = np.array([254, 255, 511, 766, 1277], dtype=np.int64)
    read, _ = decoded_message(encoded_message(positions, codec.quantize(torch.ones(1, 5))))
    assert np.array_equal(read, positions)


def test_the_exchange_is_missed_where_hivemind_is_near_or_gloo_ahead():
    rows = [Row("ours", 1e8, [1.0], 0.0), Row("gloo", 1e8, [1.1], 0.0), Row("hivemind", 1e8, [5.1], 0.0)]
    assert exchange_missed(rows) == []
    assert len(exchange_missed([replace(rows[0], seconds=[1.05]), *rows[1:]])) == 1
    assert len(exchange_missed([replace(rows[0], seconds=[1.2]), *rows[1:]])) == 2


def test_how_many_times_faster_has_an_interval_of_the_steps_that_were_timed():
    base = replace(FOUND, tokens_per_second=2.0, rounds=[9.0, 10.0, 11.0])
    theirs = replace(FOUND, tokens_per_second=900.0)
    assert "450 times the tokens per second ± 24.8%, by AllReduce's 3 timed steps" in reproduce.ratio(theirs, base)
    assert "450 times the tokens per second; published" in reproduce.ratio(theirs, replace(base, rounds=[9.0]))


def test_ours_is_the_arm_that_the_study_says_short_runs_take():
    run, arm = SCALE.manifest(METHOD["ours"], {}), ARMS[default(STUDIED_CELL)]
    assert METHOD["ours"].arm == arm.name
    assert (run.compression.codec, run.training.muon_momentum) == (
        CODECS[arm.codec]["codec"],
        INNERS[arm.inner]["muon_momentum"],
    )
    assert {"overlap": run.rounds.overlap, "lead_weight": run.rounds.lead_weight} == OVERLAPS[arm.overlap]
    chosen = run.outer.learning_rate / (1 - run.outer.momentum)
    assert chosen == pytest.approx(1.718, abs=1e-3), "what it took in the study's cell is where it begins"
