"""The open round in a store that several coordinators of one run share: one leads and writes, the others follow and stand by.

Everything stands under PREFIX/RUN_ID/:

    format      what made these keys: nothing is written beside keys of others
    leader      who leads, as long as its lease is kept. Its value, which no other life repeats, is the leader's *fence*
    next        the number of the part that is written next; there from the first part on
    log/N       the parts, in order (parts.py): the inputs of the open round, and the last commits; each after a digest of the one
                before it
    starts      a number above that of every life of a leader: its signed record is newer than theirs
    places/ID   where coordinators are: each writes its own key

**The fence is in the store.** A part is written by a transaction that holds only while `leader` is what the writer made it and
`next` is its part's number, and that moves `next` on. So who was paused, cut off or slow and no longer leads is refused by the
store, whatever its clock says; a request that arrives twice, or late, is applied once; and a commit is in the log of everybody
before its first byte leaves. An answer that does not come is no answer: the same transaction is sent again until there is one.

**Nothing is lost.** Who is elected reads on to the end, which nobody else moves from then on, and stands where the last leader's
last batch ended. Commits are also in each coordinator's own chain, verified; the log keeps the last `COMMITS_KEPT`. A log without
one whole batch is nobody's yet: a chain that moves in is the first, whole or not at all.

**A store is not trusted to remember.** It may be restored from a copy, replaced by an empty one, or given up. What leaves it is
numbered by lives, not by its revisions (desk.py); who follows notices where the log went on from another part than it read.
"""

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from dilocox.coordinator.log import Committed, Entry, InputLog, LogItem
from dilocox.coordinator.parts import COMMIT, KEPT, Batch, entry_of, in_parts, on_our_clock, rows_of
from dilocox.coordinator.store import Change, Delete, Found, Guard, Item, Put, Store, StoreError
from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.ids import Way
from dilocox.protocol.messages import open_envelope
from dilocox.protocol.pb import log_pb2
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.round import Moment
from dilocox.transport.chain_file import ChainFile

__all__ = ["BehindError", "DeposedError", "Holder", "SharedLog", "UnreadableError"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_SECONDS = 3
"""Who leads and is not heard by the store for so long may be followed by another. etcd's shortest is 2 s."""
KEEP_SECONDS = 0.5
FOLLOW_SECONDS = 0.4
"""Between two looks of who stands by."""
AGAIN_SECONDS = 0.1
"""After no answer."""
PAGE = 64
"""Parts read at once."""
COMMITS_KEPT = 16
"""In the log, with the inputs of their rounds: who was away for less reads on from there; else the leader is asked for commits."""
LINK_BYTES = 8
"""A part begins with so much of the SHA-256 of the part before it: against stores that forget, not against who writes to them."""
FORMAT = b"dilocox coordinator log 1"


class DeposedError(LocalError):
    """We do not lead any more: the store says so."""


class BehindError(LocalError):
    """The log begins after our chain ends."""

    def __init__(self, round: int) -> None:
        super().__init__(f"the log in the store begins with round {round}")
        self.round = round


class UnreadableError(LocalError):
    """What the log holds is no round that a coordinator wrote."""


@dataclass(frozen=True)
class Holder:
    """A coordinator, as it says in the store where it is."""

    name: str
    address: str
    """host:port of its gRPC server."""
    certificate: str
    """SHA-256 of what that server presents, hexadecimal."""
    dht: tuple[str, ...] = ()

    @classmethod
    def parse(cls, raw: bytes) -> "Holder":
        """Raises ValueError."""
        try:
            said = json.loads(raw)
            holder = cls(str(said["name"]), str(said["address"]), str(said["certificate"]), tuple(map(str, said["dht"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not where a coordinator is: {error}") from error
        if len(bytes.fromhex(holder.certificate)) != 32:
            raise ValueError("its certificate is no SHA-256 digest")
        host, port = Way(holder.address, bytes.fromhex(holder.certificate)).endpoint
        if not host or not 0 < port < 1 << 16:
            raise ValueError(f"{holder.address!r} is no HOST:PORT")
        return holder

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


def _place(item: Item) -> Holder | None:
    """Where a coordinator is; None where the store says what none wrote."""
    try:
        return Holder.parse(item.value)
    except ValueError as error:
        log.warning("%s in the store is passed over: %s", item.key, error)
        return None


class SharedLog:
    def __init__(
        self,
        store: Store,
        prefix: str,
        chain: ChainFile,
        me: Holder,
        clock: Callable[[], Moment],
        shared_before: bool = False,
        tell_places: Callable[[Sequence[Holder]], None] = lambda places: None,
    ) -> None:
        """Nothing is read or written yet. `clock`: of the driver. `shared_before`: others may have signed what this chain lacks.
        `tell_places`: called with the places of the other coordinators when they changed."""
        self._tell_places = tell_places
        self._store, self._chain, self._me, self._clock = store, chain, me, clock
        self._run_id, self._local = chain.manifest.run_id, InputLog(chain)
        self._root = f"{prefix}/{self._run_id.hex()}"
        self._shared_before = shared_before
        self._fence = b""
        """The value of our `leader` key; empty: we do not lead."""
        self._lease = 0
        self._next = 0
        """The part that we read, or write, next."""
        self._batch = Batch()
        self._entries: list[Entry] = []
        self._round = 0
        """The round after the last commit in the log."""
        self._read: tuple[int, bytes] | None = None
        """The last part that we read, or wrote, and what it was."""
        self._whole = False
        """Whether the log has a batch that ends."""
        self._starts: deque[int] = deque()
        """Of the log's batches with a commit: their first parts."""
        self.leader: Holder | None = None
        """As of the last look."""
        self.places: tuple[Holder, ...] = ()
        """Where all coordinators of the run are, ourselves among them."""
        self.healed = False

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _part(self, number: int) -> str:
        return self._key(f"log/{number:016d}")

    # Who stands by

    async def enter(self) -> None:
        """Say where we are. Raises ConfigError where the prefix is not ours, and where too many are there already."""
        found = await self._ask(lambda: self._store.read(f"{self._root}/", f"{self._root}0", 1))
        if found and (found[0].key, found[0].value) != (self._key("format"), FORMAT):  # the first by name
            raise ConfigError(f"under {self._root} in the store are keys that no coordinator made. Name another prefix.")
        others = await self._ask(lambda: self._store.read(self._key("places/"), self._key("places0"), limits.COORDINATORS + 1))
        if sum(each.key != self._my_place for each in others) >= limits.COORDINATORS:
            raise ConfigError(
                f"the store names {len(others)} coordinators of this run already, and a link has room for {limits.COORDINATORS}."
                f" Delete the keys under {self._key('places/')} of those that are gone."
            )
        place = json.dumps(asdict(self._me)).encode()
        await self._ask(lambda: self._store.apply((), [Put(self._key("format"), FORMAT), Put(self._my_place, place)]))

    @property
    def _my_place(self) -> str:
        return self._key(f"places/{self._me.certificate[:16]}")

    async def look(self) -> None:
        """Who leads, and where all are. Raises StoreError."""
        leaders = await self._store.read(self._key("leader"), self._key("leader0"), 1)
        try:
            self.leader = Holder.parse(leaders[0].value) if leaders else None
        except ValueError as error:
            raise StoreError(f"its key {self._key('leader')} says nothing that a coordinator wrote: {error}") from error
        places = await self._store.read(self._key("places/"), self._key("places0"), limits.COORDINATORS)
        found = tuple(holder for each in places if (holder := _place(each)) is not None)
        if self._me not in found:  # the store lost it, and what says whose keys these are
            await self.enter()
            found = (*found, self._me)
        if found != self.places:
            self.places = found
            self._tell_places([place for place in found if place != self._me])

    async def follow(self) -> None:
        """Read what was written since the last time. Raises StoreError, and, with the log to be read from its first part on
        again, BehindError until the chain has what it keeps no more, and UnreadableError."""
        try:
            await self._follow()
        except (RemoteError, UnreadableError) as error:
            self.begin_again()
            raise UnreadableError(f"the log under {self._root} in the store cannot be followed: {error}") from error

    @property
    def _link(self) -> bytes:
        """What the next part begins with."""
        return self._read[1][:LINK_BYTES] if self._read is not None else bytes(LINK_BYTES)

    async def _follow(self) -> None:
        again = False
        while True:
            parts = await self._store.read(self._part(self._next), self._key("log0"), PAGE)
            if not parts:
                return
            for part in parts:
                number = int(part.key.rpartition("/")[2])
                link, body = part.value[:LINK_BYTES], part.value[LINK_BYTES:]
                if number != self._next and self._next:
                    self._entries.clear()  # what we had not read yet is not kept any more
                elif self._read is not None and link != self._link:
                    if again:
                        raise UnreadableError(f"part {number} does not go on from the one before it")
                    again = True
                    log.warning("the log in the store did not go on from what we read there: it is read from its beginning on")
                    self.begin_again()
                    break
                self._next, self._read = number + 1, (number, sha256(part.value))
                try:
                    rows = self._batch.take(number, body)
                except LocalError as error:
                    raise UnreadableError(str(error)) from error
                if rows is not None:
                    self._whole = self._shared_before = True
                    await self._take(rows)

    async def _take(self, rows: Sequence[log_pb2.LogRow]) -> None:
        for row in rows:
            if row.kind == COMMIT:
                await self._learn(row.envelope)
            elif row.kind == KEPT:
                del self._entries[row.reason :]
            else:
                self._entries.append(entry_of(row, self._run_id))

    async def _learn(self, raw: bytes) -> None:
        """A commit: ours already, or the next one. Raises ConfigError where our chain is another."""
        number = open_envelope(raw, self._run_id, (pb.KIND_COMMIT,)).body.round
        if number > self._chain.length:
            self.begin_again()  # until the chain has it nothing behind it may be read, nor anybody elected here
            raise BehindError(number)
        if number == self._chain.length:
            await asyncio.to_thread(self._chain.append, pb.Envelope.FromString(raw))
        elif self._chain.raw(number) != raw:
            raise ConfigError(
                f"commit {number} in the store is not the one in {self._chain.path}: the coordinators signed two chains. The run's"
                " owner names the one that stands: `dilocox owner appoint`."
            )
        self._round = number + 1
        self._entries.clear()
        if not self._starts or self._starts[-1] != self._batch.began:
            self._starts.append(self._batch.began)

    def begin_again(self) -> None:
        """Read from the log's first part on."""
        self._next, self._round, self._batch, self._read, self._whole = 0, 0, Batch(), None, False
        self._entries.clear()
        self._starts.clear()

    # Who leads

    async def stand(self) -> bool:
        """Follow, and try to lead where nobody does: whether we lead now, having read all that was written before. Raises what
        `follow` raises."""
        await self.look()
        await self.follow()
        if self.leader is not None:
            return False
        self._check_moved()
        if not await self._elected():
            return False
        try:
            await self._open()
        except BaseException:
            await self.resign()
            raise
        return True

    async def _elected(self) -> bool:
        lease, leader = await self._store.grant(LEASE_SECONDS), self._key("leader")
        mine = json.dumps(asdict(self._me) | {"life": os.urandom(8).hex()}).encode()
        try:
            found = await self._ask(
                lambda: self._store.apply([Guard(leader)], [Put(leader, mine, lease)], [leader]), LEASE_SECONDS
            )
            items = await self._ask(lambda: self._store.read(leader, f"{leader}0", 1), LEASE_SECONDS)
        except (StoreError, LocalError):
            return False  # the lease ends by itself, and the key with it
        if not items or items[0].value != mine:  # also where our first try was applied and its answer lost
            await self._store.revoke(lease)
            return False
        log.info("elected%s", "" if found.applied else ", as another look shows")
        self._fence, self._lease, self.leader = mine, lease, self._me
        return True

    def _check_moved(self) -> None:
        """Raises UnreadableError where somebody's chain is half in the store, and we have none: the run would begin again."""
        if self._next and not self._whole and not self._chain.length:
            raise UnreadableError(
                f"a coordinator did not end moving its chain into {self._root}: start that one again, or one that has the chain"
            )

    async def _open(self) -> None:
        """Read on to the end, and bring what the log lacks: all of it, where it is new; commits, where the store was restored."""
        if not await self._ask(self._remembers):
            log.warning("the store does not hold any more what we read there: the log is read from its beginning on")
            self.begin_again()
        await self._ask(self.follow)
        self._check_moved()
        if not self._whole:
            self._round, self.healed = self._chain.length, bool(self._chain.length) and self._shared_before
            self._entries = await asyncio.to_thread(lambda: list(self._local.replay()))
            log.info("the log in the store begins with round %d", self._chain.length)
            await self._append([*self._commits(max(0, self._chain.length - 1)), *self._entries])
        elif self._round < self._chain.length:
            log.warning("the store holds %d commits, we signed %d: the others go there again", self._round, self._chain.length)
            self.healed, self._entries = True, []
            await self._append(self._commits(max(self._round, self._chain.length - COMMITS_KEPT)))

    async def _remembers(self) -> bool:
        """Whether the last part that we read is still what it was; nobody writes but us who lead."""
        if self._read is None:
            return True
        number, digest = self._read
        found = await self._store.read(self._part(number), f"{self._part(number)}0", 1)
        return bool(found) and sha256(found[0].value) == digest

    def _commits(self, first: int) -> list[LogItem]:
        """From this one on, as they are written to a log."""
        head = self._chain.head
        return [Committed(head, commit, head) for commit in self._chain.commits(first)]

    async def number_of_life(self, at_least: int) -> int:
        """Of us who lead: above those of all who led before."""
        found = await self._ask(lambda: self._store.read(self._key("starts"), self._key("starts0"), 1))
        number = max(at_least, *(int(item.value) + 1 for item in found)) if found else at_least
        await self._apply([], [Put(self._key("starts"), str(number).encode())], lambda found: False)
        return number

    async def keep_office(self) -> None:
        """Keep the lease, for ever. Raises DeposedError once the store says that it is gone."""
        silent = False
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                if not await self._store.keep(self._lease):
                    raise DeposedError("the lease with which we led is gone: the store did not hear us in time")
                await self.look()
                silent = False
            except StoreError as error:
                if not silent:
                    log.warning("the store does not answer, and nothing can be signed until it does: %s", error)
                silent = True

    async def resign(self) -> None:
        """Let another lead at once."""
        lease, self._lease, self._fence = self._lease, 0, b""
        if lease:
            try:
                await self._store.revoke(lease)
            except (StoreError, LocalError) as error:
                log.warning("the lease was not given back, and ends by itself: %s", error)

    # RoundLog

    def replay(self) -> Iterable[Entry]:
        return on_our_clock(self._entries, self._clock())

    async def write(self, batch: Sequence[LogItem]) -> None:
        """Raises DeposedError."""
        await self._append(batch)
        commits = [item for item in batch if isinstance(item, Committed)]
        if commits:
            await asyncio.to_thread(self._local.write_now, commits)

    async def _append(self, batch: Sequence[LogItem]) -> None:
        began, parts = self._next, in_parts(rows_of(batch))
        if any(isinstance(item, Committed) for item in batch):
            self._starts.append(began)
        old = []
        while len(self._starts) > COMMITS_KEPT:
            self._starts.popleft()
            old = [Delete(self._part(0), self._part(self._starts[0]))]
        for number, part in enumerate(parts, began):
            at = self._key("next")
            position = Guard(at, b"%d" % number if number else None)
            after = b"%d" % (number + 1)
            value = self._link + part
            changes: list[Change] = [Put(self._part(number), value), Put(position.key, after)]
            last = number == began + len(parts) - 1

            def was_ours(found: Found, key: str = position.key, after: bytes = after) -> bool:
                """An earlier try, whose answer was lost: nobody but us moves it on while we lead."""
                return key in found.items and found.items[key].value == after

            await self._apply([position], [*changes, *(old if last else [])], was_ours)
            self._next, self._read = number + 1, (number, sha256(value))
        self._whole = self._shared_before = True

    async def _apply(self, guards: Sequence[Guard], changes: Sequence[Change], applied: Callable[[Found], bool]) -> None:
        """A transaction while we lead; sent until there is an answer. `applied`: whether what was found instead shows that an
        earlier try was. Raises DeposedError where the store says that we do not lead."""
        leader = self._key("leader")
        if not self._fence:
            raise DeposedError("we do not lead")
        fence = Guard(leader, self._fence)
        keys = [leader, *(guard.key for guard in guards)]
        found = await self._ask(lambda: self._store.apply([fence, *guards], changes, keys))
        if found.applied:
            return
        holder = found.items.get(leader)
        if holder is None or holder.value != self._fence:
            raise DeposedError("another coordinator leads" if holder else "the lease with which we led is gone")
        if not applied(found):
            if self._forgot(found):
                raise DeposedError("the store does not hold what it acknowledged: was it restored from a copy?")
            raise LocalError(f"the log under {self._root} was changed by somebody who does not lead. Whose keys are these?")

    def _forgot(self, found: Found) -> bool:
        """Whether the log ends before the part that is to be written: we have to read it, and tell it what it lacks."""
        end = found.items.get(self._key("next"))
        return int(end.value if end is not None else 0) < self._next

    async def _ask(self, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """The answer, however often one has to ask; at most so long. Raises StoreError where that was too short."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await call()
                    except StoreError as error:
                        log.debug("asking again: %s", error)
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError as error:
            raise StoreError("no answer in time") from error
