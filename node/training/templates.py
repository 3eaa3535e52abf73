"""Chat templates, rendered as transformers renders them."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from dilocox.protocol.errors import ConfigError

__all__ = ["render"]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    prompt: bool = False,
    marked: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation's text; with `prompt` followed by what asks for an answer; with `marked` also where the answers stand that
    the template marks. Raises ConfigError where the template refuses it."""
    try:
        texts, found = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **special_tokens,
        )
    except Exception as error:  # a template may do whatever a sandbox lets it
        raise ConfigError(f"the chat template refuses a conversation: {error or type(error).__name__}") from error
    return texts[0], [(start, end) for start, end in found[0] if end > start] if marked else []
