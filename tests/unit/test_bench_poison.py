"""Tests of the bench of hostile clusters: its attacks match their descriptions, voters' checks are the product's, its bars
judge."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.attacks import ATTACKS, Adversary, Seen, decoded
from bench.committee import Votes
from bench.lab import Lab
from bench.poison import cells
from bench.poison.cells import found, run_all, summary, train
from bench.poison.design import BIAS, DEFENCES, SCORED, Cell, Setting
from bench.poison.report import HARM, Judged, missed, missed_by_scores, preset_share, scored
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
        (run.rounds.weight_cap, run.rounds.clip_ratio, run.rounds.tensor_clip_ratio, run.largest_rms, run.outer.aggregate)
        for run in (runs[defence.name] for defence in DEFENCES)
    ]
    assert said == [
        (0, 1024, 0, 1e6, "mean"),
        (1, 1024, 0, 1e6, "mean"),
        (1, 2, 0, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "centered-clip"),
        (1, 2, 1.25, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "mean"),
        (1, 2, 1.25, pytest.approx(0.4), "centered-clip"),
    ]
    assert {name for name, run in runs.items() if run.scoring.voters} == set(SCORED)
    assert [defence for defence in DEFENCES if defence.looks_for_bias] == [BIAS]
    assert len({cell("live", name, text).key for name in runs}) == len(runs)


def test_bars_say_what_does_not_hold():
    names = [defence.name for defence in DEFENCES]
    fine = {each.name: dict.fromkeys(names, 3.0) for each in ATTACKS}
    fine["live"]["none"] = 30.0
    assert missed(SETTING, fine) == []
    dear = {**fine, "nobody": {**fine["nobody"], "+ tensors": 3.2}}
    assert any("the defaults cost 6.7%" in sentence for sentence in missed(SETTING, dear))
    harmed = {**fine, "flip": {**fine["flip"], "+ tensors": 3.0 * HARM + 0.1}}
    assert any("flip reaches" in sentence for sentence in missed(SETTING, harmed))
    assert missed(Setting(16, 5, "sparse", 1, 10, 1), harmed) == [], "more than a quarter is not held"
    tame = {**fine, "live": dict.fromkeys(names, 3.0)}
    assert any("without defence" in sentence for sentence in missed(SETTING, tame))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("attack", ["flip", "colluding votes"])
def test_a_committee_refuses_what_harms_and_counts_the_others(attack: str):
    result = train(cell(attack, "scores", stdlib()))
    assert result["judged"] == {"hostile": 2, "honest": 6}
    assert result["harmful"] == {"hostile": 2, "honest": 0}
    assert len(result["measured"]) == 2 * 4 * 3, "all others score each"
    assert all(result["seconds"][kind] > 0 for kind in ("training", "candidates", "losses"))
    assert train(cell(attack, "+ tensors", stdlib()))["measured"] == []


@pytest.mark.usefixtures("process_group")
def test_what_a_committee_refuses_is_owed_again():
    class Against(Adversary):
        """Half of all clusters, which reject a harmless one, and work."""

        def vote(self, lab: Lab, voter: str, found: Votes) -> Votes:
            return {**found, "cluster-0000": False}

    few = cell("nobody", "scores", stdlib())
    lab = Lab(few.manifest(), 4, 0, data=few.text.folder, hostile=Against(range(2, 4), ATTACKS[0], 0))
    lab.round()
    assert lab.harmful == [(1, "cluster-0000")]
    assert sorted(lab.counted) == ["cluster-0001", "cluster-0002", "cluster-0003"]
    refused = lab.announced["cluster-0000"]
    state = lab.trainers[0].states[0]
    owed, payload = state.feedback.clone(), decoded(lab, refused)
    assert float(payload.norm()) > 0
    lab.settle()
    torch.testing.assert_close(state.feedback, owed + payload)


def judged(caught: int = 10, refused: int = 0, losses: float = 1.0) -> Judged:
    return Judged(10, caught, 100, refused, 700, refused, 200, 0.05, 100.0, 5.0, losses)


def test_bars_of_scoring_say_what_does_not_hold():
    found = {each.name: dict.fromkeys(SCORED, 3.0) for each in ATTACKS}
    votes = {each.name: dict.fromkeys(SCORED, judged()) for each in ATTACKS}
    unscored = dict.fromkeys(SCORED, 3.0)
    assert missed_by_scores(SETTING, found, votes, unscored) == []

    def said(**changes: object) -> str:
        [sentence] = missed_by_scores(SETTING, **{"found": found, "votes": votes, "unscored": unscored, **changes})  # type: ignore[arg-type]
        return sentence

    assert "flip reaches 3.040 with scores" in said(found={**found, "flip": {**found["flip"], "scores": 3.04}})
    assert "refuses 3 of 100 honest" in said(votes={**votes, "flip": {**votes["flip"], "scores": judged(refused=3)}})
    dear = {**votes, "nobody": {**votes["nobody"], "scores": judged(losses=2848.0)}}
    assert "scores would take 3.1% of the time that a round of llama-350m trains" in said(votes=dear)
    assert "scores costs 0.7%" in said(unscored={**unscored, "scores": 2.98})
    third = replace(SETTING, clusters=6, hostile=2)
    assert missed_by_scores(third, {**found, "flip": dict.fromkeys(SCORED, 9.0)}, votes, unscored) == [], "a third is not held"


def test_scoring_takes_of_a_preset_s_round_what_its_samples_and_steps_say():
    """Check llama-125m: rounds of 50 steps of 32 sequences, and 8 for a score."""
    assert preset_share("llama-125m", 0.3, 8, 9) == pytest.approx(8 * 0.3 * 8 / 32 / 50)
    assert preset_share("llama-125m", 0.3, 8, 100) == pytest.approx(32 * 0.3 * 8 / 32 / 50), "no more than the committee"
    assert preset_share("tiny", 0.3, 8, 9) == 0, "it does not score"


def test_a_run_is_kept_once_and_goes_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cells, "CELLS", tmp_path)
    monkeypatch.setattr(cells, "kept", dict)
    setting = Setting(4, 1, "sparse", 1, 10, 1)
    wanted = [cell for attack in ("nobody", "flip") for cell in setting.cells(attack, "scores")]
    assert scored([setting], ["nobody", "flip"]) == (["attack"], []), "what was not run has no row"
    run_all(wanted, 1, time.monotonic(), tmp_path)
    assert not list(tmp_path.iterdir()), "the time was over"
    run_all(wanted, 1, folder=tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    run_all(wanted, 1, folder=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    columns, [row] = scored([setting], ["nobody", "flip"])
    assert columns == ["attack", "1 of 4, sparse"]
    clean, harmed = (found(cell) for cell in wanted)
    assert clean is not None
    assert harmed is not None
    assert row == ["flip", f"{harmed['losses'][-1] / clean['losses'][-1] - 1:+.1%}; 2 of 2; 0 of 6"]
    assert clean["fair"]["voices"] == 2 * 4 * 3


def test_what_is_kept_of_a_run_says_what_honest_voters_found():
    """Round, hostile voter, hostile author, gain, cosine, harm."""
    measured = [[1, False, False, 0.5, 0.2, False], [1, False, False, -0.1, 0.05, True], [1, True, False, -1.0, -1.0, True]]
    kept = summary({"losses": [3.0], "refused": ["a copy"], "measured": [*measured, [1, False, True, -9.0, -0.9, True]]})
    assert kept == {"losses": [3.0], "refused": 1, "fair": {"voices": 2, "against": 1, "worse": 1, "cosine": 0.05}}
    assert summary({"losses": [], "refused": [], "measured": []})["fair"]["cosine"] is None


def test_runs_that_differ_have_keys_that_do(tmp_path: Path):
    one = cell("live", "scores", Text("none", tmp_path, "00" * 32))
    assert len({one.key, replace(one, seed=1).key, replace(one, defence="cap").key, replace(one, attack="flip").key}) == 4
    assert one.key == replace(one).key
