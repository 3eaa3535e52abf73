"""The verbs of a settlement against a node of a chain over HTTP: an EVM in this process, behind a JSON-RPC server of the tests."""

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

for needed in ("eth_tester", "eth", "eth_account"):
    pytest.importorskip(needed, reason="pip install './plugins/settlement[test]'")

from eth_account.signers.local import LocalAccount
from evm import ETHER, EvmRpc, act, served
from test_settlement import DELAY, STAKE, WINDOW, Settling

from dilocox.protocol.consensus.head import initial_head
from dilocox.transport.store.chain_file import ChainFile
from dilocox_settlement.contract import Contract
from dilocox_settlement.due import posted
from tests.helpers import COORDINATOR, Table, digest, dilocox, manifest


@dataclass
class Desk:
    """Runner of verbs, in the folder of a daemon that has the run's chain."""

    folder: Path
    settling: Settling
    url: str
    say: Callable[..., tuple[int, str]]

    def key(self, account: LocalAccount) -> str:
        path = self.folder / f"{account.address}.key"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(account.key.hex() + "\n")
        return str(path)

    def write(self, table: Table | None = None) -> None:
        """Write the current chain."""
        table = table or self.settling.table
        folder = self.folder / "runs" / table.run.run_id.hex()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with closing(ChainFile(folder / "chain.db", table.run)) as kept:
            for commit in table.commits[kept.length :]:
                kept.write(initial_head(COORDINATOR.peer, table.run.model.root), commit)

    def __call__(self, verb: str, key: LocalAccount, *arguments: str, url: str = "") -> tuple[int, str]:
        return self.say(
            "settlement",
            *verb.split(),
            "--rpc",
            url or self.url,
            "--key",
            self.key(key),
            "--home",
            str(self.folder),
            *arguments,
        )


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        code = dilocox(monkeypatch, *arguments)
        said = capsys.readouterr()
        return code, (said.out + said.err).replace("\n", " ")

    return run


@pytest.fixture
def desk(tmp_path: Path, say: Callable[..., tuple[int, str]]) -> Iterator[Desk]:
    settling = Settling()
    with served(settling.rpc) as url:
        yield Desk(tmp_path, settling, url, say)


def test_a_run_settles_by_its_verbs_and_nothing_is_sent_unsaid(desk: Desk):
    run = desk.settling
    run.table.train(3)
    desk.write()
    code, said = desk("settle", run.coordinator)
    assert (code, "nothing was sent" in said) == (0, True), said
    assert re.search(r"at most [\d,]{6,} gas", said)
    assert not run.contract.pending().posted
    code, said = desk("settle", run.coordinator, "--send")
    assert (code, "in block" in said) == (0, True), said
    assert run.contract.pending()[:5] == (*posted(run.table.commits[-1])[:4], run.contract.pending().posted)
    code, said = desk("claim", run.peers[0])
    assert (code, "nothing is settled yet" in said) == (1, True), said
    run.rpc.travel(WINDOW)
    before = run.rpc.balance(run.peers[0].address)
    code, said = desk("claim", run.sponsor, run.peers[0].address)
    assert (code, "nothing was sent" in said) == (0, True), said
    assert run.rpc.balance(run.peers[0].address) == before, "a dry run"
    code, said = desk("claim", run.sponsor, run.peers[0].address, "--send")
    assert (code, "in block" in said) == (0, True), said
    assert run.rpc.balance(run.peers[0].address) == before + run.worth(run.merit(0))
    code, said = desk("claim", run.sponsor, run.peers[0].address, "--send")
    assert (code, "nothing is due" in said) == (1, True), said
    code, said = desk("claim", run.sponsor, run.sponsor.address)
    assert (code, "earned nothing" in said) == (1, True), said


def test_a_stake_comes_and_goes_by_its_verb(desk: Desk):
    run, peer = desk.settling, desk.settling.peers[0]
    run.table.train(1)
    desk.write()
    code, said = desk("stake", peer, str(STAKE), "--send")
    assert (code, f"{DELAY:,} s after --leave" in said) == (0, True), said
    assert run.contract.read("stakes", peer.address) == 2 * STAKE
    assert desk("stake", peer, "--leave", "--send")[0] == 0
    code, said = desk("stake", peer, "--withdraw", "--send")
    assert (code, "not yet" in said) == (1, True), said
    run.rpc.travel(DELAY)
    assert desk("stake", peer, "--withdraw", "--send")[0] == 0
    assert run.contract.read("stakes", peer.address) == 0
    code, said = desk("stake", peer)
    assert (code, "AMOUNT, --leave, --withdraw" in said) == (2, True), said


def test_a_contract_is_made_bound_and_paid_back_by_verbs(desk: Desk):
    run = desk.settling
    terms = ["--coordinator", run.coordinator.address, "--arbiter", run.arbiter.address, "--price", "7", "--least-stake", "5"]
    money = [*terms, "--pool", str(ETHER), "--window", str(WINDOW), "--delay", str(DELAY)]
    made = ["settlement", "contract", "deploy", "--rpc", desk.url, "--key", desk.key(run.sponsor), *money]
    code, said = desk.say(*made, "--chain-id", str(run.rpc.chain_id + 1))
    assert (code, "is a node of chain" in said) == (1, True), said
    code, said = desk.say(*made, "--chain-id", str(run.rpc.chain_id))
    assert (code, "nothing was sent" in said, "0x" in said.partition("nothing")[2]) == (0, True, False), said
    code, said = desk.say(*made, "--chain-id", str(run.rpc.chain_id), "--send")
    assert code == 0, said
    found = re.search(r'\[settlement\] chain_id = (\d+) contract = "(0x[0-9a-f]{40})"', said)
    assert found, said
    contract = Contract(run.rpc, found[2], int(found[1]))
    assert contract.read("SPONSOR") == run.sponsor.address.lower()
    assert (contract.read("COORDINATOR"), contract.read("ARBITER")) == (
        run.coordinator.address.lower(),
        run.arbiter.address.lower(),
    )
    assert [contract.read(name) for name in ("PRICE", "MIN_STAKE", "WINDOW", "DELAY", "funded")] == [7, 5, WINDOW, DELAY, ETHER]

    said_settlement = {"chain_id": int(found[1]), "contract": found[2]}
    table = Table(manifest(settlement=said_settlement, rounds={"count": 3})).genesis().train(1)
    desk.write(table)
    code, said = desk("settle", run.coordinator)
    assert (code, "dilocox settlement contract bind" in said) == (1, True), said
    code, said = desk("contract bind", run.peers[0])
    assert (code, "not the sponsor" in said) == (1, True), said
    assert desk("contract bind", run.sponsor, "--send")[0] == 0
    assert contract.read("run") == table.run.run_id
    code, said = desk("contract bind", run.sponsor, "--send")
    assert (code, "settles the run" in said) == (1, True), said
    code, said = desk("contract refund", run.sponsor)
    assert (code, "the run goes on" in said) == (1, True), said
    run.rpc.travel(contract.read("CLOSES") - run.rpc.now)
    held = run.rpc.balance(contract.address)
    assert desk("contract refund", run.sponsor, "--send")[0] == 0
    assert (held, run.rpc.balance(contract.address)) == (ETHER, 0)


def test_an_arbiter_strikes_what_the_chain_does_not_say_and_burns_what_it_proves(desk: Desk):
    run = desk.settling
    run.table.train(1)
    run.table.contribute()
    run.table.submit(run.table.contribution(2, loss=3.0))
    run.table.vote([0, 1, 2])
    desk.write()
    code, said = desk("contract veto", run.arbiter)
    assert (code, "nothing to veto" in said) == (1, True), said
    run.settle()
    code, said = desk("contract veto", run.arbiter, "--send")
    assert (code, "nothing to veto" in said) == (1, True), said
    act(run.contract, run.arbiter, "veto")
    told = posted(run.table.commits[-1])
    act(run.contract, run.coordinator, "settle", digest("a lie"), *told[1:])
    run_settled = run.contract.pending()
    code, said = desk("contract veto", run.arbiter)
    assert (code, run.contract.pending()) == (0, run_settled), said
    assert desk("contract veto", run.arbiter, "--send")[0] == 0
    assert not run.contract.pending().posted

    code, said = desk("contract slash", run.arbiter)
    assert (code, run.peers[2].address.lower() in said) == (0, True), said
    assert run.contract.read("stakes", run.peers[2].address) == STAKE
    assert desk("contract slash", run.arbiter, "--send")[0] == 0
    assert [run.contract.read("stakes", peer.address) for peer in run.peers] == [STAKE, STAKE, 0]
    code, said = desk("contract slash", run.arbiter, "--send")
    assert (code, "no unpunished proof" in said) == (1, True), said


def test_a_line_that_leads_elsewhere_gets_a_sentence(desk: Desk):
    run = desk.settling
    run.table.train(1)
    desk.write()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    code, said = desk("settle", run.coordinator, url=nobody)
    assert (code, "does not answer eth_call" in said, "--rpc" in said) == (1, True, True), said
    code, said = desk("settle", run.coordinator, url="ftp://x")
    assert (code, "http:// or https://" in said) == (2, True), said
    with served(_Elsewhere()) as url:
        code, said = desk("settle", run.coordinator, url=url)
        assert (code, "settlement contract" in said) == (1, True), said
    run.rpc.chain_id += 1
    code, said = desk("settle", run.coordinator, url=desk.url)
    assert (code, f"--rpc is a node of chain {run.rpc.chain_id}" in said) == (1, True), said
    run.rpc.chain_id -= 1
    code, said = desk("settle", run.peers[0], "--send")
    assert (code, "not the coordinator" in said, "Traceback" in said) == (1, True, False), said


class _Elsewhere(EvmRpc):
    """A chain without the contract."""
