"""Weights of counted clusters, and clips of payloads and tensors. Integers from announced values, so every peer computes
the same. The commit contains weights and clips of payloads; a peer that applies it computes clips of tensors from the
counted payload indexes.

    weight          tokens, at most as many lower medians of the counted ones' tokens as the cap says, times the author's share of
                    what there is to earn; the cap rises from rounds.weight_cap to EARNED_CAP by rounds in which a
                    committee measured what its work does: nothing else bears out how much it says it trained
    clip in total   norm codes above clip_ratio medians of the counted ones' norms
    clip of tensor  norm codes above tensor_clip_ratio medians of the counted ones' norms of that tensor, or the clip in total
                    where that is larger

Medians are weighted by reputation (reputation.py). A cluster that sends nothing has no influence on a median: otherwise
half of the roster could stop all progress with zeros. If more than half send nothing of a tensor, the average size of
the median payload, weight by weight, replaces the median: a tensor that most clusters skip gives no freedom to the
others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from dilocox.protocol import norms
from dilocox.protocol.consensus.reputation import Record, by_standing, newcomer
from dilocox.protocol.run.manifest import Manifest, Model
from dilocox.protocol.run.tensors import stage_tensors

__all__ = ["Announced", "clip", "cut", "median_norm", "tensor_clips", "weights"]

EARNED_CAP = 4.0
"""Lower medians of tokens up to which a cluster weighs that has earned all: one of four times the usual speed counts in full."""


def weights(manifest: Manifest, tokens: Mapping[str, int], standings: Mapping[str, Record]) -> dict[str, int]:
    """Return each cluster's weight in the mean. The part above a cap does not return to error feedback: the whole payload is
    applied."""
    says = by_standing(manifest, standings, tokens)
    middle, most = norms.lower_median(list(tokens.values()), list(says.values())), max(1, manifest.standing.rounds)
    caps = {name: _cap(manifest, standings.get(name) or newcomer(manifest)) for name in tokens}
    capped = {name: min(count, int(caps[name] * middle)) if caps[name] else count for name, count in tokens.items()}
    return {name: max(1, count * says[name] // most) for name, count in capped.items()}


def _cap(manifest: Manifest, record: Record) -> float:
    """Return the cap that this record has earned."""
    first, most = manifest.rounds.weight_cap, manifest.standing.rounds
    earned = max(0.0, EARNED_CAP - first) * min(record.scored, record.earned) / most if most else 0.0
    return first and first + earned


def median_norm(codes: Sequence[int], says: Sequence[int]) -> int:
    """The lower median of these norm codes that are not 0, by standing; 0 where all are."""
    heard = [(code, weight) for code, weight in zip(codes, says, strict=True) if code]
    return norms.lower_median([code for code, _ in heard], [weight for _, weight in heard])


def clip(manifest: Manifest, codes: Mapping[str, int], standings: Mapping[str, Record]) -> tuple[int, dict[str, int]]:
    """Their median, and by how many codes each is above clip_ratio times it."""
    median = median_norm(list(codes.values()), list(by_standing(manifest, standings, codes).values()))
    bound = median + norms.ratio_codes(manifest.rounds.clip_ratio)
    return median, {name: max(0, code - bound) for name, code in codes.items()}


def cut(manifest: Manifest, code: int, median: int) -> float:
    """About what share of a contribution its clips cut off, by its norm in total: as if its tensors were all too large alike."""
    ratio = min(manifest.rounds.clip_ratio, manifest.rounds.tensor_clip_ratio or manifest.rounds.clip_ratio)
    excess = code - median - norms.ratio_codes(ratio)
    return 1.0 - norms.clip_factor(max(0, excess))


@dataclass(frozen=True)
class Announced:
    """Sizes that a counted contribution announces."""

    norm: int
    """Norm code of all of it."""
    clip: int
    """Clip of the whole payload."""
    say: int
    """Its author's standing."""
    tensors: Sequence[bytes]
    """Norm codes of the tensors, by stage."""


def tensor_clips(manifest: Manifest, counted: Sequence[Announced]) -> list[list[bytes]]:
    """Return the codes by which each tensor is clipped, a byte each, for each counted contribution and stage."""
    if not manifest.rounds.tensor_clip_ratio:
        return [[bytes([each.clip]) * len(codes) for codes in each.tensors] for each in counted]
    says = [each.say for each in counted]
    median = median_norm([each.norm for each in counted], says)
    bounds = [
        bytes(
            _bound(manifest, [each.tensors[stage][tensor] for each in counted], says, median + average)
            for tensor, average in stages
        )
        for stage, stages in enumerate(enumerate(codes) for codes in _averages(manifest.model))
    ]
    return [[_excess(codes, bound, each.clip) for codes, bound in zip(each.tensors, bounds, strict=True)] for each in counted]


def _bound(manifest: Manifest, codes: Sequence[int], says: Sequence[int], average: int) -> int:
    """The largest code of a tensor that is not clipped. `average`: of the tensor in a payload of the median norm all of whose
    weights move alike."""
    silent = 2 * sum(weight for code, weight in zip(codes, says, strict=True) if not code) > sum(says)
    middle = max(0, average) if silent else median_norm(codes, says)
    return min(norms.LARGEST_CODE, middle + norms.ratio_codes(manifest.rounds.tensor_clip_ratio))


def _excess(codes: bytes, bounds: bytes, total: int) -> bytes:
    return bytes(max(total, code - bound) for code, bound in zip(codes, bounds, strict=True))


@cache
def _averages(model: Model) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and tensor, the codes of its part in a payload's norm, if all weights moved alike (<= 0)."""
    sizes = [[spec.elements for spec in stage_tensors(model, stage)] for stage in range(model.stages)]
    total = sum(map(sum, sizes))
    return tuple(tuple(norms.ratio_codes(math.sqrt(size / total)) for size in stage) for stage in sizes)
