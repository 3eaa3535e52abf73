"""Tests of stages against transformers' own modules, and of the paper's model on the meta device."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dilocox.cli.run.init import preset_names, render_preset
from dilocox.node.training.model.inner import InnerOptimizer, learning_rate_factor
from dilocox.node.training.model.model import FAMILIES, Stage, build_chain, hugging_face_config, initial_values
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.placement import placed
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_tensors
from tests.helpers import manifest


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_transformers(family: str):
    model = manifest(model={"model_type": family, "stages": 3}).model
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hugging_face_config(model))
    expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    ours = {spec.name: spec.shape for stage in range(3) for spec in stage_tensors(model, stage)}
    assert ours == expected
    for stage in range(3):
        with torch.device("meta"):
            built = Stage(model, stage)
        assert [tuple(t.shape) for t in built.tensors()] == [spec.shape for spec in stage_tensors(model, stage)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chained_stages_compute_what_transformers_computes(family: str):
    model = manifest(model={"model_type": family, "stages": 3}).model
    chain = build_chain(model, [0, 1, 2], torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_config(hugging_face_config(model))
    weights = {}
    for stage in chain:
        for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
            for offset, values in initial_values(spec, 7):
                parameter.data.view(-1)[offset : offset + len(values)] = values
            weights[spec.name] = parameter.data
    theirs.load_state_dict(weights)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(chain(tokens), theirs(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(preset_names()) - {"qwen1.5-107b"}))
def test_every_preset_builds_on_the_meta_device_and_counts(name: str):
    model = Manifest.from_toml(render_preset(name, name, "00" * 32)).model
    with torch.device("meta"):
        built = [sum(parameter.numel() for parameter in Stage(model, stage).parameters()) for stage in range(model.stages)]
    assert built == [sum(spec.elements for spec in stage_tensors(model, stage)) for stage in range(model.stages)]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["tiny", pytest.param("llama-10m", marks=pytest.mark.thorough)])
def test_small_presets_learn(name: str):
    run = Manifest.from_toml(render_preset(name, name, "00" * 32))
    run = run.model_copy(update={"model": run.model.model_copy(update={"sequence_length": 16})})
    run = run.model_copy(update={"training": run.training.model_copy(update={"batch_size": 4, "warmup_steps": 0})})
    trainer = Trainer(placed(run, microbatches=2))
    trainer.load_initial()
    inputs = torch.arange(4 * 16).reshape(4, 16)
    losses = [trainer.step(inputs, inputs).loss for _ in range(4)]
    assert losses[-1] < losses[0] - 0.5


def test_every_stage_of_the_107b_preset_builds_and_counts():
    """Build them and print bytes per device: `pytest -s -k 107b`."""
    paper = Manifest.from_toml(render_preset("qwen1.5-107b", "paper", "00" * 32))
    total, largest = 0, 0
    for stage in range(paper.model.stages):
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in Stage(paper.model, stage).parameters())
        assert count == sum(spec.elements for spec in stage_tensors(paper.model, stage))
        total, largest = total + count, max(largest, count)
    assert total == parameter_count(paper.model)
    assert total == pytest.approx(108e9, rel=0.01)
    on_device = largest * (4 + 4 + 8)  # parameters, gradients, AdamW's two moments, all float32
    in_host_memory = largest * 4 * 4  # Θ, momentum, feedback, anchor
    print(
        f"\n{total:,} parameters; largest stage {largest:,}: {on_device:,} bytes per device, {in_host_memory:,} in host memory"
    )
    assert on_device < 40e9, "must fit the paper's 40 GB devices"


def test_initial_values_are_uniform_with_the_right_deviation():
    spec = next(spec for spec in stage_tensors(manifest(model={"hidden_size": 256}).model, 0) if "q_proj.weight" in spec.name)
    values = torch.cat([part for _, part in initial_values(spec, 1)])
    assert float(values.std()) == pytest.approx(spec.initial, rel=0.02)
    assert float(values.mean()) == pytest.approx(0, abs=spec.initial / 50)
    assert float(values.abs().max()) <= spec.initial * 3**0.5


def test_warm_up_then_cosine():
    training = manifest(training={"warmup_steps": 10, "total_steps": 110}).training
    assert learning_rate_factor(training, 0) == pytest.approx(0.1)
    assert learning_rate_factor(training, 9) == pytest.approx(1.0)
    assert learning_rate_factor(training, 60) == pytest.approx(0.55)
    assert learning_rate_factor(training, 10_000) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_inner_optimizer_resumes_where_it_stood(kind: str):
    run = manifest(training={"optimizer": kind})

    def build():
        chain = build_chain(run.model, [0, 1], torch.device("cpu"))
        for stage in chain:
            for spec, parameter in zip(stage.specs, stage.tensors(), strict=True):
                for offset, values in initial_values(spec, 0):
                    parameter.data.view(-1)[offset : offset + len(values)] = values
        return chain, InnerOptimizer(run, list(chain))

    def step(chain, optimizer, seed):
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
        chain(tokens).square().mean().backward()
        optimizer.step()

    chain, optimizer = build()
    step(chain, optimizer, 0)
    step(chain, optimizer, 1)
    other, restored = build()
    for mine, theirs in zip(chain.parameters(), other.parameters(), strict=True):
        theirs.data.copy_(mine.data)
        restored.restore(theirs, {k: v.clone() for k, v in optimizer.tensors(mine).items()})
    restored.steps = optimizer.steps
    step(chain, optimizer, 2)
    step(other, restored, 2)
    assert all(torch.equal(a, b) for a, b in zip(chain.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_muon_has_the_momentum_that_the_run_says(momentum: float):
    run = manifest(training={"optimizer": "muon", "muon_momentum": momentum})
    chain = build_chain(run.model, [0, 1], torch.device("cpu"))
    optimizer = InnerOptimizer(run, list(chain))
    hidden = [parameter for name, parameter in chain.named_parameters() if "q_proj.weight" in name]
    for gradient in (1.0, 0.0):
        for parameter in chain.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
    assert hidden
    for parameter in hidden:
        buffer = optimizer.tensors(parameter)["momentum_buffer"]
        assert torch.allclose(buffer, torch.full_like(buffer, (1 - momentum) * momentum))
