"""Norm codes: sizes of tensors and payloads, in 8 bits.

A recomputed norm differs in its last bits between machines. So peers announce a code, and voters check it within a
tolerance. Medians and clip factors, which must be equal everywhere, follow from announced codes alone.

    code 0            the norm is 0
    code 1 … 255      2 ** ((code - 128) / 8): eight codes an octave, from 1.7e-5 to 6.0e4; what lies outside is clamped
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

__all__ = [
    "CODES_PER_OCTAVE",
    "LARGEST",
    "LARGEST_CODE",
    "TOLERANCE",
    "clip_factor",
    "lower_median",
    "matches",
    "norm_code",
    "norm_of",
    "ratio_codes",
]

Number = TypeVar("Number", int, float)

CODES_PER_OCTAVE = 8
MIDDLE = 128
LARGEST_CODE = 255
TOLERANCE = 1
"""Codes by which an announced norm may differ from a recomputed one: rounding at a boundary."""
LARGEST = 2.0 ** ((LARGEST_CODE - 1 - TOLERANCE - MIDDLE) / CODES_PER_OCTAVE)
"""Largest norm that a code can bound: a tensor with the largest code, or with one that a voter might take for it, may have
any size."""
EIGHTHS = (256, 235, 215, 197, 181, 166, 152, 140)
"""256 · 2 ** (-n / 8), rounded: integers, so that a clip factor has the same bits on every machine."""


def norm_code(norm: float) -> int:
    """The code of a norm >= 0."""
    if norm <= 0:
        return 0
    return min(LARGEST_CODE, max(1, round(CODES_PER_OCTAVE * math.log2(norm)) + MIDDLE))


def norm_of(code: int) -> float:
    """Return the norm of a code."""
    return 2.0 ** ((code - MIDDLE) / CODES_PER_OCTAVE) if code else 0.0


def matches(code: int, norm: float) -> bool:
    """Whether a recomputed norm is what the code announces."""
    return abs(code - norm_code(norm)) <= TOLERANCE


def lower_median(values: Sequence[Number], weights: Sequence[int] | None = None) -> Number | Literal[0]:
    """The middle value, of an even number the lower one; 0 where there is none. By weights: the smallest that has half of them with
    all below it."""
    if weights is None:
        return sorted(values)[(len(values) - 1) // 2] if values else 0
    half, sofar = sum(weights), 0
    for value, weight in sorted(zip(values, weights, strict=True)):
        sofar += 2 * weight
        if sofar >= half:
            return value
    return 0


def ratio_codes(ratio: float) -> int:
    """Return the number of codes in a ratio of norms."""
    return round(CODES_PER_OCTAVE * math.log2(ratio))


def clip_factor(excess: int) -> float:
    """Return the factor that reduces a norm by `excess` codes: an 8-bit integer times a power of two, exact in float64."""
    return math.ldexp(EIGHTHS[excess % CODES_PER_OCTAVE], -CODES_PER_OCTAVE - excess // CODES_PER_OCTAVE)
