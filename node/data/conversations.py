"""Conversations into tokens, by the tokenizer's own chat template, and which of the tokens are trained on: the answers.

Where the template marks them (`{% generation %}`), those; where it does not, an answer is what the template writes for it after the
prompt that it writes for what stands before. A text that spells a special token would be read as one: its conversation is left out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dilocox.node.data.rendering import renderer
from dilocox.node.data.shards import Encoded
from dilocox.node.data.sources import sound
from dilocox.node.data.tokens import FileEncoder, told_of_panics
from dilocox.protocol import limits
from dilocox.protocol.corpus import Chat
from dilocox.protocol.errors import ConfigError
from dilocox.transport.files import read_json, read_named

__all__ = ["FATES", "FIELDS", "ChatEncoder", "fitted", "messages_of", "open_chat_encoder"]

Messages = Sequence[Mapping[str, Any]]
FIELDS = ("messages", "prompt", "completion")
ASSISTANT = "assistant"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
FATES = {
    "shortened": "end after the last answer that fits",
    "too_long": "left out, whose first answer does not fit",
    "unanswered": "left out, in which nobody answers",
    "spelling": "left out, which spell a special token",
    "unmarked": "answers that are only read, for the template writes them otherwise once more follows",
}
"""What `protocol.corpus.Chat` counts, as it is told."""


class ChatEncoder:
    """A tokenizer with a chat template; it counts what became of conversations."""

    def __init__(self, encoder: FileEncoder, template: str, special_tokens: Mapping[str, str], sequence_length: int) -> None:
        """`special_tokens`: what the template calls so; those that the tokenizer does not know mean nothing."""
        from tokenizers import Tokenizer

        assert encoder.file is not None, "it is one of a file"
        self.encoder, self._template, self._sequence_length = encoder, template, sequence_length
        self._tokenizer = Tokenizer.from_buffer(encoder.file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = {
            name: text for name, text in special_tokens.items() if self._tokenizer.token_to_id(text) is not None
        }
        self._counts: Counter[str] = Counter()
        self._marks = GENERATION.search(template) is not None
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        added |= {*self._special_tokens.values(), self._tokenizer.id_to_token(encoder.end_token) or ""} - {""}
        self._spelled = re.compile("|".join(map(re.escape, sorted(added))))

    def layout(self, trained: int = 0) -> Chat:
        """`trained`: tokens of the training shards that are trained on."""
        return Chat(
            sequence_length=self._sequence_length,
            template=self._template,
            special_tokens=self._special_tokens,
            trained=trained,
            **{name: self._counts[name] for name in FATES},
        )

    def says(self) -> str:
        """What became of those that are not trained on as they are."""
        return ", ".join(f"{self._counts[name]:,} {says}" for name, says in FATES.items())

    def encode(self, messages: Messages) -> Encoded | None:
        """Its tokens with the mask of its answers; None where it is left out. Raises ConfigError where the template refuses it."""
        if any(map(self._spelled.search, _texts(messages))):
            self._counts["spelling"] += 1
            return None
        text, spans = renderer().render(self._template, messages, self._special_tokens, marked=self._marks)
        with told_of_panics("of the conversations"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if not self._marks:
            width = self._sequence_length + 1
            spans = self._found(messages, text, encoding.offsets[width][0] if len(encoding.ids) > width else len(text))
        if not spans:
            self._counts["unanswered"] += 1
            return None
        whole = self._masked(encoding, spans, len(text))
        fits = fitted(whole, self._sequence_length + 1)
        if fits is None:
            self._counts["too_long"] += 1
        elif len(fits.tokens) < len(whole.tokens):
            self._counts["shortened"] += 1
        return fits

    def _masked(self, encoding: Any, spans: Sequence[tuple[int, int]], length: int) -> Encoded:
        """`length`: of the text."""
        tokens, (starts, ends) = np.array(encoding.ids, np.uint32), np.array(encoding.offsets).T
        mask = np.zeros(len(tokens), dtype=bool)
        for start, end in spans:
            mask |= (ends > start) & (starts < end)  # with a token that begins before it, and ends in it
        last, end_token = spans[-1], self.encoder.end_token
        if end_token not in tokens[ends > last[0]]:  # of a template that writes none: who answers has to learn when to end
            tokens, mask = np.append(tokens, np.uint32(end_token)), np.append(mask, last[1] == length)
        return Encoded(tokens, mask)

    def _found(self, messages: Messages, text: str, end: int) -> list[tuple[int, int]]:
        """Where the answers stand in the text; behind `end`, where nothing fits any more, none is looked for."""
        spans = []
        for index, said in enumerate(messages):
            if said["role"] != ASSISTANT:
                continue
            before = renderer().render(self._template, messages[:index], self._special_tokens, prompt=True)[0] if index else ""
            after = renderer().render(self._template, messages[: index + 1], self._special_tokens)[0]
            if text.startswith(after) and after.startswith(before) and len(after) > len(before):
                spans.append((len(before), len(after)))
            else:
                self._counts["unmarked"] += 1
            if len(before) >= end:
                break
        return spans


def fitted(document: Encoded, width: int) -> Encoded | None:
    """What fits into a row: all of it, or up to the end of the last answer that fits; None where none does."""
    tokens, mask = document.tokens, document.mask
    assert mask is not None, "of a conversation"
    if len(tokens) > width:
        ends = np.flatnonzero(mask[:width] & ~mask[1 : width + 1])
        end = int(ends[-1]) + 1 if len(ends) else 0
        tokens, mask = tokens[:end], mask[:end]
    return Encoded(tokens, mask) if mask[1:].any() else None


def open_chat_encoder(tokenizer: str, template: Path | None, end_token: str | None, sequence_length: int) -> ChatEncoder:
    """`tokenizer`: a Hugging Face folder, or a tokenizers JSON file; `template`: a file, instead of the folder's. Raises
    ConfigError."""
    path = Path(tokenizer)
    config = _config(path / "tokenizer_config.json") if path.is_dir() else {}
    special = {name: text for name in NAMES if (text := _text(config.get(name)))}
    encoder = FileEncoder(path / "tokenizer.json" if path.is_dir() else path, end_token or special.get("eos_token"))
    said = _template(path, config, template)
    if not said:
        raise ConfigError(f"{tokenizer} has no chat template: name a file with one, in Jinja, with --chat-template")
    if len(said) > limits.TEMPLATE_CHARACTERS:
        raise ConfigError(f"the chat template has {len(said):,} characters; at most {limits.TEMPLATE_CHARACTERS:,} are read")
    chat = ChatEncoder(encoder, said, special, sequence_length)
    try:
        chat.layout()
    except ValidationError as error:
        raise ConfigError(f"no corpus can say what {tokenizer} says of conversations: {error.errors()[0]['msg']}") from error
    return chat


def _template(path: Path, config: Mapping[str, Any], named: Path | None) -> str | None:
    try:
        for file in (named, path / "chat_template.jinja" if path.is_dir() else None):
            if file is not None and (file == named or file.exists()):
                return read_named(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {named or path} cannot be read: {error}") from error
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        said = next((item.get("template") for item in said if isinstance(item, dict) and item.get("name") == "default"), None)
    return said if isinstance(said, str) and said else None


def _config(path: Path) -> dict[str, Any]:
    read = read_json(path) if path.exists() else {}
    return read if isinstance(read, dict) else {}


def _text(token: Any) -> str | None:
    """Of a special token, which is a string or says more."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def messages_of(record: Any) -> Messages:
    """Of `messages`, or `prompt` and `completion`, each a text or messages. Raises ConfigError."""
    said: Any = None
    if isinstance(record, dict) and record.get("messages") is not None:
        said = record["messages"]
    elif isinstance(record, dict) and record.get("prompt") is not None and record.get("completion") is not None:
        said = [*_turns(record["prompt"], "user"), *_turns(record["completion"], ASSISTANT)]
    if not isinstance(said, list) or not said:
        known = ", ".join(map(str, record)) if isinstance(record, dict) else "no names"
        raise ConfigError(
            f"it holds neither messages, a list of {{role, content}}, nor prompt and completion (there are: {known})"
        )
    return [_message(each) for each in said]


def _turns(said: Any, role: str) -> list[Any]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _message(said: Any) -> dict[str, Any]:
    if not isinstance(said, dict) or not isinstance(said.get("role"), str) or not isinstance(said.get("content"), str):
        raise ConfigError("a message is no {role, content} of two texts")
    return {key: _told(value) for key, value in said.items() if value is not None}


def _texts(said: Any) -> Iterator[str]:
    """Whatever a template may write of it."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for key, value in said.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(said, Sequence):
        for each in said:
            yield from _texts(each)


def _told(said: Any) -> Any:
    """The same, of what a tokenizer and a digest can be made of: half a surrogate pair is no character, a date is a text."""
    match said:
        case str():
            return sound(said)
        case dict():
            return {_told(str(key)): _told(value) for key, value in said.items()}
        case list() | tuple():
            return [_told(value) for value in said]
        case bool() | int() | float() | None:
            return said
        case _:
            return _told(str(said))
