"""The payload: one stage's compressed pseudo-gradient as bytes. Parsed and validated here with numpy, without torch.

    header   magic "DLX1" | u32 tensor count
    tensor   u8 form (0 int4, 1 lowrank-int4) | u8 dimensions | u16 rank (0 for int4) | u32 rows | u32 columns, once per tensor
    bodies   in the same order; a body is one array (int4) or two (lowrank-int4: P rows x rank, then Q columns x rank)
    array    i8 base exponent | 4-bit exponent offsets, one per block | 4-bit codes

Arrays are quantised along their last axis in blocks of BLOCK (the last block of a row may be shorter): value = code · 2^(base +
offset), codes -7 … 7 in two's complement (-8 is invalid), offsets 0 … 15, so a factor spans 16 binades. An int4 tensor is one row
of rows · columns. Nibbles are packed low half first; offsets and codes each end on a byte boundary, padding is 0.

Exactness: with block scales along the rank axis a product of two codes is an integer times 2^(eP + eQ), the exponents span 2 · 15
binades, and a sum of RANK_EXACT products fits float64's 53 bits, so P @ Qᵀ has the same bits in any summation order.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protocol import limits
from protocol.errors import RemoteError
from protocol.pb import messages_pb2 as pb

__all__ = ["BLOCK", "Array", "Layout", "Tensor", "decoded_norm", "pack", "parse", "payload_size", "tensor_layouts"]

MAGIC = b"DLX1"
BLOCK = 16
"""Codes that share a scale: 4.25 bits per value."""
MAX_CODE = 7
OFFSETS = 16
"""Binades of one array."""
MIN_BASE, MAX_BASE = -72, 40
"""Exponents of an array stay in base … base + 15, so every decoded product and its sums are normal float32 numbers."""
RANK_EXACT = limits.RANK
"""Products whose sum is exact: 7 · 7 · 2048 · 2^30 < 2^53."""

_HEADER = struct.Struct("<4sI")
_TENSOR = struct.Struct("<BBHII")
INT4, LOWRANK = 0, 1


class Layout(NamedTuple):
    """What the manifest says a tensor's payload looks like."""

    form: int
    rows: int
    columns: int
    rank: int

    @property
    def arrays(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each array."""
        if self.form == LOWRANK:
            return ((self.rows, self.rank), (self.columns, self.rank))
        return ((1, self.rows * self.columns),)


@dataclass(frozen=True)
class Array:
    """Packed codes and offsets; `rows x columns` values."""

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


Tensor = tuple[Layout, tuple[Array, ...]]


def tensor_layouts(shapes: Sequence[Sequence[int]], rank: int) -> list[Layout]:
    """The layout of a stage's payload: low rank where it makes a matrix smaller, else int4."""
    layouts = []
    for shape in shapes:
        rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, int(np.prod(shape)))
        low_rank = Layout(LOWRANK, rows, columns, rank)
        dense = Layout(INT4, rows, columns, 0)
        smaller = len(shape) == 2 and rank < min(rows, columns) and _body_bytes(low_rank) < _body_bytes(dense)
        layouts.append(low_rank if smaller else dense)
    return layouts


def _array_bytes(rows: int, columns: int) -> tuple[int, int]:
    """Bytes of offsets and of codes."""
    return (rows * _blocks(columns) + 1) // 2, (rows * columns + 1) // 2


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _body_bytes(layout: Layout) -> int:
    return sum(1 + sum(_array_bytes(*shape)) for shape in layout.arrays)


def payload_size(layouts: Sequence[Layout]) -> int:
    """Bytes of a payload with these layouts: the size on the wire, headers and scales included."""
    return _HEADER.size + sum(_TENSOR.size + _body_bytes(layout) for layout in layouts)


def pack(tensors: Sequence[Tensor]) -> bytes:
    """The payload's bytes."""
    parts = [_HEADER.pack(MAGIC, len(tensors))]
    parts += [_TENSOR.pack(lay.form, 2, lay.rank, lay.rows, lay.columns) for lay, _ in tensors]
    for _, arrays in tensors:
        for array in arrays:
            parts.append(struct.pack("<b", array.base))
            parts.append(_pack_nibbles(array.offsets.ravel()))
            parts.append(_pack_nibbles(array.codes.ravel().view(np.uint8)))
    return b"".join(parts)


def parse(raw: bytes | memoryview, layouts: Sequence[Layout]) -> list[Tensor]:
    """Validate a payload against the layout that the manifest demands. Raises RemoteError, whatever the bytes."""
    expected = payload_size(layouts)
    if len(raw) != expected:
        raise RemoteError(pb.REASON_SIZE_MISMATCH, f"{len(raw)} bytes; this stage's payload has {expected}")
    view = memoryview(raw)
    magic, count = _HEADER.unpack_from(view)
    if magic != MAGIC or count != len(layouts):
        raise RemoteError(pb.REASON_MALFORMED, "not a payload, or another tensor count")
    offset = _HEADER.size
    for layout in layouts:
        if _TENSOR.unpack_from(view, offset) != (layout.form, 2, layout.rank, layout.rows, layout.columns):
            raise RemoteError(pb.REASON_MALFORMED, "a tensor's header differs from the manifest's layout")
        offset += _TENSOR.size
    tensors: list[Tensor] = []
    for layout in layouts:
        arrays = []
        for rows, columns in layout.arrays:
            array, offset = _parse_array(view, offset, rows, columns)
            arrays.append(array)
        tensors.append((layout, tuple(arrays)))
    return tensors


def _parse_array(view: memoryview, offset: int, rows: int, columns: int) -> tuple[Array, int]:
    (base,) = struct.unpack_from("<b", view, offset)
    if not MIN_BASE <= base <= MAX_BASE:
        raise RemoteError(pb.REASON_NON_FINITE, f"base exponent {base} is outside {MIN_BASE} … {MAX_BASE}")
    offset += 1
    scale_bytes, code_bytes = _array_bytes(rows, columns)
    offsets = _unpack_nibbles(view[offset : offset + scale_bytes], rows * _blocks(columns))
    offset += scale_bytes
    nibbles = _unpack_nibbles(view[offset : offset + code_bytes], rows * columns)
    codes = (nibbles ^ 8).astype(np.int8) - np.int8(8)
    if codes.size and codes.min() < -MAX_CODE:
        raise RemoteError(pb.REASON_MALFORMED, "a code is -8")
    return Array(rows, columns, base, offsets.reshape(rows, -1), codes.reshape(rows, columns)), offset + code_bytes


def _pack_nibbles(values: npt.NDArray[np.uint8]) -> bytes:
    nibbles = values & np.uint8(15)
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return (nibbles[0::2] | (nibbles[1::2] << 4)).tobytes()


def _unpack_nibbles(raw: memoryview, count: int) -> npt.NDArray[np.uint8]:
    packed = np.frombuffer(raw, dtype=np.uint8)
    nibbles = np.empty(2 * packed.size, dtype=np.uint8)
    nibbles[0::2] = packed & 15
    nibbles[1::2] = packed >> 4
    if count % 2 and nibbles[-1]:
        raise RemoteError(pb.REASON_MALFORMED, "padding is not zero")
    return nibbles[:count]


def decoded_norm(tensors: Sequence[Tensor]) -> float:
    """Frobenius norm of what the payload decodes to, without decoding it: ‖P Qᵀ‖² = ⟨PᵀP, QᵀQ⟩."""
    total = 0.0
    for layout, arrays in tensors:
        values = [array.values() for array in arrays]
        if layout.form == LOWRANK:
            total += float(np.sum((values[0].T @ values[0]) * (values[1].T @ values[1])))
        else:
            total += float(np.sum(np.square(values[0])))
    return float(np.sqrt(max(0.0, total)))
