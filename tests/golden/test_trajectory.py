"""Golden outer trajectories, and the identities the outer loop must satisfy bit for bit."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.lab import Lab
from bench.texts import Text
from dilocox.node.outer.state import StageState, rebase, start_phase
from dilocox.node.planning.time_model import Line, Site, Step
from dilocox.node.training.model.trainer import initial_state
from dilocox.protocol.payload import payload as wire
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.corpus_store import library
from tests.corpora import corpus_of, words
from tests.helpers import manifest

GOLDEN = Path(__file__).parent / "trajectories.json"
TOLERANCE = 5e-3
"""Nats: local training differs between CPUs in the last bits, and that grows a little over the run."""

pytestmark = pytest.mark.usefixtures("process_group")


@cache
def text() -> Text:
    return corpus_of(library("words"), words(600, 100))


def run_with(
    overlap: str, lead_weight: float = 1.0, learning_rate: float = 0.8, momentum: float = 0.3, **rounds: float
) -> Manifest:
    return manifest(
        rounds={
            "count": 4,
            "inner_steps": 6,
            "max_inner_steps": 12,
            "overlap": overlap,
            "lead_weight": lead_weight,
            **rounds,
        },
        training={"learning_rate": 3e-3},
        outer={"learning_rate": learning_rate, "momentum": momentum},
        model={"hidden_size": 64, "intermediate_size": 96, "sequence_length": 32},
        data={**text().settings, "evaluation_sequences": 8},
    )


@pytest.mark.parametrize(
    ("overlap", "lead_weight", "arrive_at"), [("none", 1.0, 0), ("rebase", 1.0, 3), ("rebase", 0.5, 3), ("delayed", 1.0, 0)]
)
def test_golden_trajectories(overlap: str, lead_weight: float, arrive_at: int):
    losses = Lab(run_with(overlap, lead_weight), data=text().folder, clusters=2, arrive_at=arrive_at).rounds().losses
    golden = json.loads(GOLDEN.read_text())[overlap if lead_weight == 1 else f"{overlap}, half of private progress"]
    assert losses == pytest.approx(golden, abs=TOLERANCE)


@pytest.mark.parametrize("lead_weight", [1.0, 0.5])
def test_rebase_at_step_zero_is_the_synchronous_algorithm_bit_for_bit(lead_weight: float):
    synchronous = Lab(run_with("none"), data=text().folder, clusters=2).rounds()
    rebased = Lab(run_with("rebase", lead_weight), data=text().folder, clusters=2, arrive_at=0).rounds()
    assert torch.equal(synchronous.state(), rebased.state())


def test_a_site_s_clock_says_when_a_commit_arrives_and_what_the_time_is():
    """Check a commit three steps late: the same bits as with a given step, and each round takes its six steps; with
    waiting, three more."""
    site = Site(1, Step(1.0), 1.0, clusters=2, line=Line.both_ways(math.inf), fixed_seconds=2.5)
    said = Lab(run_with("rebase"), data=text().folder, clusters=2, arrive_at=3).rounds()
    clocked = Lab(run_with("rebase"), data=text().folder, clusters=2, site=site).rounds()
    assert torch.equal(said.state(), clocked.state())
    assert [point.seconds for point in clocked.points] == [6 * number + 2.5 for number in range(1, 5)]
    waited = Lab(run_with("none"), data=text().folder, clusters=2, site=site).rounds()
    assert [point.seconds for point in waited.points] == [8.5 * number for number in range(1, 5)]


def test_the_lab_trains_on_while_a_commit_is_late():
    """Check a commit ten steps late, in a round of six with a limit of eight: the cluster waits for the last two."""
    site = Site(1, Step(1.0), 1.0, clusters=2, line=Line.both_ways(math.inf), fixed_seconds=10.0)
    for most, steps in ((12, 10), (8, 8)):
        lab = Lab(run_with("rebase", max_inner_steps=most), data=text().folder, clusters=2, site=site).rounds()
        assert lab.points[-1].steps == 6 + 3 * steps
        assert lab.points[-1].seconds == 6 + 3 * 10 + 10


def test_every_cluster_holds_the_same_bits():
    lab = Lab(run_with("rebase"), data=text().folder, clusters=3, arrive_at=2).rounds()
    for state, other in zip(lab.trainers[0].states, lab.trainers[2].states, strict=True):
        assert torch.equal(state.committed, other.committed)
        assert not torch.equal(state.feedback, other.feedback)


@pytest.mark.parametrize("lead_weight", [1.0, 0.5])
def test_in_place_copies_match_an_out_of_place_reference(lead_weight: float):
    """Compare the rebase's two rules, and the local mix, computed with fresh tensors, with the four copies."""
    run = run_with("rebase", lead_weight)
    state = StageState(run, 0)
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(state.size, generator=generator) * 0.01

    theta = draw()
    momentum = torch.zeros(state.size)
    state.committed[0].copy_(theta)
    live = [view.clone() for _, view in state.views(state.parameters)]
    rebase(state, live, keep_private=False)
    flat_live, anchor, feedback = theta.clone(), theta.clone(), torch.zeros(state.size)
    for _ in range(3):
        step = draw()
        flat_live = flat_live + step
        for (_, delta), tensor in zip(state.views(step), live, strict=True):
            tensor.add_(delta)
        start_phase(state, live, lead_weight)
        feedback = feedback + (anchor - flat_live)
        if lead_weight != 1:
            flat_live = theta + (flat_live - theta) * lead_weight
        anchor = flat_live.clone()
        encoded = state.encode()
        decoded = dense(encoded.raw, state)
        feedback = feedback - decoded.float()
        lead = draw()  # work of the next phase before the commit arrives
        flat_live = flat_live + lead
        for (_, delta), tensor in zip(state.views(lead), live, strict=True):
            tensor.add_(delta)
        other = dense(encoded.raw, state)
        mean = (other * 0.25 + other * 0.75).float()
        momentum = momentum * run.outer.momentum + mean
        theta = theta - (momentum * run.outer.momentum + mean) * run.outer.learning_rate
        state.apply([memoryview(encoded.raw)] * 2, [1, 3])
        flat_live = theta + (flat_live - anchor)
        anchor = theta.clone()
        rebase(state, live)
        assert torch.equal(state.parameters, theta)
        assert torch.equal(state.committed[1], momentum)
        assert torch.equal(state.feedback, feedback)
        assert torch.equal(torch.cat([tensor.flatten() for tensor in live]), flat_live)


def test_a_payload_returns_to_the_feedback_only_when_its_commit_does_not_count_it():
    lab = Lab(run_with("none", count=1), data=text().folder, clusters=2)
    lab.round()
    member = lab.members[0]
    left = [state.feedback.clone() for state in member.trainer.states]
    lab.settle()
    assert all(torch.equal(state.feedback, before) for state, before in zip(member.trainer.states, left, strict=True))

    lab = Lab(run_with("none", count=1), data=text().folder, clusters=2)
    lab.round()
    member, other = lab.members
    sent = [dense(lab.payload(member.payloads[state.stage]), state) for state in member.trainer.states]
    lab.takes = [take for take in lab.takes if take.cluster == other.state.cluster]
    lab.settle()
    for state, before, payload in zip(member.trainer.states, left, sent, strict=True):
        assert torch.equal(state.feedback, before + payload.float())


def test_time_boxed_boxes_take_what_fits_and_follow_one_schedule():
    run = run_with("rebase", round_seconds=6.0)
    lab = Lab(run, data=text().folder, clusters=2, arrive_at=1, speeds=(1.0, 0.5))
    lab.round()
    assert [sent.contribution.tokens for sent in lab.counted.values()] == [6 * run.tokens_per_step, 3 * run.tokens_per_step]
    assert [trainer.optimizer.steps for trainer in lab.trainers] == [6, 6]
    lab.rounds()
    assert [member.total_steps for member in lab.members] == [24, 12]


def dense(raw: bytes | memoryview, state: StageState) -> torch.Tensor:
    """Return the values of a payload, decoded by numpy alone: float64, flat."""
    parts = []
    for layout, arrays in wire.parse(raw, state.layout()):
        values = [torch.from_numpy(array.values()) for array in arrays]
        parts.append((values[0] @ values[1].T if layout.form == wire.Form.LOWRANK else values[0]).flatten())
    return torch.cat(parts)


def test_momentum_zero_and_one_cluster_is_plain_local_training_without_compression_loss():
    run = run_with("none", learning_rate=1.0, momentum=0.0, count=1)
    lab = Lab(run, data=text().folder, clusters=1).rounds()
    (trainer,) = lab.trainers
    for state in trainer.states:
        # Θ' = Θ - decoded and feedback = delta - decoded, so Θ' - feedback is the end of training.
        before = initial_state(run, state.stage).parameters
        assert not torch.equal(state.parameters, before)
        assert float(state.feedback.norm()) < float((state.parameters - before).norm())


def test_the_initial_state_does_not_depend_on_the_split():
    values = []
    for stages in (1, 2, 5):
        run = manifest(model={"stages": stages})
        states = [initial_state(run, stage) for stage in range(stages)]
        values.append({spec.name: view.clone() for state in states for spec, view in state.views(state.parameters)})
    for other in values[1:]:
        assert other.keys() == values[0].keys()
        assert all(torch.equal(other[name], values[0][name]) for name in other)


def test_initial_weights_have_golden_bits():
    digests = json.loads(GOLDEN.read_text())["initial_digests"]
    from dilocox.transport.store.blobs import digest_of

    run = manifest()
    assert [digest_of([initial_state(run, stage).state_bytes()]).hex() for stage in range(2)] == digests


def test_losses_do_not_depend_on_the_stage_split():
    losses = []
    for stages in (1, 2, 5):
        lab = Lab(manifest(data=text().settings, model={"stages": stages}), data=text().folder, clusters=1)
        (trainer,) = lab.trainers
        losses.append([trainer.step(*lab.dataset.batch([0, 1, 2, 3])).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_worker_keeps_four_copies_and_no_more():
    lab = Lab(run_with("rebase"), data=text().folder, clusters=1)
    (trainer,) = lab.trainers
    for state in trainer.states:
        kept = {name: t for name, t in vars(state).items() if isinstance(t, torch.Tensor)}
        assert sum(tensor.numel() for tensor in kept.values()) == 4 * state.size
        assert all(tensor.dtype == torch.float32 for tensor in kept.values())
