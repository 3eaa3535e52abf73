"""Scores: what a contribution does to the model, measured by a committee before it counts.

Each contribution has a committee of voters, drawn from SHA-256 of the coordinator's signature over the ballot: nobody can know it
while he trains. A member applies the contribution alone to the round's state, and measures the loss before and after on samples of
its own lease, drawn in the same way. It refuses what harms: what makes the loss worse by the manifest's margin and points away from
the member's own contribution. Either alone refuses too many that are honest and unlucky. A contribution counts when the manifest's
share of those of its committee who voted accepted it, and at least half of all voters, as ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dilocox.protocol.crypto import sha256
from dilocox.protocol.ledger import Lease
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = ["UNITS", "Score", "committee", "harms", "is_enough", "positions", "refused", "turn", "units"]

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
    return sha256(b"dilocox scores", ballot.envelope.signature)


def committee(manifest: Manifest, ballot: Statement[pb.Ballot], cluster: str, listed: Sequence[str]) -> frozenset[str]:
    """Of the clusters on the ballot, in its order, those who score this one; all others where they are few. Empty where the run
    does not score."""
    wanted, others = manifest.scoring.voters, frozenset(listed) - {cluster}
    if not wanted or len(others) <= wanted:
        return others if wanted else frozenset()
    seed, drawn, number = seed_of(ballot), set[str](), 0
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


def is_enough(manifest: Manifest, accepts: int, voted: int) -> bool:
    """Whether so many of a committee's members who voted suffice. A committee of which nobody voted has nothing to say."""
    return accepts >= manifest.scoring.threshold * voted


def refused(
    manifest: Manifest, ballot: Statement[pb.Ballot], listed: Sequence[str], votes: Mapping[str, bytes]
) -> dict[str, tuple[int, int]]:
    """Contributions on the ballot that too few accepted of those who were drawn to score them and voted: how many of how many.
    `votes`: by voter, what its receipt accepts."""
    found: dict[str, tuple[int, int]] = {}
    for index, name in enumerate(listed):
        drawn = committee(manifest, ballot, name, listed) & votes.keys()
        accepts = sum(votes[voter][index // 8] >> index % 8 & 1 for voter in drawn)
        if not is_enough(manifest, accepts, len(drawn)):
            found[name] = accepts, len(drawn)
    return found
