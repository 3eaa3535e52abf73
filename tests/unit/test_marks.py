"""Tests of a worker's audit checkpoints of a phase, and of an auditor's result."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilocox.node.training.model.data import Dataset, load_dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.audit import advance, compare
from dilocox.node.training.worker.audit_checkpoints import LIVE, Marks, load_state, machine, parts, stage_state
from dilocox.node.workers.audit_checkpoints import merged, of_stage
from dilocox.protocol.checks import audit_rules
from dilocox.protocol.checks.audit_rules import Stretch
from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.head import Cluster, Head, alone
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import PhaseState
from dilocox.protocol.pb import messages_pb2 as wire
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.run.tensors import phase_bytes
from dilocox.protocol.wire.messages import canonical
from dilocox.transport.store.blobs import BlobStore
from tests.corpora import corpus_of, words
from tests.helpers import manifest

ME = "me"
LEASE = Lease(counted=8, spans=((20, 200),))
STEPS = 10


def at_once(job: Callable[[], list[bytes]]) -> Future[list[bytes]]:
    done: Future[list[bytes]] = Future()
    done.set_result(job())
    return done


@dataclass
class World:
    run: Manifest
    dataset: Dataset
    store: BlobStore
    marks: Marks
    trainer: Trainer
    state: PhaseState

    def step(self, samples: list[int] | None = None, skip: bool = False) -> None:
        """Take an inner step, one on other samples, or one that is only claimed."""
        action = phase.next_action(self.state)
        assert isinstance(action, phase.Train)
        self.marks.before_step(self.state)
        if skip:
            self.trainer.optimizer.steps += 1
        else:
            self.trainer.step(*self.dataset.batch(samples or list(action.positions)))
        self.state = replace(self.state, steps=self.state.steps + 1, samples_read=phase.samples_read(self.state, True))

    def end(self) -> wire.Marks:
        self.marks.end(self.state.steps, self.state.samples_read)
        collected = self.marks.collect()()
        assert collected is not None
        return collected

    def said(self, marks: wire.Marks) -> wire.Marks:
        """Return the checkpoints as an auditor reads them."""
        body = wire.Contribution(inner_steps=self.state.steps, samples_read=self.state.samples_read)
        return audit_rules.read_marks(self.run, body, LEASE, canonical(marks))

    def states(self, mark: wire.Mark) -> list[Tensor]:
        return [torch.frombuffer(bytearray(self.store.view(digest)), dtype=torch.float32) for digest in mark.states]

    def audit(self, stretch: Stretch, alike: bool = True) -> tuple[wire.AuditVerdict, float]:
        auditor, batch = Trainer(self.run), self.run.training.batch_size
        positions = list(stretch.positions)
        batches = (self.dataset.batch(positions[at : at + batch]) for at in range(0, len(positions), batch))
        first = self.states(stretch.first)
        computed = advance(auditor, first, stretch.first.optimizer_steps, batches)
        return compare(auditor, first, computed, self.states(stretch.last), alike)

    def all(self, marks: wire.Marks, alike: bool = True) -> list[str]:
        """Return an auditor's finding for each stretch."""
        stretches = sum(after.step > before.step for before, after in zip(marks.marks, marks.marks[1:], strict=False))
        found = [audit_rules.stretch(self.run, lot, LEASE, marks.marks) for lot in range(stretches)]
        return [wire.AuditVerdict.Name(self.audit(each, alike)[0]).removeprefix("AUDIT_") for each in found]


@pytest.fixture(params=["adamw", "muon"])
def world(request: pytest.FixtureRequest, process_group: None, tmp_path: Path) -> World:
    text = corpus_of(tmp_path / "words", words(60, 60))
    run = manifest(
        data={**text.settings, "evaluation_sequences": 4},
        training={"optimizer": request.param, "learning_rate": 5e-3},
        audit={"segments": 3},
    )
    store, trainer = BlobStore(tmp_path / "blobs"), Trainer(run)
    trainer.load_initial()
    head = Head(5, b"head", "coordinator", roster={ME: Cluster(ME, alone(ME, 2), 1)}, ledger=Ledger(200, (), {ME: LEASE}))
    state = phase.begin(run, ME, replace(head, inner_steps=STEPS))
    return World(run, load_dataset(run, text.folder), store, Marks(trainer, store, at_once), trainer, state)


def test_an_auditor_computes_the_very_bits(world: World):
    for _ in range(STEPS):
        world.step()
    marks = world.said(world.end())
    assert [mark.step for mark in marks.marks] == [0, 4, 8, 10]
    assert (marks.threads, marks.workers, marks.machine) == (1, 1, machine(torch.device("cpu")))
    assert world.all(marks) == ["EQUAL"] * 3
    sizes = [world.store.size(digest) for digest in marks.marks[1].states]
    assert sizes == [phase_bytes(world.run.model, world.run.training.optimizer == "muon", stage) for stage in range(2)]
    assert sum(sizes) == world.run.phase_bytes


def test_a_phase_after_others_is_no_different(world: World):
    """Check it with moments that are not zero, and a schedule that continues."""
    for _ in range(STEPS):
        world.step()
    first = world.end()
    world.state = replace(world.state, steps=0, round=6)
    for _ in range(6):
        world.step()
    second = world.end()
    assert second.marks[0].optimizer_steps == STEPS
    assert second.marks[0].states == first.marks[-1].states, "nothing happened in between"
    assert world.all(world.said(second)) == ["EQUAL", "EQUAL"]


def test_a_commit_that_is_moved_onto_splits_a_stretch(world: World):
    for number in range(STEPS):
        world.step()
        if number == 5:
            world.marks.before_commit(world.state.steps, world.state.samples_read)
            for _, stage in world.trainer.live_stages():
                for parameter in world.trainer.live(stage):
                    parameter.add_(0.01)
    marks = world.said(world.end())
    assert [mark.step for mark in marks.marks] == [0, 4, 6, 6, 8, 10]
    assert world.all(marks) == ["EQUAL"] * 4


def test_a_commit_that_waits_for_the_end_of_a_time_boxed_phase_adds_no_mark(world: World):
    """Check delayed overlap: the optimizer's steps are then already those of the next phase, and the author would be found
    wrong."""
    for _ in range(STEPS):
        world.step()
    world.marks.end(world.state.steps, world.state.samples_read)
    world.trainer.optimizer.steps = 5 * STEPS  # as Trainer.end_phase does
    world.marks.before_commit(world.state.steps, world.state.samples_read)
    collected = world.marks.collect()()
    assert collected is not None
    marks = world.said(collected)
    assert [mark.step for mark in marks.marks] == [0, 4, 8, 10]
    world.state = replace(world.state, steps=0, round=6)
    world.step()
    world.marks.before_commit(world.state.steps, world.state.samples_read)
    assert [mark.step for mark in world.end().marks] == [0, 1, 1], "in the next phase a commit is moved onto as ever"


def test_a_step_that_was_not_taken_is_found(world: World):
    for number in range(STEPS):
        world.step(skip=number == 5)
    marks = world.said(world.end())
    assert world.all(marks) == ["EQUAL", "DIFFERS", "EQUAL"]
    assert world.all(marks, alike=False) == ["EQUAL", "DIFFERS", "EQUAL"], "it is far, too"


def test_other_samples_than_those_of_the_lease_are_found(world: World):
    for number in range(STEPS):
        world.step(samples=[190, 191, 192, 193] if number < 4 else None)
    marks = world.said(world.end())
    assert world.all(marks, alike=False) == ["DIFFERS", "EQUAL", "EQUAL"]


def test_a_state_that_was_made_up_is_found_on_either_side(world: World):
    for _ in range(STEPS):
        world.step()
    marks = world.end()
    for stage in range(2):
        made_up = torch.randn(world.store.size(marks.marks[1].states[stage]) // 4) * 0.02
        marks.marks[1].states[stage] = world.store.put([made_up.numpy().data])
    assert world.all(world.said(marks), alike=False) == ["DIFFERS", "DIFFERS", "EQUAL"]


def test_weights_of_nothing_pass_as_the_docs_say(world: World):
    """Check the documented limit: no audit proves that a state is of this run. With all weights 0 steps cost nothing, and
    reach the announced state."""
    zeros = [torch.zeros_like(stage_state(world.trainer, stage)) for _, stage in world.trainer.live_stages()]
    last = []
    for (_, stage), flat in zip(world.trainer.live_stages(), zeros, strict=True):
        made, at = flat.clone(), 0
        for parameter, kind, elements in parts(world.trainer, stage):
            if kind != LIVE and world.trainer.optimizer.kinds(parameter)[kind]:
                made[at] = 3  # the count of its steps
            at += elements
        last.append(made)
    batches = [world.dataset.batch(range(at, at + 4)) for at in (0, 4, 8)]
    computed = advance(Trainer(world.run), zeros, 0, batches)
    assert compare(world.trainer, zeros, computed, last, alike=True) == (wire.AUDIT_EQUAL, 0.0)


def test_moments_that_were_made_up_are_found(world: World):
    for _ in range(STEPS):
        world.step()
    marks, (number, stage) = world.end(), next(iter(world.trainer.live_stages()))
    for mark in marks.marks[1:2]:
        flat = world.states(mark)[number]
        load_state(world.trainer, stage, flat)
        for parameter in stage.tensors():
            kept = world.trainer.optimizer.tensors(parameter)
            world.trainer.optimizer.restore(parameter, {k: v if k == "step" else torch.zeros_like(v) for k, v in kept.items()})
        mark.states[number] = world.store.put([stage_state(world.trainer, stage).numpy().data])
    assert world.all(world.said(marks), alike=False)[0] == "DIFFERS"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_differ(world: World, value: float):
    for _ in range(STEPS):
        world.step()
    marks = world.end()
    broken = world.states(marks.marks[1])[0]
    broken[7] = value
    marks.marks[1].states[0] = world.store.put([broken.numpy().data])
    assert world.all(world.said(marks), alike=False) == ["DIFFERS", "DIFFERS", "EQUAL"]


def test_what_is_nearly_right_passes_on_another_kind_of_machine_alone(world: World):
    for _ in range(STEPS):
        world.step()
    marks = world.end()
    flat = world.states(marks.marks[1])[0]
    flat[3] = torch.nextafter(flat[3], torch.tensor(1.0))
    marks.marks[1].states[0] = world.store.put([flat.numpy().data])
    said = world.said(marks)
    first = audit_rules.stretch(world.run, 0, LEASE, said.marks)
    assert world.audit(first, alike=True)[0] == wire.AUDIT_DIFFERS
    verdict, off = world.audit(first, alike=False)
    assert verdict == wire.AUDIT_NEAR
    assert 0 < off < 1e-3


def test_states_of_a_phase_that_was_given_up_are_removed_unless_another_has_them(world: World):
    for _ in range(STEPS):
        world.step()
    first = world.end()
    world.state = replace(world.state, steps=0, round=6)
    for _ in range(5):
        world.step()
    assert len(world.store.digests()) > len({s for mark in first.marks for s in mark.states})
    world.state = replace(world.state, steps=0, round=7)
    world.step()
    held = {state for mark in first.marks for state in mark.states}
    assert held <= world.store.digests()
    assert len(world.store.digests() - held) == 2, "the first mark of the phase that runs"


def test_parts_of_stages_make_the_marks_of_a_cluster(world: World):
    for _ in range(STEPS):
        world.step()
    whole = world.end()
    assert merged([([1], of_stage(whole, 1)), ([0], of_stage(whole, 0))]) == whole


def test_a_run_that_does_not_audit_writes_nothing(world: World):
    quiet = Marks(Trainer(manifest()), world.store, at_once)
    quiet.before_step(world.state)
    quiet.before_commit(1, 4)
    quiet.end(1, 4)
    assert quiet.collect()() is None
    assert not world.store.digests()
