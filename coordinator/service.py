"""The coordinator's gRPC service: statements in, the run's events out, one round machine between."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from dilocox.coordinator.challenges import Challenges
from dilocox.coordinator.log import InputLog
from dilocox.protocol import limits, round, rules
from dilocox.protocol.attestation import Appraiser, AttestationError, Evidence, Policy, check_binding, report_data, summary
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError, reason_name
from dilocox.protocol.ids import peer_id, short
from dilocox.protocol.messages import Statement, open_envelope, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.pb import services_pb2_grpc as rpc
from dilocox.protocol.round import (
    Absent,
    Attested,
    Differ,
    Input,
    Present,
    Received,
    Refused,
    Relay,
    Reply,
    Resumed,
    SealBallot,
    SealCommit,
    Tick,
)
from dilocox.protocol.rules import Judgement, Outcome, reject
from dilocox.transport.chain_file import ChainFile

__all__ = ["CoordinatorService"]

log = logging.getLogger(__name__)

PRESENCE_SECONDS = 1.0
"""How often presence is told to watchers and checked against the liveness window."""
WATCH_BACKLOG = 4096
"""Events queued for a watcher before it is dropped; it reconnects and catches up from the chain."""
_OUTCOMES = {
    Outcome.ACCEPT: services.SubmitReply.OUTCOME_ACCEPT,
    Outcome.IGNORE: services.SubmitReply.OUTCOME_IGNORE,
    Outcome.REJECT: services.SubmitReply.OUTCOME_REJECT,
}
_KINDS = (*round.RECEIVED_KINDS, pb.KIND_HEARTBEAT, pb.KIND_EVIDENCE)


@dataclass
class Sign:
    """A peer's sign of life."""

    heard_at: float
    sequence: int = 0
    heartbeat: pb.Heartbeat | None = None
    tokens: float = limits.STATEMENTS_BURST
    """Rate limit bucket."""


class CoordinatorService(rpc.CoordinatorServicer):
    """Single-threaded on the event loop: an input is logged, stepped and its effects sent before the next is looked at."""

    def __init__(
        self,
        identity: Identity,
        chain: ChainFile,
        log_: InputLog,
        manifest: pb.Envelope,
        appraise: Appraiser,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.identity, self.chain, self._log, self._clock = identity, chain, log_, clock
        self._run_id = chain.manifest.run_id
        self._manifest_envelope = manifest
        self._appraise, self._policy = appraise, Policy(chain.manifest.attestation)
        self._challenges = Challenges(clock)
        self.record: Statement | None = None
        """Our signed peer record; set before the server starts."""
        self.signs: dict[str, Sign] = {}
        self._watchers: set[asyncio.Queue[services.WatchEvent | None]] = set()
        self.ballot: Statement | None = None
        self.state = round.start(chain.manifest, self._clock())
        self._replay()

    def _replay(self) -> None:
        """Stand where the last process stood. A commit that was logged but not yet stored is made again, the same bits."""
        first = True
        for event, now in self._log.replay():
            if first:
                self.state = round.start(self.chain.manifest, now)
                first = False
            self._step(event, now)
        if first:
            return
        self._feed(Resumed())
        now = self._clock()
        for cluster in self.state.head.roster.values():
            for peer in cluster.peers:
                self.signs[peer] = Sign(heard_at=now)  # a full window to come back
        log.info("replayed the log: round %d is open", self.state.head.round)

    def _step(self, event: Input, now: float) -> Judgement | None:
        self.state, effects = round.step(self.state, event, now)
        judgement = None
        for effect in effects:
            match effect:
                case Reply(answer):
                    judgement = answer
                case Relay(statement):
                    self._publish(services.WatchEvent(statement=statement.envelope))
                case SealBallot(body):
                    self.ballot = seal(self.identity, pb.KIND_BALLOT, self._run_id, body)
                    self._publish(services.WatchEvent(statement=self.ballot.envelope))
                case SealCommit(body):
                    self._commit(seal(self.identity, pb.KIND_COMMIT, self._run_id, body))
                case Differ(number, peers):
                    self._publish(services.WatchEvent(disagreement=services.Disagreement(round=number, peers=peers)))
        return judgement

    def _commit(self, commit: Statement) -> None:
        self.ballot = None
        if commit.body.round >= self.chain.length:
            self.chain.append(commit.envelope)
            counted = len(commit.body.counted)
            log.info("round %d closed: %d counted, %d not", commit.body.round, counted, len(commit.body.excluded))
        self._publish(services.WatchEvent(statement=commit.envelope))

    def _feed(self, event: Input) -> Judgement | None:
        now = self._clock()
        self._log.append(event, now)
        return self._step(event, now)

    def _publish(self, event: services.WatchEvent) -> None:
        for queue in list(self._watchers):
            if queue.qsize() >= WATCH_BACKLOG:
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    async def run(self) -> None:
        """Ticks and presence, until cancelled."""
        while True:
            deadline = round.next_deadline(self.state)
            now = self._clock()
            if deadline is not None and now >= deadline:
                self._feed(Tick())
            self._check_presence(now)
            wait = PRESENCE_SECONDS if deadline is None else max(0.01, min(PRESENCE_SECONDS, deadline - now))
            await asyncio.sleep(wait)

    def _check_presence(self, now: float) -> None:
        window = self.chain.manifest.rounds.liveness_seconds
        for peer, sign in self.signs.items():
            if now - sign.heard_at > window and peer not in self.state.absent:
                log.warning("%s was not heard from for %.0f s", short(peer), window)
                self._feed(Absent(peer))
        self._publish(services.WatchEvent(presence=self.presence()))

    def presence(self) -> services.PresenceList:
        entries = []
        for peer in sorted(self.signs):
            beat = self.signs[peer].heartbeat or pb.Heartbeat()
            entries.append(
                services.Presence(
                    peer=peer,
                    present=peer not in self.state.absent,
                    round=beat.round,
                    step=beat.step,
                    loss=beat.loss,
                    tokens_per_second=beat.tokens_per_second,
                )
            )
        return services.PresenceList(peers=entries)

    # gRPC

    def learn_own_record(self, record: Statement) -> None:
        """Our newest record, for those who ask for the run."""
        self.record = record

    async def GetRun(self, request: services.GetRunRequest, context: grpc.aio.ServicerContext) -> services.Run:
        assert self.record is not None
        return services.Run(manifest=self._manifest_envelope, coordinator=self.record.envelope)

    async def Submit(self, request: pb.Envelope, context: grpc.aio.ServicerContext) -> services.SubmitReply:
        evidence = request.kind == pb.KIND_EVIDENCE
        judgement = await self._judge_evidence(request) if evidence else self._judge(request)
        if judgement.outcome is Outcome.REJECT:
            sender = short(peer_id(request.key)) if len(request.key) == 32 else "?"
            log.warning("rejected a statement of %s: %s: %s", sender, reason_name(judgement.reason), judgement.detail)
        return services.SubmitReply(outcome=_OUTCOMES[judgement.outcome], reason=judgement.reason, detail=judgement.detail)

    async def GetChallenge(self, request: services.ChallengeRequest, context: grpc.aio.ServicerContext) -> services.Challenge:
        return services.Challenge(nonce=self._challenges.give(request.peer[: limits.TEXT_CHARACTERS]))

    def _judge(self, request: pb.Envelope) -> Judgement:
        statement, sign = self._admit(request)
        if isinstance(statement, Judgement):
            return statement
        assert sign is not None
        if statement.kind == pb.KIND_HEARTBEAT:
            return self._heartbeat(statement, sign)
        if statement.kind != pb.KIND_CLAIM and not self._known(statement.peer):
            # A stranger's statement changes nothing; it is refused without a place in the log.
            return self._refuse(statement.peer, pb.REASON_NOT_ON_ROSTER, "not on the roster and not claiming")
        judgement = self._feed(Received(statement))
        assert judgement is not None
        return judgement

    def _admit(self, request: pb.Envelope) -> tuple[Statement, Sign] | tuple[Judgement, None]:
        """The statement with a valid signature and within its sender's rate, or the answer to what is not."""
        try:
            statement = open_envelope(request, self._run_id, _KINDS)
        except RemoteError as error:
            sender = peer_id(request.key) if len(request.key) == 32 else "unknown"
            return self._refuse(sender, error.reason, error.detail), None
        sign = self._sign_of_life(statement)
        if sign.tokens < 1:
            return reject(pb.REASON_RATE, f"more than {limits.STATEMENTS_PER_SECOND} statements a second"), None
        sign.tokens -= 1
        return statement, sign

    def _refuse(self, peer: str, reason: pb.Reason, detail: str) -> Judgement:
        """Reject, and keep it for the commit while there is room."""
        if len(self.state.refusals) < limits.REFUSALS_PER_ROUND:
            self._feed(Refused(peer, reason, detail))
        return reject(reason, detail)

    async def _judge_evidence(self, request: pb.Envelope) -> Judgement:
        """A peer's answer to our challenge: verified in a thread, its verdict an input of the round machine."""
        statement, _ = self._admit(request)
        if isinstance(statement, Judgement):
            return statement
        bound: pb.BoundEvidence = statement.body
        key, run, now = request.key, self._run_id, int(self._clock())
        try:
            check_binding(bound, key, run, bound.nonce)
            self._challenges.redeem(statement.peer, bound.nonce)
            evidence = Evidence.from_message(bound.evidence)
            expected = report_data(evidence.kind, key, run, bound.nonce)
            verdict, claims = await asyncio.to_thread(self._appraise, self._policy, evidence, expected, now)
            if not verdict.ok or claims is None:
                raise AttestationError(verdict.code, verdict.reason)
        except AttestationError as error:
            return self._refuse(statement.peer, error.reason, error.detail)
        attestation = summary(claims, statement.peer, bound.nonce, verdict.valid_until)
        log.info("%s attested: %s, %s…", short(statement.peer), claims.kind, attestation.measurement[:16])
        self._feed(Attested(attestation))
        return Judgement(Outcome.ACCEPT, pb.REASON_UNSPECIFIED, str(verdict.valid_until))

    def _known(self, peer: str) -> bool:
        return peer in self.state.claims or rules.cluster_of(self.state.head.roster, peer) is not None

    def _sign_of_life(self, statement: Statement) -> Sign:
        now = self._clock()
        sign = self.signs.get(statement.peer) or Sign(heard_at=now)
        if len(self.signs) < limits.KNOWN_PEERS or self._known(statement.peer):
            self.signs[statement.peer] = sign
        refill = (now - sign.heard_at) * limits.STATEMENTS_PER_SECOND
        sign.tokens = min(limits.STATEMENTS_BURST, sign.tokens + max(0.0, refill))
        if statement.kind != pb.KIND_HEARTBEAT or statement.body.sequence > sign.sequence:
            sign.heard_at = now
            if statement.peer in self.state.absent:
                self._feed(Present(statement.peer))
        return sign

    def _heartbeat(self, statement: Statement, sign: Sign) -> Judgement:
        if statement.body.sequence <= sign.sequence:
            return Judgement(Outcome.IGNORE, pb.REASON_STALE_ROUND, "a newer heartbeat was seen")
        sign.sequence, sign.heartbeat = statement.body.sequence, statement.body
        return rules.ACCEPT

    async def Watch(
        self, request: services.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[services.WatchEvent]:
        queue: asyncio.Queue[services.WatchEvent | None] = asyncio.Queue()
        number = request.from_round
        while number < self.chain.length:  # no await between the last test and joining the watchers
            raw = self.chain.raw(number)
            assert raw is not None
            number += 1
            yield services.WatchEvent(statement=pb.Envelope.FromString(raw))
        self._watchers.add(queue)
        try:
            open_round = [*self.state.contributions.values(), *([self.ballot] if self.ballot else [])]
            for statement in open_round:
                yield services.WatchEvent(statement=statement.envelope)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._watchers.discard(queue)
