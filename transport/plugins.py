"""Entry points of installed distributions, by group."""

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import printable

__all__ = ["call", "installed", "load"]

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 300
"""Most that an error repeats of what a plugin raised."""


def installed(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name, not loaded. A distribution whose files cannot be read has none."""
    found: dict[str, metadata.EntryPoint] = {}
    for distribution in metadata.distributions():
        try:
            found |= {entry.name: entry for entry in distribution.entry_points.select(group=group)}
        except Exception as error:  # files of another program may contain anything
            log.debug("cannot read the entry points of an installed distribution: %s", error)
    return found


def load(entry: metadata.EntryPoint) -> Callable[..., Any]:
    """Import what an entry point names. Raises ConfigError if that fails, or is nothing to call."""
    try:
        if not callable(found := entry.load()):
            raise TypeError(f"{entry.value} is not a command and not a function")
    except (Exception, SystemExit) as error:  # a plugin's code and its dependencies may raise anything
        raise _unusable(entry, error, "loaded") from error
    return found


def call(entry: metadata.EntryPoint, *arguments: Any) -> Any:
    """Call the function of an entry point. Raises ConfigError if the function does, or if it fails in another manner."""
    function = load(entry)
    try:
        return function(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise _unusable(entry, error, "used") from error


def _unusable(entry: metadata.EntryPoint, error: BaseException, how: str) -> ConfigError:
    where = entry.dist.name if entry.dist is not None else entry.value
    says = printable(f"{type(error).__name__}: {error}")[:SHOWN_CHARACTERS]
    return ConfigError(f"the plugin {where} cannot be {how}: {says}. Install it again, or uninstall it")
