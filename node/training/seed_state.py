"""The state that a run's seed makes, as the digests that a manifest names."""

from collections.abc import Callable, Iterator

from dilocox.node.training.model import initial_values
from dilocox.protocol.messages import canonical
from dilocox.protocol.model import Model
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.tensors import stage_tensors
from dilocox.transport.blobs import digest_of

__all__ = ["seed_state"]

ZEROS = memoryview(bytes(1 << 20))


def seed_state(model: Model, progress: Callable[[int], None] = lambda stage: None) -> bytes:
    """Compute the state root of round 1, holding no stage in memory. Calls `progress(stage)` after each stage."""
    states = pb.StageStates()
    for stage in range(model.stages):
        states.digests.append(digest_of(_state_bytes(model, stage)))
        progress(stage)
    return digest_of([canonical(states)])


def _state_bytes(model: Model, stage: int) -> Iterator[memoryview]:
    """Yield the bytes of a stage's state blob: parameters, then as many bytes of momentum, which is zero."""
    specs = stage_tensors(model, stage)
    for spec in specs:
        for _, values in initial_values(spec, model.seed):
            yield values.numpy().data.cast("B")
    left = 4 * sum(spec.elements for spec in specs)
    while left:
        yield ZEROS[:left]
        left -= min(left, len(ZEROS))
