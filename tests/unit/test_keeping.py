"""Tests of the phase states retained for auditors: all until the draw, then the requested ones, over a restart too."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dilocox.node.state.resume_points import BOUNDARIES_KEPT
from dilocox.node.state.retention import BlobRetention
from dilocox.node.workers.audit_checkpoints import merged, of_stage
from dilocox.node.workers.progress import Progress
from dilocox.protocol.checks.audit_rules import Audit
from dilocox.protocol.consensus.head import Head, initial_head
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore
from tests.helpers import COORDINATOR, digest, until

STAGES, STEPS = 2, (0, 4, 8)


@dataclass
class Starts:
    """Chain with only the facts of a test."""

    head: Head = field(default_factory=lambda: replace(initial_head(COORDINATOR.peer), round=6))
    chained: set[bytes] = field(default_factory=set)
    """Blobs worth retaining by the chain."""
    payloads: dict[bytes, list[bytes]] = field(default_factory=dict)
    """Blobs worth retaining by payload index."""
    meanwhile: list[Callable[[], object]] = field(default_factory=list)
    """Callbacks while the chain, and then indexes, are read, once each."""

    def of_our_chain(self, boundary: worker.Boundary) -> bool:
        return True

    def worth_keeping(self) -> set[bytes]:
        found = set(self.chained)
        self._read()
        return found

    def payloads_of(self, contribution: pb.Contribution) -> list[bytes]:
        found = self.payloads[contribution.leaves]
        self._read()
        return found

    def _read(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if self.meanwhile:
            self.meanwhile.pop(0)()

    def own_worth_keeping(self, states: Mapping[int, Mapping[int, bytes]], roots: Mapping[int, bytes]) -> set[bytes]:
        return {digest for each in states.values() for digest in each.values()}


@dataclass
class Holding:
    held: set[bytes] = field(default_factory=set)

    def blobs(self) -> set[bytes]:
        return set(self.held)

    def forgotten(self) -> set[bytes]:
        return set()


def keeping(
    store: BlobStore,
    starts: Starts,
    holding: Holding | None = None,
    progress: Progress | None = None,
    open: Sequence[pb.Contribution] = (),
) -> BlobRetention:
    """Return the object under test. `open`: contributions of the open round."""
    return BlobRetention(store, holding or Holding(), starts, progress or Progress(), lambda: open, "me")  # type: ignore[arg-type]


def phase(store: BlobStore) -> tuple[pb.Marks, bytes]:
    """Return the audit checkpoints of a phase, and their document."""
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
    starts.head = replace(starts.head, round=7, checks={"audits": (Audit(6, "me", 1, {"a": 1}), Audit(6, "you", 0, {"a": 1}))})
    await kept.retain()
    assert store.digests() == {document, *marks.marks[1].states, *marks.marks[2].states}
    starts.head = replace(starts.head, round=9, checks={"audits": ()})
    await kept.retain()
    assert not store.digests()


@pytest.mark.parametrize("looked", [False, True])
async def test_what_nobody_drew_goes_with_the_next_commit(tmp_path: Path, looked: bool):
    """Check it also without a check in the open round, because mostly the closing commit is the next one. All but the end
    is deleted, from which the next phase may have begun."""
    store, starts = BlobStore(tmp_path), Starts()
    kept = keeping(store, starts)
    marks, document = phase(store)
    kept.marks(6, marks, document)
    if looked:
        await kept.retain()
    starts.head = replace(starts.head, round=7)
    await kept.retain()
    assert store.digests() == set(marks.marks[-1].states)
    following = pb.Marks(marks=[pb.Mark(step=0, states=[store.put([b"elsewhere"])])])
    kept.marks(7, following, store.put([b"its document"]))
    starts.head = replace(starts.head, round=8)
    await kept.retain()
    assert store.digests() == set(following.marks[0].states)


async def test_a_phase_may_begin_with_the_state_in_which_the_one_before_it_ended(tmp_path: Path):
    store, starts = BlobStore(tmp_path), Starts()
    kept = keeping(store, starts)
    marks, document = phase(store)
    kept.marks(6, marks, document)
    starts.head = replace(starts.head, round=7)
    await kept.retain()
    begins, ends = (
        pb.Mark(step=0, states=marks.marks[-1].states),
        pb.Mark(step=4, states=[store.put([b"its end"]), store.put([b"of 1"])]),
    )
    following = pb.Marks(marks=[begins, ends])
    its_own = store.put([canonical(following)])
    kept.marks(7, following, its_own)
    starts.head = replace(starts.head, round=8, checks={"audits": (Audit(7, "me", 0, {"a": 1}),)})
    await kept.retain()
    assert store.digests() == {its_own, *begins.states, *ends.states}


async def test_a_phase_that_was_told_after_the_last_look_goes_when_nothing_needs_it(tmp_path: Path):
    store, starts = BlobStore(tmp_path), Starts()
    kept = keeping(store, starts)
    for round in range(1, 6):
        kept.boundary(round, [store.put([b"of phase %d" % round])])
    await kept.retain()
    assert len(store.digests()) == BOUNDARIES_KEPT


async def test_a_restart_finds_what_auditors_ask_for_from_its_boundaries(tmp_path: Path):
    """Check two workers, a stage each: their audit checkpoints are one document."""
    store, starts = BlobStore(tmp_path), Starts()
    starts.head = replace(starts.head, round=7, checks={"audits": (Audit(6, "me", 0, {"a": 1}),)})
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
    assert store.digests() == {document, *(state for mark in marks.marks for state in mark.states)}, (
        "the next begins at the end"
    )


async def test_what_was_judged_and_not_counted_goes(tmp_path: Path):
    """Check it: its payload may arrive after a check, and the next check may be after its round."""
    store, starts, contributions = BlobStore(tmp_path), Starts(), list[pb.Contribution]()
    kept = keeping(store, starts, open=contributions)
    leaves, payload = store.put([b"leaves"]), store.put([b"payload"])
    contributions.append(pb.Contribution(round=6, leaves=leaves))
    starts.payloads[leaves] = []
    kept.judged(contributions[0])
    await kept.retain()
    starts.payloads[leaves] = [payload]
    contributions.clear()
    starts.head = replace(starts.head, round=7)
    await kept.retain()
    assert not store.digests()
    again = store.put([b"payload"])
    await kept.retain()
    assert store.digests() == {again}, "what it named is forgotten with it"


@pytest.mark.parametrize(
    "way", ["nothing", "a phase", "a contribution", "another contribution", "a state", "a push", "a commit"]
)
@pytest.mark.parametrize("begins", [False, True])
async def test_what_becomes_needed_while_the_chain_is_read_stays(tmp_path: Path, way: str, begins: bool):
    """Check blobs without a use at the start of the check: of a phase three rounds ago, or of an earlier incarnation."""
    store, starts, holding, progress, contributions = (
        BlobStore(tmp_path),
        Starts(),
        Holding(),
        Progress(),
        list[pb.Contribution](),
    )
    kept = keeping(store, starts, holding, progress, contributions)
    wanted, leaves = store.put([b"wanted"]), store.put([b"leaves"])
    if not begins:
        kept.boundary(1, [wanted, leaves])
        await kept.retain()
        for round in (2, 3):
            kept.boundary(round, [])

    def happens() -> None:
        match way:
            case "a phase":
                kept.boundary(4, [wanted, leaves])
            case "a contribution" | "another contribution":
                starts.payloads[leaves] = [wanted]
                contributions.append(pb.Contribution(leaves=leaves))
            case "a state":
                progress.states[6] = {0: wanted, 1: leaves}
            case "a push":
                holding.held |= {wanted, leaves}
            case "a commit":
                starts.chained |= {wanted, leaves}
                starts.head = replace(starts.head, round=7)

    if way == "another contribution":
        contributions.append(pb.Contribution(leaves=b"one"))
        starts.payloads[b"one"] = []
        starts.meanwhile.append(lambda: None)
    starts.meanwhile.append(happens)
    await (kept.begin([]) if begins else kept.retain())
    assert not starts.meanwhile
    assert store.digests() == (set() if way == "nothing" else {wanted, leaves})


async def test_what_becomes_needed_while_others_are_removed_stays(tmp_path: Path):
    holding = Holding()

    class Slow(BlobStore):
        def remove(self, digest: bytes) -> None:
            holding.held |= self.digests() - {digest}  # a peer pushes what is left once more
            super().remove(digest)

    store = Slow(tmp_path)
    kept = keeping(store, Starts(), holding)
    kept.boundary(1, [store.put([b"%d" % number]) for number in range(3)])
    await kept.retain()
    for round in (2, 3):
        kept.boundary(round, [])
    await kept.retain()
    assert len(store.digests()) == 2


@pytest.mark.parametrize("counted", [True, False])
async def test_what_was_fetched_to_be_judged_goes_with_its_round_unless_it_counts(tmp_path: Path, counted: bool):
    """Reproduce a fault: a payload arrived after its round's last check, so an author rejected in every other round filled
    all voters' disks."""
    store, starts = BlobStore(tmp_path), Starts()
    kept, contribution = keeping(store, starts), pb.Contribution(round=6, leaves=store.put([b"leaves"]))
    starts.payloads = {contribution.leaves: [store.put([b"payload"]), digest("half here")]}
    partial = store.path(digest("half here")).with_suffix(".part")
    partial.write_bytes(b"half")
    await kept.retain()
    kept.judged(contribution)
    await kept.retain()
    await kept.begin([])
    assert len(store.digests()) == 2, "its round is open"
    starts.head = replace(starts.head, round=7)
    starts.chained = store.digests() if counted else set()
    await kept.retain()
    assert len(store.digests()) == (2 if counted else 0)
    assert not partial.exists()


class Looked(list[pb.Contribution]):
    """List that counts its readers."""

    times = 0

    def __iter__(self) -> Iterator[pb.Contribution]:
        self.times += 1
        return super().__iter__()


async def test_those_who_remove_take_turns(tmp_path: Path):
    """Check it, because otherwise an early deletion that ends late forgets a later one's blobs, which then stay for ever."""
    starts, looked, go = Starts(), Looked(), threading.Event()
    kept = keeping(BlobStore(tmp_path), starts, open=looked)
    starts.meanwhile.append(go.wait)
    first = asyncio.create_task(kept.retain())
    try:
        await until(lambda: not starts.meanwhile)
        before = looked.times
        second = asyncio.create_task(kept.retain())
        for _ in range(3):
            await asyncio.sleep(0)
        assert looked.times == before
    finally:
        go.set()
    await asyncio.gather(first, second)
    assert looked.times > before
