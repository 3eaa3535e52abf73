"""Tests of every preset: small ones take steps, each stage of large ones is built and computes shapes, in the documented
memory."""

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.cli.run.init import averaging, preset_names, render_preset
from dilocox.node.planning.disk_model import held_bytes
from dilocox.node.planning.memory_model import stage_bytes
from dilocox.node.planning.plan import MADE_FOR
from dilocox.node.training.model.model import build_chain
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.checks.score_rules import SAMPLES
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, state_bytes
from tests.corpora import corpus_of, words

META = torch.device("meta")


def preset(name: str) -> Manifest:
    return Manifest.from_toml(render_preset(name, name, "00" * 32))


@pytest.mark.parametrize("name", preset_names())
def test_each_stage_of_a_preset_computes_in_the_memory_that_is_said(name: str):
    run = preset(name)
    model, elements = run.model, 0
    hidden = torch.empty(2, model.sequence_length, dtype=torch.int64, device=META)
    for number in range(model.stages):
        [stage] = chain = build_chain(model, [number], META)
        hidden = chain(hidden)
        held = sum(parameter.numel() for parameter in stage.tensors())
        assert stage_bytes(run, [number], half=False).weights == 4 * held
        elements += held
    assert hidden.shape == (2, model.sequence_length, model.config.vocab_size)
    assert elements == parameter_count(model)


@pytest.mark.parametrize(
    "name",
    ["tiny", pytest.param("llama-10m", marks=pytest.mark.thorough), pytest.param("llama-125m", marks=pytest.mark.thorough)],
)
def test_a_small_preset_takes_steps_as_it_is_shipped(name: str, process_group: None):
    """Check it with shorter sequences, and fewer of them."""
    run = preset(name)
    small = {**run.training.model_dump(), "batch_size": 2, "microbatches": 1, "warmup_steps": 1}
    run = Manifest.model_validate(
        {**run.model_dump(), "model": {**run.model.model_dump(), "sequence_length": 32}, "training": small}
    )
    trainer = Trainer(run)
    trainer.load_initial()
    tokens = torch.randint(0, run.model.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    losses = [trainer.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).loss for _ in range(4)]
    assert losses[0] == pytest.approx(math.log(run.model.config.vocab_size), rel=0.1)
    assert losses[-1] < losses[0]


def test_sites_on_texts_of_their_own_average_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    folder = corpus_of(tmp_path / "text", words(400, 60)).folder
    for name, options in (("shared", []), ("apart", ["--private"])):
        file = tmp_path / f"{name}.toml"
        told = CliRunner().invoke(app, ["init", str(file), "--preset", "llama-125m", "--data", f"text={folder}", *options])
        assert told.exit_code == 0, told.output
        run = Manifest.from_toml(file.read_text())
        assert (run.scoring.voters, run.data.private) == (32, bool(options))
        assert (run.compression.codec, run.outer.momentum) == (("topk-int2", 0.0) if options else ("int2", 0.4))


@pytest.mark.parametrize("name", preset_names())
def test_the_mean_itself_is_taken_by_what_does_not_begin_at_random_on_a_text_that_all_share(name: str):
    """Check that every preset's text has all values that must be replaced, or none of them."""
    before = preset(name)
    after = Manifest.from_toml(averaging(render_preset(name, name, "00" * 32)))
    if name == "qwen1.5-107b":
        assert after == before, "the paper's"
        return
    assert before.outer.learning_rate != 1.0
    assert (after.outer.learning_rate, after.outer.momentum) == (1.0, 0.0)
    assert (after.rounds.lead_weight, after.training.muon_momentum) == (0.5, 0.95)
    assert after.training.muon_learning_rate == 0.02
    assert (after.compression.codec, after.compression.k) == ("topk-int2", 760)
    assert after.compression.entropy_coding


@pytest.mark.parametrize("name", preset_names())
def test_payloads_that_wait_for_a_snapshot_are_no_more_than_six_states(name: str):
    """Check the preset's number of clusters: joiners fetch these payloads on a link that carries the run's, too."""
    run = preset(name)
    waiting = held_bytes(run, MADE_FOR[name].clusters) - held_bytes(run, 0)
    state = sum(state_bytes(run.model, stage) for stage in range(run.model.stages))
    assert waiting <= 6 * state


@pytest.mark.parametrize("name", [name for name in preset_names() if preset(name).scoring.voters])
def test_a_round_has_room_for_scoring_all_others(name: str):
    """Check the share of a cluster's time, because unscored work counts. A score takes a forward pass for each other
    cluster's step and for the state."""
    run, others = preset(name), MADE_FOR[name].clusters - 1
    assert others <= run.scoring.voters
    passes = 4 if run.training.checkpoint_activations else 3
    scored = SAMPLES * (others + 1) / run.training.batch_size / passes
    assert scored <= run.scoring.share * run.rounds.inner_steps


EVALUATING = 0.015
"""Largest share of a phase. `tiny` is a demonstration."""


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"tiny"}))
def test_looking_at_the_loss_takes_little_of_what_training_takes(name: str):
    """Check the cost: every cluster evaluates, and its devices do nothing else then. A forward pass is a third of a step's
    time, or a quarter with recomputed activations."""
    run = preset(name)
    assert run.rounds.evaluate_every
    evaluated = run.data.evaluation_sequences / run.training.batch_size / 3
    assert evaluated <= EVALUATING * run.rounds.inner_steps * run.rounds.evaluate_every
