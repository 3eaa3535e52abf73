"""Availability probes: drawn clusters test whether a cluster has the erasure shards that it should store.

In a run with availability, each round some clusters are probed for a shard, each by several others. The commit that
opened the round draws them by reputation. The prober draws the shard, once for the round, so no other peer can know it.
It chooses among blobs of which it stores a shard itself and for which the cluster was counted: shards without space on
any disk are not requested. The shard must be the cluster's own. The plugin dilocox-availability sends the probes.

    commit t - 1 opens round t     some clusters of its roster, and who asks each of them
    round t                        they ask, and again where they get no proof and no chunk
    receipts of round t            whom they found without
    commit t                       two thirds of what was drawn, and never one alone, found a cluster without, and it contributed in
                                   this round: its standing goes down by a quarter of what there is to earn, to a newcomer's at most

Heartbeats would not work: they are in no commit, and reputation follows from the chain alone. A cluster that is gone is
absent, and no more. Unreachable clusters are not probed.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dilocox.protocol import limits
from dilocox.protocol.consensus import reputation
from dilocox.protocol.consensus.committees import draw
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest

__all__ = ["Sampled", "due", "duties", "finding_fault", "lacking", "told"]

PART = 8
"""One of so many clusters is asked in a round, and at least one."""


SAMPLERS = 5
"""Clusters, drawn by standing, that ask a cluster whether it has its shards: all others where they are fewer."""


@dataclass(frozen=True)
class Sampled:
    """A cluster that is asked in a round."""

    cluster: str
    samplers: Mapping[str, int]
    """Drawn probers, with their number of votes."""


def due(manifest: Manifest, head: Head) -> Sequence[Sampled]:
    """Return the clusters that are asked in the round that this head opens; none in a run without availability."""
    if manifest.availability is None or len(head.roster) < 2:
        return ()
    says = reputation.capped(reputation.by_standing(manifest, head.standings, sorted(head.roster)))
    return _drawn(sha256(b"dilocox samples", head.digest), tuple(says.items()))


@lru_cache(maxsize=8)
def _drawn(seed: bytes, says: tuple[tuple[str, int], ...]) -> Sequence[Sampled]:
    """Return the drawn probes. Votes with probes need it again, so it is cached."""
    asked = sorted((name for name, _ in says), key=lambda name: sha256(seed, name.encode()))[: max(1, len(says) // PART)]
    return tuple(Sampled(name, draw(SAMPLERS, seed, name, dict(says))) for name in asked)


def duties(sampled: Iterable[Sampled], me: str) -> list[str]:
    """Return the clusters that this one probes: no more than a vote can report."""
    return [each.cluster for each in sampled if me in each.samplers][: limits.SAMPLES_TOLD]


def told(sampled: Sequence[Sampled], me: str, without: Container[str]) -> list[int]:
    """Return the indices for our vote."""
    ours = set(duties(sampled, me))
    return [index for index, each in enumerate(sampled) if each.cluster in ours and each.cluster in without]


def finding_fault(sampled: Sequence[Sampled], voter: str, said: Sequence[int]) -> str:
    """Return what is wrong with the probes in a vote; empty: nothing."""
    if any(index >= len(sampled) or voter not in sampled[index].samplers for index in said):
        return "it reports a probe that it was not drawn for"
    return ""


def lacking(sampled: Sequence[Sampled], receipts: Mapping[str, pb.Receipt], here: Container[str]) -> frozenset[str]:
    """Clusters that were found without their shares. `here`: who contributed in this round."""
    found = set()
    for index, each in enumerate(sampled):
        against = [name for name in each.samplers if name in receipts and index in receipts[name].lacking]
        if each.cluster in here and len(against) > 1 and 3 * votes(each, against) >= 2 * votes(each, each.samplers):
            found.add(each.cluster)
    return frozenset(found)


def votes(each: Sampled, names: Iterable[str]) -> int:
    return sum(each.samplers[name] for name in names)
