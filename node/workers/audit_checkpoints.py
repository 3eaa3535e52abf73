"""Audit checkpoints of a phase, merged from those of its stages. Daemon and workers import it, so it imports no torch."""

from collections.abc import Iterable, Sequence

from dilocox.protocol.pb import messages_pb2 as wire

__all__ = ["merged", "of_stage"]


def merged(parts: Iterable[tuple[Sequence[int], wire.Marks]]) -> wire.Marks:
    """Merge parts of stages, in stage order. All parts are of one phase, and of machines of one kind."""
    held = list(parts)
    whole = wire.Marks.FromString(held[0][1].SerializeToString())
    for number, mark in enumerate(whole.marks):
        found = {stage: state for stages, part in held for stage, state in zip(stages, part.marks[number].states, strict=True)}
        del mark.states[:]
        mark.states.extend(found[stage] for stage in sorted(found))
    return whole


def of_stage(marks: wire.Marks, index: int) -> wire.Marks:
    """Return the part of the stage at this index."""
    part = wire.Marks.FromString(marks.SerializeToString())
    for mark in part.marks:
        mark.states[:] = [mark.states[index]]
    return part
