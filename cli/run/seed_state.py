"""The initial state of a run that begins with its seed, computed for verbs and for a coordinator; a large model's takes minutes."""

import threading
import time
from collections.abc import Callable

from dilocox.cli.common import errors
from dilocox.cli.progress import Working
from dilocox.protocol.run.model import Model
from dilocox.protocol.run.tensors import trained_count

__all__ = ["compute_state", "compute_with_bar"]

ESTIMATE_SECONDS = 5.0
"""After so long the rate is known well enough to say how long the rest takes."""
LONG_SECONDS = 30.0
"""A rest shorter than this is not announced."""


def compute_state(model: Model, progress: Callable[[int], None], threads: int | None = None) -> bytes:
    """Return the root of the state that a model's seed makes. Blocking."""
    from dilocox.node.training.model.seed_state import seed_state  # loads numpy, which few verbs need

    return seed_state(model, progress, threads)


def compute_with_bar(model: Model, bar: Working) -> bytes:
    """Compute the root on all cores. Show the progress, and print an estimate once if it takes long."""
    parameters = trained_count(model)
    total, began = 8 * parameters, time.monotonic()  # bytes of float32 parameters and momentum
    done, announced, lock = 0, False, threading.Lock()
    bar.begin("computing the initial state", total)

    def progress(count: int) -> None:
        nonlocal done, announced
        with lock:
            done += count
            bar.more(count)
            took = time.monotonic() - began
            if announced or took < ESTIMATE_SECONDS:
                return
            announced = True
            left = took * (total - done) / done
        if left >= LONG_SECONDS:
            text = f"computing the initial state of {parameters:,} parameters: about {left / 60:,.1f} minutes left"
            errors.print(text, highlight=False)

    return compute_state(model, progress)
