"""Bytes per round and peer, against fp32 pseudo-gradients and against per-step AllReduce; scales and headers included."""

from collections.abc import Sequence
from typing import Any

import torch

from bench.report import bench_parser, load_preset, table, write
from dilocox.node.outer.state import StageState
from dilocox.protocol.payload import payload
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import parameter_count, stage_tensors

__all__ = ["main"]

ENCODE_BELOW = 50_000_000
"""Parameters up to which the payload is really encoded and measured; above it, the layout gives its size (a test verifies
that they are equal)."""


def payload_bytes(run: Manifest) -> tuple[int, str]:
    """Return the bytes of one cluster's payloads for a round, and the method that found them."""
    total = 0
    encode = parameter_count(run.model) <= ENCODE_BELOW
    for stage in range(run.model.stages):
        shapes = [spec.shape for spec in stage_tensors(run.model, stage)]
        size = payload.stage_layout(shapes, run.compression, run.compression.keep).largest
        if encode:
            state = StageState(run, stage)
            state.feedback.normal_(generator=torch.Generator().manual_seed(stage))
            size = len(state.encode().raw)
        total += size
    return total, "encoded" if encode else "layout"


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.wire", __doc__, "the small preset", bars=False).parse_args(arguments)
    results: list[dict[str, Any]] = []
    for name in ("tiny",) if options.quick else ("tiny", "qwen1.5-107b"):
        run = load_preset(name)
        parameters, steps = parameter_count(run.model), run.rounds.inner_steps
        size, how = payload_bytes(run)
        results.append(
            {
                "preset": name,
                "parameters": parameters,
                "payload_bytes": size,
                "found_by": how,
                "bits_per_parameter": 8 * size / parameters,
                "fp32_ratio": 4 * parameters / size,
                "allreduce_fp32_ratio": steps * 4 * parameters / size,
                "allreduce_bf16_ratio": steps * 2 * parameters / size,
                "inner_steps": steps,
            }
        )
    columns = [
        "preset",
        "parameters",
        "H",
        "payload bytes",
        "bits/parameter",
        "fp32 / payload",
        "AllReduce fp32",
        "AllReduce bf16",
    ]
    rows = [
        [
            r["preset"],
            f"{r['parameters']:,}",
            str(r["inner_steps"]),
            f"{r['payload_bytes']:,}",
            f"{r['bits_per_parameter']:.3f}",
            f"{r['fp32_ratio']:.1f}x",
            f"{r['allreduce_fp32_ratio']:,.0f}x",
            f"{r['allreduce_bf16_ratio']:,.0f}x",
        ]
        for r in results
    ]
    table(columns, rows)
    print("a peer sends its payload once per round (others spread it) and receives one per other cluster;")
    print("AllReduce: the gradient once per inner step, H steps, as each method's bytes before topology factors")
    write("wire", results, options.quick)


if __name__ == "__main__":
    main()
