"""`dilocox plan`: what a link makes of a run, before anybody rents a box."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import JsonOption, bits_per_second, console, fail, print_json, print_table, read_run
from dilocox.cli.init import preset_names, render_preset
from dilocox.node import plan as model
from dilocox.node.plan import Estimate, Inside, Method, Site
from dilocox.protocol.manifest import Compression, Manifest
from dilocox.protocol.tensors import parameter_count, stage_tensors

__all__ = ["plan"]

SPARSE_SHARES = (64, 256, 512)
"""Values of every 4,096 that top-k is shown with."""


def plan(
    run_file: Annotated[Path | None, typer.Argument(help="A run file; default: the preset.")] = None,
    preset: Annotated[str, typer.Option(help="A preset, when there is no run file.")] = "qwen1.5-107b",
    clusters: Annotated[int, typer.Option(min=2, help="Clusters that exchange.")] = 2,
    boxes: Annotated[int, typer.Option(min=1, help="Boxes of a cluster, each with its own line.")] = 10,
    bandwidth: Annotated[str, typer.Option(help="Of one box's line, each way, such as 1gbit or 200mbit.")] = "1gbit",
    lan: Annotated[str, typer.Option(help="Of the line between a cluster's boxes, each way (default: as --bandwidth).")] = "",
    devices: Annotated[int, typer.Option(min=1, help="Of a box.")] = 8,
    step_seconds: Annotated[float, typer.Option(min=1e-6, help="Of one inner step, computing only.")] = 1.0,
    codec_seconds: Annotated[float, typer.Option(min=0, help="To encode, decode and apply a round.")] = 0.0,
    inner_steps: Annotated[str, typer.Option(help="H to compare, separated by commas.")] = "30,125,500",
    paper: Annotated[bool, typer.Option("--paper", help="The published 107B rows beside this model's.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Bytes, utilisation, arrival step and tokens per second for each codec and H; which overlap reaches a loss sooner."""
    if paper:
        _print_paper(as_json)
        return
    manifest = _manifest(run_file, preset)
    cluster = model.inside(manifest, [devices] * boxes)
    site = Site(
        parameter_count(manifest.model),
        step_seconds,
        clusters * manifest.tokens_per_step,
        clusters,
        boxes,
        bits_per_second(bandwidth, "--bandwidth"),
        cluster.seconds(bits_per_second(lan or bandwidth, "--lan")),
    )
    rows = [_row(site, method) for method in _methods(manifest, _steps(inner_steps), codec_seconds)]
    rows.append({**_facts(model.allreduce(site)), "parameters": site.parameters, "overlap": "none"})
    if as_json:
        print_json({"site": asdict(site), "cluster": asdict(cluster), "rows": rows, "assumptions": _assumptions(site, cluster)})
        return
    columns = ["codec", "H", "bytes", "bit/param", "network s", "arrives at step", "utilisation", "tokens/s", "overlap"]
    print_table(columns, [_cells(row) for row in rows])
    for line in _assumptions(site, cluster):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def _manifest(run_file: Path | None, preset: str) -> Manifest:
    if run_file is not None:
        return read_run(run_file)
    if preset not in preset_names():
        fail(f"no preset {preset}", 2, f"one of: {', '.join(preset_names())}")
    return Manifest.from_toml(render_preset(preset, preset, "00" * 32))


def _steps(text: str) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")]
    except ValueError:
        steps = []
    if not steps or min(steps) < 1:
        fail(f"--inner-steps {text}", 2, "whole numbers separated by commas, such as 30,125,500")
    return steps


def _methods(manifest: Manifest, steps: list[int], codec_seconds: float) -> list[Method]:
    rank = manifest.compression.rank or max(1, manifest.model.hidden_size // 8)
    choices = [("fp16", Compression(codec="fp16")), (f"lowrank-int4 {rank}", Compression(rank=rank))]
    choices += [("int4", Compression(codec="int4", entropy_coding=True)), ("int2", Compression(codec="int2"))]
    shares = sorted({*SPARSE_SHARES, manifest.compression.k or SPARSE_SHARES[0]})
    choices += [(f"topk-int2 {k}", Compression(codec="topk-int2", k=k, entropy_coding=True)) for k in shares]
    shapes = [[spec.shape for spec in stage_tensors(manifest.model, stage)] for stage in range(manifest.model.stages)]
    methods = []
    for name, compression in choices:
        size = model.payload_bytes(model.layouts_of(shapes, compression))
        methods += [Method(name, size, h, codec_seconds=codec_seconds) for h in steps]
    return methods


def _row(site: Site, method: Method) -> dict[str, Any]:
    return {
        **_facts(model.estimate(site, method)),
        "parameters": site.parameters,
        "overlap": model.recommend(site, method),
    }


def _facts(result: Estimate) -> dict[str, Any]:
    return {
        "codec": result.method.name,
        "inner_steps": result.method.inner_steps,
        "payload_bytes": round(result.method.payload_bytes),
        "network_seconds": result.network_seconds,
        "arrival_step": result.arrival_step,
        "utilisation": result.utilisation,
        "tokens_per_second": result.tokens_per_second,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["codec"],
        str(row["inner_steps"]),
        f"{row['payload_bytes']:,}",
        f"{8 * row['payload_bytes'] / row['parameters']:.3f}",
        f"{row['network_seconds']:,.2f}",
        f"{row['arrival_step']:,.1f}",
        f"{row['utilisation']:.1%}",
        f"{row['tokens_per_second']:,.1f}",
        row["overlap"],
    ]


def _assumptions(site: Site, cluster: Inside) -> list[str]:
    tiling, device = cluster.tiling, cluster.device
    limit = "activations" if site.activation_seconds > site.step_seconds else "computing"
    return [
        f"a cluster: {tiling.workers} workers on {site.boxes} boxes, as {tiling.copies} copies of a pipeline of {tiling.length},"
        f" {tiling.schedule} with {cluster.turns} chunks each; each waits {cluster.bubble:.0%} of a step for the pipeline to fill"
        " and drain: in --step-seconds, if it was measured so",
        f"a step: {site.real_step_seconds:,.2f} s, for its {limit}; the box with the most activations to pass on sends"
        f" {cluster.activation_bytes:,} B in each, and receives as many: {site.activation_seconds:,.2f} s on its line",
        f"memory: a worker holds up to {_gigabytes(cluster.device_bytes)} on its device: {_gigabytes(device.weights)} weights,"
        f" {_gigabytes(device.gradients)} gradients, {_gigabytes(device.moments)} moments,"
        f" {_gigabytes(device.activations)} activations; a box up to {_gigabytes(cluster.host_bytes)} of outer state and copies",
        f"bytes: the payload layout's own sizes for {site.parameters:,} parameters; Huffman coding, top-k: from entropy",
        f"network: each of {site.boxes} boxes a cluster moves its share of {site.clusters - 1} payloads over a full line, both ways"
        " at once; AllReduce is a ring in 16 bits",
        "utilisation and tokens per second: with overlap, the longer of computing and exchange; --step-seconds is yours to measure",
        f"overlap: rebase costs {model.DELAY_COST:g} x arrival / H more tokens for the same loss (docs/results.md), waiting costs"
        " its time; the sooner wins",
    ]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def _print_paper(as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"row": row.method.name, "published": published, "modelled": row.tokens_per_second}
        for row, published in zip(model.paper_rows(), model.PUBLISHED.values(), strict=True)
    ]
    if as_json:
        print_json(rows)
        return
    columns = ["107B, 1 Gbps", "published tokens/s", "modelled", "difference"]
    print_table(
        columns,
        [
            [str(r["row"]), f"{r['published']:,.1f}", f"{r['modelled']:,.1f}", f"{r['modelled'] / r['published'] - 1:+.1%}"]
            for r in rows
        ],
    )
    fitted = (
        f"fitted: {model.PAPER_STEP_SECONDS} s an inner step, {model.PAPER_CODEC_SECONDS} s of codec a round; the rest is given"
    )
    console.print(fitted, style="dim", highlight=False, soft_wrap=True)
