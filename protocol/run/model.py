"""The model section of a manifest: a Hugging Face config, how it is cut into stages, and what of it is trained."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dilocox.protocol import limits
from dilocox.protocol.run.allowed_values import raise_all

__all__ = ["WITHOUT_MEANING", "Config", "Count", "Lora", "Model", "Positive", "Rope", "Section", "Target"]

Positive = Annotated[int, Field(gt=0, le=1 << 40)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Above = Annotated[float, Field(gt=0, le=1e9)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        """Convert lists to tuples, because TOML and JSON have none. All other types are strict: neither `count = true` nor
        `"5"` is a number."""
        return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class Rope(Section):
    """Rotary frequencies: what transformers calls `rope_parameters`."""

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    factor: Above | None = None
    """Scale factor, of every type but default."""
    original_max_position_embeddings: Positive | None = None
    """Context of the model before it was stretched: for llama3 and yarn, and for dynamic if it is given."""
    low_freq_factor: Above | None = None
    high_freq_factor: Above | None = None
    """Frequency bounds of llama3."""
    attention_factor: Above | None = None
    beta_fast: Above | None = None
    beta_slow: Above | None = None
    mscale: Above | None = None
    mscale_all_dim: Above | None = None
    truncate: bool | None = None
    """Parameters of yarn."""

    @model_validator(mode="after")
    def _consistent(self) -> "Rope":
        given = {name for name, value in self if value is not None} - {"rope_type", "rope_theta"}
        original = "original_max_position_embeddings"
        needed = {
            "default": set[str](),
            "linear": {"factor"},
            "dynamic": {"factor"},
            "llama3": {"factor", "low_freq_factor", "high_freq_factor", original},
            "yarn": {"factor", original},
        }[self.rope_type]
        allowed = needed | {"dynamic": {original}, "yarn": set(YARN)}.get(self.rope_type, set())
        if wrong := given - allowed or needed - given:
            raise ValueError(
                f"rope_type {self.rope_type} and {', '.join(sorted(wrong))}: one is missing, or not allowed for this type"
            )
        for lower, higher in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low, high = getattr(self, lower), getattr(self, higher)
            if low is not None and high is not None and low >= high:
                raise ValueError(f"{lower} {low:g} is not below {higher} {high:g}")
        return self


YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


WITHOUT_MEANING = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",  # the data say special tokens
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",  # of a window that is not used
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys of a config.json on which training does not depend."""


class Config(Section):
    """The keys of the model's Hugging Face config.json that training depends on. Names and meanings are transformers'."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "rope_theta": "set it in rope_parameters",
        "rope_scaling": "set it in rope_parameters",
        "hidden_act": "remove it: the layers compute silu",
        "tie_word_embeddings": "remove it: embeddings are not tied here",
        "attention_dropout": "remove it: the layers use no dropout",
        **dict.fromkeys(WITHOUT_MEANING, "remove it: training does not depend on it"),
    }
    """Advice about keys that a config.json may have and this section does not."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Annotated[int, Field(gt=0, le=limits.STAGES)]
    num_attention_heads: Positive
    num_key_value_heads: Positive
    """Default: num_attention_heads."""
    head_dim: Positive
    """Default: hidden_size / num_attention_heads."""
    max_position_embeddings: Positive
    """Longest text of the model in tokens, as an export states it. Default: model.sequence_length."""
    sliding_window: Positive | None = None
    """Window of mistral in tokens, as an export states it. Training sequences are shorter, so it is not computed."""
    rope_parameters: Rope = Rope()
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    attention_bias: bool = False
    """Bias on the four projections, of llama and qwen3; qwen2 always has it on three."""
    mlp_bias: bool = False
    """Bias of the MLP, of llama."""

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, document: Any) -> Any:
        """Write out what transformers would fill in; of a key that is wrong, anything: that key is the fault."""
        if not isinstance(document, dict):
            return document  # a section already, or an error that validation reports
        heads, hidden = _count(document, "num_attention_heads"), _count(document, "hidden_size")
        head_dim = hidden // heads if heads is not None and hidden is not None else 2
        filled = {"num_key_value_heads": heads or 1, "head_dim": head_dim, **document}
        if "head_dim" not in document and heads is not None and hidden is not None and hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: change one, or set head_dim"
            )
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd, but rotary embeddings need an even one"
        for key, value, families in (
            ("sliding_window", self.sliding_window, ("mistral",)),
            ("attention_bias", self.attention_bias, ("llama", "qwen3")),
            ("mlp_bias", self.mlp_bias, ("llama",)),
        ):
            if value and self.model_type not in families:
                yield f"{key} belongs to {' and '.join(families)}, not to {self.model_type}"


def _count(document: Mapping[str, Any], key: str) -> int | None:
    """Return a key's whole number above 0; None where it has none."""
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


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
    """The model, and how it is cut into stages."""

    config: Config
    sequence_length: Positive
    """Length of training sequences in tokens; the model's limit is config.max_position_embeddings."""
    stages: Annotated[int, Field(gt=0, le=limits.STAGES)]
    seed: Count = 0
    """Seed of the initial weights, unless `initial` names them."""
    seed_state: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """State root that the seed makes; the run begins with it and with no other. `dilocox init` computes it. Without it the first
    clusters that agree on a state begin the run, whoever they are."""
    initial: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """State root that round 1 starts from: the weights that `dilocox init --from` imported, split into these stages, momentum 0."""
    lora: Lora | None = None
    """Train adapters on imported weights, instead of these."""

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, document: Any) -> Any:
        """Write out what the config leaves out and sequence_length decides."""
        if not isinstance(document, dict) or not isinstance(config := document.get("config"), dict):
            return document  # sections already, or an error that validation reports
        length = _count(document, "sequence_length") or 1  # a wrong one is the fault
        return {**document, "config": {"max_position_embeddings": length, **config}}

    @model_validator(mode="after")
    def _consistent(self) -> "Model":
        raise_all(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        config, layers = self.config, self.config.num_hidden_layers
        if self.stages > layers + 2:
            yield f"{self.stages} stages, but {layers} layers, an embedding and a head make {layers + 2}"
        if self.lora is not None and self.initial is not None:
            yield "remove initial: with lora the imported weights are lora.base, and adapters begin without a change"
        if self.seed_state is not None and self.initial is not None:
            yield "initial and seed_state: use only one, a run begins with imported weights or with its seed"
        if self.lora is not None and self.stages > layers:
            yield f"{self.stages} stages, but {layers} layers: with lora each stage needs at least one adapted layer"
        if self.lora is not None and self.lora.rank > min(
            config.hidden_size, config.intermediate_size, config.head_dim * config.num_key_value_heads
        ):
            yield f"lora.rank {self.lora.rank} is above the rank of an adapted matrix"
        if self.sequence_length > config.max_position_embeddings:
            yield f"sequence_length {self.sequence_length} is above config.max_position_embeddings {config.max_position_embeddings}"
        if config.sliding_window is not None and config.sliding_window < self.sequence_length:
            yield (
                f"config.sliding_window {config.sliding_window} is shorter than sequence_length "
                f"{self.sequence_length}, but attention covers the whole sequence: use sequences of at most "
                f"{config.sliding_window} tokens"
            )

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
