"""Identity of a phase, which joins checkpoints of several stages. Daemon and workers import it, so it imports no torch."""

from dilocox.protocol.pb import worker_pb2 as worker

__all__ = ["Phase", "phase_of"]

Phase = tuple[int, bytes, int, int, float]


def phase_of(boundary: worker.Boundary) -> Phase:
    """The same for all workers that were together in a phase, and for no others: its mean loss is agreed on to the last bit."""
    return boundary.round, boundary.head, boundary.inner_steps, boundary.samples_read, boundary.loss
