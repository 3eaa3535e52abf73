"""Tests of ports and links of the first hour: fixed, so that a router and a link can name them; a link that other peers
can use."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilocox.cli.common import COORDINATOR_PORTS, NODE_PORTS, FirstPorts
from dilocox.cli.main import app
from dilocox.cli.options import DaemonOptions
from dilocox.protocol.ids import JoinLink, Way
from tests.helpers import COORDINATOR


@pytest.fixture
def run_file(tmp_path: Path, any_ports: None) -> Path:
    made = CliRunner().invoke(app, ["init", str(tmp_path / "run.toml")], env={"DILOCOX_HOME": str(tmp_path / "home")})
    assert made.exit_code == 0, made.output
    return tmp_path / "run.toml"


def test_a_coordinator_and_a_node_have_fixed_ports_that_do_not_meet():
    assert not set(COORDINATOR_PORTS) & set(NODE_PORTS)
    options = DaemonOptions(config=None)
    for first in (COORDINATOR_PORTS, NODE_PORTS):
        listen = options.listen(first)
        assert (listen.port, listen.first_port, listen.first_dht_port) == (0, first.grpc, first.dht)
        assert options.api_at(first) == f"127.0.0.1:{first.api}"
    assert options.listen(FirstPorts()).first_port == 0


def test_a_port_that_is_said_wins_and_zero_is_any():
    said = DaemonOptions(config=None, port=9000, dht_port=0, api="127.0.0.1:0").listen(NODE_PORTS)
    assert (said.port, said.first_port, said.dht_port, said.first_dht_port) == (9000, 0, 0, 0)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.parametrize(("flag", "value"), [("--port", "{}"), ("--api", "127.0.0.1:{}")])
def test_a_taken_port_is_one_sentence_that_names_the_flag(run_file: Path, taken: int, flag: str, value: str):
    """Reproduce a fault: the gRPC library wrote four lines to stderr before our sentence."""
    command = [sys.executable, "-P", "-m", "dilocox.cli", "coordinator", str(run_file), "--home", str(run_file.parent / "c")]
    done = subprocess.run([*command, "--no-dht", flag, value.format(taken)], capture_output=True, text=True)
    assert done.returncode == 1
    first, *others = done.stderr.splitlines()
    assert first.startswith("error[taken-port]")
    assert str(taken) in first
    assert flag in first
    assert [line for line in others if not line.startswith("  help")] == []


@pytest.mark.parametrize(
    ("hosts", "local"),
    [
        (["127.0.0.1"], True),
        (["127.3.2.1"], True),
        (["localhost"], True),
        (["[::1]"], True),
        (["[::ffff:127.0.0.1]"], True),
        (["0.0.0.0"], True),
        (["192.168.1.7"], False),
        (["example.org"], False),
        (["[2001:db8::1]"], False),
        (["127.0.0.1", "192.168.1.7"], False),
    ],
)
def test_a_link_knows_whether_others_can_use_it(hosts: list[str], local: bool):
    first, *others = (Way(f"{host}:7400", bytes(32)) for host in hosts)
    assert JoinLink(bytes(32), COORDINATOR.peer, first.at, first.certificate, (), tuple(others)).is_local is local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_an_address_that_means_every_machine_is_refused(run_file: Path, host: str):
    told = CliRunner().invoke(app, ["coordinator", str(run_file), "--host", host])
    assert told.exit_code == 2
    assert host in told.stderr


@pytest.mark.parametrize(("host", "warned"), [([], True), (["--host", "localhost"], True), (["--host", "192.0.2.1"], False)])
def test_a_link_for_this_machine_only_is_printed_with_a_warning(run_file: Path, host: list[str], warned: bool):
    command = [sys.executable, "-P", "-m", "dilocox.cli", "coordinator", str(run_file), "--home", str(run_file.parent / "c")]
    with subprocess.Popen([*command, "--no-dht", *host], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as going:
        assert going.stdout is not None
        assert going.stdout.readline().startswith("dilocox://")
        going.terminate()
        _, said = going.communicate()
    assert ("--host ADDRESS" in said) is warned


def test_a_run_file_without_its_key_says_which_file_is_missing(run_file: Path):
    (run_file.parent / "run.key").unlink()
    command = [sys.executable, "-P", "-m", "dilocox.cli", "coordinator", str(run_file), "--home", str(run_file.parent / "c")]
    done = subprocess.run([*command, "--no-dht"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{run_file.parent / 'run.key'} is missing" in done.stderr
    assert "12D3" not in done.stderr
