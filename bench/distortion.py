"""What each codec loses of a real pseudo-gradient, at which bytes: AdamW's and Muon's. `python -m bench.distortion`.

One cluster trains, its work of one round is encoded once, without error feedback: error relative to the pseudo-gradient's norm. Low
rank plus a sparse residual is not a codec of the product: it is encoded here one after the other, to see whether it should be.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bench.arms import ARMS, Settings
from bench.lab import process_group_of_one
from bench.report import bench_parser, table, write
from bench.texts import stdlib
from dilocox.node.outer.state import StageState
from dilocox.node.training.data import load_dataset
from dilocox.node.training.trainer import Trainer
from dilocox.protocol.manifest import Compression, Manifest

__all__ = ["main"]

WARM_STEPS, ROUND_STEPS = 60, 20
CODECS: dict[str, tuple[dict[str, Any], ...]] = {
    "lowrank-int4, rank 8": ({"codec": "lowrank-int4", "rank": 8},),
    "lowrank-int4, rank 16": ({"codec": "lowrank-int4", "rank": 16},),
    "lowrank-int4, rank 16, Huffman": ({"codec": "lowrank-int4", "rank": 16, "entropy_coding": True},),
    "lowrank-int4, rank 8 + topk-int2, k 150": (
        {"codec": "lowrank-int4", "rank": 8, "entropy_coding": True},
        {"codec": "topk-int2", "k": 150, "entropy_coding": True},
    ),
    "topk-int2, k 230, per stage": ({"codec": "topk-int2", "k": 230, "entropy_coding": True},),
    "topk-int2, k 540, per stage": ({"codec": "topk-int2", "k": 540, "entropy_coding": True},),
    "topk-int2, k 760, per stage": ({"codec": "topk-int2", "k": 760, "entropy_coding": True},),
    "int2": ({"codec": "int2"},),
    "int4": ({"codec": "int4"},),
    "int4, Huffman": ({"codec": "int4", "entropy_coding": True},),
}


def pseudo_gradient(optimizer: str) -> tuple[Manifest, Tensor]:
    """The work of one cluster's round after a short training."""
    arm = next(arm for arm in ARMS if arm.name == "DiLoCo fp32")
    settings: Settings = {"training": {"optimizer": optimizer, "learning_rate": 3e-3}}
    run = arm.manifest(settings, WARM_STEPS + ROUND_STEPS, 0)
    trainer = Trainer(run)
    trainer.load_initial()
    dataset, batch = load_dataset(run, stdlib().folder), run.training.batch_size
    for step in range(WARM_STEPS + ROUND_STEPS):
        if step == WARM_STEPS:
            trainer.end_phase(1, restart=False)
            trainer.states[0].feedback.zero_()
        trainer.step(*dataset.batch(list(range(step * batch, (step + 1) * batch))))
    trainer.end_phase(2, restart=False)
    return run, trainer.states[0].feedback.clone()


def lose(run: Manifest, work: Tensor, compressions: tuple[dict[str, Any], ...]) -> tuple[float, float]:
    """(bits per parameter, relative error) of encoding what the one before left."""
    left, size = work.clone(), 0
    for values in compressions:
        state = StageState(run.model_copy(update={"compression": Compression(**values)}), 0)
        state.feedback.copy_(left)
        size += len(state.encode().raw)
        left = state.feedback.clone()
    return 8 * size / len(work), float(left.norm() / work.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.distortion", __doc__, "two codecs", bars=False).parse_args(arguments)
    process_group_of_one()
    results: list[dict[str, Any]] = []
    work = {optimizer: pseudo_gradient(optimizer) for optimizer in ("adamw", "muon")}
    for name, compressions in [*CODECS.items()][: 2 if options.quick else None]:
        row: dict[str, Any] = {"codec": name}
        for optimizer, (run, gradient) in work.items():
            row["bits"], row[optimizer] = lose(run, gradient, compressions)
        results.append(row)
    columns = ["codec", "bits/parameter", "error, AdamW", "error, Muon"]
    rows = [[r["codec"], f"{r['bits']:.2f}", f"{r['adamw']:.3f}", f"{r['muon']:.3f}"] for r in results]
    table(columns, rows)
    write("distortion", results, options.quick)


if __name__ == "__main__":
    main()
