"""Norm codes: how large a tensor or payload is, announced in 8 bits.

A norm that is recomputed differs in its last bits between machines. So peers announce it as a code, voters check the code within a
tolerance, and everything that must be the same everywhere (medians, clip factors) follows from the announced codes alone.

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
"""What a code can bound: who announces the largest one, or what a voter would take for it, may be of any size."""
EIGHTHS = (256, 235, 215, 197, 181, 166, 152, 140)
"""256 · 2 ** (-n / 8), rounded: integers, so that a clip factor has the same bits on every machine."""


def norm_code(norm: float) -> int:
    """The code of a norm >= 0."""
    if norm <= 0:
        return 0
    return min(LARGEST_CODE, max(1, round(CODES_PER_OCTAVE * math.log2(norm)) + MIDDLE))


def norm_of(code: int) -> float:
    """The norm that a code stands for."""
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
    """How many codes a ratio of norms spans."""
    return round(CODES_PER_OCTAVE * math.log2(ratio))


def clip_factor(excess: int) -> float:
    """What brings a norm down by `excess` codes: an 8-bit integer times a power of two, exact in float64."""
    return math.ldexp(EIGHTHS[excess % CODES_PER_OCTAVE], -CODES_PER_OCTAVE - excess // CODES_PER_OCTAVE)
