"""The registered comparison: equal times, bytes and trials for every arm; the choice sees one held-out set, the report another."""

import math
from dataclasses import replace

import pytest
import torch

from bench.baselines import CocktailSGD
from bench.study.analysis import interval, rows, winner
from bench.study.design import ARMS, CELLS, CENTRE, INNERS, OVERLAPS, PARTS, REFERENCES, Cell, Choice, Trial, drawn
from bench.study.report import DENSE, DENSE_LONG, SPARSE, default, missed
from bench.study.search import EDGE, MOST_EDGES, Budget, beyond, next_parts, next_trials, tuned
from bench.study.trial import Found
from bench.texts import stdlib
from dilocox.node.planning.plan import PAPER_RATIO
from dilocox.protocol.run.tensors import parameter_count

MUON = REFERENCES["muon"]
OURS = "muon | int2 | rebase"
CELL = Cell("small", 4, 1200, 0.016)
BUDGET = Budget(4, 3)


def trial(arm: str, cell: Cell = CELL, seed: int = 0) -> Trial:
    return Trial(cell, arm, drawn(0), seed, stdlib())


def found_of(tuning: float, test: float = 2.0) -> Found:
    return Found(tuning, test, 100, 100.0, 0.01, 10, 5, 0.5, [], 1.0)


class Runs:
    """Finished runs: every trial at once, with the result of `loss`."""

    def __init__(self, loss) -> None:
        self.loss, self.done = loss, dict[str, Found]()

    def known(self, asked: Trial) -> Found | None:
        return self.done.get(asked.key)

    def run(self, cell: Cell, arm: str) -> list[Trial]:
        ran = []
        while missing := next_trials(cell, arm, stdlib(), BUDGET, self.known):
            for each in missing:
                self.done[each.key] = self.loss(each)
            ran += missing
        return ran


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_arm_has_the_time_of_its_cell_and_no_more_bytes(cell: Cell):
    for one in (trial(name, cell) for name, arm in ARMS.items() if arm.has_rounds):
        clock, rounds = one.round, one.run.rounds
        assert abs(rounds.count * clock.seconds - cell.steps) <= clock.seconds / 2 or rounds.count == 1
        sent = 8 * one.definition.fragments * one.clock.method.payload_bytes / parameter_count(one.run.model) / clock.steps
        assert sent <= cell.bits or rounds.inner_steps == cell.steps // 2, "a codec that is too large has two rounds"
        assert one.run.training.total_steps == rounds.count * clock.steps


@pytest.mark.parametrize("bits", [0.016, 0.04])
def test_cocktail_sgd_sends_as_much_as_a_cell_allows_in_every_step_of_its_time(bits: float):
    one = trial("CocktailSGD", replace(CELL, bits=bits))
    size = parameter_count(one.run.model)
    drawn = torch.randn(int(CocktailSGD.DRAWN * size), generator=torch.Generator().manual_seed(7))
    sent = 8 * len(CocktailSGD.message(drawn, one.share)[-1]) / size
    assert sent == pytest.approx(bits, rel=0.03)
    assert one.run.training.total_steps == CELL.steps, "its line is hidden"


def test_fragments_wait_where_the_line_cannot_move_them_in_time():
    one = trial("muon 0.9 | int2 | 2 fragments, rebased")
    assert one.round.waited == 0
    assert one.clock.exchange_seconds < trial("muon 0.9 | int2 | rebase").clock.exchange_seconds, "half of the bytes"
    one = trial("muon 0.9 | int2 | 2 fragments, rebased")
    one.__dict__["clock"] = replace(one.clock, exchange_seconds=100.0)
    assert one.round.seconds == pytest.approx(200.0)
    assert one.round.waited == pytest.approx(200.0 - one.clock.method.inner_steps)


def test_a_reference_is_the_same_whatever_a_line_allows():
    assert trial(MUON).key == trial(MUON, replace(CELL, bits=0.04)).key


def test_who_is_alone_is_the_same_whatever_a_line_allows_and_however_many_others_there_are():
    one = trial("muon | alone")
    others = [trial("muon | alone", replace(CELL, **change)) for change in ({"bits": 0.04}, {"clusters": 8})]
    assert {one.key} == {each.key for each in others}
    assert one.key != trial(MUON).key
    assert one.run == trial(MUON).run, "as many steps, by the same optimizer"
    assert one.clusters == 1


def test_the_site_has_the_proportions_of_the_published_run():
    site, published = trial(OURS).site, trial("adamw | low rank | delayed")
    exchange = published.clock.exchange_seconds / published.run.rounds.inner_steps
    assert exchange == pytest.approx(PAPER_RATIO, rel=0.01)
    assert site == published.site, "everybody's"


def test_draws_are_the_same_for_every_arm_and_momentum_comes_at_a_matched_rate():
    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(3, slow=True).muon_learning_rate < min(drawn(index).muon_learning_rate for index in range(BUDGET.trials))
    asked = {arm: next_trials(CELL, arm, stdlib(), BUDGET, lambda trial: None) for arm in ARMS}
    for slow in (False, True):
        found = {tuple(each.choice for each in trials) for arm, trials in asked.items() if ARMS[arm].slow == slow}
        assert found == {tuple(drawn(index, slow) for index in range(BUDGET.trials))}
    for momentum in (0.0, 0.8):
        outer = Choice(1e-3, 0.02, 1.2, momentum).settings()["outer"]
        assert outer["learning_rate"] / (1 - outer["momentum"]) == pytest.approx(1.2)


def test_a_key_says_all_that_a_result_depends_on():
    one = trial(OURS)
    others = [replace(one, seed=1), replace(one, choice=drawn(1)), replace(one, arm="muon | int4 | rebase")]
    others += [replace(one, cell=replace(CELL, **change)) for change in ({"clusters": 8}, {"bits": 0.04}, {"size": "large"})]
    assert len({each.key for each in [one, *others]}) == 7
    assert replace(one).key == one.key


def test_an_arm_is_tuned_by_equally_many_short_runs_and_reported_by_others():
    for arm in (OURS, "adamw | int4 | none"):
        runs = Runs(lambda each: found_of(abs(each.choice.learning_rate - drawn(2).learning_rate)))
        ran = runs.run(CELL, arm)
        short, long = ran[: BUDGET.trials], ran[BUDGET.trials :]
        assert {each.cell for each in short} == {CELL.shorter()}
        assert [(each.cell, each.seed, each.choice) for each in long] == [(CELL, seed, drawn(2)) for seed in range(3)]


def test_the_choice_does_not_see_the_test_set():
    better = Runs(lambda each: found_of(1.0 if each.choice == drawn(1) else 2.0, test=9.0 if each.choice == drawn(1) else 0.0))
    better.run(CELL, OURS)
    assert tuned(CELL, OURS, stdlib(), BUDGET, better.known).choice == drawn(1)


@pytest.mark.parametrize("arm", [MUON, "muon | alone"])
def test_what_others_are_held_against_is_tuned_until_its_best_lies_inside_what_was_tried(arm: str):
    def bowl(each: Trial) -> Found:
        off = math.log(each.choice.learning_rate / 0.05) ** 2 + math.log(each.choice.muon_learning_rate / 0.03) ** 2
        return found_of(1 + off)

    runs = Runs(bowl)
    ran = runs.run(CELL, arm)
    best = tuned(CELL, arm, stdlib(), BUDGET, runs.known)
    assert best.tried > BUDGET.trials
    assert not best.at_edge
    assert len(ran) == best.tried + BUDGET.seeds
    assert max(drawn(index).learning_rate for index in range(BUDGET.trials)) < best.choice.learning_rate < 0.1

    endless = Runs(lambda each: found_of(-each.choice.learning_rate))
    endless.run(CELL, arm)
    assert tuned(CELL, arm, stdlib(), BUDGET, endless.known).at_edge, "it says so"
    assert tuned(CELL, arm, stdlib(), BUDGET, endless.known).tried == BUDGET.trials + MOST_EDGES

    others = Runs(lambda each: found_of(-each.choice.learning_rate))
    assert len(others.run(CELL, OURS)) == BUDGET.trials + BUDGET.seeds, "who uses the line has no more"


@pytest.mark.parametrize(("arm", "outer"), [(OURS, True), (MUON, False), ("muon | alone", False), ("CocktailSGD", False)])
def test_an_outer_rate_at_an_edge_is_an_edge_of_who_has_one(arm: str, outer: bool):
    inside = Choice(0.003, 0.02, 1.0, 0.4)
    around = [Choice(0.002, 0.01, 0.9, 0.4), Choice(0.004, 0.03, 1.1, 0.0)]
    assert beyond(arm, [inside, *around], inside) is None
    for rate, further in ((1.2, 1.2 * EDGE), (0.8, 0.8 * (1 / EDGE))):
        best = replace(inside, steady_rate=rate)
        found = beyond(arm, [best, *around], best)
        assert found == (replace(best, steady_rate=further) if outer else None)


def test_a_run_that_diverged_is_never_the_best():
    runs = Runs(lambda each: found_of(1e3 if each.choice == drawn(0) else 2.0))
    runs.run(CELL, OURS)
    assert tuned(CELL, OURS, stdlib(), BUDGET, runs.known).choice != drawn(0)


def test_intervals_are_student_s():
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert interval([1.0]) == math.inf


def of_losses(losses: dict[str, float]) -> Runs:
    runs = Runs(lambda each: found_of(1.0, losses[each.arm] + 0.001 * each.seed))
    for arm in losses:
        runs.run(CENTRE, arm)
    return runs


def test_gaps_are_to_the_reference_with_the_same_inner_optimizer():
    losses = {MUON: 1.0, "AllReduce": 2.0, OURS: 1.1, "adamw | int2 | none": 2.5, "muon | alone": 1.05}
    runs = of_losses(losses)
    of_cell = rows(CENTRE, [*losses, DENSE], stdlib(), BUDGET, runs.known)
    gaps = {row.arm: row.gap for row in of_cell}
    assert gaps[OURS] == pytest.approx(0.1, rel=0.01)
    assert gaps["adamw | int2 | none"] == pytest.approx(0.25, rel=0.01)
    assert gaps["muon | alone"] == pytest.approx(0.05, rel=0.01)
    (alone,) = rows(CENTRE, [OURS], stdlib(), BUDGET, runs.known)
    assert alone.gap == gaps[OURS], "the reference is looked at, too"
    assert (first := winner(of_cell)) is not None
    assert first.arm == OURS, "a reference wins nothing, nor who is alone"


@pytest.mark.parametrize(("ours", "rival", "count"), [(1.02, 1.1, 0), (1.04, 1.1, 1), (1.02, 1.01, 1), (1.2, 1.1, 2)])
def test_bars(monkeypatch: pytest.MonkeyPatch, ours: float, rival: float, count: int):
    arm = default(CENTRE)
    losses = {REFERENCES[ARMS[arm].inner]: 1.0, arm: ours, "muon | int4 | none": rival}
    by_cell = {CENTRE: rows(CENTRE, list(losses), stdlib(), BUDGET, of_losses(losses).known)}
    assert len(missed({CENTRE: []})) == 2, "what is not known is not met"
    assert any("of which 0 are finished" in sentence for sentence in missed(by_cell)), "nor is a cell of a few arms finished"
    monkeypatch.setattr("bench.study.report.ARMS", dict.fromkeys(losses))
    assert any(f" of {len(CELLS)} cells, of which 1 are" in each for each in missed(by_cell))
    monkeypatch.setattr("bench.study.report.CELLS", [CENTRE])
    assert len(missed(by_cell)) == count


@pytest.mark.parametrize(
    ("steps", "bits", "arm"),
    [
        (600, 0.016, DENSE),
        (1200, 0.04, DENSE),
        (1200, 0.1, SPARSE),
        (1200, 0.2, SPARSE),
        (3000, 0.016, DENSE_LONG),
        (3000, 0.04, DENSE_LONG),
        (3000, 0.2, DENSE_LONG),
    ],
)
def test_what_presets_take_of_a_cell_s_length_and_line(steps: int, bits: float, arm: str):
    assert default(replace(CELL, steps=steps, bits=bits)) == arm


@pytest.mark.parametrize("arm", ARMS)
def test_what_presets_have_beside_is_no_part_of_an_arm(arm: str):
    """Check it, because keys of stored runs would change."""
    run, definition = trial(arm).run, ARMS[arm]
    assert run.rounds.lead_weight == OVERLAPS[definition.overlap].get("lead_weight", 0.5)
    assert run.training.muon_momentum == INNERS[definition.inner]["muon_momentum"]


@pytest.mark.parametrize("arm", [OURS, DENSE, "adamw | low rank | delayed"])
def test_parts_of_a_gap_have_the_phases_of_the_whole(arm: str):
    whole = trial(arm)
    local, codec = (replace(whole, part=part) for part in PARTS[:2])
    for part in (local, codec):
        assert part.run.rounds.overlap == "none", "nothing is late"
        assert not part.is_timed
        assert part.run.rounds.inner_steps == whole.clock.round.steps
        assert part.run.rounds.count == whole.run.rounds.count
        assert part.run.training == whole.run.training
        assert part.run.outer == whole.run.outer
    assert local.run.compression.codec == "fp32"
    assert codec.run.compression == whole.run.compression
    assert len({whole.key, local.key, codec.key}) == 3


def test_arms_are_held_against_one_another_seed_by_seed():
    """Check seeds that differ more than the arms, and by the same amount for both."""
    losses = {MUON: 2.0, OURS: 2.2, "muon | int4 | none": 2.42, "muon | alone": 2.0}
    runs = Runs(lambda each: found_of(1.0, losses[each.arm] * (1 + 0.2 * each.seed)))
    for arm in losses:
        runs.run(CELL, arm)
    found = {row.arm: row for row in rows(CELL, list(losses), stdlib(), BUDGET, runs.known)}
    assert found[OURS].half_width > 0.5
    for arm, gap, behind in ((OURS, 0.1, 0.0), ("muon | int4 | none", 0.21, 0.1)):
        row = found[arm]
        assert [row.gap, row.gap_half_width] == pytest.approx([gap, 0.0])
        assert [row.behind, row.behind_half_width] == pytest.approx([behind, 0.0])
    assert found["muon | alone"].behind is None


def test_nothing_that_a_key_leaves_out_has_changed():
    """Check omitted defaults: if one of these changes, stored results belong to another run."""
    one = trial("muon, slow | int2 | rebase, whole lead", CENTRE).run
    said = one.model_dump(mode="json", exclude_defaults=True)
    left = {
        section: {key: value for key, value in one.model_dump(mode="json")[section].items() if key not in said.get(section, {})}
        for section in ("model", "training", "outer", "compression", "rounds")
    }
    assert left["model"]["initial"] is None
    config = one.model.config.model_dump(exclude=set(said["model"]["config"]))
    assert config.pop("rope_parameters").items() >= {"rope_type": "default", "rope_theta": 10000.0}.items()
    assert config == {"sliding_window": None, "rms_norm_eps": 1e-06, "attention_bias": False, "mlp_bias": False}
    assert left["training"] == {
        "muon_momentum": 0.95,
        "weight_decay": 0.1,
        "gradient_clip": 1.0,
        "schedule": "1f1b",
        "checkpoint_activations": False,
        "precision": "auto",
    }
    assert left["outer"] == {"aggregate": "mean"}
    assert left["compression"]["adapt"] == "fixed"
    assert {key: left["rounds"][key] for key in ("synchronous_rounds", "clip_ratio", "tensor_clip_ratio", "weight_cap")} == {
        "synchronous_rounds": 0,
        "clip_ratio": 2.0,
        "tensor_clip_ratio": 1.25,
        "weight_cap": 1.0,
    }


def test_parts_add_up_to_the_gap():
    losses = {"local steps": 1.04, "codec": 1.05, "": 1.08}
    runs = Runs(lambda each: found_of(1.0, 1.0 if each.arm == MUON else losses[each.part]))
    for arm in (MUON, OURS):
        runs.run(CENTRE, arm)
    known = (CENTRE, OURS, stdlib(), BUDGET, runs.known)
    assert next(row for row in rows(CENTRE, [MUON, OURS], stdlib(), BUDGET, runs.known) if row.arm == OURS).parts == {}
    for each in next_parts(*known)[: BUDGET.seeds]:
        assert each.part == "local steps", "these come first"
        runs.done[each.key] = runs.loss(each)
    (half,) = (row for row in rows(CENTRE, [OURS], stdlib(), BUDGET, runs.known))
    assert half.parts == {"local steps": pytest.approx(0.04)}, "what is known is said"
    for each in next_parts(*known):
        runs.done[each.key] = runs.loss(each)
    assert next_parts(*known) == []
    (row,) = (row for row in rows(CENTRE, [MUON, OURS], stdlib(), BUDGET, runs.known) if row.arm == OURS)
    assert row.parts == {part: pytest.approx(share) for part, share in zip(PARTS, (0.04, 0.01, 0.03), strict=True)}
    assert sum(row.parts.values()) == pytest.approx(row.gap)
    for arm in (MUON, "CocktailSGD", "muon | int2 | none"):
        assert next_parts(CENTRE, arm, *known[2:]) == [], "it has no exchange that it hides"
