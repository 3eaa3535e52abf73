"""The committed model as a Hugging Face folder: what transformers needs to load it, its tokenizer, and where it comes from.

Adapters are added to the weights that they were trained on, or written by themselves, as peft loads them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig

from dilocox.node.outer.frozen import frozen_views
from dilocox.node.outer.state import StageState
from dilocox.node.outer.tensor_file import save_tensors
from dilocox.protocol.run.corpus import Chat
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_weights
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.files import write_atomically

__all__ = ["Vocabulary", "export_adapter", "export_model", "older_keys"]

PEFT = "base_model.model."
"""Before the name of each tensor, in files that peft loads."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer of an export."""

    file: bytes
    """A `tokenizers` JSON."""
    end_token: int
    """Ends a document."""
    chat: Chat | None = None
    """Chat settings of a model that learned from conversations."""


def export_model(
    manifest: Manifest,
    digests: list[bytes],
    store: BlobStore,
    folder: Path,
    vocabulary: Vocabulary,
    card: str,
    progress: Callable[[int], None],
) -> None:
    """Write `folder`: config.json, one safetensors shard per stage, generation and tokenizer files, README.md. `digests` are the
    state blobs, by stage; `store` holds them, and the weights that adapters are added to; `card` the README. `progress(stage)` is
    called after each."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    for stage, tensors in _stages(manifest, digests, store):
        tensors = dict(_merged(manifest, stage, tensors, store))
        shard = f"model-{stage + 1:05d}-of-{len(digests):05d}.safetensors"
        _save(tensors, folder / shard)
        names.update(dict.fromkeys(tensors, shard))
        progress(stage)
    index = {"metadata": {"total_size": 4 * parameter_count(manifest.model)}, "weight_map": names}
    write_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
    _write_config(manifest, folder, vocabulary.end_token)
    _write_words(manifest, folder, vocabulary, card)


def export_adapter(
    manifest: Manifest, digests: list[bytes], store: BlobStore, folder: Path, vocabulary: Vocabulary, card: str
) -> None:
    """Write `folder`: the adapters of a run that trains such, adapter_config.json, tokenizer files, README.md."""
    lora = manifest.model.lora
    assert lora is not None, "the run trains adapters"
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {f"{PEFT}{name}": tensor for _, part in _stages(manifest, digests, store) for name, tensor in part.items()}
    _save(adapters, folder / "adapter_model.safetensors")
    says = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    write_atomically(folder / "adapter_config.json", json.dumps(says, indent=2).encode())
    _write_words(manifest, folder, vocabulary, card)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that others may read: safetensors writes for its owner only."""
    save_tensors(tensors, path, {"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)


def _stages(manifest: Manifest, digests: list[bytes], store: BlobStore) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the trained tensors, stage by stage."""
    for stage, digest in enumerate(digests):
        state = StageState(manifest, stage)
        state.load_state(store.view(digest))
        yield stage, {spec.name: tensor.contiguous() for spec, tensor in state.views(state.parameters)}


def _merged(manifest: Manifest, stage: int, trained: dict[str, Tensor], store: BlobStore) -> Iterator[tuple[str, Tensor]]:
    """A stage's weights as they are used: those that were trained, or W + alpha / rank · B A."""
    model = manifest.model
    if model.lora is None:
        yield from trained.items()
        return
    frozen = store.stage_digests(model.imported)[stage]
    for spec, values in frozen_views(store.view(frozen), stage_weights(model, stage)):
        module, weight = spec.name.removesuffix(".weight"), values.float()
        if (down := trained.get(f"{module}.lora_A.weight")) is not None:
            weight += model.lora.alpha / model.lora.rank * (trained[f"{module}.lora_B.weight"] @ down)
        yield spec.name, weight


def _write_words(manifest: Manifest, folder: Path, vocabulary: Vocabulary, card: str) -> None:
    write_atomically(folder / "tokenizer.json", vocabulary.file)
    says = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": Tokenizer.from_buffer(vocabulary.file).id_to_token(vocabulary.end_token),
        "model_max_length": manifest.model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    if (chat := vocabulary.chat) is not None:
        says = {**chat.special_tokens, **says, "chat_template": chat.template}
    write_atomically(folder / "tokenizer_config.json", json.dumps(says, indent=2).encode())
    special = {name: text for name, text in says.items() if name.endswith("_token")}
    write_atomically(folder / "special_tokens_map.json", json.dumps(special, indent=2).encode())
    write_atomically(folder / "README.md", card.encode())


def _write_config(manifest: Manifest, folder: Path, end_token: int) -> None:
    from dilocox.node.training.model.model import hugging_face_config

    config = hugging_face_config(manifest.model)
    config.dtype = torch.float32
    config.eos_token_id = end_token
    config.save_pretrained(folder)
    path = folder / "config.json"
    says = json.loads(path.read_bytes())
    write_atomically(path, (json.dumps({**says, **older_keys(says)}, indent=2, sort_keys=True) + "\n").encode())
    GenerationConfig(eos_token_id=end_token).save_pretrained(folder)


def older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys for readers older than transformers 5: they silently ignore its `rope_parameters` and its `dtype`.

    Their `rope_scaling` names its kind `rope_type`, and before transformers 4.43 `type`.
    """
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    scaling = None if rope["rope_type"] == "default" else {**rope, "type": rope["rope_type"]}
    return {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": config["dtype"]}
