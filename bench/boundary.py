"""Cost of a round's end at size: seconds that it stalls training, bytes written, rates of encode and apply. `bench.held`
measures its memory.

One worker has all stages of a 100M and of a 350M model (1B widths with a quarter of the layers), on the available
device. On a GPU each choice for outer state is measured (node/outer/state_device.py). A phase ends as in the node, a step
runs beside encoding and writing, and a commit of two payloads is applied. Training stalls at the end of the phase, in
the wait for copies before the next update, and in the rebase. The cost of an end written on the training thread is
measured too. A phase is H measured steps. Bandwidth is the rate of one large copy in the same run. Encode reads and
writes the feedback once; apply does so for Θ and momentum.
"""

import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.report import bench_parser, judge, machine, table, write
from bench.sections import model_section
from bench.texts import UNREAD
from dilocox.node.outer import checkpoint
from dilocox.node.outer.checkpoint import BoundaryMeta
from dilocox.node.outer.state_device import passage_of
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Commit, Take, Trainer
from dilocox.node.training.worker.phase_end import Boundaries
from dilocox.node.workers.environment import OuterState
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore

__all__ = ["main", "measure", "missed"]

MOST_STALL = 0.01
"""Share of a phase."""
COPY_BYTES = 1 << 30
STEPS = 2
"""Measured steps, beside the one after the end of a phase; after an untypical one."""


@dataclass(frozen=True)
class Shape:
    name: str
    model: dict[str, int]
    batch: int
    length: int
    inner_steps: int = 100


SHAPES = (
    Shape(
        "100M",
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12, "vocab_size": 8192},
        4,
        256,
    ),
    Shape(
        "350M",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 5,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        2,
        256,
    ),
)
QUICK = (
    Shape(
        "10M",
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 8192},
        4,
        128,
    ),
)
CODECS: dict[str, dict[str, Any]] = {
    "int2": {"codec": "int2"},
    "int2, coded": {"codec": "int2", "entropy_coding": True},
    "int4, coded": {"codec": "int4", "entropy_coding": True},
    "topk-int2 230": {"codec": "topk-int2", "k": 230, "entropy_coding": True},
    "topk-int2 512": {"codec": "topk-int2", "k": 512, "entropy_coding": True},
    "lowrank-int4": {"codec": "lowrank-int4", "rank": 128},
    "fp32": {"codec": "fp32"},
}


def manifest(shape: Shape, compression: dict[str, Any]) -> Manifest:
    model = {"model_type": "llama", "num_key_value_heads": 4, "sequence_length": shape.length, "stages": 1, **shape.model}
    return Manifest.model_validate(
        {
            "run": {"name": "bench", "owner": "00" * 32},
            "model": model_section(model),
            "data": UNREAD,
            "training": {
                "optimizer": "muon",
                "learning_rate": 1e-3,
                "total_steps": 1000,
                "batch_size": shape.batch,
                "microbatches": 2,
            },
            "compression": compression,
            "rounds": {"count": 10, "inner_steps": shape.inner_steps, "max_inner_steps": shape.inner_steps},
        }
    )


def timed(action: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_bytes_per_second() -> float:
    """Read and written, of a large copy on the host; the fastest of three."""
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    return 2 * COPY_BYTES / min(timed(lambda: target.copy_(source), torch.device("cpu")) for _ in range(3))


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(shape: Shape, codec: str, choice: OuterState, folder: Path, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    run, device = manifest(shape, CODECS[codec]), here()
    if device.type == "cuda":
        gc.collect()  # trainers before this one refer to themselves
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    trainer, store = Trainer(run, Mesh(device=device), passage=passage_of(choice, device)), BlobStore(folder / "blobs")
    trainer.load_initial()
    boundaries = Boundaries(folder / "stages", "a", trainer, store)
    tokens = torch.randint(0, run.model.config.vocab_size, (shape.batch, shape.length))

    def step(before_update: Callable[[], None] = lambda: None) -> None:
        trainer.step(tokens, tokens, before_update=before_update)

    step()
    steps = [timed(step, device) for _ in range(STEPS)]

    ended = timed(lambda: trainer.end_phase(1, restart=False), device)
    meta = BoundaryMeta(1, 1, 1, 0.0, 1, 1, trainer.optimizer.steps, run.compression.keep)
    job = boundaries.begin(meta, {0: bytes(32)})
    written: dict[int, BoundaryMeta] = {}
    waited: list[float] = []
    with ThreadPoolExecutor(1) as pool:  # beside training, as the node's background
        writing = pool.submit(timed, lambda: written.update(job()), device)
        step(lambda: waited.append(timed(boundaries.wait, device)))
        background = writing.result()
    payload = bytes.fromhex(written[0].payload)
    commit = Commit(1, run.compression.keep, [Take("a", 1, [payload]), Take("b", 1, [payload])])
    apply = timed(lambda: trainer.prepare(commit, store.view, "a", {}), device)
    moved = timed(trainer.rebase, device)

    encode = timed(lambda: trainer.encode("a", 1, run.compression.keep), device)
    (state,), inner = trainer.states, trainer.copy_inner()[0]

    def on_the_training_thread() -> None:
        checkpoint.save_inner(folder / "before", 0, 1, inner)
        checkpoint.save_outer(folder / "before", state, 1)

    saved = timed(on_the_training_thread, device)
    median = statistics.median(steps)
    return {
        "shape": asdict(shape),
        "codec": codec,
        "outer_state": choice.value,
        "parameters": state.size,
        "step_seconds": median,
        "stall_seconds": {"end of the phase": ended, "wait for copies": waited[0], "move onto the commit": moved},
        "stall_share": (ended + waited[0] + moved) / (shape.inner_steps * median),
        "written_on_the_training_thread": saved,
        "background_seconds": background,
        "encode_seconds": encode,
        "apply_seconds": apply,
        "encode_values_per_second": state.size / encode,
        "apply_values_per_second": 2 * state.size / apply,
        "encode_bytes_per_second": 2 * 4 * state.size / encode,
        "apply_bytes_per_second": 4 * 4 * state.size / apply,
        "device_bytes": torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0,
        "disk_bytes": size_of(folder / "stages") + size_of(folder / "blobs"),
        "payload_bytes": written[0].payload_size,
    }


def missed(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    return [
        f"{each['shape']['name']}, {each['codec']}: training stalls for {each['stall_share']:.2%} of a phase; "
        f"at most {MOST_STALL:.0%}"
        for each in results
        if each["stall_share"] > MOST_STALL
    ]


def show(results: Sequence[dict[str, Any]], copied: float) -> None:
    where = machine()
    print(
        f"{where['device']}, {where['cores']} cores, {torch.get_num_threads()} threads, torch {where['torch']}; one"
        f" copy moves {copied / 1e9:.1f} GB/s, both ways"
    )
    rows = [
        [
            each["shape"]["name"],
            each["codec"],
            each["outer_state"],
            f"{each['step_seconds']:.2f}",
            " + ".join(f"{1000 * part:,.0f}" for part in each["stall_seconds"].values()),
            f"{each['stall_share']:.3%}",
            f"{1000 * each['written_on_the_training_thread']:,.0f}",
            f"{each['background_seconds']:.1f}",
            f"{each['encode_seconds']:.2f} ({each['encode_bytes_per_second'] / copied:.1%})",
            f"{each['apply_seconds']:.2f} ({each['apply_bytes_per_second'] / copied:.1%})",
        ]
        for each in results
    ]
    columns = ["model", "codec", "outer state", "step s", "stalls ms: end + wait + move", "of a phase", "once, to write ms"]
    table([*columns, "background s", "encode s (of bandwidth)", "apply s"], rows)
    sizes = [
        [
            each["shape"]["name"],
            each["codec"],
            each["outer_state"],
            *(f"{each[key] / (1 << 20):,.0f}" for key in ("device_bytes", "disk_bytes")),
            f"{each['payload_bytes'] / (1 << 20):,.1f}",
        ]
        for each in results
    ]
    table(["model", "codec", "outer state", "MiB on CUDA", "on disk", "of payload"], sizes)
    speeds = [
        [
            each["shape"]["name"],
            each["codec"],
            each["outer_state"],
            *(f"{each[key] / 1e6:,.0f}" for key in ("encode_values_per_second", "apply_values_per_second")),
        ]
        for each in results
    ]
    table(["model", "codec", "outer state", "M values/s encoded", "applied, of each payload"], speeds)


def main(arguments: Sequence[str] = ()) -> list[str]:
    parser = bench_parser("bench.boundary", __doc__, "a model of 10M parameters")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's for temporary files)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the worker (default: one for each core)")
    parser.add_argument("--models", help=f"of {', '.join(shape.name for shape in SHAPES)}; default all")
    options = parser.parse_args(arguments)
    by_name = {shape.name: shape for shape in SHAPES}
    names = list(by_name) if options.models is None else options.models.split(",")
    if unknown := set(names) - set(by_name):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    if options.threads < 1:
        parser.error("--threads 1 at least")
    if options.quick and options.models:
        parser.error("--quick has a model of its own")
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    copied, results = copy_bytes_per_second(), []
    for shape in QUICK if options.quick else [by_name[name] for name in names]:
        for codec, choice in itertools.product(CODECS, OuterState if here().type == "cuda" else [OuterState.HOST]):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                results.append(measure(shape, codec, choice, Path(folder)))
    dist.destroy_process_group()
    show(results, copied)
    kept = "boundary" if options.models is None else "boundary-other"
    write(kept, {"copy_bytes_per_second": copied, "threads": options.threads, "rows": results}, options.quick)
    found = missed(results)
    judge(found, options.check)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
