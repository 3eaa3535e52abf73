"""The committed model as a Hugging Face folder: config.json and one safetensors shard per stage."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from dilocox.node.outer.state import StageState
from dilocox.protocol.manifest import Manifest
from dilocox.transport.blobs import BlobStore
from dilocox.transport.files import write_atomically

__all__ = ["export_model"]


def export_model(
    manifest: Manifest, digests: list[bytes], store: BlobStore, folder: Path, progress: Callable[[int], None]
) -> None:
    """Write `folder`; `digests` are the state blobs, by stage. `progress(stage)` is called after each."""
    from dilocox.node.training.model import hugging_face_config

    folder.mkdir(parents=True, exist_ok=True)
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
    config = hugging_face_config(manifest.model)
    config.architectures = [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[manifest.model.family]]
    config.save_pretrained(folder)
