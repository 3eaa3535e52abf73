"""Committees: voters drawn by voting weight, from a seed that was unpredictable before."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from dilocox.protocol.crypto import sha256

__all__ = ["draw", "drawn"]


def draw(wanted: int, seed: bytes, cluster: str, listed: Mapping[str, int]) -> Mapping[str, int]:
    """Return `wanted` draws from the other clusters, by voting weight: votes by name. `listed`: voting weights."""
    return drawn(wanted, seed, cluster, tuple(listed), tuple(accumulate(listed.values())))


def drawn(wanted: int, seed: bytes, cluster: str, listed: Sequence[str], ends: Sequence[int]) -> Mapping[str, int]:
    """Return what `draw` returns. `ends`: running sums of the voting weights. If no more than `wanted` others exist, all of
    them are in the committee, with their voting weights as votes."""
    if not wanted:
        return {}
    place = listed.index(cluster)
    before, own = (ends[place - 1] if place else 0), ends[place] - (ends[place - 1] if place else 0)
    if len(listed) - 1 <= wanted:
        weights = zip(listed, (end - start for start, end in pairwise((0, *ends))), strict=True)
        return {name: weight for name, weight in weights if name != cluster}
    votes = Counter[str]()
    for number in range(wanted):
        at = int.from_bytes(sha256(seed, cluster.encode(), number.to_bytes(4, "big"))[:8], "big") % (ends[-1] - own)
        votes[listed[bisect_right(ends, at if at < before else at + own)]] += 1
    return votes
