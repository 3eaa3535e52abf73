"""Options from the environment: each has one name, which follows from its verb and its long flag.

    dilocox node --from DIR                   DILOCOX_NODE__FROM
    dilocox relay --no-dht                    DILOCOX_RELAY__DHT=false
    dilocox data train-tokenizer --vocabulary DILOCOX_DATA_TRAIN_TOKENIZER__VOCABULARY

What looks like one and is none is refused, whatever verb is said. An option that may be said several times takes words; several
folders are separated as in PATH.
"""

import difflib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from dilocox.cli.commands import VERBS, Verbs, listing
from dilocox.protocol.errors import ConfigError

__all__ = ["Root", "long_flag", "refuse_unknown", "said_in", "variable", "verbs"]

PREFIX, BETWEEN = "DILOCOX_", "__"
WITHOUT = ("--help", "--install-completion", "--show-completion", "--version")
"""Options that do something else than their verb does."""


class Root(TyperGroup):
    """The command whose verbs' options are also read from the environment."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": Verbs(VERBS, _name_variables)})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List all verbs without loading them."""
        loaded, self.commands = self.commands, listing()
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises ConfigError if an environment variable names no option, or a file sets a wrong value."""
        if "--help" not in ctx.args and any(map(_looks_like_one, os.environ)):
            here = [name for name in self.commands if name in VERBS or name in ctx.args[:1]]
            options = itertools.chain.from_iterable(_options(self.commands[name], name) for name in here)
            others = tuple(
                f"{PREFIX}{_upper(name)}_" for name in self.commands if name not in here
            )  # plugins that are not loaded
            environment = {name: value for name, value in os.environ.items() if not name.startswith(others)}
            refuse_unknown(environment, {variable(verb, flag) for verb, flag, _ in options})
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if error.ctx is not None and error.param is not None and (where := said_in(error.ctx, error.param)):
                raise ConfigError(f"{where}{error.message}") from error
            raise


def _name_variables(name: str, command: Any) -> None:
    for verb, flag, option in _options(command, name):
        option.envvar = variable(verb, flag)
        option.show_envvar = False  # the root's help has the rule


def _looks_like_one(name: str) -> bool:
    return name.startswith(PREFIX) and BETWEEN in name


def variable(verb: str, flag: str) -> str:
    """`verb`: its words, such as `data build`. `flag`: with its dashes."""
    return f"{PREFIX}{_upper(verb)}{BETWEEN}{_upper(flag)}"


def _upper(words: str) -> str:
    return words.lstrip("-").replace("-", "_").replace(" ", "_").upper()


def verbs(command: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    """(its words, the command) of each verb of a group, or of a verb of these words."""
    if not isinstance(command, TyperGroup):
        yield words, command
        return
    for name, each in command.commands.items():
        yield from verbs(each, f"{words} {name}".strip())


def long_flag(option: Any) -> str | None:
    """Return the option's long flag. None: an argument, or an option of every command."""
    return next((each for each in option.opts if each.startswith("--") and each not in WITHOUT), None)


def _options(command: Any, words: str = "") -> Iterator[tuple[str, str, Any]]:
    for verb, each in verbs(command, words):
        for option in each.params:
            if (flag := long_flag(option)) is not None:
                yield verb, flag, option


def said_in(context: Any, param: Any) -> str:
    """Return the file and key that set an option's value, to begin a sentence with; empty if another source did."""
    source = context.get_parameter_source(param.name)
    if source is None or source.name != "DEFAULT_MAP":
        return ""
    return f"{context.params['config']}: {param.opts[0].lstrip('-')}: "


def refuse_unknown(environment: Mapping[str, str], known: Collection[str]) -> None:
    """Raises ConfigError, with the nearest that there is."""
    for name in sorted(environment):
        if _looks_like_one(name) and name not in known:
            near = _nearest(name, known)
            help = f"did you mean {near}?" if near else "use DILOCOX_VERB__OPTION; `dilocox VERB --help` lists the options"
            raise ConfigError(f"the environment variable {name} names no option: {help}")


def _nearest(name: str, known: Collection[str]) -> str | None:
    """The verb decides first."""
    verb, _, flag = name.partition(BETWEEN)
    flags: dict[str, list[str]] = {}
    for each in known:
        flags.setdefault(each.partition(BETWEEN)[0], []).append(each.partition(BETWEEN)[2])
    for near in [verb] if verb in flags else difflib.get_close_matches(verb, flags, len(flags)):
        if found := difflib.get_close_matches(flag, flags[near], 1):
            return f"{near}{BETWEEN}{found[0]}"
    return None
