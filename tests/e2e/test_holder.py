"""Tests of a swarm without reachable nodes: friends at home, and a relay on a rented host."""

import signal
from collections.abc import Iterator, Mapping

import pytest

from dilocox.protocol.checks import merit_rules
from dilocox.testnet.swarm import Member
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.files import find_chains
from tests.e2e.conftest import Swarm, build, late_member, running, wait_for

pytestmark = pytest.mark.e2e

ACCOUNTS = {f"node-{number}": bytes([number]) * 20 for number in (1, 2, 3)}
"""Accounts that the nodes name for payment. The fourth node names none."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Run three nodes that report wrong addresses, the relay that the run names, and prepare one more node that a test
    starts."""
    folder = tmp_path_factory.mktemp("hidden")
    home = folder / "holder"
    holder = load_identity(home / "identity.key").peer
    changes = {"snapshot_every = 4": f'snapshot_every = 4\n[settlement]\nchain_id = 1\ncontract = "0x{"ab" * 20}"'}
    options = ["--host", "192.0.2.1", "--no-dht"]
    testnet = build(folder, count=100_000, nodes=4, holders=[holder], options=options, changes=changes)
    for name, account in ACCOUNTS.items():
        testnet.member(name).arguments.extend(["--account", "0x" + account.hex()])
    link = str(testnet.folder / "link")
    hold = Member("holder", home, ["relay", "--join", f"@{link}", "--home", str(home), "--name", "holder", "--no-dht"])
    testnet.members.insert(1, hold)
    with running(testnet, rounds=3) as swarm:
        yield swarm


def test_everybody_is_counted_by_what_the_holder_keeps(swarm: Swarm):
    """Check that each payload leaves its author once, however many peers fetch it."""
    holder = swarm.peer("holder")
    names = [f"node-{number}" for number in (1, 2, 3)]
    swarm.wait_for_round(4)
    for name in names:
        assert swarm.status(name)["reachable"] is False
        number = swarm.wait_until_counted(name, 2)
        mine = next(item for item in swarm.round(number)["clusters"] if item["cluster"] == swarm.peer(name))
        assert mine["kept_by"] == [holder]
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")


def test_what_was_earned_is_in_the_commits_that_everybody_keeps(swarm: Swarm):
    """Check the merits of the named accounts; a contract receives the root over them."""
    wait_for(lambda: len(earned(swarm, "node-2")) == len(ACCOUNTS), "all have earned")
    assert set(earned(swarm, "node-2")) == set(ACCOUNTS.values())


def earned(swarm: Swarm, name: str) -> Mapping[bytes, int]:
    """Return the merits in the node's chain, of which every commit is verified."""
    with ChainFile.for_reading(find_chains(swarm.testnet.member(name).home)[-1]) as chain:
        *_, newest = chain.verify()
    found = {item.account: item.merit for item in newest.body.merits}
    assert newest.body.merit_root == merit_rules.root(found)
    for account, each in found.items():
        assert each > 0
        assert merit_rules.holds(newest.body.merit_root, account, each, merit_rules.proof(found, account))
    return found


def test_a_joiner_starts_from_the_state_that_the_holder_keeps(swarm: Swarm):
    before = swarm.open_round()
    late = late_member(swarm)
    swarm.testnet.start(late)
    swarm.wait_until_counted(late.name, before)
    wait_for(lambda: swarm.same_states(swarm.open_round()), "it holds the others' state")


@pytest.mark.thorough
def test_a_holder_that_is_killed_is_waited_for_and_goes_on(swarm: Swarm):
    """Check that a killed relay still has the open round's blobs on its disk."""
    holder = swarm.testnet.member("holder")
    swarm.testnet.kill(holder, signal.SIGKILL)
    before = swarm.open_round()
    swarm.testnet.start(holder)
    swarm.wait_for_round(before + 2)
    assert len(swarm.counted(before + 2)) >= 2
    kept = swarm.status("holder")
    assert kept["role"] == "relay"
    assert kept["kept_bytes"] > 0
