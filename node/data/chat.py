"""Conversations as tokens, by the tokenizer's chat template, and the mask of trained tokens: the answers.

If the template marks answers (`{% generation %}`), these count. Otherwise an answer is what the template adds to the
prompt for the messages before it. A text that contains a special token would be misread: its conversation is left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from dilocox.node.data.chat_messages import (
    ASSISTANT,
    CALLS,
    Messages,
    messages_of,
    texts_in,
    tools_of,
    with_parsed_calls,
)
from dilocox.node.data.chat_template_process import ExhaustedError, renderer
from dilocox.node.data.end_token import end_token_of, read_object, token_text
from dilocox.node.data.shards import Encoded
from dilocox.node.data.tokenizers import FileEncoder, told_of_panics
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.run.corpus import TEMPLATE_DATE, Chat
from dilocox.transport.store.files import leads_out, read_named

__all__ = ["FATES", "ChatEncoder", "fitted", "open_chat_encoder"]

Rendering = Callable[..., tuple[str, list[tuple[int, int]]]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
AS_JSON = re.compile(r"(arguments|function|tool_call)['\"\]]*\s*\|\s*tojson")
"""Part of a template that writes the arguments of a call as JSON."""
OPEN_TAG = re.compile(r"<[^<>]*$")
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
HEAVY = 3
"""Conversations in a row, from the first, that exhaust what a template may have, after which no more are tried."""
FATES = {
    "shortened": "are cut after the last answer that fits",
    "too_long": "left out: the first answer does not fit",
    "unanswered": "left out: no message is an answer",
    "spelling": "left out: a text contains a special token",
    "unreadable": "left out: not messages of text",
    "refused": "left out: the template rejects them",
    "not_found": "left out: the answers do not follow the template's prompt",
    "unmarked": "answers not trained on: the template writes them differently when more messages follow",
}
"""Labels of the counts in `protocol.corpus.Chat`."""
ADVICE = {
    "too_long": "Use a larger --sequence-length",
    "unanswered": f"Pass conversations in which a message has the role {ASSISTANT}",
    "spelling": "Remove special tokens from the texts",
    "unreadable": "Convert them",
    "refused": "Pass a template that writes them with --chat-template",
    "not_found": "Pass a template that marks its answers ({% generation %}) with --chat-template",
}
"""Advice by the commonest reason for which conversations were left out."""


class ChatEncoder:
    """A tokenizer with a chat template; it counts what became of conversations."""

    def __init__(self, encoder: FileEncoder, template: str, special_tokens: Mapping[str, str], sequence_length: int) -> None:
        """`special_tokens`: what the template calls so; those that the tokenizer does not know mean nothing."""
        from tokenizers import Tokenizer

        assert encoder.file is not None, "the tokenizer comes from a file"
        self.encoder, self._template, self._sequence_length = encoder, template, sequence_length
        self._tokenizer = Tokenizer.from_buffer(encoder.file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = {
            name: text for name, text in special_tokens.items() if self._tokenizer.token_to_id(text) is not None
        }
        self._counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        """Why the first conversation had its fate, where that follows from more than its count."""
        self._exhausted, self._rendered = 0, False
        self._marks = GENERATION.search(template) is not None
        self._as_json = AS_JSON.search(template) is not None
        self._calls = {key for key in CALLS if key in template}
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        added |= {*self._special_tokens.values(), self._tokenizer.id_to_token(encoder.end_token) or ""} - {""}
        self._spelled = re.compile("|".join(map(re.escape, sorted(added))))

    def layout(self, trained: int = 0) -> Chat:
        """`trained`: tokens of the training shards that are trained on."""
        return Chat(
            sequence_length=self._sequence_length,
            template=self._template,
            date=TEMPLATE_DATE,
            special_tokens=self._special_tokens,
            trained=trained,
            **{name: self._counts[name] for name in FATES},
        )

    def says(self) -> str:
        """Return what became of those that are not trained on as they are, and the first reason of each kind."""
        whys = {name: f" (the first: {why})" for name, why in self.reasons.items()}
        return ", ".join(
            f"{count:,} {says}{whys.get(name, '')}" for name, says in FATES.items() if (count := self._counts[name])
        )

    def advice(self) -> str | None:
        """Return what to do about most of those that were left out; None where none was."""
        name = max(ADVICE, key=lambda each: self._counts[each])
        return ADVICE[name] if self._counts[name] else None

    def read(self, where: str, record: Any) -> tuple[Messages, Encoded] | None:
        """Return a record's messages, and what `encode` makes of them; None where it is left out, and counted. `where`: for the
        reason. Raises ConfigError where the template exhausts what it may have from the first conversation on."""
        try:
            messages, tools = messages_of(record), tools_of(record)
        except (ConfigError, RecursionError) as error:  # JSON may nest too deep
            self._leave_out("unreadable", f"{where}: {error}")
            return None
        encoded = self.encode(messages, where, tools)
        return None if encoded is None else (messages, encoded)

    def encode(self, messages: Messages, where: str = "a conversation", tools: Sequence[Any] = ()) -> Encoded | None:
        """Return its tokens with the mask of its answers; None where it is left out, and counted. Raises ConfigError where the
        template exhausts what it may have from the first conversation on."""
        if any(map(self._spelled.search, texts_in([messages, tools]))):
            self._leave_out("spelling")
            return None
        try:
            return self._encoded(messages, tools)
        except ExhaustedError as error:
            self._exhausted += 1
            if self._exhausted >= HEAVY and not self._rendered:
                raise
            self._leave_out("refused", f"{where}: {error}")
            return None
        except (ConfigError, RecursionError) as error:
            self._leave_out("refused", f"{where}: {error}")
            return None

    def _leave_out(self, fate: str, why: str | None = None) -> None:
        self._counts[fate] += 1
        if why is not None:
            self.reasons.setdefault(fate, why)

    def _encoded(self, messages: Messages, tools: Sequence[Any]) -> Encoded | None:
        """Raises ConfigError where the template or the tokenizer refuses it."""
        if lost := {key for said in messages for key in CALLS if said.get(key)} - self._calls:
            raise ConfigError(f"the chat template does not write {', '.join(sorted(lost))}")
        messages = with_parsed_calls(messages) if self._as_json else messages
        render = partial(renderer().render, self._template, special_tokens=self._special_tokens, tools=tools)
        text, spans = render(messages, marked=self._marks)
        self._rendered = True
        with told_of_panics("of the conversations"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if not self._marks:
            width = self._sequence_length + 1
            spans = self._found(render, messages, text, encoding.offsets[width][0] if len(encoding.ids) > width else len(text))
        if not spans:
            self._leave_out("not_found" if any(said["role"] == ASSISTANT for said in messages) else "unanswered")
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

    def _found(self, render: Rendering, messages: Messages, text: str, end: int) -> list[tuple[int, int]]:
        """Return the positions of the answers in the text; none is searched behind `end`, where nothing fits any more."""
        spans = []
        for index, said in enumerate(messages):
            if said["role"] != ASSISTANT:
                continue
            before = render(messages[:index], prompt=True)[0] if index else ""
            after = render(messages[: index + 1])[0]
            start = len(before) if after.startswith(before) else self._start(render, messages[:index], before, after)
            if text.startswith(after) and start is not None and len(after) > start:
                spans.append((start, len(after)))
            else:
                self._counts["unmarked"] += 1
            if len(before) >= end:
                break
        return spans

    def _start(self, render: Rendering, messages: Messages, before: str, after: str) -> int | None:
        """Return where an answer begins whose prompt contains more than is written before it, such as the tag that opens a thought:
        behind what both have in common, if that is more than the conversation so far. A tag of the prompt is whole, or not in."""
        differs = (index for index, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
        common = after[: next(differs, min(len(before), len(after)))]
        so_far = render(messages)[0]
        if not common.startswith(so_far):
            return None
        tag = OPEN_TAG.search(common, len(so_far))
        start = len(common) if tag is None else tag.start()
        return start if start > len(so_far) else None


def fitted(document: Encoded, width: int) -> Encoded | None:
    """Return the part that fits into a row: all of it, or up to the end of the last answer that fits; None if none does."""
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
    config = read_object(path / "tokenizer_config.json") if path.is_dir() else {}
    named = {**read_object(path / "special_tokens_map.json"), **config} if path.is_dir() else {}
    special = {name: text for name in NAMES if (text := token_text(named.get(name)))}
    encoder = FileEncoder(path / "tokenizer.json" if path.is_dir() else path, end_token, end_token_of(path))
    said = _template(path, config, template)
    if not said:
        raise ConfigError(f"{tokenizer} has no chat template: pass a Jinja file with --chat-template")
    if len(said) > limits.TEMPLATE_CHARACTERS:
        raise ConfigError(f"the chat template has {len(said):,} characters; the limit is {limits.TEMPLATE_CHARACTERS:,}")
    chat = ChatEncoder(encoder, said, special, sequence_length)
    try:
        chat.layout()
    except ValidationError as error:
        raise ConfigError(f"no corpus can record the chat settings of {tokenizer}: {error.errors()[0]['msg']}") from error
    return chat


def _template(path: Path, config: Mapping[str, Any], named: Path | None) -> str | None:
    try:
        for file in (named, path / "chat_template.jinja" if path.is_dir() else None):
            if file is not None and (file == named or file.exists()):
                if file != named and leads_out(file, path):
                    raise ConfigError(f"{file} is a link out of its folder: pass the template with --chat-template")
                return read_named(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {named or path}: {error}") from error
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        said = next((item.get("template") for item in said if isinstance(item, dict) and item.get("name") == "default"), None)
    return said if isinstance(said, str) and said else None
