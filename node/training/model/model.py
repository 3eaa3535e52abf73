"""Model stages: transformers' layers, split as `protocol.tensors` defines; initial weights have the same bits on every
machine."""

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

from dilocox.node.training.model.seed_state import initial_arrays
from dilocox.protocol.run.manifest import Lora, Model
from dilocox.protocol.run.tensors import TensorSpec, stage_tensors, stage_units

__all__ = ["FAMILIES", "Chain", "Family", "Stage", "build_chain", "hugging_face_config", "initial_values"]


@dataclass(frozen=True)
class Family:
    """Classes of a model family in transformers."""

    config: type[PretrainedConfig]
    layers: ModuleType
    prefix: str
    """Prefix of its classes."""

    def part(self, name: str) -> Any:
        return getattr(self.layers, self.prefix + name)


FAMILIES = {
    "llama": Family(LlamaConfig, modeling_llama, "Llama"),
    "mistral": Family(MistralConfig, modeling_mistral, "Mistral"),
    "qwen2": Family(Qwen2Config, modeling_qwen2, "Qwen2"),
    "qwen3": Family(Qwen3Config, modeling_qwen3, "Qwen3"),
}
"""Families by their name in manifests, the model_type of config.json."""


def hugging_face_config(model: Model) -> PretrainedConfig:
    """Return the config that an export contains, and of which the stages are built."""
    config = model.config
    given = config.model_dump(exclude={"model_type"}, exclude_none=True)
    if config.model_type == "qwen2" and config.head_dim * config.num_attention_heads == config.hidden_size:
        del given["head_dim"]  # Qwen2Config has no such key
    for key, families in (("attention_bias", ("llama", "qwen3")), ("mlp_bias", ("llama",))):
        if config.model_type not in families:
            del given[key]
    if config.model_type == "mistral":
        given["sliding_window"] = config.sliding_window  # MistralConfig has another default
    family = FAMILIES[config.model_type]
    return family.config(
        **given,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
        architectures=[f"{family.prefix}ForCausalLM"],
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
        family, depth = FAMILIES[model.config.model_type], model.config.num_hidden_layers
        layer_type, norm_type, rotary_type = (family.part(name) for name in ("DecoderLayer", "RMSNorm", "RotaryEmbedding"))
        self.specs = stage_tensors(model, stage)
        self.model: Any = nn.Module()
        layers = range(max(0, first - 1), min(depth, last - 1))
        if first == 0:
            self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleDict({str(index): layer_type(config, index) for index in layers})
        if last == depth + 2:
            self.model.norm = norm_type(config.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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
