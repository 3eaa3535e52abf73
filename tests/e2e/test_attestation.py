"""Tests of a swarm that requires (simulated) evidence: admission, rejection with a reason, and expiry."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.texts import stdlib
from dilocox.testnet.swarm import Member, Testnet
from dilocox.transport.store.data_directory import load_identity
from tests.e2e.conftest import PATIENCE_SECONDS, RUN, Swarm, running, wait_for

pytestmark = pytest.mark.e2e

GOOD, BAD = "0a" * 48, "0b" * 48
LIFETIME_SECONDS = 30
SECTION = f"""
[attestation]
kinds = ["simulated"]
lifetime_seconds = {LIFETIME_SECONDS}
[attestation.measurements]
simulated = ["{GOOD}"]
"""
OPTIONS = ["--devices", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Run three nodes with valid evidence; a fourth is configured, not started."""
    folder = tmp_path_factory.mktemp("attested")
    owner, data = load_identity(folder / "run.key"), stdlib()
    text = data.into(RUN).replace("{owner}", owner.key.hex()).replace("{count}", "100000").replace("stages = 3", "stages = 1")
    testnet = Testnet.create(
        folder / "t", (text + SECTION).encode(), (folder / "run.key").read_bytes(), 4, OPTIONS, data.folder
    )
    for member in testnet.nodes:
        file = measurement(testnet, member)
        file.write_text(GOOD)
        member.arguments.extend(["--simulated-measurement", str(file)])
    with running(testnet, rounds=1) as swarm:
        yield swarm


def measurement(testnet: Testnet, member: Member) -> Path:
    return testnet.folder / f"{member.name}.measurement"


def dilocox(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_the_attested_are_counted_and_a_commit_says_by_what(swarm: Swarm):
    number = swarm.wait_until_all_are_counted([f"node-{n}" for n in (1, 2, 3)], 1)
    attestations = [item for cluster in swarm.round(number)["clusters"] for item in cluster["attestations"]]
    assert {item["peer"] for item in attestations} == {swarm.peer(f"node-{n}") for n in (1, 2, 3)}
    for item in attestations:
        assert (item["kind"], item["simulated"], item["bound"], item["measurement"]) == ("simulated", True, True, GOOD)
    home = str(swarm.testnet.member("node-1").home)
    shown = dilocox("rounds", str(number), "--home", home).stdout
    assert "SIMULATED" in shown
    assert GOOD[:32] in shown
    assert "SIMULATED" in dilocox("status", "--home", home).stdout
    assert "SIMULATED" in dilocox("peers", "--home", home).stdout


def test_any_peer_can_challenge_any_other(swarm: Swarm):
    home = str(swarm.testnet.member("node-1").home)
    done = dilocox("attest", swarm.peer("node-2"), "--home", home, "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["ok"], facts["kind"], facts["bound"]) == (0, True, "simulated", True)
    unknown = dilocox("attest", "12D3KooWnobody", "--home", home, "--json")
    assert (unknown.returncode, json.loads(unknown.stdout)["code"]) == (1, "unavailable")


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        pytest.param("without", "unavailable", marks=pytest.mark.thorough),
        pytest.param("borrowed", "peer", marks=pytest.mark.thorough),
        pytest.param("elsewhere", "run", marks=pytest.mark.thorough),
        pytest.param("lying", "report-data", marks=pytest.mark.thorough),
        ("replayed", "nonce"),
    ],
)
def test_each_lie_is_refused_with_its_reason_in_the_liars_own_status(swarm: Swarm, tmp_path: Path, lie: str, code: str):
    (tmp_path / "measurement").write_text(GOOD)
    link = swarm.testnet.folder / "link"
    home = ["--home", str(tmp_path / "home"), "--simulated-measurement", str(tmp_path / "measurement"), *OPTIONS]
    liar = Member(lie, tmp_path / "home", [])
    command = [sys.executable, "-P", str(Path(__file__).with_name("liar.py")), lie, "node", "--join", f"@{link}", *home]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def told() -> bool:
            standing = (liar.get("/v1/status") or {}).get("attestation") or {}
            return standing.get("code") == code and not standing["attested"]

        wait_for(told, f"the liar was told {code}")
        assert code in dilocox("status", "--home", str(liar.home)).stdout
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)


def test_a_wrong_measurement_is_refused_until_it_is_right(swarm: Swarm):
    spare = swarm.testnet.members[-1]
    measurement(swarm.testnet, spare).write_text(BAD)
    swarm.testnet.start(spare)
    wait_for(
        lambda: ((swarm.status(spare.name) or {}).get("attestation") or {}).get("code") == "measurement",
        "the wrong measurement was refused",
    )
    since = swarm.open_round()
    assert all(swarm.peer(spare.name) not in swarm.counted(n) for n in range(1, since))
    measurement(swarm.testnet, spare).write_text(GOOD)
    swarm.wait_until_counted(spare.name, since)


def test_an_expired_attestation_expels_and_a_renewed_one_readmits(swarm: Swarm):
    spare = swarm.testnet.members[-1]
    peer = swarm.peer(spare.name)
    measurement(swarm.testnet, spare).unlink()
    since = swarm.open_round()

    def expelled() -> bool:
        return any(
            item["peer"] == peer and item["reason"] == "attestation-expired"
            for number in range(since, swarm.open_round())
            for item in swarm.round(number)["refused"]
        )

    wait_for(expelled, "the expired attestation took the peer off the roster")
    wait_for(lambda: swarm.status(spare.name).get("on_roster") is False, "it heard of that commit")
    measurement(swarm.testnet, spare).write_text(GOOD)
    swarm.wait_until_counted(spare.name, swarm.open_round())
    home = str(swarm.testnet.coordinator.home)
    assert dilocox("verify", "--home", home).returncode == 0
