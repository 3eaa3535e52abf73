"""Memory of a cluster's hosts, beside the estimate of `dilocox plan`: 350M parameters on two hosts of one CPU worker.

The model has 1B widths with a quarter of the layers, in float32. Each host is a process that trains its half of the
pipeline for some steps. Then it ends a phase as the node does, and applies a commit. The result is its anonymous
memory, less that of the same process with a tiny model: Python, torch, threads. In training it is the maximum over all
steps. At the end of a phase it includes copies of the moments, the encoder's memory, and payloads in transit. `--check`
exits with 1 if a bar is missed.
"""

import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import boundary
from bench.boundary import CODECS, Shape
from bench.report import bench_parser, judge, machine, table, write
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.planning.layouts import choose
from dilocox.node.planning.memory_model import lacks, stage_bytes
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.rendezvous import join_generation
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.node.workers.devices import Devices
from dilocox.node.workers.environment import RENDEZVOUS
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count
from dilocox.transport.store.blobs import BlobStore

__all__ = ["main", "missed"]

BOXES = 2
OFF = 0.1
"""Largest difference between a host's memory and the estimate, as a share."""
STEPS = 2
LOOK_SECONDS = 0.01
SIZES = {size.name: size for size in (*boundary.SHAPES, *boundary.QUICK)}
BARE = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 8}


def run_of(shape: Shape, codec: str) -> Manifest:
    run = boundary.manifest(shape, CODECS[codec])
    training = {**run.training.model_dump(), "microbatches": shape.batch}
    return Manifest.model_validate(
        {**run.model_dump(), "model": {**run.model.model_dump(), "stages": BOXES}, "training": training}
    )


def anonymous() -> int:
    """Return the bytes of this process without a file behind them."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Most:
    """Maximum of the memory while it measured."""

    def __init__(self) -> None:
        self.bytes, self._over = anonymous(), threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> "Most":
        self._looking.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._over.is_set():
            self.bytes = max(self.bytes, anonymous())
            time.sleep(LOOK_SECONDS)


def train(run: Manifest, folder: Path) -> tuple[int, int]:
    """Train; return the largest memory in training, and at the end of a phase."""
    trainer, store = Trainer(run, Mesh(dist.get_rank(), BOXES)), BlobStore(folder / "blobs")
    trainer.load_initial()
    shape = run.training.batch_size, run.model.sequence_length
    tokens = torch.randint(0, run.model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with Most() as training:
        for _ in range(STEPS):
            trainer.step(tokens, tokens)
    boundaries = Boundaries(folder / "stages", "a", trainer, store)
    (stage,) = trainer.stages
    with Most() as ending, ThreadPoolExecutor(1) as background:
        trainer.end_phase(1, restart=False)
        meta = BoundaryMeta(1, STEPS, 1, 0.0, 1, 1, trainer.optimizer.steps, run.compression.keep)
        writing = background.submit(boundaries.begin(meta, {stage: bytes(32)}))
        trainer.step(tokens, tokens, before_update=boundaries.wait)
        payload = bytes.fromhex(writing.result()[stage].payload)
        commit = Commit(1, run.compression.keep, [Take(name, 1, [payload] * BOXES) for name in ("a", "b")])
        trainer.prepare(commit, store.view, "a", {})
        trainer.rebase()
    return training.bytes, ending.bytes


def work(rank: int, size: str, codec: str, folder: Path) -> dict[str, int]:
    """Measure a host, in a separate process."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(BOXES), RENDEZVOUS: str(folder / "meeting")})
    join_generation(torch.device("cpu"))
    torch.set_num_threads(1)
    shape = SIZES[size]
    train(run_of(replace(shape, model={**shape.model, **BARE}), codec), folder / f"{rank}-bare")
    before = anonymous()
    training, ending = train(run_of(shape, codec), folder / f"{rank}")
    dist.destroy_process_group()
    return {"training": training - before, "boundary": ending - before}


def moments(run: Manifest) -> list[int]:
    """Return the bytes of each host's moments: their copy exists only at the end of a phase."""
    return [stage_bytes(run, [stage], half=False).moments for stage in range(BOXES)]


def measure(size: str, codec: str) -> list[dict[str, Any]]:
    run = run_of(SIZES[size], codec)
    tiling = choose(run, [Devices(1)] * BOXES).best.placement
    planned = {lack.box: lack.needs for lack in lacks(run, tiling, [Devices(1, host_bytes=1)] * BOXES)}
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(BOXES, multiprocessing.get_context("spawn")) as pool:
        working = [pool.submit(work, rank, size, codec, Path(name)) for rank in range(BOXES)]
        held = [each.result() for each in working]
    facts = {"size": size, "codec": codec, "parameters": parameter_count(run.model)}
    rows = zip(range(BOXES), held, moments(run), strict=True)
    return [
        {**facts, "box": box, "planned": planned[box] - copy, "with copies": planned[box], **most} for box, most, copy in rows
    ]


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    return [
        f"{row['size']}, {row['codec']}, box {row['box']} holds {row[when] / row[planned]:.2f} of what is planned in {when}, "
        f"not {1 - OFF:.1f} to {1 + OFF:.1f}"
        for row in rows
        for when, planned in (("training", "planned"), ("boundary", "with copies"))
        if abs(row[when] / row[planned] - 1) > OFF
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.held", __doc__, "one codec").parse_args(arguments)
    size, codecs = "350M", list(CODECS)[:1] if options.quick else list(CODECS)
    rows = [row for codec in codecs for row in measure(size, codec)]
    facts = machine()
    print(f"{facts['cores']} cores, {facts['platform']}, torch {facts['torch']}; {BOXES} boxes of one worker and one thread")
    columns = [
        "model",
        "parameters",
        "codec",
        "box",
        "planned MiB",
        "in training",
        "of planned",
        "at a boundary",
        "of that with copies",
    ]
    cells = [
        [
            row["size"],
            f"{row['parameters']:,}",
            row["codec"],
            str(row["box"]),
            f"{row['planned'] / (1 << 20):,.0f}",
            f"{row['training'] / (1 << 20):,.0f}",
            f"{row['training'] / row['planned']:.3f}",
            f"{row['boundary'] / (1 << 20):,.0f}",
            f"{row['boundary'] / row['with copies']:.3f}",
        ]
        for row in rows
    ]
    table(columns, cells)
    write("held", rows, options.quick)
    judge(missed(rows), options.check)


if __name__ == "__main__":
    main()
