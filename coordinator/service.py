"""The coordinator's gRPC service: statements in, the run's events out."""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from dilocox.coordinator import driver as driving
from dilocox.coordinator.challenges import Challenges
from dilocox.coordinator.driver import RoundDriver
from dilocox.coordinator.liveness import Liveness
from dilocox.coordinator.round_log import RoundLog
from dilocox.coordinator.stream_limits import Streams
from dilocox.protocol import limits
from dilocox.protocol.consensus.rules import ACCEPT, JUDGES, Judgement, Outcome, ignore, reject
from dilocox.protocol.crypto import Identity, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.events import Event, RoundOpen, StatementRefused
from dilocox.protocol.ids import peer_id, short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_machine import Absent, Attested, Differ, Present, Received, Refused, RoundState
from dilocox.protocol.wire.attestation import (
    Appraiser,
    AttestationError,
    Evidence,
    Policy,
    check_binding,
    report_data,
    summary,
)
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.limits.addresses import address_of
from dilocox.transport.limits.caller_auth import Context
from dilocox.transport.limits.token_bucket import TokenBucket
from dilocox.transport.net.blob_server import send
from dilocox.transport.net.peer_directory import life_of, same_place
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EventLog

__all__ = ["Contacts", "CoordinatorService"]

log = logging.getLogger(__name__)

PRESENCE_SECONDS = 1.0
"""Interval of the search for silent peers, and of reports of the round's state."""
LOOKS_AT_ONCE = 16
"""Most peers whose silence or return the machine receives in one step."""
WATCH_BACKLOG = 4096
"""Events queued for a watcher before it is dropped; it reconnects and catches up from the chain."""
_OUTCOMES = {
    Outcome.ACCEPT: pb.OUTCOME_ACCEPT,
    Outcome.IGNORE: pb.OUTCOME_IGNORE,
    Outcome.REJECT: pb.OUTCOME_REJECT,
}
_KINDS = (*JUDGES, pb.KIND_HEARTBEAT, pb.KIND_EVIDENCE, pb.KIND_COMMIT, pb.KIND_PEER_RECORD)


def _says_more(record: pb.PeerRecord, before: pb.PeerRecord) -> bool:
    return life_of(record) > life_of(before) or not same_place(record, before)


class Buckets:
    """A rate of statements for each known peer, and for each address that unknown peers call from."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, sender: str) -> bool:
        """Return whether this sender may submit one statement more, and count it."""
        now = self._clock()
        bucket = self._buckets.setdefault(sender, TokenBucket(limits.STATEMENTS_PER_SECOND, limits.STATEMENTS_BURST, now))
        self._buckets.move_to_end(sender)
        if len(self._buckets) > limits.KNOWN_PEERS:
            self._buckets.popitem(last=False)
        return bucket.take(now)


class Callers(Protocol):
    def peer(self, context: Context) -> str:
        """Return the caller's peer id; empty if it sends none. Raises RemoteError if its credential is invalid."""


class Directory(Protocol):
    def know(self, peers: Sequence[str]) -> None:
        """Know that these take part, the coordinator first."""

    def learn(self, record: Statement[pb.PeerRecord]) -> None: ...


@dataclass(frozen=True)
class Contacts:
    """Callers of the server, and addresses of peers."""

    callers: Callers
    directory: Directory


_APPRAISERS = ThreadPoolExecutor(1, "appraise")
"""Thread that verifies evidence. Evidence of an unknown peer may take seconds, and must not block the threads that write
statements."""
RECORD_SECONDS = 30.0
"""Shortest time between two published changes of a member's record: addresses do not change more often."""


class CoordinatorService(rpc.CoordinatorServicer):
    def __init__(
        self,
        identity: Identity,
        chain: ChainFile,
        manifest: pb.Envelope,
        appraise: Appraiser,
        clock: driving.Clock = driving.clock,
        rounds: RoundLog | None = None,
        contacts: Contacts | None = None,
        events: EventLog | None = None,
    ) -> None:
        """`rounds`: where several coordinators store the open round; None: beside the chain, there is one. `contacts`: None where
        no server calls it. `events`: keeps what happened; None: it is logged only."""
        self.identity, self.chain = identity, chain
        self._run_id, self._holders = chain.manifest.run_id, frozenset(chain.manifest.run.relays)
        self._manifest_envelope = manifest
        self._appraise, self._policy = appraise, Policy(chain.manifest.attestation)
        self._clock = clock
        self._presence, self._presence_at = services.PresenceList(), -math.inf
        """Newest answer to GetPresence, and its time."""
        self._challenges = Challenges(lambda: clock().seconds)
        self._appraising: set[str] = set()
        """Senders, as `judge` names them, whose evidence is being verified or waits for it."""
        self.record: Statement[pb.PeerRecord] | None = None
        """Our signed peer record; set before it serves the run."""
        self._contacts, self.events = contacts, events
        self.watchers: set[asyncio.Queue[services.WatchEvent | None]] = set()
        self._streams = Streams(self._known, chain.manifest.may_read)
        self.shared = rounds is not None
        """True where several coordinators share the run."""
        self._buckets = Buckets(lambda: clock().seconds)
        self.liveness = Liveness(chain.manifest.rounds.liveness_seconds, lambda: clock().seconds)
        self.ballot: Statement[object] | None = None
        """Published ballot. Peers receive nothing that is not durable yet."""
        self.records: dict[str, Statement[pb.PeerRecord]] = {}
        """Records of the roster and of claiming peers: their addresses."""
        self._told: dict[str, tuple[float, pb.PeerRecord]] = {}
        """Time and content of the record published last, by member."""
        self._said = ""
        self.driver = RoundDriver(identity, chain, self._publish, clock, rounds, self.emit)

    def resume(self) -> None:
        """Continue the round that an earlier incarnation left open."""
        self.driver.resume()
        self.ballot = self.state.gathered.ballot

    @property
    def state(self) -> RoundState:
        return self.driver.state

    async def run(self) -> None:
        """Notice silence, and say why the round is open, until cancelled."""
        while True:
            for number, _ in enumerate(self._liveness_steps(), 1):
                if number % LOOKS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self.pass_on_records()
            self._report_open_round()
            await asyncio.sleep(PRESENCE_SECONDS)

    def emit(self, event: Event) -> None:
        level = logging.WARNING if isinstance(event, StatementRefused) else logging.INFO
        if self.events is not None:
            self.events.say(event, level)
        else:
            log.log(level, "%s", event.line())

    # Liveness

    def look_around(self) -> None:
        """Tell the machine which peers of the roster, and which claiming peers, became live or absent."""
        for _ in self._liveness_steps():
            pass

    def _liveness_steps(self) -> Iterator[None]:
        """`look_around`, a step after each input of the machine."""
        asked = {*self.state.head.roster, *self.state.gathered.claims}
        for peer in sorted(asked):
            alive = self._hears(peer)
            if alive and peer in self.state.absent:
                self.driver.feed(Present(peer))
                yield
            elif not alive and peer not in self.state.absent:
                self.driver.feed(Absent(peer))
                yield
        here = asked | self.state.head.cluster_by_peer.keys() | self._holders
        self.liveness.forget(keep=here)
        if gone := self.records.keys() - here:
            self.records = {peer: record for peer, record in self.records.items() if peer not in gone}
        if self._contacts is not None:
            self._contacts.directory.know([self.identity.peer, *sorted(here)])

    def _hears(self, peer: str) -> bool:
        """Return whether a peer is live. A peer with a longer chain counts as live only after it has returned the missing
        commits."""
        return self.liveness.alive(peer) and self.liveness.signs[peer].length <= self.state.head.round

    # Publishing

    def _publish(self, sent: Statement[object] | Differ) -> None:
        if isinstance(sent, Differ):
            disagreement = services.Disagreement(round=sent.round, clusters=sent.clusters)
            self._send_to_watchers(services.WatchEvent(disagreement=disagreement))
            return
        if sent.kind == pb.KIND_BALLOT:
            self.ballot = sent
        if sent.kind == pb.KIND_COMMIT:
            self.ballot = None
        self._send_to_watchers(services.WatchEvent(statement=sent.envelope))
        if sent.kind == pb.KIND_COMMIT:
            self.look_around()

    def _send_to_watchers(self, event: services.WatchEvent) -> None:
        for queue in list(self.watchers):
            if queue.qsize() >= WATCH_BACKLOG:
                self.watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def _report_open_round(self) -> None:
        """Why the round is open, where that changed since the last time: a sentence a second, however many contribute."""
        why = round_machine.why_open(self.state)
        if why != self._said:
            self._said = why
            self.emit(RoundOpen(self.state.head.round, why))
            self._send_to_watchers(self._tip())

    def _tip(self) -> services.WatchEvent:
        head = self.chain.head
        why, still = round_machine.why_open(self.state), self.state.stands_still
        return services.WatchEvent(
            tip=services.Tip(
                round=head.round,
                head=head.digest,
                why=why,
                appointment=self.chain.newest_word,
                stands_still=still,
            )
        )

    # gRPC

    def learn_own_record(self, record: Statement[pb.PeerRecord]) -> None:
        """Store this coordinator's newest record, for peers that ask for the run. With several coordinators every peer
        receives it."""
        before, self.record = self.record, record
        if self.shared and (before is None or _says_more(record.body, before.body)):
            self._send_to_watchers(services.WatchEvent(statement=record.envelope))

    async def GetRun(self, request: services.GetRunRequest, context: Context) -> services.Run:
        assert self.record is not None
        return services.Run(
            manifest=self._manifest_envelope,
            coordinator=self.record.envelope,
            appointment=self.chain.newest_word,
            wall_ms=int(1000 * time.time()),
        )

    async def GetPresence(self, request: services.GetPresenceRequest, context: Context) -> services.PresenceList:
        if not self._may_read(await self._caller(context)):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this run is not public")
        now = self._clock().seconds
        if now - self._presence_at >= PRESENCE_SECONDS:  # for 1,000 peers it takes 4 ms of the event loop
            self._presence, self._presence_at = self.liveness.view(), now
        return self._presence

    async def _caller(self, context: Context) -> str:
        """Return the caller's peer id; empty for a spectator. Ends the call if the credential is invalid."""
        assert self._contacts is not None, "only a server may call this"
        try:
            return self._contacts.callers.peer(context)
        except RemoteError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.detail)
            raise

    async def Submit(self, request: pb.Envelope, context: Context) -> pb.Envelope:
        judgement = await self.submitted(request, await self._caller(context), address_of(context.peer()))
        if request.kind == pb.KIND_CONTRIBUTION:
            await self.driver.flush()  # what we sign for must outlive a crash
        return self.answer(request, judgement).envelope

    def answer(self, request: pb.Envelope, judgement: Judgement) -> Statement[pb.Answer]:
        """Return a signed answer, so that the peer can prove to others what this coordinator answered."""
        head = self.chain.head
        body = pb.Answer(
            statement=sha256(request.key, request.body),
            outcome=_OUTCOMES[judgement.outcome],
            reason=judgement.reason,
            detail="".join(filter(str.isprintable, judgement.detail))[: limits.TEXT_CHARACTERS],
            round=head.round,
            head=head.digest,
            valid_until_ms=judgement.valid_until_ms,
        )
        return seal(self.identity, pb.KIND_ANSWER, self._run_id, body)

    async def submitted(self, request: pb.Envelope, caller: str, address: str) -> Judgement:
        """Judge a submitted statement. Only its signer may submit a statement; any peer may return a commit that this
        coordinator signed."""
        signer = peer_id(request.key) if len(request.key) == 32 else ""
        if request.kind != pb.KIND_COMMIT and (not signer or caller != signer):
            return reject(pb.REASON_BAD_SIGNATURE, "a statement must be sent by its signer")
        return await self.judge(request, caller if self._known(caller) else address, caller)

    async def GetChallenge(self, request: services.ChallengeRequest, context: Context) -> services.Challenge:
        caller = await self._caller(context)
        if caller != request.peer:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "a challenge must be requested by the peer that will answer it"
            )
        return services.Challenge(nonce=self.challenge(caller))

    def challenge(self, peer: str) -> bytes:
        return self._challenges.give(peer)

    async def judge(self, request: pb.Envelope, sender: str, caller: str = "") -> Judgement:
        """Judge a message. `sender`: whose rate it uses, a known peer or an unknown peer's address; `caller`: peer id, if given."""
        if not self._buckets.take(sender):
            return reject(pb.REASON_RATE, f"more than {limits.STATEMENTS_PER_SECOND} statements a second")
        try:
            statement = open_envelope(request, self._run_id, _KINDS)
            if statement.kind == pb.KIND_COMMIT:
                return await self._take_back(request)
        except RemoteError as error:  # anybody writes any key into an envelope, so only the caller answers for it
            return self._refuse(caller, error.reason, error.detail) if caller else reject(error.reason, error.detail)
        if statement.kind == pb.KIND_HEARTBEAT:
            return self._heartbeat(statement)
        if statement.kind == pb.KIND_PEER_RECORD:
            return self._take_record(statement)
        if statement.kind == pb.KIND_EVIDENCE:
            return await self._judge_evidence(request, statement, sender)
        await self.driver.settled()
        if statement.kind not in (pb.KIND_CLAIM, pb.KIND_CLUSTER) and not self._known(statement.peer):
            return self._refuse(statement.peer, pb.REASON_NOT_ON_ROSTER, "not on the roster, and it sent no claim")
        live = statement.kind != pb.KIND_CLAIM or self._hears(statement.peer)
        judgement = self.driver.feed(Received(statement, live))
        assert judgement is not None
        return judgement

    async def _take_back(self, request: pb.Envelope) -> Judgement:
        if request.key != self.identity.key:
            raise RemoteError(pb.REASON_BAD_SIGNATURE, "this coordinator did not sign that commit")
        if await self.driver.adopt(request):
            self.look_around()
            return ACCEPT
        return ignore(pb.REASON_STALE_ROUND, f"round {self.state.head.round} is open")

    def _refuse(self, peer: str, reason: pb.Reason, detail: str) -> Judgement:
        """Reject a statement, and record the rejection for the commit while there is space."""
        self.driver.feed(Refused(peer, reason, detail))
        return reject(reason, detail)

    def _may_read(self, peer: str) -> bool:
        return self._known(peer) or self.chain.manifest.may_read(peer)

    def _known(self, peer: str) -> bool:
        return peer in self._holders or peer in self.state.gathered.claims or peer in self.state.head.cluster_by_peer

    def _heartbeat(self, statement: Statement[pb.Heartbeat]) -> Judgement:
        if statement.peer not in self.liveness.signs and not self._known(statement.peer):
            return ignore(pb.REASON_NOT_ON_ROSTER, "not on the roster, and it sent no claim")
        if not self.liveness.hear(statement):
            return ignore(pb.REASON_STALE_ROUND, "a newer heartbeat was received")
        if self._hears(statement.peer):
            if statement.peer in self.state.absent:
                self.driver.feed(Present(statement.peer))
        elif statement.body.incomplete and statement.peer not in self.state.absent:
            self.driver.feed(Absent(statement.peer))
        return ACCEPT

    def _take_record(self, statement: Statement[pb.PeerRecord]) -> Judgement:
        """Store a peer's record for the other peers: they find it without the DHT."""
        known = self.records.get(statement.peer)
        if not self._known(statement.peer):
            return ignore(pb.REASON_NOT_ON_ROSTER, "not on the roster, and it sent no claim")
        if known is not None and known.digest == statement.digest:
            return ignore(pb.REASON_UNSPECIFIED, "already received")
        if known is not None and known.body.sequence >= statement.body.sequence:
            return ignore(pb.REASON_STALE_ROUND, "a newer record of this peer is known")
        self.records[statement.peer] = statement
        if self._contacts is not None:  # after a move, the DHT is found through it
            self._contacts.directory.learn(statement)
        return ACCEPT

    def pass_on_records(self) -> None:
        """Publish new records of the roster, at most one of each member per interval."""
        now, members = self._clock().seconds, self.state.head.cluster_by_peer.keys() | self._holders
        for peer in sorted(self.records.keys() & members):
            record, (at, told) = self.records[peer], self._told.get(peer, (-math.inf, None))
            if told is record.body or now - at < RECORD_SECONDS:
                continue
            if told is None or not same_place(told, record.body):
                at = now
                self._send_to_watchers(services.WatchEvent(statement=record.envelope))
            self._told[peer] = at, record.body
        self._told = {peer: told for peer, told in self._told.items() if peer in members}

    def _has_turn(self, sender: str) -> bool:
        """Return whether this sender's evidence may be verified now: one at a time of each sender, and few of unknown
        peers."""
        strangers = sum(not self._known(other) for other in self._appraising)
        return sender not in self._appraising and (self._known(sender) or strangers < limits.APPRAISALS)

    async def _judge_evidence(self, request: pb.Envelope, statement: Statement[pb.BoundEvidence], sender: str) -> Judgement:
        """A peer's answer to our challenge: verified in a thread, its verdict an input of the round machine."""
        if not self._has_turn(sender):
            return reject(pb.REASON_RATE, "other evidence is verified first")
        bound, key, run, now = statement.body, request.key, self._run_id, self._clock().wall_ms // 1000
        self._appraising.add(sender)
        try:
            check_binding(bound, key, run, bound.nonce)
            self._challenges.redeem(statement.peer, bound.nonce)
            evidence = Evidence.from_message(bound.evidence)
            expected = report_data(evidence.kind, key, run, bound.nonce)
            looking = asyncio.get_running_loop().run_in_executor(
                _APPRAISERS, self._appraise, self._policy, evidence, expected, now
            )
            verdict, claims = await looking
            if not verdict.ok or claims is None:
                raise AttestationError(verdict.code, verdict.reason)
        except AttestationError as error:
            return self._refuse(statement.peer, error.reason, error.detail)
        finally:
            self._appraising.discard(sender)
        attestation = summary(claims, statement.peer, bound.nonce, verdict.valid_until)
        log.info("%s attested: %s, %s…", short(statement.peer), claims.kind, attestation.measurement[:16])
        await self.driver.settled()
        self.driver.feed(Attested(attestation))
        if attestation not in (
            known.get(statement.peer) for known in (self.state.gathered.attested, self.state.head.attestations)
        ):
            return ignore(pb.REASON_RATE, "the limit of peers with waiting verdicts is reached")
        return Judgement(Outcome.ACCEPT, valid_until_ms=attestation.valid_until_ms)

    async def Watch(self, request: services.WatchRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        caller = await self._caller(context)
        try:
            async with aclosing(self.follow(request, caller, address_of(context.peer()))) as events:
                async for event in events:
                    await send(context, event)
        except RemoteError as error:
            denied = error.reason == pb.REASON_NOT_ADMITTED
            code = grpc.StatusCode.PERMISSION_DENIED if denied else grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, error.detail)

    async def follow(self, request: services.WatchRequest, caller: str, address: str) -> AsyncGenerator[services.WatchEvent]:
        """Yield everything from a commit on. Raises RemoteError if the caller, or all unknown peers together, have enough
        streams."""
        with self._streams.joined(caller, address):
            async with aclosing(self._follow(request, caller)) as events:
                async for event in events:
                    yield event

    async def _follow(self, request: services.WatchRequest, caller: str) -> AsyncGenerator[services.WatchEvent]:
        watcher = self.greet(request, caller)
        queue: asyncio.Queue[services.WatchEvent | None] = asyncio.Queue()
        try:
            if self.shared and self.record is not None:  # who leads, and who else may
                yield services.WatchEvent(statement=self.record.envelope)
            yield self._tip()
            number = request.from_round
            while number < self.chain.length:  # no await between the last test and joining the watchers
                raw = self.chain.raw(number)
                assert raw is not None
                number += 1
                yield services.WatchEvent(statement=pb.Envelope.FromString(raw))
            self.watchers.add(queue)
            self.look_around()
            contributions = [s for slot in self.state.gathered.contributions.values() for s in slot]
            members = [self.records[peer] for peer in self._told if peer in self.records]
            for statement in [*members, *contributions, *([self.ballot] if self.ballot else [])]:
                yield services.WatchEvent(statement=statement.envelope)
            while (event := await queue.get()) is not None:
                if not event.HasField("disagreement") or watcher in event.disagreement.clusters:
                    yield event
        finally:
            self.watchers.discard(queue)
            if watcher:
                self.liveness.close_stream(watcher)
                self.look_around()

    def greet(self, request: services.WatchRequest, caller: str) -> str:
        """Return the peer for which this stream is a heartbeat; empty for a spectator. No peer may send another peer's
        heartbeat."""
        if not request.HasField("hello"):
            return ""
        try:
            hello = open_envelope(request.hello, self._run_id, (pb.KIND_HEARTBEAT,))
        except RemoteError:
            return ""
        if hello.peer != caller:
            return ""
        self.liveness.hear(hello)  # a later heartbeat may have overtaken it: it is this peer's stream all the same
        return caller if self.liveness.open_stream(caller, request.from_round) else ""
