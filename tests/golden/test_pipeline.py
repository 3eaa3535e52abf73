"""Workers of a mesh, pipelines and copies of them, in real processes compute what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.texts import stdlib
from dilocox.node.tiling import split_stages
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

def held():  # a digest of what this worker trains with
    live = [tensor for _, stage in trainer.live_stages() for tensor in trainer.live(stage)]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in live)).hexdigest()

data = load_dataset(run, pathlib.Path(sys.argv[2]))
results = [trainer.step(*data.batch([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]), flags=[1.0, rank]) for i in range(4)]
trained = held()
trainer.end_phase(1, restart=False)
evaluation = trainer.evaluate_committed(data)
told = [[r.loss, r.gradient_norm, *r.flags] for r in results] + [[evaluation]]
where = {"place": mesh.stage_rank, "copy": mesh.copy, "states": len(trainer.states)}
print(json.dumps({"told": told, "held": [trained, held()], **where}))
dist.destroy_process_group()
"""


def run_mesh(folder: Path, stages: int, workers: int, copies: int = 1) -> list[list[float]]:
    path = folder / f"manifest-{stages}.json"
    path.write_bytes(manifest(data=stdlib().settings, model={"stages": stages}, training={"microbatches": 4}).canonical_bytes())
    meeting = str(folder / f"{stages}-{workers}-{copies}")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path), str(stdlib().folder), str(copies)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: meeting},
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * workers
    per_worker = [json.loads(output) for output in outputs]
    assert all(result["told"] == per_worker[0]["told"] for result in per_worker), "workers disagree about a step"
    places = {(result["place"], *result["held"]) for result in per_worker}
    assert len(places) == workers // copies, "copies of a stage hold the same bits, before they follow the first and after"
    assert [result["states"] > 0 for result in per_worker] == [result["copy"] == 0 for result in per_worker]
    told: list[list[float]] = per_worker[0]["told"]
    return told


@pytest.mark.e2e
def test_workers_together_compute_what_one_computes(tmp_path: Path):
    alone = run_mesh(tmp_path, 2, 1)
    for stages, workers, copies in ((2, 2, 1), (5, 2, 1), (3, 3, 1), (1, 2, 2), (2, 4, 2)):
        together = run_mesh(tmp_path, stages, workers, copies)
        for step, expected in zip(together, alone, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-4)
        assert together[0][2:] == [workers, sum(range(workers))]


def test_stages_are_shared_out_contiguously():
    assert split_stages(range(5), 2) == [[0, 1, 2], [3, 4]]
    assert split_stages(range(80), 8)[7] == list(range(70, 80))
    assert split_stages(range(2), 2) == [[0], [1]]
