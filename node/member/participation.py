"""Participation of this node: paused or not, by its operator's command and hours.

A paused node has left the roster; no round waits for it, and it may claim a seat again at any time. Its daemon
continues to follow the chain and to serve blobs. It stores the checkpoint of its last phase, with work that no commit
has applied.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dilocox.node.member.participant import Workers
from dilocox.protocol.errors import LocalError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.member_state import MemberState
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.limits.schedule import Hours, Local, changes_at
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.process.watched_state import Changes
from dilocox.transport.store.files import write_atomically

if TYPE_CHECKING:
    from dilocox.node.data.privacy_budget import Account

__all__ = ["PAUSED", "ParticipationSchedule", "ParticipationWish", "wish"]

PAUSED = "paused"
"""File in the folder of a run: its operator paused this node until further notice."""
LOOK_SECONDS = 20.0
"""Interval of checks of the wall clock: it may be set, and a machine may sleep."""


class ParticipationWish(NamedTuple):
    takes_part: bool
    until: str
    """End of the pause."""


def wish(
    paused: bool, hours: Hours | None, now: float, local: Local = datetime.fromtimestamp, spent: str = ""
) -> ParticipationWish:
    """Return whether this node should take part at a time (seconds since 1970). `spent`: why its private data forbid it."""
    if spent:
        return ParticipationWish(False, f"because another phase would exceed its privacy budget: {spent}")
    if paused:
        return ParticipationWish(False, "until `dilocox resume`")
    if hours is None or hours.hold(local(now)):
        return ParticipationWish(True, "")
    begins = changes_at(hours.hold, now, local)
    return ParticipationWish(
        False, f"until {local(begins):%H:%M} (--hours {hours})" if begins is not None else f"(--hours {hours})"
    )


class Machine(Protocol):
    """The member machine, with what people see of a pause."""

    @property
    def state(self) -> MemberState: ...

    @property
    def changes(self) -> Changes:
        """Return the changes of `state`."""

    @property
    def pause(self) -> str:
        """Return the end of this node's pause; empty: it takes part."""

    def pause_until(self, until: str) -> None: ...

    def feed(self, event: member_io.Input) -> None: ...


class ParticipationSchedule:
    def __init__(
        self,
        machine: Machine,
        workers: Workers,
        tasks: Tasks,
        folder: Path,
        hours: Hours | None,
        account: "Account | None" = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Control the participation. `tasks`: the daemon's; `folder`: of the run; `account`: privacy account of its
        private data; `clock`: seconds since 1970."""
        self.hours, self.account = hours, account
        self._machine, self._workers, self._tasks = machine, workers, tasks
        self._marker, self._clock = folder / PAUSED, clock
        self._going = False
        """The daemon ends when this node has left …"""
        self._at_once = False
        """True if it also does not wait for the commit of payloads that peers still fetch here."""
        self._ending: asyncio.Task[None] | None = None
        """Task that ends the workers, since this node left."""

    # Requests

    async def update_forever(self) -> None:
        """Update the member machine periodically: this node takes part, or pauses."""
        while True:
            await self.update()
            await asyncio.sleep(LOOK_SECONDS)

    async def update(self) -> None:
        """Update the member machine: this node takes part, or pauses."""
        node = self._machine
        if self._going or node.state.lead:
            return
        spent = self.account.sentence if self.account is not None and not self.account.room else ""
        takes_part, until = wish(self._marker.exists(), self.hours, self._clock(), spent=spent)
        node.pause_until(until)
        stays = not node.state.leaving and node.state.finishing is None
        if stays and not takes_part:
            node.feed(member_io.LeaveRun(finishing=True))
        elif takes_part and not stays:
            if self._ending is not None:  # workers that are ending cannot continue
                await asyncio.wait({self._ending})
                self._ending = None
            node.feed(member_io.Return())

    async def pause(self, at_once: bool) -> str:
        """Take no part until `resume`, also where this node was to leave; a sentence for who asked. Raises LocalError where that is
        not ours to say."""
        self._require_lead_host("pauses")
        self._going = False
        await asyncio.to_thread(write_atomically, self._marker, b"")
        await self.update()
        if at_once:
            self._machine.feed(member_io.LeaveRun())
        return self._answer("pauses")

    async def resume(self) -> str:
        """Resume, and return as `pause` does."""
        self._require_lead_host("resumes")
        self._going = False
        await asyncio.to_thread(self._marker.unlink, missing_ok=True)
        await self.update()
        until = self._machine.pause
        return f"resumed; it does not train {until}" if until else "resumed: it claims a seat"

    async def leave(self, at_once: bool) -> str:
        """End the daemon, once this node has left; a sentence for who asked."""
        self._going, self._at_once = True, at_once
        self._machine.pause_until("")
        finished = self._machine.state.head.finished
        self._machine.feed(member_io.LeaveRun(finishing=not at_once))
        if at_once or finished or self._machine.state.lead:  # of a finished run there is no roster to leave
            self._tasks.stop()
        return self._answer("leaves")

    def _require_lead_host(self, does: str) -> None:
        if self._machine.state.lead:
            raise LocalError(
                f"this host belongs to a cluster, which its lead host {does}: run the command there, or `dilocox leave` here"
            )

    def _answer(self, does: str) -> str:
        state = self._machine.state
        head, least = state.head, state.manifest.rounds.min_clusters
        alone = state.on_roster and not head.finished and len(head.roster) <= least
        still = f"; the run needs {least} clusters, and waits until that many are live" if alone else ""
        if head.finished:
            return "the run is finished: this node ends now" if does == "leaves" else "the run is finished: nothing to pause"
        if not state.leaving:
            return f"it {does} when round {state.finishing} has its contribution and its vote{still}"
        gives_up = state.on_roster and pb.KIND_CONTRIBUTION not in state.open.own
        return f"it {does} now{f', and gives up round {head.round}' if gives_up else ''}{still}"

    # Consequences

    async def follow(self) -> None:
        """End the workers when this node has left, and the daemon where its operator wants that; until cancelled."""
        while True:
            changed = self._machine.changes.next
            state = self._machine.state
            if state.leaving and not state.lead and self._ending is None:
                self._ending = self._tasks.start(self._workers.stop(), "end the workers")
            if self._going and member.parted(state) and (self._at_once or not _is_fetched(state)):
                self._tasks.stop()
            await changed.wait()

    async def work(self) -> None:
        """Run the workers while this node takes part, until cancelled or the run cannot continue here."""
        while True:
            while True:
                changed = self._machine.changes.next
                if not self._machine.state.leaving:
                    break
                self._workers.progress.stand_still()
                await changed.wait()
            await self._workers.run()

    async def go(self, seconds: float) -> None:
        """Say goodbye (for at most `seconds`), then end the workers."""
        self._going, self._at_once = True, True
        self._machine.pause_until("")
        self._machine.feed(member_io.LeaveRun())
        unsaid = not self._machine.state.lead  # a follower host's lead host leaves for it
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while unsaid:
                    changed = self._machine.changes.next
                    if member.parted(self._machine.state):
                        break
                    await changed.wait()
        await self._workers.stop()


def _is_fetched(state: MemberState) -> bool:
    """Whether our work of the round that we finish is still voted on: who has not fetched it yet needs us."""
    return pb.KIND_CONTRIBUTION in state.open.own and state.head.round == state.finishing and not state.head.finished
