"""Settings of the allocator and the garbage collector for daemons and workers."""

import ctypes
import gc

__all__ = ["few_arenas", "freeze_startup"]

M_ARENA_MAX = -8
"""Source: mallopt(3)."""
ARENAS = 2


def few_arenas() -> None:
    """glibc gives each of gRPC's threads a heap of its own, and none gives back what the others could use. Elsewhere: nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


def freeze_startup() -> None:
    """Exempt live objects from garbage collection: a full one visits each, and stops the event loop meanwhile.

    Most come from imports. A later call also collects what became garbage since.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
