"""Driver of the round machine: inputs in, records written, then effects out. It contains no decision.

It steps and answers an input at once, and writes the changes in batches in the background (round_log.py). A signed
statement leaves only after its batch, and all batches before it, are durable. A thread makes the commit while inputs
wait: with a thousand clusters that takes longer than the event loop may block. Senders repeat inputs that a crash lost.
A failed write ends `run`, whichever caller started it: memory is then ahead of the log, and the next start resumes
after the last batch.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from dilocox.coordinator.round_log import Committed, Entry, InputLog, KeptFirst, LogItem, RoundLog
from dilocox.protocol.consensus import chain as chains
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.rules import Judgement
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.events import Event
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.round_events import RoundEvents
from dilocox.protocol.rounds.round_machine import (
    Close,
    Differ,
    Input,
    Moment,
    Received,
    Relay,
    Reply,
    Resumed,
    RoundState,
    SealBallot,
    Tick,
)
from dilocox.protocol.wire.messages import Statement, open_envelope, seal
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["Clock", "RoundDriver"]

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
"""A deadline is noticed within this."""
HELD_SECONDS = 1.0
"""Longest write, in seconds, that does not stop the round's clock. A longer write delays everything that leaves."""

Clock = Callable[[], Moment]
Publish = Callable[[Statement[object] | Differ], None]


def clock() -> Moment:
    return Moment(time.monotonic(), int(1000 * time.time()))


class RoundDriver:
    """Single-threaded on the event loop but for the writes."""

    def __init__(
        self,
        identity: Identity,
        chain: ChainFile,
        publish: Publish,
        clock: Clock = clock,
        rounds: RoundLog | None = None,
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """`publish` sends what is on disk to everyone. `rounds`: where the open round is stored; None: beside the chain. `emit`
        gets what happened, as soon as it is on disk."""
        self.identity, self.chain, self._publish, self._clock = identity, chain, publish, clock
        self._run_id = chain.manifest.run_id
        self._log: RoundLog = rounds or InputLog(chain)
        self._batch: list[LogItem] = []
        self._outbox: list[Statement[object] | Differ] = []
        """Effects that leave when the batch is durable, in order."""
        self._emit = emit
        self._telling, self._happened = RoundEvents(), list[Event]()
        self._closing: asyncio.Task[None] | None = None
        """While a commit is made, `state` is the one that it closes …"""
        self._queued: list[Input] = []
        """Inputs that arrived during a write; they are stepped after it."""
        self.writing = asyncio.Lock()
        self._produced = 0
        """Counts what is to be written or sent …"""
        self._done = 0
        """Number of items whose write ended. A caller that waited for them starts no write for later items."""
        self._failure: BaseException | None = None
        """Error of the first failed write: no write follows it."""
        self._writing_since: float | None = None
        """Start of the write in progress, by `clock`."""
        self._held = 0.0
        """Seconds for which writes held up what leaves."""
        self._wake = asyncio.Event()
        self._signed = False
        """Whether this process has signed a commit, or is about to: what nodes give back then comes too late."""
        self.state: RoundState = round_machine.start(chain.manifest, chain.head, self._now().seconds)

    def resume(self) -> None:
        """Resume after the last batch. At first no peer is live, and nothing is signed before a majority of the roster is."""
        entries = list(self._log.replay())
        if entries:
            self.state = round_machine.start(self.chain.manifest, self.chain.head, entries[0].moment.seconds)
        for number, entry in enumerate(entries):
            state, effects = round_machine.decide(self.state, entry.event, entry.moment)
            if effects and isinstance(effects[-1], Close):
                log.warning(
                    "the inputs that could close round %d are on disk without its commit; waiting for them again",
                    state.head.round,
                )
                self._batch.append(KeptFirst(number))  # another start would stop here too, and miss what comes now
                break
            self._telling.saw(self.state, state, entry.moment)  # reported by an earlier incarnation
            self.state = state
        if entries or self.chain.length:
            self.feed(Resumed(healed=self._log.healed))
            log.info("restarted in round %d, with %d inputs", self.state.head.round, len(entries))

    def _now(self) -> Moment:
        """Return the time of the round. It stands still while a write delays what leaves: no deadline may pass for a
        ballot not sent yet."""
        moment = self._clock()
        return moment._replace(seconds=moment.seconds - self._held - self._holding(moment.seconds))

    def _holding(self, now: float) -> float:
        """Return for how many seconds the write in progress has delayed what leaves."""
        return 0.0 if self._writing_since is None else max(0.0, now - self._writing_since - HELD_SECONDS)

    async def _write(self, batch: list[LogItem]) -> None:
        """Raises what the disk raises."""
        self._writing_since = self._clock().seconds
        try:
            await self._log.write(batch)
        finally:
            self._held += self._holding(self._clock().seconds)
            self._writing_since = None

    def feed(self, event: Input) -> Judgement | None:
        """Step; the answer, where the input is a statement. While a commit is made the input waits, and has no answer yet: await
        `settled` before a statement."""
        if self._closing is not None:
            self._queued.append(event)
            return None
        moment, before = self._now(), self.state
        self.state, effects = round_machine.decide(before, event, moment)
        if self.state is not before and self.state != before:
            self._batch.append(Entry(event, moment))
        self._happened += self._telling.saw(before, self.state, moment)
        self._produced += 1
        judgement = None
        for effect in effects:
            match effect:
                case Reply(answer):
                    judgement = answer
                case Relay(statement):
                    self._outbox.append(statement)
                case Differ():
                    self._outbox.append(effect)
                case Close(moment):
                    self._signed = True
                    self._closing = asyncio.create_task(self._close(moment), name="closing")
                case SealBallot(body):
                    ballot = seal(self.identity, pb.KIND_BALLOT, self._run_id, body)
                    self.feed(Received(ballot))
                    self._outbox.append(ballot)
        self._wake.set()
        return judgement

    async def _close(self, moment: Moment) -> None:
        before = self.state

        def make() -> tuple[RoundState, Statement[pb.Commit]]:
            after, sealing = round_machine.close(before, moment)
            return after, seal(self.identity, pb.KIND_COMMIT, self._run_id, sealing.body)

        self.state, commit = await asyncio.to_thread(make)
        self._committed(before.head, commit, moment)
        self._closing = None
        queued, self._queued = self._queued, []
        for event in queued:
            self.feed(event)
        self._wake.set()

    def _committed(self, before: Head, commit: Statement[pb.Commit], moment: Moment) -> None:
        """Commit and the beginning of the round that follows, in one batch."""
        self._produced += 1
        self._batch.append(Committed(before, commit, self.state.head))
        self._batch += [Entry(event, moment) for event in round_machine.inherited(self.state)]
        self._outbox.append(commit)
        self._happened += self._telling.closed(before, commit.body, self.state.head)

    async def settled(self) -> None:
        """Wait for the commit that is being made. Raises what making it raised."""
        while self._closing is not None:
            await asyncio.shield(self._closing)

    async def flush(self) -> None:
        """Write everything so far and send it. Raises the write's error, also of an earlier write. A caller that hangs up
        cancels only its own wait: the outbox belongs to all callers."""
        flushing = asyncio.create_task(self._flush(self._produced), name="flush")
        flushing.add_done_callback(lambda task: task.cancelled() or task.exception())  # `run` raises it
        await asyncio.shield(flushing)

    async def _flush(self, wanted: int) -> None:
        async with self.writing:
            await self.settled()  # what closes a round is written with its commit
            if self._failure is not None:
                raise self._failure
            if wanted <= self._done:
                return
            taken = self._produced
            batch, self._batch = self._batch, []
            outbox, self._outbox = self._outbox, []
            happened, self._happened = self._happened, []
            if batch:
                try:
                    await self._write(batch)
                except BaseException as error:
                    self._failure = error
                    self._wake.set()
                    raise
            for item in batch:
                if isinstance(item, Committed):
                    self.chain.move_to(item.after)
            for event in happened:
                self._emit(event)
            for sent in outbox:
                self._publish(sent)
                await asyncio.sleep(0)  # each to everyone: others get their turn in between
            self._done = taken

    async def run(self) -> None:
        """Write, send, and notice deadlines, until cancelled."""
        while True:
            now, due = self._now().seconds, round_machine.next_deadline(self.state)
            if due is not None and now >= due:
                self.feed(Tick())
            await self.flush()
            self._wake.clear()
            if not self._batch and not self._outbox and not self._happened:
                pause = TICK_SECONDS if due is None else min(TICK_SECONDS, max(0.01, due - now))
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def adopt(self, envelope: pb.Envelope) -> bool:
        """Take back a commit that we signed and lost; whether it was the next one. Raises RemoteError for what we did not sign."""
        await self.settled()
        head = self.state.head
        commit = open_envelope(envelope, self._run_id, (pb.KIND_COMMIT,))
        if commit.body.round != head.round or commit.peer != self.identity.peer:
            return False
        after, commit = await asyncio.to_thread(chains.extend, self.chain.manifest, head, envelope)
        if self.state.head.digest != head.digest or self._signed:
            raise RemoteError(pb.REASON_WRONG_HEAD, "another commit was signed instead")
        log.warning("recovered commit %d, which was missing in this database", commit.body.round)
        moment = self._now()
        self.state = round_machine.start(self.chain.manifest, after, moment.seconds)
        self._committed(head, commit, moment)
        self.feed(Resumed(healed=True))
        await self.flush()
        return True
