"""Who scores what, on which samples, and what is refused for it."""

import math
from collections import Counter

import pytest

from dilocox.protocol import scoring
from dilocox.protocol.ledger import Lease
from dilocox.protocol.messages import Statement, seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.scoring import Score
from tests.helpers import COORDINATOR, digest, manifest

RUN = manifest(scoring={"voters": 5, "sequences": 6, "margin": 0.125})
NAMES = [f"cluster-{number:02}" for number in range(20)]


def ballot(number: int) -> Statement[pb.Ballot]:
    return seal(COORDINATOR, pb.KIND_BALLOT, RUN.run_id, pb.Ballot(round=1, head=digest("head", number), seconds=5))


def test_each_contribution_has_a_committee_of_others():
    for name in NAMES:
        drawn = scoring.committee(RUN, ballot(1), name, NAMES)
        assert len(drawn) == 5
        assert name not in drawn
        assert drawn <= set(NAMES)


def test_where_there_are_few_all_others_score():
    assert scoring.committee(RUN, ballot(1), "b", ["a", "b", "c"]) == {"a", "c"}
    assert scoring.committee(RUN, ballot(1), "b", ["b"]) == frozenset()


def test_no_run_scores_that_does_not_ask_for_it():
    assert scoring.committee(manifest(), ballot(1), "b", ["a", "b", "c"]) == frozenset()


def test_who_is_drawn_changes_with_the_coordinators_signature_and_falls_on_all_alike():
    drawn = [scoring.committee(RUN, ballot(number), name, NAMES) for number in range(40) for name in NAMES]
    counts = Counter(name for each in drawn for name in each)
    expected = 5 * len(drawn) / len(NAMES)
    assert len({scoring.committee(RUN, ballot(number), NAMES[0], NAMES) for number in range(40)}) > 35
    assert all(0.7 * expected < counts[name] < 1.3 * expected for name in NAMES)
    another = ballot(1)
    another.envelope.signature = bytes(64)
    assert scoring.committee(RUN, ballot(1), NAMES[0], NAMES) != scoring.committee(RUN, another, NAMES[0], NAMES)


def test_samples_are_drawn_from_the_voters_own_lease():
    lease = Lease(counted=100, spans=((40, 60), (500, 530)))
    mine = {position for start, end in lease.spans for position in range(start, end)}
    drawn = [scoring.positions(RUN, ballot(number), "me", lease) for number in range(30)]
    assert all(len(set(each)) == len(each) == 6 for each in drawn)
    assert all(set(each) <= mine for each in drawn)
    assert len(set().union(*drawn)) > 40, "all of it may be drawn"
    assert drawn[0] == scoring.positions(RUN, ballot(0), "me", lease)
    assert drawn[0] != scoring.positions(RUN, ballot(0), "you", lease)


def test_a_short_lease_gives_what_it_has():
    assert scoring.positions(RUN, ballot(1), "me", Lease()) == []
    assert scoring.positions(RUN, ballot(1), "me", Lease(spans=((7, 8),))) == [7]


@pytest.mark.parametrize(
    ("after", "cosine", "refused"),
    [
        (2.0, -0.5, False),
        (2.125, -0.5, False),
        (2.126, -0.5, True),
        (2.126, 0.0, False),
        (9.0, 0.5, False),
        (1.0, -1.0, False),
        (math.nan, -1.0, True),
        (math.nan, math.nan, True),
        (math.inf, -0.1, True),
    ],
)
def test_what_makes_the_loss_worse_and_points_away_harms(after: float, cosine: float, refused: bool):
    assert scoring.harms(RUN, Score(2.0, after, cosine)) == refused


def test_a_score_stands_in_a_receipt_in_whole_units():
    assert scoring.units(0.5) == 512
    assert scoring.units(-1e300) == scoring.units(-math.inf) == scoring.units(math.nan) == -((1 << 31) - 1)
    assert scoring.units(math.inf) == (1 << 31) - 1


@pytest.mark.parametrize(
    ("accepts", "voted", "enough"), [(4, 5, True), (3, 5, False), (2, 3, True), (1, 2, False), (0, 0, True)]
)
def test_two_thirds_of_those_who_voted(accepts: int, voted: int, enough: bool):
    assert scoring.is_enough(RUN, accepts, voted) == enough


def test_who_was_drawn_and_voted_decides():
    listed, opened = NAMES[:10], ballot(3)
    drawn = sorted(scoring.committee(RUN, opened, "cluster-09", listed))
    refusing, accepting = b"\xff\x01", b"\xff\x03"
    votes = {name: refusing if name not in drawn else accepting for name in listed}
    assert scoring.refused(RUN, opened, listed, votes) == {}, "who was not drawn has no say"
    votes |= dict.fromkeys(drawn[:2], refusing)
    assert scoring.refused(RUN, opened, listed, votes) == {"cluster-09": (3, 5)}
    for name in drawn[:2]:
        del votes[name]
    assert scoring.refused(RUN, opened, listed, votes) == {}, "who did not vote is not waited for"
    assert scoring.refused(manifest(), opened, listed, dict.fromkeys(listed, refusing)) == {}


def test_each_voter_has_an_order_of_its_own_that_nobody_can_choose():
    def order(number: int, voter: str) -> list[str]:
        return sorted(NAMES, key=lambda name: scoring.turn(ballot(number), voter, name))

    assert order(1, "me") == order(1, "me")
    firsts = Counter(order(number, voter)[0] for number in range(20) for voter in ("me", "you", "they"))
    assert len(firsts) > 12
    assert order(1, "me") != order(1, "you")
    assert order(1, "me") != order(2, "me")
