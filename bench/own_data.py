"""Whether a contribution lowers the loss more on what it was trained on than elsewhere: what a rule against work on other data, and
against copies, could see.

Each round, with nobody hostile, each cluster's contribution is scored as a voter would, on as many samples, three times: on samples
that it was trained on in this round, on such samples of the next cluster (what a copy under that name would be judged by), and on
samples that nobody has read or been leased.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lab import Arrival, Lab, process_group_of_one
from dilocox.node.training.scores import make_candidate, measure
from dilocox.protocol.ledger import Lease
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.scoring import SAMPLES

__all__ = ["Difference", "differences", "samples_read", "summary"]


@dataclass(frozen=True)
class Difference:
    """Of gains, nats per token."""

    round: int
    own: float
    """On samples that it was trained on, less that elsewhere."""
    copied: float
    """The same on samples of who copied it."""


def differences(run: Manifest, clusters: int, arrival: int | Arrival, data: Path | None, seed: int) -> list[Difference]:
    process_group_of_one()
    lab = Lab(run, clusters, arrival, evaluate_every=run.rounds.count, data=data)
    random = torch.Generator().manual_seed(seed)
    found: list[Difference] = []
    while lab.head.round <= run.rounds.count:
        before = lab.head
        lab.round()
        read = [samples_read(before.ledger.leases[name], lab.head.ledger.leases[name]) for name in lab.counted]
        free = range(lab.head.ledger.cursor, lab.dataset.sequences)
        for number, sent in enumerate(lab.counted.values()):
            asked = pb.Score(round=before.round, payloads=sent.payloads, own=sent.payloads)
            samples = [_some(positions, SAMPLES, random) for positions in (read[number], read[(number + 1) % len(read)], free)]
            own, copied, elsewhere = (_gain(lab, number, asked, before.rank_or_k, positions) for positions in samples)
            found.append(Difference(before.round, own - elsewhere, copied - elsewhere))
    return found


def samples_read(before: Lease, after: Lease) -> Sequence[int]:
    """Positions that a commit counted of a lease."""
    return before.positions(before.counted, after.counted - before.counted) or []


def _some(positions: Sequence[int], count: int, random: torch.Generator) -> list[int]:
    return [positions[int(index)] for index in torch.randint(len(positions), (4 * count,), generator=random).unique()[:count]]


def _gain(lab: Lab, number: int, asked: pb.Score, rank_or_k: int, positions: Sequence[int]) -> float:
    trainer = lab.trainers[number]
    return measure(trainer, make_candidate(trainer, asked, rank_or_k, lab.payload), None, lab.dataset.batch(positions)).gain


def summary(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, its standard error, and the standard deviation of one measurement."""
    deviation = statistics.stdev(values)
    return statistics.fmean(values), deviation / math.sqrt(len(values)), deviation
