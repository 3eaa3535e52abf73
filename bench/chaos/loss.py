"""Loss of nodes that a fault did not hit, computed from the chain's rounds and each node's status of every second.

A node that loses nothing takes `rate` steps a second, and a commit counts every step in the end. In a window it may
lose seconds without possible steps, and steps that no commit counted. Both are shown in seconds. Steps that a round did
not count are in the node's error feedback. The samples of its next counted contribution show that it includes them.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.schedule import CLOCK_SECONDS, Fault

__all__ = ["Closed", "Happened", "Price", "Sample", "Verdict", "kept", "misses", "moments", "price", "rate"]

KEPT = 0.99
"""Share of the faultless steps that nodes without a fault must reach."""
KILL_SECONDS = 2.0
"""Largest cost in seconds of `kill -9` of one other node, or of the coordinator."""


@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds, by the worker's clock."""
    steps: int
    """Steps of this worker group."""
    round: int
    """Round of the running phase."""
    step: int
    """Steps of the running phase."""
    on_roster: bool


@dataclass(frozen=True)
class Closed:
    round: int
    at: float
    roster: frozenset[str]
    """Names of nodes whose contributions it could have counted."""
    counted: Mapping[str, int]
    """Inner steps of their phases, by name."""
    settled: Mapping[str, int]
    """Inner steps that it settles, by name: those of this phase, and of earlier phases that no commit had counted."""


@dataclass(frozen=True)
class Happened:
    fault: Fault
    began: float
    ended: float
    """Time of the repair."""


@dataclass(frozen=True)
class Price:
    """Loss of one node between a fault that did not hit it and the next fault."""

    fault: Fault
    node: str
    window: float
    """Seconds."""
    waited: float
    """Seconds without steps; below 0 by as much as the pace wavers."""
    rounds: int
    """Rounds that closed without counting it."""
    uncounted: float
    """Seconds' worth of steps that no commit counts."""

    @property
    def lost(self) -> float:
        return self.waited + self.uncounted


@dataclass(frozen=True)
class Verdict:
    prices: Sequence[Price]
    chains: int
    """Different ones, of which no two are the same run's beginning."""
    orphans: Sequence[str]
    """Processes that outlived their daemon."""
    helps: Sequence[str]
    """Manual repairs, a sentence each."""


def _taken(samples: Sequence[Sample], since: float, until: float, off_roster: bool = False) -> float:
    """Return the steps taken between two times, or with `off_roster` those taken off the roster. A lower count belongs to
    a new worker group."""
    total = 0.0
    for before, after in itertools.pairwise(samples):
        low, high = max(before.at, since), min(after.at, until)
        if low >= high or (off_roster and before.on_roster):
            continue
        steps = after.steps - before.steps if after.steps >= before.steps else after.steps
        total += steps * (high - low) / (after.at - before.at)
    return total


def moments(said: Sequence[float], lasted: Sequence[float]) -> list[float]:
    """Return the times at which rounds closed, from the coordinator's wall clock and each round's length. That clock may
    have been stepped. A round that a damaged log restarted was open for longer than it reports."""
    found = [said[0]]
    for wall, seconds in zip(said[1:], lasted[1:], strict=True):
        at = found[-1] + seconds
        found.append(max(at, wall) if abs(wall - at) < CLOCK_SECONDS / 2 else at)
    return found


def rate(samples: Sequence[Sample], since: float, until: float) -> float:
    """Return the steps a second."""
    return _taken(samples, since, until) / (until - since)


def hit(node: str, happened: Iterable[Happened], rounds: Sequence[Closed]) -> list[tuple[float, float]]:
    """Return the spans in which a node suffered from its own faults. A span ends with the first round that opened after
    the repair and counts the node."""
    spans = []
    for each in happened:
        if node in each.fault.targets:
            later = (
                after.at for before, after in itertools.pairwise(rounds) if before.at >= each.ended and node in after.counted
            )
            spans.append((each.began, next(later, float("inf"))))
    return spans


def never_counted(node: str, samples: Sequence[Sample], rounds: Iterable[Closed]) -> dict[int, float]:
    """Return the steps of the node's phases that no commit settled, by round. It omits rounds in which the node was
    counted, or absent."""
    open_rounds: dict[int, int] = {}
    found: dict[int, float] = {}
    for each in rounds:
        if node in each.counted:
            later = each.settled[node] - each.counted[node]
            share = max(0.0, 1 - later / max(1, sum(open_rounds.values())))
            found |= {number: share * steps for number, steps in open_rounds.items()}
            open_rounds.clear()
        elif node in each.roster:
            open_rounds[each.round] = max((s.step for s in samples if s.round == each.round), default=0)
        else:  # it lost its seat and its lease
            found |= open_rounds
            open_rounds.clear()
    return found | open_rounds


def price(
    node: str, rate: float, samples: Sequence[Sample], happened: Sequence[Happened], rounds: Sequence[Closed], end: float
) -> list[Price]:
    """Return the loss for every fault that hit another member, while the node did not suffer from its own. `end`: of the
    last window."""
    suffering, prices, never = hit(node, happened, rounds), [], never_counted(node, samples, rounds)
    edges = [*(each.began for each in happened), end]
    for each, (since, until) in zip(happened, itertools.pairwise(edges), strict=True):
        if any(since < to and start < until for start, to in suffering):
            continue
        missed = [c.round for c in rounds if since <= c.at < until and node in c.roster and node not in c.counted]
        uncounted = (sum(never[number] for number in missed) + _taken(samples, since, until, off_roster=True)) / rate
        waited = until - since - _taken(samples, since, until) / rate
        prices.append(Price(each.fault, node, until - since, waited, len(missed), uncounted))
    return prices


def kept(prices: Sequence[Price]) -> float:
    """Return the share of the faultless steps."""
    return 1 - sum(each.lost for each in prices) / max(1e-9, sum(each.window for each in prices))


def misses(verdict: Verdict) -> list[str]:
    """Return the missed bars, a sentence each."""
    found = list(verdict.helps)
    if verdict.chains != 1:
        found.append(f"{verdict.chains} chains")
    if verdict.orphans:
        found.append(f"these outlived their daemon: {'; '.join(verdict.orphans)}")
    if kept(verdict.prices) < KEPT:
        found.append(f"who was not hit kept {kept(verdict.prices):.2%} of the faultless tokens, less than {KEPT:.0%}")
    for each in verdict.prices:
        alone = each.fault.kind == "kill" and len(each.fault.targets) == 1
        if alone and (each.rounds or each.lost >= KILL_SECONDS):
            found.append(f"kill -9 of {each.fault.targets[0]} cost {each.node} {each.rounds} rounds and {each.lost:.1f} s")
    return found
