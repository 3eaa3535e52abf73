"""The bench of hostile clusters: its attacks do what they say, voters' checks are the product's, its bars judge."""

from pathlib import Path

import pytest
import torch

from bench import poison
from bench.attacks import ATTACKS, Seen
from bench.poison import DEFENCES, Cell, Setting, missed, train
from bench.texts import Text, stdlib

SETTING = Setting(4, 1, "sparse", 1, 10, 1)


def cell(attack: str, defence: str, text: Text) -> Cell:
    return Cell(attack, defence, 4, 1, "sparse", 1, 10, 0, text)


def attack(name: str) -> torch.Tensor:
    honest = torch.tensor([[1.0, 2.0, -1.0, 0.5], [1.0, 4.0, -1.0, 0.5], [4.0, 3.0, -1.0, 0.5]])
    places = {"embedding": slice(0, 2), "model.norm.weight": slice(2, 4)}
    seen = Seen(honest, torch.ones(4), honest[0], places, torch.Generator().manual_seed(0))
    return next(each for each in ATTACKS if each.name == name).make(seen)


def test_attacks_make_what_they_say():
    assert attack("flip").tolist() == [-1, -2, 1, -0.5]
    assert attack("live").tolist() == [-10, -20, 10, -5]
    assert attack("zeros").tolist() == [0] * 4
    assert attack("IPM").tolist() == [-4, -6, 2, -1]
    assert attack("one tensor")[:2].tolist() == [0, 0]
    assert float(attack("one tensor").norm()) == pytest.approx(float(torch.tensor([1.0, 4.0, -1.0, 0.5]).norm()))
    ordinary = attack("ALIE")
    assert ordinary[2:].tolist() == [-1.0, 0.5], "where all agree it agrees"
    assert ordinary[0] < 1


@pytest.mark.usefixtures("process_group")
def test_a_copy_is_refused_and_what_passes_is_counted():
    copied = train(cell("copy", "none", stdlib()))
    assert len(copied["refused"]) == 2
    assert "made by another cluster" in copied["refused"][0]
    bounded = train(cell("live", "+ tensors", stdlib()))
    assert bounded["refused"] == [], "hostile clusters keep to the rules"
    assert bounded["losses"][-1] < train(cell("live", "none", stdlib()))["losses"][-1]


def test_each_defence_is_more_than_the_one_before(tmp_path: Path):
    text = Text("none", tmp_path, "00" * 32)
    runs = {defence.name: cell("live", defence.name, text).manifest() for defence in DEFENCES}
    said = [
        (run.weight_cap, run.rounds.clip_ratio, run.tensor_clip_ratio, run.largest_rms, run.outer.aggregate)
        for run in runs.values()
    ]
    assert said == [
        (0, 1024, 0, 1e6, "mean"),
        (1, 1024, 0, 1e6, "mean"),
        (1, 2, 0, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "trimmed"),
        (1, 2, 1.25, pytest.approx(0.4), "centered-clip"),
    ]
    assert len({cell("live", name, text).key for name in runs}) == len(runs)


def test_bars_say_what_does_not_hold():
    names = [defence.name for defence in DEFENCES]
    fine = {each.name: dict.fromkeys(names, 3.0) for each in ATTACKS}
    fine["live"]["none"] = 30.0
    assert missed(SETTING, fine) == []
    dear = {**fine, "nobody": {**fine["nobody"], "+ tensors": 3.2}}
    assert any("the defaults cost 6.7%" in sentence for sentence in missed(SETTING, dear))
    harmed = {**fine, "flip": {**fine["flip"], "+ tensors": 3.0 * poison.HARM + 0.1}}
    assert any("flip reaches" in sentence for sentence in missed(SETTING, harmed))
    assert missed(Setting(16, 5, "sparse", 1, 10, 1), harmed) == [], "more than a quarter is not held"
    tame = {**fine, "live": dict.fromkeys(names, 3.0)}
    assert any("without defence" in sentence for sentence in missed(SETTING, tame))
