"""Text from an exported folder, by transformers' classes, for a first look at a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils import logging

from dilocox.node.data.chat_template_process import renderer
from dilocox.protocol.errors import ConfigError

__all__ = ["Generated", "generate_text"]

DAMAGE = (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError)
"""Errors of transformers for a damaged file."""
LEAST_TEMPERATURE = 1e-3
"""Below it the likeliest token is as good as sure, and logits over it are soon no numbers any more."""
MOST_PER_BYTE = 2
"""Parameters: of quantized weights."""


@dataclass(frozen=True)
class Generated:
    text: str
    answers: bool
    """True for an answer by the tokenizer's chat template; otherwise the text continues the prompt."""


@torch.no_grad()
def generate_text(folder: Path, prompt: str, tokens: int, temperature: float, seed: int, plain: bool = False) -> Generated:
    """Return the text after the prompt, or the answer to it if the tokenizer has a chat template; `plain`: always the
    former. It has at most so many tokens, fewer if the model ends its document. `temperature` 0: always the likeliest
    token. Raises ConfigError if the folder is not a model with its tokenizer."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        for path in folder.glob("*.safetensors"):
            path.open("rb").close()  # safetensors reports an unreadable file as missing
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        _check_size(folder)
        model, told = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded by transformers: {error}") from error
    except DAMAGE as error:
        raise ConfigError(
            f"transformers cannot load {folder}, it is damaged or too large: {type(error).__name__}: {error}"
        ) from error
    if lacking := sorted(told["missing_keys"]):
        raise ConfigError(f"{folder} is damaged: its weights lack {', '.join(lacking[:3])}")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    given = _asked(tokenizer, prompt, plain).to(model.device)
    if not given["input_ids"].numel():
        raise ConfigError("the prompt makes no tokens: give one that says something")
    choice = {"do_sample": True, "temperature": temperature} if temperature >= LEAST_TEMPERATURE else {"do_sample": False}
    set_seed(seed)
    made = model.generate(**given, max_new_tokens=tokens, pad_token_id=tokenizer.eos_token_id, **choice)
    text: str = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return Generated(text, tokenizer.chat_template is not None and not plain)


def _check_size(folder: Path) -> None:
    """Raise ConfigError if config.json describes a larger model than the weights: the missing ones would be invented, in
    memory that may not exist."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if held and parameters > MOST_PER_BYTE * held:
        raise ConfigError(
            f"{folder} is damaged: config.json says {parameters:,} parameters, and its weights are {held:,} bytes"
        )


def _asked(tokenizer: Any, prompt: str, plain: bool) -> Any:
    """Return the model's input. Raises ConfigError."""
    if plain or tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if not isinstance(tokenizer.chat_template, str):
        raise ConfigError("the model has several chat templates, by name; --plain goes on with the text as it is")
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    try:
        text, _ = renderer().render(tokenizer.chat_template, [{"role": "user", "content": prompt}], special, prompt=True)
    except ConfigError as error:
        raise ConfigError(f"{error}; --plain goes on with the text as it is") from error
    return tokenizer(text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
