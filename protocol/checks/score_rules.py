"""Scores: what a contribution does to the model, measured by a committee before it counts.

Each contribution has a committee of voters, drawn from SHA-256 of the coordinator's signature over the ballot: nobody can know it
while he trains, and receipts name that very signature. The draw is by standing (standing.py), and who is drawn twice has two votes;
where the others are no more than there are votes all of them score, and vote by standing. A member applies the contribution alone
to the round's state, and measures the loss before and after on samples of its own lease, drawn in the same way. It finds harm in
what makes the loss no better, or by much less than the others do, and does not point the way of its own contribution as they do:
either alone refuses too much honest work. It finds harm, too, in all of an author who pulls the same way round after round
(bias.py). A contribution does not count if more than a third of the votes that measured it found harm (THRESHOLD). A member without
time for it does not vote. One member that finds harm is never enough: among three clusters one would stop the run, and of two each.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from dilocox.protocol.consensus.committees import draw, drawn
from dilocox.protocol.consensus.data_leases import Lease
from dilocox.protocol.crypto import sha256
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["UNITS", "Opinion", "Score", "committee", "duties", "harmful", "opinions", "positions", "turn", "units"]

UNITS = 1024
"""To the nat, in a receipt."""
LARGEST = (1 << 31) - 1
THRESHOLD = 2 / 3
"""Share of the votes that measured and found no harm. A contribution with less does not count; a third of hostile votes excludes
none."""
SAMPLES = 8
"""Samples on which a voter measures the loss: docs/results/poisoning.md was measured with as many, and more take longer."""
WORTH = 0.5
"""Share of the median gain, for as many tokens: a contribution that gains no more, and points away, harms."""
AGREEMENT = 0.6
"""Share of the median cosine: a contribution points away whose cosine is below it, or below 0 (docs/results/poisoning.md)."""
Of = TypeVar("Of", bound=Hashable)


@dataclass(frozen=True)
class Score:
    """What one voter measured of one contribution."""

    before: float
    """Loss of the round's state, nats per token."""
    after: float
    """Of that state with the contribution alone applied to it, without earlier momentum."""
    cosine: float
    """Between it and the voter's own contribution; 0 where one of them is nothing."""
    sketch: Sequence[float] = ()
    """Of it, unclipped: (bias.SKETCH,), or empty where nobody looks at biases …"""
    own: Sequence[float] = ()
    """… and of the voter's own."""

    @property
    def gain(self) -> float:
        return self.before - self.after


def units(gain: float) -> int:
    """As it stands in a receipt."""
    return round(max(-LARGEST, min(LARGEST, gain * UNITS))) if gain == gain else -LARGEST  # not a number is no gain


def harmful(manifest: Manifest, scores: Mapping[Of, Score], tokens: Mapping[Of, int]) -> frozenset[Of]:
    """Of all that one voter measured in a round, what it refuses. The medians of what it measured, of two the smaller, say what
    honest work gains in this round, and how much of it points the same way. `tokens`: as announced; of fewer than the median's as
    much less is expected, by which they weigh less, too: a gain goes with them, a cosine that noise outweighs with their root."""
    if not scores:
        return frozenset()
    usual = max(1.0, _lower_median(tokens[of] for of in scores))
    alike = not manifest.data.private  # clusters that train on different texts gain and point differently
    cosine = AGREEMENT * alike * max(0.0, _lower_median(score.cosine for score in scores.values()))
    gain = WORTH * alike * max(0.0, _lower_median(score.gain for score in scores.values()))

    def harms(score: Score, share: float) -> bool:
        return not score.gain > share * gain and not score.cosine >= math.sqrt(share) * cosine

    return frozenset(of for of, score in scores.items() if harms(score, min(1.0, tokens[of] / usual)))


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(value if value == value else -math.inf for value in values)
    return ordered[(len(ordered) - 1) // 2]


def seed_of(ballot: Statement[pb.Ballot]) -> bytes:
    """What nobody knew before the coordinator signed."""
    return sha256(b"dilocox scores", ballot.signing)


def committee(manifest: Manifest, ballot: Statement[pb.Ballot], cluster: str, listed: Mapping[str, int]) -> Mapping[str, int]:
    """Who scores this one, with how many votes. `listed`: the clusters on the ballot, in its order, with their standing. Nobody
    where the run does not score."""
    return draw(manifest.scoring.voters, seed_of(ballot), cluster, listed)


def duties(manifest: Manifest, ballot: Statement[pb.Ballot], voter: str, listed: Mapping[str, int]) -> frozenset[str]:
    """Of the clusters on the ballot, as `committee` wants them, those whose committees this one is in. Asked again: at once."""
    return _duties(manifest.scoring.voters, seed_of(ballot), voter, tuple(listed), tuple(accumulate(listed.values())))


@lru_cache(maxsize=64)
def _duties(wanted: int, seed: bytes, voter: str, listed: tuple[str, ...], ends: tuple[int, ...]) -> frozenset[str]:
    return frozenset(name for name in listed if voter in drawn(wanted, seed, name, listed, ends))


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
    for number in range(2 * SAMPLES):  # a few may be drawn twice
        if len(chosen) == min(ends[-1], SAMPLES):
            break
        place = int.from_bytes(sha256(seed, voter.encode(), number.to_bytes(4, "big"))[:8], "big")
        chosen.add(place % ends[-1])
    return [position for index in sorted(chosen) for position in lease.positions(lease.counted + index, 1) or ()]


@dataclass(frozen=True)
class Opinion:
    """Of those of a committee who voted and measured."""

    votes: Mapping[str, int]
    """Of each."""
    harmed: frozenset[str]
    """Who found harm."""

    def refuses(self) -> bool:
        """Whether those are too many."""
        measured, harmed = sum(self.votes.values()), sum(self.votes[name] for name in self.harmed)
        return len(self.harmed) > 1 and measured - harmed < THRESHOLD * measured

    def __str__(self) -> str:
        """As a reason."""
        return f"{len(self.harmed)} of the {len(self.votes)} who were drawn to score it and did found that it harms"


def opinions(
    manifest: Manifest,
    ballot: Statement[pb.Ballot],
    listed: Mapping[str, int],
    voters: Iterable[str],
    found: Callable[[str, int, int], bool | None],
) -> dict[str, Opinion]:
    """By cluster on the ballot, as `committee` wants them. `found(voter, index, place)`: whether a voter found harm in what has
    this index, and this place among what it was drawn to score; None: it did not measure it."""
    voted, place = frozenset(voters), Counter[str]()
    told: dict[str, Opinion] = {}
    for index, name in enumerate(listed if manifest.scoring.voters else ()):
        votes = {voter: count for voter, count in committee(manifest, ballot, name, listed).items() if voter in voted}
        said = {voter: opinion for voter in votes if (opinion := found(voter, index, place[voter])) is not None}
        place.update(votes.keys())
        told[name] = Opinion(
            {voter: votes[voter] for voter in said}, frozenset(voter for voter, opinion in said.items() if opinion)
        )
    return told
