"""Events of the round machine, from the states before and after an input."""

from collections.abc import Iterable, Mapping, Sequence

from dilocox.protocol import limits
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import reason_name
from dilocox.protocol.events import (
    Arrival,
    BallotOpened,
    Claimed,
    Event,
    Heard,
    Leaving,
    NobodyCounted,
    NotHeard,
    RosterChanged,
    RoundClosed,
    RunFinished,
    StatementRefused,
    missed,
)
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.round_machine import Moment, RoundState

__all__ = ["RoundEvents"]


class RoundEvents:
    """Events of one coordinator. It remembers the arrival of each cluster's contribution and vote in the open round.
    Events that unknown peers can cause are limited to `limits.STRANGERS_TOLD` a round: they must not displace other
    events."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._contributed: dict[str, float] = {}
        self._voted: dict[str, float] = {}
        self._strangers_told = 0

    def saw(self, before: RoundState, after: RoundState, moment: Moment) -> list[Event]:
        """Two states of one round, and when the input between them came."""
        if after is before:
            return []
        old, new, number = before.gathered, after.gathered, after.head.round
        seconds = max(0.0, moment.seconds - after.began_at)
        _note(self._contributed, new.contributions, seconds)
        _note(self._voted, new.receipts, seconds)
        told: list[Event] = []
        for item in new.refusals[len(old.refusals) :]:
            told.append(StatementRefused(number, item.peer, reason_name(item.reason), item.detail))
        roster = after.head.roster.keys()
        if new.claims is not old.claims:
            told += self._few(Claimed(number, name) for name in sorted(new.claims.keys() - old.claims.keys() - roster))
        if new.leaves is not old.leaves:
            told += [Leaving(number, name) for name in sorted((new.leaves.keys() - old.leaves.keys()) & roster)]
        if after.absent is not before.absent:
            told += [NotHeard(number, name) for name in sorted((after.absent - before.absent) & roster)]
            told += [Heard(number, name) for name in sorted((before.absent - after.absent) & roster)]
        if old.ballot is None and new.ballot is not None:
            told.append(BallotOpened(number, len(new.ballot.body.contributions), seconds, _latest(self._contributed)))
        return told

    def _few(self, claims: Iterable[Event]) -> list[Event]:
        told = list(claims)[: limits.STRANGERS_TOLD - self._strangers_told]
        self._strangers_told += len(told)
        return told

    def closed(self, before: Head, commit: pb.Commit, after: Head) -> list[Event]:
        """A commit, and the heads before and after it."""
        without, not_counted = missed(commit), len({item.peer for item in commit.excluded})
        seconds = commit.open_ms / 1000
        told: list[Event] = [
            RoundClosed(before.round, len(commit.counted), not_counted, seconds, without, _latest(self._voted))
        ]
        told += NobodyCounted.by(commit)
        joined, left = sorted(after.roster.keys() - before.roster.keys()), sorted(before.roster.keys() - after.roster.keys())
        if joined or left:
            most = limits.MISSED_TOLD
            told.append(RosterChanged(after.round, len(after.roster), tuple(joined[:most]), tuple(left[:most])))
        if after.finished:
            told.append(RunFinished(commit.trained))
        self._begin()
        return told


def _note(known: dict[str, float], gathered: Mapping[str, Sequence[object]], seconds: float) -> None:
    if len(known) != len(gathered):
        known.update(dict.fromkeys(gathered.keys() - known.keys(), seconds))


def _latest(arrivals: Mapping[str, float]) -> tuple[Arrival, ...]:
    last = sorted(arrivals.items(), key=lambda item: (item[1], item[0]))[-limits.ARRIVALS_TOLD :]
    return tuple(Arrival(name, round(seconds, 3)) for name, seconds in last)
