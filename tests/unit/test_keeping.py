"""Which states of our phases stay for auditors: until it is drawn who asks for what, then those, over a restart too."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dilocox.node.crew import Progress
from dilocox.node.keeping import Keeping
from dilocox.node.marks import merged, of_stage
from dilocox.protocol.auditing import Audit
from dilocox.protocol.head import Head, initial_head
from dilocox.protocol.messages import canonical
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.blobs import BlobStore
from tests.helpers import COORDINATOR

STAGES, STEPS = 2, (0, 4, 8)


@dataclass
class Starts:
    """Nothing but the head: no state and no payload is worth keeping."""

    head: Head = field(default_factory=lambda: replace(initial_head(COORDINATOR.peer), round=6))

    def of_our_chain(self, boundary: worker.Boundary) -> bool:
        return True

    def worth_keeping(self, states: Any, roots: Any) -> set[bytes]:
        return set()


class Holding:
    def blobs(self) -> set[bytes]:
        return set()

    def forgotten(self) -> set[bytes]:
        return set()


def keeping(store: BlobStore, starts: Starts) -> Keeping:
    return Keeping(store, Holding(), starts, Progress(), list, "me")  # type: ignore[arg-type]


def phase(store: BlobStore) -> tuple[pb.Marks, bytes]:
    """Marks of a phase, and their document."""
    marks = [
        pb.Mark(step=step, states=[store.put([b"state %d of %d" % (step, stage)]) for stage in range(STAGES)]) for step in STEPS
    ]
    said = pb.Marks(marks=marks, machine="cpu")
    return said, store.put([canonical(said)])


async def test_states_stay_until_the_round_is_closed_and_then_those_that_were_drawn(tmp_path: Path):
    store, starts = BlobStore(tmp_path), Starts()
    marks, document = phase(store)
    kept = keeping(store, starts)
    kept.marks(6, marks, document)
    await kept.retain()
    assert len(store.digests()) == len(STEPS) * STAGES + 1
    starts.head = replace(starts.head, round=7, audits=(Audit(6, "me", 1, {"a": 1}), Audit(6, "you", 0, {"a": 1})))
    await kept.retain()
    assert store.digests() == {document, *marks.marks[1].states, *marks.marks[2].states}
    starts.head = replace(starts.head, round=9, audits=())
    await kept.retain()
    assert not store.digests()


async def test_what_nobody_drew_goes_with_the_next_commit(tmp_path: Path):
    store, starts = BlobStore(tmp_path), Starts()
    kept = keeping(store, starts)
    kept.marks(6, *phase(store))
    await kept.retain()
    starts.head = replace(starts.head, round=7)
    await kept.retain()
    assert not store.digests()


async def test_a_restart_finds_what_auditors_ask_for_from_its_boundaries(tmp_path: Path):
    """Two workers, a stage each: what they commit to is one document."""
    store, starts = BlobStore(tmp_path), Starts()
    starts.head = replace(starts.head, round=7, audits=(Audit(6, "me", 0, {"a": 1}),))
    marks, document = phase(store)
    assert merged([([1], of_stage(marks, 1)), ([0], of_stage(marks, 0))]) == marks
    hellos = [
        worker.Hello(
            boundaries=[worker.Boundary(round=6, payloads=[worker.StagePayload(stage=stage)], marks=of_stage(marks, stage))]
        )
        for stage in range(STAGES)
    ]
    store.put([b"of an earlier life"])
    await keeping(store, starts).begin(hellos)
    assert store.digests() == {document, *marks.marks[0].states, *marks.marks[1].states}
