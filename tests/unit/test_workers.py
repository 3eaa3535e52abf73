"""Tests of groups of worker processes: in any state of a process, its group ends when it should, and the next one starts."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from dilocox.node.workers import process as worker_process
from dilocox.node.workers.environment import WORKER
from dilocox.node.workers.pool import Launch, WorkerPool
from dilocox.node.workers.process import ForkServer, WorkerProcess
from tests import idle_worker
from tests.helpers import PATIENCE_SECONDS, until

LAUNCH = Launch(range(2), 2, 1)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "SERVER", idle_worker.__name__)
    monkeypatch.setenv("PYTHONPATH", str(Path(idle_worker.__file__).parents[1]))


@pytest.fixture
async def pool(light: None, tmp_path: Path) -> AsyncIterator[WorkerPool]:
    def environment(socket: str, launch: Launch) -> dict[str, str]:
        return {"DILOCOX_WORKER_THREADS": "1", "DILOCOX_WORKER_SOCKET": socket}

    pool = WorkerPool(tmp_path, environment)
    await pool.open()
    await until(servers)  # until then the child has the name of this process
    yield pool
    await pool.close()


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def servers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if alive(child) and worker_process.SERVER in child.cmdline():
                found.append(child)
    return found


def workers() -> list[psutil.Process]:
    found = []
    for server in servers():
        with contextlib.suppress(psutil.Error):
            found += [child for child in server.children() if child.name() == WORKER]
    return found


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_generation_that_is_given_up_ends_even_where_a_worker_is_suspended(pool: WorkerPool, suspended: bool):
    """Check a worker that was stopped, or hangs in the kernel, and so does not notice its parent's release. The next
    workers fork from the same process."""
    before, seen = servers(), list[psutil.Process]()
    for _ in range(2):
        generation = asyncio.create_task(pool.run_generation(LAUNCH))
        await until(lambda: len(workers()) == 2)
        found = workers()
        assert not set(found) & set(seen)
        seen += found
        if suspended:
            for worker in found:
                worker.suspend()
        pool.end_generation()
        await ended(generation)
        assert not any(map(alive, seen))
    assert servers() == before


async def test_a_generation_ends_with_the_first_of_its_workers(pool: WorkerPool):
    generation = asyncio.create_task(pool.run_generation(LAUNCH))
    await until(lambda: len(workers()) == 2)
    first, second = workers()
    first.kill()
    await ended(generation)
    assert not alive(second)


@pytest.mark.parametrize("blow", ["kill", "suspend"])
async def test_where_they_fork_from_may_end_or_hang_and_the_next_generation_has_another(
    pool: WorkerPool, blow: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dilocox.node.workers.pool.STOP_SECONDS", 0.2)
    generation = asyncio.create_task(pool.run_generation(LAUNCH))
    await until(lambda: len(workers()) == 2)
    (server,), found = servers(), workers()
    found[0].suspend()  # one of them receives nothing
    getattr(server, blow)()
    if blow == "suspend":
        pool.end_generation()
    await ended(generation)
    assert not any(map(alive, found))
    await trains_again(pool)
    assert not alive(server)


@pytest.mark.parametrize("blow", ["kill", "give up"])
async def test_a_generation_ends_while_nothing_can_fork_yet(pool: WorkerPool, blow: str):
    (server,) = servers()
    server.suspend()
    generation = asyncio.create_task(pool.run_generation(LAUNCH))
    await asyncio.sleep(0.01)
    server.kill() if blow == "kill" else pool.end_generation()
    await ended(generation)
    assert pool.events.get_nowait() is None
    assert not workers()
    await trains_again(pool)
    assert not alive(server)


async def ended(generation: asyncio.Task[None]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await generation


async def trains_again(pool: WorkerPool) -> None:
    """Check that it trains, perhaps at the second attempt, as in the daemon."""
    generation = asyncio.create_task(pool.run_generation(LAUNCH))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(workers()) < 2:
            if generation.done():
                generation = asyncio.create_task(pool.run_generation(LAUNCH))
            await asyncio.sleep(0.01)
    pool.end_generation()
    await ended(generation)


async def test_a_death_is_seen_although_where_it_forked_from_hangs(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker_process, "WORD_SECONDS", 0.2)
    generation = asyncio.create_task(pool.run_generation(LAUNCH))
    await until(lambda: len(workers()) == 2)
    (server,), found = servers(), workers()
    server.suspend()
    found[0].kill()
    await ended(generation)
    assert not any(map(alive, found))
    await trains_again(pool)
    assert not alive(server)


async def test_what_cannot_be_started_leaves_nothing_of_what_was(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    start, started = ForkServer.start, list[WorkerProcess]()

    def once(self: ForkServer, environment: Mapping[str, str], inherited: Sequence[int] = ()) -> WorkerProcess:
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        started.append(start(self, environment, inherited))
        return started[0]

    monkeypatch.setattr(ForkServer, "start", once)
    with pytest.raises(OSError, match="Too many open files"):
        await ended(asyncio.create_task(pool.run_generation(LAUNCH)))
    assert not started[0].running
    assert not workers()


async def test_a_worker_is_what_it_was_started_as(light: None, tmp_path: Path):
    """Check its session, environment, output and descriptors, and the report of its end."""
    server = ForkServer(tmp_path / "log")
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await server.ready()
            waits = server.start({"MINE": "é\udcff"})
            ended = [server.start({"ENDS": str(status)}) for status in (0, 3)]
            assert [await each.wait() for each in ended] == [0, 3]
            assert not any(each.running for each in ended)
            await until(lambda: len(workers()) == 1)
            (worker,) = workers()
            assert waits.running
            assert waits.pid == worker.pid
            last = server.start({"MINE": "last"})
            await until(lambda: len((tmp_path / "log").read_text().splitlines()) == 4)
            assert {each.num_fds() for each in workers()} == {3}, "standard streams, and nothing of each other's"
            for each in (waits, last):
                each.kill()
                assert await each.wait() == -signal.SIGKILL
                each.kill()
    finally:
        await server.close()
    said = (tmp_path / "log").read_text().splitlines()
    environments = ({"MINE": "é\udcff"}, {"ENDS": "0"}, {"ENDS": "3"}, {"MINE": "last"})
    assert sorted(said) == sorted(f"True {each}" for each in environments)
    assert not servers()


SINGLE = """
import os, torch
def asked(*_): raise AssertionError("somebody looks for a GPU")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = asked
import dilocox.node.training.worker.fork_server, dilocox.node.training.worker.worker
assert len(os.listdir("/proc/self/task")) == 1, "threads do not outlive a fork"
"""


def test_who_forks_has_one_thread_and_has_not_looked_for_a_gpu():
    subprocess.run([sys.executable, "-P", "-c", SINGLE], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
