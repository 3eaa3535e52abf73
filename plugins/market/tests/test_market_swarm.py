"""Tests of the market with real daemons and a real DHT. A run is announced, found without prior knowledge, and joined; a
machine is offered, and found."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dilocox.node.attest.attesters import simulated_measurement
from tests.conftest import any_ports  # noqa: F401  used by name
from tests.e2e.conftest import PATIENCE_SECONDS, Swarm, build, running, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.usefixtures("any_ports")]

CLI = [sys.executable, "-P", "-m", "dilocox.cli.main"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    testnet = build(tmp_path_factory.mktemp("market"), count=100_000, nodes=4, options=["--devices", "1"])
    with running(testnet, rounds=1) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def market(swarm: Swarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a market in which the swarm's run is announced."""
    folder = swarm.testnet.folder
    words = ["--home", swarm.testnet.coordinator.home, "--key", folder / "run.key", "--market-port", 0]
    log = tmp_path_factory.mktemp("announce") / "log"
    with log.open("w") as out, subprocess.Popen([*CLI, "market", "announce", *map(str, words)], stderr=out) as announcing:
        try:
            yield wait_for(lambda: re.search(r"can join it at (\S+)", log.read_text()), "the run is announced")[1]
        finally:
            announcing.terminate()
            announcing.wait()


def say(home: Path, *words: object) -> Any:
    environment = {**os.environ, "HOME": str(home), "DILOCOX_HOME": str(home / ".dilocox")}
    done = subprocess.run([*CLI, *map(str, words)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counted_since(swarm: Swarm, peer: str, round: int) -> bool:
    return any(peer in swarm.counted(row["round"]) for row in swarm.rounds() if row["round"] > round)


def test_a_run_is_found_by_who_knows_the_market_alone_and_joined(swarm: Swarm, market: str, tmp_path: Path):
    [found] = json.loads(
        say(tmp_path, "market", "runs", "--market", market, "--devices", 1, "--seconds", PATIENCE_SECONDS, "--json")
    )
    assert found["fits"], found["findings"]
    table = say(tmp_path, "market", "runs", "--market", market, "--devices", 1, "--seconds", PATIENCE_SECONDS)
    [line] = re.findall(r"dilocox (node --join '\S+')", table)
    since = swarm.open_round()
    command = [*CLI, "node", "--join", found["link"], "--devices", "1", "--home", str(tmp_path / "node"), "--name", "stranger"]
    assert found["link"] in line
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as node:
        try:
            me = say(tmp_path, "id", "--home", tmp_path / "node").split()[-1]
            wait_for(lambda: counted_since(swarm, me, since), "the stranger is counted")
        finally:
            node.terminate()
            node.communicate()


def test_a_machine_is_found_by_who_hires_and_hears_of_it(swarm: Swarm, market: str, tmp_path: Path):
    (tmp_path / "measurement").write_text(simulated_measurement(None, "1").hex())
    words = [
        "market",
        "offer",
        "--market",
        market,
        "--home",
        tmp_path / "box",
        "--devices",
        2,
        "--price",
        7,
        "--name",
        "spare",
        "--attest",
    ]
    words += ["--simulated-measurement", tmp_path / "measurement"]
    with subprocess.Popen([*CLI, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as offering:
        try:
            run_file = swarm.testnet.folder / "run.toml"

            def offers() -> list[dict[str, Any]]:
                told = say(tmp_path, "market", "hire", run_file, "--market", market, "--seconds", PATIENCE_SECONDS, "--json")
                return [offer for offer in json.loads(told) if offer["measured_by"]]

            [found] = wait_for(offers, "the line that is offered is measured")
            assert (found["name"], found["devices"], found["price"], found["attested"]) == ("spare", 2, 7, "simulated")
            assert found["fits"], found["lacks"]
            assert found["measured_by"] == [market.rpartition("/")[2]]
            assert min(found["measured_upload_bits"], found["measured_download_bits"]) > 0
            assert found["peer"] == say(tmp_path, "id", "--home", tmp_path / "box").split()[-1]
        finally:
            offering.terminate()
            offering.communicate()
