"""Tests of daemons whose addresses change during a run, in network namespaces: other peers find them, and no new link is
needed."""

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.testnet.namespaces import lacking
from dilocox.testnet.swarm import WAN, LinkRates, Testnet
from tests.e2e.conftest import Swarm, build, running, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(lacking()), reason=f"network namespaces: {lacking()}")]


def move(testnet: Testnet, name: str, last: int) -> None:
    """Stop a daemon, give its machine another address, and start it there. The old address no longer answers."""
    member, network = testnet.member(name), testnet.network
    assert network is not None
    testnet.kill(member, signal.SIGTERM)
    wait_for(lambda: member.facts() is None, f"{name} ended")
    namespace, old = network.namespace(name), network.address(name, WAN)
    new = f"{old.rpartition('.')[0]}.{last}"
    for words in (["delete", f"{old}/24"], ["add", f"{new}/24"]):
        subprocess.run(["ip", "-n", namespace, "address", *words, "dev", WAN], check=True)
    arguments = [new if word == old else word for word in member.arguments]
    assert new in arguments
    moved = replace(member, arguments=arguments)
    testnet.members[testnet.members.index(member)] = moved
    testnet.start(moved)


def test_coordinator_and_node_that_moved_are_found(tmp_path: Path):
    testnet = build(tmp_path, count=100_000, nodes=4, lines=LinkRates())
    nodes = ["node-1", "node-2", "node-3"]
    with running(testnet, rounds=2) as swarm:
        _wait_until_the_dht_has_the_coordinator(swarm, nodes)
        closed = swarm.open_round()
        move(testnet, "coordinator", 201)
        wait_for(lambda: swarm.open_round() >= closed, "the coordinator that moved serves its chain")
        after = swarm.wait_until_all_are_counted(nodes, swarm.open_round() + 1)
        move(testnet, "node-1", 202)
        swarm.wait_until_all_are_counted(nodes, after + 2)


def _wait_until_the_dht_has_the_coordinator(swarm: Swarm, nodes: list[str]) -> None:
    """Wait until the coordinator wrote the nodes' addresses, with which it finds the DHT again."""
    home = swarm.testnet.member("coordinator").home
    wait_for(lambda: list(home.glob("runs/*/peers.json")), "the coordinator knows peers for its next start")
