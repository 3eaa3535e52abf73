"""Tests of a power loss: a synced file has the bytes of its last fsync, others are truncated or missing."""

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.outer.state import StageState
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import manifest

TOKENS = torch.arange(64).view(4, 16)


class Disk:
    """Record of the bytes of files, and of the names in folders, at their last fsync."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names[str(path)] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
        else:
            self._bytes[os.fstat(handle).st_ino] = path.read_bytes()

    def lose_power(self, root: Path, seed: int) -> None:
        """Restore synced files; leave every other one whole, truncated, empty or missing, by chance."""
        chance = random.Random(seed)
        for path in sorted(root.rglob("*")):
            if path.is_dir():
                continue
            inode = path.stat().st_ino
            named = self._names.get(str(path.parent), {}).get(path.name) == inode
            if inode in self._bytes and named:
                path.write_bytes(self._bytes[inode])
            elif (left := chance.choice([None, 0.0, 0.5, 1.0])) is None:
                path.unlink()
            else:
                raw = path.read_bytes()
                path.write_bytes(raw[: int(len(raw) * left)])


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file with the id of the kernel's boot."""
    path = tmp_path / "boot_id"
    path.write_text("first\n")
    monkeypatch.setattr(checkpoint, "BOOT_ID", path)
    return path


def train_rounds(folder: Path, rounds: int, due: set[int]) -> dict[int, list[torch.Tensor]]:
    """Train, and write a checkpoint at the end of each round; return the feedback of each, by round and stage."""
    trainer, store = Trainer(manifest(training={"optimizer": "muon"}, rounds={"count": 20})), BlobStore(folder / "blobs")
    trainer.load_initial()
    boundaries = Boundaries(folder / "stages", "us", trainer, store)
    feedback = {}
    for round in range(1, rounds + 1):
        trainer.step(TOKENS, TOKENS)
        trainer.end_phase(round, restart=False)
        bases = {state.stage: store.put([state.state_bytes()], waits=False) for state in trainer.states}
        meta = BoundaryMeta(round, 1, 64, 2.5, 4, 1, trainer.optimizer.steps, trainer.manifest.compression.keep)
        boundaries.wait_for_disk()
        boundaries.begin(meta, bases, due=round in due)()
        feedback[round] = [state.feedback.clone() for state in trainer.states]
    boundaries.wait_for_disk()
    return feedback


@pytest.mark.parametrize("seed", range(12))
def test_after_a_power_loss_the_last_durable_checkpoint_counts_whole(
    seed: int, boots: Path, process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(monkeypatch)
    folder = tmp_path / "run"
    feedback = train_rounds(folder, rounds=6, due={3})
    disk.lose_power(folder, seed)
    boots.write_text("second\n")
    store, run = BlobStore(folder / "blobs"), manifest(training={"optimizer": "muon"}, rounds={"count": 20})
    for stage in range(2):
        found = checkpoint.boundaries(folder / "stages", stage)
        assert list(found) == [3], "those after it were in the page cache"
        assert store.sound(bytes.fromhex(found[3].payload))
        assert store.sound(bytes.fromhex(found[3].base_state))
        assert checkpoint.load_inner(folder / "stages", stage, 3)
        state = StageState(run, stage)
        checkpoint.load_outer(folder / "stages", state, 3)
        assert torch.equal(state.feedback, feedback[3][stage])


def test_after_the_end_of_a_process_the_newest_checkpoint_counts(boots: Path, process_group: None, tmp_path: Path):
    train_rounds(tmp_path / "run", rounds=6, due={3})
    assert list(checkpoint.boundaries(tmp_path / "run" / "stages", 0)) == [3, 5, 6]
    boots.write_text("second\n")
    assert list(checkpoint.boundaries(tmp_path / "run" / "stages", 0)) == [3]


def test_the_last_durable_checkpoint_stays_until_a_complete_one_is_durable(boots: Path, process_group: None, tmp_path: Path):
    """Reproduce a fault: the newest ones pushed it out, and after a power loss there were no moments."""
    folder = tmp_path / "run"
    train_rounds(folder, rounds=4, due={2})
    for stage in range(2):
        seal_more(folder, stage, rounds=range(5, 12), complete={6, 8})
    boots.write_text("second\n")
    assert list(checkpoint.boundaries(folder / "stages", 0)) == [2]
    assert checkpoint.load_inner(folder / "stages", 0, 2)


def seal_more(folder: Path, stage: int, rounds: Iterable[int], complete: set[int]) -> None:
    """Write checkpoints that no disk has yet."""
    state = StageState(manifest(training={"optimizer": "muon"}, rounds={"count": 20}), stage)
    for round in rounds:
        if round in complete:
            checkpoint.save_inner(folder / "stages", stage, round, {"momentum_buffer|weight": torch.zeros(2)})
        checkpoint.save_outer(folder / "stages", state, round, complete=round in complete)
        checkpoint.seal_boundary(folder / "stages", stage, BoundaryMeta(round, 1, 64, 2.5, 4, 1, round, 8))


def test_a_disk_that_fails_stops_no_training(
    boots: Path, process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    train_rounds(tmp_path / "run", rounds=3, due={1, 2})
    assert "Input/output error" in caplog.text
    boots.write_text("second\n")
    assert checkpoint.boundaries(tmp_path / "run" / "stages", 0) == {}


def test_without_the_id_of_a_boot_only_durable_checkpoints_count(boots: Path, process_group: None, tmp_path: Path):
    boots.unlink()
    train_rounds(tmp_path / "run", rounds=4, due={2})
    assert list(checkpoint.boundaries(tmp_path / "run" / "stages", 0)) == [2]
