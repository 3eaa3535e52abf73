"""A fake of the store that coordinators share (coordinator/kv_store.py): in memory, with etcd's transactions and leases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dilocox.coordinator.kv_store import Change, Found, Guard, Item, Put, StoreRefusedError

__all__ = ["FakeStore"]


@dataclass
class FakeStore:
    """Store that answers at once. Tests put a link between it and its clients."""

    clock: Callable[[], float]
    """Clock of the store."""
    items: dict[str, Item] = field(default_factory=dict)
    granted: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Lease of each key."""
    leases: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Seconds, and when it ends."""
    most_bytes: int = 1_572_864
    """Largest keys and values of a transaction, as etcd's --max-request-bytes."""

    async def read(self, first: str, until: str, most: int) -> Sequence[Item]:
        self._expire()
        return [self.items[key] for key in sorted(self.items) if first <= key < until][:most]

    async def apply(self, guards: Sequence[Guard], changes: Sequence[Change], otherwise: Sequence[str] = ()) -> Found:
        self._expire()
        size = sum(len(change.key) + len(change.value) for change in changes if isinstance(change, Put))
        if size > self.most_bytes:
            raise StoreRefusedError("etcdserver: request is too large")
        puts = [change.key for change in changes if isinstance(change, Put)]
        gone = [change for change in changes if not isinstance(change, Put)]
        if len(set(puts)) < len(puts) or any(each.first <= key < each.until for key in puts for each in gone):
            raise StoreRefusedError("etcdserver: duplicate key given in txn request")
        if not all(map(self._holds, guards)):
            return Found(False, {key: self.items[key] for key in otherwise if key in self.items})
        if any(isinstance(change, Put) and change.lease and change.lease not in self.leases for change in changes):
            raise StoreRefusedError("etcdserver: requested lease not found")
        for change in changes:
            if isinstance(change, Put):
                self.items[change.key] = Item(change.key, change.value)
                self.held.pop(change.key, None)
                if change.lease:
                    self.held[change.key] = change.lease
            else:
                self._remove([key for key in self.items if change.first <= key < change.until])
        return Found(True)

    async def grant(self, seconds: int) -> int:
        self.granted += 1
        lease = self.granted
        self.leases[lease] = seconds, self.clock() + seconds
        return lease

    async def keep(self, lease: int) -> bool:
        self._expire()
        if lease not in self.leases:
            return False
        seconds, _ = self.leases[lease]
        self.leases[lease] = seconds, self.clock() + seconds
        return True

    async def revoke(self, lease: int) -> None:
        self._expire()
        self._end(lease)

    async def close(self) -> None: ...

    def forget(self) -> None:
        """Forget all keys, as a new store."""
        self._remove(list(self.items))

    def _holds(self, guard: Guard) -> bool:
        item = self.items.get(guard.key)
        return guard.value == (None if item is None else item.value)

    def _expire(self) -> None:
        for lease in [lease for lease, (_, ends) in self.leases.items() if ends <= self.clock()]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self._remove([key for key, held in self.held.items() if held == lease])

    def _remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self.items[key]
            self.held.pop(key, None)
