"""Tests of the erasure shards that a peer stores if it has no space for all; a peer that must have one has space for it."""

from hypothesis import given
from hypothesis import strategies as st

from dilocox_availability import shards as shares


def test_the_newest_are_kept_where_not_all_fit():
    held = [shares.Held(round, state, 10, b"%d %d" % (round, state)) for round in range(1, 9) for state in (False, True)]
    assert shares.worth_keeping(held, 9, 3, 35) == {b"8 1", b"8 0", b"7 1"}
    assert shares.worth_keeping(held, 9, 3, 1000) == {b"8 1", b"8 0", b"7 1", b"7 0", b"6 0"}
    assert shares.worth_keeping([], 9, 3, 1000) == set()


def test_a_state_without_room_takes_none_of_what_was_counted():
    """Check a large model, whose state exceeds all that a peer may store."""
    held = [shares.Held(round, False, 10, b"%d" % round) for round in range(1, 9)]

    def kept(*states: int) -> set[bytes]:
        stages = [shares.Held(8, True, size, b"stage %d" % stage) for stage, size in enumerate(states)]
        return shares.worth_keeping([*held, *stages], 9, 8, 45)

    assert kept(1000) == kept(40) == shares.worth_keeping(held, 9, 8, 45) == {b"8", b"7", b"6", b"5"}
    assert kept(20) == {b"8", b"7", b"stage 0"}, "and what was counted none of a state's"
    assert kept(10, 15) == {b"8", b"7", b"stage 0", b"stage 1"}
    assert kept(10, 16) == kept(16, 10) == {b"8", b"7", b"6", b"5"}, "a part of one is of no use to anybody"


def test_an_older_one_that_would_fit_is_not_kept_where_a_newer_one_does_not():
    """Check it, because otherwise a peer with more space would store fewer."""
    held = [shares.Held(round, False, 50 if round == 7 else 10, b"%d" % round) for round in range(1, 9)]
    assert shares.worth_keeping(held, 9, 8, 45) == {b"8"}
    assert shares.worth_keeping(held, 9, 8, 65) == {b"8", b"7"}


def test_the_first_round_whose_shares_everybody_has_room_for():
    rounds = [(number, 10) for number in range(8, 0, -1)]
    assert [shares.kept_since(rounds, 9, most) for most in (0, 19, 20, 45, 1000)] == [9, 9, 8, 7, 1]


HELD = st.builds(shares.Held, st.integers(1, 9), st.booleans(), st.integers(1, 60), st.binary(min_size=1, max_size=1))


@given(st.data(), st.lists(HELD, max_size=30, unique_by=lambda share: share.blob), st.integers(0, 300), st.integers(1, 9))
def test_who_is_asked_has_room_for_it(data: st.DataObject, held: list[shares.Held], most: int, rounds: int):
    """Check it for any states of any stages; no peer stores more than it may, or part of a state."""
    counted = {number: [s for s in held if s.round == number and not s.state] for number in range(9, 9 - rounds, -1)}
    since = shares.kept_since(((n, sum(s.size for s in each)) for n, each in counted.items()), 10, most)
    here = data.draw(st.lists(st.sampled_from(held), unique_by=lambda share: share.blob)) if held else []
    keep = shares.worth_keeping(here, 10, rounds, most)
    assert {share.blob for share in here if not share.state and share.round >= since} <= keep
    assert sum(share.size for share in here if share.blob in keep) <= most
    for number in range(1, 10):
        state = {share.blob for share in here if share.state and share.round == number}
        assert state & keep in (set(), state)
