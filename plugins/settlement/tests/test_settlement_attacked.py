"""The settlement contract as an enemy would use it: accounts that are contracts, stakes that leave in time, roots of other runs."""

import importlib.util
from typing import Any

import pytest

for needed in ("eth_tester", "eth", "eth_account"):
    pytest.importorskip(needed, reason="pip install './plugins/settlement[test]'")

from eth_abi import encode
from eth_utils import keccak
from evm import ETHER, act, deploy
from test_settlement import DELAY, POOL, PRICE, STAKE, WINDOW, Settling, refused

from dilocox.protocol.checks import merit_rules
from dilocox.protocol.errors import LocalError
from dilocox_settlement.contract import call_data, prepare
from dilocox_settlement.due import claim_of
from tests.helpers import digest

GREEDY = """
# pragma version 0.4.3
TARGET: immutable(address)
again: Bytes[1024]
tries: public(uint256)
passed: public(uint256)

@deploy
def __init__(target: address):
    TARGET = target

@external
@payable
def act(data: Bytes[1024], again: Bytes[1024]):
    self.again = again
    raw_call(TARGET, data, value=msg.value)

@external
@payable
def __default__():
    if len(self.again) > 0:
        self.tries += 1
        if raw_call(TARGET, self.again, revert_on_failure=False):
            self.passed += 1
"""


class Greedy:
    """An account that is a contract, and calls once more whenever it is paid."""

    def __init__(self, run: Settling) -> None:
        from vyper import compile_code

        self.run, self.owner = run, run.rpc.account(9)
        code = compile_code(GREEDY, output_formats=["bytecode"])["bytecode"]
        self.address: str = self._send(code + encode(["address"], [run.contract.address]).hex(), None)["contractAddress"]

    def _send(self, data: str, to: str | None, value: int = 0) -> dict[str, Any]:
        prepared = prepare(self.run.rpc, self.run.rpc.chain_id, self.owner.address, data, value, to)
        raw = self.owner.sign_transaction(prepared.transaction).raw_transaction.hex()
        found = self.run.rpc.eth_getTransactionReceipt(self.run.rpc("eth_sendRawTransaction", ["0x" + raw]))
        assert found is not None
        assert found["status"] == "0x1"
        return found

    def act(self, data: str, again: str = "0x", value: int = 0) -> None:
        said = encode(["bytes", "bytes"], [bytes.fromhex(data[2:]), bytes.fromhex(again[2:])])
        self._send("0x" + (keccak(text="act(bytes,bytes)")[:4] + said).hex(), self.address, value)

    def read(self, name: str) -> int:
        call = {"to": self.address, "data": "0x" + keccak(text=f"{name}()")[:4].hex()}
        return int(self.run.rpc("eth_call", [call, "latest"]), 16)


@pytest.mark.skipif(importlib.util.find_spec("vyper") is None, reason="no vyper: pip install './plugins/settlement[test]'")
@pytest.mark.parametrize("again", ["claim", "withdraw", "another's claim"])
def test_who_is_paid_cannot_be_paid_once_more_meanwhile(again: str):
    run = Settling()
    greedy = Greedy(run)
    account, other = bytes.fromhex(greedy.address[2:]), bytes.fromhex(run.peers[0].address[2:])
    merits = {account: 4_000_000, other: 1_000_000}
    greedy.act(call_data("stake"), value=STAKE)
    act(run.contract, run.coordinator, "settle", merit_rules.root(merits), 5_000_000, 1, digest("head"), False)
    run.rpc.travel(WINDOW)
    claims = {each: call_data("claim", "0x" + each.hex(), merits[each], merit_rules.proof(merits, each)) for each in merits}
    meanwhile = {"claim": claims[account], "withdraw": call_data("withdraw"), "another's claim": claims[other]}[again]
    greedy.act(claims[account], meanwhile)
    assert (greedy.read("tries"), greedy.read("passed")) == (1, 0)
    assert run.rpc.balance(greedy.address) == 4 * PRICE == run.contract.read("paid_total")
    greedy.act(call_data("unstake"))
    run.rpc.travel(DELAY)
    greedy.act(call_data("withdraw"), call_data("withdraw"))
    assert (greedy.read("tries"), greedy.read("passed")) == (2, 0)
    assert run.rpc.balance(greedy.address) == 4 * PRICE + STAKE
    assert run.rpc.balance(run.contract.address) == POOL + 3 * STAKE - 4 * PRICE


def test_who_is_paid_cannot_have_a_stake_that_leaves_before_it_can_be_slashed():
    """Check that a paid account has no stake past its delay. Otherwise an equivocator is paid with it, and withdraws it
    when it sees the slash coming."""
    run = Settling()
    run.table.train(2)
    peer = run.peers[0]
    act(run.contract, peer, "unstake")
    run.settle()
    run.rpc.travel(DELAY)
    with pytest.raises(LocalError, match="the stake is leaving"):
        run.claim(0)
    act(run.contract, peer, "stake", value=1)
    run.claim(0)
    refused(run, "not yet", peer, "withdraw")
    act(run.contract, peer, "unstake")
    run.rpc.travel(DELAY - 10)
    refused(run, "not yet", peer, "withdraw")
    act(run.contract, run.arbiter, "slash", peer.address, digest("two"))
    run.rpc.travel(DELAY)
    refused(run, "not yet", peer, "withdraw")
    assert run.contract.read("stakes", peer.address) == 0


def test_a_proof_of_one_run_pays_nothing_in_another():
    run = Settling()
    run.table.train(2)
    account = bytes.fromhex(run.peers[0].address[2:])
    elsewhere = claim_of(run.table.commits[-1].body, account)
    other = {account: elsewhere.merit + 1, bytes.fromhex(run.peers[1].address[2:]): 7}
    act(run.contract, run.coordinator, "settle", merit_rules.root(other), sum(other.values()), 1, digest("head"), False)
    run.rpc.travel(WINDOW)
    refused(run, "no proof", run.peers[0], "claim", *elsewhere)
    # A leaf is no inner node, and a root no leaf.
    refused(run, "no proof", run.peers[0], "claim", run.peers[0].address, other[account], [])
    refused(run, "no proof", run.peers[0], "claim", run.peers[0].address, other[account], [merit_rules.root(other)])


def test_claiming_often_makes_nothing_of_what_is_rounded():
    """Check a third of a wei for each merit; four accounts, three roots, each claimed or not."""
    run = Settling()
    terms = (run.coordinator.address, run.arbiter.address, 333_333, WINDOW, DELAY, 1, run.rpc.now + 10**6)
    contract = deploy(run.rpc, run.sponsor, *terms, value=10_000)
    act(contract, run.sponsor, "bind", bytes(31) + b"\1")
    accounts = sorted(bytes.fromhex(run.rpc.account(20 + number).address[2:]) for number in range(4))
    for number in range(4):
        act(contract, run.rpc.account(20 + number), "stake", value=1)
    for turn in range(1, 4):
        merits = {account: turn * (number + 1) for number, account in enumerate(accounts)}
        act(contract, run.coordinator, "settle", merit_rules.root(merits), sum(merits.values()), turn, digest("x"), turn == 3)
        run.rpc.travel(WINDOW)
        for number, account in enumerate(accounts):
            if number % 2 or turn == 3:
                already = contract.read("paid", "0x" + account.hex())
                if merits[account] * 333_333 // 10**6 > already:
                    act(
                        contract,
                        run.sponsor,
                        "claim",
                        "0x" + account.hex(),
                        merits[account],
                        merit_rules.proof(merits, account),
                    )
                assert contract.read("paid", "0x" + account.hex()) == merits[account] * 333_333 // 10**6
    total = sum(merits.values()) * 333_333 // 10**6
    assert total - len(accounts) <= contract.read("paid_total") <= total


def test_a_refund_before_the_last_claims_leaves_what_they_are_due():
    run = Settling(rounds=2)
    run.table.train(2)
    for number in range(3):
        run.table.submit(run.table.report(number))
    assert run.table.head.finished
    run.settle()
    refused(run, "the run goes on", run.sponsor, "refund")
    run.rpc.travel(WINDOW)
    act(run.contract, run.sponsor, "refund")
    refused(run, "nothing is left", run.sponsor, "refund")
    refused(run, "the last was settled", run.coordinator, "settle", digest("r"), 10**9, 10**6, digest("x"), True)
    for number in range(3):
        run.claim(number)
    assert run.contract.read("paid_total") == sum(run.worth(run.merit(number)) for number in range(3))


def test_a_contract_whose_roots_hold_at_once_is_not_made():
    run = Settling()
    for window, delay in ((0, DELAY), (WINDOW, WINDOW - 1)):
        terms = (run.coordinator.address, run.arbiter.address, PRICE, window, delay, STAKE, run.rpc.now + 10**6)
        with pytest.raises(LocalError, match="too short"):
            deploy(run.rpc, run.sponsor, *terms, value=ETHER)


def test_whoever_has_the_coordinators_key_is_paid_nothing_while_the_arbiter_looks():
    """Check that the arbiter can stop the key's thief. The thief can delay payments of others as long; the sponsor gets
    them back in the end."""
    run = Settling()
    thief = bytes.fromhex(run.peers[1].address[2:])
    for _ in range(3):
        lie = (merit_rules.root({thief: 10**9}), 10**9, 2**63, digest("x"), True)
        act(run.contract, run.coordinator, "settle", *lie)
        refused(run, "nothing is settled", run.peers[1], "claim", run.peers[1].address, 10**9, [])
        act(run.contract, run.arbiter, "veto")
    run.table.train(1)
    run.settle()
    run.rpc.travel(WINDOW)
    run.claim(0)
