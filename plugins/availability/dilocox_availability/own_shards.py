"""A peer's shares of what the chain's commits name: made while the blob is here, and kept for later.

Nobody sends a share unasked: each machine makes its own from the blob that it fetched to apply the commit.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.chain import taken
from dilocox.protocol.data_root import commit_tree, ways
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.head import Cluster, advance
from dilocox.protocol.leaves import read_leaves
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.tree import Tree
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.rpc import in_thread
from dilocox_availability.shards import Code, Held, Named, code_in, hosts, share_of, worth_keeping
from dilocox_availability.store import ShareStore, make_share, share_bytes, share_root

__all__ = ["Sharing", "named_by"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often it is looked whether blobs are here of which shares are to be made."""


class Listing(NamedTuple):
    """What a commit names that lists blobs of single stages: a state, or the leaves of what it counted."""

    blob: bytes
    place: int | None
    """Of the counted; None: it is a state."""

    @property
    def named(self) -> Named:
        return Named(self.blob, None, self.place is None)


def lists_of(manifest: Manifest, commit: pb.Commit) -> list[Listing]:
    snapshot = commit.state and manifest.snapshot_round(commit.round) == commit.round
    states = [Listing(commit.state, None)] if snapshot else []
    return [*states, *(Listing(item.contribution.leaves, place) for place, item in enumerate(taken(commit)))]


def leaves_in(manifest: Manifest, store: BlobStore, blob: bytes) -> list[pb.Leaf]:
    """None where they are not here, or damaged. Blocking."""
    try:
        return read_leaves(manifest, store.read(blob, limits.LEAVES_BYTES))
    except (FileNotFoundError, RemoteError):
        return []


def named_by(manifest: Manifest, commit: pb.Commit, store: BlobStore) -> Iterator[Named]:
    """What a commit names of which shares are kept, as far as the lists that say it are in the store. Blocking."""
    for listing in lists_of(manifest, commit):
        yield listing.named
        if listing.place is None:
            yield from _states(store, listing.blob)
        else:
            yield from (Named(leaf.digest, leaf.stage) for leaf in leaves_in(manifest, store, listing.blob))


def _states(store: BlobStore, root: bytes) -> list[Named]:
    return [Named(digest, stage, True) for stage, digest in enumerate(store.stage_digests(root))]


class Ours(NamedTuple):
    """A blob of whose shares one is ours to keep."""

    named: Named
    code: Code
    place: int
    """The index of the share."""
    way: Sequence[bytes]
    """From the root over its shares to the commit's data root; none for a state."""


@dataclass
class Pending:
    """What is still to be done of one commit: of most of those that a look passes, nothing."""

    commit: Statement[pb.Commit]
    roster: Mapping[str, Cluster]
    """Of its round."""
    lists: list[Listing]
    """That were not here yet."""
    tree: Tree
    """Of what it counted."""
    blobs: list[Ours] = field(default_factory=list)
    """Of which no share was made yet."""

    def held(self, ours: Ours, size: int) -> Held:
        """`size`: of the blob, bytes."""
        return Held(self.commit.body.round, ours.named.state, ours.code.share_size(size), ours.named.blob)


@dataclass
class Sharing:
    """What we keep for when others are gone."""

    manifest: Manifest
    chain: ChainFile
    store: BlobStore
    shares: ShareStore
    me: str
    oldest: Callable[[], int]
    """The first round whose blobs are kept whole: of older ones no share can be made."""
    _pending: dict[int, Pending] = field(default_factory=dict)
    """By round."""
    _roots: dict[int, bytes] = field(default_factory=dict)
    """Data roots by round: all shares are looked at every other second."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await in_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Make shares of what is here and let go of those whose time is over. Blocking."""
        settings = self.manifest.availability
        assert settings is not None, "the run shares"
        head, most = self.chain.head.round, settings.most_bytes
        self._follow(head)
        kept = {Held(share.round, share.state, share_bytes(share), share.blob) for share in self._named(head)}
        rounds = {held.blob: held.round for held in kept}
        found = {h.blob: (h, ours) for _, each in sorted(self._pending.items()) for h, ours in self._here(each, rounds)}
        keep = worth_keeping(kept | {held for held, _ in found.values()}, head, settings.rounds, most)
        for held in kept:
            if held.blob not in keep:  # first: there is to be room
                self.shares.remove(held.blob)
        made = [share for blob in keep & found.keys() if (share := self._make(*found[blob])) is not None]
        self.shares.add([share for share in made if self._is_named(share)])
        done = (found.keys() - keep) | {share.blob for share in made}  # what is not worth keeping now never will be
        for pending in self._pending.values():
            pending.blobs = [ours for ours in pending.blobs if ours.named.blob not in done]

    def _named(self, head: int) -> list[services.Share]:
        """Ours of rounds that the chain has. What it does not name goes: the owner's word cut it, and it grew again. Those of later
        rounds stay, and take nobody's room: the chain may only be on its way, after chain.db was damaged."""
        named = []
        for share in self.shares.shares():
            if share.round < head and (share.state or share.root == self._data_root(share.round)):
                named.append(share)
            elif share.round < head:
                self.shares.remove(share.blob)
        return named

    def _data_root(self, round: int) -> bytes:
        """Of a closed round's commit."""
        if round not in self._roots:
            commit = self.chain.commit(round)
            assert commit is not None
            self._roots[round] = commit.body.data_root
        return self._roots[round]

    def _follow(self, head: int) -> None:
        """What is to be done of the rounds whose blobs are here: of new ones everything, and so of those that lost a share."""
        first = max(1, self.oldest())
        while self.shares.lost:
            self._pending.pop(self.shares.lost.pop(), None)
        for round in [round for round in self._pending if round < first]:
            del self._pending[round]
        for round in range(first, head):
            if round not in self._pending:
                commit, before = self.chain.commit(round), self.chain.commit(round - 1)
                assert commit is not None
                assert before is not None
                lists, tree = lists_of(self.manifest, commit.body), commit_tree(commit.body)
                self._pending[round] = Pending(commit, advance(self.manifest, before).roster, lists, tree)

    def _here(self, pending: Pending, kept: Mapping[bytes, int]) -> list[tuple[Held, Ours]]:
        """Those of its blobs that are here. Not what is kept for as late a round: states of several rounds may have a stage in
        common. `kept`: rounds by blob."""
        unread, pending.lists = pending.lists, []
        for listing in unread:
            if listed := self._listed(pending, listing):
                pending.blobs += self._ours(pending, listed)
            else:
                pending.lists.append(listing)
        pending.blobs = [each for each in pending.blobs if kept.get(each.named.blob, 0) < pending.commit.body.round]
        found = []
        for ours in pending.blobs:
            with suppress(FileNotFoundError):  # not here, or its time was over this very moment
                found.append((pending.held(ours, self.store.size(ours.named.blob)), ours))
        return found

    def _listed(self, pending: Pending, listing: Listing) -> list[tuple[Named, Sequence[bytes]]]:
        """A list and what it names, with the way of each; nothing where it is not here."""
        if listing.place is None:
            states = _states(self.store, listing.blob)
            return [(named, ()) for named in (listing.named, *states)] if states else []
        leaves = leaves_in(self.manifest, self.store, listing.blob)
        try:
            root = share_root(self.manifest, pending.roster, self.store, listing.blob, None) if leaves else b""
        except FileNotFoundError:
            return []
        if not leaves:
            return []
        named, up = [Named(leaf.digest, leaf.stage) for leaf in leaves], pending.tree.proof(listing.place)
        return [(each, [*way, *up]) for each, way in zip((listing.named, *named), ways(root, leaves), strict=True)]

    def _ours(self, pending: Pending, named: Iterable[tuple[Named, Sequence[bytes]]]) -> Iterator[Ours]:
        for each, way in named:
            peers, code = hosts(pending.roster, each.stage), code_in(self.manifest, pending.roster, each.stage)
            index = share_of(pending.commit.digest, each.blob, peers, self.me, code) if code is not None else None
            if code is not None and index is not None:
                yield Ours(each, code, index, way)

    def _make(self, held: Held, ours: Ours) -> services.Share | None:
        """None: the blob is damaged, or was let go meanwhile."""
        try:
            sound = self.store.sound(held.blob)
            into = self.shares.store
            share = make_share(self.store, held.blob, ours.code, ours.place, into, ours.way) if sound else None
        except FileNotFoundError:
            return None
        if share is not None:
            share.round, share.state = held.round, held.state
        return share

    def _is_named(self, share: services.Share) -> bool:
        """Whether it proves itself by the commit, or is of a state. If not, most who voted have accepted a root that is none, and
        nobody would take it from us."""
        named = share.state or share.root == self._data_root(share.round)
        if not named:
            log.warning("commit %d names no shares of %s that anybody can make", share.round, share.blob.hex()[:8])
            self.shares.drop(share)
        return named
