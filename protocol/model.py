"""The model section of a manifest: shapes, names as transformers' where they mean the same, and what of it is trained."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dilocox.protocol import limits
from dilocox.protocol.allowed import raise_all

__all__ = ["Count", "Lora", "Model", "Positive", "RopeScaling", "Section", "Target"]

Positive = Annotated[int, Field(gt=0, le=1 << 40)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Above = Annotated[float, Field(gt=0, le=1e9)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        """TOML and JSON have no tuples; all else is of its own kind: `count = true` is no number, and `"5"` is none."""
        return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class RopeScaling(Section):
    """How rotary frequencies are stretched; names and meaning as transformers' `rope_parameters`."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: Above
    original_max_position_embeddings: Positive | None = None
    """Of the model before it was stretched: llama3 and yarn, and dynamic where it says so."""
    low_freq_factor: Above | None = None
    high_freq_factor: Above | None = None
    """Of llama3, both."""
    attention_factor: Above | None = None
    beta_fast: Above | None = None
    beta_slow: Above | None = None
    mscale: Above | None = None
    mscale_all_dim: Above | None = None
    truncate: bool | None = None
    """Of yarn, these six."""

    @model_validator(mode="after")
    def _consistent(self) -> "RopeScaling":
        given = {name for name, value in self if value is not None} - {"rope_type", "factor"}
        llama3 = {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
        yarn = {"original_max_position_embeddings", *YARN}
        allowed = {"linear": set(), "dynamic": {"original_max_position_embeddings"}, "llama3": llama3, "yarn": yarn}
        needed = {"llama3": llama3, "yarn": {"original_max_position_embeddings"}}.get(self.rope_type, set())
        if wrong := given - allowed[self.rope_type] or needed - given:
            raise ValueError(
                f"rope_type {self.rope_type} and {', '.join(sorted(wrong))}: one is missing, or does not belong there"
            )
        return self


YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Adapters of low rank (arXiv 2106.09685) on frozen weights: a target's product W x becomes W x + alpha / rank · B (A x). What
    the run trains, exchanges and agrees on (Θ) are A, from the seed, and B, from 0."""

    rank: Annotated[int, Field(gt=0, le=limits.RANK)]
    alpha: Above
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = get_args(Target)
    """Matrices of every layer."""
    base: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Root over the frozen weights, which `dilocox init --from` imported, split into these stages."""

    @model_validator(mode="after")
    def _consistent(self) -> "Lora":
        if len(set(self.targets)) < len(self.targets):
            raise ValueError("targets names a matrix twice")
        return self


class Model(Section):
    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocabulary_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    layers: Annotated[int, Field(gt=0, le=limits.STAGES)]
    heads: Positive
    kv_heads: Positive
    head_dim: Positive | None = None
    """Default: hidden_size / heads."""
    sequence_length: Positive
    """Of training; the model's own is max_positions."""
    max_positions: Positive | None = None
    """How long a text the model is made for: what an export says. Default: sequence_length."""
    sliding_window: Positive | None = None
    """Of mistral: how far a token looks back. Training never reaches it, so it is not computed; an export says it."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    attention_bias: bool = False
    """On the four projections, of llama and qwen3; qwen2 always has one on three."""
    mlp_bias: bool = False
    """Of llama."""
    stages: Annotated[int, Field(gt=0, le=limits.STAGES)]
    seed: Count = 0
    """Of the initial weights, where no `initial` names them."""
    seed_state: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """State root that the seed makes; the run begins with it and with no other. `dilocox init` computes it. Without it the first
    clusters that agree on a state begin the run, whoever they are."""
    initial: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """State root that round 1 starts from: the weights that `dilocox init --from` imported, split into these stages, momentum 0."""
    lora: Lora | None = None
    """Train adapters on imported weights, instead of these."""

    @model_validator(mode="after")
    def _consistent(self) -> "Model":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.stages > self.layers + 2:
            yield f"{self.stages} stages, but {self.layers} layers, an embedding and a head make {self.layers + 2}"
        if self.lora is not None and self.initial is not None:
            yield "initial and lora: the imported weights are lora.base, and adapters begin by changing nothing"
        if self.seed_state is not None and self.initial is not None:
            yield "initial and seed_state: a run begins with imported weights or with its seed, not with both"
        if self.lora is not None and self.stages > self.layers:
            yield f"{self.stages} stages, but {self.layers} layers: with lora each stage has adapters of one at least"
        if self.lora is not None and self.lora.rank > min(
            self.hidden_size, self.intermediate_size, self.head_size * self.kv_heads
        ):
            yield f"lora.rank {self.lora.rank} is above that of the matrices it is added to"
        if (self.head_dim is None and self.hidden_size % self.heads) or self.heads % self.kv_heads:
            yield "hidden_size must be a multiple of heads, unless head_dim is given, and heads of kv_heads"
        if self.head_size % 2:
            yield f"head_dim {self.head_size} is odd: rotary embeddings turn pairs"
        if self.sequence_length > self.positions:
            yield f"sequence_length {self.sequence_length} is above max_positions {self.positions}"
        if self.sliding_window is not None and self.sliding_window < self.sequence_length:
            yield (
                f"sliding_window {self.sliding_window} is shorter than sequence_length {self.sequence_length}, and attention looks"
                f" at all of a sequence here: train on sequences of at most {self.sliding_window} tokens"
            )
        for key, value, families in (
            ("sliding_window", self.sliding_window, ("mistral",)),
            ("attention_bias", self.attention_bias, ("llama", "qwen3")),
            ("mlp_bias", self.mlp_bias, ("llama",)),
        ):
            if value and self.family not in families:
                yield f"{key} is of {' and '.join(families)}, not of {self.family}"

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.heads

    @property
    def positions(self) -> int:
        return self.max_positions or self.sequence_length

    @property
    def root(self) -> bytes:
        """Return the state root that round 1 starts from; empty where the manifest does not name it."""
        return bytes.fromhex(self.initial or self.seed_state or "")

    @property
    def imported_state(self) -> bytes:
        """Return the root of the imported weights that round 1 starts from; empty where it starts from the seed."""
        return bytes.fromhex(self.initial or "")

    @property
    def imported(self) -> bytes:
        """Root over the imported weights: the state of round 1, or what adapters are added to; empty: none."""
        return bytes.fromhex(self.lora.base) if self.lora is not None else self.imported_state
