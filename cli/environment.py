"""Options from the environment: each has one name, which follows from its verb and its long flag.

    dilocox node --from DIR                   DILOCOX_NODE__FROM
    dilocox hold --no-dht                     DILOCOX_HOLD__DHT=false
    dilocox data train-tokenizer --vocabulary DILOCOX_DATA_TRAIN_TOKENIZER__VOCABULARY

What looks like one and is none is refused, whatever verb is said. An option that may be said several times takes words; several
folders are separated as in PATH.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from typer.core import TyperGroup

from dilocox.protocol.errors import ConfigError

__all__ = ["Root", "long_flag", "refuse_unknown", "variable", "verbs"]

PREFIX, BETWEEN = "DILOCOX_", "__"
WITHOUT = ("--help", "--install-completion", "--show-completion", "--version")
"""Options that do something else than their verb does."""


class Root(TyperGroup):
    """The command whose verbs' options are also read from the environment."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.variables = {variable(verb, flag): option for verb, flag, option in _options(self)}
        for name, option in self.variables.items():
            option.envvar = name

    def invoke(self, ctx: Any) -> Any:
        """Raises ConfigError where the environment holds what is no option."""
        if "--help" not in ctx.args:
            refuse_unknown(os.environ, self.variables)
        return super().invoke(ctx)


def variable(verb: str, flag: str) -> str:
    """`verb`: its words, such as `data build`. `flag`: with its dashes."""
    return f"{PREFIX}{_upper(verb)}{BETWEEN}{_upper(flag)}"


def _upper(words: str) -> str:
    return words.lstrip("-").replace("-", "_").replace(" ", "_").upper()


def verbs(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """(its words, the command) of each verb."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from verbs(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def long_flag(option: Any) -> str | None:
    """None: an argument, or an option of every command."""
    return next((each for each in option.opts if each.startswith("--") and each not in WITHOUT), None)


def _options(group: Any) -> Iterator[tuple[str, str, Any]]:
    for verb, command in verbs(group):
        for option in command.params:
            if (flag := long_flag(option)) is not None:
                yield verb, flag, option


def refuse_unknown(environment: Mapping[str, str], known: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the nearest that there is."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and BETWEEN in name and name not in known:
            near = _nearest(name, known)
            help = f"did you mean {near}?" if near else "`dilocox VERB --help` names each option's"
            raise ConfigError(f"the environment has {name}, and there is no such option: {help}")


def _nearest(name: str, known: Mapping[str, Any]) -> str | None:
    """The verb decides first."""
    verb, _, flag = name.partition(BETWEEN)
    flags: dict[str, list[str]] = {}
    for each in known:
        flags.setdefault(each.partition(BETWEEN)[0], []).append(each.partition(BETWEEN)[2])
    for near in [verb] if verb in flags else difflib.get_close_matches(verb, flags, len(flags)):
        if found := difflib.get_close_matches(flag, flags[near], 1):
            return f"{near}{BETWEEN}{found[0]}"
    return None
