"""Tests of a run that settles on a chain in this process: the contract's own bytecode, and the product's calls of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("eth_tester", "eth", "eth_account"):
    pytest.importorskip(needed, reason="pip install './plugins/settlement[test]'")

from evm import ETHER, EvmRpc, act, deploy

from dilocox.protocol.checks.merit import merits_of
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox_settlement import compile as compiler
from dilocox_settlement.contract import Contract, artifact
from dilocox_settlement.due import claim_of, equivocations, posted
from dilocox_settlement.keys import make_key, read_key
from tests.helpers import Table, digest, identity, manifest

WINDOW, DELAY, STAKE, POOL = 1000, 5000, ETHER, 20 * ETHER
PRICE = ETHER // 1000
"""Wei for a million merit."""


class Settling:
    """Contract with its roles, and a run that names it."""

    def __init__(self, rounds: int = 20) -> None:
        self.rpc = EvmRpc()
        self.sponsor, self.coordinator, self.arbiter, *self.peers = map(self.rpc.account, range(6))
        closes = self.rpc.now + 10**6
        terms = (self.coordinator.address, self.arbiter.address, PRICE, WINDOW, DELAY, STAKE, closes)
        self.contract = deploy(self.rpc, self.sponsor, *terms, value=POOL)
        self.closes = closes
        said = {"chain_id": self.rpc.chain_id, "contract": self.contract.address}
        self.table = Table(manifest(settlement=said, rounds={"count": rounds, "inner_steps": 1000, "max_inner_steps": 3000}))
        act(self.contract, self.sponsor, "bind", self.table.run.run_id)
        for number, peer in enumerate(self.peers):
            claim = self.table.claim(number, account=bytes.fromhex(peer.address[2:]))
            assert self.table.submit(claim).outcome is Outcome.ACCEPT
            act(self.contract, peer, "stake", value=STAKE)

    def settle(self) -> int:
        return act(self.contract, self.coordinator, "settle", *posted(self.table.commits[-1]))

    def worth(self, merit: int) -> int:
        return merit * PRICE // 10**6

    def merit(self, number: int) -> int:
        return merits_of(self.table.head)[bytes.fromhex(self.peers[number].address[2:])]

    def claim(self, number: int) -> int:
        """Claim by another sender: the account is paid all the same."""
        account = bytes.fromhex(self.peers[number].address[2:])
        return act(self.contract, self.sponsor, "claim", *claim_of(self.table.commits[-1].body, account))


def refused(settling: Settling, why: str, key: object, name: str, *arguments: object, value: int = 0) -> None:
    with pytest.raises(LocalError, match=why):
        act(settling.contract, key, name, *arguments, value=value)


def test_twenty_rounds_settle_and_everybody_claims_exactly_its_merit_and_the_equivocator_is_slashed():
    run = Settling()
    table, contract, rpc = run.table, run.contract, run.rpc
    table.train(9)
    run.settle()
    rpc.travel(WINDOW)
    before = [rpc.balance(peer.address) for peer in run.peers]
    run.claim(0)
    assert rpc.balance(run.peers[0].address) == before[0] + run.worth(run.merit(0))

    # The tenth round: the third cluster signs two contributions.
    table.contribute()
    table.submit(table.contribution(2, loss=3.0))
    table.vote([0, 1, 2])
    assert len(table.head.roster) == 3
    table.train(10)
    proofs = equivocations(table.commits)
    assert [(each.cluster, each.account, each.round) for each in proofs] == [
        (identity(2).key, bytes.fromhex(run.peers[2].address[2:]), 10)
    ]
    held, burnt = rpc.balance(contract.address), rpc.balance("0x" + "00" * 20)
    act(contract, run.arbiter, "slash", run.peers[2].address, proofs[0].digest)
    assert rpc.balance(contract.address) == held - STAKE
    assert rpc.balance("0x" + "00" * 20) >= burnt + STAKE  # which also has what blocks pay there
    refused(run, "punished already", run.arbiter, "slash", run.peers[0].address, proofs[0].digest)

    for number in range(3):
        table.submit(table.report(number))  # the closing round records the state
    assert table.head.finished
    assert merits_of(table.verify()) == merits_of(table.head)
    assert 0 < run.merit(2) < run.merit(0)  # not of that round, and less for a while: its reputation fell
    run.settle()
    rpc.travel(WINDOW)
    for number in (0, 1):
        run.claim(number)
        assert rpc.balance(run.peers[number].address) == before[number] + run.worth(run.merit(number))
    with pytest.raises(LocalError, match="no stake"):
        run.claim(2)
    paid = run.worth(run.merit(0)) + run.worth(run.merit(1))
    assert contract.read("paid_total") == paid
    total = sum(merits_of(table.head).values())
    act(contract, run.sponsor, "refund")
    assert rpc.balance(contract.address) == run.worth(total) - paid + 2 * STAKE
    rpc.travel(run.closes - rpc.now)
    act(contract, run.sponsor, "refund")
    assert rpc.balance(contract.address) == 2 * STAKE
    assert contract.read("funded") - contract.read("refunded") - contract.read("paid_total") == 0


def test_what_is_forged_stale_repeated_or_vetoed_pays_nothing():
    run = Settling()
    run.table.train(2)
    old = claim_of(run.table.commits[-1].body, bytes.fromhex(run.peers[0].address[2:]))
    refused(run, "not the coordinator", run.peers[0], "settle", *posted(run.table.commits[-1]))
    refused(run, "nothing is settled", run.peers[0], "claim", *old)
    run.settle()
    refused(run, "nothing is settled", run.peers[0], "claim", *old)
    refused(run, "one is being challenged", run.coordinator, "settle", *posted(run.table.commits[-1]))
    act(run.contract, run.arbiter, "veto")
    run.rpc.travel(WINDOW)
    refused(run, "nothing is settled", run.peers[0], "claim", *old)
    run.settle()
    run.rpc.travel(WINDOW)
    refused(run, "nothing to veto", run.arbiter, "veto")
    refused(run, "no proof", run.peers[0], "claim", old.account, old.merit + 1, old.proof)
    refused(run, "no proof", run.peers[1], "claim", run.peers[1].address, old.merit, old.proof)
    run.claim(0)
    with pytest.raises(LocalError, match="nothing is due"):
        run.claim(0)
    run.table.train(1)
    run.settle()
    run.rpc.travel(WINDOW)
    refused(run, "no proof", run.peers[0], "claim", *old)
    refused(run, "older", run.coordinator, "settle", *posted(run.table.commits[-2]))


def test_a_coordinator_that_lies_can_pay_out_no_more_than_it_said_and_no_more_than_is_there():
    run = Settling()
    run.table.train(1)
    said = posted(run.table.commits[-1])
    refused(run, "not funded", run.coordinator, "settle", said.root, 10**30, *said[2:])
    act(run.contract, run.coordinator, "settle", said.root, run.merit(0), *said[2:])
    run.rpc.travel(WINDOW)
    run.claim(0)
    with pytest.raises(LocalError, match="more than was settled"):
        run.claim(1)


def test_a_stake_leaves_after_the_delay_and_is_reached_until_then():
    run = Settling()
    peer = run.peers[0]
    refused(run, "not yet", peer, "withdraw")
    act(run.contract, peer, "unstake")
    refused(run, "not yet", peer, "withdraw")
    refused(run, "not the arbiter", peer, "slash", run.peers[1].address, digest("evidence"))
    run.rpc.travel(DELAY)
    act(run.contract, peer, "withdraw")
    refused(run, "not yet", peer, "withdraw")
    assert run.contract.read("staked") == 2 * STAKE == run.rpc.balance(run.contract.address) - POOL
    refused(run, "the run goes on", run.sponsor, "refund")
    refused(run, "not the sponsor", peer, "refund")


def test_another_chain_and_another_contract_are_refused_before_anything_is_sent():
    run = Settling()
    elsewhere = Contract(run.rpc, run.contract.address, run.rpc.chain_id + 1)
    with pytest.raises(LocalError, match="the run settles on chain"):
        elsewhere.prepare(run.sponsor.address, "fund", value=1)
    with pytest.raises(LocalError, match=run.sponsor.address.lower()):
        Contract(run.rpc, run.sponsor.address.lower(), run.rpc.chain_id).read("current")


@pytest.mark.skipif(importlib.util.find_spec("vyper") is None, reason="no vyper: pip install './plugins/settlement[test]'")
def test_the_bytecode_is_what_the_source_compiles_to():
    assert json.loads(json.dumps(compiler.compiled())) == artifact(), "run `python -m dilocox_settlement.compile`"


def test_a_key_file_is_its_users_alone_and_never_overwritten(tmp_path):
    path = tmp_path / "key"
    made = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).address == made.address
    with pytest.raises(FileExistsError):
        make_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_key(path)


@pytest.mark.parametrize("module", ["dilocox_settlement.keys", "dilocox_settlement.contract"])
def test_json_that_nests_deep_is_still_an_error_and_no_end(module: str):
    """Check deep JSON: some libraries allow 100,000 frames at import, and the stack has space for fewer."""
    code = f"import sys; before = sys.getrecursionlimit(); import {module}; assert sys.getrecursionlimit() == before"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert sys.getrecursionlimit() < 10_000, "nor do the tests' libraries change it for other tests (conftest.py)"
