"""Entry points of installed distributions, by group."""

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

from dilocox.protocol.errors import ConfigError

__all__ = ["installed", "load"]

log = logging.getLogger(__name__)


def installed(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of a group by name, not loaded. A distribution whose files cannot be read has none."""
    found: dict[str, metadata.EntryPoint] = {}
    for distribution in metadata.distributions():
        try:
            found |= {entry.name: entry for entry in distribution.entry_points.select(group=group)}
        except Exception as error:  # files of another program may hold anything
            log.debug("the entry points of an installed distribution cannot be read: %s", error)
    return found


def load(entry: metadata.EntryPoint) -> Callable[..., Any]:
    """Import what an entry point names. Raises ConfigError if that fails, or is nothing to call."""
    try:
        if not callable(found := entry.load()):
            raise TypeError(f"{entry.value} is no command and no function")
    except Exception as error:  # a plugin's code and its dependencies may raise anything
        where = entry.dist.name if entry.dist is not None else entry.value
        raise ConfigError(f"the plugin {where} cannot be loaded: {error}. Install it again, or uninstall it") from error
    return found
