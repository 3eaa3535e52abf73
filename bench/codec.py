"""Encode, decode and apply of a stage as a share of one inner step and of a phase of H steps, per device kind.

A phase's codec work is: encode one's own payload, decode it (error feedback), decode three payloads, apply. The baseline is the
inner step (forward, backward, optimizer) of the same tensors on the same device with the same threads, in the same run. Shapes too
large for this machine's patience are measured on fewer tokens per step; the time is linear in tokens, and the row says so.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.report import table, write
from node.outer.state import StageState
from node.training.inner import InnerOptimizer
from node.training.model import Stage, build_chain, initial_values
from protocol.manifest import Manifest

__all__ = ["main"]

REPEATS = 3


@dataclass(frozen=True)
class Shape:
    name: str
    model: dict[str, Any]
    rank: int
    inner_steps: int
    tokens: int
    """Per inner step, as the manifest says."""
    measured_tokens: int
    """Of a measured step; scaled up to `tokens` when smaller."""


def model(hidden: int, middle: int, heads: int, kv_heads: int, layers: int, stages: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": middle, "heads": heads, "kv_heads": kv_heads}
    return {**shape, "layers": layers, "stages": stages, "vocabulary_size": 256}


TINY = model(128, 352, 4, 4, layers=4, stages=2)
ONE_B = model(2048, 5504, 16, 16, layers=1, stages=3)
PAPER = model(8192, 49152, 64, 8, layers=1, stages=3)
SHAPES = (
    Shape("tiny stage", TINY, 16, 60, 8 * 128, 8 * 128),
    Shape("1B-shaped layer", ONE_B, 128, 100, 8 * 2048, 1024),
    Shape("107B-shaped layer", PAPER, 2048, 125, 16 * 4096, 64),
)


def manifest(shape: Shape) -> Manifest:
    sections = {
        "run": {"name": "bench", "owner": "00" * 32},
        "model": {"family": "qwen2", "sequence_length": 128, **shape.model},
        "training": {"learning_rate": 1e-3, "total_steps": 1000, "batch_size": 2},
        "compression": {"rank": shape.rank},
        "rounds": {"count": 10, "inner_steps": shape.inner_steps, "max_inner_steps": shape.inner_steps},
    }
    return Manifest.model_validate(sections)


def seconds(action: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Median wall time of `action`, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def step_seconds(run: Manifest, stage: int, tokens: int, device: torch.device) -> float:
    """One inner step of the stage: forward, backward, clip-free optimizer."""
    (module,) = build_chain(run.model, [stage], device)
    assert isinstance(module, Stage)
    for spec, parameter in zip(module.specs, module.tensors(), strict=True):
        for offset, values in initial_values(spec, 0):
            parameter.data.view(-1)[offset : offset + len(values)] = values.to(device)
    optimizer = InnerOptimizer(run, [module])
    length = min(tokens, run.model.sequence_length)
    batch = max(1, tokens // length)
    first = hasattr(module.model, "embed_tokens")
    inputs = torch.randint(0, 256, (batch, length), device=device)
    hidden = torch.randn(batch, length, run.model.hidden_size, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = module(inputs if first else hidden.requires_grad_())
        loss = nn.functional.mse_loss(out.float(), torch.zeros_like(out, dtype=torch.float32))
        loss.backward()
        optimizer.step()

    return seconds(step, device)


def measure(shape: Shape, device: torch.device) -> dict[str, Any]:
    run = manifest(shape)
    stage = 0 if shape.model["stages"] == 2 else 1
    repeats = REPEATS if shape.rank < 1024 else 1
    step = step_seconds(run, stage, shape.measured_tokens, device) * shape.tokens / shape.measured_tokens
    state = StageState(run, stage)
    state.feedback.normal_(generator=torch.Generator().manual_seed(0), std=1e-3)
    payloads: list[bytes] = []
    encode = seconds(lambda: payloads.append(state.encode(None).raw), device, repeats)  # power iteration, own decode, pack
    views = [memoryview(payloads[-1])] * 3
    apply = seconds(lambda: state.apply(views, [1, 1, 1]), device, repeats)  # parse and decode three payloads, mean, Nesterov
    phase = shape.inner_steps * step
    return {
        "shape": shape.name,
        "device": device.type,
        "rank": shape.rank,
        "inner_steps": shape.inner_steps,
        "tokens_per_step": shape.tokens,
        "measured_tokens": shape.measured_tokens,
        "step_seconds": step,
        "encode_seconds": encode,
        "decode_apply_seconds": apply,
        "share_of_step": (encode + apply) / step,
        "share_of_phase": (encode + apply) / phase,
    }


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for shape in SHAPES:
        results.append(measure(shape, device))
    columns = [
        "shape",
        "device",
        "rank",
        "H",
        "tokens/step",
        "step s",
        "encode s",
        "decode 3 + apply s",
        "of a step",
        "of H steps",
    ]
    rows = [
        [
            r["shape"],
            r["device"],
            str(r["rank"]),
            str(r["inner_steps"]),
            f"{r['tokens_per_step']:,}"
            + (f" (from {r['measured_tokens']:,})" if r["measured_tokens"] != r["tokens_per_step"] else ""),
            f"{r['step_seconds']:.3f}",
            f"{r['encode_seconds']:.3f}",
            f"{r['decode_apply_seconds']:.3f}",
            f"{100 * r['share_of_step']:.1f}%",
            f"{100 * r['share_of_phase']:.2f}%",
        ]
        for r in results
    ]
    table(columns, rows)
    write("codec", results)


if __name__ == "__main__":
    main()
