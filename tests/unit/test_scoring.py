"""Tests of scoring: the voters for each contribution, their samples, and the rejections."""

import math
from collections import Counter
from collections.abc import Iterable

import pytest

from dilocox.protocol.checks import score_rules
from dilocox.protocol.checks.score_rules import Score
from dilocox.protocol.consensus.data_leases import Lease
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.messages import Statement, seal
from tests.helpers import COORDINATOR, digest, manifest

RUN = manifest(scoring={"voters": 5})
APART = manifest(scoring={"voters": 5}, data={"private": True})
NAMES = [f"cluster-{number:02}" for number in range(20)]
EQUAL = dict.fromkeys(NAMES, 1)


def ballot(number: int) -> Statement[pb.Ballot]:
    return seal(COORDINATOR, pb.KIND_BALLOT, RUN.run_id, pb.Ballot(round=1, head=digest("head", number), seconds=5))


def numbers(opinion: score_rules.Opinion) -> tuple[int, int]:
    """Return how many voters found harm, and how many measured."""
    return len(opinion.harmed), len(opinion.votes)


def test_each_contribution_has_a_committee_of_others():
    for name in NAMES:
        drawn = score_rules.committee(RUN, ballot(1), name, EQUAL)
        assert sum(drawn.values()) == 5
        assert name not in drawn
        assert drawn.keys() <= set(NAMES)


def test_where_there_are_few_all_others_score():
    assert score_rules.committee(RUN, ballot(1), "b", {"a": 3, "b": 5, "c": 7}) == {"a": 3, "c": 7}
    assert score_rules.committee(RUN, ballot(1), "b", {"b": 1}) == {}


def test_everybody_knows_the_committees_that_it_is_in():
    for voter in NAMES:
        mine = {name for name in NAMES if voter in score_rules.committee(RUN, ballot(1), name, EQUAL)}
        assert score_rules.duties(RUN, ballot(1), voter, EQUAL) == mine
    assert score_rules.duties(RUN, ballot(2), NAMES[0], EQUAL) != score_rules.duties(RUN, ballot(1), NAMES[0], EQUAL)
    assert score_rules.duties(manifest(), ballot(1), "b", EQUAL | {"b": 1}) == frozenset()


def test_no_run_scores_that_does_not_ask_for_it():
    assert score_rules.committee(manifest(), ballot(1), NAMES[1], EQUAL) == {}


def test_who_is_drawn_changes_with_the_coordinators_signature_and_falls_on_all_alike():
    drawn = [score_rules.committee(RUN, ballot(number), name, EQUAL) for number in range(200) for name in NAMES]
    counts = sum((Counter(each) for each in drawn), Counter())
    expected = 5 * len(drawn) / len(NAMES)
    assert len({tuple(sorted(score_rules.committee(RUN, ballot(number), NAMES[0], EQUAL))) for number in range(40)}) > 35
    assert all(0.8 * expected < counts[name] < 1.2 * expected for name in NAMES)
    another = ballot(1)
    another.envelope.signature = bytes(64)
    assert score_rules.committee(RUN, ballot(1), NAMES[0], EQUAL) != score_rules.committee(RUN, another, NAMES[0], EQUAL)


def test_samples_are_drawn_from_the_voters_own_lease():
    lease = Lease(counted=100, spans=((40, 60), (500, 530)))
    mine = {position for start, end in lease.spans for position in range(start, end)}
    drawn = [score_rules.positions(RUN, ballot(number), "me", lease) for number in range(30)]
    assert all(len(set(each)) == len(each) == score_rules.SAMPLES for each in drawn)
    assert all(set(each) <= mine for each in drawn)
    assert len(set().union(*drawn)) > 40, "all of it may be drawn"
    assert drawn[0] == score_rules.positions(RUN, ballot(0), "me", lease)
    assert drawn[0] != score_rules.positions(RUN, ballot(0), "you", lease)


def test_a_short_lease_gives_what_it_has():
    assert score_rules.positions(RUN, ballot(1), "me", Lease()) == []
    assert score_rules.positions(RUN, ballot(1), "me", Lease(spans=((7, 8),))) == [7]


@pytest.mark.parametrize(
    ("after", "cosine", "refused"),
    [
        (1.999, -0.5, False),
        (2.0, -0.5, True),
        (2.1, 0.0, False),
        (9.0, 0.5, False),
        (1.0, -1.0, False),
        (math.nan, -1.0, True),
        (math.nan, math.nan, True),
        (math.inf, -0.1, True),
    ],
)
def test_what_makes_the_loss_worse_and_points_away_harms(after: float, cosine: float, refused: bool):
    assert bool(score_rules.harmful(RUN, {"one": Score(2.0, after, cosine)}, {"one": 7})) == refused


@pytest.mark.parametrize(
    ("cosine", "others", "refused"),
    [
        (0.11, (0.2, 0.2), True),
        (0.13, (0.2, 0.2), False),
        (0.09, (0.2, 0.1), False),
        (0.0, (0.2,), False),
        (0.0, (), False),
        (-0.1, (-0.3, -0.3), True),
        (0.0, (math.nan, math.nan), False),
        (math.nan, (0.2, 0.2), True),
    ],
)
def test_what_helps_nothing_and_points_less_the_same_way_than_the_median_harms(
    cosine: float, others: tuple[float, ...], refused: bool
):
    """Check medians: of two the smaller is the median, because one other cluster alone does not define what is usual."""
    scores = {str(number): Score(2.0, 1.9, each) for number, each in enumerate(others)}
    tokens = dict.fromkeys([*scores, "it"], 1)
    assert score_rules.harmful(RUN, {**scores, "it": Score(2.0, 2.0, cosine)}, tokens) == ({"it"} if refused else set())
    assert not score_rules.harmful(APART, {**scores, "it": Score(2.0, 1.999, cosine)}, tokens), (
        "on texts of their own any gain is work"
    )
    assert score_rules.harmful(APART, {**scores, "it": Score(2.0, 2.0, cosine)}, tokens) == (set() if cosine >= 0 else {"it"})


@pytest.mark.parametrize(
    ("tokens", "gain", "cosine", "refused"),
    [
        (100, 0.049, 0.11, True),
        (100, 0.051, 0.11, False),
        (100, 0.049, 0.13, False),
        (900, 0.049, 0.11, True),
        (25, 0.049, 0.11, False),
        (25, 0.012, 0.059, True),
        (25, 0.013, 0.059, False),
        (25, 0.012, 0.061, False),
        (0, 0.0, -0.01, True),
        (100, math.nan, math.nan, True),
    ],
)
def test_what_helps_half_as_much_as_the_median_and_points_away_harms_by_its_tokens(
    tokens: int, gain: float, cosine: float, refused: bool
):
    """Check a drift, which is half work and helps a little. A contribution of few tokens helps and weighs little, too."""
    run = manifest(scoring={"voters": 5})
    scores = {name: Score(2.0, 1.9, 0.2) for name in ("a", "b", "c")}
    announced = {"a": 100, "b": 100, "c": 1000, "it": tokens}
    assert score_rules.harmful(run, {**scores, "it": Score(2.0, 2.0 - gain, cosine)}, announced) == (
        {"it"} if refused else set()
    )


def test_where_nothing_helps_only_harm_is_harm():
    run = manifest(scoring={"voters": 5})
    scores = {name: Score(2.0, 2.1, 0.2) for name in ("a", "b", "c")} | {"it": Score(2.0, 1.999, -0.5)}
    assert not score_rules.harmful(run, scores, dict.fromkeys(scores, 1))
    assert score_rules.harmful(run, scores | {"it": Score(2.0, 2.0, -0.5)}, dict.fromkeys(scores, 1)) == {"it"}


def test_a_score_stands_in_a_receipt_in_whole_units():
    assert score_rules.units(0.5) == 512
    assert score_rules.units(-1e300) == score_rules.units(-math.inf) == score_rules.units(math.nan) == -((1 << 31) - 1)
    assert score_rules.units(math.inf) == (1 << 31) - 1


@pytest.mark.parametrize(
    ("clusters", "harmed", "refused"),
    [(2, 1, False), (3, 1, False), (3, 2, True), (4, 1, False), (4, 2, True), (7, 2, False), (7, 3, True), (1, 0, False)],
)
def test_more_than_a_third_of_a_committee_and_never_one_alone(clusters: int, harmed: int, refused: bool):
    """Check 3 h + 1 clusters: h hostile ones can neither reject honest work nor pass harmful work."""
    run, listed = manifest(scoring={"voters": 32}), dict.fromkeys(NAMES[:clusters], 1)
    against = set(NAMES[1 : 1 + harmed])
    found = score_rules.opinions(run, ballot(1), listed, listed, lambda voter, index, _: voter in against and index == 0)
    assert numbers(found[NAMES[0]]) == (harmed, clusters - 1)
    assert found[NAMES[0]].refuses() == refused


@pytest.mark.parametrize(("says", "refused"), [((4, 4, 64), False), ((4, 4, 8), True), ((32, 32, 64), True)])
def test_harm_is_found_by_standing(says: tuple[int, int, int], refused: bool):
    """Check two of three voters that find harm: newcomers beside a voter with full reputation cannot reject work."""
    listed = dict(zip(NAMES, (64, *says), strict=False))
    found = score_rules.opinions(RUN, ballot(1), listed, listed, lambda voter, *_: voter in NAMES[1:3])
    assert found[NAMES[0]].refuses() == refused


def test_the_draw_is_by_standing():
    """Check a hundred newcomers beside eight with full reputation: the chance of a committee seat is proportional to
    reputation."""
    listed = {f"old-{number}": 64 for number in range(8)} | {f"new-{number:03}": 4 for number in range(100)}
    drawn = [score_rules.committee(RUN, ballot(number), "old-0", listed) for number in range(200)]
    old = sum(votes for each in drawn for name, votes in each.items() if name.startswith("old"))
    assert all(sum(each.values()) == 5 and "old-0" not in each for each in drawn)
    assert old / 1000 == pytest.approx(7 * 64 / (7 * 64 + 100 * 4), abs=0.05)
    assert any(votes > 1 for each in drawn for votes in each.values())


def test_who_was_drawn_and_voted_and_measured_decides():
    listed = dict.fromkeys(NAMES[:10], 1)
    opened = next(b for b in map(ballot, range(50)) if len(score_rules.committee(RUN, b, NAMES[9], listed)) == 5)
    drawn = sorted(score_rules.committee(RUN, opened, NAMES[9], listed))

    def told(voters: Iterable[str], against: Iterable[str], silent: Iterable[str] = ()) -> tuple[int, int]:
        who, nothing = set(against), set(silent)
        found = score_rules.opinions(RUN, opened, listed, voters, lambda voter, *_: None if voter in nothing else voter in who)
        return numbers(found[NAMES[9]])

    assert told(listed, set(listed) - set(drawn)) == (0, 5), "who was not drawn has no say"
    assert told(listed, drawn[:2]) == (2, 5)
    assert told(set(listed) - set(drawn[:2]), drawn[:2]) == (0, 3), "who did not vote is not waited for"
    assert told(listed, drawn[:2], silent=drawn[2:]) == (2, 2), "who had no time for it says nothing"
    assert score_rules.opinions(manifest(), opened, listed, listed, lambda *_: True) == {}


def test_a_voter_says_what_it_measured_by_its_place_among_those_it_was_drawn_to_score():
    listed, opened = dict.fromkeys(NAMES[:10], 1), ballot(3)
    asked: dict[str, list[tuple[int, int]]] = {}

    def found(voter: str, index: int, place: int) -> None:
        asked.setdefault(voter, []).append((place, index))

    score_rules.opinions(RUN, opened, listed, listed, found)
    for voter in listed:
        duties = score_rules.duties(RUN, opened, voter, listed)
        assert asked.get(voter, []) == list(enumerate(NAMES.index(name) for name in listed if name in duties))


def test_each_voter_has_an_order_of_its_own_that_nobody_can_choose():
    def order(number: int, voter: str) -> list[str]:
        return sorted(NAMES, key=lambda name: score_rules.turn(ballot(number), voter, name))

    assert order(1, "me") == order(1, "me")
    firsts = Counter(order(number, voter)[0] for number in range(20) for voter in ("me", "you", "they"))
    assert len(firsts) > 12
    assert order(1, "me") != order(1, "you")
    assert order(1, "me") != order(2, "me")
