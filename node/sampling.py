"""Whether peers have the shares that they should keep: some are drawn, and asked for. A person asks by `dilocox shares`; a node is
drawn to ask (protocol/sampling.py), and its receipt says what it found."""

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dilocox.node.exchange import Exchange
from dilocox.node.restoring import Due, Restorer
from dilocox.node.sharing import named_by
from dilocox.protocol import sampling
from dilocox.protocol.chain import holders, taken
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.facts import Sampled
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.member_state import MemberState
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.shares import Code, Named, NamedBy
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.shares import ShareStore

__all__ = ["Asker", "Sample", "Sampler"]

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
        self, manifest: Manifest, chain: ChainFile, store: BlobStore, exchange: Exchange, restorer: Restorer, dice: Random
    ) -> None:
        """`dice`: that nobody who is asked can foresee. Raises ConfigError where there is nothing yet to draw from."""
        assert manifest.availability is not None, "the run shares"
        self._manifest, self._chain, self._store, self._exchange = manifest, chain, store, exchange
        self._restorer, self._dice = restorer, dice
        head = chain.head.round
        found = (chain.commit(number) for number in range(max(1, head - manifest.availability.rounds), head - SETTLED + 1))
        self._commits = [commit for commit in found if commit is not None and commit.body.counted]
        if not self._commits:
            raise ConfigError(f"no round has counted anybody yet, {SETTLED} rounds ago: there are no shares to ask for")

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
            await self._exchange.leaves(item.contribution, holders(commit.body)[item.cluster])
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
    """Asks those whom we are drawn to ask, again until they show a share, for as long as the round is open."""

    def __init__(self, us: Us, restorer: Restorer, shares: ShareStore, dice: Random) -> None:
        """`shares`: ours, of which we ask others theirs; `dice`: that nobody else can foresee."""
        self._us, self._restorer, self._shares, self._dice = us, restorer, shares, dice
        self._shown: tuple[bytes, set[str]] = b"", set()
        """In the round that this head opened."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(AGAIN_SECONDS)

    async def look(self) -> None:
        """Ask those who have shown nothing in this round yet."""
        state = self._us.state
        if self._shown[0] != state.head.digest:
            self._shown = state.head.digest, set()
        due = sampling.due(state.manifest, state.head) if state.on_roster else []
        for cluster in sampling.duties(due, state.me):
            if cluster in self._shown[1] or (shown := await self._ask(cluster, state.head.round)) is None:
                continue
            if self._us.state.head.digest != state.head.digest:
                return  # what it would be told of is over
            if shown:
                self._shown[1].add(cluster)
            self._us.feed(Sampled(cluster, shown))

    async def _ask(self, cluster: str, round: int) -> bool | None:
        """Whether it shows a share of a blob of which we keep one; None: there is nothing to ask it for, or nobody can dial it."""
        kept = await asyncio.to_thread(self._shares.shares)
        ours = [share for share in kept if not share.state and share.round + SETTLED <= round]
        self._dice.shuffle(ours)
        for share in ours:
            try:
                peers, root = await asyncio.to_thread(self._restorer.holders.in_cluster, share.round, cluster)
            except RemoteError:
                continue
            dialled = [peer for peer in peers if await self._restorer.can_dial(peer)]
            if not dialled or len(dialled) < len(peers):
                continue
            return await self._shows(share.blob, dialled, root)
        return None

    async def _shows(self, blob: bytes, peers: list[str], root: bytes) -> bool:
        """Whether one of a cluster's boxes proves a share of it, and sends a chunk that is drawn."""
        for answer in await self._restorer.ask(blob, peers, root=root):
            try:
                await self._restorer.try_chunk(answer, self._dice.randrange)
            except RemoteError:
                continue
            return True
        return False
