"""The state that a run's seed makes, as the digests that a manifest names. Imports no torch: a coordinator computes it, too."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from dilocox.protocol.crypto import length_prefixed, sha256
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.model import Model
from dilocox.protocol.run.tensors import TensorSpec, stage_tensors
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobHash, digest_of

__all__ = ["initial_arrays", "seed_state"]

GENERATOR_CHUNK = 1 << 18
"""Values drawn at a time: 2 MiB of counters fit a core's cache, where they are drawn five times as fast as from memory."""
ZEROS = memoryview(bytes(1 << 20))


def initial_arrays(spec: TensorSpec, seed: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (offset, values) of a tensor's initial weights: counter-based integers, scaled by one float32 product.

    SplitMix64's output function of (key + counter); the key is derived from seed and name, so the bits depend neither on the
    stage split nor on the machine.
    """
    drawn = len(spec.shape) > 1 and spec.initial
    key = int.from_bytes(sha256(b"dilocox-init-v1\0", seed.to_bytes(8, "big"), length_prefixed(spec.name.encode()))[:8], "big")
    scale = np.float32(spec.initial * 3**0.5 / 2**23)  # uniform on [-a, a) has standard deviation a / sqrt(3)
    for start in range(0, spec.elements, GENERATOR_CHUNK):
        count = min(GENERATOR_CHUNK, spec.elements - start)
        if not drawn:
            yield start, np.full(count, spec.initial, np.float32)
            continue
        z = np.arange(start, start + count, dtype=np.uint64) + np.uint64(key)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        integers = (z >> np.uint64(40)).astype(np.int32) - np.int32(1 << 23)
        yield start, integers.astype(np.float32) * scale


def seed_state(model: Model, progress: Callable[[int], None] = lambda count: None, threads: int | None = None) -> bytes:
    """Compute the state root of round 1, storing no stage. Blocking.

    Calls `progress` with each number of bytes that was hashed, on several threads; what it raises ends the work. `threads`: at most
    so many stages at a time (default: one a core).
    """
    ended = threading.Event()

    def digest(stage: int) -> bytes:
        made = BlobHash()
        for part in _state_bytes(model, stage):
            if ended.is_set():
                break
            made.update(part)
            progress(len(part))
        return made.digest()

    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        try:
            digests = list(pool.map(digest, range(model.stages)))
        except BaseException:  # Ctrl-C too: the pool waits for its threads
            ended.set()
            raise
    return digest_of([canonical(pb.StageStates(digests=digests))])


def _state_bytes(model: Model, stage: int) -> Iterator[memoryview]:
    """Yield the bytes of a stage's state blob: parameters, then as many bytes of momentum, which is zero."""
    specs = stage_tensors(model, stage)
    for spec in specs:
        for _, values in initial_arrays(spec, model.seed):
            yield values.data.cast("B")
    left = 4 * sum(spec.elements for spec in specs)
    while left:
        yield ZEROS[:left]
        left -= min(left, len(ZEROS))
