"""Advice of `dilocox plan` for a site: codec, H and overlap, and their measured cost on a small model. Arithmetic only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dilocox.node.planning.plan import recommend
from dilocox.node.planning.time_model import Estimate, Method, Overlap, Site, estimate
from dilocox.protocol.run.manifest import Compression, Manifest

__all__ = [
    "ALIKE",
    "GAPS",
    "HORIZONS",
    "Advice",
    "Gaps",
    "Measured",
    "Offer",
    "advise",
    "gaps_of",
    "is_measured",
    "lengthened",
    "offers_of",
    "settings_of",
    "superseded",
]


@dataclass(frozen=True)
class Measured:
    """Measured cost of hiding the exchange on a small model, in the best arm of a codec at so many bits, or in one that
    seeds cannot distinguish from it; and the settings of that arm."""

    gap: float
    """Final loss of the committed model above AllReduce's with Muon (momentum 0.95), as a fraction of that loss."""
    lead_weight: float
    muon_momentum: float
    outer_rate: float
    outer_momentum: float
    muon_learning_rate: float
    """The best of six draws: lead and outer rate go with it."""


@dataclass(frozen=True)
class Gaps:
    """Measurements of runs of one length."""

    steps: int
    """Inner steps of a cluster."""
    alone: float
    """The gap of one cluster that exchanges nothing."""
    by_codec: Mapping[str, Mapping[float, Measured]]
    """Then by bits for each parameter and inner step."""

    def gap(self, codec: str, bits: float) -> float:
        """Evenly in the logarithm of the bits; beyond what was measured as at its end. Infinite where nothing is known."""
        if codec not in self.by_codec:
            return math.inf
        known = [(at, measured.gap) for at, measured in sorted(self.by_codec[codec].items())]
        for (low, first), (high, second) in pairwise(known):
            if low <= bits <= high:
                share = math.log(bits / low) / math.log(high / low)
                return first + share * (second - first)
        return known[0][1] if bits < known[0][0] else known[-1][1]

    def nearest(self, codec: str, bits: float) -> Measured:
        """Return the measurement nearest to these bits, on a log scale."""
        of_codec = self.by_codec[codec]
        return of_codec[min(of_codec, key=lambda at: abs(math.log(at / bits)))]


GAPS = (
    Gaps(
        1200,
        0.152,
        {
            "int2": {
                0.016: Measured(0.112, 1.0, 0.9, 1.03, 0.4, 0.020),
                0.04: Measured(0.076, 1.0, 0.9, 1.03, 0.4, 0.020),
                0.1: Measured(0.058, 1.0, 0.9, 1.03, 0.4, 0.020),
                0.2: Measured(0.043, 1.0, 0.9, 1.03, 0.4, 0.020),
            },
            "topk-int2": {
                0.016: Measured(0.162, 0.5, 0.95, 0.73, 0.0, 0.033),
                0.04: Measured(0.086, 0.5, 0.95, 0.73, 0.0, 0.033),
                0.1: Measured(0.041, 0.5, 0.95, 0.73, 0.0, 0.033),
                0.2: Measured(0.027, 0.5, 0.95, 0.73, 0.0, 0.033),
            },
        },
    ),
    Gaps(
        3000,
        0.098,
        {
            "int2": {
                0.016: Measured(0.052, 1.0, 0.95, 1.06, 0.4, 0.008),
                0.04: Measured(0.037, 1.0, 0.95, 1.06, 0.4, 0.008),
                0.2: Measured(0.025, 1.0, 0.95, 1.06, 0.4, 0.008),
            },
            "topk-int2": {
                0.016: Measured(0.083, 0.5, 0.95, 0.50, 0.4, 0.020),
                0.04: Measured(0.040, 1.0, 0.95, 1.06, 0.4, 0.008),
                0.2: Measured(0.022, 0.5, 0.95, 0.73, 0.0, 0.033),
            },
        },
    ),
)
"""Best rebasing arm in `python -m bench.study`, on a model of 0.23M parameters and 4 clusters, with Muon inside and
Huffman coding, relative to AllReduce with momentum 0.95. A run is compared with the nearest length on a log scale.
topk-int2 has k = 540 of 4,096, and k = 230 at 0.016 bit and 3,000 steps; other k are assumed to cost as much at the
same bits. For int2 at 0.2 bit and 1,200 steps it is the second best: half the local mix ended 0.7% lower with every
seed, but the whole did so in runs of 600 steps. Bits are a cell's limit, of which 64 to 98% were sent. The table ranks
codecs and shows the sign of the effect, no more."""
ALIKE = 0.005
"""Gaps that differ by no more say nothing: seeds make a difference of twice as much. Longer rounds cost the machines less."""
HORIZONS = tuple(sorted({round(5 * 1.25**power) for power in range(25)}))
"""Candidates for H, 5 to 1,059."""
LEAST_STEPS, LEAST_SECONDS = 10, 30.0
"""Smallest H, and shortest round in seconds, of a candidate: the time model omits some work of a round (votes, scores,
disk writes)."""
SPARSE_SHARES = (64, 256, 512)
"""Values kept of every 4,096 in the comparison of top-k."""
LEAST_ROUNDS = 10
"""Least number of rounds: in short runs H is no larger."""


@dataclass(frozen=True)
class Offer:
    """A codec that there is to choose from."""

    compression: Compression
    method: Method
    """Method, for any H."""


@dataclass(frozen=True)
class Advice:
    """Advice for a site, with the alternatives."""

    estimate: Estimate
    compression: Compression
    overlap: Overlap
    hides: bool
    """Whether commits are there before the next phase ends."""
    bits: float
    """Bits per parameter and inner step."""
    gaps: Gaps
    """Measurements behind the gap."""
    binds: str
    """A sentence: what would have to be better for shorter rounds, or faster steps."""

    @property
    def gap(self) -> float:
        """Return the gap of Muon with rebase."""
        return self.gaps.gap(self.compression.codec, self.bits)

    @property
    def below_measured(self) -> bool:
        """Whether it sends less than was measured: then it costs more than `gap`."""
        return self.bits < min(self.gaps.by_codec[self.compression.codec])


def offers_of(manifest: Manifest, taking: Callable[[str, Compression], Method]) -> list[Offer]:
    """Return every codec that the run may take, each with `taking` as its method. Adapters are of low rank already."""
    rank = manifest.compression.rank or max(1, manifest.model.config.hidden_size // 8)
    shares = sorted({*SPARSE_SHARES, manifest.compression.k or SPARSE_SHARES[0]})
    codecs = {
        "fp32": Compression(codec="fp32"),
        f"lowrank-int4 {rank}": Compression(codec="lowrank-int4", rank=rank),
        "int4": Compression(codec="int4", entropy_coding=True),
        # Coded it is 4% smaller, for a third more time to encode and two thirds more to apply.
        "int2": Compression(codec="int2"),
        **{f"topk-int2 {k}": Compression(codec="topk-int2", k=k, entropy_coding=True) for k in shares},
    }
    found = []
    for name, compression in codecs.items():
        if manifest.model.lora is not None and compression.codec == "lowrank-int4":
            continue
        found.append(Offer(compression, taking(name, compression)))
    return found


def lengthened(method: Method, inner_steps: int, manifest: Manifest) -> Method:
    """Return the method with another H, and the run's number of phases until a late commit is waited for."""
    rounds = manifest.rounds
    most = max(inner_steps, inner_steps * rounds.max_inner_steps // rounds.inner_steps)
    return replace(method, inner_steps=inner_steps, max_inner_steps=most)


def advise(site: Site, offers: Sequence[Offer], manifest: Manifest) -> Advice:
    """Return the codec with the least loss by GAPS, among those whose exchange some rounds hide, each in its shortest such
    rounds; among nearly equal ones, the one with the longest rounds. If no round hides the exchange, return the one
    that trains most tokens. Codecs outside GAPS are skipped, but a run on such a codec stays on it if it is offered."""
    known = [offer for offer in offers if offer.compression.codec in gaps_of(manifest.training.total_steps).by_codec]
    own = [] if _is_of_gaps(manifest) else [offer for offer in offers if _is_same(offer.compression, manifest.compression)]
    found = [_shortest(site, offer, manifest) for offer in own or known]
    hidden = [each for each in found if each.hides]
    if not hidden:
        return max(found, key=lambda each: each.estimate.tokens_per_second)
    least = min(each.gap for each in hidden)
    return max((each for each in hidden if each.gap <= least + ALIKE), key=lambda each: each.estimate.round.steps)


def _is_same(one: Compression, other: Compression) -> bool:
    return (one.codec, one.k) == (other.codec, other.k)


def _shortest(site: Site, offer: Offer, manifest: Manifest) -> Advice:
    looked_at = _looked_at(site, manifest.training.total_steps // LEAST_ROUNDS)
    tried = [estimate(site, replace(lengthened(offer.method, h, manifest), overlap="rebase")) for h in looked_at]
    chosen = next(filter(_hides, tried), tried[-1])
    overlap = recommend(site, chosen.method)
    bits = 8 * offer.method.payload_bytes / site.parameters / chosen.round.steps
    return Advice(
        estimate(site, replace(chosen.method, overlap=overlap)),
        offer.compression,
        overlap,
        _hides(chosen),
        bits,
        gaps_of(manifest.training.total_steps),
        _binds(site, chosen, looked_at[0]),
    )


def _looked_at(site: Site, longest: int) -> Sequence[int]:
    long_enough = (h for h in HORIZONS if h >= LEAST_STEPS or h * site.step.seconds >= LEAST_SECONDS)
    return [h for h in long_enough if h <= longest] or [max(1, longest)]


def _hides(found: Estimate) -> bool:
    return found.arrival_step <= found.method.inner_steps


def gaps_of(steps: int) -> Gaps:
    """Return the measurements of runs of about this length."""
    return min(GAPS, key=lambda gaps: abs(math.log(gaps.steps / steps)))


def is_measured(advice: Advice, manifest: Manifest) -> bool:
    """Whether GAPS are about such a run with such an overlap."""
    return _is_of_gaps(manifest) and advice.overlap == "rebase"


def _is_of_gaps(manifest: Manifest) -> bool:
    """Whether GAPS rank its codecs: of Muon, from random weights, on a text that all share."""
    begins = manifest.model.initial is None and manifest.model.lora is None and not manifest.data.private
    return begins and manifest.training.optimizer == "muon"


def settings_of(advice: Advice, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the run file's settings for the advice, by section: [compression] whole, of others these keys. The length of
    the run stays. Local mix, momenta and rates are those of the nearest measurement, if there is one."""
    method, rounds = advice.estimate.method, advice.estimate.round
    told: dict[str, dict[str, Any]] = {
        "compression": advice.compression.model_dump(exclude_unset=True),
        "rounds": {
            "count": max(1, round(manifest.training.total_steps / rounds.steps)),
            "inner_steps": method.inner_steps,
            "max_inner_steps": method.max_inner_steps,
            "overlap": advice.overlap,
        },
    }
    if is_measured(advice, manifest):
        found = advice.gaps.nearest(advice.compression.codec, advice.bits)
        told["rounds"]["lead_weight"] = found.lead_weight
        told["outer"] = {"learning_rate": found.outer_rate, "momentum": found.outer_momentum}
        told["training"] = {"muon_momentum": found.muon_momentum, "muon_learning_rate": found.muon_learning_rate}
    return told


def superseded(manifest: Manifest) -> list[str]:
    """Keys of [rounds] that would make another H of it, where the run file has them."""
    return ["round_seconds"] if manifest.rounds.round_seconds is not None else []


def _binds(site: Site, chosen: Estimate, least: int) -> str:
    if site.step.activations > site.step.working:
        between = "the line between a cluster's boxes: passing activations on takes longer than computing"
        return f"its steps are this long because of {between}"
    if chosen.arrival_step < chosen.method.inner_steps == least:  # else one step fewer would not hide it
        return f"nothing shorter than {least} steps is looked at"
    method, all_of_it = chosen.method, chosen.exchange_seconds
    parts = {
        "the line to the other clusters": chosen.line_seconds,
        "the codec": method.encode_seconds + site.clusters * method.apply_seconds,
        "what a round costs whatever its bytes": site.fixed_seconds,
    }
    most = max(parts, key=lambda part: parts[part])
    why = f"{most}: {parts[most]:,.3g} of the exchange's {all_of_it:,.3g} s"
    return f"its rounds are this long because of {why}"
