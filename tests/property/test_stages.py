"""Tests of the split of a model into stages: as even as possible, and fast for any number of stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol.run import tensors
from dilocox.protocol.run.manifest import Model
from dilocox.protocol.run.tensors import stage_units, unit_operations, unit_weights, units
from tests.helpers import manifest


def model_of(layers: int, stages: int, vocabulary: int) -> Model:
    return manifest(model={"num_hidden_layers": layers, "stages": stages, "vocab_size": vocabulary}).model


def slowly(sizes: list[int], stages: int) -> list[tuple[int, int]]:
    """Return among all splits with the smallest largest stage the one whose last stages begin the earliest."""
    total = [sum(sizes[:end]) for end in range(len(sizes) + 1)]
    best = [[(0, 0)] + [(1 << 62, 0)] * len(sizes)]
    for stage in range(1, stages + 1):
        row = [(1 << 62, 0)] * (len(sizes) + 1)
        for end in range(stage, len(sizes) + 1):
            row[end] = min((max(best[-1][cut][0], total[end] - total[cut]), cut) for cut in range(stage - 1, end))
        best.append(row)
    found, end = [], len(sizes)
    for stage in range(stages, 0, -1):
        found.append((best[stage][end][1], end))
        end = best[stage][end][1]
    return found[::-1]


@given(st.integers(1, 14), st.integers(1, 16), st.integers(1, 4000))
def test_the_split_is_the_one_that_looking_at_all_finds(layers: int, stages: int, vocabulary: int):
    model = model_of(layers, min(stages, layers + 2), vocabulary)
    assert list(stage_units(model)) == slowly(list(unit_weights(model)), model.stages)


@given(st.integers(2, 40), st.integers(2, 8), st.integers(1, 40_000))
def test_busiest_stage_has_hardly_more_work_than_in_any_other_split(layers: int, stages: int, vocabulary: int):
    model = model_of(layers, min(stages, layers), vocabulary)
    operations = unit_operations(model)
    found = max(sum(operations[first:last]) for first, last in stage_units(model))
    least = max(sum(operations[first:last]) for first, last in slowly(list(operations), model.stages))
    memory = sum(spec.elements for unit in units(model) for spec in unit) / 16
    assert least <= found <= least + memory


def test_embedding_computes_nothing_and_the_head_does():
    model = model_of(4, 2, 8192)
    operations = unit_operations(model)
    assert operations[0] == 0
    assert operations[-1] == 8192 * model.config.hidden_size
    attention = model.sequence_length * model.config.num_attention_heads * model.config.head_dim
    matrices = sum(spec.elements for spec in units(model)[1] if len(spec.shape) == 2)
    assert operations[1] == matrices + attention
    assert stage_units(model) == ((0, 5), (5, 6)), "a head as heavy as all layers"


def test_the_largest_model_that_a_manifest_can_say_is_split_at_once(monkeypatch: pytest.MonkeyPatch):
    """Check the time: such a manifest took each reader a minute and a half; later, with all impossible stage ends,
    seconds."""
    looked = 0

    def counted(one: int, other: int) -> int:
        nonlocal looked
        looked += 1
        return max(one, other)

    monkeypatch.setattr(tensors, "max", counted, raising=False)
    stage_units.cache_clear()
    assert len(stage_units(model_of(1024, 1024, 256))) == 1024
    assert looked < 10 * 1024, "of 1026 units each stage can end at three"
