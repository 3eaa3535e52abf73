"""Payload: one stage's compressed pseudo-gradient as bytes. Parsed and validated here with numpy, without torch.

    header     magic "DLX3" | u32 tensor count | 32 bytes, whose it is: SHA-256 over run, cluster, round and stage
    tensor     u8 form | u8 reserved, 0 | u16 rank (0 where there is none) | u32 rows | u32 columns, once per tensor
    section    u32 raw bytes | u32 stored bytes | the stored bytes; HEADS, CODES, GAPS, SIGNS, LEVELS, each always there

A tensor's form names its arrays (arrays.py): INT4, INT2, SPARSE and FP32 have one. LOWRANK has two: P rows x rank, then
Q columns x rank; the tensor is P Qᵀ. Arrays follow each other inside each section in the order of the tensors. Without
entropy coding a section is stored directly; with it, as a raw deflate stream (RFC 1951) of Huffman blocks, which is
lossless.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from dilocox.protocol.crypto import length_prefixed, sha256
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload.arrays import (
    GROUP,
    Array,
    BlockInt4,
    Floats,
    Levels,
    Reader,
    Section,
    Sparse,
    Writer,
)
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Compression

__all__ = [
    "NOBODYS",
    "OWNER",
    "Form",
    "Layout",
    "StageLayout",
    "Tensor",
    "decoded_norm",
    "owner_of",
    "pack",
    "parse",
    "stage_layout",
]

MAGIC = b"DLX3"
NOBODYS = bytes(32)
"""Owner of a payload that was never announced."""
OWNER = slice(8, 40)
"""Position of the owner in a payload's bytes."""
_HEADER = struct.Struct("<4sI32s")
_TENSOR = struct.Struct("<BBHII")
_SECTION = struct.Struct("<II")
_RAW_DEFLATE = -15


class Form(IntEnum):
    """Form of one tensor."""

    INT4 = 0
    LOWRANK = 1
    INT2 = 2
    SPARSE = 3
    FP32 = 4


_DENSE_FORMS = {"int4": Form.INT4, "int2": Form.INT2, "topk-int2": Form.SPARSE, "fp32": Form.FP32}


class Layout(NamedTuple):
    """Layout of a tensor's payload, from the manifest."""

    form: Form
    rows: int
    columns: int
    rank: int = 0

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def largest_sizes(self) -> Mapping[Section, int]:
        """Most raw bytes per section; exact for all forms but SPARSE, which leaves out what grows with the values kept."""
        match self.form:
            case Form.LOWRANK:
                p, q = BlockInt4.sizes(self.rows, self.rank), BlockInt4.sizes(self.columns, self.rank)
                return {section: p[section] + q[section] for section in p}
            case Form.INT4:
                return BlockInt4.sizes(1, self.elements)
            case Form.INT2:
                return Levels.sizes(self.elements)
            case Form.SPARSE:
                return Sparse.largest_sizes(self.elements)
            case _:
                return Floats.sizes(self.elements)

    def read(self, reader: Reader) -> tuple[Array, ...]:
        match self.form:
            case Form.LOWRANK:
                return BlockInt4.read(reader, self.rows, self.rank), BlockInt4.read(reader, self.columns, self.rank)
            case Form.INT4:
                return (BlockInt4.read(reader, 1, self.elements),)
            case Form.INT2:
                return (Levels.read(reader, self.elements),)
            case Form.SPARSE:
                return (Sparse.read(reader, self.elements),)
            case _:
                return (Floats.read(reader, self.elements),)


Tensor = tuple[Layout, tuple[Array, ...]]


class StageLayout(NamedTuple):
    """Layout of a stage's payload in a round."""

    tensors: tuple[Layout, ...]
    kept: int
    """Most values in all SPARSE tensors together."""
    entropy: bool

    def section_limits(self) -> dict[Section, int]:
        """Most raw bytes of each section."""
        totals = dict.fromkeys(Section, 0)
        for layout in self.tensors:
            for section, size in layout.largest_sizes().items():
                totals[section] += size
        totals[Section.GAPS] += self.kept
        totals[Section.SIGNS] += self.kept // 8
        totals[Section.LEVELS] += self.kept // 8
        return totals

    @property
    def exact(self) -> bool:
        """Whether every payload has the same size."""
        return not self.entropy and not self.kept

    @property
    def largest(self) -> int:
        """Most bytes of a payload, headers and scales included."""
        limits = self.section_limits().values()
        stored = sum(_most_stored(size) for size in limits) if self.entropy else sum(limits)
        return _HEADER.size + _TENSOR.size * len(self.tensors) + _SECTION.size * len(Section) + stored

    def check_size(self, size: int) -> None:
        """Raises RemoteError when no payload of this layout has `size` bytes."""
        if size > self.largest or (self.exact and size != self.largest):
            bound = "has" if self.exact else "has at most"
            raise RemoteError(pb.REASON_SIZE_MISMATCH, f"{size} bytes; this stage's payload {bound} {self.largest}")


def _most_stored(size: int) -> int:
    """Deflate stores what it cannot shrink, with 5 bytes for each block."""
    return size + size // 512 + 64


def stage_layout(shapes: Sequence[Sequence[int]], compression: Compression, keep: int) -> StageLayout:
    """The layout of a stage's payload; `keep`: the round's rank, or values kept per GROUP."""
    layouts = [_tensor_layout(shape, compression.codec, keep) for shape in shapes]
    sparse = sum(layout.elements for layout in layouts if layout.form == Form.SPARSE)
    kept = -(-sparse * keep // GROUP) if sparse else 0
    return StageLayout(tuple(layouts), kept, compression.entropy_coding)


def _tensor_layout(shape: Sequence[int], codec: str, keep: int) -> Layout:
    rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, int(np.prod(shape)))
    if codec != "lowrank-int4":
        return Layout(_DENSE_FORMS[codec], rows, columns)
    low_rank, dense = Layout(Form.LOWRANK, rows, columns, keep), Layout(Form.INT4, rows, columns)
    smaller = sum(low_rank.largest_sizes().values()) < sum(dense.largest_sizes().values())
    return low_rank if len(shape) == 2 and keep < min(rows, columns) and smaller else dense


def owner_of(run_id: bytes, cluster: str, round: int, stage: int) -> bytes:
    """Return the owner field of a payload's header. It prevents that a cluster announces another cluster's payload, or an
    old one, as its new work."""
    names = (length_prefixed(part) for part in (run_id, cluster.encode(), round.to_bytes(4, "big"), stage.to_bytes(4, "big")))
    return sha256(b"dilocox-payload-v1\0", *names)


def pack(tensors: Sequence[Tensor], entropy: bool, owner: bytes = NOBODYS) -> bytes:
    """The payload's bytes."""
    writer = Writer()
    for _, arrays in tensors:
        for array in arrays:
            array.write(writer)
    parts: list[bytes | memoryview] = [_HEADER.pack(MAGIC, len(tensors), owner)]
    parts += [_TENSOR.pack(layout.form, 0, layout.rank, layout.rows, layout.columns) for layout, _ in tensors]
    for section in Section:
        raw = writer.parts[section]
        stored = _deflated(raw) if entropy else raw
        parts += [_SECTION.pack(sum(map(len, raw)), sum(map(len, stored))), *stored]
    return b"".join(parts)


def _deflated(raw: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    coder = zlib.compressobj(1, zlib.DEFLATED, _RAW_DEFLATE, 9, zlib.Z_HUFFMAN_ONLY)
    return [*map(coder.compress, raw), coder.flush()]


def parse(raw: bytes | memoryview, layout: StageLayout, owner: bytes | None = None) -> list[Tensor]:
    """Validate a payload against the layout that the manifest demands; `owner`: whose it must be, None: who counts it was asked
    already. Raises RemoteError, whatever the bytes."""
    layout.check_size(len(raw))
    view = memoryview(raw)
    said = bytes(view[OWNER])
    header = _HEADER.pack(MAGIC, len(layout.tensors), said) + b"".join(
        _TENSOR.pack(tensor.form, 0, tensor.rank, tensor.rows, tensor.columns) for tensor in layout.tensors
    )
    if view[: len(header)] != header:
        raise RemoteError(pb.REASON_MALFORMED, "not a payload, or its tensors differ from the manifest's layout")
    if owner is not None and said != owner:
        raise RemoteError(pb.REASON_COPIED, "the payload was made by another cluster, or for another round or stage")
    reader = Reader(_read_sections(view[len(header) :], layout))
    tensors = [(tensor, tensor.read(reader)) for tensor in layout.tensors]
    if not reader.exhausted:
        raise RemoteError(pb.REASON_MALFORMED, "bytes follow the last array of a section")
    kept = sum(array.positions.size for _, arrays in tensors for array in arrays if isinstance(array, Sparse))
    if kept > layout.kept:
        raise RemoteError(pb.REASON_OVERSIZE, f"{kept} values kept; at most {layout.kept} are allowed")
    return tensors


def _read_sections(view: memoryview, layout: StageLayout) -> dict[Section, memoryview]:
    sections: dict[Section, memoryview] = {}
    for section, limit in layout.section_limits().items():
        if len(view) < _SECTION.size:
            raise RemoteError(pb.REASON_MALFORMED, f"section {section.name} is missing")
        size, stored = _SECTION.unpack_from(view)
        view = view[_SECTION.size :]
        if size > limit or stored > len(view):
            raise RemoteError(pb.REASON_MALFORMED, f"section {section.name} is larger than its layout or than the payload")
        sections[section] = _inflate(view[:stored], size) if layout.entropy else view[:stored]
        if len(sections[section]) != size:
            raise RemoteError(pb.REASON_MALFORMED, f"section {section.name} does not have the size it names")
        view = view[stored:]
    if len(view):
        raise RemoteError(pb.REASON_MALFORMED, "bytes follow the last section")
    return sections


def _inflate(stored: memoryview, size: int) -> memoryview:
    decoder = zlib.decompressobj(_RAW_DEFLATE)
    try:
        raw = decoder.decompress(stored, size + 1)  # one more than allowed shows a stream that is too long
    except zlib.error as error:
        raise RemoteError(pb.REASON_MALFORMED, f"not a deflate stream: {error}") from error
    if len(raw) > size or not decoder.eof or decoder.unused_data:
        raise RemoteError(pb.REASON_MALFORMED, "a deflate stream is longer or shorter than its header states")
    return memoryview(raw)


def decoded_norm(tensors: Sequence[Tensor]) -> float:
    """Frobenius norm of what the payload decodes to, without multiplying factors out: ‖P Qᵀ‖² = ⟨PᵀP, QᵀQ⟩."""
    total = 0.0
    for layout, arrays in tensors:
        if layout.form == Form.LOWRANK:
            p, q = (array.values() for array in arrays)
            total += float(np.sum((p.T @ p) * (q.T @ q)))
        else:
            total += arrays[0].square_sum()
    return float(np.sqrt(max(0.0, total)))
