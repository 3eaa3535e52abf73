"""Reed-Solomon shards of a blob, by Intel's ISA-L. The first `needed` are the blob in stripes, the others sums over GF(2^8).

The matrix is a Cauchy matrix: any `needed` shards restore, which ISA-L's Vandermonde matrix does not promise. The library is
pyeclib, whose wheel brings all it needs. It puts a header with its version before each shard. Only the bytes after it are
stored, so that every version makes the same shards; for decoding, headers come from an encoding of zeros.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, BinaryIO

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox_availability.shards import Code

__all__ = ["need_coder", "restored", "stripes"]

ALGORITHM = "isa_l_rs_cauchy"


def need_coder() -> None:
    """Raise ConfigError if shards cannot be made here, whatever an earlier call found."""
    _driver.__wrapped__(Code(2, 1))


@lru_cache(maxsize=8)
def _driver(code: Code) -> Any:
    try:
        from pyeclib.ec_iface import ECDriver, ECDriverError
    except ImportError as error:
        raise ConfigError(f"cannot make erasure shards ({error}): run pip install pyeclib") from error
    try:
        return ECDriver(k=code.needed, m=code.shares - code.needed, ec_type=ALGORITHM)
    except ECDriverError as error:
        raise ConfigError(
            f"cannot make erasure shards: this build of pyeclib has no ISA-L ({error}). Install its wheel, or "
            "the system's libisal2 and liberasurecode1"
        ) from error


@lru_cache(maxsize=8)
def _headers(code: Code, unit: int) -> list[bytes]:
    """Return the headers of a stripe's shards, as the library reads them. They do not depend on the bytes."""
    made = _driver(code).encode(bytes(unit * code.needed))
    return [each[: len(each) - unit] for each in made]


def stripes(buffers: Iterable[bytes | memoryview], size: int, code: Code) -> Iterator[list[memoryview]]:
    """Return the bytes of each shard, stripe by stripe, of a blob of `size` bytes."""
    pending, come = bytearray(), iter(buffers)
    for unit in code.units(size):
        while len(pending) < unit * code.needed and (buffer := next(come, None)) is not None:
            pending += buffer
        stripe = bytes(pending[: unit * code.needed]).ljust(unit * code.needed, b"\0")
        del pending[: unit * code.needed]
        yield [memoryview(each)[len(each) - unit :] for each in _driver(code).encode(stripe)]


def restored(size: int, code: Code, shares: Mapping[int, BinaryIO]) -> Iterator[bytes]:
    """Return the blob's bytes from the beginnings of `needed` shards, by index. Raises RemoteError if one is too short."""
    chosen = dict(sorted(shares.items())[: code.needed])
    if len(chosen) < code.needed:
        raise RemoteError(
            pb.REASON_UNAVAILABLE, f"{len(chosen)} shards are available, but restoring the blob needs {code.needed}"
        )
    left = size
    for unit in code.units(size):
        headers = _headers(code, unit)
        read = {index: file.read(unit) for index, file in chosen.items()}
        if any(len(each) != unit for each in read.values()):
            raise RemoteError(pb.REASON_SIZE_MISMATCH, "a shard is shorter than the size of its blob implies")
        stripe = _driver(code).decode([headers[index] + each for index, each in read.items()])
        yield stripe[:left]
        left -= len(stripe)
