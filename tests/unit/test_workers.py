"""Generations of worker processes: whatever state a process is in, its generation ends when it should."""

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from dilocox.node.workers import Launch, WorkerPool
from tests.helpers import PATIENCE_SECONDS


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_generation_that_is_given_up_ends_even_where_a_worker_is_suspended(tmp_path: Path, suspended: bool):
    """A worker that was stopped, or hangs in the kernel, does not hear that its parent let go."""

    def environment(socket: str, launch: Launch) -> dict[str, str]:
        return {**os.environ, "DILOCOX_WORKER_THREADS": "1", "DILOCOX_WORKER_SOCKET": socket}

    pool = WorkerPool(tmp_path, environment)
    await pool.open()
    before = set(psutil.Process().children())
    generation = asyncio.create_task(pool.run_generation(Launch(range(2), 2, 1)))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(workers := set(psutil.Process().children()) - before) < 2:
            await asyncio.sleep(0.01)
        if suspended:
            for worker in workers:
                worker.suspend()
        pool.end_generation()
        await generation
    assert not any(worker.is_running() for worker in workers)
    await pool.close()
