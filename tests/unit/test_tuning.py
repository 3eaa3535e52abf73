"""Rows of the paper's table are tuned alike, on nothing that the table reports."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import methods, reproduce, tuning
from bench.methods import METHOD, METHODS, Scale
from bench.texts import stdlib
from dilocox.node.training.model.data import load_dataset
from dilocox.protocol.errors import ConfigError


@pytest.fixture
def scale() -> Scale:
    return Scale("", 2, 625, 10, 0.08, None, stdlib())


def test_each_part_of_each_range_is_drawn_once():
    found = tuning.drawn()
    assert found == tuning.drawn()
    outer = [each["outer"]["learning_rate"] / (1 - each["outer"]["momentum"]) for each in found]
    columns = [[each["training"][key] for each in found] for key in ("learning_rate", "muon_learning_rate")] + [outer]
    for (low, high), values in zip(tuning.RANGES, columns, strict=True):
        parts = [low * (high / low) ** (part / tuning.DRAWS) for part in range(tuning.DRAWS + 1)]
        for bottom, top, value in zip(parts, parts[1:], sorted(values), strict=False):
            assert 0.99 * bottom <= value <= 1.01 * top


@pytest.mark.parametrize("method", [method for method in METHODS if not method.like], ids=lambda method: method.name)
def test_every_row_tries_as_many_settings_in_the_run_that_it_is(scale: Scale, method: methods.Method):
    tried = tuning.trials(scale, method)
    assert len({trial.key for trial in tried}) == len(tried) == 1 + tuning.DRAWS
    run = scale.manifest(method, tried[1].settings)
    for trial in tried:
        whole = trial.run.rounds.inner_steps * trial.run.rounds.count
        assert scale.steps - trial.run.rounds.inner_steps < whole <= scale.steps
        assert (trial.run.compression, trial.run.training.total_steps) == (run.compression, scale.steps)
        assert trial.run.data.seed != run.data.seed
        assert trial.run.model.seed != run.model.seed


@pytest.mark.parametrize(("name", "rates"), [("AllReduce", 1), ("AllReduce (Muon)", 2), ("DiLoCoX", 1), ("ours", 2)])
def test_a_rate_at_an_edge_is_moved_on(scale: Scale, name: str, rates: int):
    def beyond(*tried: tuple[float, float, float]) -> tuple[float, float, float] | None:
        """Return the next rates for trials with these rates, inner and outer / (1 - momentum); the first is the best."""
        made = [
            {
                "training": {"learning_rate": inner, "muon_learning_rate": muon},
                "outer": {"learning_rate": outer / 2, "momentum": 0.5},
            }
            for inner, muon, outer in tried
        ]
        trials = [tuning.trial(scale, METHOD[name], settings) for settings in made]
        found = tuning.beyond(trials, trials[0])
        return None if found is None else (*found["training"].values(), found["outer"]["learning_rate"] * 2)

    middle = 1.0
    assert beyond((0.002, 0.02, middle), (0.003, 0.01, 0.9), (0.004, 0.03, 1.1)) == pytest.approx((0.00141, 0.02, middle))
    assert beyond((0.004, 0.02, middle), (0.003, 0.01, 0.9), (0.002, 0.03, 1.1)) == pytest.approx((0.00566, 0.02, middle))
    inside = beyond((0.003, 0.02, middle), (0.004, 0.01, 0.9), (0.002, 0.015, 1.1))
    assert inside == (None if rates == 1 else pytest.approx((0.003, 0.02828, middle), abs=1e-4))
    rounds = METHOD[name].kind == "swarm"
    for outer, further in ((1.2, 1.697), (0.8, 0.566)):
        found = beyond((0.003, 0.02, outer), (0.004, 0.01, 0.9), (0.002, 0.03, 1.1))
        assert found == (pytest.approx((0.003, 0.02, further), abs=2e-3) if rounds else None)


def test_none_of_the_table_s_sequences_is_looked_at(scale: Scale):
    run = scale.manifest(METHOD["DiLoCoX"])
    told, _ = load_dataset(run, scale.text.folder).evaluation()
    doubled = tuning.with_aside(run)
    looked_at, _ = tuning.aside(doubled, load_dataset(doubled, scale.text.folder))
    assert len(looked_at) == len(told)
    assert not {tuple(row) for row in looked_at.tolist()} & {tuple(row) for row in told.tolist()}
    more = tuning.merged(doubled, {"data": {"evaluation_sequences": 10**6}})
    with pytest.raises(ConfigError, match="half of them are the table's"):
        tuning.aside(more, load_dataset(more, scale.text.folder))


def test_a_row_trains_with_what_was_best(scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    best = {"training": {"learning_rate": 0.0071}, "outer": {"learning_rate": 0.6, "momentum": 0.4}}
    rows = {method.name: {"chosen": best} for method in METHODS if not method.like}
    (tmp_path / f"{methods.TUNED}.json").write_text(json.dumps({"results": {"scale": scale.tuned_for, "rows": rows}}))
    monkeypatch.setattr(methods, "RESULTS", tmp_path)
    for method in METHODS:
        run = scale.manifest(method)
        assert (run.training.learning_rate, run.outer.learning_rate, run.outer.momentum) == (0.0071, 0.6, 0.4)
    assert reproduce.without_settings(scale, METHODS) == []
    assert "ours: not tuned" in reproduce.without_settings(replace(scale, clusters=3), [METHOD["ours"]])[0]
    others = scale.manifest(METHOD["ours"], {})
    assert others.training.learning_rate != 0.0071
    assert others.training.muon_momentum == 0.9
    assert replace(scale, steps=700).manifest(METHOD["ours"]).training.learning_rate == 0.0071
    assert replace(scale, step_seconds=0.1).manifest(METHOD["ours"]) == scale.manifest(METHOD["ours"]), "the line goes with it"
    for other in (replace(scale, clusters=3), replace(scale, line=1e6)):
        assert other.manifest(METHOD["ours"]).training.learning_rate != 0.0071, "settings of another scale are none of this one"
    unheard_of = replace(METHOD["OpenDiLoCo"], name="a new row")
    assert scale.manifest(unheard_of).training.learning_rate == 0.003, "what won before, until it is tuned"
