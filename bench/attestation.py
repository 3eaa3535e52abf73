"""Verification time of each kind, and mutated evidence: none may be accepted, none may raise anything but the typed error.

Evidence comes from the synthetic vendors of the tests, so it is there on every machine and covers every branch. A mutation flips
one bit of what is signed, of its signature or of its key, or cuts the blob short.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.report import bench_parser, judge, table, write
from dilocox.node.attest import simulated
from dilocox.protocol.wire.attestation import AttestationError, Evidence
from dilocox_tee import nvidia, snp, tdx
from plugins.tee.tests.vendors import NOW, Amd, Gpu, Intel

__all__ = ["main"]

MUTATIONS, QUICK_MUTATIONS = 100_000, 2_000
TIMED = 30
CUT_SHARE = 0.05
"""Share of the mutations that cut the blob instead."""
TDX_SIGNED = 48 + 584 + 4 + 64 + 64
"""Header, body, length, signature and attestation key. After them follows a certificate chain in PEM, in which no
signature covers the whitespace."""
LIMITS_MS = {"tdx": 5.0, "sev-snp": 10.0}


@dataclass(frozen=True)
class Kind:
    evidence: Evidence
    mutable: int
    """Bytes from the start of the blob."""
    verify: Callable[[Evidence], object]


def kinds() -> dict[str, Kind]:
    amd, gpu, intel = Amd(), Gpu(), Intel()
    amd_roots, gpu_root, intel_root = amd.roots, gpu.root, intel.root_der
    made = {
        "tdx": (intel.evidence(), TDX_SIGNED, lambda e: tdx.verify(e, NOW, root=intel_root)),
        "sev-snp": (amd.evidence(), None, lambda e: snp.verify(e, NOW, roots=amd_roots)),
        "nvidia": (gpu.evidence(), None, lambda e: nvidia.verify(e, NOW, None, gpu_root)),
        "simulated": (simulated.make(bytes(64), bytes(48)), None, lambda e: simulated.verify(e, NOW)),
    }
    return {name: Kind(e, size or len(e.blob), verify) for name, (e, size, verify) in made.items()}


def median_ms(kind: Kind) -> float:
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        kind.verify(kind.evidence)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def mutate(kind: Kind, draw: random.Random) -> Evidence:
    blob = bytearray(kind.evidence.blob)
    if draw.random() < CUT_SHARE:
        return replace(kind.evidence, blob=bytes(blob[: draw.randrange(kind.mutable)]))
    blob[draw.randrange(kind.mutable)] ^= 1 << draw.randrange(8)
    return replace(kind.evidence, blob=bytes(blob))


def attack(kind: Kind, count: int, seed: int) -> tuple[int, int]:
    """Attack with `count` mutations; return the number accepted, and of unexpected exceptions."""
    draw, accepted, escaped = random.Random(seed), 0, 0
    for _ in range(count):
        try:
            kind.verify(mutate(kind, draw))
            accepted += 1
        except AttestationError:
            pass
        except Exception:
            escaped += 1
    return accepted, escaped


def missed(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the missed bars, as sentences."""
    return [
        *(f"{r['kind']}: {r['accepted']} mutations were accepted" for r in results if r["accepted"]),
        *(f"{r['kind']}: {r['untyped_errors']} mutations ended in another error" for r in results if r["untyped_errors"]),
        *(
            f"{r['kind']}: {r['milliseconds']:.2f} ms to verify; at most {r['limit']:g}"
            for r in results
            if r["limit"] and r["milliseconds"] > r["limit"]
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser("bench.attestation", __doc__, f"{QUICK_MUTATIONS:,} mutations")
    parser.add_argument("--mutations", type=int, default=MUTATIONS)
    options = parser.parse_args(arguments)
    count = QUICK_MUTATIONS if options.quick else options.mutations
    results: list[dict[str, Any]] = []
    found = kinds()
    for name, kind in found.items():
        accepted, escaped = attack(kind, count // len(found), seed=len(name))
        results.append(
            {
                "kind": name,
                "milliseconds": median_ms(kind),
                "limit": LIMITS_MS.get(name),
                "mutations": count // len(found),
                "accepted": accepted,
                "untyped_errors": escaped,
            }
        )
    columns = ["kind", "verify ms", "limit ms", "mutations", "accepted", "untyped errors"]
    rows = [
        [
            str(r["kind"]),
            f"{r['milliseconds']:.2f}",
            f"{r['limit']:g}" if r["limit"] else "–",
            f"{r['mutations']:,}",
            str(r["accepted"]),
            str(r["untyped_errors"]),
        ]
        for r in results
    ]
    table(columns, rows)
    write("attestation", results, options.quick)
    judge(missed(results), options.check)


if __name__ == "__main__":
    main()
