"""Counting a round, from votes to exclusions: every number and every sentence."""

from collections.abc import Sequence

import pytest

from dilocox.protocol.checks import score_rules
from dilocox.protocol.consensus import rules
from dilocox.protocol.consensus.tally import Tally, tally
from dilocox.protocol.consensus.weighting import clip
from dilocox.protocol.norms import norm_code
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement
from tests.helpers import Table, digest, identity, manifest


def name(number: int) -> str:
    return identity(number).peer


def opened(clusters: int, least: int = 2, clip_ratio: float = 2.0, voters: int = 0) -> Table:
    """Return the second round, with all clusters: no report has named its state yet."""
    numbers = range(clusters)
    rounds = {"min_clusters": least, "start_clusters": clusters, "clip_ratio": clip_ratio}
    run = manifest(rounds=rounds, scoring={"voters": voters})
    return Table(run).genesis(numbers).train(1, numbers)


def count(table: Table, *statements: Statement, absent: Sequence[int] = ()) -> Tally:
    gathered = table.state.gathered
    for statement in statements:
        _, gathered = rules.judge(table.run, table.head, gathered, statement)
    return tally(table.run, table.head, gathered, [name(number) for number in absent])


def receipt(table: Table, number: int, silent: Sequence[int] = ()) -> Statement:
    """Return a vote that accepts all but its own contribution and, without a reason, the `silent` ones."""
    peers = {name(other) for other in (number, *silent)}
    return table.receipt(number, accepted=rules.bits([peer not in peers for peer in table.state.gathered.listed()]))


def why(result: Tally) -> dict[str, tuple[int, str]]:
    assert [item.peer for item in result.excluded] == sorted(item.peer for item in result.excluded)
    return {item.peer: (item.reason, item.detail) for item in result.excluded}


@pytest.mark.parametrize(
    ("clusters", "votes", "counts"),
    [(2, 0, False), (2, 1, True), (3, 0, False), (3, 1, True), (4, 1, False), (4, 2, True), (5, 1, False), (5, 2, True)],
)
def test_half_of_the_others_and_at_least_one(clusters: int, votes: int, counts: bool):
    table = opened(clusters, least=1).contribute(range(clusters))
    receipts = [receipt(table, 0)] + [receipt(table, n, silent=[] if n <= votes else [0]) for n in range(1, clusters)]
    result = count(table, *receipts)
    assert set(result.counted) == {name(number) for number in range(clusters) if number or counts}
    excluded = {} if counts else {name(0): (pb.REASON_TOO_FEW_ACCEPTS, f"{votes} of {clusters - 1} accepted it")}
    assert why(result) == excluded


HARM = {0: pb.REASON_HARMS}


@pytest.mark.parametrize(("harmed", "counts"), [(2, True), (3, False), (7, False)])
def test_where_all_score_a_third_may_find_harm(harmed: int, counts: bool):
    table = opened(8, voters=32).contribute(range(8))
    result = count(table, *(table.receipt(n, HARM if 0 < n <= harmed else None) for n in range(8)))
    told = f"{harmed} of the 7 who were drawn to score it and did found that it harms"
    excluded = {} if counts else {name(0): (pb.REASON_HARMS, told)}
    assert why(result) == excluded
    assert (name(0) in result.counted) == counts


@pytest.mark.parametrize("theirs", [True, False])
def test_what_harms_is_said_by_those_who_were_drawn_to_score_it(theirs: bool):
    table = opened(9, voters=2).contribute(range(9))
    assert table.state.gathered.ballot is not None
    listed = dict.fromkeys(table.state.gathered.listed(), 64)
    committees = {n: score_rules.committee(table.run, table.state.gathered.ballot, name(n), listed) for n in range(9)}
    author = next(number for number, drawn in committees.items() if len(drawn) == 2)
    others = [number for number in range(9) if number != author]
    against = [number for number in others if (name(number) in committees[author]) == theirs][:2]
    harm = {author: pb.REASON_HARMS}
    result = count(table, *(table.receipt(number, harm if number in against else None) for number in range(9)))
    told = "2 of the 2 who were drawn to score it and did found that it harms"
    assert why(result) == ({name(author): (pb.REASON_HARMS, told)} if theirs else {})


@pytest.mark.parametrize("clusters", [2, 3])
def test_one_who_finds_harm_in_everybody_stops_no_run(clusters: int):
    """Reproduce a fault: one of three rejected both others, and no round ever counted any."""
    table = opened(clusters, voters=32).contribute(range(clusters))
    everybody = dict.fromkeys(range(1, clusters), pb.REASON_HARMS)
    result = count(table, table.receipt(0, everybody), *(table.receipt(n) for n in range(1, clusters)))
    assert why(result) == {}


def test_what_was_not_measured_is_no_opinion():
    """Check seven voters of which five had no time: two decide."""
    table = opened(8, voters=32).contribute(range(8))
    silent = [table.receipt(number, measured=b"") for number in range(3, 8)]
    result = count(table, *(table.receipt(number, HARM if number else None) for number in range(3)), *silent)
    assert why(result) == {name(0): (pb.REASON_HARMS, "2 of the 2 who were drawn to score it and did found that it harms")}


def test_what_cannot_be_had_is_no_harm():
    table = opened(4, voters=32).contribute(range(4))
    gone = {0: pb.REASON_UNAVAILABLE}
    result = count(table, table.receipt(0), table.receipt(1, gone), table.receipt(2, gone), table.receipt(3))
    assert why(result) == {name(0): (pb.REASON_UNAVAILABLE, "2 of 3 voters: unavailable")}


@pytest.mark.parametrize(("votes", "counts"), [(1, False), (2, True)])
def test_who_leaves_need_not_vote_and_is_judged_by_all_who_do(votes: int, counts: bool):
    table = opened(4).contribute(range(4))
    receipts = [receipt(table, number, silent=[] if number <= votes else [0]) for number in range(1, 4)]
    result = count(table, table.leave(0), *receipts)
    excluded = {} if counts else {name(0): (pb.REASON_TOO_FEW_ACCEPTS, "1 of 3 accepted it")}
    assert why(result) == excluded
    assert len(result.counted) == 3 + counts


@pytest.mark.parametrize("votes", [True, False])
@pytest.mark.parametrize("least", [1, 2])
def test_a_lone_contribution_counts_only_in_a_run_of_one(least: int, votes: bool):
    table = opened(2, least=least).contribute(range(2))
    result = count(table, receipt(table, 0) if votes else table.leave(0))
    silent = {name(1): (pb.REASON_DID_NOT_VOTE, "")}
    alone = {name(0): (pb.REASON_TOO_FEW_CLUSTERS, "nobody else voted; the run needs 2")} if least > 1 else {}
    assert why(result) == {**silent, **alone}
    assert set(result.counted) == {name(0)} - set(alone)


def test_nine_are_counted_like_three():
    table = opened(9).contribute(range(9))
    last = next(number for number in range(9) if name(number) == table.state.gathered.listed()[8])
    result = count(table, *(receipt(table, number, silent=[last] * (number < 6)) for number in range(9)))
    votes = sum(number >= 6 for number in range(9) if number != last)
    assert why(result) == {name(last): (pb.REASON_TOO_FEW_ACCEPTS, f"{votes} of 8 accepted it")}
    assert len(result.counted) == 8


def test_why_the_others_are_not_counted():
    table = opened(8)
    for number in (0, 1, 2, 3, 4, 5):
        table.submit(table.contribution(number))
    table.submit(table.contribution(3, loss=1.0))
    table.absent(6, 7)
    table.submit(table.contribution(4, loss=1.0))
    receipts = [receipt(table, number) for number in (0, 1, 3, 4, 5)]
    two_faced = [receipt(table, 5, silent=[0]), receipt(table, 4, silent=[0])]
    result = count(table, *receipts, *two_faced, absent=[6])
    assert why(result) == {
        name(2): (pb.REASON_DID_NOT_VOTE, ""),
        name(3): (pb.REASON_EQUIVOCATION, "it signed two different contributions"),
        name(4): (pb.REASON_EQUIVOCATION, "it signed two different contributions"),
        name(5): (pb.REASON_EQUIVOCATION, "it signed two different receipts"),
        name(6): (pb.REASON_ABSENT, ""),
        name(7): (pb.REASON_LATE, ""),
    }
    assert set(result.counted) == {name(0), name(1)}


A, B, C = pb.REASON_WRONG_BASE, pb.REASON_NON_FINITE, pb.REASON_UNAVAILABLE


@pytest.mark.parametrize(
    ("complaints", "expected"),
    [
        ([B, C, C, A, A], (A, "2 of 5 voters: wrong-base")),
        ([A, C, C, B, B], (B, "2 of 5 voters: non-finite")),
        ([A, B, C, C, C], (C, "3 of 5 voters: unavailable")),
        ([A, B, C], (A, "1 of 5 voters: wrong-base")),
        ([], None),
    ],
)
def test_the_commonest_complaint_is_the_reason_and_of_equals_the_first(complaints: list[pb.Reason], expected: object):
    table = opened(6).contribute(range(6))
    told = [{5: reason} for reason in complaints] + [{}] * (5 - len(complaints))
    result = count(table, receipt(table, 5), *(table.receipt(number, {**reject}) for number, reject in enumerate(told)))
    assert why(result) == ({name(5): expected} if expected else {})


def test_who_is_not_counted_has_no_vote():
    table = opened(4).contribute(range(4))
    liar = [table.receipt(3, dict.fromkeys((0, 1, 2), C)), receipt(table, 3)]
    honest = [table.receipt(0, {1: B}), receipt(table, 1), receipt(table, 2, silent=[1])]
    result = count(table, *liar, *honest)
    assert why(result) == {
        name(1): (B, "1 of 2 voters: non-finite"),
        name(3): (pb.REASON_EQUIVOCATION, "it signed two different receipts"),
    }


@pytest.mark.parametrize("bases", ["aabbb", "bbaaa", "aabb", "bbaa", "abba"])
def test_all_counted_build_on_one_state_the_commonest_and_of_equals_the_smaller(bases: str):
    table, numbers = opened(len(bases)), range(len(bases))
    for number in numbers:
        table.submit(table.contribution(number, base_state=digest(bases[number])))
    result = count(table, *(receipt(table, number) for number in numbers))
    chosen = min("ab", key=lambda base: (-bases.count(base), digest(base)))
    differs = (pb.REASON_WRONG_BASE, "its base state differs from the state the others built on")
    assert set(result.counted) == {name(number) for number in numbers if bases[number] == chosen}
    assert why(result) == {name(number): differs for number in numbers if bases[number] != chosen}
    assert result.state == digest(chosen)


def test_a_round_that_counts_too_few_counts_nobody():
    table = opened(3, least=2)
    for number in range(3):
        table.submit(table.contribution(number, norm=200))
    rejecting = [table.receipt(number, {0: B, 1: B}) for number in range(3)]
    result = count(table, *rejecting)
    gone = pb.Exclusion(peer=name(2), reason=pb.REASON_TOO_FEW_CLUSTERS, detail="1 could be counted; the run needs 2")
    refused = {
        name(0): pb.Exclusion(peer=name(0), reason=B, detail="2 of 2 voters: non-finite"),
        name(1): pb.Exclusion(peer=name(1), reason=B, detail="2 of 2 voters: non-finite"),
        name(2): gone,
    }
    excluded = [refused[peer] for peer in sorted(refused)]
    assert result == Tally(counted={}, excluded=excluded, state=b"", norm=norm_code(1.0), weights={}, clips={}, loss=0.0)


def test_as_many_as_a_run_needs_are_enough():
    table = opened(3, least=2).contribute()
    result = count(table, *(table.receipt(number, {0: B}) for number in range(3)))
    assert set(result.counted) == {name(1), name(2)}


def test_what_a_commit_says_of_the_counted():
    table = opened(3)
    said = {}
    for number, (norm, inner) in enumerate(((100, 4), (102, 6), (120, 8))):
        read = 16 + 4 * inner
        said[name(number)] = table.contribution(
            number, norm=norm, loss=float(number), inner_steps=inner, tokens=64 * inner, samples_read=read
        )
    for statement in said.values():
        table.submit(statement)
    result = count(table, *(receipt(table, number) for number in range(3)))
    assert result == Tally(
        counted=said,
        excluded=[],
        state=table.state_root(),
        norm=102,
        weights={name(0): 64 * 4, name(1): 64 * 6, name(2): 64 * 6},
        clips={name(0): 0, name(1): 0, name(2): 120 - 102 - 8},
        loss=(1 * 6 + 2 * 6) / 12,  # the first reports none
    )
    assert list(result.counted) == sorted(said), "the order of the mean"


def test_who_is_clip_ratio_times_the_lower_median_is_not_clipped():
    run = manifest(rounds={"clip_ratio": 4.0})
    codes = {"a": 100, "b": 90, "c": 116, "d": 117}
    assert clip(run, codes, {}) == (100, {"a": 0, "b": 0, "c": 0, "d": 1})
    assert clip(run, {}, {}) == (0, {})


@pytest.mark.parametrize(
    ("against", "counted"),
    [
        ({0: [3], 3: [0, 1]}, {0, 1, 2}),
        ({0: [], 3: [0, 1]}, {0, 1, 2}),
        ({0: [1, 2], 3: []}, {1, 2, 3}),
        ({0: [3], 3: [0]}, {1, 2}),
    ],
)
def test_of_equal_leaves_those_with_most_votes_count_and_of_equals_none(against: dict[int, list[int]], counted: set[int]):
    """Check equal indexes: number 3 announces those of 0; `against`: voters that reject each of them."""
    table = opened(4).contribute(range(3))
    table.submit(table.contribution(3, leaves=digest("leaves", 0, table.head.round)))
    refused = {voter: {of: pb.REASON_COPIED for of, voters in against.items() if voter in voters} for voter in range(4)}
    result = count(table, *(table.receipt(voter, reject) for voter, reject in refused.items()))
    assert set(result.counted) == {name(number) for number in counted}
    assert {peer: reason for peer, (reason, _) in why(result).items()} == {
        name(number): pb.REASON_COPIED for number in {0, 1, 2, 3} - counted
    }
    assert list(result.weights) == list(result.counted), "a copy weighs nothing"
