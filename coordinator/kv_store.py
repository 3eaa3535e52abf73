"""Interface of a store that several coordinators share: linearizable keys, one transaction at a time, and leases.

The plugin dilocox-etcd implements it over etcd's JSON gateway; the tests' fake has the same semantics. After a
StoreError the caller does not know whether its transaction was applied. shared_log.py sends transactions that have an
effect only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from dilocox.protocol.errors import ConfigError, DilocoxError, LocalError
from dilocox.protocol.ids import printable
from dilocox.transport.plugins import call, installed

__all__ = [
    "STORES",
    "Change",
    "Delete",
    "Found",
    "Guard",
    "Item",
    "Put",
    "Store",
    "StoreError",
    "StoreFiles",
    "StorePlace",
    "StoreRefusedError",
    "parse_place",
    "shown_url",
]

STORES = "dilocox.stores"
"""Group of entry points: by URL scheme a function of a URL and `StoreFiles` that returns the StorePlace, or raises ConfigError."""


SHOWN_CHARACTERS = 200
"""Most that an error repeats of a URL."""


class StoreError(DilocoxError):
    """No answer: whether it was applied is not known."""


class StoreRefusedError(LocalError):
    """The store answers, and will not do it however often it is asked."""


@dataclass(frozen=True)
class Item:
    key: str
    value: bytes


@dataclass(frozen=True)
class Guard:
    """Condition of a transaction."""

    key: str
    value: bytes | None = None
    """Value that the key must have. None: the key must not exist."""


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int = 0
    """The key goes when this lease ends; 0: it stays."""


@dataclass(frozen=True)
class Delete:
    """All keys from `first` on, before `until`."""

    first: str
    until: str


Change = Put | Delete


@dataclass(frozen=True)
class Found:
    """Result of a transaction."""

    applied: bool
    items: dict[str, Item] = field(default_factory=dict)
    """If it was not applied: the requested keys that exist."""


class Store(Protocol):
    """Every method raises StoreError, or StoreRefusedError."""

    async def read(self, first: str, until: str, most: int) -> Sequence[Item]:
        """The first keys of a range, at most so many, by name; linearizable."""
        ...

    async def apply(self, guards: Sequence[Guard], changes: Sequence[Change], otherwise: Sequence[str] = ()) -> Found:
        """Apply all changes if all guards are true, else none. `otherwise`: keys to read in that case, at the same
        revision."""
        ...

    async def grant(self, seconds: int) -> int:
        """A lease that ends after so long, unless it is kept."""
        ...

    async def keep(self, lease: int) -> bool:
        """Renew a lease. Return whether it still existed."""
        ...

    async def revoke(self, lease: int) -> None:
        """End a lease now; does nothing if it does not exist."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class StoreFiles:
    """Files with secrets of a store."""

    auth: Path | None = None
    """User and password, a line each."""
    ca: Path | None = None
    """Certificate of its certificates' authority; None: the system's."""
    certificate: Path | None = None
    """Certificate of this client; `key` has its key."""
    key: Path | None = None


class StorePlace(Protocol):
    """Address of a store."""

    @property
    def label(self) -> str:
        """Return its address for people, without secrets."""
        ...

    @property
    def prefix(self) -> str:
        """Return the prefix of all keys of this coordinator."""
        ...

    def open(self) -> Store:
        """Return the store, within a running loop. Raises ConfigError for files that cannot be used."""
        ...


def parse_place(url: str, files: StoreFiles | None = None) -> StorePlace:
    """Return where a store is, by the plugin of the URL's scheme. Raises ConfigError."""
    scheme, separator, _ = url.partition("://")
    plugins = installed(STORES)
    if not separator or scheme not in plugins:
        known = ", ".join(f"{name}://" for name in sorted(plugins)) or "none: install dilocox-etcd"
        raise ConfigError(f"--store {shown_url(url)}: no plugin for this scheme; installed: {known}")
    place = call(plugins[scheme], url, files or StoreFiles())
    if not all(hasattr(place, name) for name in ("label", "prefix", "open")):
        raise ConfigError(f"--store {shown_url(url)}: its plugin returns no store. Install it again, or uninstall it")
    return cast("StorePlace", place)


def shown_url(url: str) -> str:
    """Return a URL for an error, cut, and without a user and password."""
    scheme, separator, rest = url.partition("://")
    _, at, host = rest.rpartition("@")
    return printable(f"{scheme}{separator}{'…@' * bool(at)}{host}")[:SHOWN_CHARACTERS]
