"""Device of a stage's outer state: where its flat copies are stored, and where they are computed. They pass a device in
stretches.

    host     copies in the host's memory, and its cores compute: a stretch is a view, nothing moves
    stream   copies in pinned host memory, and a GPU computes: a stretch lies in one of two slots on the device while it is worked
             on; meanwhile a stream of its own takes the one before back and brings the next
    device   copies on the GPU, which computes: a stretch is a view

The operations on a stretch are the same for all three, and so are the bits. With `stream` the device contains the slots
beside training, a constant for any size of a stage, and the memory of the operations on one tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dilocox.node.workers.environment import OuterState

__all__ = ["HOST", "STRETCH", "Here", "StateDevice", "Stretch", "Through", "passage_of"]

STRETCH = 1 << 18
"""Elements taken at a time where nothing moves: 2 MiB of float64, which stay in a cache through all that is done to them. A
multiple of arrays.GROUP."""
SLOT = 1 << 22
"""Elements taken at a time where they move: 16 MiB of each copy in each of two slots."""
SLOTS = 2

Span = tuple[int, int]
"""(start, stop), flat."""


class Stretch(NamedTuple):
    start: int
    stop: int
    parts: list[Tensor]
    """Each copy's values there, on the device; what is done to those of changed copies is done to them."""


class StateDevice(Protocol):
    device: torch.device
    """That computes."""

    def zeros(self, *shape: int) -> Tensor:
        """A float32 copy, where copies lie."""
        ...

    def spans(self, elements: int) -> Iterator[Span]:
        """Yield spans of a flat copy, for operations with free cuts."""
        ...

    def each(self, changed: Sequence[Tensor], spans: Iterable[Span], read: Sequence[Tensor] = ()) -> Iterator[Stretch]:
        """Yield stretches of flat copies of one length, `changed` first. Iterate to the end: only then are changes stored."""
        ...


def _spans(elements: int, step: int) -> Iterator[Span]:
    return ((start, min(elements, start + step)) for start in range(0, elements, step))


class Here:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)

    def spans(self, elements: int) -> Iterator[Span]:
        return _spans(elements, STRETCH)

    def each(self, changed: Sequence[Tensor], spans: Iterable[Span], read: Sequence[Tensor] = ()) -> Iterator[Stretch]:
        for start, stop in spans:
            yield Stretch(start, stop, [copy[start:stop] for copy in (*changed, *read)])


class Through:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Brings and takes back, in the order in which it is asked: so a slot is empty before it is filled again."""

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, pin_memory=self._side is not None)

    def spans(self, elements: int) -> Iterator[Span]:
        return _spans(elements, SLOT)

    def each(self, changed: Sequence[Tensor], spans: Iterable[Span], read: Sequence[Tensor] = ()) -> Iterator[Stretch]:
        copies, todo = (*changed, *read), list(spans)
        longest = max((stop - start for start, stop in todo), default=0)
        slots = [[torch.empty(longest, device=self.device) for _ in copies] for _ in todo[:SLOTS]]
        self._after_work()  # slots may have been others' before
        arrived = [self._bring(copies, slots[0], todo[0])] if todo else []
        for number, (start, stop) in enumerate(todo):
            slot = slots[number % SLOTS]
            if number + 1 < len(todo):
                arrived.append(self._bring(copies, slots[(number + 1) % SLOTS], todo[number + 1]))
            if (here := arrived[number]) is not None:
                torch.cuda.current_stream(self.device).wait_event(here)
            yield Stretch(start, stop, [part[: stop - start] for part in slot])
            self._take_back(changed, slot, (start, stop))
        if self._side is not None:
            self._side.synchronize()  # the host reads what was changed, and slots may be given to others

    def _after_work(self) -> None:
        """Make the side stream wait for all work submitted to the device."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def _bring(self, copies: Sequence[Tensor], slot: Sequence[Tensor], span: Span) -> torch.cuda.Event | None:
        """Copy a span to the device. Return the event of its arrival; None: it is there."""
        with torch.cuda.stream(self._side):
            _copy([copy[slice(*span)] for copy in copies], slot)
            return self._side.record_event() if self._side is not None else None

    def _take_back(self, changed: Sequence[Tensor], slot: Sequence[Tensor], span: Span) -> None:
        self._after_work()
        with torch.cuda.stream(self._side):
            for copy, part in zip(changed, slot, strict=False):
                copy[slice(*span)].copy_(part[: span[1] - span[0]], non_blocking=True)


def _copy(source: Sequence[Tensor], slot: Sequence[Tensor]) -> None:
    for values, part in zip(source, slot, strict=True):
        part[: len(values)].copy_(values, non_blocking=True)


HOST = Here(torch.device("cpu"))


def passage_of(choice: OuterState, device: torch.device) -> StateDevice:
    """Return the implementation. `device`: the worker's."""
    if device.type == "cpu" or choice is OuterState.HOST:
        return HOST
    return Here(device) if choice is OuterState.DEVICE else Through(device)
