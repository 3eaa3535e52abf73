"""Tensors of each stage: names, shapes and initial distribution, derived from the manifest.

Payload layouts, state blobs and their digests follow this order, so it is part of the protocol. Names are those of
transformers' …ForCausalLM of the family; a test compares them with the real modules. Output embeddings are never tied
to input embeddings: stages do not share parameters.

In a run on adapters (`model.lora`) a stage's tensors are the adapters; its frozen weights are in blobs of their own.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from dilocox.protocol.run.model import Config, Lora, Model

__all__ = [
    "EMBEDDING",
    "TensorSpec",
    "imported_bytes",
    "parameter_count",
    "phase_bytes",
    "stage_tensors",
    "stage_units",
    "stage_weights",
    "state_bytes",
    "trained_count",
    "unit_operations",
]


class TensorSpec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    initial: float
    """Standard deviation of the initial uniform distribution; for one-dimensional tensors the constant they start from."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def hidden(self) -> bool:
        """Whether it is a matrix inside a layer: what Muon trains, where the run names it."""
        return len(self.shape) == 2 and self.name.startswith("model.layers.")


EMBEDDING = "model.embed_tokens.weight"
EMBEDDING_STD = 0.02


@lru_cache
def units(model: Model) -> tuple[tuple[TensorSpec, ...], ...]:
    """Return the units between which a stage boundary may be: the embedding, each layer, the norm with the head."""
    config = model.config
    embedding = (TensorSpec(EMBEDDING, (config.vocab_size, config.hidden_size), EMBEDDING_STD),)
    head = (
        TensorSpec("model.norm.weight", (config.hidden_size,), 1.0),
        TensorSpec("lm_head.weight", (config.vocab_size, config.hidden_size), EMBEDDING_STD),
    )
    return (embedding, *(_layer(config, index) for index in range(config.num_hidden_layers)), head)


def _layer(config: Config, index: int) -> tuple[TensorSpec, ...]:
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.head_dim * config.num_attention_heads, config.head_dim * config.num_key_value_heads
    # 1/sqrt(fan-in) keeps activations at unit scale for any width. Matrices that write into the residual stream are
    # scaled down by the number of such writes (GPT-2's rule).
    std, residual = 1 / math.sqrt(hidden), 1 / math.sqrt(2 * config.num_hidden_layers)
    outward = 1 / math.sqrt(queries) * residual
    shapes = [("self_attn.q_proj", queries, hidden, std), ("self_attn.k_proj", keys, hidden, std)]
    shapes += [("self_attn.v_proj", keys, hidden, std), ("self_attn.o_proj", hidden, queries, outward)]
    shapes += [("mlp.gate_proj", middle, hidden, std), ("mlp.up_proj", middle, hidden, std)]
    shapes += [("mlp.down_proj", hidden, middle, residual / math.sqrt(middle))]
    biased = _biased(config)
    prefix, specs = f"model.layers.{index}.", []
    for name, rows, columns, deviation in shapes:
        specs.append(TensorSpec(f"{prefix}{name}.weight", (rows, columns), deviation))
        if name in biased:
            specs.append(TensorSpec(f"{prefix}{name}.bias", (rows,), 0.0))
    if config.model_type == "qwen3":
        specs += [TensorSpec(f"{prefix}self_attn.{name}.weight", (config.head_dim,), 1.0) for name in ("q_norm", "k_norm")]
    specs += [TensorSpec(f"{prefix}{name}.weight", (hidden,), 1.0) for name in ("input_layernorm", "post_attention_layernorm")]
    return tuple(specs)


def _biased(config: Config) -> set[str]:
    """Return the matrices of a layer with a bias."""
    names = "qkv" if config.model_type == "qwen2" else "qkvo" if config.attention_bias else ""
    mlp = ("gate", "up", "down") if config.mlp_bias else ()
    return {*(f"self_attn.{name}_proj" for name in names), *(f"mlp.{name}_proj" for name in mlp)}


@lru_cache
def unit_operations(model: Model) -> tuple[int, ...]:
    """Return the multiplications of each unit's forward pass for a token: one for each weight of a matrix product, and
    those of causal attention, half of which is masked. The embedding is a table and multiplies nothing."""
    config = model.config
    attention = model.sequence_length * config.num_attention_heads * config.head_dim
    products = [sum(spec.elements for spec in unit if len(spec.shape) == 2) for unit in units(model)]
    return (0, *(layer + attention for layer in products[1:-1]), products[-1])


MEMORY_SHARE = 16
"""Parameters that weigh as much as one multiplication of a token, in the split of a model into stages."""


@lru_cache
def unit_weights(model: Model) -> tuple[int, ...]:
    """Return the weight of each unit in the split into stages: its multiplications, and a little for its memory."""
    sizes = [sum(spec.elements for spec in unit) for unit in units(model)]
    return tuple(MEMORY_SHARE * each + size for each, size in zip(unit_operations(model), sizes, strict=True))


@lru_cache
def stage_units(model: Model) -> tuple[tuple[int, int], ...]:
    """Return (first unit, one past the last) of every stage: the contiguous split whose heaviest stage is lightest. With
    adapters the embedding stays with the first layer and the head with the last: a stage without any would train nothing."""
    sizes = unit_weights(model)
    if model.lora is None:
        return _split(sizes, model.stages)
    ends = [sizes[0] + sizes[1], *sizes[2:-1]]
    ends[-1] += sizes[-1]
    last = len(ends)
    return tuple((first + (first > 0), end + 1 + (end == last)) for first, end in _split(ends, model.stages))


def _split(sizes: Sequence[int], stages: int) -> tuple[tuple[int, int], ...]:
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    count = len(sizes)
    best: list[list[tuple[int, int]]] = [[(0, 0)] + [(1 << 62, 0)] * count]  # (largest stage, where the last one starts)
    for stage in range(1, stages + 1):
        row = [(1 << 62, 0)] * (count + 1)
        cut = stage - 1
        for end in range(stage, count - stages + stage + 1):  # a unit is left for each later stage
            # The more units lie before the cut, the larger the largest stage there, and the smaller the last: where they meet, and
            # that only moves on.
            while cut < end - 1 and best[-1][cut][0] < total[end] - total[cut]:
                cut += 1
            row[end] = min((max(best[-1][at][0], total[end] - total[at]), at) for at in range(max(stage - 1, cut - 1), cut + 1))
        best.append(row)
    cuts, end = [count], count
    for stage in range(stages, 0, -1):
        end = best[stage][end][1]
        cuts.append(end)
    cuts.reverse()
    return tuple(itertools.pairwise(cuts))


@lru_cache
def stage_weights(model: Model, stage: int) -> tuple[TensorSpec, ...]:
    """All weights of the stage, in the order of payloads, states and imported blobs."""
    first, last = stage_units(model)[stage]
    return tuple(spec for unit in units(model)[first:last] for spec in unit)


@lru_cache
def stage_tensors(model: Model, stage: int) -> tuple[TensorSpec, ...]:
    """Return the trained tensors of a stage, in the order of payloads and states: its weights, or their adapters."""
    return tuple(_trained(model, stage_weights(model, stage)))


def _all_tensors(model: Model) -> Iterator[TensorSpec]:
    """Those of all stages; where these end, which takes a second to find for a model of the most layers, is not asked."""
    return _trained(model, itertools.chain.from_iterable(units(model)))


def _trained(model: Model, weights: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    lora = model.lora
    return iter(weights) if lora is None else (adapter for spec in weights for adapter in _adapters(lora, spec))


def _adapters(lora: Lora, spec: TensorSpec) -> Iterator[TensorSpec]:
    """A, (rank, columns), uniform as peft begins with it, and B, (rows, rank)."""
    module, _, name = spec.name.removesuffix(".weight").rpartition(".")
    if spec.name.endswith(".weight") and name in lora.targets:
        rows, columns = spec.shape
        yield TensorSpec(f"{module}.{name}.lora_A.weight", (lora.rank, columns), 1 / math.sqrt(3 * columns))
        yield TensorSpec(f"{module}.{name}.lora_B.weight", (rows, lora.rank), 0.0)


def parameter_count(model: Model) -> int:
    """Return the parameters of the whole model, trained or not; without adapters."""
    return sum(spec.elements for unit in units(model) for spec in unit)


def trained_count(model: Model) -> int:
    """Return the trained parameters: all, or those of the adapters."""
    return sum(spec.elements for spec in _all_tensors(model))


def state_bytes(model: Model, stage: int) -> int:
    """Return the bytes of a stage's state blob: Θ and momentum, float32."""
    return 2 * 4 * sum(spec.elements for spec in stage_tensors(model, stage))


def phase_bytes(model: Model, muon: bool, stage: int | None = None) -> int:
    """Return the bytes of a stage (None: all stages) in the middle of a phase, float32: each parameter; for AdamW a step
    count and two moments of each tensor, for Muon one moment."""
    specs = _all_tensors(model) if stage is None else stage_tensors(model, stage)
    return 4 * sum(2 * spec.elements if muon and spec.hidden else 3 * spec.elements + 1 for spec in specs)


def imported_bytes(model: Model, stage: int) -> tuple[int, ...]:
    """That a stage's imported blob may have, the most first: a state's; or frozen weights', float32 or, where all were of that,
    bfloat16."""
    if model.lora is None:
        return (state_bytes(model, stage),)
    elements = sum(spec.elements for spec in stage_weights(model, stage))
    return 4 * elements, 2 * elements
