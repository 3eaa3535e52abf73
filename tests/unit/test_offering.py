"""Tests of the delivery of a node's statements: at once, once, and again if one may have been lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dilocox.node.exchange.resubmit import resubmit_until_acknowledged
from dilocox.protocol.wire.messages import Statement
from tests.helpers import Table, manifest, until

NEVER = 3600.0
TABLE = Table(manifest()).genesis()
CONTRIBUTION, REPORT, LEAVE = TABLE.contribution(0), TABLE.report(0), TABLE.leave(0)


class Mouth:
    """Node that offers to a coordinator, whose answers the test releases."""

    def __init__(self) -> None:
        self.speak, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.due: list[Statement] = []
        self.said: list[Statement] = []
        self.greeted = 0
        self.reached = True
        self.holds = True

    async def offer(self, statement: Statement) -> bool:
        self.said.append(statement)
        await self.may_answer.wait()
        if self.reached and self.holds:
            self.due.remove(statement)
        self.speak.set()  # as an answer does, which is an input of the machine
        return self.reached

    async def greet(self) -> None:
        self.greeted += 1

    @asynccontextmanager
    async def open(self, again_seconds: float = NEVER) -> AsyncIterator[None]:
        task = asyncio.create_task(
            resubmit_until_acknowledged(self.speak, lambda: self.due, self.offer, self.greet, again_seconds)
        )
        yield
        task.cancel()

    def say(self, statement: Statement) -> None:
        self.due.append(statement)
        self.speak.set()


async def test_what_is_signed_while_another_is_answered_is_said_at_once():
    """Reproduce a fault: it waited for three seconds, and in two rounds of eight all clusters waited with it."""
    mouth = Mouth()
    async with mouth.open():
        mouth.may_answer.clear()
        mouth.say(CONTRIBUTION)
        await until(lambda: mouth.said == [CONTRIBUTION])
        mouth.say(REPORT)
        mouth.may_answer.set()
        await until(lambda: mouth.said == [CONTRIBUTION, REPORT])
        mouth.say(LEAVE)
        await until(lambda: mouth.said == [CONTRIBUTION, REPORT, LEAVE])
        assert mouth.greeted >= 2


async def test_what_is_not_held_is_said_again_and_not_without_end():
    mouth = Mouth()
    mouth.holds = False
    async with mouth.open(again_seconds=0.01):
        mouth.say(CONTRIBUTION)
        await until(lambda: len(mouth.said) > 3)
    mouth = Mouth()
    mouth.holds = False
    async with mouth.open():
        mouth.say(CONTRIBUTION)
        await until(lambda: mouth.said)
        for _ in range(100):
            await asyncio.sleep(0)
        assert mouth.said == [CONTRIBUTION], "an answer is no reason to say it again at once"


@pytest.mark.parametrize("reached", [True, False])
async def test_where_no_answer_comes_the_others_wait_with_it(reached: bool):
    mouth = Mouth()
    mouth.reached = reached
    mouth.due = [CONTRIBUTION, REPORT]
    async with mouth.open():
        await until(lambda: mouth.said)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(mouth.said) == 1 + reached
