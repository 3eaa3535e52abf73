"""Int2 levels: two magnitudes with a sign per group. It chooses the magnitudes, for payloads that are dense (`int2`) or
sparse (`topk-int2`), and decodes dense codes. It runs on any device; decoded values have the same bits on all of them."""

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dilocox.node.outer.state_device import STRETCH
from dilocox.protocol.payload.arrays import ENTRIES, GROUP, LARGEST, MIN_BASE, PER_BYTE, Levels

__all__ = ["Even", "Ragged", "decode_levels", "encode_levels", "place_levels"]

LANES = 64
"""Partial sums of a group's float32 magnitudes: value i adds to sum i mod LANES, in order; then halves are added."""
LLOYD_STEPS = 3
"""Iterations of Lloyd's algorithm (least squares, 1-D k-means) for the two magnitudes of a group."""


class Groups(Protocol):
    """The magnitudes of some groups, which share two levels each."""

    counts: npt.NDArray[np.int64]
    """(groups,): how many each has."""

    def sums(self) -> npt.NDArray[np.float64]:
        """(groups,): of all of a group's."""
        ...

    def above(self, boundaries: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(groups,) twice: how many lie above their group's boundary, and their sum."""
        ...


def place_levels(of: Groups) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return two magnitudes per group, the means of the values that they replace, shape (groups, 2), rounded to bfloat16;
    and the boundaries, shape (groups,), above which the second one applies."""
    count, total = of.counts, of.sums()
    low = high = total / count.clip(1)
    boundary = (1.3 * low).astype(np.float32)
    for _ in range(LLOYD_STEPS):
        number, above = of.above(boundary)
        high = np.where(number > 0, above / number.clip(1), boundary)
        low = np.where(number < count, (total - above) / (count - number).clip(1), boundary)
        boundary = ((low + high) / 2).astype(np.float32)
    magnitudes = torch.from_numpy(np.stack([low, high], 1)).bfloat16().float().clamp(max=LARGEST)
    magnitudes[magnitudes < 2.0**MIN_BASE] = 0
    return magnitudes.numpy(), boundary


class Ragged(Groups):
    """Groups of the values of sparse payloads."""

    def __init__(self, magnitudes: npt.NDArray[np.float32], cuts: npt.NDArray[np.int64]) -> None:
        """`cuts`: (groups + 1,), where each group's values begin, and where the last one's end."""
        self.counts, self._magnitudes = np.diff(cuts), magnitudes
        self._group = np.repeat(np.arange(len(self.counts)), self.counts)

    def sums(self) -> npt.NDArray[np.float64]:
        return self._sums(self._magnitudes)

    def above(self, boundaries: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        mask = self.levels(boundaries)
        return self._sums(mask), self._sums(self._magnitudes * mask)

    def levels(self, boundaries: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        """(values,): which take the second magnitude."""
        return self._magnitudes > np.repeat(boundaries, self.counts)

    def _sums(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the sums by group, added in float64, in order."""
        return np.bincount(self._group, values, len(self.counts)).astype(np.float64)


class Even(Groups):
    """Groups of all values, shape (groups, size), on their device."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._magnitudes, self._mask = values, values.abs(), torch.empty_like(values)
        self.counts = np.full(len(values), values.shape[1])

    def sums(self) -> npt.NDArray[np.float64]:
        return _lane_sums(self._magnitudes).cpu().numpy().astype(np.float64)

    def above(self, boundaries: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        mask = self._above(boundaries)
        number = mask.sum(1)
        both = torch.stack([number, _lane_sums(mask.mul_(self._magnitudes))]).cpu().numpy().astype(np.float64)
        return both[0], both[1]

    def packed(self, boundaries: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """The codes of all values, as they travel. To be asked last: it spoils the magnitudes."""
        codes = self._above(boundaries).mul_(2).view(-1)  # one float a value: comparisons into bytes are slow
        codes += torch.lt(self._values, 0, out=self._magnitudes).view(-1)
        whole = torch.nn.functional.pad(codes.to(torch.uint8), (0, -len(codes) % PER_BYTE)).view(torch.int32)
        whole |= whole >> 6  # little-endian: the second byte's bits follow the first byte's, and so on
        whole |= whole >> 12
        return whole.to(torch.uint8).cpu().numpy()

    def _above(self, boundaries: npt.NDArray[np.float32]) -> Tensor:
        limits = torch.from_numpy(boundaries).to(self._values.device)
        return torch.gt(self._magnitudes, limits[:, None], out=self._mask)


def _lane_sums(values: Tensor) -> Tensor:
    """Return the float32 sums of rows. On a processor they are added in the order of LANES, on a GPU in the fastest."""
    if values.device.type != "cpu":
        return values.sum(1)
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % LANES)).view(len(values), -1, LANES)
    lanes = torch.from_numpy(np.add.reduce(padded.numpy(), axis=1))
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    return lanes[:, 0]


def encode_levels(flat: Tensor, device: torch.device) -> Levels:
    """Encode float32 values, in stretches on `device`."""
    full = flat.numel() // GROUP * GROUP
    parts = [*flat[:full].view(-1, GROUP).split(STRETCH // GROUP), flat[full:].view(1, -1)]
    magnitudes, codes = [], []
    for part in (part for part in parts if part.numel()):
        groups = Even(part.to(device))
        placed, boundaries = place_levels(groups)
        magnitudes.append(placed)
        codes.append(groups.packed(boundaries))
    return Levels(flat.numel(), np.concatenate(magnitudes), np.concatenate(codes))


@lru_cache
def _unpacked(device: torch.device) -> Tensor:
    """(256,): of each byte its codes, a byte each, in one int32."""
    byte = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([byte >> 2 * index & 3 for index in range(PER_BYTE)], 1)
    return codes.view(torch.int32).view(-1).to(device)


@lru_cache
def _first_codes(device: torch.device) -> Tensor:
    """(STRETCH,): where the table of a value's group begins."""
    return torch.arange(0, ENTRIES * (STRETCH // GROUP), ENTRIES, dtype=torch.int32).repeat_interleave(GROUP).to(device)


def decode_levels(array: Levels, weight: float, start: int, stop: int, device: torch.device) -> Tensor:
    """Flat float64 values start … stop, at most STRETCH of them, times `weight`; what travels to `device` is packed."""
    table = torch.from_numpy(array.table(start, stop).ravel() * weight).to(device)
    packed = torch.from_numpy(array.packed(start, stop).copy()).to(device)  # which may not be written, and torch wants to
    codes = _unpacked(device).index_select(0, packed.int()).view(torch.uint8)[: stop - start]
    return table.index_select(0, codes + _first_codes(device)[: stop - start])
