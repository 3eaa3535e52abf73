"""`dilocox plan`: what a link makes of a run, before anybody rents a box."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import DEVICES, JsonOption, console, fail, print_json, print_table, read_run
from dilocox.cli.exit_codes import Exit
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.node.exchange.shards import find_shards
from dilocox.node.planning import advice as advising
from dilocox.node.planning import plan as model
from dilocox.node.planning.advice import Advice
from dilocox.node.planning.plan import Inside
from dilocox.node.planning.step_model import EFFICIENCY, KINDS, Kind
from dilocox.node.planning.time_model import HEADERS, SEVERAL_FILL, Estimate, Line, Method, Site, estimate, ring
from dilocox.node.workers.environment import CHECKPOINT_SECONDS
from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import Compression, Manifest
from dilocox.protocol.run.tensors import parameter_count, trained_count
from dilocox.transport.limits.rate_limits import bits_per_second

__all__ = ["plan"]

COMPARED = (30, 125, 500)
"""Values of H that are compared with the run's, unless an option names others."""
TERABYTE = 1e12
DAY = 86400
"""Seconds."""
MADE_FOR = "default: what the preset, or the one nearest in size, is made for"


def plan(
    run_file: Annotated[Path | None, typer.Argument(help="A run file; default: the preset.")] = None,
    preset: Annotated[str, typer.Option(help="A preset, when there is no run file.")] = "qwen1.5-107b",
    clusters: Annotated[int | None, typer.Option(min=2, help=f"Clusters that exchange ({MADE_FOR}).")] = None,
    boxes: Annotated[int | None, typer.Option(min=1, help=f"Boxes of a cluster, each with its own line ({MADE_FOR}).")] = None,
    bandwidth: Annotated[str, typer.Option(help=f"Of one box's line, each way, such as 1gbit or 200mbit ({MADE_FOR}).")] = "",
    upload: Annotated[
        str, typer.Option(help="Of that line to the others, where it is another (default: as --bandwidth).")
    ] = "",
    lan: Annotated[str, typer.Option(help="Of the line between a cluster's boxes, each way (default: as --bandwidth).")] = "",
    devices: Annotated[int | None, typer.Option(**DEVICES, help=f"Of a box ({MADE_FOR}).")] = None,
    device: Annotated[str, typer.Option(help=f"Its kind ({', '.join(KINDS)}), or its peak in TFLOP/s ({MADE_FOR}).")] = "",
    step_seconds: Annotated[
        float | None,
        typer.Option(min=1e-9, help="Of one inner step, computing only, as measured (default: by the device's peak)."),
    ] = None,
    fixed_seconds: Annotated[float, typer.Option(min=0, help="That a round costs whatever its bytes: votes and such.")] = (
        model.FIXED_SECONDS
    ),
    encode_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="To encode a cluster's payload, by any codec (default: as each takes on a core for each worker)."
        ),
    ] = None,
    apply_seconds: Annotated[
        float | None, typer.Option(min=0, help="To check and apply one cluster's payload (default: likewise).")
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds between two complete checkpoints, as for `dilocox node`.")
    ] = CHECKPOINT_SECONDS,
    inner_steps: Annotated[
        str, typer.Option(help="H to compare, separated by commas (default: the run's, 30, 125 and 500).")
    ] = "",
    paper: Annotated[bool, typer.Option("--paper", help="The published 107B rows beside this model's.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Advise a site, and compare codecs and H: bytes, arrival step, utilisation, tokens per second."""
    if paper:
        _print_paper(as_json)
        return
    manifest = _manifest(run_file, preset)
    like = preset if run_file is None else _nearest_preset(manifest)
    named: dict[str, Any] = {"clusters": clusters, "boxes": boxes, "devices": devices, "device": device, "bandwidth": bandwidth}
    machines = replace(model.MADE_FOR[like], **{name: value for name, value in named.items() if value})
    assumed = [f"{name} {getattr(machines, name)}" for name, value in named.items() if not value]
    kind = _kind(machines.device)
    cluster = model.inside(manifest, [machines.devices] * machines.boxes, kind)
    line = bits_per_second(machines.bandwidth, "--bandwidth")
    site = Site(
        trained_count(manifest.model),
        model.step_of(manifest, cluster, kind, bits_per_second(lan, "--lan") if lan else line, step_seconds),
        machines.clusters * manifest.tokens_per_step,
        machines.clusters,
        Line(bits_per_second(upload, "--upload") if upload else line, line),
        machines.boxes,
        fixed_seconds,
    )
    _check_memory(cluster, machines.device)

    def taking(name: str, compression: Compression) -> Method:
        """Return the method with the codec's measured seconds, if they are known."""
        found = model.exchanging(manifest, cluster, name, compression)
        return replace(
            found,
            encode_seconds=found.encode_seconds if encode_seconds is None else encode_seconds,
            apply_seconds=found.apply_seconds if apply_seconds is None else apply_seconds,
        )

    offers = advising.offers_of(manifest, taking)
    advice = advising.advise(site, offers, manifest)
    methods = [advising.lengthened(offer.method, h, manifest) for offer in offers for h in _steps(inner_steps, manifest)]
    all_devices = machines.clusters * machines.boxes * machines.devices
    reduced = {**_facts(ring(site)), "parameters": site.parameters, "overlap": "none"}
    rows = [
        {**row, "mfu": model.mfu(manifest, kind, all_devices, row["tokens_per_second"])}
        for row in (*(_row(site, method) for method in methods), reduced)
    ]
    assumptions = _assumptions(site, cluster, machines.device if step_seconds is None else "")
    assumptions.append(_codec(advice.estimate.method, model.most_values(manifest.model, cluster), site))
    as_it_is = estimate(site, replace(taking("its own", manifest.compression), overlap=manifest.rounds.overlap))
    wear = {
        "advised": _wear(manifest, cluster, advice.compression, advice.estimate, site, checkpoint_seconds),
        "own": _wear(manifest, cluster, manifest.compression, as_it_is, site, checkpoint_seconds),
    }
    share = model.mfu(manifest, kind, all_devices, as_it_is.tokens_per_second)
    answer = _answer(manifest, as_it_is, share, wear["own"]["day_bytes"])
    if assumed:
        assumptions.insert(0, f"not named, so as {like} is made for: {', '.join(assumed)}")
    if as_json:
        advised = {
            **_facts(advice.estimate),
            "overlap": advice.overlap,
            "hides": advice.hides,
            "bits": advice.bits,
            "gap": advice.gap if advising.is_measured(advice, manifest) else None,
            "alone": advice.gaps.alone,
            "settings": advising.settings_of(advice, manifest),
            "superseded": advising.superseded(manifest),
            "binds": advice.binds,
            "codec_seconds": {"encode": advice.estimate.method.encode_seconds, "apply": advice.estimate.method.apply_seconds},
            "disk": wear,
        }
        print_json(
            {
                "answer": {"sentence": answer, "mfu": share, **_facts(as_it_is)},
                "site": asdict(site),
                "cluster": asdict(cluster),
                "advice": advised,
                "rows": rows,
                "assumptions": assumptions,
            }
        )
        return
    for sentence in (answer, *cluster.choice.sentences(), ""):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    columns = ["codec", "H", "bytes", "bit/param", "line s", "arrives at step", "steps", "utilisation", "MFU", "tokens/s"]
    print_table([*columns, "overlap"], [_cells(row) for row in rows])
    for sentence in (*_advised(advice, manifest), *_worn(wear), *_as_run_file(advice, manifest)):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    for sentence in assumptions:
        console.print(sentence, style="dim", highlight=False, soft_wrap=True)


def _kind(device: str) -> Kind:
    kind = Kind.named(device)
    if kind is None:
        fail(f"--device {device}", Exit.USAGE, f"one of {', '.join(KINDS)}, or its peak in TFLOP/s, such as 165")
    return kind


def _manifest(run_file: Path | None, preset: str) -> Manifest:
    if run_file is not None:
        return read_run(run_file)
    if preset not in preset_names():
        fail(f"no preset {preset}", Exit.USAGE, f"one of: {', '.join(preset_names())}")
    return Manifest.from_toml(render_preset(preset, preset, "00" * 32))


def _nearest_preset(manifest: Manifest) -> str:
    """Return the preset of the nearest model size."""
    sizes = {name: parameter_count(_manifest(None, name).model) for name in preset_names()}
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / parameter_count(manifest.model))))


def _steps(text: str, manifest: Manifest) -> list[int]:
    try:
        steps = [int(part) for part in text.split(",")] if text else sorted({manifest.rounds.inner_steps, *COMPARED})
    except ValueError:
        steps = []
    if not steps or min(steps) < 1:
        fail(f"--inner-steps {text}", Exit.USAGE, "whole numbers separated by commas, such as 30,125,500")
    return steps


def _check_memory(cluster: Inside, device: str) -> None:
    """Check that some placement fits the devices."""
    for lack in cluster.choice.lacking[:1]:
        what = f"a worker would hold {_gigabytes(lack.needs)} on its device, and a {device} has {_gigabytes(lack.has)}"
        fail(what, Exit.USAGE, "more devices (--devices, --boxes) hold less each, others (--device) more")


def _answer(manifest: Manifest, found: Estimate, share: float, day_bytes: float) -> str:
    """Return the answer for the run as it is. `share`: its MFU."""
    taken, method, training = found.round, found.method, manifest.training
    hours = training.total_steps / taken.steps * taken.seconds / 3600
    if taken.waited:
        first = f"no: each round waits {taken.waited:,.3g} of {taken.seconds:,.3g} s for its exchange"
    elif taken.steps > method.inner_steps:
        first = f"yes, in rounds of {taken.steps:,} steps instead of {method.inner_steps:,}: the link hides the exchange"
    else:
        first = f"yes: the link hides the exchange of {found.exchange_seconds:,.3g} s"
    return (
        f"{first}; {hours:,.1f} h for {training.total_steps:,} steps, {found.tokens_per_second * DAY / 1e9:,.3g} billion tokens"
        f" a day at {share:.1%} MFU, {day_bytes / 1e9:,.0f} GB written a day"
    )


def _advised(advice: Advice, manifest: Manifest) -> list[str]:
    found = advice.estimate
    taken = (
        f"{found.method.name}, H = {found.method.inner_steps:,}, overlap {advice.overlap}: {advice.bits:.2g} bit for each"
        f" parameter and inner step, {found.tokens_per_second:,.1f} tokens/s at {found.utilisation:.1%}"
    )
    if not advice.hides:
        nothing = f"no rounds hide the exchange in a run of {manifest.training.total_steps:,} steps"
        return [f"{nothing}; the most tokens are had with {taken}", advice.binds]
    if not advising.is_measured(advice, manifest):
        return [
            f"take {taken}",
            advice.binds,
            "what that costs in loss was not measured: only Muon with rebase was, from random weights on a text that all share",
        ]
    least = "at least " * advice.below_measured
    return [
        f"take {taken}",
        advice.binds,
        f"what as few bits cost a small model, 4 clusters with Muon after {advice.gaps.steps:,} steps:"
        f" {least}{advice.gap:.1%} of loss over AllReduce; one cluster alone, which exchanges nothing: {advice.gaps.alone:.1%}"
        " (docs/results.md): it ranks codecs, and is no forecast",
    ]


def _as_run_file(advice: Advice, manifest: Manifest) -> list[str]:
    lines = ["a run file says that as these, [compression] whole and of other sections what stands here:"]
    for section, values in advising.settings_of(advice, manifest).items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    if without := advising.superseded(manifest):
        lines += ["", f"and without {', '.join(f'rounds.{key}' for key in without)}"]
    return [*lines, ""]


def _row(site: Site, method: Method) -> dict[str, Any]:
    return {
        **_facts(estimate(site, method)),
        "parameters": site.parameters,
        "overlap": model.recommend(site, method),
    }


def _facts(result: Estimate) -> dict[str, Any]:
    return {
        "codec": result.method.name,
        "inner_steps": result.method.inner_steps,
        "payload_bytes": round(result.method.payload_bytes),
        "line_seconds": result.line_seconds,
        "exchange_seconds": result.exchange_seconds,
        "arrival_step": result.arrival_step,
        "steps": result.round.steps,
        "round_seconds": result.round.seconds,
        "box_bytes": round(result.box_bytes),
        "utilisation": result.utilisation,
        "tokens_per_second": result.tokens_per_second,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["codec"],
        str(row["inner_steps"]),
        f"{row['payload_bytes']:,}",
        f"{8 * row['payload_bytes'] / row['parameters']:.3f}",
        f"{row['line_seconds']:,.2f}",
        f"{row['arrival_step']:,}",
        f"{row['steps']:,}",
        f"{row['utilisation']:.1%}",
        f"{row['mfu']:.1%}",
        f"{row['tokens_per_second']:,.1f}",
        row["overlap"],
    ]


def _assumptions(site: Site, cluster: Inside, device: str) -> list[str]:
    """`device`: by whose peak the step was found; empty: it was measured."""
    tiling, held, step = cluster.tiling, cluster.device, site.step
    limit = "activations" if step.activations > step.working else "computing"
    found = f"by {EFFICIENCY:.0%} of the peak of {tiling.workers} x {device}, and its bubble" if device else "as measured"
    return [
        f"{site.clusters} clusters on lines of {site.line.up / 1e6:,.0f} Mbit/s up and {site.line.down / 1e6:,.0f} down for a box",
        f"a cluster: {several(tiling.workers, 'worker')} on {several(site.boxes, 'box', 'boxes')},"
        f" {tiling.schedule} with {several(cluster.turns, 'chunk')} each; each waits {cluster.bubble:.0%} of a step for the"
        " pipeline to fill and drain: in --step-seconds, if it was measured so",
        f"a step: {step.seconds:,.3g} s, for its {limit}; computing {step.working:,.3g} s, {found}",
        f"activations: the box with the most to pass on sends {cluster.activation_bytes:,} B in a step, and receives as many:"
        f" {step.activations:,.3g} s on its line, beside computing",
        f"memory: a worker holds up to {_gigabytes(cluster.device_bytes)} on its device: {_gigabytes(held.weights)} weights,"
        f" {_gigabytes(held.gradients)} gradients, {_gigabytes(held.moments)} moments,"
        f" {_gigabytes(held.activations)} activations; a box up to {_gigabytes(cluster.host_bytes)} of outer state and copies",
        f"bytes: the payload layout's own sizes for {site.parameters:,} parameters; Huffman coding, top-k: from entropy",
        f"line: each of {site.boxes} boxes a cluster sends its share of a payload to {site.clusters - 1} other clusters and"
        f" receives theirs, both ways at once, {HEADERS - 1:.1%} of headers; more than two clusters fill {SEVERAL_FILL:.0%}"
        " of it; AllReduce is a ring in 16 bits",
        f"arrives: after {site.fixed_seconds:g} s that a round costs whatever its bytes (`python -m bench.clock` measures yours),"
        " the codec's seconds and the line's; where that is beyond H a cluster trains on, as far as max_inner_steps"
        " allow",
        f"overlap: rebase with half the lead costs {model.DELAY_COST:g} x arrival / H more tokens for the same loss"
        " (docs/results.md), waiting costs its time; the sooner wins",
    ]


def _codec(method: Method, values: int, site: Site) -> str:
    return (
        f"codec: {method.encode_seconds:,.3g} s to encode, {method.apply_seconds:,.3g} s to check and apply each of"
        f" {site.clusters} payloads, beside training: by a core for each worker, of which one has {values:,} values"
        " (`python -m bench.boundary --threads 1` tells your values a second)"
    )


def _wear(
    manifest: Manifest, cluster: Inside, compression: Compression, found: Estimate, site: Site, checkpoint_seconds: float
) -> dict[str, float]:
    """Return the disk writes of the busiest host in such rounds."""
    rounds = manifest.rounds.model_copy(update={"inner_steps": found.method.inner_steps})
    run = manifest.model_copy(update={"compression": compression, "rounds": rounds})
    boxes = model.written_by_box(run, cluster, site.clusters, find_shards(run))
    seconds = found.round.seconds
    most = max(boxes, key=lambda box: box.in_a_round(seconds, checkpoint_seconds))
    in_a_round = most.in_a_round(seconds, checkpoint_seconds)
    return {
        "inner_steps": found.method.inner_steps,
        "round_bytes": in_a_round,
        "for_others_bytes": most.for_others,
        "day_bytes": in_a_round / seconds * DAY,
    }


def _worn(wear: dict[str, dict[str, float]]) -> list[str]:
    advised, own = wear["advised"], wear["own"]

    def a_day(count: float) -> str:
        return f"{count / TERABYTE:,.3g} TB a day"

    others = f" ({_gigabytes(advised['for_others_bytes'])} for other peers: audited states, erasure shards)"
    return [
        f"disk writes: in such rounds the busiest host writes {_gigabytes(advised['round_bytes'])}"
        f"{others if advised['for_others_bytes'] else ''} each, {a_day(advised['day_bytes'])}; with the run's H ="
        f" {own['inner_steps']:,}, {a_day(own['day_bytes'])}. No exchange waits for them"
    ]


def _gigabytes(count: float) -> str:
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
        f"three rows make {model.PAPER.step.seconds:.3g} s and {model.PAPER.tokens_per_step:,.0f} tokens an inner step and"
        f" {model.PAPER.fixed_seconds:.3g} s a round that no compression removes; the last row was not used"
    )
    console.print(fitted, style="dim", highlight=False, soft_wrap=True)
