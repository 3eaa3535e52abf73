"""Coordinators as processes on a fake clock: each is a separate event loop, which the world runs or suspends.

They run the product's code: the shared log, the standby, the driver, the chain's file. A link to the fake store loses,
delays and repeats messages; a link to the peers only delays. A pause acts as SIGSTOP: the loop does not run, and
afterwards all its overdue timers fire at once.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.coordinator.driver import RoundDriver
from dilocox.coordinator.kv_store import StoreError
from dilocox.coordinator.shared_log import Candidate, DeposedError, SharedLog
from dilocox.coordinator.standby import stand_by
from dilocox.protocol.consensus import chain, rules
from dilocox.protocol.consensus.head import Head, initial_head
from dilocox.protocol.errors import LocalError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import Differ, Moment
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.net.rpc import ChannelPool
from dilocox.transport.store.chain_file import ChainFile
from tests.fake_store import FakeStore
from tests.helpers import COORDINATOR, Table, identity

PATIENCE_SECONDS = 1.0
"""Seconds to wait for an answer of the store, as etcd.REQUEST_SECONDS."""
OFFER_SECONDS = 1.0


class Silence:
    """Selector of a loop that has no events but its timers."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None: ...


class Loop(asyncio.BaseEventLoop):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._selector = Silence()  # what BaseEventLoop asks each time

    def time(self) -> float:
        return self._clock()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run the function at once, in this thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def due(self) -> float | None:
        """Return the time of the next event; None: never without a message."""
        if self._ready:  # type: ignore[attr-defined]
            return self.time()
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        return min(timers, default=None)

    def turn(self) -> None:
        """Run everything that is due now, once."""
        self.stop()
        self.run_forever()

    def _process_events(self, event_list: Sequence[Any]) -> None: ...

    def _write_to_self(self) -> None: ...


@dataclass
class Faults:
    """Faults of the link to the store."""

    random: random.Random
    until: float
    """The world's time from which on it only delays."""
    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    """Share of messages that take seconds."""


class Line:
    """The store, as one process reaches it."""

    def __init__(self, world: "World", office: "Office") -> None:
        self._world, self._office = world, office
        self.cut = False

    def __getattr__(self, call: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def ask(*arguments: Any) -> Any:
            answer = self._office.loop.create_future()
            self._send(call, arguments, answer)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    return await answer
            except TimeoutError as error:
                raise StoreError("no answer") from error

        return ask

    def _send(self, call: str, arguments: tuple[Any, ...], answer: "asyncio.Future[Any]") -> None:
        world, faults, office = self._world, self._world.faults, self._office
        life = office.life
        faulty = world.now < faults.until

        def delay() -> float:
            late = faulty and faults.random.random() < faults.late
            return faults.random.uniform(1.0, 8.0) if late else faults.random.uniform(0.002, 0.02)

        def arrive() -> None:
            try:
                result, problem = _at_once(getattr(world.store, call)(*arguments)), None
            except LocalError as error:
                result, problem = None, error
            if faulty and faults.random.random() < faults.loss:
                return
            world.after(delay(), lambda: back(result, problem))

        def back(result: Any, problem: Exception | None) -> None:
            if office.life == life and not self.cut and not answer.done():
                office.loop.call_soon(_settle, answer, result, problem)

        if self.cut:
            return
        for _ in range(1 + (faulty and faults.random.random() < faults.repeat)):
            if not (faulty and faults.random.random() < faults.loss):
                world.after(delay(), arrive)


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the coroutine's result: the fake store never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


def _settle(answer: "asyncio.Future[Any]", result: Any, problem: Exception | None) -> None:
    if answer.done():
        return
    if problem is not None:
        answer.set_exception(problem)
    else:
        answer.set_result(result)


@dataclass
class Office:
    """One coordinator's process."""

    world: "World"
    number: int
    life: int = 0
    paused: bool = False
    up: bool = False
    driver: RoundDriver | None = None
    """While it leads, as far as it knows."""
    ballot: Statement | None = None
    """Ballot as published."""
    chain: ChainFile | None = None
    loop: Loop = field(init=False)
    line: Line = field(init=False)

    def start(self) -> None:
        self.life += 1
        self.loop = Loop(lambda: self.world.now)
        self.line = Line(self.world, self)
        self.up, self.driver = True, None
        self.task = self.loop.create_task(self._live())

    def kill(self) -> None:
        """Kill the coordinator as `kill -9`: it finishes nothing."""
        if self.up:
            self.up, self.driver = False, None
            self.life += 1
            if self.chain is not None:
                self.chain.close()
            self.world.dead.append((self.loop, self.task))

    @property
    def clock(self) -> Moment:
        """Return the clock of this coordinator's machine, which differs from the next one's."""
        return Moment(self.world.now + 1000.0 * self.number, int(1000 * self.world.now))

    async def _live(self) -> None:
        while True:
            self.chain = chain = ChainFile(self.world.folder / f"{self.number}.db", self.world.run)
            try:
                await self._lead(chain)
            except DeposedError:
                self.driver = None
            finally:
                chain.close()

    async def _lead(self, chain: ChainFile) -> None:
        me = Candidate(f"office {self.number}", f"192.0.2.{self.number}:1", bytes([self.number] * 32).hex())
        log = SharedLog(self.line, "sim", chain, me, lambda: self.clock)
        await stand_by(log, chain, ChannelPool(), lambda says: None)
        driver = RoundDriver(COORDINATOR, chain, self._publish, lambda: self.clock, log)
        driver.resume()
        self.driver, self.ballot = driver, driver.state.gathered.ballot
        working = [asyncio.ensure_future(work) for work in (driver.run(), log.keep_office())]
        done, waiting = await asyncio.wait(working, return_when=asyncio.FIRST_EXCEPTION)
        for task in waiting:
            task.cancel()
        await asyncio.wait(working)
        for task in done:
            task.result()

    def _publish(self, sent: Statement | Differ) -> None:
        if not isinstance(sent, Differ):
            self.ballot = sent if sent.kind == pb.KIND_BALLOT else None if sent.kind == pb.KIND_COMMIT else self.ballot
            self.world.broadcast(self, sent)


class Peer(Table):
    """Member that sends its statements repeatedly, to the coordinator that it follows."""

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world.run)
        self.world, self.number, self.name = world, number, identity(number).peer
        self.known: Head = initial_head(COORDINATOR.peer, world.run.model.root)
        self.own: dict[str, Statement] = {}
        self.ballot: tuple[Statement, list[str]] | None = None
        self.follows = 0

    @property
    def head(self) -> Head:
        return self.known

    def offer(self) -> None:
        self.world.after(OFFER_SECONDS * self.world.random.uniform(0.5, 1.5), self.offer)
        office = self.world.offices[self.follows]
        if office.driver is None or not office.up or office.paused:
            self.follows = (self.follows + 1) % len(self.world.offices)
            return
        self._make()
        for statement in self.own.values():
            self.world.deliver(office, self, statement)

    def _make(self) -> None:
        if self.known.finished:
            return
        if self.name not in self.known.roster:
            self.own.setdefault("claim", self.claim(self.number))
        elif not self.known.closing(self.run):
            self.own.setdefault("contribution", self.contribution(self.number))
            if self.ballot is not None and "receipt" not in self.own:
                ballot, listed = self.ballot
                accepted = rules.bits([name != self.name for name in listed])
                body = pb.Receipt(round=self.known.round, ballot=ballot.signing, accepted=accepted, measured=b"")
                self.own["receipt"] = seal(identity(self.number), pb.KIND_RECEIPT, self.run.run_id, body)
        if self.known.round > 1:
            self.own.setdefault("report", self.report(self.number))

    def hear(self, statement: Statement, listed: list[str]) -> None:
        if statement.kind == pb.KIND_BALLOT and statement.body.head == self.known.digest:
            self.ballot = (statement, listed)
        if statement.kind == pb.KIND_COMMIT:
            self.catch_up()

    def catch_up(self) -> None:
        """Catch up with all published commits, which any peer forwards."""
        while (commit := self.world.published.get(self.known.round)) is not None:
            self.known, _ = self.world.extend(self.known, commit)
            self.commits.append(commit)
            self.own, self.ballot = {}, None


class World:
    def __init__(self, folder: Path, run: Manifest, offices: int, peers: int, seed: int, faults: Faults) -> None:
        self.folder, self.run, self.faults, self.random = folder, run, faults, random.Random(seed)
        self.now = 1000.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.store = FakeStore(lambda: self.now)
        self.published: dict[int, Statement] = {}
        """Every commit of which a byte left a coordinator, by round."""
        self.ballots: dict[int, set[bytes]] = {}
        self.dead: list[tuple[Loop, asyncio.Task[None]]] = []
        self.offices = [Office(self, number) for number in range(offices)]
        self.peers = [Peer(self, number) for number in range(peers)]
        self._extended: dict[tuple[bytes, bytes], tuple[Head, Statement]] = {}

    def extend(self, head: Head, commit: Statement) -> tuple[Head, Statement]:
        key = (head.digest, commit.digest)
        if key not in self._extended:
            self._extended[key] = chain.extend(self.run, head, commit.envelope)
        return self._extended[key]

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def broadcast(self, office: Office, sent: Statement) -> None:
        if sent.kind == pb.KIND_COMMIT:
            known = self.published.setdefault(sent.body.round, sent)
            assert known.digest == sent.digest, f"two commits for round {sent.body.round}: a fork"
        assert office.driver is not None
        listed = list(office.driver.state.gathered.listed()) if sent.kind == pb.KIND_BALLOT else []
        for peer in self.peers:
            self.after(self.random.uniform(0.01, 0.3), lambda peer=peer: peer.hear(sent, listed))  # type: ignore[misc]

    def deliver(self, office: Office, peer: Peer, statement: Statement) -> None:
        """Deliver a statement to the socket of a process, which reads it when it runs."""
        life = office.life

        def arrive() -> None:
            if office.life == life:
                office.loop.call_soon(self._received, office, peer, statement)

        self.after(self.random.uniform(0.01, 0.3), arrive)

    def _received(self, office: Office, peer: Peer, statement: Statement) -> None:
        if office.driver is None:
            return
        driver = office.driver
        driver.feed(round_machine.Received(statement))
        if peer.name in driver.state.absent:
            driver.feed(round_machine.Present(peer.name))
        # A stream sends the chain of its coordinator, and the open ballot.
        for number in range(peer.known.round, driver.chain.length):
            commit = driver.chain.commit(number)
            assert commit is not None
            known = self.published.setdefault(number, commit)
            assert known.digest == commit.digest, f"two commits for round {number}: a fork"
        peer.catch_up()
        if office.ballot is not None and peer.ballot is None:
            peer.hear(office.ballot, list(driver.state.gathered.listed()))

    def run_until(self, end: float, condition: Callable[[], bool] = lambda: False) -> bool:
        while not condition():
            running = [office for office in self.offices if office.up and not office.paused]
            loops = [(due, office) for office in running if (due := office.loop.due()) is not None]
            soonest = min((due for due, _ in loops), default=end)
            if self._heap and self._heap[0][0] <= min(soonest, end):
                at, _, action = heapq.heappop(self._heap)
                self.now = max(self.now, at)
                action()
                continue
            if soonest > end or not loops:
                self.now = end
                return condition()
            self.now = max(self.now, soonest)
            _, office = min(loops, key=lambda each: (each[0], each[1].number))
            office.loop.turn()
            if office.task.done() and office.up:
                office.task.result()
        return True

    def begin(self) -> None:
        for office in self.offices:
            office.start()
        for peer in self.peers:
            self.after(self.random.random(), peer.offer)

    def finished(self) -> bool:
        return all(peer.known.finished for peer in self.peers)

    def close(self) -> None:
        for office in self.offices:
            office.kill()
        for loop, task in self.dead:
            for _ in range(100):
                for each in asyncio.all_tasks(loop):
                    each.cancel()
                loop.turn()
            assert task.done()
            loop.close()
