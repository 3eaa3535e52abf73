"""Fast path of the codec, from native.c, on the host's memory: the same bits as the reference in numpy and torch.

The package's build compiles native.c where there is a compiler. Without it every function has its reference. A property
test compares both (tests/property/test_native.py). Calls release the interpreter's lock.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Kernels", "WeightedArrays", "kernels", "reference"]

VERSION, GROUP, BLOCK, OFFSETS, LANES = 1, 4096, 16, 16, 64
"""Constants of native.c; arrays.py and int2.py say what they mean."""
_LEVELS, _INT4, _SPARSE, _FLOATS = range(4)
_Address, _Int = ctypes.c_void_p, ctypes.c_int64


class _Part(ctypes.Structure):
    """One payload's array with its weight; `Part` of native.c."""

    _fields_ = (
        ("kind", _Int),
        ("weight", ctypes.c_double),
        ("magnitudes", _Address),
        ("codes", _Address),
        ("int4", _Address),
        ("offsets", _Address),
        ("base", _Int),
        ("positions", _Address),
        ("signs", _Address),
        ("second", _Address),
        ("kept", _Int),
        ("numbers", _Address),
    )


class WeightedArrays:
    """Arrays of several payloads of one tensor, each with its weight, as native.c reads them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._kept: list[npt.NDArray[Any]] = []
        """Arrays whose addresses are in the parts."""
        self._table: ctypes.Array[_Part] | None = None

    def _at(self, array: npt.NDArray[Any]) -> int:
        whole = np.ascontiguousarray(array)
        self._kept.append(whole)
        return whole.ctypes.data

    def levels(self, magnitudes: npt.NDArray[np.float32], codes: npt.NDArray[np.uint8], weight: float) -> None:
        self._parts.append(_Part(kind=_LEVELS, weight=weight, magnitudes=self._at(magnitudes), codes=self._at(codes)))

    def int4(self, codes: npt.NDArray[np.int8], offsets: npt.NDArray[np.uint8], base: int, weight: float) -> None:
        """Add an array of one row."""
        self._parts.append(_Part(kind=_INT4, weight=weight, int4=self._at(codes), offsets=self._at(offsets), base=base))

    def sparse(
        self,
        magnitudes: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int64],
        signs: npt.NDArray[np.bool_],
        second: npt.NDArray[np.bool_],
        weight: float,
    ) -> None:
        at = {"positions": self._at(positions), "signs": self._at(signs), "second": self._at(second)}
        self._parts.append(_Part(kind=_SPARSE, weight=weight, magnitudes=self._at(magnitudes), kept=len(positions), **at))

    def floats(self, numbers: npt.NDArray[np.float32], weight: float) -> None:
        self._parts.append(_Part(kind=_FLOATS, weight=weight, numbers=self._at(numbers)))

    def table(self) -> ctypes.Array[_Part]:
        """Return the parts side by side, as C reads them. Add none afterwards."""
        if self._table is None:
            self._table = (_Part * len(self._parts))(*self._parts)
        return self._table

    def __len__(self) -> int:
        return len(self._parts)


class Kernels:
    """Functions of native.c. Addresses are of contiguous memory on the host; spans begin at a multiple of GROUP."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        for name, (result, arguments) in _ARGUMENTS.items():
            self._functions[name].restype, self._functions[name].argtypes = result, arguments

    @property
    def version(self) -> int:
        """Return the version of native.c and the size of its Part."""
        return int(self._call("version"))

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._functions[name](*arguments)

    def int2_encode(
        self, values: int, elements: int, left: int = 0
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8], float]:
        """Return the magnitudes, (groups, 2), the packed codes of float32 values, and Σ left². `left`: address of float32
        values that lose what the codes decode to; 0: of none."""
        magnitudes, codes = np.empty((-(-elements // GROUP), 2), np.float32), np.empty(-(-elements // 4), np.uint8)
        squares = self._call("int2_encode", values, elements, magnitudes.ctypes.data, codes.ctypes.data, left)
        return magnitudes, codes, squares

    def int2_second(self, codes: npt.NDArray[np.uint8], elements: int) -> npt.NDArray[np.int64]:
        """Return how many values of each group have the second magnitude, (groups,)."""
        counts = np.empty(-(-elements // GROUP), np.int64)
        self._call("int2_second", codes.ctypes.data, elements, counts.ctypes.data)
        return counts

    def weighted_sum(self, parts: WeightedArrays, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Return Σ wᵢ xᵢ of flat values start … stop, in the order of the parts."""
        total = np.empty(stop - start)
        self._call("weighted_sum", parts.table(), len(parts), start, stop, total.ctypes.data)
        return total

    def add_to(self, parts: WeightedArrays, start: int, stop: int, values: int) -> None:
        """Add Σ wᵢ xᵢ, rounded to float32, to the values at this address: those of start … stop."""
        self._call("add_to", parts.table(), len(parts), start, stop, values)

    def mean_step(
        self, parts: WeightedArrays, start: int, stop: int, theta: int, momentum: int, rate: float, decay: float
    ) -> None:
        """Overwrite values start … stop with Nesterov's step by Σ wᵢ xᵢ."""
        self._call("mean_step", parts.table(), len(parts), start, stop, theta, momentum, rate, decay)

    def int4_unpack(self, packed: npt.NDArray[np.uint8], count: int) -> tuple[npt.NDArray[np.int8], bool, bool]:
        """Return the codes, whether one is -8, and whether the padding is not 0."""
        codes = np.empty(count, np.int8)
        faults = self._call("int4_unpack", packed.ctypes.data, count, codes.ctypes.data)
        return codes, bool(faults & 1), bool(faults & 2)

    def int4_pack(self, codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
        """Return contiguous codes as nibbles, low half first."""
        packed = np.empty(-(-codes.size // 2), np.uint8)
        self._call("int4_pack", codes.ctypes.data, codes.size, packed.ctypes.data)
        return packed

    def int4_squares(self, codes: npt.NDArray[np.int8], offsets: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return Σ code² by offset, (16,), of contiguous (rows, columns) codes."""
        sums = np.zeros(OFFSETS, np.int64)
        self._call("int4_squares", codes.ctypes.data, *codes.shape, offsets.ctypes.data, sums.ctypes.data)
        return sums

    def int4_exponents(self, values: int, rows: int, columns: int) -> tuple[npt.NDArray[np.int8], int]:
        """Return the exponents that the blocks need, (rows, blocks), -128 for all zeros; and the largest."""
        exponents = np.empty((rows, -(-columns // BLOCK)), np.int8)
        return exponents, self._call("int4_exponents", values, rows, columns, exponents.ctypes.data)

    def int4_round(
        self, values: int, columns: int, exponents: npt.NDArray[np.int8], base: int, left: int = 0
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int8], float]:
        """Return offsets, (rows, blocks), codes, (rows, columns), and Σ left². `left`: address of float32 values that lose
        what the codes decode to; 0: of none."""
        rows = len(exponents)
        offsets, codes = np.empty(exponents.shape, np.uint8), np.empty((rows, columns), np.int8)
        to = offsets.ctypes.data, codes.ctypes.data, left
        return offsets, codes, self._call("int4_round", values, rows, columns, exponents.ctypes.data, base, *to)

    def above(
        self, values: int, elements: int, threshold: float, expected: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return positions and values with magnitudes above the threshold, ascending. `expected`: about as many."""
        room = expected + expected // 8 + 2 * LANES
        positions, large = np.empty(room, np.int64), np.empty(room, np.float32)
        found: int = self._call("above", values, elements, threshold, positions.ctypes.data, large.ctypes.data, room)
        if found + LANES > room:
            return self.above(values, elements, threshold, found)
        return positions[:found], large[:found]

    def sparse_levels(
        self, sizes: npt.NDArray[np.float32], cuts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return the magnitudes, (groups, 2), and which values take the second. `cuts`: (groups + 1,)."""
        magnitudes, second = np.empty((len(cuts) - 1, 2), np.float32), np.empty(len(sizes), np.bool_)
        self._call(
            "sparse_levels", sizes.ctypes.data, cuts.ctypes.data, len(cuts) - 1, magnitudes.ctypes.data, second.ctypes.data
        )
        return magnitudes, second


_Float = ctypes.c_float
_ARGUMENTS: dict[str, tuple[Any, Sequence[Any]]] = {
    "version": (_Int, ()),
    "int2_encode": (ctypes.c_double, (_Address, _Int, _Address, _Address, _Address)),
    "int2_second": (None, (_Address, _Int, _Address)),
    "weighted_sum": (None, (_Address, _Int, _Int, _Int, _Address)),
    "add_to": (None, (_Address, _Int, _Int, _Int, _Address)),
    "mean_step": (None, (_Address, _Int, _Int, _Int, _Address, _Address, _Float, _Float)),
    "int4_unpack": (_Int, (_Address, _Int, _Address)),
    "int4_squares": (None, (_Address, _Int, _Int, _Address, _Address)),
    "int4_exponents": (_Int, (_Address, _Int, _Int, _Address)),
    "int4_round": (ctypes.c_double, (_Address, _Int, _Int, _Address, _Int, _Address, _Address, _Address)),
    "int4_pack": (None, (_Address, _Int, _Address)),
    "above": (_Int, (_Address, _Int, _Float, _Address, _Address, _Int)),
    "sparse_levels": (None, (_Address, _Address, _Int, _Address, _Address)),
}


def _load() -> Kernels | None:
    """Return the library if it was built for this machine and from this version of native.c."""
    spec = find_spec("dilocox.protocol.payload._native")
    if spec is None or spec.origin is None or sys.byteorder != "little":
        return None
    try:
        found = Kernels(spec.origin)
    except (OSError, AttributeError):
        return None
    return found if found.version == 1000 * VERSION + ctypes.sizeof(_Part) else None


_used = _load()


def kernels() -> Kernels | None:
    """Return the fast path; None where it was not built."""
    return _used


@contextmanager
def reference() -> Iterator[None]:
    """Switch to the reference, for comparisons."""
    global _used
    fast, _used = _used, None
    try:
        yield
    finally:
        _used = fast
