"""Which shares a peer keeps where it has no room for all; who is asked for one has room for it."""

from hypothesis import given
from hypothesis import strategies as st

from dilocox.protocol import shares


def test_the_newest_are_kept_where_not_all_fit():
    held = [shares.Held(round, state, 10, b"%d %d" % (round, state)) for round in range(1, 9) for state in (False, True)]
    assert shares.worth_keeping(held, 9, 3, 35) == {b"8 1", b"8 0", b"7 1"}
    assert shares.worth_keeping(held, 9, 3, 1000) == {b"8 1", b"8 0", b"7 1", b"7 0", b"6 0"}
    assert shares.worth_keeping([], 9, 3, 1000) == set()


def test_a_state_without_room_takes_none_of_what_was_counted():
    """Of a large model it is larger than all that a peer may keep."""
    held = [shares.Held(round, False, 10, b"%d" % round) for round in range(1, 9)]

    def kept(state: int) -> set[bytes]:
        return shares.worth_keeping([*held, shares.Held(8, True, state, b"state")], 9, 8, 45)

    assert kept(1000) == kept(40) == shares.worth_keeping(held, 9, 8, 45) == {b"8", b"7", b"6", b"5"}
    assert kept(20) == {b"8", b"7", b"state"}, "and what was counted none of a state's"


HELD = st.builds(shares.Held, st.integers(1, 9), st.booleans(), st.integers(1, 60), st.binary(min_size=1, max_size=1))


@given(
    st.lists(HELD, max_size=30, unique_by=lambda share: share.blob), st.integers(0, 400), st.integers(0, 400), st.integers(1, 9)
)
def test_who_is_asked_has_room_for_it(held: list[shares.Held], ours: int, more: int, rounds: int):
    """Beside whatever states, if it has as much room; and nobody keeps more than it may."""
    sizes = {share.blob: share.size for share in held}
    keep = shares.worth_keeping(held, 10, rounds, ours + more)
    counted = {share.blob for share in held if not share.state and share.round >= 10 - rounds}
    assert sum(sizes[blob] for blob in keep) <= ours + more
    assert shares.always_kept(held, 10, rounds, ours) <= keep & counted
    if sum(sizes.values()) <= ours and not any(share.state for share in held):
        assert keep == counted
