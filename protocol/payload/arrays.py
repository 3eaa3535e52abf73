"""Arrays of payloads, and their bytes. Decoding is exact; numpy only.

An array writes into up to four sections of its payload (payload.py): similar bytes side by side compress well:

    BlockInt4   HEADS i8 base exponent, 4-bit exponent offsets, one per block    CODES 4-bit codes
    Levels      HEADS two bfloat16 magnitudes per group                          CODES 2-bit codes (sign, level); dense
    Sparse      HEADS u32 gap bytes, two bfloat16 magnitudes per group           GAPS, SIGNS, LEVELS: one entry per value kept
    Floats      HEADS nothing                                                    CODES float32

BlockInt4 is quantised along the last axis in blocks of BLOCK (the last block of a row may be shorter). A value is code
· 2^(base + offset). Codes are -7 … 7 in two's complement (-8 is invalid), offsets 0 … 15, so an array spans 16 binades.
Nibbles are packed low half first. With scales along the rank axis, a product of two codes is an integer times 2^(eP +
eQ), and the exponents span 2 · 15 binades. A sum of RANK_EXACT products then fits float64's 53 bits, so P @ Qᵀ has the
same bits in any summation order.

In Levels and Sparse a value is ± magnitude[group][level]. A group is GROUP consecutive elements; its magnitudes are the
means of the values that they replace ("bin means"). A gap byte below 255 skips that many zeros before a value; 255
skips 255 zeros without a value after them. Zeros after the last value are not written. Bits are packed low bit first.
Padding is 0.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dilocox.protocol import limits
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload.native import WeightedArrays, kernels
from dilocox.protocol.pb import messages_pb2 as pb

__all__ = [
    "BLOCK",
    "ENTRIES",
    "GROUP",
    "PER_BYTE",
    "SMALLEST",
    "Array",
    "BlockInt4",
    "Floats",
    "Levels",
    "Reader",
    "Section",
    "Sparse",
    "Writer",
]

BLOCK = 16
"""Codes that share a scale: 4.25 bits per value."""
MAX_CODE = 7
OFFSETS = 16
"""Binades of one BlockInt4."""
MIN_BASE, MAX_BASE = -72, 40
"""Exponents of an array stay in base … base + 15, so every decoded product and its sums are normal float32 numbers."""
RANK_EXACT = limits.RANK
"""Products whose sum is exact: 7 · 7 · 2048 · 2^30 < 2^53."""

GROUP = 4096
"""Elements that share magnitudes, and top-k's chunk: 2 · 16 bits on 4,096 values are nothing, and a position fits 12 bits."""
PER_BYTE = 4
"""Codes of Levels in a byte."""
ENTRIES = 4
"""Values of a Levels code: two magnitudes, each with two signs."""
_SECOND_BITS = np.uint64(0xAAAAAAAAAAAAAAAA)
"""The magnitude bits in a word of 32 Levels codes."""
SMALLEST = 2.0**MIN_BASE
"""Smallest size of a value other than 0, in every form: machines differ in their treatment of subnormal numbers."""
LARGEST = 2.0**40
"""Bound on every decoded value's magnitude: far above a useful pseudo-gradient, far below float32's overflow."""
SKIP = 255
"""The gap byte that skips without a value."""


class Section(IntEnum):
    """The streams of a payload, in their order."""

    HEADS = 0
    CODES = 1
    GAPS = 2
    SIGNS = 3
    LEVELS = 4


class Writer:
    """Collects each section's bytes."""

    def __init__(self) -> None:
        self.parts: dict[Section, list[bytes | memoryview]] = {section: [] for section in Section}

    def put(self, section: Section, raw: bytes | memoryview) -> None:
        """Add bytes, not copied: they must not change before the payload is complete."""
        self.parts[section].append(raw)


class Reader:
    """Takes bytes from each section in turn. Raises RemoteError where one ends too early."""

    def __init__(self, sections: dict[Section, memoryview]) -> None:
        self._sections = sections

    def take(self, section: Section, size: int) -> memoryview:
        view = self._sections[section]
        if len(view) < size:
            raise RemoteError(pb.REASON_MALFORMED, f"section {section.name} ends too early")
        self._sections[section] = view[size:]
        return view[:size]

    @property
    def exhausted(self) -> bool:
        return not any(len(view) for view in self._sections.values())


class Array(Protocol):
    def write(self, writer: Writer) -> None: ...
    def values(self) -> npt.NDArray[np.float64]: ...
    def part(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Flat values start … stop, exact; start is a multiple of GROUP. For arrays of one row."""
        ...

    def describe(self, parts: WeightedArrays, weight: float) -> None:
        """Add the array with its weight to those that the fast path reads. For arrays of one row."""
        ...

    def square_sum(self) -> float:
        return float(np.square(self.values()).sum())


def blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def groups(elements: int) -> int:
    return -(-elements // GROUP)


@dataclass(frozen=True)
class BlockInt4(Array):
    """`rows x columns` values."""

    rows: int
    columns: int
    base: int
    offsets: npt.NDArray[np.uint8]
    """(rows, blocks), 0 … 15."""
    codes: npt.NDArray[np.int8]
    """(rows, columns), -7 … 7."""

    def exponents(self) -> npt.NDArray[np.int16]:
        """(rows, blocks): the power of two of each block."""
        return self.offsets.astype(np.int16) + np.int16(self.base)

    def values(self) -> npt.NDArray[np.float64]:
        """(rows, columns) decoded, exact."""
        scales = np.ldexp(1.0, self.exponents().astype(np.int32))
        return self.codes.astype(np.float64) * np.repeat(scales, BLOCK, axis=1)[:, : self.columns]

    def part(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        scales = np.ldexp(1.0, self.exponents()[0, start // BLOCK : blocks(stop)].astype(np.int32))
        return self.codes[0, start:stop].astype(np.float64) * np.repeat(scales, BLOCK)[: stop - start]

    def describe(self, parts: WeightedArrays, weight: float) -> None:
        parts.int4(self.codes, self.offsets, self.base, weight)

    def square_sum(self) -> float:
        """Return the sum of squares, by summing the codes' squares of each scale; the sums are integers."""
        native = kernels()
        if native is not None:
            sums = native.int4_squares(np.ascontiguousarray(self.codes), np.ascontiguousarray(self.offsets))
        else:
            scales = np.repeat(self.offsets, BLOCK, axis=1)[:, : self.columns]
            squares = np.square(self.codes.ravel(), dtype=np.int16)
            sums = np.bincount(scales.ravel(), squares, OFFSETS).astype(np.int64)
        return float(sums @ np.ldexp(1.0, 2 * (np.arange(OFFSETS) + self.base)))

    def write(self, writer: Writer) -> None:
        writer.put(Section.HEADS, struct.pack("<b", self.base))
        writer.put(Section.HEADS, _pack(self.offsets, 4))
        native = kernels()
        if native is not None:
            writer.put(Section.CODES, native.int4_pack(np.ascontiguousarray(self.codes)).data)
        else:
            writer.put(Section.CODES, _pack(self.codes.view(np.uint8) & np.uint8(15), 4))

    @staticmethod
    def sizes(rows: int, columns: int) -> dict[Section, int]:
        return {Section.HEADS: 1 + (rows * blocks(columns) + 1) // 2, Section.CODES: (rows * columns + 1) // 2}

    @classmethod
    def read(cls, reader: Reader, rows: int, columns: int) -> "BlockInt4":
        sizes = cls.sizes(rows, columns)
        heads = reader.take(Section.HEADS, sizes[Section.HEADS])
        (base,) = struct.unpack_from("<b", heads)
        if not MIN_BASE <= base <= MAX_BASE:
            raise RemoteError(pb.REASON_NON_FINITE, f"base exponent {base} is outside {MIN_BASE} … {MAX_BASE}")
        offsets = _unpack(heads[1:], rows * blocks(columns), 4)
        codes = _read_int4(reader.take(Section.CODES, sizes[Section.CODES]), rows * columns)
        return cls(rows, columns, base, offsets.reshape(rows, -1), codes.reshape(rows, columns))


@dataclass(frozen=True)
class Levels(Array):
    """Every value is one of two magnitudes of its group, with a sign: 2 bits a value. Codes stay packed, as they travel: unpacked
    they take four to eight times as much, and a round has many payloads."""

    elements: int
    magnitudes: npt.NDArray[np.float32]
    """(groups, 2), each a bfloat16."""
    codes: npt.NDArray[np.uint8]
    """(ceil(elements / PER_BYTE),): negative | second magnitude << 1, low bits first. Read only."""

    def values(self) -> npt.NDArray[np.float64]:
        """(1, elements) decoded, exact."""
        return self.part(0, self.elements)[None]

    def part(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        codes = _unpack(self.packed(start, stop), stop - start, 2)
        first = np.arange(0, ENTRIES * (groups(stop) - start // GROUP), ENTRIES)
        return self.table(start, stop).ravel()[np.repeat(first, GROUP)[: stop - start] + codes]

    def describe(self, parts: WeightedArrays, weight: float) -> None:
        parts.levels(self.magnitudes, self.codes, weight)

    def packed(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes with the codes of flat values start … stop; start is a multiple of GROUP."""
        return self.codes[start // PER_BYTE : -(-stop // PER_BYTE)]

    def table(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Return the value of each code in the groups of these values, shape (groups, 4)."""
        magnitudes = self.magnitudes[start // GROUP : groups(stop)].astype(np.float64)
        return np.stack([magnitudes, -magnitudes], axis=2).reshape(-1, ENTRIES)

    def square_sum(self) -> float:
        """Return the sum of squares, by counting each magnitude; decodes nothing."""
        native = kernels()
        if native is not None:
            of_second = native.int2_second(np.ascontiguousarray(self.codes), self.elements)
        else:
            padded = np.zeros(groups(self.elements) * GROUP // PER_BYTE, dtype=np.uint8)
            padded[: self.codes.size] = self.codes
            bits = np.bitwise_count(padded.view(np.uint64) & _SECOND_BITS)
            of_second = bits.reshape(-1, GROUP // 32).sum(axis=1, dtype=np.int64)
        counts = np.full(len(of_second), GROUP)
        counts[-1:] -= GROUP * len(counts) - self.elements
        squares = np.square(self.magnitudes.astype(np.float64))
        return float((counts - of_second) @ squares[:, 0] + of_second @ squares[:, 1])

    def write(self, writer: Writer) -> None:
        writer.put(Section.HEADS, _pack_magnitudes(self.magnitudes))
        writer.put(Section.CODES, np.ascontiguousarray(self.codes).data)

    @staticmethod
    def sizes(elements: int) -> dict[Section, int]:
        return {Section.HEADS: 4 * groups(elements), Section.CODES: -(-elements // PER_BYTE)}

    @classmethod
    def read(cls, reader: Reader, elements: int) -> "Levels":
        """Copies nothing: its codes are the section's bytes."""
        magnitudes = _read_magnitudes(reader, elements)
        codes = np.frombuffer(reader.take(Section.CODES, cls.sizes(elements)[Section.CODES]), dtype=np.uint8)
        _unpack(codes[-1:], (elements - 1) % PER_BYTE + 1, 2)  # which refuses padding that is not 0
        return cls(elements, magnitudes, codes)


@dataclass(frozen=True)
class Sparse(Array):
    """Most values are 0; the others are one of two magnitudes of their group, with a sign."""

    elements: int
    magnitudes: npt.NDArray[np.float32]
    """(groups, 2), each a bfloat16."""
    positions: npt.NDArray[np.int64]
    """(kept,) ascending."""
    signs: npt.NDArray[np.bool_]
    """(kept,): negative."""
    levels: npt.NDArray[np.bool_]
    """(kept,): the second magnitude."""

    def values(self) -> npt.NDArray[np.float64]:
        """(1, elements) decoded, exact."""
        return self.part(0, self.elements)[None]

    def part(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        out = np.zeros(stop - start)
        self.add_part(out, 1.0, start)
        return out

    def describe(self, parts: WeightedArrays, weight: float) -> None:
        parts.sparse(self.magnitudes, self.positions, self.signs, self.levels, weight)

    def add_part(self, total: npt.NDArray[np.float64], weight: float, start: int) -> None:
        """Add the flat values from `start` on, a multiple of GROUP, times `weight`, to `total`: where they are not 0."""
        positions, values = self.few(start, start + total.size)
        total[positions] += weight * values

    def few(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the stored values of flat start … stop, and their positions from `start` on, a multiple of GROUP."""
        first_group = start // GROUP
        cuts = np.searchsorted(self.positions, [*range(start, stop, GROUP), stop])
        kept = slice(cuts[0], cuts[-1])
        magnitudes = self.magnitudes[first_group : first_group + len(cuts) - 1]
        return self.positions[kept] - start, _signed(magnitudes, np.diff(cuts), self.signs[kept], self.levels[kept])

    def square_sum(self) -> float:
        """Return the sum of squares of the stored values; all others are 0."""
        cuts = np.searchsorted(self.positions, [*range(0, self.elements, GROUP), self.elements])
        return float(np.square(_signed(self.magnitudes, np.diff(cuts), self.signs, self.levels)).sum())

    def write(self, writer: Writer) -> None:
        gaps = np.diff(self.positions, prepend=-1) - 1
        stream = gaps.astype(np.uint8)
        if gaps.max(initial=0) >= SKIP:
            skips = gaps // SKIP
            stream = np.full(int(gaps.size + skips.sum()), SKIP, dtype=np.uint8)
            stream[np.cumsum(skips + 1) - 1] = gaps % SKIP
        writer.put(Section.HEADS, struct.pack("<I", stream.size))
        writer.put(Section.HEADS, _pack_magnitudes(self.magnitudes))
        writer.put(Section.GAPS, stream.tobytes())
        writer.put(Section.SIGNS, _pack(self.signs, 1))
        writer.put(Section.LEVELS, _pack(self.levels, 1))

    @staticmethod
    def largest_sizes(elements: int) -> dict[Section, int]:
        """Without the sections that grow with the values kept."""
        return {Section.HEADS: 4 + 4 * groups(elements), Section.GAPS: elements // SKIP, Section.SIGNS: 1, Section.LEVELS: 1}

    @classmethod
    def read(cls, reader: Reader, elements: int) -> "Sparse":
        (size,) = struct.unpack("<I", reader.take(Section.HEADS, 4))
        magnitudes = _read_magnitudes(reader, elements)
        stream = np.frombuffer(reader.take(Section.GAPS, size), dtype=np.uint8)
        value = stream != SKIP
        if stream.size and not value[-1]:
            raise RemoteError(pb.REASON_MALFORMED, "gaps end without a value")
        steps = stream.astype(np.int64) + value
        positions = np.cumsum(steps)[value] - 1
        if positions.size and positions[-1] >= elements:
            raise RemoteError(pb.REASON_MALFORMED, "a position is outside its tensor")
        packed = (positions.size + 7) // 8
        signs = _unpack(reader.take(Section.SIGNS, packed), positions.size, 1).astype(bool)
        levels = _unpack(reader.take(Section.LEVELS, packed), positions.size, 1).astype(bool)
        return cls(elements, magnitudes, positions, signs, levels)


@dataclass(frozen=True)
class Floats(Array):
    """Uncompressed values."""

    numbers: npt.NDArray[np.float32]
    """(elements,) float32."""

    def values(self) -> npt.NDArray[np.float64]:
        return self.part(0, self.numbers.size)[None]

    def part(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        return self.numbers[start:stop].astype(np.float64)

    def describe(self, parts: WeightedArrays, weight: float) -> None:
        parts.floats(self.numbers, weight)

    def write(self, writer: Writer) -> None:
        writer.put(Section.CODES, self.numbers.tobytes())

    @staticmethod
    def sizes(elements: int) -> dict[Section, int]:
        return {Section.CODES: elements * np.dtype(np.float32).itemsize}

    @classmethod
    def read(cls, reader: Reader, elements: int) -> "Floats":
        numbers = np.frombuffer(reader.take(Section.CODES, cls.sizes(elements)[Section.CODES]), dtype="<f4")
        sizes = np.abs(numbers)
        if not bool(((sizes == 0) | ((sizes >= SMALLEST) & (sizes <= LARGEST))).all()):  # also false for NaN
            raise RemoteError(pb.REASON_NON_FINITE, "a value is not finite, too small or too large")
        return cls(numbers)


def _signed(
    magnitudes: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
    signs: npt.NDArray[np.bool_],
    levels: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """`counts`: (groups,), of the values of each group, which follow each other."""
    table = np.concatenate([magnitudes, -magnitudes], axis=1, dtype=np.float64).ravel()
    return table[np.repeat(np.arange(0, table.size, 4), counts) + (signs.view(np.uint8) << 1 | levels.view(np.uint8))]


def _pack_magnitudes(magnitudes: npt.NDArray[np.float32]) -> bytes:
    return (np.ascontiguousarray(magnitudes).view(np.uint32) >> 16).astype("<u2").tobytes()


def _read_magnitudes(reader: Reader, elements: int) -> npt.NDArray[np.float32]:
    raw = np.frombuffer(reader.take(Section.HEADS, 4 * groups(elements)), dtype="<u2")
    magnitudes = (raw.astype(np.uint32) << 16).view(np.float32)
    if not bool(((magnitudes == 0) | ((magnitudes >= SMALLEST) & (magnitudes <= LARGEST))).all()):
        raise RemoteError(pb.REASON_NON_FINITE, "a magnitude is not finite, negative, too small or too large")
    return magnitudes.reshape(-1, 2)


def _pack(values: npt.NDArray[Any], bits: int) -> bytes:
    """Values of 1 or 4 bits into bytes, low bits first."""
    if bits == 1:
        return np.packbits(values, bitorder="little").tobytes()
    flat = values.reshape(-1).astype(np.uint8)
    per_byte = 8 // bits
    if flat.size % per_byte:
        flat = np.concatenate([flat, np.zeros(per_byte - flat.size % per_byte, dtype=np.uint8)])
    packed = flat[0::per_byte].copy()
    for index in range(1, per_byte):
        packed |= flat[index::per_byte] << np.uint8(bits * index)
    return packed.tobytes()


def _read_int4(raw: memoryview, count: int) -> npt.NDArray[np.int8]:
    """Return the codes of nibbles. Raise RemoteError if one is -8, or the padding is not zero."""
    native = kernels()
    if native is None:
        codes = (_unpack(raw, count, 4) ^ 8).astype(np.int8) - np.int8(8)
        bad = bool(codes.size) and codes.min() < -MAX_CODE
    else:
        codes, bad, padded = native.int4_unpack(np.frombuffer(raw, dtype=np.uint8), count)
        if padded:
            raise RemoteError(pb.REASON_MALFORMED, "padding is not zero")
    if bad:
        raise RemoteError(pb.REASON_MALFORMED, "a code is -8")
    return codes


def _unpack(raw: memoryview | npt.NDArray[np.uint8], count: int, bits: int) -> npt.NDArray[np.uint8]:
    packed = np.frombuffer(raw, dtype=np.uint8)
    if bits == 1:
        values = np.unpackbits(packed, bitorder="little")
    else:
        per_byte, mask = 8 // bits, np.uint8((1 << bits) - 1)
        values = np.empty(per_byte * packed.size, dtype=np.uint8)
        for index in range(per_byte):
            values[index::per_byte] = packed >> np.uint8(bits * index) & mask
    if values[count:].any():
        raise RemoteError(pb.REASON_MALFORMED, "padding is not zero")
    return values[:count]
