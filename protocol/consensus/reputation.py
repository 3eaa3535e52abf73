"""Reputation: what an identity has earned, in rounds. It weights votes, draws, medians and the work.

In an open run identities are free, so a new one has little weight: a hundred of them outvote no cluster before their
work has been counted for as long. In a run with an allow-list the owner names all clusters, and all are equal.

    takes a seat in the genesis commit        as many rounds as there are to earn: at the beginning all stand equal, or, where the
                                              manifest names founders (admission.allow of an open run), those
    takes a seat later                        a sixteenth of them, or what is left of what it had
    counted                                   one more
    not counted while others are, or away     one less, down to a newcomer's
    counted, without its shares (sampling.py) a quarter of all less, down to a newcomer's
    refused for what it did                   a quarter of all less
    signed two different things for one slot  one is left

No cluster has more weight in a vote than all others together: one cluster with a broken link, or a faulty one, cannot
stop a run.

Only commits that count a cluster change it. It follows from the chain alone, so every peer computes the same.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest

__all__ = ["Record", "after", "by_standing", "capped", "excess", "newcomer", "say", "share", "total"]

NEWCOMER_SHARE = 16
"""A newcomer has one of so many parts of what there is to earn …"""
REFUSAL_SHARE = 4
"""Divisor of the loss for a rejected contribution."""
NOBODYS_FAULT = frozenset(
    {
        pb.REASON_ABSENT,
        pb.REASON_LATE,
        pb.REASON_DID_NOT_VOTE,
        pb.REASON_UNAVAILABLE,
        pb.REASON_TOO_FEW_ACCEPTS,
        pb.REASON_TOO_FEW_CLUSTERS,
        pb.REASON_WRONG_BASE,
        pb.REASON_COPIED,
        pb.REASON_LEFT,
    }
)
"""Machines and lines that fail, and what a thief could bring upon the author: no work that counts, and nothing worse."""


class Record(NamedTuple):
    """Record of an identity's work, from the chain."""

    earned: int
    """Reputation in rounds; 1 where all are equal."""
    counted: int = 0
    """Rounds."""
    refused: int = 0
    """Contributions rejected for their effect."""
    scored: int = 0
    """Counted and rejected contributions whose effect a committee measured."""
    audited: int = 0
    """Audits of its work with a reported result."""
    lacking: int = 0
    """Rounds in which probes found a shard missing that it should store."""


def newcomer(manifest: Manifest) -> Record:
    return Record(max(1, manifest.standing.rounds // NEWCOMER_SHARE))


def say(manifest: Manifest, standings: Mapping[str, Record], name: str) -> int:
    """Return the voting weight of an identity: at least 1."""
    return (standings.get(name) or newcomer(manifest)).earned if manifest.standing.rounds else 1


def share(manifest: Manifest, standings: Mapping[str, Record], name: str) -> float:
    """Return the earned fraction of the full reputation; 1 where all are equal."""
    return say(manifest, standings, name) / max(1, manifest.standing.rounds)


def by_standing(manifest: Manifest, standings: Mapping[str, Record], names: Iterable[str]) -> dict[str, int]:
    """`say` of each."""
    return {name: say(manifest, standings, name) for name in names}


def total(manifest: Manifest, standings: Mapping[str, Record], names: Iterable[str]) -> int:
    """Return the sum of voting weights."""
    return sum(say(manifest, standings, name) for name in names)


def capped(says: Mapping[str, int]) -> dict[str, int]:
    """Return the weights, with none above all others together; a single one stays."""
    everybody = sum(says.values())
    return {name: weight - excess(weight, everybody) for name, weight in says.items()}


def excess(weight: int, everybody: int) -> int:
    """Return by how much one weight exceeds all others together; 0 for a single one. `everybody`: their sum, including it."""
    return max(0, 2 * weight - everybody) if everybody > weight else 0


def after(
    manifest: Manifest,
    standings: Mapping[str, Record],
    counted: Collection[str],
    excluded: Mapping[str, pb.Reason],
    records: Mapping[str, Collection[str]],
    penalized: Collection[str],
    seated: Collection[str],
    genesis: bool,
) -> dict[str, Record]:
    """Return the records by cluster after a commit: of all seated clusters, and of departed ones with more than a
    newcomer's. `excluded`: reasons why roster clusters do not count; `records`: by field of a record, clusters whose
    field counts one more; `penalized`: clusters that count and still lose reputation."""
    founders = set(manifest.admission.allow or seated) if genesis else set[str]()
    full, fresh = Record(max(1, manifest.standing.rounds)), newcomer(manifest)
    known = {**{name: full if name in founders else fresh for name in seated}, **standings}
    if counted:
        known = {
            name: _after_a_round(manifest, record, name in counted, excluded.get(name), name in penalized)
            for name, record in known.items()
        }
        for field, names in records.items():
            more = {name: known[name]._replace(**{field: getattr(known[name], field) + 1}) for name in names if name in known}
            known.update(more)
    away = [name for name, record in known.items() if name not in seated and record.earned > newcomer(manifest).earned]
    remembered = sorted(away, key=lambda name: (-known[name].earned, name))[: limits.AWAY]
    return {name: known[name] for name in sorted({*seated, *remembered})}


def _after_a_round(manifest: Manifest, before: Record, counted: bool, why: pb.Reason | None, penalized: bool) -> Record:
    refused = why is not None and why not in NOBODYS_FAULT
    record = before._replace(counted=before.counted + counted, refused=before.refused + refused)
    most = manifest.standing.rounds
    if not most:
        return record
    if counted and penalized:  # probed in one round of eight: a round's worth would be earned again before the next probe
        return record._replace(earned=_down(manifest, record.earned, max(1, most // REFUSAL_SHARE)))
    if counted:
        return record._replace(earned=min(most, record.earned + 1))
    if why == pb.REASON_EQUIVOCATION:
        return record._replace(earned=1)
    if refused:
        return record._replace(earned=max(1, record.earned - max(1, most // REFUSAL_SHARE)))
    return record._replace(earned=_down(manifest, record.earned, 1))


def _down(manifest: Manifest, earned: int, rounds: int) -> int:
    """So many less, but not below a newcomer's."""
    return max(min(earned, newcomer(manifest).earned), earned - rounds)
