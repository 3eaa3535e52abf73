"""Distance that an auditor measures: after honest work on another kind of machine, and after work that was not done.

An author and an auditor train one stretch of a phase from one state, on the same samples, as nodes do
(node/training/worker/audit.py). The auditor measures the distance between both results. One CPU can imitate these kinds of
machine:

    threads    another number of them
    order      sums in another order, by other microbatches, as other kernels would
    precision  matrix products in bf16, as GPUs with `training.precision = "auto"`, against float32

A run's `audit.largest_distance` must be above the honest rows of its machines and below the dishonest rows. `--check`
verifies this for the default.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.report import bench_parser, judge, table, write
from bench.sections import model_section
from bench.texts import stdlib
from dilocox.node.training.model.data import Dataset, load_dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.audit import Batch, advance, distance
from dilocox.node.training.worker.audit_checkpoints import stage_state
from dilocox.protocol.run.manifest import Audit, Manifest

__all__ = ["main"]

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sequence_length": 64,
}
BATCH, EARLY, LATE, FAR = 8, 5, 200, 100_000
"""Sequences of a batch; inner steps before the stretch; samples that no other cluster reads."""
Batches = Sequence[Batch]


def manifest(optimizer: str, precision: str = "float32", microbatches: int = 2) -> Manifest:
    text = stdlib()
    return Manifest.model_validate(
        {
            "run": {"name": "bench", "owner": "00" * 32},
            "model": model_section({"model_type": "llama", "vocab_size": 256, "stages": 1, **MODEL}),
            "data": text.settings,
            "training": {
                "optimizer": optimizer,
                "learning_rate": 1e-3,
                "total_steps": 2000,
                "warmup_steps": 20,
                "batch_size": BATCH,
                "microbatches": microbatches,
                "precision": precision,
            },
            "compression": {"rank": 8},
            "rounds": {"count": 10, "inner_steps": 50, "max_inner_steps": 50},
        }
    )


@dataclass(frozen=True)
class Author:
    name: str
    honest: bool
    precision: str = "float32"
    microbatches: int = 2
    threads: int = 1
    batches: Callable[[Batches, Dataset], Batches] = lambda given, data: given


def elsewhere(given: Batches, data: Dataset) -> Batches:
    return [data.batch(range(FAR + at * BATCH, FAR + (at + 1) * BATCH)) for at in range(len(given))]


def narrow(given: Batches, data: Dataset) -> Batches:
    """Return the first two samples of each batch, four times: a quarter of the work."""
    return [(inputs[:2].repeat(BATCH // 2, 1), targets[:2].repeat(BATCH // 2, 1)) for inputs, targets in given]


AUTHORS = (
    Author("the same", True),
    Author("2 threads", True, threads=2),
    Author("sums in another order", True, microbatches=4),
    Author("products in bf16", True, precision="bf16"),
    Author("all but the last step", False, batches=lambda given, data: given[:-1]),
    Author("every other step", False, batches=lambda given, data: given[::2]),
    Author("a quarter of each batch", False, batches=narrow),
    Author("other samples", False, batches=elsewhere),
    Author("no step at all", False, batches=lambda given, data: ()),
)
FEW = {"all but the last step"}
"""Cases too small for a distance: only equal bits detect them."""


def work(author: Author, optimizer: str, first: Sequence[Tensor], steps: int, given: Batches, data: Dataset) -> list[Tensor]:
    torch.set_num_threads(author.threads)
    trainer = Trainer(manifest(optimizer, author.precision, author.microbatches))
    try:
        return advance(trainer, first, steps, author.batches(given, data))
    finally:
        torch.set_num_threads(1)


def rows(optimizer: str, begins: Sequence[int], lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    run = manifest(optimizer)
    data, trainer, at = load_dataset(run, stdlib().folder), Trainer(run), 0
    trainer.load_initial()
    for begin in begins:
        for step in range(at, begin):
            trainer.step(*data.batch(range(step * BATCH, (step + 1) * BATCH)))
        at = begin
        first = [stage_state(trainer, stage) for _, stage in trainer.live_stages()]
        for length in lengths:
            given = [data.batch(range(step * BATCH, (step + 1) * BATCH)) for step in range(begin, begin + length)]
            computed = work(AUTHORS[0], optimizer, first, begin, given, data)
            for author in AUTHORS:
                said = work(author, optimizer, first, begin, given, data)
                off = distance(trainer, first, computed, said)
                yield {
                    "optimizer": optimizer,
                    "after": begin,
                    "steps": length,
                    "author": author.name,
                    "honest": author.honest,
                    "distance": off,
                }


def missed(found: Sequence[dict[str, Any]]) -> list[str]:
    bound = Audit().largest_distance
    wrong = [row for row in found if row["honest"] != (row["distance"] <= bound) and row["author"] not in FEW]
    sentences = [
        f"{row['optimizer']}, {row['steps']} steps after {row['after']}: {row['author']}: {row['distance']:.3g},"
        f" though the default bound is {bound:g}"
        for row in wrong
    ]
    same = [row for row in found if row["author"] == AUTHORS[0].name and row["distance"]]
    return [*sentences, *(f"the same machine differs by {row['distance']:.3g}" for row in same)]


def main(arguments: Sequence[str] = ()) -> None:
    options = bench_parser("bench.audit", __doc__, "one beginning, one length").parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    begins, lengths = ([EARLY], [5]) if options.quick else ([EARLY, LATE], [10, 50])
    found = [row for optimizer in ("adamw", "muon") for row in rows(optimizer, begins, lengths)]
    dist.destroy_process_group()
    cases = sorted({(row["optimizer"], row["after"], row["steps"]) for row in found})
    columns = ["author", *(f"{optimizer}, {steps} after {after}" for optimizer, after, steps in cases)]
    by_case = {(row["author"], row["optimizer"], row["after"], row["steps"]): row["distance"] for row in found}
    table(columns, [[author.name, *(f"{by_case[(author.name, *case)]:.3g}" for case in cases)] for author in AUTHORS])
    if not options.quick:
        write("audit", found)
    judge(missed(found), options.check)


if __name__ == "__main__":
    main(sys.argv[1:])
