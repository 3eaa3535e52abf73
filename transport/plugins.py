"""Entry points of installed distributions, by group."""

import logging
from importlib import metadata

__all__ = ["installed"]

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
