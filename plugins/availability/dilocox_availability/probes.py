"""Availability probes: requests for random shards of peers that should have them. A person sends them by `dilocox shares`.

A node sends those for which the round draws it (protocol/checks/availability_rules.py), and its vote reports the results.
"""

import asyncio
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dilocox.node.exchange.apply_builder import ApplyBuilder
from dilocox.protocol.checks import availability_rules
from dilocox.protocol.checks.availability import Sampled
from dilocox.protocol.consensus.chain import NamedBy, holders, taken
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox_availability.own_shards import named_by
from dilocox_availability.restoring import Due, Restorer
from dilocox_availability.shards import Code, Named
from dilocox_availability.store import ShareStore

__all__ = ["Asker", "Sample", "Sampler", "askable"]

AGAIN_SECONDS = 3.0
"""Seconds between two looks for clusters that we are to probe, and that have not answered in this round."""
SETTLED = 3
"""Rounds after which every peer has made its shards of what a commit names. Peers look for such blobs every 2 s, and rounds
may be shorter."""


@dataclass(frozen=True)
class Sample:
    """Shard that was drawn, and its answer."""

    round: int
    blob: bytes
    code: Code
    index: int
    peer: str
    """Peer that was asked for it."""
    why: str
    """Reason why that is no answer; empty: it is one."""


class Sampler:
    def __init__(
        self, manifest: Manifest, chain: ChainFile, store: BlobStore, applies: ApplyBuilder, restorer: Restorer, dice: Random
    ) -> None:
        """Store the parts. `dice`: a source that no probed peer can foresee. Raises ConfigError if there is nothing to
        draw from yet."""
        assert manifest.availability is not None, "the run shares"
        self._manifest, self._chain, self._store, self._applies = manifest, chain, store, applies
        self._restorer, self._dice = restorer, dice
        head = chain.head.round
        found = (chain.commit(number) for number in range(restorer.holders.kept_since(head), head - SETTLED + 1))
        self._commits = [commit for commit in found if commit is not None and commit.body.counted]
        if not self._commits:
            why = f"no round with counted clusters is {SETTLED} rounds old and has stored shards"
            raise ConfigError(f"{why}: no shards to probe")

    async def draw(self) -> Sample:
        """Draw a shard and request it. Raises ConfigError if the rosters of all rounds are too small for shards."""
        commit = self._dice.choice(self._commits)
        named = await self._blob_of(commit)
        due = self._restorer.holders.of(NamedBy(commit.body.round), named.blob, named.stage)
        if due.code is None:
            raise ConfigError(f"the roster of round {commit.body.round} had one peer, which made no shards")
        place = self._dice.randrange(len(due.peers))
        why = await self._ask(named, due, place, due.code)
        return Sample(commit.body.round, named.blob, due.code, place % due.code.shares, due.peers[place], why)

    async def _blob_of(self, commit: Statement[pb.Commit]) -> Named:
        """Return a blob that the commit counted. A payload needs its index, which is downloaded first; without it, return the
        index."""
        item = self._dice.choice(taken(commit.body))
        try:
            await self._applies.payload_index(item.contribution, holders(commit.body)[item.cluster])
        except RemoteError:
            return Named(item.contribution.leaves, None)
        named = named_by(self._manifest, commit.body, self._store)
        return self._dice.choice([each for each in named if not each.state])

    async def _ask(self, named: Named, due: Due, place: int, code: Code) -> str:
        """Return why the peer at this place does not have its shard; empty: it has."""
        answers = await self._restorer.ask(named.blob, [due.peers[place]], root=due.root)
        if not answers:
            return "it has no shard that the commit proves, or is not reachable"
        (answer,) = answers
        if (answer.share.shares, answer.share.needed, answer.share.index) != (*code, place % code.shares):
            return "it stores the shard of another peer"
        try:
            await self._restorer.try_chunk(answer, self._dice.randrange)
        except RemoteError as error:
            return f"it offers its shard, but does not send it: {error.detail}"
        return ""


class Us(Protocol):
    """Member machine of our cluster."""

    state: MemberState

    def feed(self, event: Sampled) -> None: ...


class Asker:
    """Prober of the clusters for which we are drawn. It asks again until they show the drawn shard, while the round is open."""

    def __init__(self, us: Us, restorer: Restorer, shares: ShareStore, dice: Random) -> None:
        """Store the parts. `shares`: our shards, which decide the requests; `dice`: a source that no other peer can
        foresee."""
        self._us, self._restorer, self._shares, self._dice = us, restorer, shares, dice
        self._opened = b""
        """Head of the round in which the fields below are valid."""
        self._drawn: dict[str, services.Share | None] = {}
        """Our shard of the blob that each cluster is probed for, by cluster; None: there is none. It is drawn once a
        round; otherwise a cluster with few shards would at last prove one."""
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await self.probe_once()
            await asyncio.sleep(AGAIN_SECONDS)

    async def probe_once(self) -> None:
        """Probe the clusters that have shown nothing in this round yet, all at once, so that a slow one delays no other."""
        state = self._us.state
        if self._opened != state.head.digest:
            self._opened, self._drawn, self._shown = state.head.digest, {}, set()
        due = availability_rules.due(state.manifest, state.head) if state.on_roster else []
        waiting = [cluster for cluster in availability_rules.duties(due, state.me) if cluster not in self._shown]
        await asyncio.gather(*(self._sample(cluster, state) for cluster in waiting))

    async def _sample(self, cluster: str, state: MemberState) -> None:
        shown = await self._ask(cluster, state)
        if shown is None or self._us.state.head.digest != state.head.digest:
            return  # no peer was asked, or the round is over
        if shown:
            self._shown.add(cluster)
        self._us.feed(Sampled(cluster, shown))

    async def _ask(self, cluster: str, state: MemberState) -> bool | None:
        """Return whether a cluster shows its shard of the drawn blob; None: there is no blob to ask for, or a host is not
        reachable."""
        ours = await asyncio.to_thread(self._draw, cluster, state)
        if ours is None:
            return None
        due, root = await asyncio.to_thread(self._restorer.holders.in_cluster, ours, state.me, cluster)
        if not all([await self._restorer.can_dial(peer) for peer in due]):
            return None
        return await self._shows(ours, due, root)

    def _draw(self, cluster: str, state: MemberState) -> services.Share | None:
        """Draw one of our shards once a round, and again if ours was deleted: the cluster may have deleted its own, too.
        Blocking."""
        before = self._drawn.get(cluster)
        if cluster not in self._drawn or (before is not None and before.blob not in self._shares):
            since = self._restorer.holders.kept_since(state.head.round)
            ours = askable(state.head, cluster, since, self._shares.shares())
            self._dice.shuffle(ours)
            self._drawn[cluster] = next((each for each in ours if self._is_due(each, state.me, cluster)), None)
        return self._drawn[cluster]

    def _is_due(self, ours: services.Share, me: str, cluster: str) -> bool:
        try:
            return bool(self._restorer.holders.in_cluster(ours, me, cluster)[0])
        except RemoteError:
            return False

    async def _shows(self, ours: services.Share, due: Mapping[str, Container[int]], root: bytes) -> bool:
        """Return whether a host of a cluster proves its own shard and sends a random chunk. A shard of another peer proves
        nothing: a host without shards could pass it on."""
        for answer in await self._restorer.ask(ours.blob, due, root=root):
            share = answer.share
            if (share.shares, share.needed) != (ours.shares, ours.needed) or share.index not in due[answer.peer]:
                continue
            try:
                await self._restorer.try_chunk(answer, self._dice.randrange)
            except RemoteError:
                continue
            return True
        return False


def askable(head: Head, cluster: str, since: int, ours: Iterable[services.Share]) -> list[services.Share]:
    """Return those of our shards for whose blobs we may probe a cluster, if it was counted. They were made since it joined
    the roster, in rounds for which every peer has room (`since`: the first), and long enough ago."""
    rounds = range(max(since, head.roster[cluster].joined), head.round - SETTLED + 1)
    return [share for share in ours if not share.state and share.round in rounds]
