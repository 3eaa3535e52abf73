"""Import of a Hugging Face folder: its config.json as the manifest's model, its weights as the state of round 1.

Keys of config.json that a manifest cannot express are rejected by name: a model with another computation is another
model. Tied embeddings become two tensors with the same values, because stages share none.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.node.outer.outer_step import flushed
from dilocox.node.training.model.model import FAMILIES, Family
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.model import WITHOUT_MEANING, Config
from dilocox.protocol.run.tensors import EMBEDDING, TensorSpec, stage_weights
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.process.parent_pipe import exit_with_parent
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.files import open_regular, read_json

__all__ = ["Weights", "read_model"]

CARRIED = Config.model_fields.keys() - {"model_type", "rope_parameters", "sliding_window"}
"""Keys of config.json that a manifest takes as they are."""
COUNTS = CARRIED - {"rms_norm_eps", "attention_bias", "mlp_bias"}
"""Those that are whole numbers above 0."""
ROPE = {"rope_parameters", "rope_scaling", "rope_theta"}
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "is_encoder_decoder": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "chunk_size_feed_forward": 0,
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Fixed properties of the layers: no other value is accepted."""
READ_ELSEWHERE = {"model_type", "tie_word_embeddings", "layer_types", "sliding_window"}
"""Keys of config.json that the functions below read one by one."""
BUFFERS = ".rotary_emb.inv_freq"
"""Old files contain the table of frequencies, which follows from the config."""
HEAD = "lm_head.weight"
KINDS = ("F32", "F16", "BF16")
"""Every value of these is one of float32."""
ZEROS = 1 << 20


def read_model(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return a manifest's model.config from config.json, and whether the embeddings are tied. Raises ConfigError with the
    name of a key that a manifest cannot express."""
    path = folder / "config.json"
    try:
        said = read_json(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; --from wants a folder as transformers saves it") from error
    try:
        family = FAMILIES[said["model_type"]]
    except (KeyError, TypeError) as error:
        known = ", ".join(FAMILIES)
        kind = said.get("model_type") if isinstance(said, dict) else None
        raise ConfigError(f"{path} is of a model of type {kind}; what can be trained here: {known}") from error
    try:
        _refuse_wrong_kinds(path, said)
        _refuse_foreign(path, said)
        _refuse_two_ropes(path, said)
        return _fields(path, said, family)
    except ConfigError:
        raise
    except Exception as error:  # transformers has an exception for each kind of error
        raise ConfigError(f"{path} is no configuration of a {said['model_type']}: {' '.join(str(error).split())}") from error


def _fields(path: Path, said: dict[str, Any], family: Family) -> tuple[dict[str, Any], bool]:
    """Raises ConfigError, or what transformers does."""
    config = family.config.from_dict(said)
    model: dict[str, Any] = {"model_type": said["model_type"]}
    model |= {key: getattr(config, key) for key in sorted(CARRIED) if getattr(config, key, None) is not None}
    if said["model_type"] == "mistral" and config.sliding_window is not None:
        model["sliding_window"] = config.sliding_window
    if model.get("head_dim") == model["hidden_size"] / model["num_attention_heads"]:
        del model["head_dim"]
    model = {key: value for key, value in model.items() if value is not False}
    rope = {key: value for key, value in config.rope_parameters.items() if value is not None and key != "type"}
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{path} turns only a part of each head (partial_rotary_factor), which is not supported here")
    model["rope_parameters"] = {**rope, "rope_theta": float(rope["rope_theta"])}
    for key, value in {**model, **rope}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{path} says {key} = {value}, and that is no number to compute with")
    return model, bool(config.tie_word_embeddings)


def _refuse_wrong_kinds(path: Path, said: dict[str, Any]) -> None:
    """Raises ConfigError for a value that transformers would take, or refuse without naming its key."""
    for key in sorted(COUNTS):
        if (value := said.get(key)) is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{path} says {key} = {json.dumps(value)[:80]}: it must be a whole number above 0")
    theta = said.get("rope_theta")
    if theta is not None and type(theta) not in (int, float):
        raise ConfigError(f"{path} says rope_theta = {json.dumps(theta)[:80]}: it must be a number")
    for key in ("rope_parameters", "rope_scaling"):
        if (rope := said.get(key)) is None:
            continue
        if not isinstance(rope, dict):
            raise ConfigError(f"{path} says {key} = {json.dumps(rope)[:80]}: it must be a table, or null")
        if rope.get("type", rope.get("rope_type")) != rope.get("rope_type", rope.get("type")):
            raise ConfigError(f"{path} says two types in {key}, {rope['type']} and {rope['rope_type']}: remove the wrong one")


def _refuse_foreign(path: Path, said: dict[str, Any]) -> None:
    """Raises ConfigError where a key means something that would be lost."""
    known = {*CARRIED, *ROPE, *FIXED, *WITHOUT_MEANING, *READ_ELSEWHERE}
    for key, value in said.items():
        if value is not None and key not in known:
            raise ConfigError(
                f"{path} says {key} = {json.dumps(value)[:80]}, and a run's manifest cannot: remove it if nothing follows"
            )
        if value is not None and key in FIXED and value != FIXED[key]:
            raise ConfigError(f"{path} says {key} = {value}; the layers here compute {FIXED[key]}")
    if others := set(said.get("layer_types") or ()) - {
        "full_attention",
        "sliding_attention" if said["model_type"] == "mistral" else "",
    }:
        raise ConfigError(f"{path} has layers of {', '.join(sorted(map(str, others)))}; only full attention is computed here")


def _refuse_two_ropes(path: Path, said: dict[str, Any]) -> None:
    """Raises ConfigError where `rope_parameters`, which transformers 5 reads, and the keys that older readers know differ: one
    folder would be two models."""
    newer = said.get("rope_parameters")
    if not isinstance(newer, dict):
        return
    theta, scaling = said.get("rope_theta"), said.get("rope_scaling")
    known = newer.get("rope_theta")
    if theta is not None and known is not None and theta != known:
        raise ConfigError(f"{path} says rope_theta = {theta}, and in rope_parameters {known}: remove the wrong one")
    if isinstance(scaling, dict) and (found := _scaling(scaling)) != (other := _scaling(newer)):
        key = next(key for key in sorted({*found, *other}) if found.get(key) != other.get(key))
        raise ConfigError(
            f"{path} says {key} = {found.get(key)} in rope_scaling, and {other.get(key)} in rope_parameters: remove the wrong one"
        )


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the stretch alone; older files call its kind `type`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {key: value for key, value in rope.items() if value is not None and key not in ("type", "rope_theta")} | {
        "rope_type": kind
    }


class Weights:
    """The tensors of a folder, one file or shards with an index."""

    def __init__(self, folder: Path, model: Model, tied: bool) -> None:
        """Open the weights. Raises ConfigError if the folder does not contain exactly the model's tensors, in their
        shapes."""
        self._model, self._tied = model, tied
        self._files = _files(folder)
        wanted = {spec.name: spec for stage in range(model.stages) for spec in stage_weights(model, stage)}
        if tied:
            del wanted[HEAD]
        held = {name for name in self._files if not name.endswith(BUFFERS)} - ({HEAD} if tied else set())
        if missing := sorted(wanted.keys() - held):
            raise ConfigError(f"{folder} lacks {_some(missing)}")
        if surplus := sorted(held - wanted.keys()):
            raise ConfigError(
                f"{folder} holds {_some(surplus)}, and a {model.config.model_type} as its config.json says has none"
            )
        for name, spec in wanted.items():
            shape, kind = _kind(self._files[name], name)
            if shape != spec.shape or kind not in KINDS:
                has, needs = ("×".join(map(str, each)) for each in (shape, spec.shape))
                raise ConfigError(f"{self._files[name]}: {name} is {kind} of {has}; wanted: {needs} of {', '.join(KINDS)}")
        if tied and HEAD in self._files and not self._is_embedding(wanted[EMBEDDING].shape):
            raise ConfigError(
                f"{folder}: config.json says tie_word_embeddings = true, and {HEAD} is not {EMBEDDING}. Set tie_word_embeddings to"
                f" false to train with this head, or remove {HEAD}"
            )

    def _is_embedding(self, shape: tuple[int, ...]) -> bool:
        """Return whether the head has the embedding's values. Raises ConfigError. Reads some rows at a time."""
        if _kind(self._files[HEAD], HEAD)[0] != shape or _kind(self._files[HEAD], HEAD)[1] not in KINDS:
            return False
        rows = max(1, ZEROS // shape[1])
        with _open(self._files[HEAD]) as head, _open(self._files[EMBEDDING]) as embedding:
            theirs, ours = head.get_slice(HEAD), embedding.get_slice(EMBEDDING)
            return all(
                torch.equal(theirs[start : start + rows].float(), ours[start : start + rows].float())
                for start in range(0, shape[0], rows)
            )

    def put_into(self, store: BlobStore, progress: Callable[[int], None] = lambda stage: None) -> bytes:
        """The state of round 1, or the weights that adapters are added to, as blobs; their root. `progress(stage)` is called after
        each. Raises ConfigError for a number that is not finite."""
        states = pb.StageStates()
        for stage in range(self._model.stages):
            states.digests.append(store.put(self._stage(stage)))
            progress(stage)
        return store.put([canonical(states)])

    def _stage(self, stage: int) -> Iterator[memoryview]:
        """The bytes of its state blob: parameters, then momentum, which is zero; or of its frozen weights, in bfloat16 where all
        are."""
        specs = stage_weights(self._model, stage)
        frozen = self._model.lora is not None
        narrow = frozen and all(_kind(self._files[name := self._name(spec)], name)[1] == "BF16" for spec in specs)
        for spec in specs:
            values = self.tensor(spec)
            yield (values.bfloat16().view(torch.int16) if narrow else values).numpy().data.cast("B")
        if frozen:
            return
        left, zeros = 4 * sum(spec.elements for spec in specs), memoryview(bytes(ZEROS))
        while left:
            yield zeros[:left]
            left -= min(left, ZEROS)

    def _name(self, spec: TensorSpec) -> str:
        """Return its name in the files."""
        return EMBEDDING if self._tied and spec.name == HEAD else spec.name

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Its values, exactly, but what is smaller than any normal number, which machines treat differently: 0. float32, flat."""
        name = self._name(spec)
        with _open(self._files[name]) as file:
            values: Tensor = file.get_tensor(name).float().flatten()
        if not bool(torch.isfinite(values).all()):
            raise ConfigError(f"{self._files[name]}: {name} holds numbers that are not finite")
        return flushed(values)


def _kind(path: Path, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and type of a tensor. Raises ConfigError."""
    with _open(path) as file:
        try:
            part = file.get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{path} holds no {name}, though the index says so: {error}") from error
        return tuple(part.get_shape()), part.get_dtype()


def _open(path: Path) -> Any:
    """Raises ConfigError."""
    try:
        open_regular(path).close()
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Return the files by tensor. Raises ConfigError."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return dict.fromkeys(_names(whole), whole)
    try:
        names = read_json(index)["weight_map"]
        if any(Path(name).name != name for name in names.values()):
            raise ValueError("it names files elsewhere")
        files = {tensor: folder / name for tensor, name in names.items()}
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder} holds neither {whole.name} nor a good {index.name}: {error}") from error
    beside = {tensor: path for path in dict.fromkeys(files.values()) for tensor in _names(path)}
    return {**beside, **files}  # transformers loads what the index does not name, too


def _names(path: Path) -> list[str]:
    """Return the tensors of a file. Raises ConfigError."""
    with _open(path) as file:
        return list(file.keys())


def main() -> None:
    """`python -m dilocox.node.training.hf.hf_import MANIFEST FOLDER STORE`: the folder's weights as a run imports them; prints how
    many stages are done after each, then their root, or why there is none: a line of JSON each."""
    exit_with_parent()
    manifest, folder, store = map(Path, sys.argv[1:])
    try:
        model = Manifest.from_canonical(manifest.read_bytes()).model
        _, tied = read_model(folder)
        weights = Weights(folder, model, tied)
        _tell(root=weights.put_into(BlobStore(store), lambda stage: _tell(stages=stage + 1)).hex())
    except ConfigError as error:
        _tell(refused=str(error))


def _tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


if __name__ == "__main__":
    main()
