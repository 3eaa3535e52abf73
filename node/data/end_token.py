"""The token that ends a document, as a model's folder names it: in the first of its files that names one of the tokenizer's."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dilocox.transport.store.files import read_json

__all__ = ["end_token_of", "read_object", "token_text"]

TEXTS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files with `eos_token`, a text."""
NUMBERS = ("generation_config.json", "config.json")
"""Files with `eos_token_id`, a number or several."""


def end_token_of(tokenizer: Path) -> list[str | int]:
    """Return the end tokens, texts or ids, that lie beside a `tokenizer.json`, or in the folder. Raises ConfigError."""
    if not tokenizer.is_dir() and tokenizer.name != "tokenizer.json":
        return []
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    return [*_texts(folder), *_numbers(folder)]


def _texts(folder: Path) -> Iterator[str]:
    for name in TEXTS:
        if text := token_text(read_object(folder / name).get("eos_token")):
            yield text


def _numbers(folder: Path) -> Iterator[int]:
    for name in NUMBERS:
        said = read_object(folder / name).get("eos_token_id")
        yield from (each for each in (said if isinstance(said, list) else [said]) if type(each) is int)


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the object of a JSON file; an empty one where there is none. Raises ConfigError."""
    read = read_json(path) if path.exists() else {}
    return read if isinstance(read, dict) else {}


def token_text(token: Any) -> str | None:
    """Return the text of a special token, which is a text or an object with more."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
