"""What several coordinators need of a store that they share: linearizable keys, one transaction at a time, and leases.

etcd.py is one over etcd's JSON gateway; the tests' fake has the same semantics. Who calls may hear nothing (StoreError), and not
know whether a transaction was applied: shared_log.py sends only what is applied once, however often it arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dilocox.protocol.errors import DilocoxError, LocalError

__all__ = ["Change", "Delete", "Found", "Guard", "Item", "Put", "Store", "StoreError", "StoreRefusedError"]


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
    """What must hold for a transaction to be applied."""

    key: str
    value: bytes | None = None
    """What the key says; None: it is not there."""


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
    """How a transaction ended."""

    applied: bool
    items: dict[str, Item] = field(default_factory=dict)
    """Where it was not: what was asked for, of what was there."""


class Store(Protocol):
    """Every method raises StoreError, or StoreRefusedError."""

    async def read(self, first: str, until: str, most: int) -> Sequence[Item]:
        """The first keys of a range, at most so many, by name; linearizable."""
        ...

    async def apply(self, guards: Sequence[Guard], changes: Sequence[Change], otherwise: Sequence[str] = ()) -> Found:
        """All changes where all guards hold, else none; `otherwise`: the keys to read then, at the same revision."""
        ...

    async def grant(self, seconds: int) -> int:
        """A lease that ends after so long, unless it is kept."""
        ...

    async def keep(self, lease: int) -> bool:
        """Whether it was still there, and begins anew."""
        ...

    async def revoke(self, lease: int) -> None:
        """It ends now; fine where it is gone."""
        ...

    async def close(self) -> None: ...
