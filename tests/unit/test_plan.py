"""The cost model: reproduces the published rows, follows the payload layouts, and recommends what it computes."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dilocox.cli.init import preset_names, render_preset
from dilocox.node import memory, plan
from dilocox.node.outer.state import StageState
from dilocox.node.plan import PAPER, PUBLISHED, Method, Site
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.manifest import Compression, Manifest
from dilocox.protocol.tensors import parameter_count, stage_tensors
from tests.helpers import manifest

SITE = Site(parameters=10**9, step_seconds=1.0, tokens_per_step=1000, clusters=3, boxes=2, bits_per_second=1e8)


def test_the_published_rows_are_within_a_quarter():
    for row, published in zip(plan.paper_rows(), PUBLISHED.values(), strict=True):
        assert row.tokens_per_second == pytest.approx(published, rel=0.25), row.method.name


def test_a_box_moves_its_share_once_per_other_cluster():
    found = plan.estimate(SITE, Method("x", 100e6, 50))
    assert found.network_seconds == pytest.approx(8 * 100e6 / 2 * 2 / 1e8)
    assert found.arrival_step == pytest.approx(8.0)
    assert (found.utilisation, found.tokens_per_second) == (1.0, 1000.0)
    waiting = plan.estimate(SITE, Method("x", 100e6, 50, overlap=False))
    assert waiting.tokens_per_second == pytest.approx(1000 * 50 / 58)


def test_a_link_that_is_too_slow_costs_throughput_even_with_overlap():
    found = plan.estimate(SITE, Method("x", 1e9, 50))
    assert found.arrival_step == pytest.approx(80.0)
    assert found.utilisation == pytest.approx(50 / 80)


def test_estimated_bytes_are_those_of_real_payloads():
    tiny = Manifest.from_toml(render_preset("tiny", "x", "00" * 32))
    for compression in (
        Compression(rank=16),
        Compression(codec="int4", entropy_coding=True),
        Compression(codec="int2"),
        Compression(codec="topk-int2", k=256, entropy_coding=True),
        Compression(codec="topk-int2", k=760, entropy_coding=True),
    ):
        run = tiny.model_copy(update={"compression": compression})
        shapes = [spec.shape for spec in stage_tensors(run.model, 0)]
        state = StageState(run, 0)
        state.feedback.normal_(std=1e-3)
        real = len(state.encode().raw)
        assert plan.payload_bytes(plan.layouts_of([shapes], compression)) == pytest.approx(real, rel=0.06)


def test_it_recommends_waiting_where_waiting_is_sooner():
    free = Method("x", 1e3, 50)
    assert plan.recommend(SITE, replace(free, codec_seconds=10.0)) == "rebase"
    beyond = plan.estimate(SITE, replace(free, codec_seconds=10.0))
    cost = 1 + plan.DELAY_COST * beyond.arrival_step / 50
    assert (
        beyond.tokens_per_second / cost
        > plan.estimate(SITE, replace(free, codec_seconds=10.0, overlap=False)).tokens_per_second
    )
    late = replace(free, inner_steps=1, codec_seconds=0.01)  # nothing to hide: the exchange takes a hundredth of a step
    sooner = plan.estimate(SITE, replace(late, overlap=False)).tokens_per_second
    beside = plan.estimate(SITE, late)
    expected = "rebase" if beside.tokens_per_second / (1 + plan.DELAY_COST * beside.arrival_step) > sooner else "none"
    assert plan.recommend(SITE, late) == expected


def dilocox(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-m", "dilocox.cli.main", "plan", *arguments], capture_output=True, text=True)


def test_activations_between_boxes_are_what_a_slow_line_is_full_of():
    """Ten boxes at 1 Gbps were promised 273,636 tokens a second: of two clusters, at a second a step."""
    run = Manifest.from_toml(render_preset("qwen1.5-107b", "x", "00" * 32))
    cluster = plan.inside(run, [8] * 10)
    assert (cluster.tiling.length, cluster.tiling.copies) == (80, 1), "each stage has a device of its own"
    passed = run.training.batch_size * 4096 * 8192 * 2
    assert cluster.activation_bytes == 2 * passed, "a box in the middle sends forward to one neighbour, and back to the other"
    assert plan.inside(run, [8, 8]).activation_bytes == passed
    assert plan.inside(run, [8]).activation_bytes == 0
    assert cluster.bubble == pytest.approx(79 / 239)
    seconds = cluster.seconds(1e9)
    site = Site(1, 1.0, 2 * run.tokens_per_step, boxes=10, activation_seconds=seconds)
    found = plan.estimate(site, Method("none", 0.0, 10))
    assert found.tokens_per_second == pytest.approx(2 * run.tokens_per_step / seconds)
    assert found.utilisation == pytest.approx(1 / seconds)
    assert plan.estimate(replace(site, activation_seconds=0.5), Method("none", 0.0, 10)).utilisation == 1.0


def test_a_looped_pipeline_waits_less_and_passes_on_more():
    stretched, looped = (
        plan.inside(manifest(model={"layers": 6, "stages": 8}, training={"microbatches": 4, "schedule": schedule}), [1, 1])
        for schedule in ("1f1b", "interleaved")
    )
    assert (stretched.turns, looped.turns) == (1, 4)
    assert (stretched.bubble, looped.bubble) == (1 / 5, 1 / 17)
    assert looped.activation_bytes == 7 * stretched.activation_bytes, "of eight chunks, which lie on either box in turn"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_planned_memory_is_what_a_trainer_holds(optimizer: str, process_group: None):
    run = manifest(training={"optimizer": optimizer})
    trainer = Trainer(run)
    trainer.load_initial()
    tokens = torch.zeros(run.training.batch_size, run.model.sequence_length, dtype=torch.int64)
    trainer.step(tokens, tokens)
    held = 0
    for stage in trainer.live_stages():
        for parameter in stage[1].tensors():
            moments = [tensor for name, tensor in trainer.optimizer.tensors(parameter).items() if name != "step"]
            held += sum(tensor.nbytes for tensor in (parameter, parameter.grad, *moments) if tensor is not None)
    stages = range(run.model.stages)
    assert held == memory.stage_bytes(run, stages, half=False).total
    outer = [tensor for state in trainer.states for tensor in (state.committed, state.feedback, state.anchor)]
    copies = [
        tensor for kinds in trainer.copy_inner().values() for name, tensor in kinds.items() if not name.startswith("step|")
    ]
    beside = sum(tensor.nbytes for tensor in (*outer, *copies))
    assert beside == memory.host_bytes(run, stages) == plan.inside(run, [1]).host_bytes


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_a_plan_of_its_memory(preset: str):
    run = Manifest.from_toml(render_preset(preset, "x", "00" * 32))
    inside = plan.inside(run, [run.model.stages])
    largest = max(sum(spec.elements for spec in stage_tensors(run.model, stage)) for stage in range(run.model.stages))
    assert inside.device.weights >= 4 * largest
    assert inside.host_bytes >= 16 * parameter_count(run.model)
    assert inside.device_bytes < (80e9 if preset == "qwen1.5-107b" else 24e9), "of the devices that its first line is about"


def test_the_command_compares_codecs_and_says_what_it_assumes():
    report = json.loads(
        dilocox("--preset", "tiny", "--bandwidth", "50mbit", "--boxes", "1", "--inner-steps", "10,20", "--json").stdout
    )
    rows = {(row["codec"], row["inner_steps"]): row for row in report["rows"]}
    assert ("topk-int2 760", 10) in rows
    assert rows[("fp16", 20)]["payload_bytes"] > 10 * rows[("topk-int2 256", 20)]["payload_bytes"]
    assert len(report["assumptions"]) == 7
    assert report["site"]["activation_seconds"] == 0, "no pipeline leaves its box"
    assert "11.6%" in dilocox("--paper").stdout
    for wrong in (["--bandwidth", "fast"], ["--inner-steps", "0"], ["--preset", "none"], ["nowhere.toml"]):
        assert dilocox(*wrong).returncode == 2
    assert PAPER.clusters == 2
