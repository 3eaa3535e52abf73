"""Tests of the sample ledger: on any schedule, every sample position is in exactly one place, so none is lost or repeated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dilocox.protocol.consensus.data_leases import Lease, Ledger, length, split


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.counted: list[int] = []

    @rule(names=st.lists(st.sampled_from("abcdef"), unique=True), ahead=st.integers(0, 30))
    def top_up(self, names: list[str], ahead: int) -> None:
        self.ledger = self.ledger.top_up(sorted(names), ahead)
        assert all(length(self.ledger.leases[name].spans) >= ahead for name in names)

    @rule(name=st.sampled_from("abcdef"), share=st.floats(0, 1))
    def settle(self, name: str, share: float) -> None:
        if (lease := self.ledger.leases.get(name)) is None:
            return
        read = lease.counted + int(share * length(lease.spans))
        positions = lease.positions(lease.counted, read - lease.counted)
        assert positions is not None
        self.counted += positions
        self.ledger = self.ledger.settle(name, read)

    @rule(name=st.sampled_from("abcdef"))
    def release(self, name: str) -> None:
        if name in self.ledger.leases:
            self.ledger = self.ledger.release(name)

    @invariant()
    def every_position_is_in_one_place(self) -> None:
        spans = [*self.ledger.free, *(s for lease in self.ledger.leases.values() for s in lease.spans)]
        places = self.counted + [position for start, end in spans for position in range(start, end)]
        assert sorted(places) == list(range(self.ledger.cursor))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(0, 20), st.integers(1, 10))
def test_a_lease_ends_where_it_ends(first, count):
    lease = Lease(5, ((10, 14), (20, 26)))
    flat = [10, 11, 12, 13, 20, 21, 22, 23, 24, 25]
    expected = flat[first - 5 : first - 5 + count] if first >= 5 and first - 5 + count <= 10 else None
    assert lease.positions(first, count) == expected


@pytest.mark.parametrize(
    ("count", "first", "rest"),
    [
        (-1, (), ((3, 5), (8, 12))),
        (0, (), ((3, 5), (8, 12))),
        (1, ((3, 4),), ((4, 5), (8, 12))),
        (2, ((3, 5),), ((8, 12),)),
        (3, ((3, 5), (8, 9)), ((9, 12),)),
        (6, ((3, 5), (8, 12)), ()),
        (7, ((3, 5), (8, 12)), ()),
    ],
)
def test_the_first_positions_and_the_rest(count, first, rest):
    assert split(((3, 5), (8, 12)), count) == (first, rest)


def test_a_lease_is_counted_from_its_front():
    other = Lease(1, ((50, 60),))
    ledger = Ledger(60, ((1, 2),), {"a": Lease(5, ((10, 14), (20, 26))), "b": other})
    assert ledger.leases["a"].end == 15
    assert ledger.settle("a", 11) == Ledger(60, ((1, 2),), {"a": Lease(11, ((22, 26),)), "b": other})
    assert ledger.settle("a", 5) == ledger
    assert ledger.settle("a", 15).leases["a"] == Lease(15, ())


def test_what_is_given_back_is_kept_in_order_and_in_one_piece():
    other = Lease(1, ((50, 60),))
    ledger = Ledger(60, ((0, 10), (14, 18), (40, 41)), {"a": Lease(5, ((10, 14), (20, 26))), "b": other})
    assert ledger.release("a") == Ledger(60, ((0, 18), (20, 26), (40, 41)), {"b": other})
    assert ledger.release("b") == Ledger(60, ((0, 10), (14, 18), (40, 41), (50, 60)), {"a": ledger.leases["a"]})


@pytest.mark.parametrize(
    ("before", "names", "ahead", "after"),
    [
        (
            Ledger(30, ((0, 2), (4, 10)), {"a": Lease(7, ((20, 30),)), "b": Lease(3, ((10, 14),))}),
            "bca",
            8,
            Ledger(
                34,
                (),
                {"a": Lease(7, ((20, 30),)), "b": Lease(3, ((10, 14), (0, 2), (4, 6))), "c": Lease(0, ((6, 10), (30, 34)))},
            ),
        ),
        (Ledger(30, (), {"a": Lease(7, ((20, 30),))}), "a", 10, Ledger(30, (), {"a": Lease(7, ((20, 30),))})),
        (Ledger(30, (), {"a": Lease(7, ((20, 30),))}), "a", 11, Ledger(31, (), {"a": Lease(7, ((20, 31),))})),
        (Ledger(9, ((5, 9),), {"a": Lease(0, ((0, 5),))}), "a", 6, Ledger(9, ((6, 9),), {"a": Lease(0, ((0, 6),))})),
        (Ledger(), "ba", 3, Ledger(6, (), {"b": Lease(0, ((0, 3),)), "a": Lease(0, ((3, 6),))})),
        (Ledger(9), "a", 0, Ledger(9, (), {"a": Lease()})),
    ],
)
def test_free_positions_are_leased_first_and_then_new_ones(before, names, ahead, after):
    assert before.top_up(names, ahead) == after
