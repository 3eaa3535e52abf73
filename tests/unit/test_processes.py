"""Processes that we start (transport/process/processes.py)."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dilocox.node.data.imported_weights import import_weights
from dilocox.transport.process.processes import end_process, start_process
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import Family, digest, manifest, until

SLEEPS = (sys.executable, "-c", "import time; time.sleep(3600)")


@pytest.mark.parametrize("times", range(4))
async def test_a_process_is_collected_however_often_who_ends_it_is_cancelled(times: int):
    process = await start_process(*SLEEPS, stdin=asyncio.subprocess.PIPE)
    ending = asyncio.create_task(end_process(process))
    for _ in range(times):
        await asyncio.sleep(0)
        ending.cancel()
    await asyncio.wait([ending])
    assert process.returncode == -9
    assert ending.cancelled() == (times > 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_who_is_cancelled_while_it_starts_a_process_leaves_nothing_that_this_one_started(tmp_path: Path, times: int):
    family = Family(tmp_path)
    starting = asyncio.create_task(start_process(str(family.program), stdin=asyncio.subprocess.PIPE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    while not family.began():
        time.sleep(0.001)  # noqa: ASYNC251 - it runs, and the loop does not know yet
    for _ in range(times):
        starting.cancel()
        await asyncio.sleep(0)
    while not starting.done():
        await asyncio.sleep(0)
    assert starting.cancelled()
    assert not await asyncio.to_thread(family.left)
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_a_process_that_is_not_there_cannot_be_started(tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        await start_process(str(tmp_path / "nowhere"))


async def test_who_is_told_to_end_leaves_nothing_that_takes_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family = Family(tmp_path)
    monkeypatch.setattr("dilocox.node.data.imported_weights.sys.executable", str(family.program))
    run = manifest(model={"model_type": "llama", "initial": digest("weights").hex()})
    store = BlobStore(tmp_path / "blobs")
    taking = asyncio.create_task(import_weights(run.model, tmp_path / "manifest.json", tmp_path, store, tmp_path))
    await until(family.began)
    taking.cancel()
    await asyncio.wait([taking])
    assert taking.cancelled()
    assert not await asyncio.to_thread(family.left)


FREEZING = """
import gc, weakref
import dilocox.coordinator.daemon
from dilocox.transport.process.malloc import freeze_startup

class Ring:
    def __init__(self):
        self.me = self

before, ring = len(gc.get_objects()), Ring()
freeze_startup()
assert len(gc.get_objects()) < before / 10, (before, len(gc.get_objects()))
gone = weakref.ref(ring)
del ring
freeze_startup()
assert gone() is None
"""


def test_freeze_startup_leaves_the_collector_little_to_visit_and_keeps_no_garbage():
    subprocess.run([sys.executable, "-c", FREEZING], check=True)
