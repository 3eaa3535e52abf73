"""`python -m bench.privacy [--check] [--quick]`: cost of a bound on the leaks of private data, in loss and in seconds a
step.

A toy learns the text of Python's standard library. Then sites train it further on private text, a third of Python's
reference manual in English each. They train without a bound, with each sequence's gradient clipped (`--private-clip`),
and with the noise for `--private-epsilon`. Accounting and gradients are the node's own. The loss is measured on
paragraphs that no site trains on. --check exits with 1 if clipping alone costs much, a small epsilon costs less than a
large one, or more sites do not help.
"""

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
from torch import Tensor

from bench.lab import Lab, process_group_of_one
from bench.report import bench_parser, judge, load_preset, machine, table, write
from bench.sections import merge, model_section
from bench.texts import Text
from dilocox.cli.run.init import averaging, render_preset
from dilocox.node.data.build import build
from dilocox.node.data.finding import STDLIB, find_files
from dilocox.node.data.privacy_budget import Account, Budget
from dilocox.node.data.tokenizers import open_encoder
from dilocox.node.training.model.data import load_dataset, load_private
from dilocox.node.training.model.dp_gradients import Drawn, Noise
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Trainer
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.corpus import BYTES
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.model import Lora
from dilocox.protocol.run.tensors import trained_count
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore

__all__ = ["main"]

Trained = Literal["all weights", "adapters"]
Bound = float | Literal["none", "cut"]
"""An epsilon; or gradients as they are, or cut and without noise."""

EPSILONS = (8.0, 3.0, 1.0)
BOUNDS: tuple[Bound, ...] = ("none", "cut", *EPSILONS)
SITES = 3
CLIP, RANK, BATCH = 1.0, 4, 32
HELD_OUT_EVERY = 8
HORIZON, ARRIVAL = 10, 2
"""Inner steps of a round, and that of the next phase at which a commit arrives."""
RATES: Mapping[Trained, Mapping[bool, float]] = {
    "all weights": {False: 3e-3, True: 2e-3},
    "adapters": {False: 3e-2, True: 5e-3},
}
"""Rates of AdamW, without noise and with it: the best of four, with one seed, for one site and an epsilon of 3."""
DEAR = 0.1
"""Nats that cutting alone may cost."""
STEPS_TIMED = 5
EPSILON, STEPS = 8.0, 1_000
"""Epsilon and steps of the sizes that are computed and not trained."""
SEQUENCES = (2_000, 20_000, 200_000, 2_000_000)
BATCHES = (32, 256, 2048)


@dataclass(frozen=True)
class Length:
    base_steps: int
    steps: int
    seeds: int


FULL, QUICK = Length(300, 50, 3), Length(100, 20, 1)


@dataclass(frozen=True)
class Place:
    """Texts, and what a run begins with."""

    shared: Text
    """Text for the loss."""
    sites: Sequence[Text]
    base: Path
    initial: str
    frozen: str
    """Roots in `base`: of the state with the toy's weights, and of these alone."""


@dataclass(frozen=True)
class Cell:
    """One training run."""

    trained: Trained
    sites: int
    bound: Bound
    steps: int
    seed: int


def settings(steps: int, seed: int, shared: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the toy's settings: byte-level, one stage, sequences of 64; the rest as `dilocox init --private` writes it."""
    preset = Manifest.from_toml(averaging(render_preset("tiny", "tiny", "00" * 32)))
    merged = {name: dict(section) for name, section in preset.model_dump(exclude_none=True).items()}
    toy: Mapping[str, Mapping[str, Any]] = {
        "model": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 2,
            "sequence_length": 64,
            "stages": 1,
            "seed": seed,
        },
        "data": {**shared, "private": True, "seed": seed, "evaluation_sequences": 256},
        "training": {
            "optimizer": "adamw",
            "batch_size": BATCH,
            "microbatches": 1,
            "total_steps": steps,
            "warmup_steps": 5,
            "learning_rate": 3e-3,
        },
        "rounds": {
            "count": steps // HORIZON,
            "inner_steps": HORIZON,
            "max_inner_steps": 4 * HORIZON,
            "synchronous_rounds": 0,
            "min_clusters": 1,
            "start_clusters": 1,
        },
    }
    merge(merged, toy)
    merged["compression"] = {"codec": "int4"}
    return merged


def manifest(place: Place, cell: Cell) -> Manifest:
    merged = settings(cell.steps, cell.seed, place.shared.settings)
    merged["training"]["learning_rate"] = RATES[cell.trained][isinstance(cell.bound, float)]
    if cell.trained == "adapters":
        merged["model"]["lora"] = {"rank": RANK, "alpha": 2.0 * RANK, "base": place.frozen}
    else:
        merged["model"]["initial"] = place.initial
    return Manifest.model_validate(merged)


class Sites(Lab):
    """Clusters that each train on private text."""

    def __init__(self, run: Manifest, place: Place, sites: int, noise: Noise | None) -> None:
        self._base, self._noise, self._sites = BlobStore(place.base), noise, place.sites[:sites]
        super().__init__(run, sites, ARRIVAL, evaluate_every=run.rounds.count, data=place.shared.folder)
        texts = [load_private(run, text.folder, bytes.fromhex(text.digest), name) for text, name in self._own()]
        self._texts = [text if noise is None else Drawn(text) for text in texts]

    def _own(self) -> Iterator[tuple[Text, str]]:
        return zip(self._sites, (member.state.cluster for member in self.members), strict=True)

    def beginner(self) -> Trainer:
        trainer = Trainer(self.run, Mesh(device=self.device), self._noise)
        trainer.load_frozen(self._base)
        trainer.load_initial(self._base if self.run.model.imported_state else None)
        return trainer

    def batch(self, index: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._texts[index].batch(positions)


def noise_for(epsilon: float, sequences: int, batch: int, steps: int) -> float:
    """Return the noise over the clip, by a new account; infinite if no noise is enough."""
    with tempfile.TemporaryDirectory(prefix="dx-") as scratch:
        budget = Budget(epsilon, None, CLIP)
        account = Account(Path(scratch) / "privacy.json", bytes(32), bytes(32), sequences, batch, budget)
        try:
            account.lay_out(steps, HORIZON)
        except ConfigError:
            return math.inf
        return account.noise


def result(place: Place, cell: Cell, noise: Noise | None) -> tuple[float, float]:
    """Return held-out losses in nats per byte: of the initial model, and of the sites' result."""
    process_group_of_one()
    lab = Sites(manifest(place, cell), place, cell.sites, noise)
    before = lab.trainers[0].evaluate_committed(lab.dataset)
    return before, lab.rounds().losses[-1]


# Texts, and what a run begins with


def corpus(folder: Path, documents: Iterable[str]) -> Text:
    """Build a corpus of the documents, by bytes."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    digest, _ = build(folder, [source], open_encoder(BYTES), held_out_every=HELD_OUT_EVERY)
    return Text(folder.name, folder, digest.hex())


def prepare(folder: Path, steps: int) -> Place:
    paragraphs = [part for topic in sorted(topics) for part in topics[topic].split("\n\n") if part.strip()]
    shared = corpus(folder / "shared", paragraphs)
    sites = [corpus(folder / f"site-{number}", paragraphs[number::SITES]) for number in range(SITES)]
    files = [path for path in find_files([STDLIB]) if "pydoc_data" not in path.parts]
    digest, _ = build(folder / "public", files, open_encoder(BYTES), held_out_every=HELD_OUT_EVERY)
    return Place(
        shared, sites, folder / "base", *learn(Text("public", folder / "public", digest.hex()), steps, folder / "base")
    )


def learn(text: Text, steps: int, base: Path) -> tuple[str, str]:
    """Train the toy for `steps`, and store its weights in `base`; return roots of the state with them, and of them alone."""
    process_group_of_one()
    merged = settings(steps, 0, text.settings)
    merged["data"]["private"] = False
    run, store = Manifest.model_validate(merged), BlobStore(base)
    trainer, dataset = Trainer(run), load_dataset(run, text.folder)
    trainer.load_initial()
    for step in range(steps):
        trainer.step(*dataset.batch(range(step * BATCH, (step + 1) * BATCH)))
    [(_, stage)] = trainer.live_stages()
    weights = torch.cat([tensor.flatten() for tensor in trainer.live(stage)]).numpy().tobytes()
    roots = [
        store.put([canonical(pb.StageStates(digests=[store.put(blob)]))])
        for blob in ([weights, bytes(len(weights))], [weights])
    ]
    return roots[0].hex(), roots[1].hex()


# Seconds


def seconds_per_step(run: Manifest, base: BlobStore | None, noise: Noise | None) -> float:
    """Return the fastest of a few steps, on one thread."""
    process_group_of_one()
    trainer = Trainer(run, Mesh(), noise)
    if base is not None:
        trainer.load_frozen(base)
    trainer.load_initial(base if run.model.imported_state else None)
    tokens = torch.randint(0, 256, (run.training.batch_size, run.model.sequence_length), generator=torch.Generator())
    taken = []
    for _ in range(STEPS_TIMED):
        before = time.perf_counter()
        trainer.step(tokens, tokens)
        taken.append(time.perf_counter() - before)
    return min(taken)


def timed(place: Place, quick: bool) -> list[dict[str, Any]]:
    runs: dict[str, tuple[Manifest, BlobStore | None]] = {
        f"toy, {trained}": (manifest(place, Cell(trained, 1, "none", 2 * HORIZON, 0)), BlobStore(place.base))
        for trained in RATES
    }
    if not quick:
        merged = load_preset("llama-10m").model_dump()
        merged["model"] = model_section({"stages": 1, "sequence_length": 256}, merged["model"])
        runs["llama-10m, all weights, sequences of 256"] = Manifest.model_validate(merged), None
    return [
        {
            "model": name,
            "trained": trained_count(run.model),
            "batch": run.training.batch_size,
            "ordinary": seconds_per_step(run, base, None),
            "bounded": seconds_per_step(run, base, Noise(CLIP, 1.0)),
        }
        for name, (run, base) in runs.items()
    ]


# Sizes


def sizes() -> list[dict[str, Any]]:
    """Return the noise for an epsilon of 8, by corpus and batch, and its norm over that of a clipped gradient."""
    model = load_preset("llama-125m").model
    adapters = model.model_copy(update={"lora": Lora(rank=8, alpha=16.0, base="00" * 32)})
    counted = {"adapters of rank 8": trained_count(adapters), "all weights": trained_count(model)}
    rows = []
    for sequences, batch in product(SEQUENCES, BATCHES):
        if batch < sequences:
            noise = noise_for(EPSILON, sequences, batch, STEPS)
            said = {name: noise * math.sqrt(count) / batch for name, count in counted.items()}
            rows.append({"sequences": sequences, "batch": batch, "noise": noise, **said})
    return rows


# Report


def missed(losses: Mapping[tuple[Trained, int, Bound], float]) -> list[str]:
    """Return the missed bars, as sentences."""
    found = []
    for trained, sites in product(RATES, (1, SITES)):
        by = {bound: losses[trained, sites, bound] for bound in BOUNDS}
        where = f"{trained}, {sites} sites"
        if by["cut"] - by["none"] > DEAR:
            found.append(f"{where}: cutting alone costs {by['cut'] - by['none']:.3f} nats, more than {DEAR:g}")
        if by[1.0] < by[8.0]:
            found.append(f"{where}: an epsilon of 1 costs less than one of 8")
    if losses["adapters", SITES, 8.0] > losses["adapters", 1, 8.0]:
        found.append(f"{SITES} sites with an epsilon of 8 learn less than one")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = bench_parser("bench.privacy", __doc__, "one seed, fewer steps").parse_args(arguments)
    length = QUICK if options.quick else FULL
    workers = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory(prefix="bench-privacy-") as scratch, workers as pool:
        place = prepare(Path(scratch), length.base_steps)
        first = manifest(place, Cell("adapters", 1, "none", length.steps, 0))
        sequences = min(load_private(first, text.folder, bytes.fromhex(text.digest), "").sequences for text in place.sites)
        noises = {epsilon: noise_for(epsilon, sequences, BATCH, length.steps) for epsilon in EPSILONS}
        bounds: dict[Bound, Noise | None] = {
            "none": None,
            "cut": Noise(CLIP, 0.0),
            **{e: Noise(CLIP, noise) for e, noise in noises.items()},
        }
        cells = [Cell(*each, length.steps, seed) for each in product(RATES, (1, SITES), BOUNDS) for seed in range(length.seeds)]
        working = [pool.submit(result, place, cell, bounds[cell.bound]) for cell in cells]
        found = [each.result() for each in working]
        seconds = timed(place, options.quick)
        counts = {trained: trained_count(manifest(place, Cell(trained, 1, "none", length.steps, 0)).model) for trained in RATES}
    losses: dict[tuple[Trained, int, Bound], list[float]] = {}
    for cell, (_, loss) in zip(cells, found, strict=True):
        losses.setdefault((cell.trained, cell.sites, cell.bound), []).append(loss)
    before = found[0][0]
    facts = machine()
    print(
        f"{facts['cores']} cores, {facts['platform']}, torch {facts['torch']}; {sequences:,} sequences of 64 bytes a site,"
        f" batches of {BATCH}, {length.steps} steps, clip {CLIP:g}, delta {1 / (10 * sequences):.2g}, seeds: {length.seeds}"
    )
    print(f"held-out loss, nats per byte, and how much of what is learnt without a bound; before training: {before:.3f}")
    rows = [_row(losses, counts, before, trained, sites) for trained, sites in product(RATES, (1, SITES))]
    table(["trained", "parameters", "sites", *map(_name, BOUNDS)], rows)
    print("\nnoise in a step's mean gradient, over the most that one sequence's can be in it unaveraged")
    table(
        ["trained", *(f"epsilon {epsilon:g} (noise {noises[epsilon]:.2f})" for epsilon in EPSILONS)],
        [[name, *(f"{noises[e] * math.sqrt(count) / BATCH:.1f}" for e in EPSILONS)] for name, count in counts.items()],
    )
    print("\nseconds of a step on one thread")
    table(
        ["model", "parameters trained", "batch", "ordinary", "bounded", "times"],
        [
            [
                row["model"],
                f"{row['trained']:,}",
                str(row["batch"]),
                *(f"{row[kind]:.3f}" for kind in ("ordinary", "bounded")),
                f"{row['bounded'] / row['ordinary']:.1f}",
            ]
            for row in seconds
        ],
    )
    large = [] if options.quick else sizes()
    if large:
        print(f"\nthe same ratio for llama-125m, epsilon {EPSILON:g}, {STEPS:,} steps, one site")
        columns = ["sequences", "batch", "noise", *list(large[0])[3:]]
        table(columns, [[f"{row['sequences']:,}", *(f"{row[name]:,.4g}" for name in columns[1:])] for row in large])
    kept = [{"trained": t, "sites": s, "bound": b, "losses": values} for (t, s, b), values in losses.items()]
    write(
        "privacy",
        {"before": before, "sequences": sequences, "noises": noises, "cells": kept, "seconds": seconds, "sizes": large},
        options.quick,
    )
    judge(missed({key: statistics.fmean(values) for key, values in losses.items()}), options.check)


def _name(bound: Bound) -> str:
    return {"none": "no bound", "cut": "cut, no noise"}[bound] if isinstance(bound, str) else f"epsilon {bound:g}"


def _row(
    losses: Mapping[tuple[Trained, int, Bound], Sequence[float]],
    counts: Mapping[Trained, int],
    before: float,
    trained: Trained,
    sites: int,
) -> list[str]:
    means = {bound: statistics.fmean(losses[trained, sites, bound]) for bound in BOUNDS}
    learnt = before - means["none"]
    cells = [f"{loss:.3f} ({100 * (before - loss) / learnt:.0f}%)" for loss in means.values()]
    return [trained, f"{counts[trained]:,}", str(sites), *cells]


if __name__ == "__main__":
    main()
