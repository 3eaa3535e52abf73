"""The committed model as a Hugging Face folder: what transformers needs to load it, its tokenizer, and where it comes from."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig

from dilocox.node.outer.state import StageState
from dilocox.protocol.corpus import Chat
from dilocox.protocol.manifest import Manifest
from dilocox.transport.blobs import BlobStore
from dilocox.transport.files import write_atomically

__all__ = ["export_model"]


def export_model(
    manifest: Manifest,
    digests: list[bytes],
    store: BlobStore,
    folder: Path,
    tokenizer: bytes,
    end_token: int,
    chat: Chat | None,
    card: str,
    progress: Callable[[int], None],
) -> None:
    """Write `folder`: config.json, one safetensors shard per stage, generation and tokenizer files, README.md. `digests` are the
    state blobs, by stage; `tokenizer` is a `tokenizers` JSON, whose `end_token` ends a document; `chat`: how
    conversations are written, where it learnt from such; `card` the README. `progress(stage)` is called after each."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(manifest, digests, store, folder, progress)
    _write_config(manifest, folder, end_token)
    write_atomically(folder / "tokenizer.json", tokenizer)
    says = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": Tokenizer.from_buffer(tokenizer).id_to_token(end_token),
        "model_max_length": manifest.model.positions,
        "clean_up_tokenization_spaces": False,
    }
    if chat is not None:
        says = {**chat.special_tokens, **says, "chat_template": chat.template}
    write_atomically(folder / "tokenizer_config.json", json.dumps(says, indent=2).encode())
    write_atomically(folder / "README.md", card.encode())


def _write_weights(
    manifest: Manifest, digests: list[bytes], store: BlobStore, folder: Path, progress: Callable[[int], None]
) -> None:
    names: dict[str, str] = {}
    size = 0
    for stage, digest in enumerate(digests):
        state = StageState(manifest, stage)
        state.load_state(store.view(digest))
        shard = f"model-{stage + 1:05d}-of-{len(digests):05d}.safetensors"
        tensors = {spec.name: tensor.contiguous() for spec, tensor in state.views(state.parameters)}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        names.update(dict.fromkeys(tensors, shard))
        size += 4 * state.size
        progress(stage)
    index = {"metadata": {"total_size": size}, "weight_map": names}
    write_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())


def _write_config(manifest: Manifest, folder: Path, end_token: int) -> None:
    from dilocox.node.training.model import hugging_face_config

    config = hugging_face_config(manifest.model)
    config.dtype = torch.float32
    config.eos_token_id = end_token
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=end_token).save_pretrained(folder)
