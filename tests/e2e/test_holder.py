"""A swarm in which nobody can be dialled: friends at home, and a holder on a rented box."""

import signal
from collections.abc import Iterator

import pytest

from dilocox.node.testnet import Member
from dilocox.transport.data_directory import load_identity
from tests.e2e.conftest import Swarm, build, late_member, running, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three nodes that say they are where they are not, one more that a test starts, and the holder that the run names."""
    folder = tmp_path_factory.mktemp("hidden")
    home = folder / "holder"
    holder = load_identity(home / "identity.key").peer
    testnet = build(folder, count=100_000, nodes=4, holders=[holder], options=["--host", "192.0.2.1", "--no-dht"])
    link = str(testnet.folder / "link")
    hold = Member("holder", home, ["hold", "--join", f"@{link}", "--home", str(home), "--name", "holder", "--no-dht"])
    testnet.members.insert(1, hold)
    with running(testnet, rounds=3) as swarm:
        yield swarm


def test_everybody_is_counted_by_what_the_holder_keeps(swarm: Swarm):
    """Each payload leaves its author once, however many fetch it."""
    holder = swarm.peer("holder")
    names = [f"node-{number}" for number in (1, 2, 3)]
    swarm.wait_for_round(4)
    for name in names:
        assert swarm.status(name)["reachable"] is False
        number = swarm.wait_until_counted(name, 2)
        mine = next(item for item in swarm.round(number)["clusters"] if item["cluster"] == swarm.peer(name))
        assert mine["kept_by"] == [holder]
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")


def test_a_joiner_starts_from_the_state_that_the_holder_keeps(swarm: Swarm):
    before = swarm.open_round()
    late = late_member(swarm)
    swarm.testnet.start(late)
    swarm.wait_until_counted(late.name, before)
    wait_for(lambda: swarm.same_states(swarm.open_round()), "it holds the others' state")


@pytest.mark.thorough
def test_a_holder_that_is_killed_is_waited_for_and_goes_on(swarm: Swarm):
    """What it kept for the open round is on its disk."""
    holder = swarm.testnet.member("holder")
    swarm.testnet.kill(holder, signal.SIGKILL)
    before = swarm.open_round()
    swarm.testnet.start(holder)
    swarm.wait_for_round(before + 2)
    assert len(swarm.counted(before + 2)) >= 2
    kept = swarm.status("holder")
    assert kept["role"] == "holder"
    assert kept["kept_bytes"] > 0
