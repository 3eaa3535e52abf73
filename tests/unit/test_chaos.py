"""Tests of the decisions and counts of `bench.chaos`, without a process."""

import itertools
from dataclasses import replace

import pytest

from bench.chaos.loss import Closed, Happened, Price, Sample, Verdict, kept, misses, moments, price, rate
from bench.chaos.schedule import COORDINATOR, REST_SECONDS, Fault, cut_pairs, plan

NODES = ["node-1", "node-2", "node-3"]
RATE, ROUND = 4.0, 10.0
"""Steps a second; seconds of a round."""
STEPS = int(RATE * ROUND)


def test_a_seed_is_a_schedule_and_every_fault_has_its_turn():
    faults = plan(3, 60, NODES, 30)
    assert faults == plan(3, 60, NODES, 30) != plan(4, 60, NODES, 30)
    for before, after in itertools.pairwise(faults):
        assert after.at >= before.at + before.seconds + REST_SECONDS, "one after the other"
    kinds = {(fault.kind, fault.targets == (COORDINATOR,), len(fault.targets)) for fault in faults}
    assert {("kill", False, 1), ("kill", True, 1), ("kill", False, len(NODES)), ("kill", False, len(NODES) + 1)} <= kinds
    assert {kind for kind, _, _ in kinds} == {
        "kill",
        "kill_child",
        "stop_worker",
        "hang_worker",
        "cut",
        "slow",
        "fill_disk",
        "damage",
        "damage_live",
    }


def test_clocks_are_stepped_where_they_can_be():
    stepped = [fault for fault in plan(3, 60, NODES, 30, clocks=True) if fault.kind == "step_clock"]
    assert {(fault.targets == (COORDINATOR,), fault.detail) for fault in stepped} == set(
        itertools.product((True, False), ("+3600", "-3600"))
    )


def test_rounds_closed_when_they_did_whatever_the_coordinator_s_wall_clock_said():
    """Check a stepped clock: the coordinator never reports an earlier time than before. After a step back its time stops,
    and also when an hour ahead is corrected."""
    lasted = [0.0, 10.0, 10.0, 10.0, 10.0]
    assert moments([100, 110, 120, 130, 140], lasted) == [100, 110, 120, 130, 140]
    assert moments([100, 3710, 3720, 3720, 3720], lasted) == [100, 110, 120, 130, 140]
    assert moments([100, 110, 110, 130, 140], lasted) == [100, 110, 120, 130, 140]
    assert moments([100, 110, 150, 160, 170], lasted) == [100, 110, 150, 160, 170], "a log was damaged, its round began anew"


def test_cuts_are_of_directions():
    off = Fault("cut", ("node-1",), detail="off")
    assert cut_pairs(off, ["c", "node-1", "n"]) == {("node-1", "c"), ("c", "node-1"), ("node-1", "n"), ("n", "node-1")}
    assert cut_pairs(replace(off, detail="outgoing"), ["c", "node-1"]) == {("node-1", "c")}
    assert cut_pairs(replace(off, detail="incoming"), ["c", "node-1"]) == {("c", "node-1")}
    half = cut_pairs(Fault("cut", ("a", "b"), detail="half"), ["c", "a", "b", "d"])
    assert ("a", "b") not in half
    assert ("c", "d") not in half
    assert {("a", "c"), ("c", "a"), ("b", "d")} <= half


def steady(until: float, waits: tuple[float, float] = (0.0, 0.0), off: tuple[float, float] = (0.0, 0.0)) -> list[Sample]:
    """Return a sample each second of a node that trains at the pace, except for a stretch in which it waits, or is off the
    roster."""
    samples, steps = [], 0.0
    for second in range(int(until) + 1):
        number, within = divmod(second, ROUND)
        samples.append(Sample(second, round(steps), 1 + int(number), round(within * RATE), not off[0] <= second < off[1]))
        steps += 0 if waits[0] <= second < waits[1] else RATE
    return samples


def rounds(until: float, missed: dict[int, set[str]] | None = None, later: dict[int, int] | None = None) -> list[Closed]:
    """Return closed rounds. `later`: steps of earlier phases that a round counts of node-1."""
    made = []
    for number in range(1, 1 + int(until / ROUND)):
        counted = {n: STEPS for n in NODES if n not in (missed or {}).get(number, set())}
        settled = {n: steps + ((later or {}).get(number, 0) if n == "node-1" else 0) for n, steps in counted.items()}
        made.append(Closed(number, number * ROUND, frozenset(NODES), counted, settled))
    return made


def kill(node: str, at: float) -> Happened:
    return Happened(Fault("kill", (node,), 4.0, at=at), at, at + 4)


def test_a_node_that_loses_nothing_loses_nothing():
    samples = steady(120)
    assert rate(samples, 3.5, 60) == pytest.approx(RATE)
    (one,) = price("node-1", RATE, samples, [kill("node-2", 20)], rounds(120), 80)
    assert (one.window, one.rounds) == (60, 0)
    assert one.lost == pytest.approx(0)
    assert not misses(Verdict([one], 1, [], []))


def test_seconds_without_steps_and_steps_that_nobody_counted_are_lost():
    happened = [kill("node-2", 20), kill("node-3", 50)]
    waiting = price("node-1", RATE, steady(120, waits=(31, 34)), happened, rounds(120), 80)
    assert [each.waited for each in waiting] == pytest.approx([3, 0])
    assert misses(Verdict(waiting, 1, [], []))[-1] == "kill -9 of node-2 cost node-1 0 rounds and 3.0 s"
    missing = price("node-1", RATE, steady(120), happened, rounds(120, {6: {"node-1"}}), 80)
    assert [each.rounds for each in missing] == [0, 1]
    assert missing[1].uncounted == pytest.approx(ROUND, abs=2)
    assert kept(missing) == pytest.approx(1 - ROUND / 60, abs=0.03)
    in_the_next = price("node-1", RATE, steady(120), happened, rounds(120, {6: {"node-1"}}, {7: STEPS}), 80)
    assert [(each.rounds, each.uncounted) for each in in_the_next] == [(0, 0), (1, 0)]
    half = price("node-1", RATE, steady(120), happened, rounds(120, {6: {"node-1"}, 7: {"node-1"}}, {8: STEPS}), 80)
    assert half[1].uncounted == pytest.approx(ROUND, abs=2)
    sent_away = price("node-1", RATE, steady(120, off=(30, 40)), happened, rounds(120), 80)
    assert [each.uncounted for each in sent_away] == pytest.approx([10, 0])


def test_a_generation_that_begins_anew_counts_from_nothing():
    samples = [Sample(0, 100, 1, 0, True), Sample(10, 140, 2, 0, True), Sample(20, 12, 3, 0, True)]
    assert rate(samples, 0, 20) == pytest.approx(52 / 20)


def test_who_suffers_from_a_fault_of_its_own_is_no_measure_of_others():
    """Check the window: it ends with a counted round that opened after the repair, because the next round may include
    earlier work."""
    happened = [kill("node-1", 20), kill("node-2", 42), kill("node-3", 55), kill("node-2", 75)]
    missed = {3: {"node-1"}, 4: {"node-1"}}
    prices = price("node-1", RATE, steady(120), happened, rounds(120, missed), 100)
    assert [each.fault.targets for each in prices] == [("node-3",), ("node-2",)], "it was counted again at 50 s"
    never = price("node-1", RATE, steady(120), happened, rounds(120, {n: {"node-1"} for n in range(3, 13)}), 100)
    assert never == []


def test_every_bar_has_its_sentence():
    fine = Price(kill("node-2", 0).fault, "node-1", 30.0, 0.1, 0, 0.0)
    assert misses(Verdict([fine], 1, [], [])) == []
    assert misses(Verdict([fine], 2, ["p2pd of node-1"], ["node-3 ended"])) == [
        "node-3 ended",
        "2 chains",
        "these outlived their daemon: p2pd of node-1",
    ]
    dear = replace(fine, rounds=1, uncounted=10.0)
    assert misses(Verdict([dear], 1, [], [])) == [
        "who was not hit kept 66.33% of the faultless tokens, less than 99%",
        "kill -9 of node-2 cost node-1 1 rounds and 10.1 s",
    ]
    of_all = replace(fine, fault=Fault("cut", (COORDINATOR,)), waited=2.5, window=300.0)
    assert misses(Verdict([of_all], 1, [], [])) == []
