import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.arms import ARMS as TOYS
from bench.study.design import ARMS, CODECS, INNERS, OVERLAPS, Cell
from bench.study.report import DENSE, DENSE_LONG, SPARSE, default
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.run.allowed_values import faults
from dilocox.protocol.run.manifest import Manifest, RunFileError
from dilocox.protocol.run.tensors import (
    parameter_count,
    phase_bytes,
    stage_tensors,
    stage_units,
    trained_count,
)
from tests.helpers import identity, manifest, manifest_keys


@pytest.mark.parametrize("preset", preset_names())
def test_every_shipped_preset_loads(preset: str):
    loaded = Manifest.from_toml(render_preset(preset, "a-run", "00" * 32))
    assert Manifest.from_canonical(loaded.canonical_bytes()) == loaded


CANARY = "/etc/passwd"
COMPARED = {("attestation", "tcb_statuses")}
"""Fields that are compared with the evidence's report of its machine, and nowhere else."""


@pytest.mark.parametrize("path", list(manifest_keys()), ids=".".join)
def test_no_field_of_a_manifest_names_a_file(path: tuple[str, ...]):
    """Check all fields: a manifest comes from an unknown peer, and a named file could be read, trained on and sent."""
    if path in COMPARED:
        return
    for value in (CANARY, [CANARY], {CANARY: CANARY}, "../" * 9 + CANARY, f"file://{CANARY}"):
        said = manifest().model_dump(mode="json")
        section = said
        for key in path[:-1]:
            section[key] = section.get(key) or {}
            section = section[key]
        section[path[-1]] = value
        with pytest.raises(ValidationError) as refused:
            Manifest.model_validate(said)
        assert any(error["loc"][: len(path)] == path for error in refused.value.errors()), "for this very field"


LORA = {"rank": 2, "alpha": 4.0, "base": "00" * 32}


@pytest.mark.parametrize("model", [{}, {"lora": LORA, "num_hidden_layers": 5}], ids=["whole", "adapters"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_all_stages_have_is_told_without_a_look_at_where_they_end(model: dict, optimizer: str):
    """Check the time: a manifest of the most layers takes seconds, and unknown peers send manifests, thousands to the
    market."""
    stage_units.cache_clear()
    said = manifest(model=model, compression={"codec": "int4"}, training={"optimizer": optimizer}, audit={"segments": 2})
    assert Manifest.from_canonical(said.canonical_bytes()) == said
    whole, trained = said.phase_bytes, trained_count(said.model)
    assert not stage_units.cache_info().misses
    stages = range(said.model.stages)
    assert whole == sum(phase_bytes(said.model, optimizer == "muon", stage) for stage in stages)
    assert trained == sum(spec.elements for stage in stages for spec in stage_tensors(said.model, stage))


def test_presets_are_commented_files():
    for preset in preset_names():
        assert (files("dilocox.node.presets") / f"{preset}.toml").read_text().startswith("#")


def test_the_paper_s_preset_keeps_the_paper_s_algorithm():
    paper = Manifest.from_toml(render_preset("qwen1.5-107b", "paper", "00" * 32))
    assert (paper.rounds.overlap, paper.compression.codec, paper.compression.rank) == ("delayed", "lowrank-int4", 2048)
    assert (paper.rounds.inner_steps, paper.model.stages) == (125, 80)
    assert 107e9 < parameter_count(paper.model) < 109e9


TUNED = {"tiny"}
ARM_OF = {("int2", 0.9): DENSE, ("int2", 0.95): DENSE_LONG, ("topk-int2", 0.95): SPARSE}
"""Arm by codec and Muon's momentum."""


def test_what_presets_take_ended_lowest_in_most_cells_that_were_run_of_the_registered_comparison():
    """Compare the study's defaults, `dilocox plan` and docs/results."""
    study = json.loads((Path(__file__).parents[2] / "docs/results/study.json").read_text())["results"]
    first = dict.fromkeys(ARM_OF.values(), 0)
    ran = dict(first)
    for each in study["cells"]:
        losses = {row["arm"]: row["loss"] for row in each["rows"]}
        best = default(Cell(**each["cell"]))
        rivals = [losses[name] for name in losses if ARMS[name].uses_line]
        if best in losses and len(rivals) > 1:
            ran[best] += 1
            first[best] += losses[best] == min(rivals)
    assert all(2 * first[arm] > ran[arm] > 1 for arm in ran)


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"qwen1.5-107b"}))
def test_a_preset_is_one_of_these_arms(name: str):
    """Check the arm only; the choice of it follows from link and length (test_plan)."""
    preset = Manifest.from_toml(render_preset(name, name, "00" * 32))
    arm = ARMS[ARM_OF[preset.compression.codec, preset.training.muon_momentum]]
    for section, values in {
        "compression": CODECS[arm.codec],
        "rounds": OVERLAPS[arm.overlap],
        "training": INNERS[arm.inner],
    }.items():
        # Coding loses nothing; and of k it is the bits that count.
        said = {key: value for key, value in values.items() if key not in ("entropy_coding", "k")}
        assert said.items() <= getattr(preset, section).model_dump().items()


def test_the_smallest_preset_takes_the_best_rates_of_the_toy():
    rates = TOYS["sparse, Muon"].rates["training"]
    for name in TUNED:
        assert rates.items() <= Manifest.from_toml(render_preset(name, name, "00" * 32)).training.model_dump().items()


def test_larger_presets_say_that_their_learning_rate_is_nobody_s_measurement():
    for name in set(preset_names()) - {"qwen1.5-107b", *TUNED}:
        assert "no bench here has tuned it" in (files("dilocox.node.presets") / f"{name}.toml").read_text()


def test_presets_are_as_large_as_their_names_say_and_train_to_their_cosine_s_end():
    for name in set(preset_names()) - {"tiny"}:
        [(size, unit)] = re.findall(r"-(\d+)([mb])$", name)
        preset = Manifest.from_toml(render_preset(name, name, "00" * 32))
        assert parameter_count(preset.model) == pytest.approx(int(size) * {"m": 1e6, "b": 1e9}[unit], rel=0.15)
        assert preset.rounds.count * preset.rounds.inner_steps == preset.training.total_steps


def test_unknown_keys_fail_with_the_nearest_name():
    text = render_preset("tiny", "a-run", "00" * 32).replace("inner_steps = 10", "iner_steps = 10", 1)
    with pytest.raises(ConfigError, match=r"rounds\.iner_steps: no such key; did you mean inner_steps"):
        Manifest.from_toml(text)


def test_unknown_keys_of_a_table_that_may_lack_fail_with_the_nearest_name():
    rope = 'rope_parameters = { rope_type = "linear", facter = 2.0 }\n'
    text = render_preset("tiny", "a-run", "00" * 32).replace("hidden_size", f"{rope}hidden_size", 1)
    with pytest.raises(ConfigError, match=r"model\.config\.rope_parameters\.facter: no such key; did you mean factor"):
        Manifest.from_toml(text)


def test_a_sentence_about_the_model_has_its_numbers_and_names_the_key_that_is_wrong():
    for changes, says in (
        ({"model_type": "mistral", "sliding_window": 8, "sequence_length": 16}, "at most 8 tokens"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta"),
    ):
        with pytest.raises(ValidationError) as refused:
            manifest(model=changes)
        told = [why for _, why in faults(Manifest, refused.value, {})]
        assert len(told) == 1, told
        assert "{" not in told[0]
        assert says in f"{refused.value}"


@pytest.mark.parametrize("key", ["rope_theta", "hidden_act", "torch_dtype", "tie_word_embeddings"])
def test_a_key_that_a_pasted_config_may_have_is_answered_with_what_to_do(key: str):
    text = render_preset("tiny", "a-run", "00" * 32).replace("hidden_size", f"{key} = 1\nhidden_size", 1)
    with pytest.raises(ConfigError, match=rf"model\.config\.{key}: no such key: (remove it|set it in)"):
        Manifest.from_toml(text)


def test_bad_values_are_named():
    for spoiled in (
        {"rounds": {"max_inner_steps": 1}},
        {"model": {"stages": 9}},
        {"training": {"batch_size": 5}},
        {"training": {"learning_rate": float("nan")}},
        {"rounds": {"start_clusters": 1}},
        {"rounds": {"lead_weight": 1.5}},
    ):
        with pytest.raises(ValueError, match=r".+"):
            manifest(**spoiled)
    with pytest.raises(ConfigError, match="not TOML"):
        Manifest.from_toml("[run")


def test_a_schedule_that_no_pipeline_of_the_run_could_follow_is_refused():
    looped = {"schedule": "interleaved"}
    assert manifest(model={"stages": 4}, training=looped).training.schedule == "interleaved"
    for model, training in (({"stages": 3}, looped), ({"stages": 4}, {**looped, "microbatches": 1})):
        with pytest.raises(ValueError, match="wants two stages and a microbatch for each of two workers"):
            manifest(model=model, training=training)


@pytest.mark.parametrize(
    ("precision", "halves"), [("auto", [False, True]), ("bf16", [True, True]), ("float32", [False, False])]
)
def test_precision_is_the_run_s_choice(precision: str, halves: list[bool]):
    training = manifest(training={"precision": precision}).training
    assert [training.in_bfloat16(cuda=cuda) for cuda in (False, True)] == halves


def test_the_run_id_is_the_meaning_not_the_text():
    text = render_preset("tiny", "a-run", "00" * 32)
    assert Manifest.from_toml(text).run_id == Manifest.from_toml("# a comment\n" + text).run_id
    assert manifest().run_id != manifest(rounds={"count": 6}).run_id


def test_only_canonical_bytes_are_accepted():
    raw = manifest().canonical_bytes()
    for spoiled in (raw + b" ", b"{}", b"\xff", b"[" * 100_000, raw.replace(b'"count":5', b'"count":5.0')):
        with pytest.raises(RemoteError):
            Manifest.from_canonical(spoiled)


def test_the_first_rounds_wait_for_their_commits():
    run = manifest(rounds={"synchronous_rounds": 4})
    assert [run.overlap(t) for t in (1, 4, 5)] == ["none", "none", "rebase"]


def test_tiny_trains_exactly_two_hundred_steps():
    tiny = Manifest.from_toml(render_preset("tiny", "a-run", "00" * 32))
    assert tiny.nominal_steps(tiny.rounds.count + 1) == 200
    assert 0.5e6 < parameter_count(tiny.model) < 1.5e6


def test_stages_partition_the_tensors():
    for stages in range(1, 6):
        model = manifest(model={"stages": stages}).model
        names = [spec.name for stage in range(stages) for spec in stage_tensors(model, stage)]
        assert len(names) == len(set(names))
        assert sum(s.elements for stage in range(stages) for s in stage_tensors(model, stage)) == parameter_count(model)


def test_who_may_read_before_it_is_on_the_roster():
    listed, holder, stranger = (identity(number).peer for number in (1, 2, 3))
    for policy, public, strangers, nameless in (
        ("open", None, True, True),
        ("open", False, True, False),
        ("allow-list", None, False, False),
        ("allow-list", True, True, True),
        ("allow-list", False, False, False),
    ):
        admission = {"policy": policy, "allow": [listed]} | ({} if public is None else {"public_read": public})
        run = manifest(admission=admission, run={"relays": [holder]}, rounds={"min_clusters": 1, "start_clusters": 1})
        assert (run.may_read(stranger), run.may_read("")) == (strangers, nameless), (policy, public)
        assert all(map(run.may_read, (listed, holder, run.coordinator, run.owner)))


def test_what_bounds_a_contribution_follows_from_who_may_take_part_unless_the_run_says_it():
    allowed = {"policy": "allow-list", "allow": (identity(0).peer,)}
    said = {"weight_cap": 4, "tensor_clip_ratio": 8.0}
    for admission, rounds, bounds in (
        ({}, {}, (1.0, 1.25)),
        (allowed, {}, (0.0, 2.0)),
        ({}, said, (4.0, 8.0)),
        (allowed, said, (4.0, 8.0)),
        ({}, {"weight_cap": 0, "tensor_clip_ratio": 0}, (0.0, 0.0)),
    ):
        run = manifest(admission=admission, rounds=rounds)
        assert (run.rounds.weight_cap, run.rounds.tensor_clip_ratio) == bounds


def test_the_largest_change_of_a_round_is_its_longest_phase_at_the_largest_rate():
    assert manifest().largest_rms == pytest.approx(12 * 1e-2)
    muon = {"optimizer": "muon", "muon_learning_rate": 0.05}
    assert manifest(training=muon).largest_rms == pytest.approx(12 * 0.05)
    assert manifest(training={"muon_learning_rate": 0.05}).largest_rms == pytest.approx(12 * 1e-2), "it trains nothing"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("rounds", "weight_cap", 0.5),
        ("rounds", "tensor_clip_ratio", 0.5),
        ("outer", "aggregate", "median"),
    ],
)
def test_bounds_that_bound_nothing_or_all_are_refused(section: str, key: str, value: object):
    with pytest.raises(ValueError, match=key):
        manifest(**{section: {key: value}})


def test_a_run_file_that_no_peer_would_take_is_refused_where_it_is_read():
    names = [identity(number).peer for number in range(1500)]
    text = render_preset("tiny", "t", "00" * 32) + '\n[admission]\npolicy = "allow-list"\nallow = '
    assert Manifest.from_toml(text + json.dumps(names[:800])).admission.allow == tuple(names[:800])
    with pytest.raises(RunFileError, match="no peer takes more"):
        Manifest.from_toml(text + json.dumps(names))


def test_a_canonical_manifest_holds_no_null_and_all_that_admission_decides():
    for policy, decided in (("open", (1.0, 1.25, 64, True)), ("allow-list", (0.0, 2.0, 0, False))):
        alone = {"min_clusters": 1, "start_clusters": 1}
        run = manifest(admission={"policy": policy, "allow": (identity(0).peer,)}, rounds=alone)
        assert b"null" not in run.canonical_bytes()
        assert (
            run.rounds.weight_cap,
            run.rounds.tensor_clip_ratio,
            run.standing.rounds,
            run.admission.public_read,
        ) == decided
        assert Manifest.from_canonical(run.canonical_bytes()) == run
        without = run.canonical_bytes().replace(b'"weight_cap":', b'"weight_cop":')
        with pytest.raises(RemoteError):
            Manifest.from_canonical(without)
