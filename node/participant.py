"""Drives the member machine (protocol/member.py): what a node does in a run. Holds no decision of the protocol.

Four loops share this object, all on the event loop, none of them heavy:

    watch     commits, contributions and ballots from the coordinator
    offer     our statements, until the coordinator holds them
    workers   ours: generations where we lead (generations.py), a part of them where another does (boxes/follower.py)
    beat      heartbeats

Everything a restart needs is in the blob store, the chain file, our own statements and the workers' boundary checkpoints.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from dilocox.node.attest.prover import Prover
from dilocox.node.coordinator_link import CoordinatorLink
from dilocox.node.crew import Progress
from dilocox.node.downloader import Downloader
from dilocox.node.forks import is_ours, replaced
from dilocox.node.offering import keep_offering
from dilocox.node.own import OwnStatements
from dilocox.protocol import events, limits, member
from dilocox.protocol.chain import taken
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError, RemoteError
from dilocox.protocol.facts import Verdict
from dilocox.protocol.ids import printable, short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.member import MemberState
from dilocox.protocol.messages import Statement, canonical, open_envelope, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.rules import Outcome
from dilocox.protocol.status import Status, status
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.event_log import EventLog
from dilocox.transport.files import write_atomically
from dilocox.transport.presence import Directory, same_place
from dilocox.transport.tasks import Tasks

__all__ = ["Participant"]

log = logging.getLogger(__name__)

HEARTBEAT_SHARE = 0.25
"""Of the liveness window: three heartbeats may be lost …"""
HEARTBEAT_SECONDS = 2.0
"""… and never rarer than this, for the people who watch."""


class Workers(Protocol):
    """Who trains for us: our cluster's workers where we lead it, our box's where another does."""

    progress: Progress

    def status(self) -> Status | None:
        """What they do; None before their first step."""

    def chain_grew(self) -> None: ...

    def spoken(self, state: MemberState) -> None:
        """What the machine stands for now."""

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict: ...

    def score(self, asked: member.Score) -> None: ...

    def recheck(self, round: int) -> None: ...

    def resynchronise(self) -> None: ...

    async def run(self) -> None: ...

    async def stop(self) -> None: ...


class Participant:
    def __init__(
        self,
        identity: Identity,
        manifest: Manifest,
        chain: ChainFile,
        own: OwnStatements,
        coordinator: CoordinatorLink,
        directory: Directory,
        downloader: Downloader,
        tasks: Tasks,
        kept: EventLog,
        prover: Prover | None,
        workers: Callable[["Participant"], Workers],
        lead: str = "",
        account: bytes = b"",
    ) -> None:
        """`prover`: where the run asks for evidence. `workers`: made for us. `lead`: where we are a box of its cluster. `account`:
        to which what we earn is paid."""
        self.identity, self.manifest, self.chain = identity, manifest, chain
        self.cluster = lead or identity.peer
        self._own, self._coordinator, self.downloader, self._tasks = own, coordinator, downloader, tasks
        self.prover = prover
        self._directory = directory
        self._told: pb.PeerRecord | None = None
        """Our record, as the coordinator passes it on."""
        self.round_why = ""
        """Why the round is open, as the coordinator says."""
        self.stands_still = False
        """The open round waits until more clusters take part."""
        self.events = kept
        """What happened here."""
        self._speak = asyncio.Event()
        """Set when there may be something to offer."""
        self._vote_timer: asyncio.TimerHandle | None = None
        self._accepted: pb.Accepted | None = None
        """Of the open round."""
        self._judging: dict[bytes, asyncio.Task[None]] = {}
        """Of the open round; begun when a contribution is seen, so that fetching hides behind training."""
        self._giving_back: asyncio.Task[None] | None = None
        """Commits to a coordinator that lacks them: one at a time, begun anew with each stream."""
        self._busy: Status | None = Status("starting", "starting the stage workers")
        """What the daemon does before the workers train."""
        self._shown = Status("", "")
        self.finished = asyncio.Event()
        """The run has its last commit."""
        self.pause = ""
        """Until when this node takes no part, or soon will not."""
        self.stepped: Callable[[MemberState], None] = lambda state: None
        """Told where the machine stands after each input."""
        self.state: MemberState = member.start(manifest, identity.peer, chain.head, lead=lead, account=account)
        self.workers = workers(self)
        for statement in own.all():
            self.feed(member.Signed(statement))

    @property
    def progress(self) -> Progress:
        return self.workers.progress

    @property
    def status(self) -> Status:
        return status(self.state, self._busy or self.workers.status(), self.pause)

    # The machine

    def feed(self, event: member.Input) -> None:
        self.state, effects = member.step(self.state, event, time.monotonic())
        for effect in effects:
            match effect:
                case member.Sign(kind, body):
                    self._tasks.start(self._sign(seal(self.identity, kind, self.manifest.run_id, body)), "sign")
                case member.Judge(contribution):
                    judging = self._judge(contribution, self.state.root or b"", self.state.head.rank_or_k)
                    self._judging[contribution.digest] = self._tasks.start(judging, f"judge {short(contribution.peer)}")
                case member.Score():
                    self.workers.score(effect)
                case member.Recheck(round):
                    log.warning("the state before round %d differs from others'; replaying the commit before it", round)
                    self.workers.recheck(round)
                case member.Resynchronise(round, detail):
                    self.emit(events.Diverged(round, detail))
                    self.workers.resynchronise()
                case member.Halt(why):
                    raise LocalError(why)
                case member.Emit(told):
                    self.emit(told)
        self.workers.spoken(self.state)
        self.stepped(self.state)
        if self.state.head.finished:
            self.finished.set()
        self._arm_vote_timer()
        self._speak.set()
        self._show()

    def _arm_vote_timer(self) -> None:
        due = member.next_deadline(self.state)
        if self._vote_timer is not None:
            self._vote_timer.cancel()
            self._vote_timer = None
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._vote_timer = asyncio.get_running_loop().call_later(delay, lambda: self.feed(member.Tick()))

    async def _sign(self, statement: Statement[Any]) -> None:
        """On disk before it is said."""
        await asyncio.to_thread(self._own.keep, statement)
        self.feed(member.Signed(statement))

    async def _judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> None:
        verdict = await self.workers.judge(contribution, base, rank_or_k)
        self.feed(member.Judged(contribution.digest, verdict))

    # What people see

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.LeftOut) and self._accepted is not None:
            path = self.chain.path.parent / f"left-out-{event.round}.pb"
            self._tasks.start(asyncio.to_thread(write_atomically, path, canonical(self._accepted)), "keep the proof")
        self.events.say(event)

    def _show(self) -> None:
        status = self.status
        if status != self._shown:
            self._shown = status
            self.emit(events.StateChanged(status.name, status.why))

    def tell(self, busy: Status | None) -> None:
        self._busy = busy
        self._show()

    def counted_history(self, rounds: int = 3) -> list[bool]:
        """Whether we were counted, newest last."""
        history = []
        for number in range(max(1, self.chain.length - rounds), self.chain.length):
            commit = self.chain.commit(number)
            if commit is not None and commit.body.counted:
                history.append(self.cluster in {item.cluster for item in taken(commit.body)})
        return history

    # The coordinator

    async def watch(self) -> None:
        async for event in self._coordinator.watch(lambda: self.chain.length, self._heartbeat, self._away):
            match event.WhichOneof("event"):
                case "tip":
                    self._hears_tip(event.tip)
                case "statement":
                    await self._statement(event.statement)
                case "disagreement":
                    if self.cluster == self.identity.peer and self.cluster in event.disagreement.clusters:
                        self.feed(member.Differs(event.disagreement.round))

    def _away(self) -> None:
        self.feed(member.Away())

    def _hears_tip(self, tip: services.Tip) -> None:
        """The first event of a stream; a coordinator that knows less than we do gets back what it signed."""
        self.stands_still, why = tip.stands_still, printable(tip.why[: limits.EVENT_CHARACTERS])
        if why != self.round_why:
            self.round_why = why
            told = events.RoundOpen(tip.round, why)
            (self.events.add if tip.round else self.events.say)(told)  # who waits for the run to begin wants to see it
        if (error := replaced(self.chain, tip.appointment)) is not None:
            raise error
        if not self.state.connected:
            self._told = None
            self.feed(member.Connected())
            if self._giving_back is not None:
                self._giving_back.cancel()  # of what it says now
                self._giving_back = None
        if tip.round < self.chain.length and (self._giving_back is None or self._giving_back.done()):
            self._giving_back = self._tasks.start(self._give_back(tip.round), "give back")

    async def _give_back(self, first: int) -> None:
        for number in range(first, self.chain.length):
            raw = self.chain.raw(number)
            assert raw is not None
            await self._coordinator.submit_once(pb.Envelope.FromString(raw))

    async def _statement(self, envelope: pb.Envelope) -> None:
        try:
            if envelope.kind == pb.KIND_COMMIT:
                await self.take_commit(envelope)
            elif envelope.kind == pb.KIND_PEER_RECORD:
                self._directory.learn(open_envelope(envelope, self.manifest.run_id, (pb.KIND_PEER_RECORD,)))
            else:
                kinds = (pb.KIND_BALLOT, pb.KIND_CONTRIBUTION)
                self.feed(member.Seen(open_envelope(envelope, self.manifest.run_id, kinds)))
        except RemoteError as error:
            log.warning("the coordinator sent something that does not hold: %s", error)

    async def take_commit(self, envelope: pb.Envelope) -> None:
        sent = open_envelope(envelope, self.manifest.run_id, (pb.KIND_COMMIT,))
        if await is_ours(self.chain, sent):
            return
        commit = await asyncio.to_thread(self.chain.append, envelope)
        for task in self._judging.values():
            task.cancel()
        self._judging.clear()
        if not self.state.takes_part:
            self._told = None
        self._directory.know(self.chain.parties)
        self.feed(member.Committed(commit, self.chain.head))
        self._accepted = None
        self.downloader.traffic.closed(commit.body.round)
        self.workers.chain_grew()

    async def offer(self) -> None:
        """Say what the coordinator does not hold, now and again."""
        await keep_offering(self._speak, lambda: member.offers(self.state), self._offer, self._offer_record)

    async def _offer_record(self) -> None:
        """How to dial us, for the coordinator to pass on: when that changed, and after it forgot us."""
        own = self._directory.own
        if own is None or not self.state.connected or (self._told is not None and same_place(self._told, own.body)):
            return
        answer = await self._coordinator.submit_once(own.envelope)
        if answer is not None and answer.reason == pb.REASON_UNSPECIFIED:
            self._told = own.body

    async def _offer(self, statement: Statement[Any]) -> bool:
        """Whether an answer came."""
        answer = await self._coordinator.submit_once(statement.envelope)
        if answer is None:
            return False
        if answer.outcome is Outcome.REJECT:
            log.warning("the coordinator rejected our %s: %s", type(statement.body).__name__.lower(), answer.detail)
        self.feed(member.Answered(statement, answer.outcome, answer.reason, answer.detail, answer.head))
        if statement.kind == pb.KIND_CONTRIBUTION and statement.digest in self.state.held:
            self._accepted = pb.Accepted(contribution=statement.envelope, answer=answer.signed)
        return True

    def _heartbeat(self) -> Statement[pb.Heartbeat]:
        progress = self.progress
        body = pb.Heartbeat(
            sequence=self._own.next_sequence(),
            round=progress.round,
            step=progress.step,
            loss=progress.told_loss,
            head=self.chain.head.digest,
            tokens_per_second=progress.tokens_per_second,
            incomplete=not self.state.whole,
        )
        return seal(self.identity, pb.KIND_HEARTBEAT, self.manifest.run_id, body)

    async def beat(self) -> None:
        while True:
            await self._coordinator.submit_once(self._heartbeat().envelope)
            await asyncio.sleep(min(HEARTBEAT_SECONDS, HEARTBEAT_SHARE * self.manifest.rounds.liveness_seconds))

    async def prove(self) -> None:
        """Stay attested; what the machine claims with waits for it."""
        assert self.prover is not None
        self._tasks.start(self.prover.stay_attested(self._coordinator), "attest")
        said = ""
        while True:
            await self.prover.changed.wait()
            self.prover.changed.clear()
            result = self.prover.result
            if result.code and result.code != said:
                self.emit(events.AttestationRefused(result.code, result.reason))
            said = result.code
            self.feed(member.Attestation(result.attested, result.reason))
