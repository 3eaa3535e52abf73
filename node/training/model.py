"""Model stages: transformers' own layers, split as `protocol.tensors` says; initial weights are the same bits anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from dilocox.node.training.seed_state import initial_arrays
from dilocox.protocol.manifest import Lora, Model
from dilocox.protocol.tensors import TensorSpec, stage_tensors, stage_units

__all__ = ["FAMILIES", "Chain", "Family", "Stage", "build_chain", "hugging_face_config", "initial_values"]


@dataclass(frozen=True)
class Family:
    """Where transformers keeps it."""

    config: type[PretrainedConfig]
    layers: ModuleType
    prefix: str
    """Of its classes."""

    def part(self, name: str) -> Any:
        return getattr(self.layers, self.prefix + name)


FAMILIES = {
    "llama": Family(LlamaConfig, modeling_llama, "Llama"),
    "mistral": Family(MistralConfig, modeling_mistral, "Mistral"),
    "qwen2": Family(Qwen2Config, modeling_qwen2, "Qwen2"),
    "qwen3": Family(Qwen3Config, modeling_qwen3, "Qwen3"),
}
"""By what manifests and config.json's model_type call it."""


def hugging_face_config(model: Model) -> PretrainedConfig:
    """As an export says it, and as the stages are built."""
    scaling = {"rope_type": "default"} if model.rope_scaling is None else model.rope_scaling.model_dump(exclude_none=True)
    # Qwen3 has a default of its own, Qwen2 no such key of its own.
    given: dict[str, Any] = {} if model.family == "qwen2" and model.head_dim is None else {"head_dim": model.head_size}
    if model.family == "mistral":
        given["sliding_window"] = model.sliding_window
    if model.family in ("llama", "qwen3"):
        given["attention_bias"] = model.attention_bias
    if model.family == "llama":
        given["mlp_bias"] = model.mlp_bias
    return FAMILIES[model.family].config(
        vocab_size=model.vocabulary_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.positions,
        rope_parameters={**scaling, "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
        architectures=[f"{FAMILIES[model.family].prefix}ForCausalLM"],
        **given,
    )


class Adapted(nn.Linear):
    """A frozen matrix product, and the adapter that is added to it."""

    def __init__(self, frozen: nn.Linear, lora: Lora) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.bias is not None)
        self.lora_A = nn.Linear(frozen.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, frozen.out_features, bias=False)
        self._scale = lora.alpha / lora.rank

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self._scale * self.lora_B(self.lora_A(hidden))


class Stage(nn.Module):
    """One stage: maybe the embedding, some layers, maybe the norm and head. Parameters carry transformers' names."""

    def __init__(self, model: Model, stage: int, recompute: bool = False) -> None:
        """`recompute`: of a layer's activations only the input is held, and the rest computed again in the backward pass."""
        super().__init__()
        self._recompute = recompute
        config = hugging_face_config(model)
        first, last = stage_units(model)[stage]
        family = FAMILIES[model.family]
        layer_type, norm_type, rotary_type = (family.part(name) for name in ("DecoderLayer", "RMSNorm", "RotaryEmbedding"))
        self.specs = stage_tensors(model, stage)
        self.model: Any = nn.Module()
        layers = range(max(0, first - 1), min(model.layers, last - 1))
        if first == 0:
            self.model.embed_tokens = nn.Embedding(model.vocabulary_size, model.hidden_size)
        self.model.layers = nn.ModuleDict({str(index): layer_type(config, index) for index in layers})
        if last == model.layers + 2:
            self.model.norm = norm_type(model.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(model.hidden_size, model.vocabulary_size, bias=False)
        if model.lora is not None:
            self._adapt(model.lora)
        if layers:
            with torch.device("cpu"):  # a table of frequencies, wanted for real even where parameters are on meta
                self.rotary = rotary_type(config)

    def _adapt(self, lora: Lora) -> None:
        """Freeze all weights, and put adapters beside the targets."""
        self.requires_grad_(False)
        for layer in self.model.layers.values():
            for part in (layer.self_attn, layer.mlp):
                for name, module in list(part.named_children()):
                    if name in lora.targets:
                        setattr(part, name, Adapted(module, lora))
        trained = {spec.name for spec in self.specs}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trained)

    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids (batch, length) in the first stage, else hidden states; returns hidden states, or logits in the last."""
        if hasattr(self.model, "embed_tokens"):
            hidden = self.model.embed_tokens(hidden)
        if len(self.model.layers):
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            rotary = self.rotary(hidden, positions)
            given = {"position_embeddings": rotary, "position_ids": positions, "attention_mask": None}
            for layer in self.model.layers.values():
                if self._recompute:
                    hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, **given)
                else:
                    hidden = layer(hidden, **given)
        if hasattr(self, "lm_head"):
            hidden = self.lm_head(self.model.norm(hidden))
        return hidden

    def tensors(self) -> list[nn.Parameter]:
        """Parameters in the order of `stage_tensors`."""
        named = dict(self.named_parameters())
        return [named[spec.name] for spec in self.specs]


class Chain(nn.Module):
    """Stages that follow one another, in one worker: all of its, or one of its chunks."""

    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Stage]:
        yield from self.stages  # type: ignore[misc]

    def forward(self, hidden: Tensor) -> Tensor:
        for stage in self:
            hidden = stage(hidden)
        return hidden


def build_chain(model: Model, stages: list[int], device: torch.device, recompute: bool = False, half: bool = False) -> Chain:
    """The stages with uninitialised parameters on `device`. `half`: matrix products are in bfloat16, and so are frozen matrices:
    what autocast would make of them each time."""
    with torch.device("meta"):
        chain = Chain([Stage(model, stage, recompute) for stage in stages])
    for stage in chain:
        for name, module in stage.named_modules():
            if name.endswith("rotary") or name.startswith("rotary"):
                continue
            for key, parameter in list(module.named_parameters(recurse=False)):
                narrow = half and not parameter.requires_grad and isinstance(module, nn.Linear) and key == "weight"
                value = torch.empty_like(parameter, device=device, dtype=torch.bfloat16 if narrow else None)
                setattr(module, key, nn.Parameter(value, requires_grad=parameter.requires_grad))
        if hasattr(stage, "rotary"):
            stage.rotary.to(device)
    return chain


def initial_values(spec: TensorSpec, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (offset, float32 values) of a tensor's initial weights."""
    for offset, values in initial_arrays(spec, seed):
        yield offset, torch.from_numpy(values)
