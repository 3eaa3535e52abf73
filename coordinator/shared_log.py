"""Log of the open round in a store that several coordinators share: the leader writes, the standbys follow.

All keys are under PREFIX/RUN_ID/:

    format      program that made these keys: a coordinator writes nothing beside keys of another program
    leader      leader, while its lease lasts. Its value, which is unique to its incarnation, is the leader's *fence*
    next        number of the next chunk; it exists from the first chunk on
    log/N       chunks, in order (log_chunks.py): inputs of the open round, and the last commits; each begins with a digest of the
                one before it
    starts      a number above every incarnation of a leader: the next leader's signed record is newer than all earlier ones
    places/ID   addresses of coordinators: each writes its key only

**The fence is in the store.** The transaction of a chunk succeeds only while `leader` is the writer's value and `next` is the
chunk's number, and it increments `next`. So the store rejects a leader that was paused, cut off or slow and has lost the lease,
whatever its clock reads. A request that arrives twice, or late, is applied once. Every log contains a commit before its first byte
leaves. The leader sends a transaction without an answer again until there is an answer.

**Nothing is lost.** A new leader reads to the end, which no other coordinator moves from then on, and resumes after the last batch.
Each coordinator's chain also contains the commits, verified; the log contains the last `COMMITS_KEPT`. A log without one whole
batch belongs to no chain yet: the chain that moves in is the first, completely or not at all.

**A store is not trusted to remember.** It may be restored from a copy, replaced by an empty one, or abandoned. So what leaves it is
numbered by incarnations, not by its revisions (frontend.py). A standby notices if the log continues after another chunk than the
one it read.
"""

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from dilocox.coordinator.kv_store import Change, Delete, Found, Guard, Item, Put, Store, StoreError
from dilocox.coordinator.log_chunks import COMMIT, KEPT, Batch, entry_of, in_parts, on_our_clock, rows_of
from dilocox.coordinator.round_log import Committed, Entry, InputLog, LogItem
from dilocox.protocol import limits
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.protocol.ids import Way
from dilocox.protocol.pb import log_pb2
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.round_machine import Moment
from dilocox.protocol.wire.messages import open_envelope
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["BehindError", "Candidate", "DeposedError", "SharedLog", "UnreadableError"]

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_SECONDS = 3
"""Length of the lease: another coordinator may lead after a leader was silent for so long. The shortest that etcd grants
is 2 s."""
KEEP_SECONDS = 0.5
FOLLOW_SECONDS = 0.4
"""Interval at which a standby reads the store."""
AGAIN_SECONDS = 0.1
"""After no answer."""
PAGE = 64
"""Parts read at once."""
COMMITS_KEPT = 16
"""Commits in the log, with the inputs of their rounds. A standby that missed fewer reads on; another one asks the leader
for commits."""
LINK_BYTES = 8
"""A part begins with so much of the SHA-256 of the part before it: against stores that forget, not against who writes to them."""
FORMAT = b"dilocox coordinator log 1"


class DeposedError(LocalError):
    """Error: the store says that this coordinator does not lead any more."""


class BehindError(LocalError):
    """The log begins after our chain ends."""

    def __init__(self, round: int) -> None:
        super().__init__(f"the log in the store begins with round {round}")
        self.round = round


class UnreadableError(LocalError):
    """Error: the log contains no round that a coordinator wrote."""


@dataclass(frozen=True)
class Candidate:
    """Address of a coordinator, as it writes it to the store."""

    name: str
    address: str
    """host:port of its gRPC server."""
    certificate: str
    """SHA-256 of what that server presents, hexadecimal."""
    dht: tuple[str, ...] = ()

    @classmethod
    def parse(cls, raw: bytes) -> "Candidate":
        """Raises ValueError."""
        try:
            said = json.loads(raw)
            holder = cls(str(said["name"]), str(said["address"]), str(said["certificate"]), tuple(map(str, said["dht"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a coordinator's address: {error}") from error
        if len(bytes.fromhex(holder.certificate)) != 32:
            raise ValueError("its certificate is not a SHA-256 digest")
        host, port = Way(holder.address, bytes.fromhex(holder.certificate)).endpoint
        if not host or not 0 < port < 1 << 16:
            raise ValueError(f"{holder.address!r} is not HOST:PORT")
        return holder

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


def _place(item: Item) -> Candidate | None:
    """Return a coordinator's address. None: no coordinator wrote this value."""
    try:
        return Candidate.parse(item.value)
    except ValueError as error:
        log.warning("%s in the store is ignored: %s", item.key, error)
        return None


class SharedLog:
    def __init__(
        self,
        store: Store,
        prefix: str,
        chain: ChainFile,
        me: Candidate,
        clock: Callable[[], Moment],
        shared_before: bool = False,
        tell_places: Callable[[Sequence[Candidate]], None] = lambda places: None,
    ) -> None:
        """Read and write nothing yet. `clock`: the driver's. `shared_before`: others may have signed statements that this
        chain does not contain. `tell_places`: called with the other coordinators' addresses after a change."""
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
        """First chunks of the log's batches that contain a commit."""
        self.leader: Candidate | None = None
        """Leader at the last read."""
        self.places: tuple[Candidate, ...] = ()
        """Addresses of all coordinators of the run, this one included."""
        self.healed = False

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _part(self, number: int) -> str:
        return self._key(f"log/{number:016d}")

    # Standby

    async def enter(self) -> None:
        """Say where we are. Raises ConfigError where the prefix is not ours, and where too many are there already."""
        found = await self._ask(lambda: self._store.read(f"{self._root}/", f"{self._root}0", 1))
        if found and (found[0].key, found[0].value) != (self._key("format"), FORMAT):  # the first by name
            raise ConfigError(f"the store contains keys under {self._root} that no coordinator wrote. Use another prefix.")
        others = await self._ask(lambda: self._store.read(self._key("places/"), self._key("places0"), limits.COORDINATORS + 1))
        if sum(each.key != self._my_place for each in others) >= limits.COORDINATORS:
            raise ConfigError(
                f"the store names {len(others)} coordinators of this run, the limit is {limits.COORDINATORS}. "
                f"Delete the keys under {self._key('places/')} of those that no longer exist."
            )
        place = json.dumps(asdict(self._me)).encode()
        await self._ask(lambda: self._store.apply((), [Put(self._key("format"), FORMAT), Put(self._my_place, place)]))

    @property
    def _my_place(self) -> str:
        return self._key(f"places/{self._me.certificate[:16]}")

    async def refresh(self) -> None:
        """Read which coordinator leads, and the addresses of all. Raises StoreError."""
        leaders = await self._store.read(self._key("leader"), self._key("leader0"), 1)
        try:
            self.leader = Candidate.parse(leaders[0].value) if leaders else None
        except ValueError as error:
            raise StoreError(f"its key {self._key('leader')} has a value that no coordinator wrote: {error}") from error
        places = await self._store.read(self._key("places/"), self._key("places0"), limits.COORDINATORS)
        found = tuple(holder for each in places if (holder := _place(each)) is not None)
        if self._me not in found:  # the store lost it; the key also marks the prefix as used by this run
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
            raise UnreadableError(f"cannot follow the log under {self._root} in the store: {error}") from error

    @property
    def _link(self) -> bytes:
        """Return the prefix of the next chunk."""
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
                        raise UnreadableError(f"chunk {number} does not follow the one before it")
                    again = True
                    log.warning(
                        "the log in the store does not continue what this coordinator read there: reading it again "
                        "from its beginning"
                    )
                    self.begin_again()
                    break
                self._next, self._read = number + 1, (number, sha256(part.value))
                try:
                    rows = self._batch.take(number, body)
                except LocalError as error:
                    raise UnreadableError(str(error)) from error
                if rows is not None:
                    self._whole = self._shared_before = True
                    await self._apply_rows(rows)

    async def _apply_rows(self, rows: Sequence[log_pb2.LogRow]) -> None:
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
                f"commit {number} in the store differs from the one in {self._chain.path}: the coordinators "
                "signed two chains. The run's owner must choose one with `dilocox owner appoint`."
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

    # Leader

    async def stand(self) -> bool:
        """Follow, and try to lead if no coordinator does. Return whether this one leads now, after reading everything
        written before. Raises what `follow` raises."""
        await self.refresh()
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
        log.info("elected%s", "" if found.applied else ", as a second read shows")
        self._fence, self._lease, self.leader = mine, lease, self._me
        return True

    def _check_moved(self) -> None:
        """Raise UnreadableError if the store contains part of another chain and this coordinator has none: the run would
        begin again."""
        if self._next and not self._whole and not self._chain.length:
            raise UnreadableError(
                f"a coordinator stopped while it moved its chain into {self._root}: start it again, or start one "
                "that has the chain"
            )

    async def _open(self) -> None:
        """Read to the end, and write what the log misses: everything if it is new; commits if the store was restored."""
        if not await self._ask(self._remembers):
            log.warning("the store lost entries that this coordinator read: reading the log again from its beginning")
            self.begin_again()
        await self._ask(self.follow)
        self._check_moved()
        if not self._whole:
            self._round, self.healed = self._chain.length, bool(self._chain.length) and self._shared_before
            self._entries = await asyncio.to_thread(lambda: list(self._local.replay()))
            log.info("the log in the store begins with round %d", self._chain.length)
            await self._append([*self._commits(max(0, self._chain.length - 1)), *self._entries])
        elif self._round < self._chain.length:
            log.warning(
                "the store has %d commits, this coordinator signed %d: writing the missing ones again",
                self._round,
                self._chain.length,
            )
            self.healed, self._entries = True, []
            await self._append(self._commits(max(self._round, self._chain.length - COMMITS_KEPT)))

    async def _remembers(self) -> bool:
        """Return whether the last chunk read is still the same. While this coordinator leads, no other one writes."""
        if self._read is None:
            return True
        number, digest = self._read
        found = await self._store.read(self._part(number), f"{self._part(number)}0", 1)
        return bool(found) and sha256(found[0].value) == digest

    def _commits(self, first: int) -> list[LogItem]:
        """Return the commits from this number on, as the log stores them."""
        head = self._chain.head
        return [Committed(head, commit, head) for commit in self._chain.commits(first)]

    async def number_of_life(self, at_least: int) -> int:
        """Return a number for this leader's incarnation: higher than those of all earlier leaders."""
        found = await self._ask(lambda: self._store.read(self._key("starts"), self._key("starts0"), 1))
        number = max(at_least, *(int(item.value) + 1 for item in found)) if found else at_least
        await self._apply([], [Put(self._key("starts"), str(number).encode())], lambda found: False)
        return number

    async def keep_office(self) -> None:
        """Renew the lease, for ever. Raises DeposedError once the store reports it as lost."""
        silent = False
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                if not await self._store.keep(self._lease):
                    raise DeposedError("this leader's lease expired: the store received no renewal in time")
                await self.refresh()
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
                log.warning("the lease was not released, and expires by itself: %s", error)

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
                """Return whether an earlier try succeeded although its answer was lost: while this coordinator leads, no
                other one writes."""
                return key in found.items and found.items[key].value == after

            await self._apply([position], [*changes, *(old if last else [])], was_ours)
            self._next, self._read = number + 1, (number, sha256(value))
        self._whole = self._shared_before = True

    async def _apply(self, guards: Sequence[Guard], changes: Sequence[Change], applied: Callable[[Found], bool]) -> None:
        """A transaction while we lead; sent until there is an answer. `applied`: whether what was found instead shows that an
        earlier try was. Raises DeposedError where the store says that we do not lead."""
        leader = self._key("leader")
        if not self._fence:
            raise DeposedError("this coordinator does not lead")
        fence = Guard(leader, self._fence)
        keys = [leader, *(guard.key for guard in guards)]
        found = await self._ask(lambda: self._store.apply([fence, *guards], changes, keys))
        if found.applied:
            return
        holder = found.items.get(leader)
        if holder is None or holder.value != self._fence:
            raise DeposedError("another coordinator leads" if holder else "this leader's lease expired")
        if not applied(found):
            if self._forgot(found):
                raise DeposedError("the store lost entries that it had acknowledged: was it restored from a copy?")
            raise LocalError(
                f"the log under {self._root} was changed by a process that does not lead. Find out which process "
                "writes these keys."
            )

    def _forgot(self, found: Found) -> bool:
        """Return whether the log ends before the next chunk: it must then be read, and receive what it misses."""
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
                        log.debug("retrying: %s", error)
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError as error:
            raise StoreError("no answer in time") from error
