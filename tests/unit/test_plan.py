"""The cost model: reproduces the published rows, follows the payload layouts, and recommends what it computes."""

import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.study.design import ARMS, CODECS, INNERS, OVERLAPS, REFERENCES, Arm
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.node.outer.state import StageState
from dilocox.node.planning import advice, memory_model, plan
from dilocox.node.planning.disk_model import written
from dilocox.node.planning.plan import PAPER, PUBLISHED
from dilocox.node.planning.step_model import EFFICIENCY, KINDS, flops_per_token
from dilocox.node.planning.time_model import (
    HEADERS,
    Line,
    Method,
    Site,
    Step,
    estimate,
    layouts_of,
    payload_bytes,
    ring,
)
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.environment import CHECKPOINT_SECONDS
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.manifest import Compression, Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_tensors
from tests.helpers import manifest

FOLDER = Path(__file__).parents[2] / "docs" / "results"
SITE = Site(10**9, Step(1.0), 1000, clusters=3, line=Line.both_ways(1e8), boxes=2)


def test_three_published_rows_foretell_the_fourth():
    rows = dict(zip(PUBLISHED.values(), (row.tokens_per_second for row in plan.paper_rows()), strict=True))
    *used, foretold = rows.items()
    for published, found in used:
        assert found == pytest.approx(published)
    assert foretold[1] == pytest.approx(foretold[0], rel=0.01)


def test_the_published_run_is_within_its_devices_peak():
    run = Manifest.from_toml(render_preset("qwen1.5-107b", "x", "00" * 32))
    assert PAPER.tokens_per_step / PAPER.step.seconds * flops_per_token(run) < 160 * KINDS["a800"].peak


def test_intellect_1_is_predicted_from_its_machines():
    """Compare with INTELLECT-1 (arXiv 2412.01152, and configs/10B/H100.toml of PrimeIntellect-ai/prime): 10B parameters in 42
    layers of 4,096, and 14 nodes of 8 H100 on three continents. A node takes 100 inner steps of 128 sequences of 8,192 tokens
    by AdamW in 38 minutes, activations computed again; then it waits 469 s for the exchange."""
    config: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 42}
    config |= {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
    run = manifest(
        model={**config, "sequence_length": 8192, "stages": 4},
        training={"optimizer": "adamw", "batch_size": 128, "microbatches": 0},
        rounds={"inner_steps": 100, "max_inner_steps": 100},
    )
    assert parameter_count(run.model) == pytest.approx(10.2e9, rel=0.02)
    kind, nodes = KINDS["h100"], 14
    step = plan.step_of(run, plan.inside(run, [8], kind), kind, 1e12, None)
    site = Site(parameter_count(run.model), step, nodes * run.tokens_per_step, nodes, Line.both_ways(1e9), fixed_seconds=469)
    found = estimate(site, Method("int8 ring", 0.0, 100, 100, "none")).tokens_per_second
    published = 100 * nodes * run.tokens_per_step / (38 * 60 + 469)
    assert 1 / 1.3 < found / published < 1.3


def test_all_reduce_of_the_paper_is_predicted_from_its_machines_and_tokens():
    """Compare with the row AllReduce of arXiv 2506.21263: 10.4 tokens a second on 2 clusters of 10 hosts of 8 A800 at 1 Gbit/s.
    The paper's rows imply 1,870 tokens a step: 181 s of 16-bit gradients are 357 steps of DiLoCoX, at 3,728 tokens a second."""
    run, kind, tokens = Manifest.from_toml(render_preset("qwen1.5-107b", "x", "00" * 32)), KINDS["a800"], 1870
    step = plan.step_of(run, plan.inside(run, [8] * 10, kind), kind, 1e12, None)
    seconds = step.seconds * tokens / 2 / run.tokens_per_step
    site = Site(parameter_count(run.model), Step(seconds), tokens, 2, Line.both_ways(1e9), boxes=10)
    assert 1 / 1.5 < ring(site).tokens_per_second / PUBLISHED["AllReduce"] < 1.5


def test_a_site_like_the_paper_s_has_its_proportions():
    site = Site(10**6, Step(0.1), 100, clusters=4, line=Line.both_ways(1.0))
    like = plan.like_the_paper(site, 1e5, 20)
    found, published = estimate(like, Method("x", 1e5, 20, 80)), plan.paper_rows()[1]
    assert found.exchange_seconds / (20 * 0.1) == pytest.approx(plan.PAPER_RATIO)
    assert found.line_seconds / found.exchange_seconds == pytest.approx(published.line_seconds / published.exchange_seconds)


def test_operations_are_six_for_each_weight_and_eight_where_activations_are_computed_again():
    run = manifest(model={"sequence_length": 32})
    weights = sum(
        spec.elements
        for stage in range(run.model.stages)
        for spec in stage_tensors(run.model, stage)
        if len(spec.shape) == 2 and "embed" not in spec.name
    )
    attention = 6 * run.model.config.num_hidden_layers * 32 * run.model.config.hidden_size
    assert flops_per_token(run) == 6 * weights + attention
    head = 2 * run.model.config.vocab_size * run.model.config.hidden_size
    assert flops_per_token(run, recompute=True) == pytest.approx(4 / 3 * flops_per_token(run) - head)


def test_no_step_is_faster_than_its_devices():
    run = Manifest.from_toml(render_preset("qwen1.5-107b", "x", "00" * 32))
    kind = KINDS["a800"]
    cluster = plan.inside(run, [8] * 10, kind)
    least = run.tokens_per_step * flops_per_token(run, cluster.tiling.recompute) / (80 * kind.peak)
    assert plan.step_of(run, cluster, kind, 1e12, 1.001 * least).working == pytest.approx(1.001 * least)
    with pytest.raises(ConfigError, match="over the devices' peak"):
        plan.step_of(run, cluster, kind, 1e12, 0.999 * least)
    unmeasured, parts = plan.step_of(run, cluster, kind, 1e12, None), cluster.choice.best.parts
    assert unmeasured.working == pytest.approx((least / EFFICIENCY + parts.imbalance) / (1 - 79 / 239) + parts.ending)


def test_estimated_bytes_are_those_of_real_payloads():
    tiny = Manifest.from_toml(render_preset("tiny", "x", "00" * 32))
    for compression in (
        Compression(rank=16),
        Compression(codec="int4", entropy_coding=True),
        Compression(codec="int2"),
        Compression(codec="int2", entropy_coding=True),
        Compression(codec="topk-int2", k=256, entropy_coding=True),
        Compression(codec="topk-int2", k=760, entropy_coding=True),
    ):
        run = tiny.model_copy(update={"compression": compression})
        shapes = [spec.shape for spec in stage_tensors(run.model, 0)]
        state = StageState(run, 0)
        state.feedback.normal_(std=1e-3)
        real = len(state.encode().raw)
        assert payload_bytes(layouts_of([shapes], compression)) == pytest.approx(real, rel=0.06)


def test_codec_seconds_are_those_of_the_fullest_worker():
    """Check three stages on two hosts of one device: one computes and writes two of them."""
    run = manifest(model={"num_hidden_layers": 4, "stages": 3})
    cluster = plan.inside(run, [1, 1])
    both = cluster.tiling.stages(0, 3)
    assert len(both) == 2
    values = sum(spec.elements for stage in both for spec in stage_tensors(run.model, stage))
    for compression in (Compression(codec="int2"), Compression(rank=16), Compression(rank=2 * plan.SPEEDS_RANK)):
        found = plan.exchanging(run, cluster, "x", compression)
        speed, slower = plan.SPEEDS[compression.codec], 2 if compression.rank == 2 * plan.SPEEDS_RANK else 1
        assert found.encode_seconds == pytest.approx(slower * values / speed.encoded)
        assert found.apply_seconds == pytest.approx(slower * values / speed.applied)


def test_codecs_are_half_as_fast_as_an_idle_core_was_measured():
    rows = json.loads((FOLDER / "boundary.json").read_text())["results"]["rows"]
    assert all(row["outer_state"] == "host" for row in rows)
    found = {row["codec"]: (row["encode_values_per_second"], row["apply_values_per_second"]) for row in rows}
    names = {"int4": "int4, coded", "topk-int2": "topk-int2 512", "fp32": "fp16"}
    for codec, speed in plan.SPEEDS.items():
        encoded, applied = found[names.get(codec, codec)]
        assert speed.encoded == pytest.approx(encoded / 2, rel=0.1)
        assert speed.applied == pytest.approx(applied / 2, rel=0.1)


def test_it_recommends_waiting_where_waiting_is_sooner():
    method = Method("x", 0.0, 50, 150)
    assert plan.recommend(replace(SITE, fixed_seconds=10.0), method) == "rebase"
    assert plan.recommend(replace(SITE, fixed_seconds=0.01), replace(method, inner_steps=1)) == "none"


OFFERS = [
    advice.Offer(Compression(codec="int2"), Method("dense", 2.5e8, 1, 1)),
    advice.Offer(Compression(codec="topk-int2", k=64), Method("sparse", 5e7, 1, 1)),
    advice.Offer(Compression(codec="fp32"), Method("of which nothing is known", 1.0, 1, 1)),
]
LONG = manifest(training={"total_steps": 100_000, "optimizer": "muon"}, rounds={"inner_steps": 10, "max_inner_steps": 30})


def gaps(by_bits: dict[float, float]) -> dict[float, advice.Measured]:
    return {bits: advice.Measured(gap, 0.5, 0.95, 1.0, 0.0, 0.02) for bits, gap in by_bits.items()}


def advised(
    monkeypatch: pytest.MonkeyPatch, site: Site, dense: float = 0.1, sparse: float = 0.2, run: Manifest = LONG
) -> advice.Advice:
    found = advice.Gaps(1000, 0.3, {"int2": gaps({0.01: dense}), "topk-int2": gaps({0.01: sparse})})
    monkeypatch.setattr(advice, "GAPS", [found])
    return advice.advise(site, OFFERS, run)


def test_it_advises_the_shortest_rounds_that_hide_the_exchange(monkeypatch: pytest.MonkeyPatch):
    site = replace(SITE, fixed_seconds=5.0)
    found = advised(monkeypatch, site)
    h = found.estimate.method.inner_steps
    assert found.estimate.method.name == "dense"
    assert found.hides
    assert found.estimate.arrival_step <= h
    assert found.estimate.method.max_inner_steps == 3 * h, "as many phases as the run has"
    shorter = max(each for each in advice.HORIZONS if each < h)
    assert estimate(site, replace(found.estimate.method, inner_steps=shorter)).arrival_step > shorter
    assert found.bits == pytest.approx(8 * 2.5e8 / 10**9 / found.estimate.round.steps)


def test_of_hidden_exchanges_it_advises_what_costs_the_least_loss(monkeypatch: pytest.MonkeyPatch):
    assert advised(monkeypatch, SITE, dense=0.3, sparse=0.2).compression.codec == "topk-int2"
    assert advised(monkeypatch, SITE, dense=0.1, sparse=0.2).compression.codec == "int2"
    slow = replace(SITE, line=Line.both_ways(1e6))
    assert advised(monkeypatch, slow).compression.codec == "topk-int2", "what no rounds hide is not advised, whatever it costs"


def test_of_gaps_that_are_alike_it_advises_longer_rounds(monkeypatch: pytest.MonkeyPatch):
    found = advised(monkeypatch, SITE, dense=0.2 + advice.ALIKE - 1e-6, sparse=0.2)
    assert found.compression.codec == "int2"
    assert advised(monkeypatch, SITE, dense=0.2 + advice.ALIKE + 1e-6, sparse=0.2).compression.codec == "topk-int2"


def test_rounds_are_no_longer_than_a_run_has_room_for(monkeypatch: pytest.MonkeyPatch):
    short = manifest(training={"total_steps": 200, "optimizer": "muon"})
    found = advised(monkeypatch, replace(SITE, fixed_seconds=500.0), run=short)
    assert not found.hides
    assert found.estimate.method.inner_steps <= 200 // advice.LEAST_ROUNDS


def test_a_codec_takes_its_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "tests.unit.test_plan.OFFERS",
        [replace(offer, method=replace(offer.method, encode_seconds=99.0)) for offer in OFFERS],
    )
    found = advised(monkeypatch, SITE)
    assert found.estimate.exchange_seconds > 99.0
    assert found.estimate.method.inner_steps >= 99


def test_it_says_what_binds(monkeypatch: pytest.MonkeyPatch):
    assert "the line to the other clusters" in advised(monkeypatch, SITE).binds
    assert "whatever its bytes" in advised(monkeypatch, replace(SITE, fixed_seconds=900.0)).binds
    assert "between a cluster's boxes" in advised(monkeypatch, replace(SITE, step=Step(1.0, activations=9.0))).binds
    fast = replace(SITE, line=Line.both_ways(1e12))
    assert advised(monkeypatch, fast).binds == "nothing shorter than 10 steps is looked at"
    found = advised(monkeypatch, replace(fast, fixed_seconds=9.5))
    assert found.estimate.arrival_step == found.estimate.method.inner_steps == advice.LEAST_STEPS
    assert "whatever its bytes" in found.binds, "one step fewer would not do"


@pytest.mark.parametrize(("seconds", "shortest"), [(0.3, 10), (3.0, 10), (5.0, 6), (35.0, 5)])
def test_rounds_of_few_steps_are_looked_at_where_they_last_a_while_all_the_same(
    monkeypatch: pytest.MonkeyPatch, seconds: float, shortest: int
):
    site = replace(SITE, step=Step(seconds), line=Line.both_ways(1e12))
    assert advised(monkeypatch, site).estimate.method.inner_steps == shortest


def test_between_what_was_measured_a_gap_goes_evenly_in_the_logarithm():
    measured = advice.Gaps(1000, 0.3, {"int2": gaps({0.01: 0.2, 0.04: 0.1})})
    found = [measured.gap("int2", bits) for bits in (0.001, 0.01, 0.02, 0.04, 1.0)]
    assert found == pytest.approx([0.2, 0.2, 0.15, 0.1, 0.1])
    assert [measured.nearest("int2", bits).gap for bits in (0.001, 0.019, 0.021, 1.0)] == [0.2, 0.2, 0.1, 0.1]
    assert measured.gap("fp32", 1.0) == math.inf


@pytest.mark.parametrize(("steps", "like"), [(200, 1200), (1800, 1200), (2000, 3000), (50_000, 3000)])
def test_a_run_is_held_against_what_was_measured_of_the_nearest_length(steps: int, like: int):
    run = manifest(training={"total_steps": steps, "optimizer": "muon"})
    assert advice.gaps_of(steps).steps == like
    found = advice.advise(replace(SITE, fixed_seconds=5.0), OFFERS[:1], run)
    told = advice.settings_of(found, run)["training"]
    assert (found.gaps.steps, told["muon_learning_rate"]) == (like, 0.008 if like == 3000 else 0.02), (
        "small steps pay in long runs"
    )


def test_less_than_was_measured_costs_more_than_the_gap(monkeypatch: pytest.MonkeyPatch):
    assert not advised(monkeypatch, SITE).below_measured
    assert advised(monkeypatch, replace(SITE, fixed_seconds=900.0)).below_measured


def took(arm: Arm, row: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the arm's local mix, inner momentum, outer momentum and outer rate."""
    tuned, momentum = row["tuned"]["choice"], INNERS[arm.inner].get("muon_momentum", 0.95)
    rate = round(tuned["steady_rate"] * (1 - tuned["momentum"]), 2)
    return OVERLAPS[arm.overlap]["lead_weight"], momentum, tuned["momentum"], rate


def took_as_told(told: advice.Measured) -> tuple[float, ...]:
    return told.lead_weight, told.muon_momentum, told.outer_momentum, told.outer_rate


HARDLY = 1.01


@pytest.mark.parametrize("gaps", advice.GAPS, ids=lambda gaps: f"{gaps.steps}")
def test_gaps_are_those_of_the_published_study(gaps: advice.Gaps):
    """Compare for each codec the best arm with the whole rebase, or one with an overlapping interval that is hardly worse;
    and one cluster alone."""
    study = json.loads((Path(__file__).parents[2] / "docs/results/study.json").read_text())["results"]
    cells = {cell["name"]: {row["arm"]: row for row in cell["rows"]} for cell in study["cells"]}
    for codec, by_bits in gaps.by_codec.items():
        for bits, told in by_bits.items():
            rows = cells[f"small, 4 clusters, {gaps.steps:,} steps, {bits:g} bit"]
            of_codec = [
                name
                for name in rows
                if (arm := ARMS[name]).overlap.startswith("rebase")
                and CODECS[arm.codec]["codec"] == codec
                and (arm.fragments, arm.inner.startswith("muon")) == (1, True)
            ]
            best = min((rows[name] for name in of_codec), key=lambda row: row["loss"])
            name = next(n for n in of_codec if took(ARMS[n], rows[n]) == took_as_told(told))
            row, reference = rows[name], rows[REFERENCES["muon"]]["loss"]
            assert told.gap == pytest.approx(row["loss"] / reference - 1, abs=0.001), name
            assert row["loss"] - row["half_width"] <= best["loss"] + best["half_width"], f"{name} is not the best at {bits} bit"
            assert row["loss"] <= HARDLY * best["loss"], name
            assert told.muon_learning_rate == pytest.approx(row["tuned"]["choice"]["muon_learning_rate"], abs=0.0005)
    rows = cells[f"small, 4 clusters, {gaps.steps:,} steps, 0.016 bit"]
    alone = min(row["loss"] for name, row in rows.items() if ARMS[name].is_alone)
    assert alone / rows[REFERENCES["muon"]]["loss"] - 1 == pytest.approx(gaps.alone, abs=0.001)


def test_a_run_file_is_planned_for_machines_like_its_nearest_preset_s(tmp_path: Path):
    run, made_for = tmp_path / "run.toml", plan.MADE_FOR["llama-125m"]
    run.write_text(render_preset("llama-125m", "mine", "00" * 32).replace("layers = 12", "layers = 11", 1))
    told = dilocox(str(run), "--json")
    assert told.returncode == 0, told.stderr
    site = json.loads(told.stdout)["site"]
    assert (site["clusters"], site["boxes"]) == (made_for.clusters, made_for.boxes)
    wider = json.loads(dilocox(str(run), "--json", "--clusters", "9").stdout)["site"]
    assert (wider["clusters"], wider["line"]) == (9, site["line"]), "what is said counts, and the rest stays"


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_as_it_is_advised_is_as_long(monkeypatch: pytest.MonkeyPatch, optimizer: str):
    rounds = {
        "inner_steps": 50,
        "max_inner_steps": 100,
        "round_seconds": 20.0,
        "synchronous_rounds": 2,
    }
    run = manifest(training={"total_steps": 5000, "optimizer": optimizer, "warmup_steps": 5}, rounds=rounds)
    found = advised(monkeypatch, replace(SITE, fixed_seconds=5.0), run=run)
    merged = run.model_dump()
    assert advice.superseded(run) == ["round_seconds"]
    merged["rounds"] |= dict.fromkeys(advice.superseded(run))
    told = advice.settings_of(found, run)
    assert ("outer" in told) == (optimizer == "muon"), "what was measured is of Muon"
    for section, values in told.items():
        merged[section] = values if section == "compression" else merged[section] | values
    taken = Manifest.model_validate(merged)
    assert taken.rounds.count * taken.rounds.inner_steps == pytest.approx(5000, rel=0.02)
    assert taken.compression.codec == found.compression.codec


LORA = {"rank": 2, "alpha": 4.0, "targets": ["q_proj"], "base": "ab" * 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"private": True}},
        {"model": {"initial": "ab" * 32}},
        {"model": {"lora": LORA}, "compression": {"codec": "int4", "rank": None}},
    ],
)
def test_what_was_measured_is_of_random_weights_on_a_text_that_all_share(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, object]]
):
    run = manifest(training={"total_steps": 100_000, "optimizer": "muon"}, **changes)
    found = advised(monkeypatch, replace(SITE, fixed_seconds=5.0), run=run)
    told = advice.settings_of(found, run)
    assert "outer" not in told
    assert "lead_weight" not in told["rounds"]
    for offer in OFFERS:
        kept = run.model_copy(update={"compression": offer.compression})
        assert advised(monkeypatch, SITE, run=kept).compression == offer.compression, "whatever GAPS say"
    assert "outer" in advice.settings_of(found, LONG)


def test_what_is_advised_is_said_as_a_run_file_has_it():
    told = dilocox("--preset", "llama-350m").stdout
    block = told[told.index("\n[compression]") : told.index("\nnot named")]
    assert tomllib.loads(block) == json.loads(dilocox("--preset", "llama-350m", "--json").stdout)["advice"]["settings"]
    assert "clusters 4, boxes 1, devices 1, device 4090, bandwidth 100mbit" in told


def test_plan_answers_first_and_says_why_other_placements_lose():
    text = dilocox("--preset", "llama-1b", "--devices", "8", "--device", "h100", "--bandwidth", "1gbit").stdout.splitlines()
    assert text[0].startswith(("yes", "no: each round waits"))
    assert all(part in text[0] for part in (" h for 20,000 steps", "tokens a day", "% MFU", "GB written a day"))
    assert text[1].startswith("placement: 8 copies, ")
    assert text[2].startswith("not ")
    told = json.loads(dilocox("--preset", "llama-1b", "--json").stdout)
    assert told["answer"]["sentence"].startswith("yes: the link hides the exchange")
    assert told["answer"]["inner_steps"] == told["answer"]["steps"]
    full = max(row["mfu"] for row in told["rows"])
    assert 0 < full == pytest.approx(told["answer"]["mfu"], rel=0.01)
    waits = json.loads(dilocox("--preset", "llama-1b", "--json", "--bandwidth", "1mbit").stdout)["answer"]
    assert waits["sentence"].startswith("no: each round waits")
    assert waits["mfu"] == pytest.approx(full * waits["utilisation"], rel=0.01)


def test_a_step_that_is_faster_than_a_device_that_nobody_named_says_how_to_name_it():
    told = dilocox("--preset", "llama-125m", "--step-seconds", "0.1").stderr
    assert "over the devices' peak" in told
    assert "--device" in told
    assert dilocox("--preset", "llama-125m", "--step-seconds", "0.1", "--device", "h100").returncode == 0


DEADLINE = 1.5
"""Rounds: hosts slower than the preset's by this factor still count."""
LONGER = 1.25
"""H of a preset, at most, over the shortest that hides its exchange: it divides a run."""


def rows(told: Mapping[str, Any], preset: Manifest) -> list[dict[str, Any]]:
    """Return the rows of the preset's codec."""
    codec, k = preset.compression.codec, preset.compression.k
    return [row for row in told["rows"] if row["codec"] == (f"{codec} {k}" if k else codec)]


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"qwen1.5-107b"}))
def test_a_preset_takes_what_is_advised_for_the_machines_that_it_is_made_for(name: str):
    preset = Manifest.from_toml(render_preset(name, "x", "00" * 32))
    h = preset.rounds.inner_steps
    told = json.loads(dilocox("--preset", name, "--inner-steps", str(h), "--json").stdout)
    (row,) = rows(told, preset)
    assert row["arrival_step"] <= row["steps"] == h, "it hides its exchange"
    rounds = preset.rounds
    assert rounds.deadline_seconds >= DEADLINE * row["round_seconds"], "no round is cut off before deadlines are learnt"
    assert rounds.deadline_seconds >= rounds.vote_seconds >= row["exchange_seconds"], "nor are votes, which want all payloads"
    told = json.loads(dilocox("--preset", name, "--inner-steps", ",".join(map(str, range(1, h + 1))), "--json").stdout)
    shortest = min(row["inner_steps"] for row in rows(told, preset) if row["arrival_step"] <= row["inner_steps"])
    told = json.loads(dilocox("--preset", name, "--json").stdout)
    advised_steps = told["advice"]["settings"]["rounds"]["inner_steps"]
    assert h <= LONGER * max(shortest, advised_steps), "nor is it much longer than it has to be"
    assert h in {row["inner_steps"] for row in told["rows"]}, "the run's own is compared"
    assert told["advice"]["hides"]
    settings = told["advice"]["settings"]
    assert h >= settings["rounds"].pop("inner_steps"), "or longer, for what the codec takes"
    for key in ("count", "max_inner_steps"):
        settings["rounds"].pop(key)
    for section, values in settings.items():
        assert values.items() <= getattr(preset, section).model_dump().items()


def test_disk_writes_follow_from_rounds_and_checkpoints_and_no_exchange_waits_for_them(tmp_path: Path):
    def told(*more: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(dilocox("--preset", "llama-350m", "--json", *more).stdout)
        return answer

    usual = told()["advice"]
    assert "because of the line" in usual["binds"]
    preset = Manifest.from_toml(render_preset("llama-350m", "x", "00" * 32))
    own = usual["disk"]["own"]
    assert own["inner_steps"] == preset.rounds.inner_steps
    seconds = {row["inner_steps"]: row["round_seconds"] for row in told()["rows"] if row["codec"] == "int2"}
    of_own = seconds[own["inner_steps"]]
    assert own["round_bytes"] == written(preset, 4).in_a_round(of_own, CHECKPOINT_SECONDS)
    assert own["day_bytes"] == pytest.approx(86400 / of_own * own["round_bytes"])
    every_round = told("--checkpoint-seconds", "0")["advice"]
    assert every_round["disk"]["own"]["round_bytes"] == written(preset, 4).in_a_round(of_own, 0)
    assert every_round["exchange_seconds"] == usual["exchange_seconds"]
    said = dilocox("--preset", "llama-350m").stdout
    assert f"H = {preset.rounds.inner_steps}, {own['day_bytes'] / 1e12:,.3g} TB a day" in said
    file = tmp_path / "waits.toml"
    text = render_preset("llama-350m", "x", "00" * 32)
    file.write_text(text.replace('overlap = "rebase"', 'overlap = "none"').replace("lead_weight = 1.0\n", ""))
    waits = json.loads(dilocox(str(file), "--json").stdout)["advice"]["disk"]["own"]
    assert waits["day_bytes"] < own["day_bytes"], "its rounds last longer by their exchange"
    named = told("--encode-seconds", "50", "--apply-seconds", "7")["advice"]
    assert named["codec_seconds"] == {"encode": 50, "apply": 7}
    assert named["exchange_seconds"] > 50 + 4 * 7


def test_every_preset_says_what_it_is_made_for():
    assert set(plan.MADE_FOR) == set(preset_names())
    for name, site in plan.MADE_FOR.items():
        kind = site.device if site.device in KINDS else f"{site.device} TFLOP/s"
        said = f"{site.clusters} clusters, {site.boxes} x {site.devices} x {kind} each, lines of {site.bandwidth}"
        assert said in render_preset(name, "x", "00" * 32)


def test_what_does_not_fit_its_devices_is_refused():
    told = dilocox("--preset", "llama-7b", "--devices", "1", "--boxes", "1", "--device", "3090")
    assert told.returncode == 2
    assert "a 3090 has 24.0 GB" in told.stderr


def dilocox(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-m", "dilocox.cli.main", "plan", *arguments], capture_output=True, text=True)


def test_activations_between_boxes_are_what_a_slow_line_is_full_of():
    """Reproduce a fault: ten hosts at 1 Gbps were promised 273,636 tokens a second, for two clusters at a second a step."""
    run = Manifest.from_toml(render_preset("qwen1.5-107b", "x", "00" * 32))
    cluster = plan.inside(run, [8] * 10, KINDS["a800"])
    assert (cluster.tiling.length, cluster.tiling.copies) == (80, 1), "each stage has a device of its own"
    passed = run.training.batch_size * 4096 * 8192 * 2
    assert cluster.activation_bytes == 2 * passed, "a box in the middle sends forward to one neighbour, and back to the other"
    assert plan.inside(run, [8, 8], KINDS["a800"]).activation_bytes == passed
    assert plan.inside(run, [8], KINDS["a800"]).activation_bytes == 0
    assert cluster.bubble == pytest.approx(79 / 239)
    seconds = cluster.seconds(1e9)
    assert seconds == pytest.approx(8 * HEADERS * 2 * passed / 1e9)


def test_a_looped_pipeline_waits_less_and_passes_on_more():
    stretched, looped = (
        plan.inside(
            manifest(model={"num_hidden_layers": 6, "stages": 8}, training={"microbatches": 4, "schedule": schedule}), [1, 1]
        )
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
    assert held == memory_model.stage_bytes(run, stages, half=False).total
    outer = [tensor for state in trainer.states for tensor in (state.committed, state.feedback, state.anchor)]
    copies = [
        tensor for kinds in trainer.copy_inner().values() for name, tensor in kinds.items() if not name.startswith("step|")
    ]
    beside = sum(tensor.nbytes for tensor in (*outer, *copies))
    assert beside == memory_model.host_bytes(run, stages) == plan.inside(run, [1]).host_bytes


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_has_a_plan_of_its_memory(preset: str):
    run = Manifest.from_toml(render_preset(preset, "x", "00" * 32))
    kind = KINDS["a800" if preset == "qwen1.5-107b" else "4090"]
    inside = plan.inside(run, [run.model.stages], kind)
    largest = max(sum(spec.elements for spec in stage_tensors(run.model, stage)) for stage in range(run.model.stages))
    assert inside.device.weights >= 4 * largest
    assert inside.host_bytes >= 16 * parameter_count(run.model)
    assert inside.device_bytes < kind.memory, "of the devices that its first line is about"


def test_the_command_compares_codecs_and_says_what_it_assumes():
    report = json.loads(
        dilocox("--preset", "tiny", "--bandwidth", "50mbit", "--boxes", "1", "--inner-steps", "10,20", "--json").stdout
    )
    rows = {(row["codec"], row["inner_steps"]): row for row in report["rows"]}
    assert ("int2", 10) in rows
    assert rows[("fp32", 20)]["payload_bytes"] > 20 * rows[("topk-int2 256", 20)]["payload_bytes"]
    assert len(report["assumptions"]) == 11
    assert report["site"]["step"]["activations"] == 0, "no pipeline leaves its box"
    assert "+0.7%" in dilocox("--paper").stdout
    wrongs = (["--bandwidth", "fast"], ["--inner-steps", "0"], ["--preset", "none"], ["nowhere.toml"], ["--device", "abacus"])
    for wrong in wrongs:
        assert dilocox(*wrong).returncode == 2
    refused = dilocox("--step-seconds", "1")
    assert refused.returncode == 2
    assert "over the devices' peak" in refused.stderr
