"""Scores: the effect of a contribution on the model, measured by a committee before it counts.

SHA-256 of the coordinator's signature over the ballot draws a committee for each contribution: no cluster can know it
while it trains, and votes name that signature. The draw is by reputation, and a cluster drawn twice has two votes. With
few clusters all others score, weighted by reputation. A member applies the contribution alone to the round's state, and
measures the loss before and after on samples of its own lease, drawn in the same way. It finds harm if the loss
improves not at all, or by much less than with the others, and the contribution does not point the way of its own as the
others do. Either alone would reject too much honest work. It also finds harm in all contributions of an author that
pulls steadily (bias_rules.py). A contribution does not count if more than a third of the votes that measured it found
harm (THRESHOLD). A member without time does not vote on it. A single member is never enough: it could stop a run of two
or three clusters.
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
"""Units per nat in a vote."""
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
    """Measurement of one contribution by one voter."""

    before: float
    """Loss of the round's state, nats per token."""
    after: float
    """Loss of that state with the contribution alone applied to it, without earlier momentum."""
    cosine: float
    """Cosine between it and the voter's contribution; 0 if one of them is zero."""
    sketch: Sequence[float] = ()
    """Sketch of it, unclipped: (bias.SKETCH,), or empty without a bias check."""
    own: Sequence[float] = ()
    """Sketch of the voter's contribution."""

    @property
    def gain(self) -> float:
        return self.before - self.after


def units(gain: float) -> int:
    """Return a gain in the units of a vote."""
    return round(max(-LARGEST, min(LARGEST, gain * UNITS))) if gain == gain else -LARGEST  # not a number is no gain


def harmful(manifest: Manifest, scores: Mapping[Of, Score], tokens: Mapping[Of, int]) -> frozenset[Of]:
    """Return what a voter rejects of all that it measured in a round. The medians of its measurements, of two the smaller,
    estimate an honest gain and an honest cosine. `tokens`: as announced; with fewer than the median's, less is
    expected: a gain in proportion, a cosine, which noise dominates, by the root."""
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
    """Return the seed: unknown before the coordinator signed."""
    return sha256(b"dilocox scores", ballot.signing)


def committee(manifest: Manifest, ballot: Statement[pb.Ballot], cluster: str, listed: Mapping[str, int]) -> Mapping[str, int]:
    """Return the members of a contribution's committee, with their votes. `listed`: clusters on the ballot, in order, with
    their reputation. Empty in a run without scores."""
    return draw(manifest.scoring.voters, seed_of(ballot), cluster, listed)


def duties(manifest: Manifest, ballot: Statement[pb.Ballot], voter: str, listed: Mapping[str, int]) -> frozenset[str]:
    """Return the clusters on the ballot whose committees include this one; cached."""
    return _duties(manifest.scoring.voters, seed_of(ballot), voter, tuple(listed), tuple(accumulate(listed.values())))


@lru_cache(maxsize=64)
def _duties(wanted: int, seed: bytes, voter: str, listed: tuple[str, ...], ends: tuple[int, ...]) -> frozenset[str]:
    return frozenset(name for name in listed if voter in drawn(wanted, seed, name, listed, ends))


def turn(ballot: Statement[pb.Ballot], voter: str, cluster: str) -> bytes:
    """Return the order of a voter's scores, the smallest first. A voter may lack time for all. An author that could choose
    its place, or had the same with all voters, could avoid every score."""
    return sha256(seed_of(ballot), b"turn", voter.encode(), cluster.encode())


def positions(manifest: Manifest, ballot: Statement[pb.Ballot], voter: str, lease: Lease) -> list[int]:
    """Return the positions of a voter's samples for all its scores in a round: some of its lease; fewer if it is short."""
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
    """Opinion of the committee members that voted and measured."""

    votes: Mapping[str, int]
    """Votes of each member."""
    harmed: frozenset[str]
    """Members that found harm."""

    def refuses(self) -> bool:
        """Whether those are too many."""
        measured, harmed = sum(self.votes.values()), sum(self.votes[name] for name in self.harmed)
        return len(self.harmed) > 1 and measured - harmed < THRESHOLD * measured

    def __str__(self) -> str:
        """Return the opinion as a reason; commits contain it, so the sentence may not change."""
        return f"{len(self.harmed)} of the {len(self.votes)} who were drawn to score it and did found that it harms"


def opinions(
    manifest: Manifest,
    ballot: Statement[pb.Ballot],
    listed: Mapping[str, int],
    voters: Iterable[str],
    found: Callable[[str, int, int], bool | None],
) -> dict[str, Opinion]:
    """Return the opinions by cluster on the ballot. `found(voter, index, place)`: whether a voter found harm in the
    contribution of this index, at this place among those it was drawn to score; None: it did not measure it."""
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
