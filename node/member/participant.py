"""Exchange of a node with the coordinator: commits, contributions and ballots in, this node's statements out.

Its loops run on the event loop, and none of them is heavy:

    watch     commits, contributions and ballots from the coordinator
    offer     our statements, until the coordinator has them
    beat      heartbeats

The member machine (member_driver.py) decides; the workers train: worker groups if this host leads, a part of one if it
follows. Everything that a restart needs is in the blob store, the chain file, the signed statements and the workers'
checkpoints.
"""

import asyncio
import logging
from typing import Any, Protocol

from dilocox.node.context.run_context import RunContext
from dilocox.node.exchange.coordinator_client import CoordinatorLink
from dilocox.node.exchange.forks import is_ours, replaced
from dilocox.node.exchange.resubmit import resubmit_until_acknowledged
from dilocox.node.member.driver import MemberDriver
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.node.workers.progress import Progress
from dilocox.protocol import events, limits
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import printable
from dilocox.protocol.member import member, member_io
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import services_pb2 as services
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.limits.traffic import Traffic
from dilocox.transport.net.peer_directory import PeerDirectory, same_place

__all__ = ["Participant", "Workers"]

log = logging.getLogger(__name__)

HEARTBEAT_SHARE = 0.25
"""Interval of heartbeats as a fraction of the liveness window: three may be lost."""
HEARTBEAT_SECONDS = 2.0
"""Longest interval of heartbeats, for people."""


class Workers(Protocol):
    """The stage workers of this host."""

    progress: Progress

    def chain_grew(self) -> None: ...

    async def run(self) -> None:
        """Run the workers, until cancelled or the run cannot continue here."""

    async def stop(self) -> None: ...


class Participant:
    def __init__(
        self,
        context: RunContext,
        machine: MemberDriver,
        workers: Workers,
        coordinator: CoordinatorLink,
        directory: PeerDirectory,
        own: SignedStatementLog,
        traffic: Traffic,
    ) -> None:
        self.manifest, self.chain, self.identity = context.manifest, context.chain, context.identity
        self.machine, self.workers = machine, workers
        self._tasks, self._coordinator, self._directory = context.tasks, coordinator, directory
        self._own, self._traffic = own, traffic
        self._told: pb.PeerRecord | None = None
        """Our record, as the coordinator passes it on."""
        self.round_why = ""
        """Reason why the round is open, from the coordinator."""
        self.stands_still = False
        """The open round waits until more clusters take part."""
        self._giving_back: asyncio.Task[None] | None = None
        """Backfill of commits to a coordinator: one at a time, restarted with each stream."""

    @property
    def progress(self) -> Progress:
        return self.workers.progress

    def counted_history(self, rounds: int = 3) -> list[bool]:
        """Whether we were counted, newest last."""
        history = []
        for number in range(max(1, self.chain.length - rounds), self.chain.length):
            commit = self.chain.commit(number)
            if commit is not None and commit.body.counted:
                history.append(self.machine.cluster in {item.cluster for item in taken(commit.body)})
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
                    if self.machine.cluster == self.identity.peer and self.machine.cluster in event.disagreement.clusters:
                        self.machine.feed(member_io.Differs(event.disagreement.round))

    def _away(self) -> None:
        self.machine.feed(member_io.Away())

    def _hears_tip(self, tip: services.Tip) -> None:
        """The first event of a stream; a coordinator that knows less than we do gets back what it signed."""
        self.stands_still, why = tip.stands_still, printable(tip.why[: limits.EVENT_CHARACTERS])
        if why != self.round_why:
            self.round_why = why
            told = events.RoundOpen(tip.round, why)
            record = self.machine.events
            (record.add if tip.round else record.say)(told)  # who waits for the run to begin wants to see it
        if (error := replaced(self.chain, tip.appointment)) is not None:
            raise error
        if not self.machine.state.connected:
            self._told = None
            self.machine.feed(member_io.Connected())
            if self._giving_back is not None:
                self._giving_back.cancel()  # replaced by a backfill to its current length
                self._giving_back = None
        if tip.round < self.chain.length and (self._giving_back is None or self._giving_back.done()):
            self._giving_back = self._tasks.start(self._give_back(tip.round), "backfill")

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
                self.machine.feed(member_io.Seen(open_envelope(envelope, self.manifest.run_id, kinds)))
        except RemoteError as error:
            log.warning("the coordinator sent an invalid message: %s", error)

    async def take_commit(self, envelope: pb.Envelope) -> None:
        sent = open_envelope(envelope, self.manifest.run_id, (pb.KIND_COMMIT,))
        if await is_ours(self.chain, sent):
            return
        commit = await asyncio.to_thread(self.chain.append, envelope)
        if not self.machine.state.takes_part:
            self._told = None
        self._directory.know(self.chain.parties)
        self.machine.feed(member_io.Committed(commit, self.chain.head))
        self._traffic.closed(commit.body.round)
        self.workers.chain_grew()

    async def offer(self) -> None:
        """Submit what the coordinator has not acknowledged, again and again."""
        await resubmit_until_acknowledged(
            self.machine.speak, lambda: member.offers(self.machine.state), self._offer, self._offer_record
        )

    async def _offer_record(self) -> None:
        """Submit this peer's record, for the coordinator to pass on: after a change, and after the coordinator lost it."""
        own = self._directory.own
        if own is None or not self.machine.state.connected or (self._told is not None and same_place(self._told, own.body)):
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
            log.warning("the coordinator rejected this node's %s: %s", type(statement.body).__name__.lower(), answer.detail)
        self.machine.feed(member_io.Answered(statement, answer.outcome, answer.reason, answer.detail, answer.head))
        if statement.kind == pb.KIND_CONTRIBUTION and statement.digest in self.machine.state.open.held:
            self.machine.accepted(statement.envelope, answer.signed)
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
            incomplete=not self.machine.state.whole,
        )
        return seal(self.identity, pb.KIND_HEARTBEAT, self.manifest.run_id, body)

    async def beat(self) -> None:
        while True:
            await self._coordinator.submit_once(self._heartbeat().envelope)
            await asyncio.sleep(min(HEARTBEAT_SECONDS, HEARTBEAT_SHARE * self.manifest.rounds.liveness_seconds))
