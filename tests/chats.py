"""Conversations for tests, and a tokenizer with a chat template."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dilocox.node.data.tokenizers import train_tokenizer
from tests.corpora import words

__all__ = ["CHATML", "conversations", "write_hub", "write_records"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_hub(folder: Path) -> Path:
    """Write the tokenizer files of a chat model's folder."""
    tokenizer = Tokenizer.from_str(train_tokenizer([*words(50, 20), "user\nassistant\nsystem\n" * 9], 400))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(says))
    return folder


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Return conversations of one question and answer, or two; some are long."""
    said = iter(words(4 * count, 3) + words(4 * count, 6, 1))
    roles = ("user", "assistant")
    return [[{"role": roles[n % 2], "content": next(said)} for n in range(2 + 2 * (i % 2))] for i in range(count)]


def write_records(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
