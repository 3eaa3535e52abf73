"""Scores: what a contribution does to the model, measured by a committee before it counts.

Each contribution has a committee of voters, drawn from SHA-256 of the coordinator's signature over the ballot: nobody can know it
while he trains, and receipts name that very signature. A member applies the contribution alone to the round's state, and measures
the loss before and after on samples of its own lease, drawn in the same way. It finds harm in what makes the loss worse by the
manifest's margin and points away from its own contribution: either alone refuses too much honest work. What harms in the eyes of
more than a third of those of its committee who measured it (the manifest's threshold) does not count: who had no time for it says
nothing. One who finds harm is never enough: among three clusters one would stop the run, and of two each could.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from dilocox.protocol.crypto import sha256
from dilocox.protocol.ledger import Lease
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["UNITS", "Score", "committee", "duties", "harms", "is_refused", "opinions", "positions", "turn", "units"]

UNITS = 1024
"""To the nat, in a receipt."""
LARGEST = (1 << 31) - 1


@dataclass(frozen=True)
class Score:
    """What one voter measured of one contribution."""

    before: float
    """Loss of the round's state, nats per token."""
    after: float
    """Of that state with the contribution alone applied to it, without momentum."""
    cosine: float
    """Between it and the voter's own contribution; 0 where one of them is nothing."""

    @property
    def gain(self) -> float:
        return self.before - self.after


def units(gain: float) -> int:
    """As it stands in a receipt."""
    return round(max(-LARGEST, min(LARGEST, gain * UNITS))) if gain == gain else -LARGEST  # not a number is no gain


def harms(manifest: Manifest, score: Score) -> bool:
    """Whether a voter refuses what it measured so."""
    return not score.gain >= -manifest.scoring.margin and not score.cosine >= 0


def seed_of(ballot: Statement[pb.Ballot]) -> bytes:
    """What nobody knew before the coordinator signed."""
    return sha256(b"dilocox scores", ballot.signing)


def committee(manifest: Manifest, ballot: Statement[pb.Ballot], cluster: str, listed: Sequence[str]) -> frozenset[str]:
    """Of the clusters on the ballot, in its order, those who score this one; all others where they are few. Empty where the run
    does not score."""
    return _committee(manifest.scoring.voters, seed_of(ballot), cluster, listed)


def duties(manifest: Manifest, ballot: Statement[pb.Ballot], voter: str, listed: Sequence[str]) -> frozenset[str]:
    """Of the clusters on the ballot, in its order, those whose committees this one is in. Asked again: at once."""
    return _duties(manifest.scoring.voters, seed_of(ballot), voter, tuple(listed))


@lru_cache(maxsize=64)
def _duties(wanted: int, seed: bytes, voter: str, listed: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in listed if voter in _committee(wanted, seed, name, listed))


def _committee(wanted: int, seed: bytes, cluster: str, listed: Sequence[str]) -> frozenset[str]:
    others = frozenset(listed) - {cluster}
    if not wanted or len(others) <= wanted:
        return others if wanted else frozenset()
    drawn, number = set[str](), 0
    while len(drawn) < wanted:
        name = listed[int.from_bytes(sha256(seed, cluster.encode(), number.to_bytes(4, "big"))[:8], "big") % len(listed)]
        drawn |= {name} & others
        number += 1
    return frozenset(drawn)


def turn(ballot: Statement[pb.Ballot], voter: str, cluster: str) -> bytes:
    """A voter scores by the smallest first. It may have no time for all, and who chose its place, or had the same one with all
    voters, would be scored by nobody."""
    return sha256(seed_of(ballot), b"turn", voter.encode(), cluster.encode())


def positions(manifest: Manifest, ballot: Statement[pb.Ballot], voter: str, lease: Lease) -> list[int]:
    """Of the samples on which a voter scores everything in this round: some of its own lease; fewer where that is short."""
    ends = list(accumulate(end - start for start, end in lease.spans))
    if not ends:
        return []
    seed, chosen = seed_of(ballot), set[int]()
    for number in range(2 * manifest.scoring.sequences):  # a few may be drawn twice
        if len(chosen) == min(ends[-1], manifest.scoring.sequences):
            break
        drawn = int.from_bytes(sha256(seed, voter.encode(), number.to_bytes(4, "big"))[:8], "big")
        chosen.add(drawn % ends[-1])
    return [position for index in sorted(chosen) for position in lease.positions(lease.counted + index, 1) or ()]


def opinions(
    manifest: Manifest,
    ballot: Statement[pb.Ballot],
    listed: Sequence[str],
    voters: Iterable[str],
    found: Callable[[str, int, int], bool | None],
) -> dict[str, tuple[int, int]]:
    """By cluster on the ballot: how many of its committee found harm, of how many who voted and measured it. `found`: whether a
    voter did in what has this index, which is the so-manieth that it was drawn to score; None: it did not measure it."""
    voted, place = frozenset(voters), Counter[str]()
    told: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(listed if manifest.scoring.voters else ()):
        drawn = committee(manifest, ballot, name, listed) & voted
        said = [opinion for voter in drawn if (opinion := found(voter, index, place[voter])) is not None]
        place.update(drawn)
        told[name] = sum(said), len(said)
    return told


def is_refused(manifest: Manifest, harmed: int, measured: int) -> bool:
    """Whether that many, of so many, are too many."""
    return harmed > 1 and measured - harmed < manifest.scoring.threshold * measured
