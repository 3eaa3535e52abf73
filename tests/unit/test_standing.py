"""Tests of reputation: how identities earn it, and its effect on votes, draws, medians, weights and seats."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.consensus import chain, reputation, rules, weighting
from dilocox.protocol.consensus.head import Cluster
from dilocox.protocol.consensus.reputation import Record
from dilocox.protocol.norms import lower_median
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import Table, identity, manifest

ROUNDS = 32
FIRST, LOST = ROUNDS // 16, ROUNDS // 4


def run_of(**sections: dict[str, object]) -> Manifest:
    return manifest(standing={"rounds": ROUNDS}, **sections)


RUN = run_of()


def name(number: int) -> str:
    return identity(number).peer


def earned(table: Table) -> dict[int, int]:
    """Return the earned rounds by number of the cluster."""
    return {number: record.earned for number in range(12) if (record := table.head.standings.get(name(number)))}


def after(
    records: dict[str, Record],
    counted: Iterable[str] = (),
    excluded: dict[str, pb.Reason] | None = None,
    seated: Iterable[str] | None = None,
    lacking: Iterable[str] = (),
) -> dict[str, Record]:
    """Return the records after a commit that counts these of the clusters with records."""
    roster, found = set(records if seated is None else seated), {"lacking": set(lacking)}
    return reputation.after(RUN, records, set(counted), excluded or {}, found, set(lacking), roster, genesis=False)


@pytest.mark.parametrize(("policy", "rounds"), [("open", 64), ("allow-list", 0)])
def test_standing_is_earned_in_open_runs(policy: str, rounds: int):
    run = manifest(admission={"policy": policy, "allow": [name(0)]}, rounds={"start_clusters": 1, "min_clusters": 1})
    assert run.standing.rounds == rounds
    assert reputation.say(run, {"a": Record(17)}, "a") == (17 if rounds else 1)
    assert reputation.say(run, {}, "a") == (4 if rounds else 1)


def test_founders_stand_fully_and_a_newcomer_earns_it():
    table = Table(RUN).genesis()
    assert earned(table) == dict.fromkeys(range(3), ROUNDS)
    table.submit(table.claim(3))
    table.train(1)
    assert earned(table) == {**dict.fromkeys(range(3), ROUNDS), 3: FIRST}
    table.train(2, range(4))
    assert earned(table) == {**dict.fromkeys(range(3), ROUNDS), 3: FIRST + 2}
    assert [table.head.standings[name(number)].counted for number in range(4)] == [3, 3, 3, 2]
    table.verify()


@pytest.mark.parametrize(
    ("before", "counted", "why", "expected"),
    [
        (ROUNDS, True, None, ROUNDS),
        (9, True, None, 10),
        (9, False, pb.REASON_LATE, 8),
        (9, False, pb.REASON_WRONG_BASE, 8),
        (9, False, pb.REASON_COPIED, 8),
        (FIRST, False, pb.REASON_ABSENT, FIRST),
        (1, False, pb.REASON_ABSENT, 1),
        (1, True, None, 2),
        (30, False, pb.REASON_HARMS, 30 - LOST),
        (30, False, pb.REASON_NON_FINITE, 30 - LOST),
        (3, False, pb.REASON_HARMS, 1),
        (ROUNDS, False, pb.REASON_EQUIVOCATION, 1),
    ],
)
def test_a_round_earns_or_costs(before: int, counted: bool, why: pb.Reason | None, expected: int):
    found = after({"a": Record(before, 5, 2), "b": Record(7)}, {"b", *("a" if counted else "")}, {"a": why} if why else {})
    blamed = why in (pb.REASON_HARMS, pb.REASON_NON_FINITE, pb.REASON_EQUIVOCATION)
    assert found == {"a": Record(expected, 5 + counted, 2 + blamed), "b": Record(8, 1)}


def test_a_commit_that_counts_nobody_changes_nothing():
    records = {"a": Record(9, 3), "b": Record(1, 0, 4)}
    assert after(records, excluded={"a": pb.REASON_HARMS, "b": pb.REASON_TOO_FEW_CLUSTERS}) == records


def test_who_leaves_keeps_what_it_has_for_a_while():
    records = {"old": Record(FIRST + 3, 20), "new": Record(FIRST, 1), "here": Record(9)}
    found = after(records, {"here"}, seated={"here"})
    assert found == {"old": Record(FIRST + 2, 20), "here": Record(10, 1)}, "a newcomer has nothing to lose"
    assert after(found, {"here"}, seated={"here", "old"})["old"] == Record(FIRST + 1, 20), "it came back"
    for _ in range(2):
        found = after(found, {"here"}, seated={"here"})
    assert found == {"here": Record(12, 3)}
    assert after(found, {"here"}, seated={"here", "old"})["old"] == Record(FIRST)


def test_of_many_who_leave_those_with_the_most_are_remembered():
    many = {f"{number:05}": Record(FIRST + 2 + number % 6) for number in range(limits.AWAY + 50)}
    found = after({**many, "here": Record(9)}, seated={"here"})
    assert len(found) == limits.AWAY + 1
    gone = sorted((many[who].earned, who) for who in many if who not in found)
    assert {points for points, _ in gone} == {FIRST + 2}, "those with the least"


def test_a_harmful_one_that_comes_back_has_not_forgotten():
    table = Table(run_of(rounds={"start_clusters": 4})).genesis(range(4)).train(1, range(4))
    table.contribute(range(4)).vote(range(4), {3: pb.REASON_NORM_MISMATCH})
    assert earned(table)[3] == ROUNDS - LOST
    assert table.head.standings[name(3)].refused == 1
    table.train(1, range(4)).contribute(range(3)).submit(table.leave(3))
    table.vote(range(3))
    assert 3 not in table.roster()
    assert earned(table)[3] == ROUNDS - LOST
    table.submit(table.claim(3))
    table.train(1)
    assert 3 in table.roster()
    assert earned(table)[3] == ROUNDS - LOST - 1
    table.verify()


# Effects of reputation.


def crowd(newcomers: int) -> Table:
    """Return four founders, and these newcomers that got seats as fast as possible."""
    table = Table(run_of(rounds={"start_clusters": 4, "count": 50})).genesis(range(4))
    for number in range(4, 4 + newcomers):
        table.submit(table.claim(number))
        table.train(1, table.roster())
    return table


def test_newcomers_who_are_more_outvote_nobody():
    """Check six newcomers that reject all work of four founders, and would accept any of each other."""
    table = crowd(6)
    everybody = range(10)
    assert sorted(table.roster()) == list(everybody)
    table.contribute(everybody)
    against = dict.fromkeys(range(4), pb.REASON_NON_FINITE)
    for number in everybody:
        theirs = dict.fromkeys(range(4, 10), pb.REASON_NON_FINITE) if number < 4 else against
        table.submit(table.receipt(number, {who: why for who, why in theirs.items() if who != number}))
    assert sorted(table.counted()) == list(range(4))
    table.verify()


def test_those_who_stand_say_what_the_state_is():
    table = crowd(6).train(1, range(10))
    assert table.head.built_by == {name(number) for number in range(10)}
    for number in range(10):
        table.submit(table.report(number, **({"state": bytes(32)} if number >= 4 else {})))
    assert rules.known_state(table.run, table.head, table.state.gathered) == table.state_root()


def test_medians_go_by_standing():
    records = {"old": Record(ROUNDS), **{f"new-{number}": Record(FIRST) for number in range(5)}}
    codes = {"old": 100, **{f"new-{number}": 200 for number in range(5)}}
    median, clips = weighting.clip(RUN, codes, records)
    assert median == 100
    assert all(clips[who] == 200 - 100 - 8 for who in codes if who != "old")


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=9))
def test_a_lower_median_by_weights_is_that_of_so_many_copies(values: list[tuple[int, int]]):
    many = [value for value, weight in values for _ in range(weight)]
    assert lower_median([value for value, _ in values], [weight for _, weight in values]) == lower_median(many)


def test_work_weighs_by_standing_and_the_cap_is_earned():
    run, tokens = run_of(rounds={"weight_cap": 1}), {"a": 1600, "b": 1600, "c": 16000, "d": 16000}
    records = {"a": Record(ROUNDS), "b": Record(FIRST), "c": Record(ROUNDS), "d": Record(ROUNDS, scored=2 * ROUNDS)}
    assert weighting.weights(run, tokens | {"c": 1600}, records) == {"a": 1600, "b": 100, "c": 1600, "d": 4 * 1600}
    assert weighting.weights(run, tokens, {**records, "a": Record(ROUNDS // 2)})["c"] == 16000, "the median is theirs"
    assert weighting.weights(run, {"b": 1, "a": 1600}, records)["b"] == 1, "nobody who counts weighs nothing"
    never = {"a": Record(ROUNDS, 99), "b": Record(ROUNDS, 99), "c": Record(ROUNDS, 99)}
    assert weighting.weights(run, {"a": 1600, "b": 1600, "c": 16000}, never)["c"] == 1600, "nobody measured what it does"
    half = {**records, "d": Record(ROUNDS // 2, scored=ROUNDS)}
    assert weighting.weights(run, tokens | {"c": 1600}, half)["d"] == int(2.5 * 1600) // 2
    assert weighting.weights(run_of(rounds={"weight_cap": 0}), {"d": 99}, records) == {"d": 99}


def test_seats_are_given_by_standing():
    """Check seats: sixteen clusters with full reputation allow two seats a commit; beside them newcomers, however many,
    add none."""
    run = run_of(rounds={"start_clusters": 1, "min_clusters": 1, "count": 99})
    for fully, expected in ((16, 2), (8, 1), (32, 4)):
        table = Table(run).genesis(range(1))
        roster = {str(number): Cluster(str(number), (), 1) for number in range(40)}
        records = {str(number): Record(ROUNDS if number < fully else 1) for number in range(40)}
        head = replace(table.head, roster=roster, standings=records)
        for number in range(1, 9):
            table.submit(table.claim(number))
        seating = chain.seats(run, head, table.state.gathered, {}, set(), True, table.state_root())
        assert len(seating.clusters) == expected


def test_newcomers_who_lurk_stretch_no_deadline():
    table = crowd(6)
    table.now += 7.0
    table.contribute(range(4))
    assert table.state.clock.contributed_at == table.state.clock.opened_at + 7.0
    lurking = crowd(6)
    lurking.contribute(range(4, 10))
    assert lurking.state.clock.contributed_at is None


def test_what_many_identities_pay():
    """Check SECURITY.md's example: eight founders, and unknown peers that take every seat, all counted in every round."""
    run = manifest(rounds={"start_clusters": 8})
    founders, strangers = [f"founder-{number}" for number in range(8)], list[str]()
    records = {who: Record(run.standing.rounds) for who in founders}
    rounds = 0
    while reputation.total(run, records, strangers) <= reputation.total(run, records, founders):
        whole = reputation.total(run, records, records) // run.standing.rounds
        strangers += [
            f"stranger-{rounds}-{seat}" for seat in range(max(run.rounds.min_clusters, whole // chain.NEWCOMER_SHARE))
        ]
        records = reputation.after(run, records, records.keys(), {}, {}, set(), {*founders, *strangers}, genesis=False)
        rounds += 1
    assert rounds == 20


# Findings of a hostile reader.


def test_one_who_stands_above_all_others_stops_no_run_by_refusing_everybody():
    """Check a founder with a broken link, beside newcomers; the other founders are absent."""
    table = crowd(4)
    for number in (1, 2, 3):
        table.submit(table.leave(number))
    table.train(1, table.roster())
    here = table.roster()
    assert earned(table)[0] > sum(earned(table)[number] for number in here if number)
    before = table.head.trained
    table.contribute(here)
    for number in here:
        others = {other: pb.REASON_UNAVAILABLE for other in here if other} if not number else {}
        table.submit(table.receipt(number, others))
    assert table.head.trained == before + 1
    assert set(table.counted()) == set(here)
    table.verify()


def test_nor_by_holding_another_state():
    table = crowd(4)
    for number in (1, 2, 3):
        table.submit(table.leave(number))
    table.train(2, table.roster())
    here, root = table.roster(), table.state_root()
    for number in here:
        table.submit(table.report(number, **({} if number else {"state": bytes(32)})))
    assert rules.known_state(table.run, table.head, table.state.gathered) != bytes(32)
    for number in here:
        table.submit(table.contribution(number, base_state=root if number else bytes(32)))
    table.vote(here)
    assert set(table.counted()) == set(here) - {0}


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 99), min_size=1, max_size=6))
def test_nobody_weighs_more_than_all_others(says: dict[str, int]):
    capped = reputation.capped(says)
    assert all(0 < capped[who] <= says[who] for who in says)
    for who in says if len(says) > 1 else ():
        assert capped[who] <= sum(says.values()) - says[who]


@pytest.mark.parametrize("lie", [pb.REASON_EQUIVOCATION, pb.REASON_HARMS, pb.REASON_LATE])
def test_what_only_the_chain_shows_is_no_finding_of_a_voter(lie: pb.Reason):
    table = crowd(2).contribute(range(6))
    listed = table.state.gathered.listed()
    for number in range(1, 6):
        silent = rules.bits([who not in (name(0), name(number)) for who in listed])
        table.submit(table.receipt(number, {0: lie}) if number > 3 else table.receipt(number, accepted=silent))
    table.submit(table.receipt(0))
    assert table.why(0) == pb.REASON_TOO_FEW_ACCEPTS
    assert earned(table)[0] == ROUNDS - 1


def test_why_somebody_is_refused_is_said_by_standing():
    table = crowd(5).contribute(range(9))
    for number in range(9):
        reason = pb.REASON_NORM_MISMATCH if number < 4 else pb.REASON_UNAVAILABLE
        table.submit(table.receipt(number, {0: reason} if number else {}))
    assert table.why(0) == pb.REASON_NORM_MISMATCH
    assert table.head.standings[name(0)].refused == 1


def test_founders_are_whom_the_manifest_names():
    run = run_of(admission={"allow": [name(0), name(1)]}, rounds={"start_clusters": 2})
    table = Table(run).genesis()
    assert earned(table) == {0: ROUNDS, 1: ROUNDS}, "nobody else begins the run"
    table.submit(table.claim(2))
    table.train(1, range(2))
    assert earned(table)[2] == FIRST


def test_who_left_with_standing_takes_no_newcomer_s_place():
    table = crowd(2)
    table.submit(table.leave(3))
    table.train(1, table.roster())
    assert 3 not in table.roster()
    for number in range(30, 60):
        table.submit(table.claim(number))
    table.submit(table.claim(3))
    table.train(1, table.roster())
    assert 3 in table.roster()
    assert len([number for number in table.roster() if number >= 30]) == table.run.rounds.min_clusters
    table.verify()


@pytest.mark.parametrize("healed", [False, True])
def test_silent_newcomers_keep_no_coordinator_from_starting_again(healed: bool):
    table = crowd(6)
    table.feed(round_machine.Resumed(healed=healed))
    table.present(0, 1, 2)
    table.contribute(range(3))
    assert round_machine.phase_of(table.state) != "starting"
