"""Rates of making erasure shards and of restoring a blob, their share of a round by preset, and how often probes miss a
withholder.

A voter makes the shards of each payload to compute the root over them. A peer whose blob counts makes them again and
stores its own. A peer that restores reads as many as needed, here the later ones, so that all work is done. Each reads
its input from a disk and hashes it, as a daemon does. The bar is 30 MB/s each, the most that a rented host's link of
240 Mbit/s brings. Probes are drawn for blobs with one shard too few: they all succeed no more often than predicted
(plugin dilocox-availability).
"""

import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import bench_parser, judge, load_preset, table, write
from dilocox.cli.run.init import preset_names
from dilocox.node.planning.time_model import model_payload_bytes
from dilocox.protocol import limits
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox_availability import erasure, shards
from dilocox_availability.shards import Code
from dilocox_availability.store import code_root, make_share

BAR = 30.0
"""MB/s."""
CODES = (Code(4, 2), Code(8, 4), Code(32, 16), Code(32, 28))
CHUNKS, QUICK_CHUNKS = 32, 8
"""Chunks of 4 MiB in the measured blob."""
SAMPLES, DRAWS, QUICK_DRAWS = 16, 10_000, 1_000
SIGMAS = 5.0
"""Largest distance of the counted draws from the prediction."""


def main() -> None:
    parser = bench_parser("bench.shares", __doc__, f"a blob of {QUICK_CHUNKS} chunks, {QUICK_DRAWS:,} draws")
    options = parser.parse_args()
    chunks, draws = (QUICK_CHUNKS, QUICK_DRAWS) if options.quick else (CHUNKS, DRAWS)
    with tempfile.TemporaryDirectory(prefix="bench-shares-") as scratch:
        speeds = {str(tuple(code)): _measured(Path(scratch), code, chunks) for code in CODES}
    print(f"a blob of {chunks * limits.CHUNK_BYTES / 1e6:.0f} MB, {os.cpu_count()} cores; MB of it in a second")
    table(
        ["shares", "restore", "checked", "made", "put together"],
        [[*(str(n) for n in code), *(f"{speed:,.0f}" for speed in speeds[str(tuple(code))].values())] for code in CODES],
    )
    slowest = {way: min(each[way] for each in speeds.values()) for way in ("check", "make", "restore")}
    presets = {name: _round(load_preset(name), slowest) for name in preset_names()}
    print("\nof a round that counts as many as begin a run, with the slowest code: CPU of a node beside its training")
    rows = [[name, f"{megabytes:,.1f}", f"{cpu:,.2f}", f"{100 * cpu:,.0f}"] for name, (megabytes, cpu) in presets.items()]
    table(["preset", "MB of payloads", "CPU s", "s of a round of which that is 1% of a core"], rows)
    found = {str(tuple(code)): _samples(code, draws) for code in CODES}
    print(f"\n{draws:,} times {SAMPLES} samples of blobs of which one share too few exists: nobody notices")
    table(
        ["shares", "restore", "of the draws", "said"],
        [[*(str(n) for n in code), *(f"{each:.2g}" for each in found[str(tuple(code))])] for code in CODES],
    )
    write(
        "shares",
        {
            "bytes": chunks * limits.CHUNK_BYTES,
            "megabytes_per_second": speeds,
            "cpu_seconds": {name: cpu for name, (_, cpu) in presets.items()},
            "draws": draws,
            "unnoticed": {code: {"found": counted, "said": said} for code, (counted, said) in found.items()},
        },
        options.quick,
    )
    judge([*_too_slow(speeds), *_surprising(found, draws)], options.check)


def _too_slow(speeds: dict[str, dict[str, float]]) -> list[str]:
    slow = [(code, way, each[way]) for code, each in speeds.items() for way in each if each[way] < BAR]
    return [f"shares {code}: {way} {speed:.0f} MB/s, less than {BAR:g}" for code, way, speed in slow]


def _surprising(found: dict[str, tuple[float, float]], draws: int) -> list[str]:
    off = {code: abs(counted - said) - 1 / draws for code, (counted, said) in found.items()}
    far = {code: SIGMAS * math.sqrt(said * (1 - said) / draws) for code, (_, said) in found.items()}
    return [
        f"shares {code}: unnoticed {found[code][0]:.2%}, said {found[code][1]:.2%}" for code in found if off[code] > far[code]
    ]


def _measured(folder: Path, code: Code, chunks: int) -> dict[str, float]:
    """Return the MB of a blob in a second."""
    store, kept = BlobStore(folder / "blobs"), BlobStore(folder / "shares")
    blob = store.put(os.urandom(limits.CHUNK_BYTES) for _ in range(chunks))
    size = store.size(blob)
    last = range(code.shares - code.needed, code.shares)
    held = {index: make_share(store, blob, code, index, kept).digest for index in last}

    def restore() -> None:
        files = {index: kept.path(digest).open("rb") for index, digest in held.items()}
        try:
            assert digest_of(erasure.restored(size, code, files)) == blob
        finally:
            for file in files.values():
                file.close()

    ways: dict[str, Callable[[], object]] = {
        "check": lambda: code_root(store, blob, code),
        "make": lambda: make_share(store, blob, code, 0, kept),
        "restore": restore,
    }
    return {way: size / 1e6 / _seconds(work) for way, work in ways.items()}


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _round(manifest: Manifest, speeds: dict[str, float]) -> tuple[float, float]:
    """Return the MB of payloads in a round with as many clusters as begin a run, and the core seconds in which a node
    codes them."""
    megabytes = manifest.rounds.start_clusters * model_payload_bytes(manifest.model, manifest.compression) / 1e6
    return megabytes, megabytes / speeds["check"] + megabytes / speeds["make"]


def _samples(code: Code, draws: int) -> tuple[float, float]:
    """Return how often all probes succeeded with one shard too few, and the prediction."""
    dice, there = random.Random(0), code.needed - 1
    unnoticed = sum(all(dice.randrange(code.shares) < there for _ in range(SAMPLES)) for _ in range(draws))
    return unnoticed / draws, shards.chance(code, SAMPLES, 0)


if __name__ == "__main__":
    main()
