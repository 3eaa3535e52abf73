"""Pipeline workers in real processes compute what one process computes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.texts import stdlib
from dilocox.node.training.pipeline import split_stages
from dilocox.node.worker_settings import RENDEZVOUS
from tests.helpers import manifest

SCRIPT = """
import json, pathlib, sys
import torch, torch.distributed as dist
from dilocox.node.training.pipeline import split_stages
from dilocox.node.training.rendezvous import join_generation
from dilocox.node.training.trainer import Trainer
from dilocox.node.training.data import load_dataset
from dilocox.protocol.manifest import Manifest
join_generation("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
run = Manifest.from_canonical(open(sys.argv[1], "rb").read())
trainer = Trainer(run, split_stages(range(run.model.stages), workers)[rank], rank, workers, torch.device("cpu"))
trainer.load_initial()
data = load_dataset(run, pathlib.Path(sys.argv[2]))
results = [trainer.step(*data.batch([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]), flags=[1.0, rank]) for i in range(4)]
trainer.end_phase(1, restart=False)
evaluation = trainer.evaluate_committed(data)
print(json.dumps([[r.loss, r.gradient_norm, *r.flags] for r in results] + [[evaluation]]))
dist.destroy_process_group()
"""


def run_pipeline(folder: Path, stages: int, workers: int) -> list[list[float]]:
    path = folder / f"manifest-{stages}.json"
    path.write_bytes(manifest(data=stdlib().settings, model={"stages": stages}, training={"microbatches": 4}).canonical_bytes())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path), str(stdlib().folder)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers), RENDEZVOUS: str(folder / f"{stages}-{workers}")},
        )
        for rank in range(workers)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * workers
    per_worker = [json.loads(output) for output in outputs]
    assert all(result == per_worker[0] for result in per_worker), "workers disagree about a step"
    return per_worker[0]


@pytest.mark.e2e
def test_two_and_three_workers_compute_what_one_computes(tmp_path: Path):
    alone = run_pipeline(tmp_path, 2, 1)
    for stages, workers in ((2, 2), (5, 2), (3, 3)):
        together = run_pipeline(tmp_path, stages, workers)
        for step, expected in zip(together, alone, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-4)
        assert together[0][2:] == [workers, sum(range(workers))]


def test_stages_are_shared_out_contiguously():
    assert split_stages(range(5), 2) == [[0, 1, 2], [3, 4]]
    assert split_stages(range(80), 8)[7] == list(range(70, 80))
    assert split_stages(range(2), 2) == [[0], [1]]
