"""Memory of a daemon: what strangers' connections took is not kept twice."""

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
    """Exempt all objects so far from garbage collection. A full collection visits each of some 500,000 objects that imports made,
    and stops the event loop for 100 to 200 ms."""
    gc.collect()
    gc.freeze()
