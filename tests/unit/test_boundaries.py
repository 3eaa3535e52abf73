"""Tests of a restart: it continues from the checkpoint at the end of a phase, although the next step has begun."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.outer.state import StageState
from dilocox.node.planning.disk_model import written
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.node.training.worker.commit_applier import Commits
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.node.training.worker.resume import Resume
from dilocox.protocol.crypto import sha256
from dilocox.protocol.norms import clip_factor
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import Table, manifest

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
    boundaries = Boundaries(tmp_path / "stages", "us", trainer, BlobStore(tmp_path / "blobs"))
    write = boundaries.begin(meta(1, trainer), BASES)
    waiting, updates = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        boundaries.wait()
        updates.set()

    stepping = threading.Thread(target=trainer.step, args=(TOKENS, TOKENS), kwargs={"before_update": wait})
    stepping.start()
    waiting.wait()  # its gradients are there
    assert not updates.wait(0.3)
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
    boundaries = Boundaries(tmp_path / "stages", "us", trainer, BlobStore(tmp_path / "blobs"))
    for round in (4, 5):  # the first that it makes is complete, though none is due
        trainer.end_phase(round, restart=False)
        write = boundaries.begin(meta(round, trainer), BASES, due=False)
        if round == 5:
            trainer.step(TOKENS, TOKENS, before_update=boundaries.wait)
        write()
    complete, light = sorted((tmp_path / "stages" / "0000").iterdir())
    assert (complete / "inner.safetensors").exists()
    assert not (light / "inner.safetensors").exists()
    assert (light / "outer.safetensors").stat().st_size < 0.7 * (complete / "outer.safetensors").stat().st_size


def test_a_copy_that_fails_leaves_nobody_waiting(process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = trained("muon")
    boundaries = Boundaries(tmp_path / "stages", "us", trainer, BlobStore(tmp_path / "blobs"))

    def full() -> None:
        raise MemoryError

    monkeypatch.setattr(trainer, "copy_inner", full)
    write = boundaries.begin(meta(1, trainer), BASES)
    with pytest.raises(MemoryError):
        write()
    boundaries.wait()


def test_a_stage_that_moved_begins_with_nothing_and_one_that_stayed_with_what_it_had(process_group: None, tmp_path: Path):
    """Check a new placement on the cluster's hosts, after a round whose commit applied half of each payload."""
    trainer, store = trained("muon"), BlobStore(tmp_path / "blobs")
    trainer.end_phase(1, restart=False)
    written = Boundaries(tmp_path / "stages", "us", trainer, store).begin(meta(1, trainer), BASES)()
    staying, payload = trainer.states[0], store.view(bytes.fromhex(written[0].payload))
    expected = StageState(trainer.manifest, 0)
    expected.feedback.copy_(staying.feedback)
    clips = bytes([8, 16] + [0] * (len(expected.specs) - 2))
    shares = [1 - clip_factor(clip) for clip in clips]
    assert shares[:3] == [0.5, 0.75, 0.0]
    expected.return_to_feedback(payload, written[0].rank_or_k, shares)
    assert not torch.equal(expected.feedback, staying.feedback)

    shutil.rmtree(tmp_path / "stages" / "0001")
    moved = Trainer(trainer.manifest)
    resume = Resume(moved.manifest, "us", tmp_path / "stages", moved, Commits(moved.manifest, moved, store), store)
    (offered,) = resume.offers()
    assert [payload.stage for payload in offered.payloads] == [0]
    digests = [store.put([state.state_bytes()]) for state in trainer.states]
    start = pb.Start(
        origin=pb.Start.ORIGIN_SNAPSHOT,
        round=0,
        states=[pb.StageState(stage=stage, digest=digest) for stage, digest in enumerate(digests)],
        boundary_commit=pb.Apply(takes=[pb.Take(cluster="us", weight=1, clips=[clips, b""])]),
        kept=offered,
    )
    assert resume.load(start, lambda: pb.WorkerCommand()) is not None
    assert torch.equal(moved.states[0].feedback, expected.feedback)
    assert not moved.states[1].feedback.any()
    (_, stage_0), (_, stage_1) = moved.live_stages()
    inner, before = moved.copy_inner(), trainer.copy_inner()
    assert inner[0]
    assert inner[0].keys() == before[0].keys()
    assert all(torch.equal(inner[0][name], before[0][name]) for name in inner[0])
    assert inner[1] == {}
    assert moved.optimizer.steps == trainer.optimizer.steps, "one learning rate for all"
    for state, stage in zip(moved.states, (stage_0, stage_1), strict=True):
        theta = [tensor for _, tensor in state.views(state.parameters)]
        assert all(map(torch.equal, theta, moved.live(stage))), "all begin at Θ"
        assert torch.equal(state.anchor, state.parameters)


def test_who_comes_late_takes_the_learning_rate_that_the_run_has_come_to(process_group: None, tmp_path: Path):
    """Check it, because otherwise a late cluster would warm up while the others cool down."""
    late, store = Trainer(RUNS["muon"]), BlobStore(tmp_path / "blobs")
    table = Table(late.manifest).genesis().train(3)
    start = pb.Start(
        origin=pb.Start.ORIGIN_SNAPSHOT,
        round=table.head.round,
        states=[pb.StageState(stage=state.stage, digest=store.put([state.state_bytes()])) for state in late.states],
        opening_commit=table.commits[-1].envelope.SerializeToString(),
    )
    resume = Resume(late.manifest, "us", tmp_path / "stages", late, Commits(late.manifest, late, store), store)
    assert resume.load(start, lambda: pb.WorkerCommand()) is not None
    assert table.head.trained == 3
    assert late.optimizer.steps == 3 * late.manifest.rounds.inner_steps


@pytest.mark.parametrize("optimizer", RUNS)
def test_a_round_writes_as_much_as_is_said(optimizer: str, process_group: None, tmp_path: Path):
    """Compare the written bytes with the estimate, except headers and the codec's warm starts."""
    run = manifest(training={"optimizer": optimizer}, rounds={"count": 9}, compression={"codec": "int2", "rank": None})
    trainer, store = Trainer(run), BlobStore(tmp_path / "blobs")
    trainer.load_initial()
    said = written(run, clusters=3)
    boundaries = Boundaries(tmp_path / "stages", "us", trainer, store)
    for round in range(1, 5):
        for _ in range(2):
            trainer.step(TOKENS, TOKENS)
        trainer.end_phase(round, restart=False)
        boundaries.wait_for_disk()
        metas = boundaries.begin(meta(round, trainer), BASES, due=round % 2 == 0)().values()
        wrote = sum(path.stat().st_size for path in (tmp_path / "stages").glob(f"*/{round:08d}/*.safetensors"))
        assert wrote == pytest.approx(said.boundary + (round != 3) * said.anchor_and_moments, rel=0.02), "also the first"
        payloads = [bytes.fromhex(each.payload) for each in metas]
        assert sum(len(store.view(digest)) for digest in payloads) == pytest.approx(said.payload, rel=0.02)
        commit = Commit(round, 0, [Take("us", 1, payloads)])
        trainer.prepare(commit, store.view, "us", dict(enumerate(payloads)))
        states = [state.digest for state in Commits(run, trainer, store).store_states()]
        assert sum(len(store.view(digest)) for digest in states) == said.state
        trainer.rebase()
