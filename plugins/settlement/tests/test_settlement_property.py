"""Test of the money of a settlement: for any actions in any order, the contract agrees with a few lines of arithmetic."""

from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

for needed in ("eth_tester", "eth", "eth_account"):
    pytest.importorskip(needed, reason="pip install './plugins/settlement[test]'")

from evm import EvmRpc, act, deploy

from dilocox.protocol.checks import merit_rules
from dilocox.protocol.errors import LocalError
from dilocox_settlement.contract import Contract

WINDOW, DELAY, LIFE, POOL, STAKE, PRICE = 1000, 3000, 100_000, 50_000, 10, 333_333
"""A third of a wei for each merit: most payments are rounded."""
PEERS = 3


@dataclass
class Model:
    """Model of the right amounts: wei by account. A rejected call raises."""

    funded: int = POOL
    refunded: int = 0
    accepted: tuple[int, ...] | None = None
    """Merit by peer that claims are proved against."""
    pending: tuple[int, ...] | None = None
    posted: int = 0
    paid: list[int] = field(default_factory=lambda: [0] * PEERS)
    stakes: list[int] = field(default_factory=lambda: [0] * PEERS)

    @property
    def pool(self) -> int:
        return self.funded - self.refunded - sum(self.paid)

    def promote(self, now: int) -> None:
        if self.pending is not None and now >= self.posted + WINDOW:
            self.accepted, self.pending = self.pending, None

    def settle(self, merits: tuple[int, ...], now: int) -> None:
        self.promote(now)
        assert self.pending is None
        assert worth(sum(merits)) <= self.funded - self.refunded
        self.pending, self.posted = merits, now

    def claim(self, peer: int, now: int) -> None:
        self.promote(now)
        assert self.accepted is not None
        assert self.stakes[peer] >= STAKE
        assert self.accepted[peer]
        assert worth(self.accepted[peer]) > self.paid[peer]
        self.paid[peer] = worth(self.accepted[peer])


def worth(merits: int) -> int:
    return merits * PRICE // 10**6


@cache
def contract() -> tuple[EvmRpc, Contract]:
    rpc = EvmRpc()
    sponsor, coordinator, arbiter = map(rpc.account, range(3))
    for number in range(3, 3 + PEERS):
        rpc.account(number)
    terms = (coordinator.address, arbiter.address, PRICE, WINDOW, DELAY, STAKE, rpc.now + LIFE)
    made = deploy(rpc, sponsor, *terms, value=POOL)
    act(made, sponsor, "bind", b"\1" * 32)
    return rpc, made


PEER = st.integers(0, PEERS - 1)
ACTS = st.one_of(
    st.tuples(st.just("train"), PEER, st.integers(1, 40_000)),
    st.tuples(st.sampled_from(["stake", "slash", "claim", "claim"]), PEER, st.integers(1, 2 * STAKE)),
    st.tuples(st.sampled_from(["settle", "settle", "veto", "fund", "wait", "forge"]), PEER, st.integers(1, 2 * WINDOW)),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(ACTS, min_size=5, max_size=25))
def test_the_contract_pays_what_the_arithmetic_says(acts: list[tuple[str, int, int]]):
    rpc, made = contract()
    before = rpc.tester.take_snapshot()
    try:
        _play(rpc, made, acts)
    finally:
        rpc.tester.revert_to_snapshot(before)


def _play(rpc: EvmRpc, made: Contract, acts: list[tuple[str, int, int]]) -> None:
    sponsor, coordinator, arbiter, *peers = map(rpc.account, range(3 + PEERS))
    accounts = [bytes.fromhex(peer.address[2:]) for peer in peers]
    model, merits = Model(), [0] * PEERS
    for number, (what, peer, amount) in enumerate(acts):
        refusal = ""
        try:
            match what:
                case "train":
                    merits[peer] += amount
                case "wait":
                    rpc.travel(amount)
                case "fund":
                    act(made, sponsor, "fund", value=amount)
                    model.funded += amount
                case "stake":
                    act(made, peers[peer], "stake", value=amount)
                    model.stakes[peer] += amount
                case "slash":
                    act(made, arbiter, "slash", peers[peer].address, number.to_bytes(32, "big"))
                    assert model.stakes[peer]
                    model.stakes[peer] = 0
                case "veto":
                    act(made, arbiter, "veto")
                    model.pending = None
                case "settle":
                    known = {a: m for a, m in zip(accounts, merits, strict=True) if m}
                    act(made, coordinator, "settle", merit_rules.root(known), sum(merits), number + 1, bytes(32), False)
                    model.settle(tuple(merits), rpc.now)
                case "claim" | "forge":
                    model.promote(rpc.now)
                    of = model.accepted or tuple(merits)
                    known = {a: m for a, m in zip(accounts, of, strict=True) if m}
                    proof = merit_rules.proof(known, accounts[peer]) if of[peer] else []
                    act(made, sponsor, "claim", peers[peer].address, of[peer] + (what == "forge"), proof)
                    assert what == "claim", "a forged proof was paid"
                    model.claim(peer, rpc.now)
        except LocalError as error:
            refusal = str(error)
        assert not refusal or "refuses" in refusal
        if refusal and what == "claim" and model.pending is None:
            with pytest.raises(AssertionError):
                model.claim(peer, rpc.now)
        assert model.pool >= 0
        assert rpc.balance(made.address) == model.pool + sum(model.stakes), (number, what)
        assert made.read("paid_total") == sum(model.paid)
        assert model.accepted is None or sum(model.paid) <= worth(sum(model.accepted))
