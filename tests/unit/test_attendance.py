"""Tests of a node's attendance: the operator's command and hours, and how the node pauses and returns."""

import asyncio
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from dilocox.node.api.server import add_operator_routes
from dilocox.node.member.participation import PAUSED, ParticipationSchedule, ParticipationWish, wish
from dilocox.node.workers.progress import Progress
from dilocox.protocol.consensus.rules import ACCEPT, Outcome
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import LocalError
from dilocox.protocol.member import member, member_io
from dilocox.protocol.member.node_status import Status, status
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from dilocox.transport.limits.schedule import Hours
from dilocox.transport.process.tasks import Tasks
from dilocox.transport.process.watched_state import Changes
from dilocox.transport.store.data_directory import API_KEY, DataDirectory
from dilocox.views.api_listener import ApiListener
from dilocox.views.http import create_app
from tests.helpers import PATIENCE_SECONDS, Table, identity, manifest, no_status, until

NIGHT = Hours.parse("22-06")
NOON, MIDNIGHT = (datetime(2026, 11, 23, hour).timestamp() for hour in (12, 0))


class Workers:
    """Workers that take some time to end."""

    def __init__(self) -> None:
        self.generations, self.running = 0, False
        self.progress = Progress(tokens_per_second=5.0)
        self._ended = asyncio.Event()

    def chain_grew(self) -> None: ...

    async def run(self) -> None:
        self.generations += 1
        self.running = True
        self._ended.clear()
        await self._ended.wait()
        self.running = False

    async def stop(self) -> None:
        await asyncio.sleep(0.01)
        self._ended.set()


class Node:
    """Node without a network, whose statements arrive at once."""

    def __init__(self, number: int = 0, lead: str = "", needed: int = 2) -> None:
        self.table = Table(manifest(rounds={"min_clusters": needed})).genesis()
        self.state = member.start(self.table.run, identity(number).peer, self.table.head, lead=lead)
        self.pause, self.workers = "", Workers()
        self.progress = self.workers.progress
        self.changes = Changes()
        self._identity: Identity = identity(number)
        self.ready()

    def ready(self) -> None:
        self.feed(member_io.StateReady(self.table.head.round, self.table.state_root(), None))

    def feed(self, event: member_io.Input) -> None:
        self.state, effects = member.step(self.state, event, self.table.now)
        self.changes.happened()
        for effect in effects:
            if isinstance(effect, member_io.Sign):
                self.say(seal(self._identity, effect.kind, self.table.run.run_id, effect.body))

    def say(self, statement: Statement) -> None:
        self.feed(member_io.Signed(statement))
        assert self.table.submit(statement) == ACCEPT
        self.feed(member_io.Answered(statement, Outcome.ACCEPT, pb.REASON_UNSPECIFIED, ""))

    def commit(self) -> None:
        """Close a round without this node."""
        self.table.absent(0)
        self.table.contribute([1, 2]).vote([1, 2])
        self.feed(member_io.Committed(self.table.commits[-1], self.table.head))

    def pause_until(self, until: str) -> None:
        self.pause = until

    @property
    def status(self) -> Status:
        return status(self.state, Status("training", "on the roster"), self.pause)


def attending(node: Node, tasks: Tasks, folder: Path, hours: Hours | None = None, **clock: Any) -> ParticipationSchedule:
    attendance = ParticipationSchedule(node, node.workers, tasks, folder, hours, **clock)
    tasks.start(attendance.follow(), "attendance")
    return attendance


@pytest.fixture
async def tasks():
    tasks = Tasks()
    yield tasks
    await tasks.close()


def test_what_is_wanted():
    assert wish(False, None, NOON) == ParticipationWish(True, "")
    assert wish(False, NIGHT, MIDNIGHT) == ParticipationWish(True, "")
    assert wish(False, NIGHT, NOON) == ParticipationWish(False, "until 22:00 (--hours 22:00-06:00)")
    assert wish(True, NIGHT, MIDNIGHT) == ParticipationWish(False, "until `dilocox resume`")


async def test_who_pauses_finishes_ends_its_workers_and_comes_back(tmp_path: Path, tasks: Tasks):
    node = Node()
    attendance = attending(node, tasks, tmp_path)
    await attendance.update()
    tasks.start(attendance.work(), "work")
    await until(lambda: node.workers.running)
    assert await attendance.pause(False) == "it pauses when round 1 has its contribution and its vote"
    assert node.status.name == "finishing"
    assert "pauses until `dilocox resume`" in node.status.why
    assert node.workers.running
    node.commit()
    await until(lambda: not node.workers.running)
    assert node.status == Status("paused", "until `dilocox resume`")
    assert not node.progress.tokens_per_second
    assert (tmp_path / PAUSED).exists()
    assert "resumed" in await attendance.resume()
    await until(lambda: node.workers.running)
    assert node.workers.generations == 2
    assert not (tmp_path / PAUSED).exists()


async def test_a_pause_lasts_over_a_restart(tmp_path: Path, tasks: Tasks):
    await attending(Node(), tasks, tmp_path).pause(True)
    node = Node()
    node.state = member.start(node.table.run, identity(7).peer, node.table.head)
    await attending(node, tasks, tmp_path).update()
    assert node.status.name == "paused"
    assert member.parted(node.state), "it never had a seat, and says nothing"


async def test_now_gives_up_the_round(tmp_path: Path, tasks: Tasks):
    node = Node(needed=3)
    attendance = attending(node, tasks, tmp_path)
    still = "the run needs 3 clusters, and waits until that many are live"
    assert await attendance.pause(True) == f"it pauses now, and gives up round 1; {still}"
    assert node.state.leaving


async def test_hours_begin_and_end(tmp_path: Path, tasks: Tasks):
    node, now = Node(), [MIDNIGHT]
    attendance = attending(node, tasks, tmp_path, NIGHT, clock=lambda: now[0])
    await attendance.update()
    assert node.status.name == "training"
    now[0] = NOON
    await attendance.update()
    await attendance.update()
    assert node.status.name == "finishing"
    now[0] = MIDNIGHT  # the clock was set back in between
    await attendance.update()
    assert node.status.name == "training"
    assert "until 22:00" in await at_noon(attendance, now)


async def at_noon(attendance: ParticipationSchedule, now: list[float]) -> str:
    now[0] = NOON
    return await attendance.resume()


async def test_leaving_ends_the_daemon_when_all_is_said(tmp_path: Path, tasks: Tasks):
    node = Node()
    attendance = attending(node, tasks, tmp_path)
    ended = asyncio.create_task(tasks.wait())
    assert "leaves when round 1" in await attendance.leave(False)
    assert "resumed" in await attendance.resume(), "that is taken back, as long as it lasts"
    assert node.status.name == "training"
    await attendance.leave(False)
    await asyncio.sleep(0)
    assert not ended.done()
    node.commit()
    await asyncio.wait_for(ended, PATIENCE_SECONDS)


async def test_who_leaves_serves_its_work_until_the_round_closes(tmp_path: Path, tasks: Tasks):
    node = Node()
    attendance = attending(node, tasks, tmp_path)
    ended = asyncio.create_task(tasks.wait())
    mine, others = node.table.contribution(0), [node.table.contribution(number) for number in (1, 2)]
    node.say(mine)
    for statement in others:
        node.table.submit(statement)
    for statement in (*others, node.table.ballots[-1]):
        node.feed(member_io.Seen(statement))
    await attendance.leave(False)
    for statement in others:
        node.feed(member_io.Judged(statement.digest, (pb.REASON_UNSPECIFIED, 0)))
    assert member.parted(node.state), "it has said all"
    await asyncio.sleep(0)
    assert not ended.done(), "others may still fetch what they vote on"
    node.table.vote([1, 2])
    node.feed(member_io.Committed(node.table.commits[-1], node.table.head))
    await asyncio.wait_for(ended, PATIENCE_SECONDS)


async def test_a_box_is_paused_by_its_lead(tmp_path: Path, tasks: Tasks):
    node = Node(number=5, lead=identity(0).peer)
    attendance = attending(node, tasks, tmp_path)
    with pytest.raises(LocalError, match="its lead host pauses"):
        await attendance.pause(False)
    await attendance.leave(False)
    await asyncio.wait_for(tasks.wait(), PATIENCE_SECONDS)


async def test_only_the_operator_may_ask(tmp_path: Path, tasks: Tasks):
    home = DataDirectory(tmp_path)
    key = home.api_key()
    home.close()
    assert (tmp_path / API_KEY).stat().st_mode & 0o077 == 0
    attendance = attending(Node(), tasks, tmp_path)
    app = create_app(CollectorRegistry(), no_status)
    add_operator_routes(app, attendance, key)
    door = ApiListener("127.0.0.1:0")
    await door.show(app)
    async with aiohttp.ClientSession() as session:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer ü"}, {"Authorization": f"Bearer {key}x"}):
            async with session.post(f"{door.url}/v1/leave?now=yes", headers=headers) as answer:
                assert answer.status == 403
        async with session.post(f"{door.url}/v1/pause", headers={"Authorization": f"Bearer {key}"}) as answer:
            assert "pauses when" in (await answer.json())["says"]
    await door.close()


@pytest.mark.parametrize("at_once", [False, True])
async def test_leaving_a_finished_run_ends_the_daemon_though_no_coordinator_answers(
    tmp_path: Path, tasks: Tasks, at_once: bool
):
    """Reproduce a fault: the daemon waited for ever with a departure of the round after the last one."""
    node = Node()
    attendance = attending(node, tasks, tmp_path)
    node.state = replace(node.state, head=replace(node.state.head, finished=True))
    said = await attendance.leave(at_once)
    assert "finished" in said
    assert "gives up" not in said
    await tasks.wait()
