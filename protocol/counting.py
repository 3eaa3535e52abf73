"""How much what counts may do: weights, and clips in total and tensor by tensor. Integers from what was announced, so everybody has
the same: the commit carries weights and clips in total, and who applies it reads those of tensors off the counted leaves.

    weight          tokens, at most weight_cap lower medians of the counted ones' tokens
    clip in total   norm codes above clip_ratio medians of the counted ones' norms
    clip of tensor  norm codes above tensor_clip_ratio medians of the counted ones' norms of that tensor, or the clip in total
                    where that is larger

Who sends nothing has no say in a median: half could kill everybody's work with zeros. Where more than half send nothing of a
tensor, what the others send of it is measured by what the median payload is, weight by weight, on average: a tensor that is silent
for most is no free place for one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from dilocox.protocol import norms
from dilocox.protocol.manifest import Manifest, Model
from dilocox.protocol.tensors import stage_tensors

__all__ = ["Announced", "clip", "median_norm", "tensor_clips", "weights"]


def weights(manifest: Manifest, tokens: Mapping[str, int]) -> dict[str, int]:
    """In the mean, by cluster. What a cap takes off is not owed to anybody: nothing of the payload is cut off."""
    cap = manifest.weight_cap
    if not cap:
        return dict(tokens)
    most = int(cap * _middle_tokens(tokens))
    return {name: min(count, most) for name, count in tokens.items()}


def _middle_tokens(tokens: Mapping[str, int]) -> int:
    """The lower median, in which all stand equal. Were standing earned, it would weigh here."""
    return norms.lower_median(list(tokens.values()))


def median_norm(codes: Sequence[int]) -> int:
    """The lower median of these norm codes that are not 0; 0 where all are."""
    return norms.lower_median([code for code in codes if code])


def clip(manifest: Manifest, codes: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """Their median, and by how many codes each is above clip_ratio times it."""
    median = median_norm(list(codes.values()))
    bound = median + norms.ratio_codes(manifest.rounds.clip_ratio)
    return median, {name: max(0, code - bound) for name, code in codes.items()}


@dataclass(frozen=True)
class Announced:
    """What a counted contribution says of its size."""

    norm: int
    """Norm code of all of it."""
    clip: int
    """In total."""
    tensors: Sequence[bytes]
    """By stage: a norm code for each tensor."""


def tensor_clips(manifest: Manifest, counted: Sequence[Announced]) -> list[list[bytes]]:
    """For each of the counted, by stage: by how many codes each tensor is clipped, a byte each."""
    if not manifest.tensor_clip_ratio:
        return [[bytes([each.clip]) * len(codes) for codes in each.tensors] for each in counted]
    median = median_norm([each.norm for each in counted])
    bounds = [
        bytes(
            _bound(manifest, [each.tensors[stage][tensor] for each in counted], median + average) for tensor, average in stages
        )
        for stage, stages in enumerate(enumerate(codes) for codes in _averages(manifest.model))
    ]
    return [[_excess(codes, bound, each.clip) for codes, bound in zip(each.tensors, bounds, strict=True)] for each in counted]


def _bound(manifest: Manifest, codes: Sequence[int], average: int) -> int:
    """The largest code of a tensor that is not clipped. `average`: of the tensor in a payload of the median norm all of whose
    weights move alike."""
    silent = 2 * codes.count(0) > len(codes)
    middle = max(0, average) if silent else median_norm(codes)
    return min(norms.LARGEST_CODE, middle + norms.ratio_codes(manifest.tensor_clip_ratio))


def _excess(codes: bytes, bounds: bytes, total: int) -> bytes:
    return bytes(max(total, code - bound) for code, bound in zip(codes, bounds, strict=True))


@cache
def _averages(model: Model) -> tuple[tuple[int, ...], ...]:
    """By stage and tensor: codes that a tensor's share of a payload's norm lies below it, were all weights to move alike (<= 0)."""
    sizes = [[spec.elements for spec in stage_tensors(model, stage)] for stage in range(model.stages)]
    total = sum(map(sum, sizes))
    return tuple(tuple(norms.ratio_codes(math.sqrt(size / total)) for size in stage) for stage in sizes)
