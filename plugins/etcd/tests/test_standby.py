"""Three members of etcd, two coordinators, four nodes: each may be killed, or stopped and continued, while the run trains."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from etcd_members import EtcdMembers, etcd_members

from dilocox.testnet.swarm import ANSWER_SECONDS, Member
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.files import find_chains
from tests.e2e.conftest import Swarm, build, wait_for, wait_until_gone

pytestmark = pytest.mark.e2e

OFFICES = ("coordinator", "coordinator-2")


@dataclass
class Offices(Swarm):
    etcd: EtcdMembers
    answer_seconds: ClassVar[float] = ANSWER_SECONDS
    """Seconds for an answer; the leader may be stopped."""

    def leader(self) -> str | None:
        """Return the coordinator that answers and reports that it leads."""
        return next((name for name in OFFICES if self.status(name).get("role") == "coordinator"), None)

    def other(self, name: str) -> str:
        return next(each for each in OFFICES if each != name)

    def stands_by(self, name: str) -> bool:
        return self.status(name).get("state") == "standby"

    def rounds(self, member: str = "") -> list[dict[str, Any]]:
        asked = member or self.leader()
        return super().rounds(asked) if asked else []

    def round(self, number: int) -> dict[str, Any]:
        detail: dict[str, Any] = wait_for(lambda: self.ask(self.led(), f"/v1/rounds/{number}"), f"round {number} is told")
        return detail

    def comes_back(self, name: str) -> None:
        """Restart a coordinator, and check that it is a standby while the leader continues to lead."""
        before = len(self.log(name))
        self.testnet.start(self.testnet.member(name))
        wait_for(lambda: "standby: " in self.log(name)[before:], "a restarted coordinator is a standby")
        wait_for(self.one_leads, "one leads, the other stands by")

    def one_leads(self) -> bool:
        """Check that one leads and the other is a standby: the leader may change while the machine is busy."""
        return bool(self.leader()) and any(self.stands_by(name) for name in OFFICES)

    def led(self) -> str:
        found: str = wait_for(self.leader, "a coordinator leads")
        return found

    def goes_on(self) -> None:
        """Wait for two more rounds."""
        before = wait_for(self.open_round, "there are rounds")
        wait_for(lambda: self.open_round() >= before + 2, "two more rounds were closed")

    def chain(self, member: str) -> list[bytes]:
        """Return the verified chain from its folder."""
        with ChainFile.for_reading(find_chains(self.testnet.member(member).home)[-1]) as chain:
            return [commit.digest for commit in chain.verify()]


@pytest.fixture(scope="module")
def offices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offices]:
    folder = tmp_path_factory.mktemp("offices")
    with etcd_members(folder / "etcd", 3) as members:
        testnet = build(folder, count=100_000, nodes=4, options=["--no-dht"])
        one = testnet.coordinator
        one.arguments.extend(["--no-dht", "--store", f"etcd://{members.at}/runs"])
        two = [each.replace(str(one.home), str(one.home) + "-2") for each in one.arguments]
        two[two.index("--link-file") + 1] += "-2"
        two[two.index("--name") + 1] = OFFICES[1]
        testnet.members.insert(1, Member(OFFICES[1], Path(str(one.home) + "-2"), two))
        testnet.start_all()
        swarm = Offices(testnet, members)
        try:
            wait_for(lambda: swarm.open_round() > 2, "the swarm trained two rounds")
            wait_for(lambda: any(map(swarm.stands_by, OFFICES)), "the other stands by")
            yield swarm
        finally:
            everything = [p for m in testnet.running() for p in swarm.processes(m.name)]
            testnet.stop()
            wait_until_gone(everything)


def took_over(swarm: Offices, before: str) -> float:
    """Return the seconds until the other one leads."""
    began = time.monotonic()
    wait_for(lambda: swarm.status(swarm.other(before)).get("role") == "coordinator", "the other took over")
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s until {swarm.other(before)} led")
    return seconds


def test_a_leader_that_is_killed_is_followed_by_the_other(swarm: Offices):
    leader = swarm.led()
    swarm.testnet.kill(swarm.testnet.member(leader), signal.SIGKILL)
    took_over(swarm, leader)
    swarm.goes_on()
    swarm.comes_back(leader)


@pytest.mark.thorough
def test_a_leader_that_stood_still_and_wakes_signs_nothing(swarm: Offices):
    leader = swarm.led()
    swarm.testnet.kill(swarm.testnet.member(leader), signal.SIGSTOP)
    took_over(swarm, leader)
    swarm.goes_on()
    before = len(swarm.log(leader))
    swarm.testnet.kill(swarm.testnet.member(leader), signal.SIGCONT)
    wait_for(lambda: "lost its leadership" in swarm.log(leader)[before:], "it notices that another coordinator leads")
    swarm.goes_on()
    wait_for(swarm.one_leads, "one leads, the other stands by")


@pytest.mark.thorough
@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_a_member_of_etcd_that_is_gone_costs_nobody_a_round(swarm: Offices, what: signal.Signals):
    number = 0 if what == signal.SIGSTOP else 1
    swarm.etcd.signal(number, what)
    swarm.goes_on()
    if what == signal.SIGSTOP:
        swarm.etcd.signal(number, signal.SIGCONT)
    else:
        swarm.etcd.start(number)
    swarm.goes_on()


@pytest.mark.thorough
def test_a_store_that_lost_everything_costs_nobody_a_round(swarm: Offices):
    """Check a store that lost everything, including the count by which nodes recognize the last elected leader."""
    leader = swarm.led()
    swarm.testnet.kill(swarm.testnet.member(leader), signal.SIGKILL)
    swarm.etcd.empty("runs")
    took_over(swarm, leader)
    swarm.goes_on()
    swarm.comes_back(leader)


@pytest.mark.thorough
def test_a_leader_that_is_told_to_stop_hands_over_at_once(swarm: Offices):
    leader = swarm.led()
    swarm.testnet.kill(swarm.testnet.member(leader), signal.SIGTERM)
    took_over(swarm, leader)
    swarm.goes_on()
    swarm.comes_back(leader)


def test_there_is_one_chain_and_every_round_counted_somebody(swarm: Offices):
    swarm.goes_on()
    last = swarm.open_round()
    names = [member.name for member in swarm.testnet.members]
    wait_for(lambda: all(len(swarm.chain(name)) >= last for name in names), "everybody has the chain so far")
    chains = [swarm.chain(name)[:last] for name in names]
    assert all(chain == chains[0] for chain in chains)
    for number in range(1, last):
        assert swarm.counted(number), "no round was lost"
        assert swarm.counted_or_busy(number) >= 2
    for name in names:
        assert "Traceback" not in swarm.log(name)


swarm = offices
