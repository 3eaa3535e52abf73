"""Client of the coordinator: finds it, fetches the manifest, follows the run, submits statements. It retries for ever.

It finds the coordinator by its newest signed record (from the DHT, a cache, or the coordinator), or at an address in
the join link; after a failed call it tries the next. A standby sends a newer link. With several coordinators, each
reports when it becomes leader. The client follows the newest leader at once, also while the one before still runs and
does not know it.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from dilocox.protocol.consensus import terms
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink, Way, peer_id, short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.run.manifest import Manifest, open_manifest
from dilocox.protocol.wire.messages import Statement, open_envelope
from dilocox.transport.net.peer_directory import PeerDirectory, is_overtaken, life_of
from dilocox.transport.net.rpc import LINK_HEADER, ChannelPool, record_of

__all__ = ["Backoff", "CoordinatorLink"]

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_SECONDS = 10.0
PRESENCE_SECONDS = 2.0
"""A person waits for this answer."""
FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 5.0
"""Longest pause between tries; jitter prevents that a swarm returns at one instant."""


_OUTCOMES = {
    pb.OUTCOME_ACCEPT: Outcome.ACCEPT,
    pb.OUTCOME_IGNORE: Outcome.IGNORE,
    pb.OUTCOME_REJECT: Outcome.REJECT,
}


class Answer(NamedTuple):
    """The coordinator's answer to a statement."""

    outcome: Outcome
    reason: pb.Reason
    detail: str
    signed: pb.Envelope
    head: bytes
    """Head of the chain from which it answered."""
    valid_until_ms: int = 0
    """End of the verdict on accepted evidence: milliseconds since 1970; else 0."""


class Backoff:
    def __init__(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS

    async def wait(self) -> None:
        await asyncio.sleep(self.next_seconds())

    def next_seconds(self) -> float:
        """Return the pause after one more failure."""
        seconds, self._seconds = self._seconds, min(MAX_BACKOFF_SECONDS, 2 * self._seconds)
        return seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._seconds = FIRST_BACKOFF_SECONDS


def clock_ahead(run: services.Run, asked: float) -> float:
    """Seconds by which this machine's clock is ahead of that of the coordinator who answered just now what it was `asked` (seconds
    since 1970)."""
    return (asked + time.time()) / 2 - run.wall_ms / 1000


class CoordinatorLink:
    def __init__(self, link: JoinLink, directory: PeerDirectory, channels: ChannelPool) -> None:
        self._link, self._directory, self._channels = link, directory, channels
        self.connected = False
        self.clock_offset: float | None = None
        """Seconds by which this machine's clock is ahead of the coordinator's, as `run` found."""
        self.signed_manifest: pb.Envelope | None = None
        """Manifest with the owner's signature, after `run` returned."""
        self._named: tuple[Way, ...] = ()
        """Addresses in the newest link from a standby."""
        self._failed: set[Way] = set()
        """Addresses that are tried again only after all others."""
        self._pinned: dict[Way, pb.PeerRecord] = {}
        """Records of addresses whose certificate is the named one."""
        self._led: pb.PeerRecord | None = None
        """Record of the last coordinator that reported to lead."""
        self._several = False
        """True once a coordinator reported that it shares a store with others."""
        self._followed: Way | None = None
        """Address whose events this client follows."""
        self._moved = asyncio.Event()
        """Event, set when a newer leader was elected."""

    @asynccontextmanager
    async def _calling(self) -> AsyncIterator[rpc.CoordinatorStub]:
        """Yield a stub for one call; after a failure the next call uses another address."""
        way = await self._way()
        try:
            yield rpc.CoordinatorStub(self._channels.channel(await self._record(way)))
        except (RemoteError, grpc.aio.AioRpcError) as error:
            self._failed.add(way)
            if isinstance(error, grpc.aio.AioRpcError):
                self._take_link(error)
            raise

    def _take_link(self, refused: grpc.aio.AioRpcError) -> None:
        """Store the addresses of the link that a standby sent with a refused call."""
        for key, value in refused.trailing_metadata() or ():
            if key == LINK_HEADER:
                with suppress(ConfigError):
                    link = JoinLink.parse(str(value))
                    if (link.run_id, link.coordinator) == (self._link.run_id, self._link.coordinator):
                        self._named = link.ways

    async def _way(self) -> Way:
        """The first that did not fail since all did."""
        ways = await self._ways()
        if self._failed.issuperset(ways):
            self._failed.clear()
        return next(way for way in ways if way not in self._failed)

    async def _ways(self) -> list[Way]:
        """Return the addresses of the coordinator's record, of the link, of the record's standbys, then of a standby's link."""
        record, ways = await self._directory.find(self._link.coordinator), dict[Way, None]()
        if record is not None and record.address:
            way = Way(record.address, sha256(record.certificate))
            self._pinned[way] = record
            ways[way] = None
        ways |= dict.fromkeys(self._link.ways)
        if record is not None:
            ways |= {Way(other.address, other.certificate): None for other in record.elsewhere}
        ways |= dict.fromkeys(self._named)
        # Its record may change without end.
        self._pinned = {way: pinned for way, pinned in self._pinned.items() if way in ways}
        self._failed &= ways.keys()
        return list(ways)

    async def _record(self, way: Way) -> pb.PeerRecord:
        """Return the record at an address. Raises RemoteError if no peer, or another one, answers there."""
        if way not in self._pinned:
            self._pinned[way] = await record_of(way)
        return self._pinned[way]

    async def _rest(self, backoff: Backoff) -> None:
        """Pause after a failure; do not pause if an address is untried, or a new leader was elected."""
        if self._failed.issuperset(await self._ways()):
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_seconds()):
                    await self._moved.wait()

    # Several coordinators

    async def _look_out(self) -> None:
        """Ask each of several coordinators to say when it leads, for ever."""
        asked: dict[Way, asyncio.Task[None]] = {}
        try:
            while True:
                ways = await self._ways()
                for way in ways if self._several or len(ways) > 1 else ():
                    if way not in asked:
                        asked[way] = asyncio.create_task(self._until_it_leads(way), name=f"until {way.at} leads")
                for way in asked.keys() - set(ways):
                    asked.pop(way).cancel()
                await asyncio.sleep(MAX_BACKOFF_SECONDS)
        finally:
            for task in asked.values():
                task.cancel()

    async def _until_it_leads(self, way: Way) -> None:
        backoff = Backoff()
        while True:
            try:
                stub = rpc.ElectionStub(self._channels.channel(await self._record(way)))
                reply: services.LeadReply = await stub.Await(self._question())
                if self._hears(reply.record) and way != self._followed:
                    log.info("the coordinator at %s leads now", way.at)
                    self._failed = set(await self._ways()) - {way}
                    self._moved.set()
                backoff.reset()
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await backoff.wait()

    def _question(self) -> services.LeadRequest:
        newest = self._directory.records.get(self._link.coordinator)
        above = life_of(self._led) if self._led is not None else 0
        return services.LeadRequest(above=above, newest=None if newest is None else newest.envelope)

    def _hears(self, envelope: pb.Envelope) -> bool:
        """Return whether the leader with this record was elected last. Raises RemoteError if it was replaced: the true
        leader receives our newest record, and numbers its incarnation above it."""
        self._several = True
        record, known, before = self._own(envelope), self._directory.records.get(self._link.coordinator), self._led
        if known is not None and is_overtaken(record.body, known.body):
            raise RemoteError(pb.REASON_UNAVAILABLE, "another coordinator was elected after this one")
        self._directory.learn(record)
        self._led = record.body
        return before is None or life_of(before) < life_of(record.body)

    async def _events(self, stub: rpc.CoordinatorStub, request: services.WatchRequest) -> AsyncGenerator[services.WatchEvent]:
        """Yield a coordinator's events until another one is elected. Raises RemoteError, AioRpcError."""
        stream = stub.Watch(request)
        try:
            while isinstance(event := await self._unless_moved(stream.read()), services.WatchEvent):
                if event.statement.kind == pb.KIND_PEER_RECORD and peer_id(event.statement.key) == self._link.coordinator:
                    self._hears(event.statement)
                else:
                    yield event
        finally:
            stream.cancel()

    async def _unless_moved(self, answer: Awaitable[T]) -> T:
        """Return a coordinator's answer. Raises RemoteError if another one is elected meanwhile: a frozen coordinator
        never answers."""
        waiting, moved = asyncio.ensure_future(answer), asyncio.create_task(self._moved.wait())
        try:
            await asyncio.wait({waiting, moved}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise RemoteError(pb.REASON_UNAVAILABLE, "another coordinator was elected")
        finally:
            waiting.cancel()
            moved.cancel()

    async def run(
        self, tell: Callable[[str, str], None] = lambda says, advice: None
    ) -> tuple[Manifest, Statement[pb.Appointment] | None]:
        """The manifest, and the owner's newest appointment where there is one, checked against the run id, the owner's signature
        and the link's coordinator; waits until they are there. `tell` hears what for, and what somebody can do."""
        backoff, said = Backoff(), ""
        places = ", ".join(way.at for way in self._link.ways)
        where = f"the coordinator {short(self._link.coordinator)} at {places}"
        tell(f"asking {where} for the run's manifest", "")
        while True:
            try:
                async with self._calling() as stub:
                    asked = time.time()
                    run: services.Run = await stub.GetRun(services.GetRunRequest(), timeout=CALL_SECONDS)
                    self.clock_offset = clock_ahead(run, asked)
                    manifest = open_manifest(run.manifest, self._link.run_id)
                    self.signed_manifest = run.manifest
                    appointment = terms.open_appointment(manifest, run.appointment) if run.HasField("appointment") else None
                    if (named := terms.coordinator_of(manifest, appointment)) != self._link.coordinator:
                        detail = f"the run's owner named {named} as coordinator, but the link names another"
                        raise RemoteError(pb.REASON_WRONG_RUN, detail)
                    self._learn(run.coordinator)
                return manifest, appointment
            except (RemoteError, grpc.aio.AioRpcError) as error:
                if isinstance(error, RemoteError) and error.reason == pb.REASON_WRONG_RUN:
                    detail = f"the coordinator at {places} does not serve the run of the link: {error.detail}"
                    raise ConfigError(f"{detail}. Use a newer link") from error
                why = error.detail if isinstance(error, RemoteError) else error.code().name.lower()
                if why != said:
                    log.info("waiting for %s: %s", where, why)
                    tell(f"waiting for {where}: {why}", "check the link's address, and that the coordinator's port is open")
                    said = why
                await self._rest(backoff)

    def _learn(self, envelope: pb.Envelope) -> None:
        """Store the coordinator's record: it is newer than the link. Raises RemoteError for another peer's record."""
        self._directory.learn(self._own(envelope))

    def _own(self, envelope: pb.Envelope) -> Statement[pb.PeerRecord]:
        record = open_envelope(envelope, self._link.run_id, (pb.KIND_PEER_RECORD,))
        if record.peer != self._link.coordinator:
            raise RemoteError(pb.REASON_BAD_SIGNATURE, f"another peer, {record.peer}, answers instead of the coordinator")
        return record

    async def watch(
        self,
        next_round: Callable[[], int],
        hello: Callable[[], Statement[pb.Heartbeat]] | None = None,
        away: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[services.WatchEvent]:
        """Yield events for ever; after every reconnect, from the commit of `next_round()`. The stream proves that this
        node is live: it begins with `hello()`, except for a spectator's; `away()` is called when it breaks."""
        looking_out = asyncio.create_task(self._look_out(), name="find the coordinator")
        try:
            async for event in self._watch(next_round, hello, away):
                if looking_out.done():
                    looking_out.result()
                yield event
        finally:
            looking_out.cancel()

    async def _watch(
        self, next_round: Callable[[], int], hello: Callable[[], Statement[pb.Heartbeat]] | None, away: Callable[[], None]
    ) -> AsyncIterator[services.WatchEvent]:
        backoff = Backoff()
        while True:
            self._moved.clear()
            self._followed = await self._way()
            try:
                async with self._calling() as stub:
                    request = services.WatchRequest(from_round=next_round(), hello=hello().envelope if hello else None)
                    async with aclosing(self._events(stub, request)) as events:
                        async for event in events:
                            if not self.connected:
                                self.connected = True
                                log.info("connected to the coordinator")
                            backoff.reset()
                            yield event
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            if self.connected:
                self.connected = False
                log.warning("the coordinator is away%s", "; training continues" if hello else "")
                away()
            if not self._moved.is_set():
                await self._rest(backoff)
                await self._directory.look_up(self._link.coordinator)

    async def commit(self, round: int) -> Statement[pb.Commit]:
        """Return a commit of the coordinator, after as many tries as it takes. Only its signature is verified."""
        backoff = Backoff()
        while True:
            try:
                async with self._calling() as stub:
                    async for event in stub.Watch(services.WatchRequest(from_round=round), timeout=CALL_SECONDS):
                        if event.HasField("statement") and event.statement.kind == pb.KIND_COMMIT:
                            return open_envelope(event.statement, self._link.run_id, (pb.KIND_COMMIT,))
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await self._rest(backoff)

    async def challenge(self, peer: str) -> bytes:
        """A nonce to answer with evidence; trying until the coordinator has given one."""
        backoff = Backoff()
        while True:
            try:
                request = services.ChallengeRequest(peer=peer)
                async with self._calling() as stub:
                    reply: services.Challenge = await stub.GetChallenge(request, timeout=CALL_SECONDS)
                return reply.nonce
            except (RemoteError, grpc.aio.AioRpcError):
                await self._rest(backoff)

    async def submit(self, statement: Statement) -> Answer:
        """Deliver a statement, trying again until the coordinator has answered. Cancel to give up."""
        backoff = Backoff()
        while True:
            try:
                answer = await self._ask(statement.envelope)
                if answer.reason != pb.REASON_RATE:
                    return answer
            except (RemoteError, grpc.aio.AioRpcError):
                pass
            await backoff.wait()

    async def submit_once(self, envelope: pb.Envelope) -> Answer | None:
        """Deliver once, or not at all: None when no answer came."""
        try:
            return await self._ask(envelope)
        except (RemoteError, grpc.aio.AioRpcError):
            return None

    async def _ask(self, envelope: pb.Envelope) -> Answer:
        """Raises RemoteError where the answer is not the coordinator's to this statement."""
        async with self._calling() as stub:
            signed = await self._unless_moved(stub.Submit(envelope, timeout=CALL_SECONDS))
        answer: Statement[pb.Answer] = open_envelope(signed, self._link.run_id, (pb.KIND_ANSWER,))
        body = answer.body
        if answer.peer != self._link.coordinator or body.statement != sha256(envelope.key, envelope.body):
            raise RemoteError(pb.REASON_BAD_SIGNATURE, "the answer does not match the submitted statement")
        return Answer(_OUTCOMES[body.outcome], body.reason, body.detail, signed, body.head, body.valid_until_ms)

    async def presence(self) -> services.PresenceList:
        """Return the peers that are live for the coordinator; none if it does not answer."""
        try:
            async with self._calling() as stub:
                present: services.PresenceList = await stub.GetPresence(services.GetPresenceRequest(), timeout=PRESENCE_SECONDS)
                # Unsigned, and for people: JSON has no number that is none.
                return services.PresenceList(
                    peers=[each for each in present.peers if math.isfinite(each.loss) and math.isfinite(each.tokens_per_second)]
                )
        except (RemoteError, grpc.aio.AioRpcError):
            return services.PresenceList()
