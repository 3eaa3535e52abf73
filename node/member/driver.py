"""Driver of the member machine (protocol/member/member.py): inputs in, then effects out. It contains no decision of the protocol.

Other parts of the node see it as `MemberPort`. The machine's requests to the workers wait in `orders`, because the
workers are made with the port: so neither needs the other in its constructor.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

from dilocox.node.context.run_context import RunContext
from dilocox.node.state.signed_statements import SignedStatementLog
from dilocox.protocol import events
from dilocox.protocol.errors import LocalError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.member.node_status import Status, status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, canonical, seal
from dilocox.transport.process.watched_state import Changes
from dilocox.transport.store.event_log import EventLog
from dilocox.transport.store.files import write_atomically

__all__ = ["JudgeOrder", "MemberDriver", "MemberPort", "Order", "RoundClosed"]

log = logging.getLogger(__name__)


class MemberPort(Protocol):
    """The member machine, as the workers and the operator's commands see it."""

    @property
    def state(self) -> MemberState: ...

    @property
    def changes(self) -> Changes:
        """Return the changes of `state`."""

    def feed(self, event: member_io.Input) -> None:
        """Feed an input. Raises LocalError if the machine cannot continue."""

    def emit(self, event: events.Event) -> None:
        """Record what happened here."""

    def show(self, busy: Status | None) -> None:
        """Show the status of a daemon whose workers do not train yet; None: the workers' status counts."""


class WorkStatus(Protocol):
    """The workers' status, for people."""

    def status(self) -> Status | None:
        """Return the status; None before the first worker runs."""


@dataclass(frozen=True)
class JudgeOrder:
    contribution: Statement[pb.Contribution]
    base: bytes
    """State root of this node."""
    rank_or_k: int


class RoundClosed:
    """A commit closed the round: verdicts on its contributions are not needed any more."""


Order = JudgeOrder | RoundClosed | member_io.Measure | member_io.Recheck | member_io.Resynchronise
"""Request of the machine to the workers that it leads."""


class MemberDriver:
    def __init__(
        self, context: RunContext, state: MemberState, own: SignedStatementLog, workers: WorkStatus, kept: EventLog
    ) -> None:
        """`state`: of the machine at its start. `own`: what we signed in this run; `kept`: what happened here."""
        self.identity, self.manifest, self.chain, self._tasks = context.identity, context.manifest, context.chain, context.tasks
        self._own, self._workers, self.events = own, workers, kept
        self.state, self.changes = state, Changes()
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.speak = asyncio.Event()
        """Event, set when there may be statements to offer."""
        self.finished = asyncio.Event()
        """Event, set when the run has its last commit."""
        self._vote_timer: asyncio.TimerHandle | None = None
        self._accepted: pb.Accepted | None = None
        """The coordinator's answer to our contribution to the open round."""
        self._busy: Status | None = Status("starting", "starting the stage workers")
        self._shown = Status("", "")
        self._pause = ""

    @property
    def cluster(self) -> str:
        """The peer id of its lead host."""
        return self.state.lead or self.state.me

    @property
    def pause(self) -> str:
        """Return until when this node takes no part; empty: it takes part."""
        return self._pause

    def pause_until(self, until: str) -> None:
        """Show the end of this node's pause; empty: it takes part."""
        self._pause = until

    @property
    def status(self) -> Status:
        return status(self.state, self._busy or self._workers.status(), self.pause)

    def resume(self) -> None:
        """Feed the machine what an earlier incarnation signed."""
        for statement in self._own.all():
            self.feed(member_io.Signed(statement))

    def feed(self, event: member_io.Input) -> None:
        self.state, effects = member.step(self.state, event, time.monotonic())
        for effect in effects:
            match effect:
                case member_io.Sign(kind, body):
                    sealed = seal(self.identity, kind, self.manifest.run_id, body)
                    self._tasks.start(self._sign(sealed), "sign")
                case member_io.Judge(contribution):
                    order = JudgeOrder(contribution, self.state.root or b"", self.state.head.rank_or_k)
                    self.orders.put_nowait(order)
                case member_io.Measure() | member_io.Recheck():
                    self.orders.put_nowait(effect)
                case member_io.Resynchronise(round, detail):
                    self.emit(events.Diverged(round, detail))
                    self.orders.put_nowait(effect)
                case member_io.Halt(why):
                    raise LocalError(why)
                case member_io.Emit(told):
                    self.emit(told)
        if isinstance(event, member_io.Committed):
            self._accepted = None
            if not self.state.lead:  # a follower host has no orders of its own
                self.orders.put_nowait(RoundClosed())
        if self.state.head.finished:
            self.finished.set()
        self._arm_vote_timer()
        self.speak.set()
        self._show()
        self.changes.happened()

    def _arm_vote_timer(self) -> None:
        due = member.next_deadline(self.state)
        if self._vote_timer is not None:
            self._vote_timer.cancel()
            self._vote_timer = None
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._vote_timer = asyncio.get_running_loop().call_later(delay, lambda: self.feed(member_io.Tick()))

    async def _sign(self, statement: Statement[Any]) -> None:
        """Write a statement to disk before it is sent."""
        await asyncio.to_thread(self._own.keep, statement)
        self.feed(member_io.Signed(statement))

    def accepted(self, contribution: pb.Envelope, answer: pb.Envelope) -> None:
        """Store the coordinator's signed answer: it proves that a commit leaves us out."""
        self._accepted = pb.Accepted(contribution=contribution, answer=answer)

    def emit(self, event: events.Event) -> None:
        if isinstance(event, events.LeftOut) and self._accepted is not None:
            path = self.chain.path.parent / f"left-out-{event.round}.pb"
            writing = asyncio.to_thread(write_atomically, path, canonical(self._accepted))
            self._tasks.start(writing, "store the proof")
        self.events.say(event)

    def show(self, busy: Status | None) -> None:
        self._busy = busy
        self._show()

    def _show(self) -> None:
        status = self.status
        if status != self._shown:
            self._shown = status
            self.emit(events.StateChanged(status.name, status.why))
