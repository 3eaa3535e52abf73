"""Whether peers have the shares that they should keep: some are drawn, and asked for."""

from dataclasses import dataclass
from random import Random

from dilocox.node.exchange import Exchange
from dilocox.node.restoring import Due, Restorer
from dilocox.node.sharing import named_by
from dilocox.protocol.chain import holders, taken
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.shares import Code, Named, NamedBy
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile

__all__ = ["Sample", "Sampler"]


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
        found = (chain.commit(number) for number in range(max(1, head - manifest.availability.rounds), head))
        self._commits = [commit for commit in found if commit is not None and commit.body.counted]
        if not self._commits:
            raise ConfigError("no round has counted anybody yet: there are no shares to ask for")

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
