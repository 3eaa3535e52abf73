"""Nothing lost or repeated: whatever happens, every sample position is in exactly one place."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dilocox.protocol.ledger import Lease, Ledger, length


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
