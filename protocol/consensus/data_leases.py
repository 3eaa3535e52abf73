"""Data leases: which cluster reads which samples, so that none is lost or repeated when clusters join and leave.

Sample positions are 0, 1, 2, …; every position is in exactly one place: counted (in a committed contribution), leased
to one cluster, free (returned unread), or at or above `cursor` (never leased). A lease is read in order. Samples of an
excluded round stay at the front of its lease: that work is in the cluster's error feedback, and its next contribution
counts it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Lease", "Ledger", "Span"]

Span = tuple[int, int]
"""Half-open range of positions."""


def length(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def split(spans: Iterable[Span], count: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """The first `count` positions of `spans`, and the rest."""
    first: list[Span] = []
    rest: list[Span] = []
    for start, end in spans:
        cut = min(end, start + max(0, count))
        count -= cut - start
        if start < cut:
            first.append((start, cut))
        if cut < end:
            rest.append((cut, end))
    return tuple(first), tuple(rest)


@dataclass(frozen=True)
class Lease:
    """One cluster's positions."""

    counted: int = 0
    """Samples in committed contributions since the cluster joined."""
    spans: tuple[Span, ...] = ()
    """Positions from `counted` on, in reading order."""

    @property
    def end(self) -> int:
        """The largest `samples_read` this lease covers."""
        return self.counted + length(self.spans)

    def positions(self, first: int, count: int) -> list[int] | None:
        """Positions of samples `first` … `first + count`, counted since joining; None where the lease ends before them."""
        if first < self.counted or first + count > self.end:
            return None
        _, rest = split(self.spans, first - self.counted)
        wanted, _ = split(rest, count)
        return [position for start, end in wanted for position in range(start, end)]


@dataclass(frozen=True)
class Ledger:
    cursor: int = 0
    free: tuple[Span, ...] = ()
    leases: Mapping[str, Lease] = field(default_factory=dict)

    def settle(self, cluster: str, samples_read: int) -> "Ledger":
        """Count everything the cluster read up to `samples_read`."""
        lease = self.leases[cluster]
        _, rest = split(lease.spans, samples_read - lease.counted)
        return replace(self, leases={**self.leases, cluster: Lease(samples_read, rest)})

    def release(self, cluster: str) -> "Ledger":
        """Give back what the cluster never got counted."""
        leases = dict(self.leases)
        lease = leases.pop(cluster)
        free: tuple[Span, ...] = ()
        for span in sorted((*self.free, *lease.spans)):
            free = _append(free, span)
        return replace(self, free=free, leases=leases)

    def top_up(self, clusters: Iterable[str], ahead: int) -> "Ledger":
        """Lease until each of `clusters` (in this order) has `ahead` positions to read; free ones first."""
        cursor, free, leases = self.cursor, self.free, dict(self.leases)
        for cluster in clusters:
            lease = leases.get(cluster, Lease())
            taken, free = split(free, ahead - length(lease.spans))
            spans = lease.spans
            for span in taken:
                spans = _append(spans, span)
            missing = ahead - length(spans)
            if missing > 0:
                spans = _append(spans, (cursor, cursor + missing))
                cursor += missing
            leases[cluster] = replace(lease, spans=spans)
        return Ledger(cursor, free, leases)


def _append(spans: tuple[Span, ...], span: Span) -> tuple[Span, ...]:
    if spans and spans[-1][1] == span[0]:
        return (*spans[:-1], (spans[-1][0], span[1]))
    return (*spans, span)
