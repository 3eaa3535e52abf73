"""Tests of namespaces, bridges and links on this machine, without our daemons in them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dilocox.cli.main import app
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.testnet.namespaces import Namespaces, Net, lacking, run
from dilocox.testnet.swarm import Testnet
from tests.helpers import PATIENCE_SECONDS

here = pytest.mark.skipif(bool(lacking()), reason=lacking() or "it can run here")

LISTEN = """
import socket, sys
server = socket.create_server(("0.0.0.0", 7000))
print("listening", flush=True)
while True:
    client, _ = server.accept()
    received = 0
    while chunk := client.recv(1 << 16):
        received += len(chunk)
    client.sendall(b"!")
    client.close()
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=300) as line:
    line.sendall(bytes(int(sys.argv[2])))
    line.shutdown(socket.SHUT_WR)
    assert line.recv(1) == b"!"
print(time.monotonic() - began)
"""
SLOW = 8e6
A_MEGABYTE = 1_000_000
NETS = [
    Net("wan", ["a", "b", "c"], bits_per_second=SLOW),
    Net("watch", ["a", "b", "c"], here=True, apart=True),
    Net("lan", ["a", "b"]),
]


def seconds(prefix: tuple[str, ...], address: str, size: int = 1) -> float | None:
    """Return the seconds to send `size` bytes there; None: no process is reached."""
    command = [*prefix, sys.executable, "-c", SEND, address, str(size)]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    """Return a network with a listener on every host."""
    network = Namespaces(NETS)
    with network.present():
        listening = [
            subprocess.Popen([*network.prefix(name), sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) for name in "abc"
        ]
        try:
            for process in listening:
                assert process.stdout is not None
                assert process.stdout.readline() == b"listening\n"
            yield network
        finally:
            for process in listening:
                process.kill()
                process.communicate()


def left(network: Namespaces) -> list[str]:
    """Return the names of its remains on this machine."""
    spaces = [path.name for path in Path("/run/netns").glob(f"{network.tag}*")]
    return spaces + [path.name for path in Path("/sys/class/net").glob(f"{network.tag}*")]


@here
def test_who_is_plugged_into_a_net_is_reached_there_and_nobody_else(network: Namespaces):
    assert seconds(network.prefix("a"), network.address("c", "wan")) is not None
    assert seconds(network.prefix("a"), network.address("b", "lan")) is not None
    assert seconds(network.prefix("c"), network.address("b", "lan")) is None
    assert seconds((), network.address("a", "watch")) is not None
    assert seconds(network.prefix("b"), network.address("a", "watch")) is None, "those who are apart reach this machine only"


@here
@pytest.mark.parametrize("receiver", ["b", "c"])
def test_a_line_carries_what_was_asked_for_and_its_interface_counts_it(network: Namespaces, receiver: str):
    before = network.traffic("wan")
    took = seconds(network.prefix("a"), network.address(receiver, "wan"), A_MEGABYTE)
    after = network.traffic("wan")
    assert took is not None
    assert took > 0.9 * 8 * A_MEGABYTE / SLOW
    assert A_MEGABYTE < after["a"].since(before["a"]).sent < 2 * A_MEGABYTE
    assert A_MEGABYTE < after[receiver].since(before[receiver]).received < 2 * A_MEGABYTE


@here
def test_a_line_without_a_speed_is_not_slowed_and_a_slowed_one_is_quickened(network: Namespaces):
    def slowed(interface: str) -> bool:
        return "tbf" in run("tc", "-n", network.namespace("a"), "qdisc", "show", "dev", interface)

    assert [slowed(interface) for interface in ("wan", "watch", "lan")] == [True, False, False]
    network.slow("a", "lan", SLOW)
    assert slowed("lan")
    network.quicken("a", "lan")
    assert not slowed("lan")


@here
def test_an_end_however_it_comes_leaves_nothing():
    network = Namespaces(NETS)

    def use() -> None:
        with network.present():
            raise RuntimeError(f"laid: {network.laid}")

    with pytest.raises(RuntimeError, match="laid: True"):
        use()
    assert left(network) == []
    broken = Namespaces([Net("wan", ["a"]), Net("wan", ["a"])])
    with pytest.raises(LocalError, match="ip -n"):
        broken.lay()
    assert left(broken) == []


MAKER = """
import sys, time
from dilocox.testnet.namespaces import Namespaces, Net
network = Namespaces([Net("wan", ["a"], here=True)])
network.lay()
print(network.tag, flush=True)
sys.stdin.read()
"""


@here
def test_the_next_to_come_removes_what_a_dead_maker_left_unless_something_runs_there():
    maker = subprocess.Popen([sys.executable, "-P", "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    orphaned, next_one = Namespaces([Net("wan", ["a"], here=True)], maker.stdout.readline().strip()), Namespaces(NETS)
    with next_one.present():
        assert orphaned.laid, "its maker lives"
    resident = subprocess.Popen([*orphaned.prefix("a"), "sleep", "600"])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while resident.pid not in orphaned.processes("a") and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(maker.pid, signal.SIGKILL)
    maker.communicate()
    with next_one.present():
        assert orphaned.laid, "somebody lives there"
    resident.kill()
    resident.wait()
    with next_one.present():
        assert left(orphaned) == []
    assert left(next_one) == []


def test_more_members_than_a_net_has_addresses_are_refused():
    with pytest.raises(ConfigError, match="250"):
        Namespaces([Net("wan", [str(number) for number in range(251)])])


@pytest.mark.parametrize("options", [["--boxes", "2", "--lan", "fast"], ["--wan", "0"], ["--lan", "1gbit"]])
def test_a_testnet_refuses_lines_that_mean_nothing(tmp_path: Path, options: list[str]):
    result = up(tmp_path, *options)
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)  # which the command ends with 2 too
    assert not (tmp_path / "t").exists()


def up(tmp_path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["testnet", "up", "--detach", "--folder", str(tmp_path / "t"), *options])


def test_a_testnet_that_cannot_have_lines_says_so_and_runs_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Testnet, "start_all", lambda self, attached=True: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = up(tmp_path, "--boxes", "2", "--lan", "1gbit", "--wan", "100mbit")
    assert result.exit_code == 0
    assert "loopback" in result.output
    testnet = Testnet.load(tmp_path / "t")
    assert testnet.network is None
    assert not any(member.prefix for member in testnet.members)
    assert testnet.member("node-1").arguments[-2:] == ["--cluster-interface", "lo"]


@here
def test_a_testnet_is_found_again_with_its_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Testnet, "start_all", lambda self, attached=True: None)
    result = up(tmp_path, "--boxes", "2", "--lan", "1gbit", "--wan", "100mbit")
    assert result.exit_code == 0, result.output
    testnet = Testnet.load(tmp_path / "t")
    network, box = testnet.network, testnet.member("node-2-box-2")
    assert network is not None
    assert [(net.interface, net.bits_per_second) for net in network.nets] == [
        ("wan", 1e8),
        ("watch", None),
        *[("lan", 1e9)] * 3,
    ]
    assert network.nets[3].members == ["node-2", "node-2-box-2"]
    assert box.lead == "node-2"
    assert box.prefix == network.prefix(box.name)
    host, interface = (box.arguments[box.arguments.index(option) + 1] for option in ("--host", "--cluster-interface"))
    assert (host, interface) == (network.address(box.name, "wan"), "lan")
    with pytest.raises(LocalError, match="network was removed"):
        testnet.start(box)
    assert left(network) == []
