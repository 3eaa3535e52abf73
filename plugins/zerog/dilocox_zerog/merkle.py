"""Merkle tree by which 0G Storage names a file: Keccak-256 over chunks of 256 bytes, in segments of 1,024 chunks.

leaf      Keccak(chunk); zeros fill up the last chunk, and chunks of zeros fill up the file to a sixteenth of the next
          power of two of its chunks
segment   the root over its chunks
file      the root over its segments
a root    pairs from the left, level by level; an element without a partner moves up unchanged
"""

from collections.abc import Iterator
from typing import BinaryIO

from Crypto.Hash import keccak

__all__ = ["CHUNK_BYTES", "SEGMENT_BYTES", "file_root", "padded_bytes", "segment_root"]

CHUNK_BYTES = 256
SEGMENT_BYTES = 1024 * CHUNK_BYTES
PARTS = 16
"""Parts of the power of two above a file's chunks: a file is filled up to whole parts."""


def _hash(data: bytes) -> bytes:
    return keccak.new(data=data, digest_bits=256).digest()


def _root(level: list[bytes]) -> bytes:
    while len(level) > 1:
        above = [_hash(level[index] + level[index + 1]) for index in range(0, len(level) - 1, 2)]
        level = above + level[2 * len(above) :]
    return level[0]


def segment_root(segment: bytes) -> bytes:
    """Return the root of a segment of at least one byte; the last chunk is filled up."""
    chunks = [segment[start : start + CHUNK_BYTES].ljust(CHUNK_BYTES, b"\0") for start in range(0, len(segment), CHUNK_BYTES)]
    return _root([_hash(chunk) for chunk in chunks])


def padded_bytes(size: int) -> int:
    """Return the bytes of a file of `size` bytes with its padding of zeros."""
    chunks = -(-size // CHUNK_BYTES)
    whole = 1 << (chunks - 1).bit_length()
    part = max(1, whole // PARTS)
    return -(-chunks // part) * part * CHUNK_BYTES


def _segments(file: BinaryIO, size: int) -> Iterator[bytes]:
    left = padded_bytes(size)
    while left:
        step = min(SEGMENT_BYTES, left)
        yield file.read(step).ljust(step, b"\0")
        left -= step


def file_root(file: BinaryIO, size: int) -> bytes:
    """Return the root of `size` bytes, at least one, read from the current position of `file`."""
    return _root([segment_root(segment) for segment in _segments(file, size)])
