"""What a restart goes on from is what stood at the boundary, though the next step has begun."""

import threading
from pathlib import Path

import pytest
import torch

from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.training.boundaries import Boundaries
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.crypto import sha256
from dilocox.transport.blobs import BlobStore
from tests.helpers import manifest

RUNS = {optimizer: manifest(training={"optimizer": optimizer}, rounds={"count": 9}) for optimizer in ("adamw", "muon")}
TOKENS = torch.arange(4 * 16).view(4, 16)


def trained(optimizer: str) -> Trainer:
    trainer = Trainer(RUNS[optimizer])
    trainer.load_initial()
    for _ in range(2):
        trainer.step(TOKENS, TOKENS)
    return trainer


def meta(round: int, trainer: Trainer) -> BoundaryMeta:
    return BoundaryMeta(round, 2, 128, 2.5, 8, 1, trainer.optimizer.steps, trainer.manifest.compression.keep)


BASES = {stage: sha256(b"base %d" % stage) for stage in range(2)}


@pytest.mark.parametrize("optimizer", RUNS)
def test_the_next_step_computes_but_does_not_update_until_the_boundary_is_copied(
    optimizer: str, process_group: None, tmp_path: Path
):
    trainer = trained(optimizer)
    trainer.end_phase(1, restart=False)
    live = [tensor.clone() for _, stage in trainer.live_stages() for tensor in trainer.live(stage)]
    inner = trainer.copy_inner()
    boundaries = Boundaries(tmp_path / "stages", 1, trainer, BlobStore(tmp_path / "blobs"))
    write = boundaries.begin(meta(1, trainer), BASES)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        boundaries.wait()

    stepping = threading.Thread(target=trainer.step, args=(TOKENS, TOKENS), kwargs={"before_update": wait})
    stepping.start()
    waiting.wait()  # its gradients are there
    assert stepping.is_alive()
    metas = write()
    stepping.join()
    assert [meta.base_state for meta in metas.values()] == [base.hex() for base in BASES.values()]

    resumed = Trainer(trainer.manifest)
    resumed.load_initial()
    for number, stage in resumed.live_stages():
        kept = checkpoint.load_inner(tmp_path / "stages", number, 1)
        assert kept.keys() == inner[number].keys()
        assert all(torch.equal(kept[name], inner[number][name]) for name in kept)
        resumed.load_inner(stage, kept)
    for state in resumed.states:
        checkpoint.load_outer(tmp_path / "stages", state, 1)
    resumed.resume_live()
    assert all(map(torch.equal, live, (t for _, stage in resumed.live_stages() for t in resumed.live(stage))))
    resumed.optimizer.steps = metas[0].optimizer_steps
    resumed.step(TOKENS, TOKENS)
    after = [[tensor for _, stage in each.live_stages() for tensor in each.live(stage)] for each in (trainer, resumed)]
    assert all(map(torch.equal, *after)), "the step that was begun beside it is the step that a restart takes"
    assert all(torch.equal(ours.feedback, theirs.feedback) for ours, theirs in zip(trainer.states, resumed.states, strict=True))


def test_boundaries_in_between_hold_no_inner_tensors_and_stop_no_step(process_group: None, tmp_path: Path):
    trainer = trained("muon")
    boundaries = Boundaries(tmp_path / "stages", 3, trainer, BlobStore(tmp_path / "blobs"))
    for round in (3, 4):
        trainer.end_phase(round, restart=False)
        write = boundaries.begin(meta(round, trainer), BASES)
        if round == 4:
            trainer.step(TOKENS, TOKENS, before_update=boundaries.wait)
        write()
    complete, light = sorted((tmp_path / "stages" / "0000").iterdir())
    assert (complete / "inner.safetensors").exists()
    assert not (light / "inner.safetensors").exists()
    assert (light / "outer.safetensors").stat().st_size < 0.7 * (complete / "outer.safetensors").stat().st_size


def test_a_copy_that_fails_leaves_nobody_waiting(process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trained("muon")
    boundaries = Boundaries(tmp_path / "stages", 1, trainer, BlobStore(tmp_path / "blobs"))

    def full() -> None:
        raise MemoryError

    monkeypatch.setattr(trainer, "copy_inner", full)
    write = boundaries.begin(meta(1, trainer), BASES)
    with pytest.raises(MemoryError):
        write()
    boundaries.wait()
