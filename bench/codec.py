"""Codec work of a round: against a copy in memory, and as a share of one inner step and of a phase of H steps.

On a processor the first table compares the codec with a copy of as many float32 values, alternated in one run, by CPU
seconds of one thread; the reference is the same work without the fast path (native.c). `--check` compares these ratios with bars.

The codec work of a phase: encode its own payload, decode it (error feedback), decode three payloads, apply. The
baseline is the inner step (forward, backward, optimizer) of the same tensors, device and threads in the same run. If a
step of the manifest's tokens takes too long here, fewer tokens are measured. Forward and backward are then scaled up,
because they are linear in tokens; the optimizer is not. The row shows the measured number. This machine's memory does
not fit four copies of the 107B-shaped layer. Its largest matrix replaces it, without attention in the baseline.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.report import bench_parser, judge, load_preset, table, write
from bench.sections import model_section
from bench.texts import UNREAD
from dilocox.node.outer.state import StageState
from dilocox.node.outer.state_device import passage_of
from dilocox.node.training.model.inner import InnerOptimizer
from dilocox.node.training.model.model import Stage, build_chain, initial_values
from dilocox.node.workers.environment import OuterState
from dilocox.protocol.payload import native
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import TensorSpec, stage_tensors

__all__ = ["main"]


@dataclass(frozen=True)
class Shape:
    name: str
    model: dict[str, Any]
    stage: int
    compression: dict[str, Any]
    inner_steps: int
    tokens: int
    """Tokens of an inner step, as in a manifest of this size."""
    measured_tokens: int
    """Tokens of a measured step."""
    threads: int | None = None
    """Threads of a stage worker of this size; None: all."""
    optimizer: str = "adamw"
    """The inner one."""
    only: str = ""
    """Measure only the tensors whose name contains this."""
    repeats: int = 5


def model(hidden: int, middle: int, heads: int, kv_heads: int, layers: int, stages: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": middle, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**shape, "num_hidden_layers": layers, "stages": stages, "vocab_size": 256}


TOPK = {"codec": "topk-int2", "k": 230, "entropy_coding": True}
TINY, LAYER_1B = model(128, 352, 4, 4, layers=4, stages=2), model(2048, 5504, 16, 16, layers=1, stages=3)
LAYER_107B = model(8192, 49152, 64, 8, layers=1, stages=3)
PAYLOADS = 3
"""Payloads that are decoded and applied together."""
PRESET, OF_1B = load_preset("tiny"), load_preset("llama-1b")
DENSE = PRESET.compression.model_dump()
OF_1B_LAYER = Shape(
    "1B-shaped layer",
    LAYER_1B,
    1,
    OF_1B.compression.model_dump(),
    OF_1B.rounds.inner_steps,
    8 * 2048,
    1024,
    optimizer=OF_1B.training.optimizer,
    repeats=3,
)
OF_1B_CORE = replace(OF_1B_LAYER, threads=1, measured_tokens=512)
SHAPES = (
    Shape(
        "tiny stage",
        TINY,
        0,
        DENSE,
        PRESET.rounds.inner_steps,
        8 * 128,
        8 * 128,
        threads=1,
        optimizer=PRESET.training.optimizer,
    ),
    Shape("tiny stage", TINY, 0, {"rank": 16}, 20, 8 * 128, 8 * 128, threads=1),
    OF_1B_LAYER,
    OF_1B_CORE,
    replace(OF_1B_CORE, compression=DENSE, inner_steps=20),
    replace(OF_1B_CORE, compression={**DENSE, "entropy_coding": True}, inner_steps=20),
    Shape("1B-shaped layer", LAYER_1B, 1, TOPK, 100, 8 * 2048, 1024, repeats=3),
    Shape("1B-shaped layer", LAYER_1B, 1, {"rank": 128}, 100, 8 * 2048, 1024, repeats=3),
    Shape("107B-shaped layer", LAYER_107B, 1, TOPK, 125, 16 * 4096, 128, only="down_proj", repeats=1),
    Shape("107B-shaped layer", LAYER_107B, 1, {"rank": 2048}, 125, 16 * 4096, 128, only="down_proj", repeats=1),
)


def manifest(shape: Shape) -> Manifest:
    sections = {
        "run": {"name": "bench", "owner": "00" * 32},
        "model": model_section({"model_type": "qwen2", "sequence_length": 128, **shape.model}),
        "data": UNREAD,
        "training": {"optimizer": shape.optimizer, "learning_rate": 1e-3, "total_steps": 1000, "batch_size": 2},
        "compression": shape.compression,
        "rounds": {"count": 10, "inner_steps": shape.inner_steps, "max_inner_steps": shape.inner_steps},
    }
    return Manifest.model_validate(sections)


def seconds(action: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median wall time of `action`, after one warm-up if it is repeated."""
    times = []
    for _ in range(repeats + (repeats > 1)):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[-repeats:])


def step_seconds(shape: Shape, specs: Sequence[TensorSpec], device: torch.device) -> float:
    """Return the seconds of one inner step at the manifest's tokens: forward and backward, scaled if fewer tokens were
    measured, and the optimizer."""
    module, inputs = single(specs[0], shape, device) if shape.only else whole(shape, device)
    if isinstance(module, Stage):
        step = InnerOptimizer(manifest(shape), [module]).step
    else:
        step = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=True).step

    def pass_through() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = module(inputs)
        out.float().square().mean().backward()

    passes = seconds(pass_through, device, shape.repeats) * shape.tokens / shape.measured_tokens
    return passes + seconds(step, device, shape.repeats)


def whole(shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor]:
    run = manifest(shape)
    (module,) = build_chain(run.model, [shape.stage], device)
    assert isinstance(module, Stage)
    for spec, parameter in zip(module.specs, module.tensors(), strict=True):
        for offset, values in initial_values(spec, 0):
            parameter.data.view(-1)[offset : offset + len(values)] = values.to(device)
    length = run.model.sequence_length
    batch = shape.measured_tokens // length
    if hasattr(module.model, "embed_tokens"):
        return module, torch.randint(0, 256, (batch, length), device=device)
    return module, torch.randn(batch, length, run.model.config.hidden_size, device=device, requires_grad=True)


def single(spec: TensorSpec, shape: Shape, device: torch.device) -> tuple[nn.Module, Tensor]:
    rows, columns = spec.shape
    linear = nn.Linear(columns, rows, bias=False, device=device)
    return linear, torch.randn(shape.measured_tokens, columns, device=device, requires_grad=True)


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(shape.threads or os.cpu_count() or 1)
    run = manifest(shape)
    specs = [spec for spec in stage_tensors(run.model, shape.stage) if shape.only in spec.name]
    step = step_seconds(shape, specs, device)
    state = StageState(run, shape.stage, specs, passage_of(OuterState.DEVICE, device))
    state.feedback.normal_(generator=torch.Generator(device).manual_seed(0), std=1e-3)
    payloads: list[bytes] = []
    # decoding of its own payload and packing included
    encode = seconds(lambda: payloads.append(state.encode().raw), device, shape.repeats)
    views = [memoryview(payloads[-1])] * PAYLOADS
    apply = seconds(lambda: state.apply(views, [1] * PAYLOADS), device, shape.repeats)  # parse, decode, mean, Nesterov
    return {
        "shape": shape.name,
        "optimizer": shape.optimizer,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "parameters": state.size,
        "codec": f"{run.compression.codec} {run.compression.keep}{', coded' * run.compression.entropy_coding}",
        "inner_steps": shape.inner_steps,
        "tokens_per_step": shape.tokens,
        "measured_tokens": shape.measured_tokens,
        "step_seconds": step,
        "encode_seconds": encode,
        "decode_apply_seconds": apply,
        "share_of_step": (encode + apply) / step,
        "share_of_phase": (encode + apply) / (step * shape.inner_steps),
    }


COPIED: dict[str, dict[str, Any]] = {
    "int2": {"codec": "int2"},
    "int4": {"codec": "int4"},
    "topk-int2": {"codec": "topk-int2", "k": 230},
}
BARS = {"int2": (3.0, 1.0, 2.0), "int4": (6.0, 2.0, 4.0), "topk-int2": (6.0, 2.0, 4.0)}
"""Copies of encode with error feedback, of the check of a payload, and of the apply of each payload, at most."""
VALUES, QUICK_VALUES = 1 << 23, 1 << 20
APPLIED, TURNS = 4, 7


def cpu_seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def copies(codec: str, values: int, turns: int = TURNS) -> tuple[float, float, float]:
    """Return the CPU time of encode, check and apply of each payload of one large matrix, in copies of its values. The
    four are alternated; the median of the ratios counts."""
    torch.set_num_threads(1)
    shape = replace(SHAPES[0], compression=COPIED[codec])
    state = StageState(manifest(shape), 0, [TensorSpec("model.layers.0.matrix", (1024, values // 1024), 0.02)])
    start = torch.randn(values, generator=torch.Generator().manual_seed(0)) * 1e-3
    other, layout = torch.empty(values), state.layout()
    found: list[tuple[float, float, float]] = []
    for turn in range(turns + 1):
        state.feedback.copy_(start)
        copy = min(cpu_seconds(lambda: other.copy_(start)) for _ in range(3))
        payloads: list[bytes] = []
        encode = cpu_seconds(lambda: payloads.append(state.encode().raw))  # noqa: B023 - called here
        views = [memoryview(payloads[0])] * APPLIED
        check = cpu_seconds(lambda: wire.decoded_norm(wire.parse(views[0], layout)))  # noqa: B023
        apply = cpu_seconds(lambda: state.apply(views, [1] * APPLIED))  # noqa: B023
        if turn:  # the first one touches the memory
            found.append((encode / copy, check / copy, apply / copy / APPLIED))
    encode, check, apply = (statistics.median(each) for each in zip(*found, strict=True))
    return encode, check, apply


def against_copies(quick: bool) -> list[str]:
    """Print the table of copies, and return the missed bars."""
    values = QUICK_VALUES if quick else VALUES
    missed, rows = [], []
    for codec, bars in BARS.items():
        fast = copies(codec, values)
        with native.reference():
            slow = copies(codec, values, turns=1)
        for what, is_, bar in zip(("encode", "check", "apply of each payload"), fast, bars, strict=True):
            if is_ > bar:
                missed.append(f"{what} of {codec} takes {is_:.1f} copies, not {bar:g}")
        rows.append([codec, *(f"{a:.2f} ({b:.1f})" for a, b in zip(fast, slow, strict=True))])
    print(f"{values:,} values, one thread, {TURNS} turns, seed 0; CPU time in copies of the values (reference)")
    table(["codec", "encode with feedback", "check", f"apply, each of {APPLIED}"], rows)
    return missed


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.codec", __doc__, "a million values, and the smallest shape").parse_args(arguments)
    if native.kernels() is None:
        missed = ["the fast path was not built: install a C compiler, and the package again"]
    else:
        missed = against_copies(options.quick)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [measure(shape, device) for shape in (SHAPES[:1] if options.quick else SHAPES)]
    columns = ["shape", "parameters", "device", "optimizer", "codec", "H", "tokens/step (measured)"]
    columns += ["threads", "step s", "encode s", f"decode {PAYLOADS} + apply s", "M values/s encoded", "applied of each"]
    columns += ["of a step", "of H steps"]
    rows = [
        [
            r["shape"],
            f"{r['parameters']:,}",
            r["device"],
            r["optimizer"],
            r["codec"],
            str(r["inner_steps"]),
            f"{r['tokens_per_step']:,} ({r['measured_tokens']:,})",
            str(r["threads"]),
            f"{r['step_seconds']:.3f}",
            f"{r['encode_seconds']:.3f}",
            f"{r['decode_apply_seconds']:.3f}",
            f"{r['parameters'] / r['encode_seconds'] / 1e6:.0f}",
            f"{PAYLOADS * r['parameters'] / r['decode_apply_seconds'] / 1e6:.0f}",
            f"{100 * r['share_of_step']:.1f}%",
            f"{100 * r['share_of_phase']:.2f}%",
        ]
        for r in results
    ]
    table(columns, rows)
    write("codec", results, options.quick)
    judge(missed, options.check)


if __name__ == "__main__":
    main()
