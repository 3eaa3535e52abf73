"""Efficiency of a pipeline against the bound of its schedule: seconds of a batch in one worker, over those of two workers
that share it.

Two processes have one thread each. Alone, each of them computes the whole batch by itself. Both do so at the same time,
so cores, caches and memory are as busy as in the pipeline. As a pipeline they share the same microbatches. A step is
forward and backward, without optimizer. Efficiency is seconds alone over 2 x seconds of the pipeline; the slower worker
counts. The bound follows from the schedule's bubble (node/planning/memory_model.py).

The bench also shows how two busy cores slow each other, as seconds of the whole batch while the other worker waits. A
worker that waits in the bubble makes the other faster, so a result can exceed the bound. Steps of all kinds alternate
in one run, and medians are compared, so a drift of the machine affects all. `--check` exits with 1 if efficiency is
below the bar. It also exits with 1 if other processes used more of the machine than such a measurement allows.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist

from bench.report import bench_parser, judge, machine, table, write
from bench.sections import model_section
from dilocox.node.planning.memory_model import bubble
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.rendezvous import join_generation
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.environment import RENDEZVOUS
from dilocox.node.workers.placement import chunks
from dilocox.protocol.run.manifest import Manifest, Schedule

__all__ = ["main", "missed"]

WORKERS = 2
MICROBATCHES = (4, 8)
STEPS = 5
BAR = 0.95
"""Least share of a schedule's bound."""
OTHERS = 0.05
"""Largest share of the machine's processor time for other processes: a delayed worker delays the other worker."""
STAGES, LENGTH, WORDS = 8, 256, 256
WIDTHS = {
    "vocab_size": WORDS,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
MODEL = {"model_type": "qwen2", **WIDTHS, "sequence_length": LENGTH, "num_hidden_layers": 8, "stages": STAGES}
SEQUENCES = 2
"""Sequences of a microbatch: 512 tokens. A preset of this width has 8,192; with 128, transfers weigh more than they ever
do there."""


def run_of(microbatches: int, schedule: Schedule, copies: int = 1) -> Manifest:
    sections = {
        "run": {"name": "bench", "owner": "00" * 32},
        "model": model_section(MODEL),
        "data": {"name": "none", "digest": "00" * 32},
        "training": {
            "learning_rate": 1e-3,
            "total_steps": 100,
            "batch_size": copies * microbatches * SEQUENCES,
            "microbatches": copies * microbatches,
            "schedule": schedule,
        },
        "compression": {"codec": "fp32"},
        "rounds": {"count": 1, "inner_steps": 1, "max_inner_steps": 1},
    }
    return Manifest.model_validate(sections)


# In each worker


def timed(trainer: Trainer, tokens: torch.Tensor) -> float:
    """Return the seconds of a step. The memory of the previous step is freed before it starts."""
    began = time.perf_counter()
    trainer.pipeline.step(tokens, tokens, tokens.numel())
    seconds = time.perf_counter() - began
    for _, stage in trainer.live_stages():
        stage.zero_grad(set_to_none=True)
    return seconds


def by_itself(trainer: Trainer, tokens: torch.Tensor) -> float:
    """Return the seconds of a step during which the other workers wait."""
    seconds = 0.0
    for rank in range(WORKERS):
        dist.barrier()
        if rank == dist.get_rank():
            seconds = timed(trainer, tokens)
    return seconds


def work(rank: int, meeting: str, microbatches: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step: alone, while the others wait, and by schedule. "machine": processor seconds of all
    cores in that time, those that were not idle, and this worker's."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(WORKERS), RENDEZVOUS: meeting})
    join_generation(torch.device("cpu"))
    torch.set_num_threads(1)
    alone = Trainer(run_of(microbatches, "1f1b", WORKERS), Mesh(rank, WORKERS, WORKERS))
    trainers = {
        "alone": alone,
        **{name: Trainer(run_of(microbatches, name), Mesh(rank, WORKERS)) for name in get_args(Schedule)},
    }
    for trainer in trainers.values():
        trainer.load_initial()
    tokens = torch.randint(0, WORDS, (microbatches * SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    found: dict[str, list[float]] = {name: [] for name in (*trainers, "by itself")}
    dist.barrier()
    before = spent()
    for _ in range(steps + 1):
        found["by itself"].append(by_itself(alone, tokens))
        for name, trainer in trainers.items():
            dist.barrier()
            found[name].append(timed(trainer, tokens))
    dist.barrier()
    found = {name: seconds[1:] for name, seconds in found.items()}  # the first one opens connections
    found["machine"] = [after - first for first, after in zip(before, spent(), strict=True)]
    dist.destroy_process_group()
    return found


def spent() -> tuple[float, float, float]:
    times = psutil.cpu_times()
    every = sum(times)
    return every, every - times.idle - getattr(times, "iowait", 0.0), time.process_time()


# Around them


def measure(microbatches: int, steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        meeting = str(Path(folder) / "meeting")
        working = [pool.submit(work, rank, meeting, microbatches, steps) for rank in range(WORKERS)]
        workers = [each.result() for each in working]
    alone, waiting = (
        statistics.median(seconds for worker in workers for seconds in worker[kind]) for kind in ("alone", "by itself")
    )
    every, busy, _ = workers[0]["machine"]
    others = (busy - sum(worker["machine"][2] for worker in workers)) / every
    rows = []
    for schedule in get_args(Schedule):
        together = statistics.median(map(max, *(worker[schedule] for worker in workers)))
        turns = len(chunks(STAGES, WORKERS, schedule)[0])
        bound = 1 - bubble(turns, WORKERS, microbatches)
        efficiency = alone / (WORKERS * together)
        rows.append(
            {
                "schedule": schedule,
                "chunks": turns,
                "microbatches": microbatches,
                "alone_seconds": alone,
                "other_waits_seconds": waiting,
                "step_seconds": together,
                "efficiency": efficiency,
                "bound": bound,
                "of_bound": efficiency / bound,
                "others": others,
                "steps": steps,
            }
        )
    return rows


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    disturbed = [
        f"others had {row['others']:.0%} of the machine in the steps of {row['microbatches']} microbatches, at most {OTHERS:.0%}"
        for row in rows
        if row["others"] > OTHERS and row["schedule"] == "1f1b"
    ]
    return disturbed + [
        f"{row['schedule']} with {row['microbatches']} microbatches reaches {row['of_bound']:.1%} of its bound, less than {BAR:.0%}"
        for row in rows
        if row["of_bound"] < BAR
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.pipeline", __doc__, "fewer microbatches and steps").parse_args(arguments)
    counts, steps = (MICROBATCHES[:1], 3) if options.quick else (MICROBATCHES, STEPS)
    rows = [row for count in counts for row in measure(count, steps)]
    facts = machine()
    print(f"{facts['cores']} cores, {facts['platform']}; {WORKERS} workers of one thread, medians of {steps} steps")
    columns = [
        "schedule",
        "chunks",
        "microbatches",
        "alone s",
        "other waits s",
        "step s",
        "efficiency",
        "bound",
        "of bound",
        "others",
    ]
    table(
        columns,
        [
            [
                row["schedule"],
                str(row["chunks"]),
                str(row["microbatches"]),
                f"{row['alone_seconds']:.3f}",
                f"{row['other_waits_seconds']:.3f}",
                f"{row['step_seconds']:.3f}",
                f"{row['efficiency']:.1%}",
                f"{row['bound']:.1%}",
                f"{row['of_bound']:.1%}",
                f"{row['others']:.1%}",
            ]
            for row in rows
        ],
    )
    write("pipeline", rows, options.quick)
    judge(missed(rows), options.check)


if __name__ == "__main__":
    main()
