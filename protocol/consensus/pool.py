"""Pool of statements accepted since the last commit: sets that do not depend on the order of arrival.

A *slot* contains what a signer may state once: claims and departures by serial, contribution and vote by round, state
report by round and kind. The pool stores two different statements of one slot, because together they prove
equivocation; neither counts then.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement

__all__ = ["Slot", "StatementPool", "bodies", "holds", "put", "put_newest", "single"]

Key = TypeVar("Key")
Slot = tuple[Statement[Any], ...]
"""One statement, or two that prove equivocation, by digest."""


@dataclass(frozen=True)
class StatementPool:
    claims: Mapping[str, Slot] = field(default_factory=dict)
    """Claims by peer: the newest serial."""
    clusters: Mapping[str, Slot] = field(default_factory=dict)
    """Layouts by lead host: the newest serial."""
    leaves: Mapping[str, Slot] = field(default_factory=dict)
    """Departures by peer: the newest serial."""
    contributions: Mapping[str, Slot] = field(default_factory=dict)
    """Contributions by cluster."""
    ballot: Statement[pb.Ballot] | None = None
    voters: tuple[str, ...] = ()
    """Clusters in ballot order, as the ballot was judged: what comes later changes none of them."""
    receipts: Mapping[str, Slot] = field(default_factory=dict)
    """Votes by cluster."""
    reports: Mapping[tuple[str, bool], Slot] = field(default_factory=dict)
    """State reports, by cluster and by whether they follow a replay."""
    attested: Mapping[str, pb.Attestation] = field(default_factory=dict)
    """The coordinator's verdicts since the last commit, by peer."""
    refusals: tuple[pb.Exclusion, ...] = ()
    """The coordinator's notes on rejected statements and absent peers; nobody can verify them."""

    def claiming(self) -> dict[str, Statement[pb.Claim]]:
        """Return valid claims by peer: no departure of the same peer is newer."""
        claims = {peer: claim for peer, slot in self.claims.items() if (claim := single(slot))}
        leaves = {peer: slot[0].body.serial for peer, slot in self.leaves.items()}
        return {peer: claim for peer, claim in claims.items() if claim.body.serial > leaves.get(peer, -1)}

    def leaving(self) -> frozenset[str]:
        """Peers whose newest wish is to leave."""
        serials = {peer: slot[0].body.serial for peer, slot in self.claims.items()}
        return frozenset(peer for peer, slot in self.leaves.items() if slot[0].body.serial >= serials.get(peer, -1))

    def without(self, strangers: Container[str]) -> "StatementPool":
        """Return the pool without claims, layouts and departures of these unknown peers. None of them is on the roster."""

        def kept(slots: Mapping[str, Slot]) -> Mapping[str, Slot]:
            return {peer: slot for peer, slot in slots.items() if peer not in strangers}

        return replace(self, claims=kept(self.claims), clusters=kept(self.clusters), leaves=kept(self.leaves))

    def listed(self) -> tuple[str, ...]:
        """Clusters in ballot order; empty without a ballot."""
        return self.voters if self.ballot else ()


def single(slot: Slot | None) -> Statement[Any] | None:
    """The slot's statement; None where there is none, or two."""
    return slot[0] if slot and len(slot) == 1 else None


def bodies(gathered: StatementPool) -> dict[str, pb.Receipt]:
    """Return the votes of clusters on the ballot that signed one vote alone, in the ballot's order."""
    return {name: vote.body for name in gathered.listed() if (vote := single(gathered.receipts.get(name)))}


def holds(slot: Slot | None, statement: Statement[Any]) -> bool:
    return any(known.digest == statement.digest for known in slot or ())


def put(slots: Mapping[Key, Slot], key: Key, statement: Statement[Any], pinned: bytes = b"") -> dict[Key, Slot] | None:
    """Return the slots with the statement, or None if nothing changes. Of three statements the two smallest digests stay;
    `pinned` always stays."""
    slot = slots.get(key, ())
    if holds(slot, statement):
        return None
    kept = tuple(sorted((*slot, statement), key=lambda each: (each.digest != pinned, each.digest))[:2])
    ordered = tuple(sorted(kept, key=lambda each: each.digest))
    return None if ordered == slot else {**slots, key: ordered}


def put_newest(slots: Mapping[str, Slot], statement: Statement[Any]) -> dict[str, Slot] | None:
    """`put` among statements with a serial: a newer serial replaces the slot, an older one changes nothing."""
    slot = slots.get(statement.peer, ())
    if not slot or slot[0].body.serial < statement.body.serial:
        return {**slots, statement.peer: (statement,)}
    if slot[0].body.serial > statement.body.serial:
        return None
    return put(slots, statement.peer, statement)
