"""Tests of a contribution's scores: the loss with it alone, and whether its direction opposes our own."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilocox.node.outer.state import StageState
from dilocox.node.training.model.data import Dataset, load_dataset
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.training.worker.scores import TILE, Candidate, Scores, Sketch, make_candidate, measure
from dilocox.protocol.checks import score_rules
from dilocox.protocol.checks.bias_rules import SKETCH
from dilocox.protocol.pb import worker_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from tests.corpora import corpus_of, words
from tests.helpers import digest, manifest

ROUND = 1


@dataclass
class World:
    run: Manifest
    trainer: Trainer
    """Ours, before its phase."""
    dataset: Dataset
    store: BlobStore
    ours: list[bytes]
    """Payloads of our phase, by stage."""
    theirs: list[bytes]
    """Payloads of another cluster, from other samples."""
    flipped: list[bytes]
    """Theirs, with the signs turned."""

    def asked(self, payloads: list[bytes], clip: int = 0, signs: int = 7) -> pb.Score:
        return pb.Score(
            round=ROUND,
            contribution=digest(*payloads),
            clip=clip,
            payloads=payloads,
            own=self.ours,
            positions=range(40, 48),
            signs=signs,
        )

    def candidate(self, payloads: list[bytes], clip: int = 0, signs: int = 7) -> Candidate:
        return make_candidate(self.trainer, self.asked(payloads, clip, signs), self.run.compression.keep, self.store.view)

    def samples(self) -> tuple[Tensor, Tensor]:
        return self.dataset.batch(range(40, 48))


def started(run: Manifest) -> Trainer:
    trainer = Trainer(run)
    trainer.load_initial()
    return trainer


@pytest.fixture
def world(process_group: None, tmp_path: Path) -> World:
    text = corpus_of(tmp_path / "words", words(60, 60))
    run = manifest(
        data={**text.settings, "evaluation_sequences": 4},
        training={"optimizer": "muon", "learning_rate": 5e-3},
        compression={"codec": "int4", "rank": None},
        outer={"momentum": 0.9},
        scoring={"voters": 4},
        rounds={"count": 9},
    )
    dataset, store = load_dataset(run, text.folder), BlobStore(tmp_path / "blobs")

    def phase(first: int, cluster: str) -> list[bytes]:
        trainer = started(run)
        for step in range(first, first + 5):
            trainer.step(*dataset.batch(range(4 * step, 4 * step + 4)))
        trainer.end_phase(ROUND, restart=False)
        return [store.put([encoded.raw]) for encoded in trainer.encode(cluster, ROUND, run.compression.keep)]

    ours, theirs = phase(0, "us"), phase(5, "them")
    return World(run, started(run), dataset, store, ours, theirs, flip(run, store, theirs))


def flip(run: Manifest, store: BlobStore, payloads: list[bytes]) -> list[bytes]:
    turned = []
    for stage, payload in enumerate(payloads):
        state = StageState(run, stage)
        state.return_to_feedback(store.view(payload), run.compression.keep)
        state.feedback.neg_()
        turned.append(store.put([state.encode(run.compression.keep).raw]))
    return turned


def test_an_honest_contribution_helps_and_one_with_its_signs_turned_harms(world: World):
    honest, turned = (measure(world.trainer, world.candidate(p), None, world.samples()) for p in (world.theirs, world.flipped))
    assert honest.before == turned.before
    assert honest.gain > 0.1
    assert turned.gain < -0.01
    assert honest.cosine > 0.1
    assert turned.cosine == pytest.approx(-honest.cosine, abs=0.05)
    assert score_rules.harmful(world.run, {"honest": honest, "turned": turned}, {"honest": 1, "turned": 1}) == {"turned"}


def test_a_contribution_points_where_itself_does(world: World):
    assert measure(world.trainer, world.candidate(world.ours), 0.0, world.samples()).cosine == pytest.approx(1)


def test_what_is_measured_is_the_model_with_it_alone_and_nothing_is_changed(world: World):
    trainer = world.trainer
    kept = [*(t.clone() for t in trainer.committed), *(p.clone() for _, s in trainer.live_stages() for p in trainer.live(s))]
    score = measure(trainer, world.candidate(world.theirs), None, world.samples())
    now = [*trainer.committed, *(p for _, s in trainer.live_stages() for p in trainer.live(s))]
    assert all(map(torch.equal, kept, now))

    other = started(world.run)
    for state in other.states:
        state.committed[1].zero_()
        state.apply([world.store.view(world.theirs[state.stage])], [1], world.run.compression.keep)
    with other.weights(other.committed):
        assert other.evaluate(*world.samples()) == score.after
    with trainer.weights(trainer.committed):
        assert trainer.evaluate(*world.samples()) == score.before


def test_what_the_round_would_clip_is_clipped(world: World):
    whole, half = (measure(world.trainer, world.candidate(world.theirs, clip), None, world.samples()) for clip in (0, 8))
    assert 0 < half.gain < whole.gain
    assert half.cosine == pytest.approx(whole.cosine, abs=1e-3)
    assert half.sketch == pytest.approx(whole.sketch, abs=1e-2), "a voter's own is not clipped, either"


def test_a_sketch_keeps_lengths_and_directions_and_is_the_asker_s_own(world: World):
    of_theirs, of_ours, turned = (world.candidate(payloads) for payloads in (world.theirs, world.ours, world.flipped))
    score = measure(world.trainer, of_theirs, 0.0, world.samples())
    theirs, ours = (torch.tensor(sketch, dtype=torch.float64) for sketch in (score.sketch, score.own))
    assert len(theirs) == len(ours) == SKETCH
    product, of_them, of_us = of_theirs.products
    for sketch, square in ((theirs, of_them), (ours, of_us)):
        assert float(sketch @ sketch) == pytest.approx(square, rel=0.25)
    assert float(theirs @ ours) / (of_them * of_us) ** 0.5 == pytest.approx(product / (of_them * of_us) ** 0.5, abs=0.15)
    torch.testing.assert_close(of_ours.sketch, of_ours.own.sketch)
    assert torch.cosine_similarity(turned.sketch, theirs, dim=0) < -0.9
    another = world.candidate(world.theirs, signs=8)
    assert abs(torch.cosine_similarity(another.sketch, theirs, dim=0)) < 0.2, "who does not know the signs knows nothing of it"
    nothing = measure(world.trainer, world.candidate(world.theirs, signs=0), 0.0, world.samples())
    assert (nothing.sketch, nothing.own) == ((), ())
    assert nothing.cosine == score.cosine


def test_a_sketch_is_of_the_whole_in_whatever_chunks():
    step = torch.randn(2 * TILE + 3 * SKETCH + 100, dtype=torch.float64)
    whole, parts, other_stage = Sketch(7, 3), Sketch(7, 3), Sketch(7, 4)
    whole.add(step)
    for part in step.split(300 * SKETCH):
        parts.add(part)
    other_stage.add(step)
    torch.testing.assert_close(whole.total, parts.total)
    assert not torch.allclose(whole.total, other_stage.total)
    assert TILE % SKETCH == 0
    assert float(whole.total @ whole.total) == pytest.approx(float(step @ step), rel=0.25)
    ones = Sketch(7, 3)
    ones.add(torch.ones(64 * TILE, dtype=torch.float64))
    assert float(ones.total @ ones.total) == pytest.approx(64 * TILE, rel=0.3), "tiles have signs of their own"


def at_once(job: Callable[[], Candidate]) -> "Future[Candidate]":
    done: Future[Candidate] = Future()
    try:
        done.set_result(job())
    except OSError as error:
        done.set_exception(error)
    return done


def measured(scores: Scores) -> pb.Scored:
    scored = scores.measure()
    assert scored is not None
    return scored


def ready(scores: Scores) -> bool:
    """Return whether the samples are scored; this runs beside training."""
    while not scores.samples_here:
        pass
    return scores.ready


def test_one_after_the_other_in_the_order_of_asking(world: World):
    scores = Scores(world.trainer, world.dataset, at_once)
    assert not scores.ready
    for payloads in (world.theirs, world.flipped):
        scores.ask(world.asked(payloads))
    assert not scores.ready, "no candidate is made"
    scores.prepare(world.run.compression.keep, world.store.view)
    assert ready(scores)
    first = measured(scores)
    assert first.contribution == digest(*world.theirs)
    scores.prepare(world.run.compression.keep, world.store.view)
    second = measured(scores)
    assert second.contribution == digest(*world.flipped)
    assert second.before == first.before
    assert second.after > second.before > first.after
    scores.prepare(world.run.compression.keep, world.store.view)
    assert not scores.ready


def test_what_a_closed_round_did_not_score_is_dropped(world: World):
    scores = Scores(world.trainer, world.dataset, at_once)
    for payloads in (world.theirs, world.flipped):
        scores.ask(world.asked(payloads))
    scores.prepare(world.run.compression.keep, world.store.view)
    scores.close()
    scores.prepare(world.run.compression.keep, world.store.view)
    assert not scores.ready


def test_scoring_takes_its_share_of_the_time_and_no_more(world: World):
    run = world.run.model_copy(update={"scoring": world.run.scoring.model_copy(update={"share": 0.0})})
    world.trainer.manifest = run
    scores = Scores(world.trainer, world.dataset, at_once)
    for payloads in (world.theirs, world.flipped):
        scores.ask(world.asked(payloads))
    scores.prepare(run.compression.keep, world.store.view)
    assert ready(scores)
    scores.measure()
    scores.prepare(run.compression.keep, world.store.view)
    assert scores.samples_here
    assert not scores.ready


def test_a_payload_that_is_not_here_is_no_opinion_and_no_end_of_the_workers(world: World):
    """Check it: a stage may have moved to this host after its payload was judged, and our own payload stayed on the former
    host."""
    scores = Scores(world.trainer, world.dataset, at_once)
    for payloads in ([digest("elsewhere")] * len(world.theirs), world.theirs):
        scores.ask(world.asked(payloads))
    scores.prepare(world.run.compression.keep, world.store.view)
    assert ready(scores)
    assert scores.measure() is None
    scores.prepare(world.run.compression.keep, world.store.view)
    assert measured(scores).contribution == digest(*world.theirs)
