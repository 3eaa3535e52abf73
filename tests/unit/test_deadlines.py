"""Tests of the round machine's clocks: the exact time of lateness, the effect of a pause, and the durations in a commit."""

from dataclasses import replace

import pytest

from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from dilocox.protocol.rounds.deadlines import deadline_seconds
from dilocox.protocol.rounds.round_machine import LONGEST_MS, Clock
from tests.helpers import Table, identity, manifest

OPENED = 1000.0
"""Time at which a table's first round opens."""


def table_of(clusters: int = 5, trained: int = 0, seconds: float = 0.0, **rounds: float) -> Table:
    """Return an open round after `trained` rounds of `seconds` each."""
    settings = {"start_clusters": clusters, "count": 20, "deadline_seconds": 600, "vote_seconds": 300, **rounds}
    return Table(manifest(rounds=settings)).genesis(range(clusters)).train(trained, range(clusters), seconds)


def at(table: Table, seconds: float) -> Table:
    """Advance to `seconds` after the first round opened."""
    table.now = OPENED + seconds
    table.feed(round_machine.Tick())
    return table


def due(table: Table) -> float | None:
    """Return the next deadline, counted like `at`."""
    deadline = round_machine.next_deadline(table.state)
    return None if deadline is None else deadline - OPENED


@pytest.mark.parametrize(
    ("history", "upper", "seconds"),
    [
        ((), 300, 300),
        ((100.0, 100.0, 100.0), 3600, 200),  # twice the median
        ((10.0, 100.0, 200.0), 3600, 820),  # the median and eight deviations
        ((10.0, 100.0, 200.0), 300, 300),
        ((90.0, 110.0), 3600, 200),  # of two the mean, and deviations of ten
        ((4.0,), 3600, 10),
        ((5.5,), 3600, 11),
        ((4.0,), 5, 5),
    ],
)
def test_what_took_so_long_is_waited_for_so_long(history: tuple[float, ...], upper: float, seconds: float):
    assert deadline_seconds(history, upper) == seconds


# Awaited statements, and their deadlines.


def test_before_the_first_commit_nothing_is_late():
    table = Table(manifest())
    table.submit(table.claim(0))
    assert due(table) is None


def test_a_round_in_which_nobody_said_anything_is_never_late():
    table = table_of()
    assert due(table) is None
    assert due(at(table, 1e6)) is None
    assert table.head.round == 1


def test_a_claim_alone_is_seated_at_the_deadline():
    table = table_of()
    table.submit(table.claim(7))
    assert due(table) == 600
    assert at(table, 599.9).head.round == 1
    assert at(table, 600).head.round == 2
    assert table.roster() == [0, 1, 2, 3, 4, 7]
    assert table.ballots == []
    assert table.commits[-1].body.excluded[0].reason == pb.REASON_LATE


def test_a_claim_alone_waits_four_times_as_long_as_rounds_used_to_take():
    table = table_of(trained=2, seconds=30.0)
    table.submit(table.claim(7))
    assert due(table) == 60 + 4 * 60


@pytest.mark.parametrize(
    ("contributed", "seconds"),
    [
        ([0], 600),  # fewer than min_clusters: no round closes that would count none
        ([0, 1], 4 * 61),  # not yet more than half of five: a round may be slow for all
        ([0, 1, 2], 61),  # and now the last one is late
    ],
)
def test_a_round_after_rounds_of_half_a_minute(contributed: list[int], seconds: float):
    table = table_of(trained=3, seconds=30.5)
    table.contribute(contributed)
    assert due(table) == 3 * 30.5 + seconds
    at(table, 3 * 30.5 + seconds - 0.01)
    assert len(table.ballots) == 3
    at(table, 3 * 30.5 + seconds)
    assert len(table.ballots) == 4
    assert table.ballots[-1].body.contributions == sorted(table.contribution(number).digest for number in contributed)


def test_a_patient_deadline_stays_below_the_run_s():
    table = table_of(trained=1, seconds=200.0).contribute([0, 1])
    assert due(table) == 200 + 600


def test_the_first_round_measures_itself():
    table = at(table_of(), 40.0).contribute([0, 1, 2])
    assert due(table) == 80
    table = at(table_of(), 0.25).contribute([0, 1, 2])
    assert due(table) == 10


def test_no_measurement_is_above_the_run_s_deadline():
    table = at(table_of(deadline_seconds=0.5), 0.125).contribute([0, 1, 2])
    assert due(table) == 0.5


def test_who_is_slower_than_ever_before_makes_the_deadline_longer():
    table = table_of(trained=1, seconds=10.0)
    at(table, 10 + 50.0).contribute([0, 1, 2])
    assert due(table) == 10 + 100
    table = table_of(trained=1, seconds=10.0)
    at(table, 10 + 3.0).contribute([0, 1, 2])
    assert due(table) == 10 + 20


def test_deadlines_forget_all_but_the_last_eight_rounds():
    table = table_of(trained=1, seconds=100.0, count=40).train(7, range(5), 20.0)
    assert table.head.collect_history == (100_000,) + (20_000,) * 7
    table.train(2, range(5), 20.0)
    assert table.head.collect_history == (20_000,) * 8


@pytest.mark.parametrize(
    ("clusters", "min_clusters", "enough"), [(2, 2, 2), (3, 2, 2), (4, 2, 3), (5, 2, 3), (5, 4, 4), (6, 1, 4), (1, 1, 1)]
)
def test_more_than_half_of_the_roster_and_min_clusters_are_enough(clusters: int, min_clusters: int, enough: int):
    table = table_of(clusters, min_clusters=min_clusters)
    for number in range(clusters):
        table.now += 20
        table.submit(table.contribution(number))
    receipts = [table.receipt(number) for number in range(clusters)]
    for receipt in receipts:
        table.now += 3
        table.submit(receipt)
    body = table.commits[-1].body
    assert (body.collect_ms, body.vote_ms, body.open_ms) == (20_000 * enough, 3000 * enough, 23_000 * clusters)
    assert (table.head.collect_history, table.head.vote_history) == ((20_000 * enough,), (3000 * enough,))


def test_voting_has_as_long_as_the_ballot_says():
    table = table_of()
    at(table, 7.0).contribute(range(5)).vote([0, 1])
    assert table.ballots[-1].body.seconds == 300
    assert due(table) == 7 + 300
    assert at(table, 306.9).head.round == 1
    assert at(table, 307).head.round == 2
    assert table.counted() == [0, 1]


def test_votes_teach_how_long_votes_take():
    table = table_of()
    for _ in range(3):
        table.contribute(range(5))
        receipts = [table.receipt(number) for number in range(5)]
        table.now += 12.5
        for receipt in receipts:
            table.submit(receipt)
    assert table.head.vote_history == (12_500,) * 3
    table.contribute(range(5))
    assert table.ballots[-1].body.seconds == 25
    assert due(table) == 3 * 12.5 + 25


def test_a_round_that_counts_nobody_teaches_nothing():
    table = table_of()
    at(table, 30.0).contribute(range(5)).vote(range(5), reject=dict.fromkeys(range(5), pb.REASON_UNAVAILABLE))
    body = table.commits[-1].body
    assert (body.collect_ms, body.vote_ms, body.open_ms) == (30_000, 1, 30_000)
    assert (table.head.collect_history, table.head.vote_history) == ((), ())


def test_the_last_reports_have_as_long_as_votes():
    table = table_of(count=1, trained=1, seconds=50.0)
    table.submit(table.report(0))
    assert due(table) == 50 + 300
    assert not at(table, 349.9).head.finished
    assert at(table, 350).head.finished
    assert due(table) is None
    assert table.feed(round_machine.Tick()) == []


def test_a_run_closes_without_a_single_report():
    table = at(table_of(count=1, trained=1), 300)
    assert table.head.finished
    assert table.commits[-1].body.state == b""


# Durations.


def test_a_commit_says_how_long_its_round_was_open_and_the_first_one_was_not():
    table = Table(manifest(), clock=OPENED)
    table.now += 500
    table.genesis()
    first = table.commits[0].body
    assert (first.open_ms, first.collect_ms, first.vote_ms, first.closed_at_ms) == (0, 0, 0, table.moment.wall_ms)
    table.now += 0.0624
    table.contribute().vote()
    body = table.commits[-1].body
    assert (body.open_ms, body.collect_ms, body.vote_ms, body.closed_at_ms) == (62, 62, 1, table.moment.wall_ms)


def test_a_round_longer_than_a_commit_can_say():
    table = at(table_of(1, min_clusters=1), 1e8).contribute([0]).vote([0])
    body = table.commits[-1].body
    assert (body.open_ms, body.collect_ms, body.vote_ms) == (LONGEST_MS, LONGEST_MS, 1)
    assert LONGEST_MS == 2**32 - 1
    table.verify()


def test_a_commit_is_never_older_than_the_one_before_it():
    table = table_of(3)
    before = table.head.closed_at_ms
    table.wall_ms -= 10_000
    table.train(1)
    assert table.commits[-1].body.closed_at_ms == table.head.closed_at_ms == before
    table.wall_ms += 10_001
    table.train(1)
    assert table.head.closed_at_ms == before + 1
    table.verify()


# Pauses.


def test_a_pause_moves_everything_that_happened_in_its_round():
    table = table_of()
    at(table, 10).contribute([0, 1])
    at(table, 20).contribute([2])
    at(table, 30).contribute([3, 4])
    at(table, 40).vote([0, 1])
    at(table, 50).vote([2])
    clock = Clock(OPENED, OPENED + 30, OPENED + 20, OPENED + 50)
    assert table.state.clock == clock
    at(table, 60).absent(0, 1, 2)
    assert table.state.clock == clock
    table.absent(3)
    assert table.state.clock == replace(clock, paused_at=OPENED + 60)
    assert due(table) == 60 + table.run.rounds.liveness_seconds
    at(table, 70).absent(2)
    assert table.state.clock == replace(clock, paused_at=OPENED + 60)
    at(table, 60 + table.run.rounds.liveness_seconds)
    assert table.state.clock == replace(clock, paused_at=OPENED + 60, awaited=True)
    assert due(table) is None
    at(table, 100).present(3)
    assert table.state.clock == Clock(OPENED + 40, OPENED + 70, OPENED + 60, OPENED + 90)
    assert due(table) == 30 + 300 + 40


def test_a_pause_is_not_measured_but_the_round_was_open_all_the_while():
    table = table_of(3)
    at(table, 10).contribute([0])
    at(table, 20).absent(1, 2)
    at(table, 1020).present(1, 2)
    at(table, 1025).contribute([1, 2])
    receipts = [table.receipt(number) for number in range(3)]
    at(table, 1027).absent(1, 2)
    at(table, 1127).present(1, 2)
    table.submit(receipts[0])
    at(table, 1128).submit(receipts[1])
    table.submit(receipts[2])
    body = table.commits[-1].body
    assert (body.collect_ms, body.vote_ms, body.open_ms) == (25_000, 3000, 1_128_000)


def test_who_comes_back_has_at_least_one_grace():
    table = table_of(3, liveness_seconds=15)
    at(table, 0).contribute([0])
    at(table, 590).absent(1, 2)
    at(table, 700).present(1)
    assert due(table) == 715
    assert table.state.clock == Clock(OPENED + 115)
    table = table_of(3, liveness_seconds=15)
    at(table, 0).contribute([0])
    at(table, 580).absent(1, 2)
    at(table, 700).present(1)
    assert due(table) == 720, "what was left is more"


def test_a_round_without_a_deadline_has_no_grace_to_give():
    table = at(table_of(3), 1)
    table.absent(1, 2)
    at(table, 50).present(1)
    assert table.state.clock == Clock(OPENED + 49)


def test_while_nobody_is_heard_waiting_does_not_merely_pause():
    table = table_of(3)
    at(table, 10).contribute([0])
    at(table, 20).absent(1, 2)
    assert table.state.clock == Clock(OPENED, paused_at=OPENED + 20)
    at(table, 30).absent(0)
    assert table.state.clock == Clock(OPENED, paused_at=OPENED + 20, heard_nobody=True)
    at(table, 40).present(0)
    assert table.state.clock == Clock(OPENED, paused_at=OPENED + 20, heard_nobody=True, awaited=True)
    at(table, 100).present(1)
    assert table.state.clock == Clock(OPENED + 100, measures=False, returning_until=OPENED + 115)
    assert due(table) == 115
    at(table, 115)
    assert table.state.clock == Clock(OPENED + 100, measures=False)
    assert due(table) == 700


def test_votes_are_waited_for_afresh_after_nobody_was_heard():
    table = table_of(5, trained=1, seconds=20.0, liveness_seconds=5)
    at(table, 30).contribute(range(5)).vote([0])
    at(table, 35).absent(*range(5))
    at(table, 1000).present(*range(5))
    assert table.state.clock == Clock(OPENED + 1000, OPENED + 1000, OPENED + 1000, measures=False)
    assert due(table) == 1000 + 10
    receipts = [table.receipt(number) for number in range(1, 5)]
    at(table, 1004)
    for receipt in receipts:
        table.submit(receipt)
    body = table.commits[-1].body
    assert (body.collect_ms, body.vote_ms, body.open_ms) == (0, 0, 984_000)
    assert (table.head.collect_history, table.head.vote_history) == ((20_000,), (1,))


def test_who_comes_back_to_a_vote_has_at_least_one_grace_too():
    table = table_of(5, trained=1, seconds=20.0, liveness_seconds=15)
    at(table, 30).contribute(range(5)).vote([0])
    at(table, 35).absent(*range(5))
    at(table, 1000).present(*range(5))
    assert due(table) == 1015


def test_a_pause_later_in_a_round_whose_waiting_began_afresh_makes_it_teach_nothing_less():
    table = at(table_of(3), 10)
    table.absent(0, 1, 2)
    at(table, 20).present(0, 1, 2)
    at(table, 30).absent(1, 2)
    at(table, 50).present(1, 2)
    assert table.state.clock == Clock(OPENED + 40, measures=False)


def test_a_round_whose_waiting_began_afresh_has_the_patient_deadline():
    table = table_of(5, trained=1, seconds=30.0)
    at(table, 31).absent(*range(5))
    at(table, 100).present(*range(5))
    table.contribute([0, 1, 2])
    assert due(table) == 100 + 4 * 60


def test_the_clocks_of_a_run_without_a_roster_run():
    table = Table(manifest(), clock=OPENED)
    table.absent(0, 1, 2)
    assert table.state.clock == Clock(OPENED)


# Starting again.


def test_after_a_start_nothing_is_signed_before_more_than_half_of_the_roster_is_heard():
    table = at(table_of(4), 95).contribute(range(2))
    at(table, 100).feed(round_machine.Resumed())
    assert table.state.clock == Clock(OPENED + 100, paused_at=OPENED + 100, heard_nobody=True, measures=False)
    assert due(table) == 700
    table.present(0, 1)
    table.contribute([2, 3])
    assert not table.ballots
    assert round_machine.phase_of(table.state) == "starting"
    table.present(2)
    assert len(table.ballots) == 1
    assert table.state.starting_since is None


def test_after_a_start_min_clusters_must_be_heard_too():
    table = table_of(5, min_clusters=4).contribute(range(5))
    table.feed(round_machine.Resumed())
    table.present(0, 1, 2)
    assert round_machine.phase_of(table.state) == "starting"
    table.present(3)
    assert round_machine.phase_of(table.state) == "voting"


def test_a_start_is_over_after_one_full_deadline():
    table = table_of(5, trained=1, seconds=30.0)
    at(table, 100).feed(round_machine.Resumed())
    table.present(0, 1)
    assert due(table) == 100 + 4 * 60
    at(table, 339.9)
    assert round_machine.phase_of(table.state) == "starting"
    at(table, 340)
    assert round_machine.phase_of(table.state) == "collecting"
    assert table.state.starting_since is None


def test_nothing_is_late_for_one_grace_after_a_start():
    """Check the grace: the clocks started when two were live; a third, which completes the majority of the roster, becomes
    live after the votes were due."""
    table = table_of(5, trained=1, seconds=20.0, vote_seconds=20, liveness_seconds=15)
    table.contribute(range(5)).vote([0, 1])
    at(table, 25).feed(round_machine.Resumed())
    at(table, 26).present(0, 1)
    at(table, 50).present(2)
    assert round_machine.phase_of(table.state) == "voting"
    assert table.state.clock.returning_until == OPENED + 65
    assert due(table) == 65
    table.vote([2, 3])
    at(table, 64.9)
    assert table.head.round == 2
    at(table, 65)
    assert table.counted() == [0, 1, 2, 3]


def test_of_two_who_come_back_the_second_is_not_late_either():
    table = table_of(2, trained=1, seconds=20.0, min_clusters=1, liveness_seconds=15).contribute(range(2)).vote([0])
    at(table, 25).feed(round_machine.Resumed())
    at(table, 26).present(0)
    at(table, 50).present(1)
    assert table.state.clock.returning_until is None
    assert due(table) == 65
    table.vote([1])
    assert table.counted() == [0, 1]


def test_what_ends_by_a_full_deadline_pauses_on_where_too_few_are_heard():
    table = table_of(5, trained=1, seconds=30.0, min_clusters=3)
    at(table, 100).feed(round_machine.Resumed())
    table.present(0, 1)
    at(table, 340)
    assert table.state.clock == Clock(
        OPENED + 100, paused_at=OPENED + 100, heard_nobody=True, awaited=True, measures=False, returning_until=OPENED + 355
    )
    assert due(table) == 355
    at(table, 355)
    assert table.state.clock.returning_until is None
    assert due(table) is None
    at(table, 400).present(2)
    assert table.state.clock == Clock(OPENED + 400, measures=False, returning_until=OPENED + 415)


def test_a_pause_does_not_move_the_end_of_the_grace():
    table = at(table_of(5), 10)
    table.absent(*range(5))
    at(table, 20).present(0, 1, 2)
    at(table, 25).absent(1, 2)
    at(table, 30).present(1)
    assert table.state.clock == Clock(OPENED + 25, measures=False, returning_until=OPENED + 35)
    table.present(2, 3, 4)
    assert table.state.clock == Clock(OPENED + 25, measures=False)


def test_a_mended_database_waits_for_more_than_half_however_long_it_takes():
    table = table_of(5)
    at(table, 100).feed(round_machine.Resumed(healed=True))
    table.present(0, 1)
    assert due(table) is None
    at(table, 1e9)
    assert round_machine.phase_of(table.state) == "starting"
    assert table.state.healed
    table.present(2)
    assert round_machine.phase_of(table.state) == "collecting"
    assert table.state.healed is False


def test_a_start_before_the_first_commit_waits_for_nobody_in_particular():
    table = Table(manifest())
    table.submit(table.claim(0))
    table.feed(round_machine.Resumed())
    assert round_machine.phase_of(table.state) == "gathering"
    assert table.state.absent == {identity(0).peer}
    assert table.state.starting_since is None


def test_a_ballot_that_was_being_signed_when_the_coordinator_stopped_is_asked_for_again():
    table = table_of(3).contribute([0, 1])
    last = round_machine.Received(table.contribution(2))
    table.state, asked = round_machine.step(table.state, last, table.moment)
    assert isinstance(asked[-1], round_machine.SealBallot)
    assert table.state.sealing
    assert due(table) is None
    assert table.feed(round_machine.Tick()) == []
    table.feed(round_machine.Resumed())
    assert table.state.sealing is False
    table.present(0)
    assert not table.ballots
    table.present(1)
    assert [ballot.body for ballot in table.ballots] == [asked[-1].body]
    assert table.state.sealing is False
