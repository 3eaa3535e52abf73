"""Requests of the member machine to the workers that this node leads: verdicts, scores, replays."""

import asyncio
import logging
from typing import Protocol

from dilocox.node.member.driver import JudgeOrder, Order, RoundClosed
from dilocox.protocol.ids import short
from dilocox.protocol.member import member_io
from dilocox.protocol.member.member_io import Verdict
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.process.tasks import Tasks

__all__ = ["Judge", "Judging"]

log = logging.getLogger(__name__)


class Judge(Protocol):
    """The workers of a cluster, as the machine of its lead host asks them."""

    async def judge(self, contribution: Statement[pb.Contribution], base: bytes, rank_or_k: int) -> Verdict:
        """Download and check its payloads, until cancelled; `base`: this node's state root."""

    def score(self, asked: member_io.Measure) -> None: ...

    def recheck(self, round: int) -> None:
        """Replay the last commit from disk."""

    def resynchronise(self) -> None:
        """Start again from a state that the run agreed on."""


class Machine(Protocol):
    orders: asyncio.Queue[Order]

    def feed(self, event: member_io.Judged) -> None: ...


class Judging:
    def __init__(self, machine: Machine, judge: Judge, tasks: Tasks) -> None:
        self._machine, self._judge, self._tasks = machine, judge, tasks
        self._verdicts: list[asyncio.Task[None]] = []
        """Checks of contributions to the open round; each starts on arrival, so that downloads overlap training."""

    async def run(self) -> None:
        """Follow the machine's orders, until cancelled."""
        while True:
            self.follow(await self._machine.orders.get())

    def follow(self, order: Order) -> None:
        match order:
            case JudgeOrder(contribution):
                name = f"judge {short(contribution.peer)}"
                self._verdicts.append(self._tasks.start(self._give_verdict(order), name))
            case RoundClosed():
                self._cancel_verdicts()
            case member_io.Measure():
                self._judge.score(order)
            case member_io.Recheck(round):
                log.warning("the state before round %d differs from the other nodes'; replaying the commit before it", round)
                self._judge.recheck(round)
            case member_io.Resynchronise():
                self._cancel_verdicts()
                self._judge.resynchronise()

    def _cancel_verdicts(self) -> None:
        """Stop the checks in progress: their round closed, or this node's base changed."""
        for task in self._verdicts:
            task.cancel()
        self._verdicts.clear()

    async def _give_verdict(self, order: JudgeOrder) -> None:
        verdict = await self._judge.judge(order.contribution, order.base, order.rank_or_k)
        self._machine.feed(member_io.Judged(order.contribution.digest, verdict))
