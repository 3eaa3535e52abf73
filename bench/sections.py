"""Sections of a manifest, made from a few keys: for benches and tests."""

import json
from collections.abc import Mapping
from typing import Any

from dilocox.protocol.run.model import Config

__all__ = ["merge", "model_section", "toml_value"]

FOLLOWS = {"head_dim": {"hidden_size", "num_attention_heads"}, "max_position_embeddings": {"sequence_length"}}
"""Keys of a config that follow from other keys if a run file omits them."""


def model_section(changes: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return [model] with some keys changed; keys of a Hugging Face config go into [model.config]. A value of `base` that followed
    from one that is changed follows again."""
    base = base or {}
    theirs = {key: value for key, value in changes.items() if key in Config.model_fields} | changes.get("config", {})
    ours = {key: value for key, value in changes.items() if key not in Config.model_fields}
    config = {key: value for key, value in base.get("config", {}).items() if not FOLLOWS.get(key, frozenset()) & changes.keys()}
    return {**base, **ours, "config": {**config, **theirs}}


def merge(sections: dict[str, dict[str, Any]], changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change keys of a manifest's sections, in place."""
    for name, section in changes.items():
        base = sections.get(name, {})
        sections[name] = model_section(section, base) if name == "model" else {**base, **section}


def toml_value(value: Any) -> str:
    """Return a manifest's value in a run file's format; a table is one line, without keys that are None."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {toml_value(each)}" for key, each in value.items() if each is not None) + " }"
    return json.dumps(value)
