"""Workers of a mesh, pipelines and copies of them, in real processes compute what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.texts import stdlib
from dilocox.node.tiling import chunks, stretches
from dilocox.node.worker_settings import RENDEZVOUS
from tests.helpers import manifest

SCRIPT = """
import hashlib, json, pathlib, sys
import torch, torch.distributed as dist
from dilocox.node.training.mesh import Mesh
from dilocox.node.training.rendezvous import join_generation
from dilocox.node.training.trainer import Trainer
from dilocox.node.training.data import load_dataset
from dilocox.protocol.manifest import Manifest
join_generation("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
run = Manifest.from_canonical(open(sys.argv[1], "rb").read())
mesh = Mesh(rank, workers, int(sys.argv[3]))
trainer = Trainer(run, mesh)
trainer.load_initial()

def held():  # by stage, a digest of what this worker trains with
    live = {number: b"".join(tensor.numpy().tobytes() for tensor in trainer.live(stage)) for number, stage in trainer.live_stages()}
    return {number: hashlib.sha256(bits).hexdigest() for number, bits in live.items()}

data = load_dataset(run, pathlib.Path(sys.argv[2]))
results = [trainer.step(*data.batch([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]), flags=[1.0, rank]) for i in range(4)]
trained = held()
trainer.end_phase(1, restart=False)
evaluation = trainer.evaluate_committed(data)
told = [[r.loss, r.gradient_norm, *r.flags] for r in results] + [[evaluation]]
where = {"place": mesh.stage_rank, "copy": mesh.copy, "states": len(trainer.states)}
print(json.dumps({"told": told, "held": {stage: [trained[stage], digest] for stage, digest in held().items()}, **where}))
dist.destroy_process_group()
"""


Told = list[list[float]]
Bits = dict[str, list[str]]
"""By stage: digests of its live parameters, after four steps, and when they begin the next phase."""


def run_mesh(folder: Path, stages: int, workers: int, copies: int = 1, **training: Any) -> tuple[Told, Bits]:
    """What the first worker was told in each step, and what all of them hold in the end."""
    named = "-".join(str(value) for value in (stages, workers, copies, *training.values()))
    path = folder / f"manifest-{named}.json"
    run = manifest(data=stdlib().settings, model={"stages": stages, "layers": 6}, training={"microbatches": 4, **training})
    path.write_bytes(run.canonical_bytes())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path), str(stdlib().folder), str(copies)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: str(folder / named)},
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * workers
    per_worker = [json.loads(output) for output in outputs]
    assert all(result["told"] == per_worker[0]["told"] for result in per_worker), "workers disagree about a step"
    assert [result["states"] > 0 for result in per_worker] == [result["copy"] == 0 for result in per_worker]
    held: Bits = {}
    for result in per_worker:
        for stage, digests in result["held"].items():
            assert held.setdefault(stage, digests) == digests, "copies of a stage hold the same bits"
    return per_worker[0]["told"], held


@pytest.mark.e2e
def test_workers_together_compute_what_one_computes(tmp_path: Path):
    alone, _ = run_mesh(tmp_path, 2, 1)
    for stages, workers, copies in ((2, 2, 1), (5, 2, 1), (3, 3, 1), (1, 2, 2), (2, 4, 2)):
        together, _ = run_mesh(tmp_path, stages, workers, copies)
        for step, expected in zip(together, alone, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-4)
        assert together[0][2:] == [workers, sum(range(workers))]


UNCLIPPED: dict[str, Any] = {"gradient_clip": 1e9}
"""The norm over all stages is a sum, which workers take in another order."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, Bits]:
    return run_mesh(tmp_path_factory.mktemp("alone"), 7, 1, **UNCLIPPED)


@pytest.mark.e2e
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_computes_the_same_bits(schedule: str, recompute: bool, alone: tuple[Told, Bits], tmp_path: Path):
    """A stage adds up its microbatches in their order, whatever other stages do meanwhile."""
    told, held = run_mesh(tmp_path, 7, 2, **UNCLIPPED, schedule=schedule, checkpoint_activations=recompute)
    assert held == alone[1]
    assert [step[0] for step in told] == [step[0] for step in alone[0]], "losses, and that of the evaluation"


@pytest.mark.e2e
@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_looped_schedules_go_round_more_than_two_workers(schedule: str, alone: tuple[Told, Bits], tmp_path: Path):
    """Three workers, four microbatches: more than one for each, and not a multiple."""
    _, held = run_mesh(tmp_path, 7, 3, **UNCLIPPED, schedule=schedule)
    assert held == alone[1]


def test_stages_are_shared_out_in_stretches_or_looped():
    assert chunks(5, 2, "1f1b") == [[[0, 1, 2]], [[3, 4]]]
    assert chunks(80, 8, "1f1b")[7] == [list(range(70, 80))]
    assert chunks(5, 2, "interleaved") == [[[0, 1], [3]], [[2], [4]]]
    assert chunks(8, 2, "zero-bubble") == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    assert chunks(8, 1, "interleaved") == [[list(range(8))]], "one worker has nothing to wait for"
    assert [stretches(stage for chunk in share for stage in chunk) for share in chunks(5, 2, "interleaved")] == [
        [range(2), range(3, 4)],
        [range(2, 3), range(4, 5)],
    ]
