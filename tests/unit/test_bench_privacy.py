"""Tests of the bench of a privacy bound's cost: its missed bars, and the training data of its sites."""

from pathlib import Path

import pytest
import torch

from bench import privacy
from bench.privacy import BOUNDS, CLIP, SITES, Bound, Cell, Place, Trained
from dilocox.node.training.model.dp_gradients import Noise


def losses() -> dict[tuple[Trained, int, Bound], float]:
    """Return good losses."""
    by_bound = dict(zip(BOUNDS, (2.0, 2.05, 2.3, 2.35, 2.4), strict=True))
    return {
        (trained, sites, bound): loss - (sites > 1) * 0.01
        for trained in privacy.RATES
        for sites in (1, SITES)
        for bound, loss in by_bound.items()
    }


@pytest.mark.parametrize(
    ("key", "loss", "says"),
    [
        (("all weights", 1, "cut"), 2.2, "cutting alone costs 0.200 nats"),
        (("adapters", SITES, 1.0), 2.2, "an epsilon of 1 costs less than one of 8"),
        (("adapters", SITES, 8.0), 2.31, "learn less than one"),
    ],
)
def test_each_bar_is_missed_alone(key: tuple[Trained, int, Bound], loss: float, says: str):
    assert privacy.missed(losses()) == []
    [missed] = privacy.missed({**losses(), key: loss})
    assert says in missed


def test_sites_begin_with_the_toy_and_train_on_their_own(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch):
    text = "a word and another, and one more of them; "
    shared, *sites = (
        privacy.corpus(tmp_path / name, [f"{number} {name} {text * 4}" for number in range(60)])
        for name in ("shared", "a", "b")
    )
    initial, frozen = privacy.learn(shared, 20, tmp_path / "base")
    place = Place(shared, sites, tmp_path / "base", initial, frozen)
    before = set()
    for trained in privacy.RATES:
        lab = privacy.Sites(privacy.manifest(place, Cell(trained, 2, "cut", 20, 1)), place, 2, Noise(CLIP, 0.0))
        before.add(round(lab.trainers[0].evaluate_committed(lab.dataset), 5))
        read = [bytes(lab.batch(index, range(100))[0].flatten().to(torch.uint8).tolist()).decode() for index in range(2)]
        assert [" b " in each for each in read] == [False, True]
    assert len(before) == 1
