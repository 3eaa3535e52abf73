"""Tests of two clusters of two hosts, each host with a separate network. The tests run in order."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.node.workers.environment import WORKER
from dilocox.testnet.namespaces import Namespaces, lacking
from dilocox.testnet.swarm import LAN, WAN, LinkRates
from tests.e2e.conftest import PATIENCE_SECONDS, Swarm, build, names, running, wait_for, wait_until_gone
from tests.e2e.test_boxes import CHANGES
from tests.e2e.test_testnet import start

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(lacking()), reason=lacking() or "it can run here")]

LEAD, BOX, OTHER, LATE = "node-1", "node-1-box-2", "node-2", "node-2-box-2"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Run clusters with two copies of a pipeline, whose last stage is in the second host."""
    folder, lines = tmp_path_factory.mktemp("namespaces"), LinkRates(lan=1e9, wan=1e8)
    testnet = build(folder, count=100_000, nodes=2, options=["--no-dht"], changes=CHANGES, boxes=2, lines=lines)
    testnet.coordinator.arguments.append("--no-dht")
    late = testnet.member(LATE)
    with running(testnet, rounds=-1) as swarm:
        assert late.needs is not None
        wait_for(late.needs.exists, "the second cluster's lead wrote its link")
        testnet.start(late)
        yield swarm
    assert not network_of(swarm).laid


def network_of(swarm: Swarm) -> Namespaces:
    assert swarm.testnet.network is not None
    return swarm.testnet.network


def test_clusters_of_boxes_train_to_one_state_over_lines_of_their_own(swarm: Swarm):
    for name in (LEAD, OTHER):
        swarm.wait_until_counted(name, 1)
    before, number = network_of(swarm).traffic(LAN), swarm.open_round()
    swarm.wait_for_round(number + 1)
    after = network_of(swarm).traffic(LAN)
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")
    for name in (LEAD, BOX, OTHER, LATE):
        assert swarm.status(name)["address"].startswith(network_of(swarm).address(name, WAN) + ":")
        assert after[name].since(before[name]).sent > 100_000, "activations, or their gradients"


@pytest.mark.thorough
def test_a_box_that_is_killed_costs_the_other_cluster_no_round(swarm: Swarm):
    for name in (LEAD, OTHER):
        swarm.wait_until_counted(name, 1)
    before = swarm.open_round()
    workers = [p for name in (LEAD, BOX) for p in swarm.processes(name) if names(p, WORKER)]
    assert len(workers) == 4
    swarm.testnet.kill(swarm.testnet.member(BOX), signal.SIGKILL)
    wait_until_gone(workers)
    swarm.wait_for_round(swarm.open_round() + 1)
    swarm.testnet.start(swarm.testnet.member(BOX))
    back = swarm.wait_until_counted(LEAD, swarm.open_round())
    assert all(swarm.peer(OTHER) in swarm.counted(number) for number in range(before, back))
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")


def made_by(pid: int) -> list[Path]:
    return [*Path("/run/netns").glob(f"dx{pid:x}-*"), *Path("/sys/class/net").glob(f"dx{pid:x}-*")]


@pytest.mark.thorough
def test_a_testnet_says_what_crossed_each_line_and_removes_them(tmp_path: Path):
    changes = {"start_clusters = 3": "start_clusters = 2"}
    options = ["--nodes", "2", "--devices", "1", "--wan", "100mbit", "--no-baseline"]
    process = start(tmp_path, 3, *options, changes=changes)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "WAN bytes of each host" in output
    assert len(re.findall(r"^node-[12] +[\d,]+ +[\d,]+ +100% sent, 100% received", output, re.MULTILINE)) == 2, output
    assert made_by(process.pid) == []


@pytest.mark.thorough
def test_ctrl_c_removes_the_network(tmp_path: Path):
    process = start(tmp_path, 1000, "--boxes", "2", "--lan", "1gbit", "--devices", "1")
    wait_for(lambda: (tmp_path / "t" / "link").exists(), "the coordinator runs")
    assert made_by(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert made_by(process.pid) == []
