"""Tests of leaks of a cluster's private data: the account, the noise, and the data that are never sent."""

import asyncio
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from bench.texts import Text
from dilocox.cli.options import PrivateOptions
from dilocox.node.cluster import supervisor
from dilocox.node.data.privacy_budget import Account, Budget, Steps, epsilon_of, open_account, steps_left
from dilocox.node.member.participation import ParticipationWish, wish
from dilocox.node.training.model.data import load_private
from dilocox.node.training.model.dp_gradients import Drawn, Noise
from dilocox.node.training.model.mesh import Mesh
from dilocox.node.training.model.trainer import Trainer
from dilocox.node.workers.progress import ClusterProgress, Phase
from dilocox.protocol import events
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.member import member_io
from dilocox.protocol.pb import worker_pb2 as worker
from dilocox.transport.store.blobs import digest_of
from dilocox.transport.store.corpus_store import last_built
from tests.corpora import corpus_of, words
from tests.helpers import digest, manifest, until
from tests.unit.test_generations import Node
from tests.unit.test_private import private_run

SEQUENCES, BATCH, DELTA = 2000, 8, 1e-5
CORPUS = digest("corpus", 1)


def steps(count: int, noise: float, sequences: int = SEQUENCES, batch: int = BATCH) -> Steps:
    return Steps(sequences=sequences, batch=batch, noise=noise, count=count)


def account(folder: Path, epsilon: float = 4.0, corpus: int = 1, run: int = 1) -> Account:
    return Account(
        folder / "privacy.json", digest("run", run), digest("corpus", corpus), SEQUENCES, BATCH, Budget(epsilon, DELTA, 1.0)
    )


# Data that may be sent


@pytest.mark.parametrize(
    ("said", "devices", "several_boxes", "why"),
    [
        ({"private_delta": 1e-5}, None, False, "--private-delta only with"),
        ({"private_clip": 2.0}, None, False, "--private-clip only with"),
        ({"private_epsilon": math.inf, "private": Path(), "private_clip": 2.0}, None, False, "--private-clip only with"),
        ({"private_epsilon": 8.0}, None, False, "with --private DIR"),
        ({"private_epsilon": math.inf}, None, False, "with --private DIR"),
        ({"private_epsilon": 8.0, "private": Path()}, 2, False, "--devices 1"),
        ({"private_epsilon": 8.0, "private": Path()}, None, True, "a cluster of one host"),
    ],
)
def test_options_that_bound_nothing_are_refused(said: dict[str, Any], devices: int | None, several_boxes: bool, why: str):
    with pytest.raises(ConfigError, match=why):
        PrivateOptions(**said).settings(devices, several_boxes)


def test_what_is_not_said_of_a_budget_is_as_the_help_says():
    options = PrivateOptions(private=Path(), private_epsilon=8.0)
    assert options.settings(None, False)["budget"] == Budget(8.0, None, 1.0)


def test_who_gives_up_a_bound_says_so_in_as_many_words():
    assert PrivateOptions(private=Path()).settings(2, True) == {"private": Path(), "gives_up_bound": False}
    without = PrivateOptions(private=Path(), private_epsilon=math.inf).settings(2, True)
    assert without == {"private": Path(), "gives_up_bound": True}


# The account


def test_without_sampling_the_account_is_just_above_what_gaussian_noise_gives_away():
    """Compare with Gaussian noise on a sum that one replaced sequence moves by two clips: arXiv 1805.06530, theorem 8, is
    exact."""
    noise, count = 40.0, 50
    shift = 2 / noise * math.sqrt(count)
    normal = NormalDist()

    def delta(epsilon: float) -> float:
        near, far = normal.cdf(shift / 2 - epsilon / shift), normal.cdf(-shift / 2 - epsilon / shift)
        return near - math.exp(epsilon) * far

    said = epsilon_of([steps(count, noise, batch=SEQUENCES)], DELTA)
    assert delta(said) <= DELTA < delta(said / 1.3)


def test_the_account_grows_with_steps_and_batches_and_shrinks_with_noise_and_data():
    base = epsilon_of([steps(100, 3.0)], DELTA)
    assert 0 < epsilon_of([steps(50, 3.0)], DELTA) < base
    assert epsilon_of([steps(100, 6.0)], DELTA) < base < epsilon_of([steps(100, 3.0, batch=80)], DELTA)
    assert epsilon_of([steps(100, 3.0, sequences=20_000)], DELTA) < base
    assert epsilon_of([steps(60, 3.0), steps(40, 3.0)], DELTA) == pytest.approx(base)


def test_the_budget_is_laid_out_spent_and_never_passed_over_restarts(tmp_path: Path):
    own = account(tmp_path)
    own.lay_out(100, 20)
    assert own.room
    phases = 0
    while own.room:
        if phases == 3:
            own = account(tmp_path)  # a restart
            own.lay_out(40, 20)
        assert own.enter(digest("leaves", phases), 20, own.noise, CORPUS)
        phases += 1
    assert 5 <= phases <= 7, "planned steps fit, and a quarter more"
    spent = own.spent
    assert spent <= 4.0
    again = account(tmp_path)
    assert again.spent == pytest.approx(spent)
    again.lay_out(100, 20)
    assert not again.room, "it follows the run, and trains no more"
    more = account(tmp_path, run=2)
    assert more.spent == pytest.approx(spent), "what a corpus gave away in one run it gave away"
    more.lay_out(100, 20)
    assert more.noise > 1.2 * again.noise
    another = account(tmp_path, corpus=2)
    assert not another.spent
    another.lay_out(100, 20)
    assert another.noise == pytest.approx(again.noise)
    assert another.enter(digest("leaves", 99), 10, another.noise, digest("corpus", 2))
    assert account(tmp_path).spent == pytest.approx(spent), "an account is of a corpus"
    assert not own.enter(digest("leaves", 98), 40, own.noise, CORPUS), "nobody may hear of it …"
    assert account(tmp_path, epsilon=99.0).spent > 4.0, "… and its work is in what later rounds may send"


def test_what_is_announced_again_is_paid_once(tmp_path: Path):
    own = account(tmp_path)
    own.lay_out(100, 20)
    assert own.enter(digest("leaves", 1), 10, own.noise, CORPUS)
    spent = own.spent
    again = account(tmp_path)
    assert again.enter(digest("leaves", 1), 10, own.noise, CORPUS)
    assert again.spent == spent
    [kept] = json.loads((tmp_path / "privacy.json").read_text())["corpora"].values()
    assert [each["count"] for each in kept["steps"]] == [10]


def test_who_trained_without_noise_before_has_no_bound_any_more(tmp_path: Path):
    own = account(tmp_path)
    own.lay_out(100, 20)
    assert not own.enter(digest("leaves", 1), 1, 0.0, CORPUS)
    again = account(tmp_path)
    again.lay_out(100, 20)
    assert not again.room
    assert again.spent == math.inf


def test_work_that_no_account_knows_is_refused(tmp_path: Path):
    own = account(tmp_path)
    with pytest.raises(LocalError, match=r"privacy\.json is missing"):
        own.lay_out(100, 20, trained=True)
    own.lay_out(100, 20)
    account(tmp_path).lay_out(80, 20, trained=True)
    for other in (b"", digest("corpus", 2)):
        with pytest.raises(LocalError, match="other data"):
            own.enter(digest("leaves", 1), 1, own.noise, other)


def test_who_asks_for_too_much_hears_it_and_a_damaged_account_is_not_begun_again(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--private-epsilon 0\.01: 125,000 steps"):
        account(tmp_path, epsilon=0.01).lay_out(100_000, 10)
    (tmp_path / "privacy.json").write_text('{"corpora": {"ab')
    with pytest.raises(LocalError, match=r"privacy\.json"):
        account(tmp_path)


def test_the_account_counts_the_corpus_s_sequences_and_the_run_s_steps(tmp_path: Path):
    corpus = corpus_of(tmp_path / "own", words(40, 60))
    run = private_run()
    own = open_account(tmp_path, run, corpus.folder, last_built(corpus.folder), Budget(8.0, None, 1.0))
    count = load_private(run, corpus.folder, last_built(corpus.folder), "me").sequences
    assert own.delta == 1 / (10 * count)
    steps = [run.rounds.inner_steps] * run.rounds.count
    assert [steps_left(run, trained) for trained in range(run.rounds.count + 1)] == [
        sum(steps[n:]) for n in range(len(steps) + 1)
    ]


def test_training_without_a_bound_is_entered_and_ends_what_was_promised(tmp_path: Path):
    corpus, other = (corpus_of(tmp_path / name, words(40, 60, number)) for number, name in enumerate(("own", "other")))
    runs = [private_run(run={"name": name}) for name in ("one", "two", "three")]

    def opened(run: int, budget: Budget | None, gives_up: bool = False, own: Text = corpus) -> Account:
        made = open_account(tmp_path, runs[run], own.folder, last_built(own.folder), budget, gives_up)
        made.lay_out(100, 20)
        return made

    bounded = opened(0, Budget(8.0, 1e-5, 1.0))
    assert bounded.enter(digest("leaves", 1), 20, bounded.noise, last_built(corpus.folder))
    with pytest.raises(ConfigError, match=r"epsilon \d+\.\d\d .*--private-epsilon inf"):
        opened(1, None)
    free = opened(1, None, gives_up=True)
    assert not free.noise
    assert free.room
    assert opened(2, Budget(8.0, 1e-5, 1.0)).noise, "it was started, and has trained nothing"
    assert free.enter(digest("leaves", 2), 20, 0.0, last_built(corpus.folder))
    with pytest.raises(ConfigError, match="trained on without a bound before"):
        opened(1, Budget(8.0, 1e-5, 1.0))
    assert not opened(0, Budget(8.0, 1e-5, 1.0)).room, "no more of it, in the run that had a bound"
    opened(1, None)
    opened(1, None, own=other).enter(digest("leaves", 3), 20, 0.0, last_built(other.folder))
    with pytest.raises(ConfigError, match="trained on without a bound before"):
        opened(2, Budget(8.0, 1e-5, 1.0), own=other)


def test_too_little_of_a_corpus_is_a_sentence(tmp_path: Path):
    corpus = corpus_of(tmp_path / "own", words(40, 60))
    run = private_run(training={"batch_size": 1 << 16, "microbatches": 1})
    with pytest.raises(ConfigError, match="Build them from more text"):
        open_account(tmp_path, run, corpus.folder, last_built(corpus.folder), Budget(8.0, None, 1.0))


# The noise


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.grad.clone() for _, stage in trainer.live_stages() for parameter in stage.tensors()]  # type: ignore[union-attr]


def step(noise: Noise | None, inputs: torch.Tensor, **sections: Any) -> list[torch.Tensor]:
    """Return the gradients of a batch, before the run's own clipping."""
    # so far apart that one sequence's gradient is never cut by the run's bound
    trainer = Trainer(manifest(training={"gradient_clip": 1e9, **sections.pop("training", {})}, **sections), Mesh(), noise)
    trainer.load_initial()
    found: list[torch.Tensor] = []
    trainer.step(inputs, inputs.roll(-1, 1), before_update=lambda: found.extend(gradients(trainer)))
    return found


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


BATCH_OF = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(1))


def test_without_noise_and_under_the_bound_gradients_are_what_they_are_without(process_group: None):
    plain, bounded = step(None, BATCH_OF), step(Noise(1e3, 1e-12), BATCH_OF)
    for one, other in zip(plain, bounded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_each_sequence_s_gradient_is_cut_alone(process_group: None):
    alone = [step(None, BATCH_OF[row : row + 1], training={"batch_size": 1, "microbatches": 1}) for row in range(4)]
    norms = sorted(map(norm, alone))
    clip = (norms[1] + norms[2]) / 2
    factors = [min(1.0, clip / norm(each)) for each in alone]
    assert factors.count(1.0) == 2
    wanted = [sum(f * each[index] for f, each in zip(factors, alone, strict=True)) / 4 for index in range(len(alone[0]))]
    for one, other in zip(wanted, step(Noise(clip, 1e-12), BATCH_OF), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_noise_has_its_width_everywhere_and_is_never_the_same(process_group: None):
    clip, noise = 1e-9, 3.0
    first, second = (torch.cat([t.flatten() for t in step(Noise(clip, noise), BATCH_OF)]) for _ in range(2))
    for tensor in (first, second, (first - second) / math.sqrt(2)):
        assert float(tensor.std()) * 4 / clip == pytest.approx(noise, rel=0.05)
    assert all(float(t.std()) > 0 for t in step(Noise(clip, noise), BATCH_OF))


def test_a_gradient_without_a_norm_is_left_out(process_group: None):
    trainer = Trainer(manifest(), Mesh(), Noise(1.0, 1e-12))
    trainer.load_initial()
    table = next(stage for _, stage in trainer.live_stages()).tensors()[0].data
    table[255] = math.nan
    sound = BATCH_OF.clamp(max=254)
    bad = sound.clone()
    bad[2, 5] = 255
    taken: list[float] = []
    trainer.step(bad, sound, before_update=lambda: taken.append(norm(gradients(trainer))))
    assert 0 < taken[0] <= 3 / 4 + 1e-6


def test_the_whole_model_is_where_sequences_are_bounded():
    with pytest.raises(LocalError, match="--devices 1"):
        Trainer(manifest(), Mesh(0, 2, 1), Noise(1.0, 1.0))


def test_batches_are_drawn_from_all_without_replacement_and_nobody_can_say_which(tmp_path: Path):
    corpus = corpus_of(tmp_path / "own", words(40, 60))
    run = private_run()
    dataset = load_private(run, corpus.folder, last_built(corpus.folder), "me")

    def rows(drawn: Drawn, first: int, size: int) -> list[tuple[int, ...]]:
        inputs, _ = drawn.batch(range(first, first + size))
        return [tuple(row.tolist()) for row in inputs]

    everything = dataset.sequences
    mine = Drawn(dataset, bytes(32))
    assert len(rows(mine, 0, everything)) == everything
    index = {row: number for number, row in enumerate(rows(mine, 0, everything))}
    assert len(index) > 0.9 * everything, "all of them, but for equal ones"
    batches = [rows(mine, 1000 + 4 * number, 4) for number in range(200)]
    assert batches[3] != rows(mine, 1012, 4), "positions come again in phases without a seat; no batch does"
    assert rows(Drawn(dataset, bytes(32)), 0, 4) == rows(Drawn(dataset, bytes(32)), 0, 4)
    assert len({tuple(batch) for batch in batches}) == 200
    assert rows(Drawn(dataset), 0, 4) != rows(Drawn(dataset), 0, 4)
    assert len({row for batch in batches for row in batch}) > 0.9 * len(index) * (1 - math.exp(-800 / everything))


def test_what_is_drawn_is_what_was_looked_for():
    asked: list[list[int]] = []

    class Remembers:
        sequences = 1000

        def here(self, positions: list[int]) -> bool:
            asked.append(positions)
            return True

        def batch(self, positions: list[int]) -> None:
            asked.append(positions)

    drawn = Drawn(Remembers(), bytes(32))  # type: ignore[arg-type]
    for first in (0, 4, 0, 4):
        assert drawn.here(range(first, first + 4))
        drawn.batch(range(first, first + 4))
    assert asked[::2] == asked[1::2]
    assert len(set(map(tuple, asked))) == 4


async def test_samples_that_will_be_drawn_are_looked_for(tmp_path: Path):
    corpus = corpus_of(tmp_path / "own", words(40, 60))
    drawn = Drawn(load_private(private_run(), corpus.folder, last_built(corpus.folder), "me"))
    assert drawn.here([])
    while not drawn.here(range(8, 12)):
        await asyncio.sleep(0.01)


# Data that are not sent


def test_losses_are_told_to_nobody():
    crew = ClusterProgress(tells_loss=False)
    crew.step(worker.Step(loss=2.5, seconds=1.0))
    assert (crew.progress.loss, crew.progress.told_loss) == (2.5, 0.0)
    phase = Phase(worker.Boundary(round=1, loss=2.5, tokens=64), [worker.StagePayload(norm=1.0, size=5)], [])
    assert phase.ended(b"b", b"l", tells_loss=False).loss == 0.0
    assert phase.ended(b"b", b"l").loss == 2.5


PAYLOAD = b"payload"


def boundary(number: int, steps: int, noise: float) -> worker.Boundary:
    payloads = [worker.StagePayload(stage=s, digest=digest_of([PAYLOAD]), base_state=bytes(32), size=number) for s in range(2)]
    return worker.Boundary(round=number, inner_steps=steps, steps_within=steps, noise=noise, corpus=CORPUS, payloads=payloads)


@pytest.mark.parametrize("earlier", [0, 5])
async def test_what_is_not_within_the_budget_is_told_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int):
    """Check the budget. `earlier`: steps of a phase that an earlier incarnation trained without noise, and did not report
    before its end."""
    monkeypatch.setattr(supervisor, "GENERATION_PAUSE_SECONDS", 0.01)
    own = account(tmp_path)
    own.lay_out(100, 20)
    node = Node(tmp_path, own, [boundary(1, earlier, 0.0)] if earlier else [])
    node.store.put([PAYLOAD])
    try:
        await node.tasks.race(until(lambda: node.pool.starts))
        node.pool.say(boundary=boundary(2, 10, own.noise))
        node.pool.say(boundary=boundary(3, 400, own.noise))
        await node.tasks.race(until(lambda: [type(event) for event in node.port.emitted].count(events.PhaseEnded) == 2))
        await node.tasks.race(until(lambda: not own.room))
        heard = [fact.round for fact in node.port.fed if isinstance(fact, member_io.PhaseEnded)]
        assert heard == ([] if earlier else [2])
        assert all(fact.loss == 0.0 for fact in node.port.fed if isinstance(fact, member_io.PhaseEnded))
        assert account(tmp_path).spent > 4.0
    finally:
        await node.tasks.close()
        node.chain.close()


def test_how_many_answers_a_batch_has_is_not_told(process_group: None):
    masked = BATCH_OF.clone()
    masked[:, :9] = -100
    trainer = Trainer(manifest(), Mesh(), Noise(1.0, 1.0))
    trainer.load_initial()
    assert trainer.step(BATCH_OF, masked).tokens == masked.numel()


def test_who_has_spent_its_budget_takes_no_part():
    assert wish(False, None, 0.0, spent="epsilon 4.00 of 4 is spent") == ParticipationWish(
        False, "because another phase would exceed its privacy budget: epsilon 4.00 of 4 is spent"
    )
