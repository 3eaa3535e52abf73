"""Tests that need a GPU: `pytest -m cuda`, on a machine that has one."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.study.crowd import Crowd
from dilocox.node.outer import state_device
from dilocox.node.outer.background import Background
from dilocox.node.outer.checkpoint import BoundaryMeta, load_outer
from dilocox.node.outer.state import StageState, rebase, start_phase
from dilocox.node.outer.state_device import HOST, StateDevice, passage_of
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.rendezvous import join_generation
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.node.workers.environment import RENDEZVOUS, OuterState
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import manifest
from tests.property.test_codec import CODECS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

GPU = torch.device("cuda:0")
CHOICES = [OuterState.STREAM, OuterState.DEVICE]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def applied(run: Manifest, where: StateDevice, payloads: list[bytes]) -> list[torch.Tensor]:
    """Return a stage after a phase and a commit, on the host."""
    state = StageState(run, 0, passage=where)
    state.committed.copy_(drawn(2, state.size, seed=0))
    live = [view.to(where.device, copy=True) for _, view in state.views(state.parameters)]
    rebase(state, live, keep_private=False)
    for number, tensor in enumerate(live):
        tensor.add_(drawn(*tensor.shape, seed=number).to(tensor.device), alpha=1e-2)
    start_phase(state, live, private_share=0.5)
    state.return_to_feedback(memoryview(payloads[0]), shares=[0.5] * len(state.specs))
    factors = [[0.75] * len(state.specs)] * len(payloads)
    state.apply([memoryview(raw) for raw in payloads], [100, 300], factors=factors)
    rebase(state, live)
    return [tensor.cpu() for tensor in (state.committed, state.feedback, state.anchor, *live)]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("compression", CODECS, ids=str)
def test_a_gpu_makes_the_bits_of_the_host(compression: dict[str, object], choice: OuterState, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_device, "SLOT", 1000)
    run = manifest(model={"vocab_size": 64}, compression=compression, outer={"momentum": 0.9})
    payloads = []
    for seed in (1, 2):
        author = StageState(run, 0)
        author.feedback.copy_(drawn(author.size, seed=seed))
        payloads.append(author.encode().raw)
    on_host, on_gpu = applied(run, HOST, payloads), applied(run, passage_of(choice, GPU), payloads)
    for one, other in zip(on_host, on_gpu, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("compression", CODECS, ids=str)
def test_what_a_gpu_encodes_is_a_payload_of_the_same_feedback(compression: dict[str, object], choice: OuterState):
    run = manifest(model={"vocab_size": 64}, compression=compression)
    errors = []
    for where in (HOST, passage_of(choice, GPU)):
        state = StageState(run, 0, passage=where)
        state.feedback.copy_(drawn(state.size, seed=3))
        for _ in range(2):  # the second from a warm start
            errors.append(state.encode().error)
    assert errors[:2] == pytest.approx(errors[2:], rel=1e-2)


def test_a_streamed_stage_takes_no_more_of_the_device_when_it_is_larger():
    taken = []
    for elements in (4 * state_device.SLOT, 16 * state_device.SLOT):
        where = passage_of(OuterState.STREAM, GPU)
        changed, read = where.zeros(elements), where.zeros(elements)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for stretch in where.each([changed], where.spans(elements), [read]):
            stretch.parts[0].add_(1.0)
        taken.append(torch.cuda.max_memory_allocated() - before)
        assert bool((changed == 1).all())
    assert taken[0] == taken[1]


@pytest.mark.parametrize("choice", list(OuterState))
def test_a_gpu_trains_in_bf16_beside_its_background(choice: OuterState, process_group: None, tmp_path: Path):
    """Check two phases of a stage worker's own work: the written values equal those in memory, and the loss falls."""
    run = manifest(training={"optimizer": "muon", "precision": "auto"}, rounds={"count": 9})
    trainer = Trainer(run, Mesh(device=GPU), passage=passage_of(choice, GPU))
    trainer.load_initial()
    store, background = BlobStore(tmp_path / "blobs"), Background(device=GPU)
    boundaries = Boundaries(tmp_path / "stages", "us", trainer, store)
    tokens = torch.arange(4 * 16).view(4, 16)
    losses = []
    for round in (1, 2):
        losses += [trainer.step(tokens, tokens, before_update=boundaries.wait).loss for _ in range(8)]
        trainer.end_phase(round, restart=False)
        meta = BoundaryMeta(round, 8, 512, losses[-1], 32, 1, trainer.optimizer.steps, run.compression.keep)
        writing = background.submit(boundaries.begin(meta, dict.fromkeys(trainer.stages, bytes(32))))
        losses.append(trainer.step(tokens, tokens, before_update=boundaries.wait).loss)
        metas = writing.result()
        read = StageState(run, 0)
        load_outer(tmp_path / "stages", read, round)
        assert torch.equal(read.feedback, trainer.states[0].feedback.cpu())
        commit = Commit(round, run.compression.keep, [Take("us", 1, [bytes.fromhex(each.payload) for each in metas.values()])])
        announced = {stage: bytes.fromhex(each.payload) for stage, each in metas.items()}
        background.submit(partial(trainer.prepare, commit, store.view, "us", announced)).result()
        trainer.rebase()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gpu_continues_from_a_checkpoint(optimizer: str, process_group: None):
    """Check the inner optimizer's tensors after a restart: the next step has the loss of the trainer that went on."""
    run = manifest(training={"optimizer": optimizer, "precision": "float32"}, rounds={"count": 9})
    tokens = torch.arange(4 * 16).view(4, 16)
    first, resumed = (Trainer(run, Mesh(device=GPU)) for _ in range(2))
    first.load_initial()
    resumed.load_initial()
    first.step(tokens, tokens)
    for (number, stage), (_, other) in zip(first.live_stages(), resumed.live_stages(), strict=True):
        resumed.load_inner(other, first.copy_inner()[number])
        for ours, theirs in zip(first.live(stage), resumed.live(other), strict=True):
            theirs.copy_(ours)
    resumed.optimizer.steps = first.optimizer.steps
    losses = [[trainer.step(tokens, tokens).loss for _ in range(3)] for trainer in (first, resumed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_crowd_s_graph_takes_the_steps_of_a_processor(process_group: None):
    """Check two models with separate rates, each of which skips one step."""
    run = manifest(
        model={"stages": 1}, training={"optimizer": "muon", "precision": "float32", "microbatches": 1, "batch_size": 2}
    )
    found = []
    for device in (torch.device("cpu"), GPU):
        crowd, trainers = Crowd(run, 2, 1, 2, device), []
        for rate in (3e-3, 6e-3):
            trainers.append(
                Trainer(run.model_copy(update={"training": run.training.model_copy(update={"learning_rate": rate})}))
            )
            trainers[-1].load_initial()
            crowd.join(trainers[-1])
        tokens = torch.arange(2 * 16).view(2, 16)
        with crowd.run():
            for asked in ([0, 1, 1], [0, 0, 1]):
                for number in asked:
                    crowd.ask(trainers[number], tokens, tokens.roll(1))
                crowd.finish(trainers)
        found.append([tensor.cpu() for each in trainers for _, stage in each.pairs() for tensor in each.live(stage)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-3)


def step_of(rank: int, meeting: str, workers: int, copies: int) -> list[float]:
    device = torch.device(f"cuda:{rank}")
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: meeting})
    torch.cuda.set_device(device)
    join_generation(device)
    run = manifest(training={"microbatches": 4, "batch_size": 4, "precision": "float32"})
    trainer = Trainer(run, Mesh(rank, workers, copies, device))
    trainer.load_initial()
    tokens = torch.arange(4 * 16).view(4, 16)
    losses = [trainer.step(tokens, tokens).loss for _ in range(3)]
    dist.destroy_process_group()
    return losses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")
@pytest.mark.parametrize("copies", [1, 2])
def test_two_gpus_train_by_nccl_as_one_does(copies: int, tmp_path: Path):
    """Check both as a pipeline of two, and as two copies."""
    found = {}
    for workers in (1, 2):
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            meeting = str(tmp_path / f"meeting-{workers}")
            ranks = [pool.submit(step_of, rank, meeting, workers, min(copies, workers)) for rank in range(workers)]
            found[workers] = [rank.result() for rank in ranks]
    assert found[2][0] == found[2][1]
    assert found[2][0] == pytest.approx(found[1][0], rel=1e-4)
