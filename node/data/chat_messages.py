"""Records of conversations into messages, as a chat template takes them: in one shape, from any author."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox.node.data.sources import Unreadable, sound
from dilocox.protocol.errors import ConfigError

__all__ = ["ASSISTANT", "CALLS", "FIELDS", "Messages", "messages_of", "texts_in", "tools_of", "with_parsed_calls"]

Messages = Sequence[Mapping[str, Any]]
FIELDS = ("messages", "prompt", "completion", "tools")
ASSISTANT = "assistant"
CALLS = ("tool_calls", "function_call")
"""Keys of a message whose content may be null."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part of a content that is text, as the APIs of OpenAI and Anthropic name them."""


def messages_of(record: Any) -> Messages:
    """Return the messages of `messages`, or of `prompt` and `completion`, each a text or messages. Raises ConfigError."""
    if isinstance(record, Unreadable):
        raise ConfigError(record.why)
    said: Any = None
    if isinstance(record, dict) and record.get("messages") is not None:
        said = record["messages"]
    elif isinstance(record, dict) and record.get("prompt") is not None and record.get("completion") is not None:
        said = [*_turns(record["prompt"], "user"), *_turns(record["completion"], ASSISTANT)]
    if not isinstance(said, list) or not said:
        known = ", ".join(map(str, record)) if isinstance(record, dict) else "no names"
        raise ConfigError(
            f"it contains neither messages, a list of {{role, content}}, nor prompt and completion (found: {known})"
        )
    return [_message(each) for each in said]


def tools_of(record: Any) -> list[Any]:
    """Return the tools that a record describes beside its messages, as objects or as JSON in a text; nothing where it has none."""
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"its tools are not JSON: {error}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise ConfigError("its tools are not a list of objects")
    return [_canonical(each) for each in tools or ()]


def _turns(said: Any, role: str) -> list[Any]:
    return said if isinstance(said, list) else [{"role": role, "content": said}]


def _message(said: Any) -> dict[str, Any]:
    """Return one message, its content as one text, or as None beside calls of tools. Raises ConfigError."""
    if not isinstance(said, dict) or not isinstance(said.get("role"), str):
        raise ConfigError("a message is not {role, content} with two texts")
    content, calls = said.get("content"), any(said.get(key) for key in CALLS)
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str) and not (content is None and calls):
        raise ConfigError("a message is not {role, content} with two texts")
    message = {str(key): _canonical(value) for key, value in said.items() if value is not None}
    return {**message, "content": None if content is None else sound(content)}


def _joined(parts: list[Any]) -> str | None:
    """Return the text of a content in parts, one below the other; None where there are no parts. Raises ConfigError."""
    texts = []
    for part in parts:
        known = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
        text = part.get("text") if known else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ConfigError(f"a message has a part that is not text: {str(kind)[:80]}")
        texts.append(text)
    return "\n".join(texts) if texts else None


def with_parsed_calls(messages: Messages) -> Messages:
    """Return the messages with the arguments of calls as objects, where they are JSON in a text, as OpenAI has them.

    For templates that write them as JSON: these would write a text in quotes.
    """
    return [{**said, "tool_calls": [_parsed(call) for call in calls]} if (calls := _calls(said)) else said for said in messages]


def _calls(said: Mapping[str, Any]) -> list[Any]:
    calls = said.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _parsed(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parsed(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": _canonical(arguments)} if isinstance(arguments, dict) else call


def texts_in(said: Any) -> Iterator[str]:
    """Yield whatever a template may write of it."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for key, value in said.items():
            yield str(key)
            yield from texts_in(value)
    elif isinstance(said, Sequence):
        for each in said:
            yield from texts_in(each)


def _canonical(said: Any) -> Any:
    """Return the same, of what a tokenizer and a digest can be made of: half a surrogate pair is no character, a date is a text."""
    match said:
        case str():
            return sound(said)
        case dict():
            return {_canonical(str(key)): _canonical(value) for key, value in said.items()}
        case list() | tuple():
            return [_canonical(value) for value in said]
        case bool() | int() | float() | None:
            return said
        case _:
            return _canonical(str(said))
