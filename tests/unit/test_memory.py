"""Tests of a device's planned memory against the bytes that autograd stores, and those that torch's schedules accumulate."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.node.planning import memory_model
from dilocox.node.training.model.model import Chain, build_chain, initial_values
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import manifest

SHAPE = {
    "stages": 3,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "sequence_length": 64,
}

OTHERS = [
    {"model_type": "qwen3", "head_dim": 24},
    {"model_type": "qwen3", "num_key_value_heads": 6},
    {"model_type": "mistral", "head_dim": 32},
]


def filled(run: Manifest, stage: int) -> Chain:
    chain = build_chain(run.model, [stage], torch.device("cpu"), run.training.checkpoint_activations)
    for part in chain:
        for spec, parameter in zip(part.specs, part.tensors(), strict=True):
            for offset, values in initial_values(spec, 7):
                parameter.data.view(-1)[offset : offset + len(values)] = values
    return chain


def kept(run: Manifest, stage: int, half: bool) -> int:
    """Return the bytes that autograd stores for a microbatch, beside weights and their copies."""
    chain, model = filled(run, stage), run.model
    batch = run.training.batch_size // run.training.microbatches
    tokens = torch.zeros(batch, model.sequence_length, dtype=torch.int64)
    hidden = torch.randn(batch, model.sequence_length, model.config.hidden_size, requires_grad=True) if stage else tokens
    weights = {tensor.untyped_storage().data_ptr() for part in chain for tensor in part.tensors()}
    shapes = {tensor.shape for part in chain for tensor in part.tensors()}
    shapes |= {shape[::-1] for shape in shapes}
    seen: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        copied = tensor.dtype == torch.bfloat16 and tensor.shape in shapes
        if storage.data_ptr() not in weights and not copied:
            seen[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            given = chain(hidden)
        if stage == model.stages - 1:
            torch.nn.functional.cross_entropy(given.flatten(0, 1).float(), tokens.flatten())
    return sum(size for _, size in seen.values())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "llama"}, {"num_key_value_heads": 6}, {"num_hidden_layers": 4}, *OTHERS]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_planned_activations_are_what_autograd_keeps(changes: dict[str, Any], half: bool, recompute: bool):
    model = {**SHAPE, "num_key_value_heads": 2, **changes}
    run = manifest(model=model, training={"checkpoint_activations": recompute, "batch_size": 16, "microbatches": 2})
    for stage in range(run.model.stages):
        assert memory_model.held_bytes(run, stage, half) == pytest.approx(kept(run, stage, half), rel=0.1)


def test_in_flight_are_as_many_as_published():
    ones = [memory_model.peak(worker, 4, 8, [1]) for worker in range(4)]
    assert ones == [4, 3, 2, 1], "one for each worker from here on (arXiv 2104.04473)"
    assert memory_model.peak(0, 4, 2, [1]) == 2, "not more than there are"
    looped = [memory_model.peak(worker, 4, 8, [1, 1]) for worker in range(4)]
    assert looped == [(2 - 1) * 4 + 2 * (4 - 1 - worker) + 1 for worker in range(4)]
    assert memory_model.peak(0, 4, 4, [1, 1]) == 8, "all of them"
    assert memory_model.peak(1, 2, 4, [100, 1]) == 300, "the third of the first chunk, when only the second one's are done"
    assert memory_model.peak(1, 2, 4, [1, 100]) == 102, "two of the first chunk, and one of the second"


def test_a_device_is_what_its_parts_are():
    run = manifest(model={**SHAPE, "num_key_value_heads": 2, "stages": 4}, training={"batch_size": 8, "microbatches": 8})
    first = memory_model.fullest_device(run, 1, 8, half=False)
    held = sum(memory_model.held_bytes(run, stage, False) for stage in range(4)) + memory_model.output_bytes(run, 3, False)
    assert first.activations == held, "one microbatch at a time, and nothing comes from elsewhere"
    assert first.total == memory_model.stage_bytes(run, range(4), half=False).total + held
    assert memory_model.fullest_device(run, 1, 8, half=True).weights > first.weights
    deep = manifest(
        model={**SHAPE, "num_key_value_heads": 2, "num_hidden_layers": 14, "stages": 4},
        training={"batch_size": 8, "microbatches": 8},
    )
    saving = deep.model_copy(update={"training": deep.training.model_copy(update={"checkpoint_activations": True})})
    assert (
        memory_model.fullest_device(saving, 2, 8, False).activations
        < memory_model.fullest_device(deep, 2, 8, False).activations / 2
    )


def test_bubbles_are_those_that_were_published():
    assert memory_model.bubble(1, 4, 8) == 3 / 11
    assert memory_model.bubble(2, 4, 8) == 3 / 19
    assert memory_model.bubble(1, 1, 8) == 0
