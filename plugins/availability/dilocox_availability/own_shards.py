"""Loop that makes this peer's shards of what commits name, while the blobs are here, and deletes those whose time is over.

No peer sends a shard unasked: each host makes its own from the blob that it downloaded to apply the commit.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from dilocox.protocol import limits
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.consensus.head import Cluster, advance
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload.data_root import commit_tree, ways
from dilocox.protocol.payload.merkle import Tree
from dilocox.protocol.payload.payload_index import read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.net.rpc import in_thread
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox_availability.shards import Code, Held, Named, code_in, hosts, share_of, worth_keeping
from dilocox_availability.store import ShareStore, make_share, share_bytes, share_root

__all__ = ["Sharing", "named_by"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two looks for blobs of which shards are to be made."""


class Listing(NamedTuple):
    """Blob of a commit that lists blobs of single stages: a state, or the payload index of a counted contribution."""

    blob: bytes
    place: int | None
    """Position among the counted; None: it is a state."""

    @property
    def named(self) -> Named:
        return Named(self.blob, None, self.place is None)


def lists_of(manifest: Manifest, commit: pb.Commit) -> list[Listing]:
    snapshot = commit.state and manifest.snapshot_round(commit.round) == commit.round
    states = [Listing(commit.state, None)] if snapshot else []
    return [*states, *(Listing(item.contribution.leaves, place) for place, item in enumerate(taken(commit)))]


def leaves_in(manifest: Manifest, store: BlobStore, blob: bytes) -> list[pb.Leaf]:
    """Return the entries of a payload index; none if it is not here, or damaged. Blocking."""
    try:
        return read_leaves(manifest, store.read(blob, limits.LEAVES_BYTES))
    except (FileNotFoundError, RemoteError):
        return []


def named_by(manifest: Manifest, commit: pb.Commit, store: BlobStore) -> Iterator[Named]:
    """Return the blobs of a commit of which peers store shards, as far as the store has the lists that name them. Blocking."""
    for listing in lists_of(manifest, commit):
        yield listing.named
        if listing.place is None:
            yield from _states(store, listing.blob)
        else:
            yield from (Named(leaf.digest, leaf.stage) for leaf in leaves_in(manifest, store, listing.blob))


def _states(store: BlobStore, root: bytes) -> list[Named]:
    return [Named(digest, stage, True) for stage, digest in enumerate(store.stage_digests(root))]


class Ours(NamedTuple):
    """Blob of which one shard is ours to store."""

    named: Named
    code: Code
    place: int
    """Index of our shard."""
    way: Sequence[bytes]
    """Siblings from the root over the blob's shards to the commit's data root; none for a state."""


@dataclass
class Pending:
    """Work that is left for one commit; for most commits there is none."""

    commit: Statement[pb.Commit]
    roster: Mapping[str, Cluster]
    """Roster of its round."""
    lists: list[Listing]
    """Lists that were not here yet."""
    tree: Tree
    """Tree over what it counted."""
    blobs: list[Ours] = field(default_factory=list)
    """Blobs of which no shard was made yet."""

    def held(self, ours: Ours, size: int) -> Held:
        """Return our shard of a blob. `size`: of the blob, bytes."""
        return Held(self.commit.body.round, ours.named.state, ours.code.share_size(size), ours.named.blob)


@dataclass
class Sharing:
    """Maker of this peer's shards."""

    manifest: Manifest
    chain: ChainFile
    store: BlobStore
    shares: ShareStore
    me: str
    oldest: Callable[[], int]
    """Function that returns the first round whose blobs are stored whole: no shard can be made of older ones."""
    _pending: dict[int, Pending] = field(default_factory=dict)
    """Work that is left, by round."""
    _roots: dict[int, bytes] = field(default_factory=dict)
    """Data roots by round: each look compares all shards with them."""

    async def run(self) -> None:
        """Make shards until cancelled."""
        while True:
            await in_thread(self.update)
            await asyncio.sleep(LOOK_SECONDS)

    def update(self) -> None:
        """Make shards of blobs that are here, and delete those whose time is over. Blocking."""
        settings = self.manifest.availability
        assert settings is not None, "the run shares"
        head, most = self.chain.head.round, settings.most_bytes
        self._follow(head)
        kept = {Held(share.round, share.state, share_bytes(share), share.blob) for share in self._named(head)}
        rounds = {held.blob: held.round for held in kept}
        found = {h.blob: (h, ours) for _, each in sorted(self._pending.items()) for h, ours in self._here(each, rounds)}
        keep = worth_keeping(kept | {held for held, _ in found.values()}, head, settings.rounds, most)
        for held in kept:
            if held.blob not in keep:  # before new shards are written
                self.shares.remove(held.blob)
        made = [share for blob in keep & found.keys() if (share := self._make(*found[blob])) is not None]
        self.shares.add([share for share in made if self._is_named(share)])
        done = (found.keys() - keep) | {share.blob for share in made}  # a shard without space now has none later
        for pending in self._pending.values():
            pending.blobs = [ours for ours in pending.blobs if ours.named.blob not in done]

    def _named(self, head: int) -> list[services.Share]:
        """Return our shards of rounds that the chain has. A shard that the chain does not name is deleted: the owner cut the
        chain, and it grew again. Shards of later rounds stay and take no room: after damage to chain.db the chain may
        still be downloading."""
        named = []
        for share in self.shares.shares():
            if share.round < head and (share.state or share.root == self._data_root(share.round)):
                named.append(share)
            elif share.round < head:
                self.shares.remove(share.blob)
        return named

    def _data_root(self, round: int) -> bytes:
        """Return the data root of a closed round's commit."""
        if round not in self._roots:
            commit = self.chain.commit(round)
            assert commit is not None
            self._roots[round] = commit.body.data_root
        return self._roots[round]

    def _follow(self, head: int) -> None:
        """Note the work of rounds whose blobs are here: of new rounds, and of those that lost a shard."""
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
        """Return the blobs of a commit that are here and need a shard. A blob whose shard is stored for as late a round is
        left out: states of several rounds may share a stage. `kept`: rounds by blob."""
        unread, pending.lists = pending.lists, []
        for listing in unread:
            if listed := self._listed(pending, listing):
                pending.blobs += self._ours(pending, listed)
            else:
                pending.lists.append(listing)
        pending.blobs = [each for each in pending.blobs if kept.get(each.named.blob, 0) < pending.commit.body.round]
        found = []
        for ours in pending.blobs:
            with suppress(FileNotFoundError):  # not here, or just deleted
                found.append((pending.held(ours, self.store.size(ours.named.blob)), ours))
        return found

    def _listed(self, pending: Pending, listing: Listing) -> list[tuple[Named, Sequence[bytes]]]:
        """Return a list and the blobs that it names, with the siblings of each; nothing if the list is not here."""
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
        """Return the shard that was made; None: the blob is damaged, or was deleted meanwhile."""
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
        """Return whether a shard proves itself by the commit, or is of a state. If not, most voters accepted a wrong root,
        and no peer would take the shard from us."""
        named = share.state or share.root == self._data_root(share.round)
        if not named:
            log.warning("commit %d names another root than that of the shards of %s", share.round, share.blob.hex()[:8])
            self.shares.drop(share)
        return named
