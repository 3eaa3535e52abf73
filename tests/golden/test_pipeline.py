"""Workers of a mesh, pipelines and copies of them, in real processes compute what one process computes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.texts import stdlib
from dilocox.node.planning import memory_model
from dilocox.node.training.model.model import initial_values
from dilocox.node.workers.environment import RENDEZVOUS
from dilocox.node.workers.placement import chunks, stretches
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import stage_weights
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore
from tests.golden.mesh_worker import work
from tests.helpers import manifest
from tests.processes import in_processes


@dataclass(frozen=True)
class Ran:
    run: Manifest
    told: list[list[float]]
    """Loss, norm and flags of each step, then the loss of the evaluation: the same in all workers."""
    held: dict[str, list[str]]
    """Digests of the live parameters by stage, after four steps, and at the start of the next phase."""
    peaks: list[int]
    """Bytes that autograd kept in each worker, at the fullest moment of a step."""


def run_mesh(
    folder: Path, stages: int, workers: int, copies: int = 1, masked: bool = False, lora: bool = False, **training: Any
) -> Ran:
    named = "-".join(str(value) for value in (stages, workers, copies, *training.values()))
    path, text = folder / f"manifest-{named}.json", stdlib()
    run = manifest(
        data=text.settings, model={"stages": stages, "num_hidden_layers": 6}, training={"microbatches": 4, **training}
    )
    run = on_adapters(run, BlobStore(text.folder)) if lora else run
    path.write_bytes(run.canonical_bytes())
    meetings = [
        {"RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: str(folder / f"meeting-{named}-{masked}-{lora}")}
        for rank in range(workers)
    ]
    per_worker = in_processes(work, [(meeting, path, text.folder, copies, masked) for meeting in meetings])
    assert all(result["told"] == per_worker[0]["told"] for result in per_worker), "workers disagree about a step"
    assert [result["states"] > 0 for result in per_worker] == [result["copy"] == 0 for result in per_worker]
    held: dict[str, list[str]] = {}
    for result in per_worker:
        for stage, digests in result["held"].items():
            assert held.setdefault(stage, digests) == digests, "copies of a stage hold the same bits"
    return Ran(run, per_worker[0]["told"], held, [result["peak"] for result in per_worker])


@pytest.mark.e2e
def test_workers_together_compute_what_one_computes(tmp_path: Path):
    alone = run_mesh(tmp_path, 2, 1)
    for stages, workers, copies in ((2, 2, 1), (5, 2, 1), (3, 3, 1), (1, 2, 2), (2, 4, 2)):
        together = run_mesh(tmp_path, stages, workers, copies)
        for step, expected in zip(together.told, alone.told, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-4)
        assert together.told[0][2:] == [workers, sum(range(workers))]


@pytest.mark.e2e
def test_workers_together_weigh_each_token_alike(tmp_path: Path):
    """Check equal weights of tokens, if sequences differ in their number of trained tokens, and in their positions."""
    alone = run_mesh(tmp_path, 2, 1, masked=True)
    for stages, workers, copies in ((2, 2, 1), (1, 2, 2), (2, 4, 2)):
        together = run_mesh(tmp_path, stages, workers, copies, masked=True)
        for step, expected in zip(together.told, alone.told, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-4)


def on_adapters(run: Manifest, store: BlobStore) -> Manifest:
    """Return the same run on adapters of weights from its seed, which are put into the store."""
    sections = run.model_dump(mode="json")
    sections["compression"] = {"codec": "int4"}
    sections["model"]["lora"] = {"rank": 4, "alpha": 8.0, "base": "00" * 32}
    model = Manifest.model_validate(sections).model
    weights = (
        [values.numpy().tobytes() for spec in stage_weights(model, stage) for _, values in initial_values(spec, 1)]
        for stage in range(model.stages)
    )
    root = store.put([canonical(pb.StageStates(digests=[store.put(stage) for stage in weights]))])
    sections["model"]["lora"]["base"] = root.hex()
    return Manifest.model_validate(sections)


UNCLIPPED: dict[str, Any] = {"gradient_clip": 1e9}
"""The norm over all stages is a sum, which workers take in another order."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run_mesh(tmp_path_factory.mktemp("alone"), 7, 1, **UNCLIPPED)


@pytest.mark.e2e
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_schedule_computes_the_same_bits(schedule: str, recompute: bool, alone: Ran, tmp_path: Path):
    """Check that a stage adds its microbatches in their order, regardless of other stages."""
    ran = run_mesh(tmp_path, 7, 2, **UNCLIPPED, schedule=schedule, checkpoint_activations=recompute)
    assert ran.held == alone.held
    assert [step[0] for step in ran.told] == [step[0] for step in alone.told], "losses, and that of the evaluation"
    if not recompute:
        assert ran.peaks == pytest.approx([planned(ran.run, worker, 2) for worker in range(2)], rel=0.1)


@pytest.mark.e2e
def test_a_looped_schedule_goes_round_more_than_two_workers(alone: Ran, tmp_path: Path):
    """Check three workers with four microbatches: more than one for each, and not a multiple."""
    ran = run_mesh(tmp_path, 7, 3, **UNCLIPPED, schedule="interleaved")
    assert ran.held == alone.held
    assert ran.peaks == pytest.approx([planned(ran.run, worker, 3) for worker in range(3)], rel=0.1)


@pytest.mark.e2e
def test_workers_together_train_the_adapters_that_one_trains(tmp_path: Path):
    alone = run_mesh(tmp_path, 5, 1, lora=True, **UNCLIPPED)
    for workers, schedule in ((2, "1f1b"), (2, "interleaved"), (3, "1f1b")):
        ran = run_mesh(tmp_path, 5, workers, lora=True, **UNCLIPPED, schedule=schedule)
        assert ran.held == alone.held
        assert [step[0] for step in ran.told] == [step[0] for step in alone.told]
    copied = run_mesh(tmp_path, 5, 4, 2, lora=True, **UNCLIPPED)
    for step, expected in zip(copied.told, alone.told, strict=True):
        assert step[:2] == pytest.approx(expected[:2], rel=1e-4)


def planned(run: Manifest, worker: int, workers: int) -> int:
    """Return the bytes that autograd is expected to store."""
    mine = chunks(run.model.stages, workers, run.training.schedule)[worker]
    held = [sum(memory_model.held_bytes(run, stage, half=False) for stage in chunk) for chunk in mine]
    return memory_model.peak(worker, workers, run.training.microbatches, held)


@pytest.mark.e2e
def test_workers_pass_on_the_precision_of_the_run(alone: Ran, tmp_path: Path):
    """Check bf16 with its 8 bits: losses of a small model differ from the third digit on, and hardly more between stages."""
    losses = [[step[0] for step in run_mesh(tmp_path, 7, n, **UNCLIPPED, precision="bf16").told] for n in (1, 2)]
    for found in losses:
        assert found != [step[0] for step in alone.told]
        assert found == pytest.approx([step[0] for step in alone.told], rel=0.01)


def test_stages_are_shared_out_in_stretches_or_looped():
    assert chunks(5, 2, "1f1b") == [[[0, 1, 2]], [[3, 4]]]
    assert chunks(80, 8, "1f1b")[7] == [list(range(70, 80))]
    assert chunks(5, 2, "interleaved") == [[[0, 1], [3]], [[2], [4]]]
    assert chunks(8, 2, "interleaved") == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert chunks(8, 1, "interleaved") == [[list(range(8))]], "one worker has nothing to wait for"
    assert [stretches(stage for chunk in share for stage in chunk) for share in chunks(5, 2, "interleaved")] == [
        [range(2), range(3, 4)],
        [range(2, 3), range(4, 5)],
    ]
