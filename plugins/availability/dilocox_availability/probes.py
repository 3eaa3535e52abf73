"""Availability probes: requests for random shards of peers that should have them. A person sends them by `dilocox shares`.

A node sends those for which the round draws it (protocol/sampling.py), and its vote says what it found."""

import asyncio
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dilocox.node.apply_builder import ApplyBuilder
from dilocox.protocol import sampling
from dilocox.protocol.chain import NamedBy, holders, taken
from dilocox.protocol.checks.availability import Sampled
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.head import Head
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.member_state import MemberState
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox_availability.own_shards import named_by
from dilocox_availability.restoring import Due, Restorer
from dilocox_availability.shards import Code, Named
from dilocox_availability.store import ShareStore

__all__ = ["Asker", "Sample", "Sampler", "askable"]

AGAIN_SECONDS = 3.0
"""Between two looks whom we are to ask, and have not had an answer from in this round."""
SETTLED = 3
"""So many rounds after the one that a commit closed whoever is to keep a share has made it: it is looked for every 2 s, and rounds
may be shorter."""


@dataclass(frozen=True)
class Sample:
    """A share that was drawn, and what came of it."""

    round: int
    blob: bytes
    code: Code
    index: int
    peer: str
    """Who was asked for it."""
    why: str
    """Why that is no answer; empty: it is one."""


class Sampler:
    def __init__(
        self, manifest: Manifest, chain: ChainFile, store: BlobStore, applies: ApplyBuilder, restorer: Restorer, dice: Random
    ) -> None:
        """`dice`: that nobody who is asked can foresee. Raises ConfigError where there is nothing yet to draw from."""
        assert manifest.availability is not None, "the run shares"
        self._manifest, self._chain, self._store, self._applies = manifest, chain, store, applies
        self._restorer, self._dice = restorer, dice
        head = chain.head.round
        found = (chain.commit(number) for number in range(restorer.holders.kept_since(head), head - SETTLED + 1))
        self._commits = [commit for commit in found if commit is not None and commit.body.counted]
        if not self._commits:
            why = f"no round is {SETTLED} rounds old that counted anybody and for whose shares peers have room"
            raise ConfigError(f"{why}: there are no shares to ask for")

    async def draw(self) -> Sample:
        """Raises ConfigError where the rosters of all rounds are too small to share."""
        commit = self._dice.choice(self._commits)
        named = await self._blob_of(commit)
        due = self._restorer.holders.of(NamedBy(commit.body.round), named.blob, named.stage)
        if due.code is None:
            raise ConfigError(f"one peer alone was on the roster of round {commit.body.round}: it shared with nobody")
        place = self._dice.randrange(len(due.peers))
        why = await self._ask(named, due, place, due.code)
        return Sample(commit.body.round, named.blob, due.code, place % due.code.shares, due.peers[place], why)

    async def _blob_of(self, commit: Statement[pb.Commit]) -> Named:
        """One that it names; with the list of what somebody contributed, where that can be had, first."""
        item = self._dice.choice(taken(commit.body))
        try:
            await self._applies.payload_index(item.contribution, holders(commit.body)[item.cluster])
        except RemoteError:
            return Named(item.contribution.leaves, None)
        named = named_by(self._manifest, commit.body, self._store)
        return self._dice.choice([each for each in named if not each.state])

    async def _ask(self, named: Named, due: Due, place: int, code: Code) -> str:
        """Why who stands at this place has not its share; empty: it has."""
        answers = await self._restorer.ask(named.blob, [due.peers[place]], root=due.root)
        if not answers:
            return "it shows no share of it that the commit proves, or cannot be reached"
        (answer,) = answers
        if (answer.share.shares, answer.share.needed, answer.share.index) != (*code, place % code.shares):
            return "it keeps another share than is its own"
        try:
            await self._restorer.try_chunk(answer, self._dice.randrange)
        except RemoteError as error:
            return f"it says that it has its share, and does not send it: {error.detail}"
        return ""


class Us(Protocol):
    """Who takes part here: speaks for our cluster."""

    state: MemberState

    def feed(self, event: Sampled) -> None: ...


class Asker:
    """Asks those whom we are drawn to ask, again until they show the share that was drawn, for as long as the round is open."""

    def __init__(self, us: Us, restorer: Restorer, shares: ShareStore, dice: Random) -> None:
        """`shares`: ours, of which we ask others theirs; `dice`: that nobody else can foresee."""
        self._us, self._restorer, self._shares, self._dice = us, restorer, shares, dice
        self._opened = b""
        """The head of what follows: what is drawn and shown holds for one round."""
        self._drawn: dict[str, services.Share | None] = {}
        """By cluster our own share of the blob of which it is asked for its: drawn once, or who keeps a few would show one in the
        end. None: there is nothing to ask it for."""
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(AGAIN_SECONDS)

    async def look(self) -> None:
        """Ask those who have shown nothing in this round yet: all at once, so that none who is slow has the others wait."""
        state = self._us.state
        if self._opened != state.head.digest:
            self._opened, self._drawn, self._shown = state.head.digest, {}, set()
        due = sampling.due(state.manifest, state.head) if state.on_roster else []
        waiting = [cluster for cluster in sampling.duties(due, state.me) if cluster not in self._shown]
        await asyncio.gather(*(self._sample(cluster, state) for cluster in waiting))

    async def _sample(self, cluster: str, state: MemberState) -> None:
        shown = await self._ask(cluster, state)
        if shown is None or self._us.state.head.digest != state.head.digest:
            return  # nobody was asked, or what it would be told of is over
        if shown:
            self._shown.add(cluster)
        self._us.feed(Sampled(cluster, shown))

    async def _ask(self, cluster: str, state: MemberState) -> bool | None:
        """Whether it shows its share of the blob that we drew; None: there is nothing to ask it for, or nobody can dial it."""
        ours = await asyncio.to_thread(self._draw, cluster, state)
        if ours is None:
            return None
        due, root = await asyncio.to_thread(self._restorer.holders.in_cluster, ours, state.me, cluster)
        if not all([await self._restorer.can_dial(peer) for peer in due]):
            return None
        return await self._shows(ours, due, root)

    def _draw(self, cluster: str, state: MemberState) -> services.Share | None:
        """Once a round, and again where our own time for it is over: it may be over there, too. Blocking."""
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
        """Whether one of a cluster's boxes proves the share that is its own, and sends a chunk that is drawn. Another's proves
        nothing: whoever keeps none could pass that on."""
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
    """Those of our shares of whose blobs a cluster has its own, if it was counted when they were: made since it took its seat, of a
    round of which everybody has room for all (`since`: the first), and so long ago that they are there."""
    rounds = range(max(since, head.roster[cluster].joined), head.round - SETTLED + 1)
    return [share for share in ours if not share.state and share.round in rounds]
