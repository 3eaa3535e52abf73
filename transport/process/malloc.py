"""Settings of the allocator and the garbage collector for daemons and workers."""

import ctypes
import gc

__all__ = ["freeze_startup", "limit_arenas"]

M_ARENA_MAX = -8
"""Source: mallopt(3)."""
ARENAS = 2


def limit_arenas() -> None:
    """Limit malloc arenas. glibc gives each of gRPC's threads its own heap, and none returns memory to the others. No
    effect elsewhere."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


def freeze_startup() -> None:
    """Exempt live objects from garbage collection: a full collection visits each, and blocks the event loop.

    Most come from imports. A later call also collects what became garbage since.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
