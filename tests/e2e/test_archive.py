"""Test of a run that outlives its peers: all are killed and their folders deleted, and the run continues from its archive."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.testnet.swarm import Member, Testnet
from dilocox.transport.archive.archive import open_archive
from dilocox.transport.archive.index import ArchiveHead
from dilocox.transport.store.data_directory import load_identity
from tests.ceph import ceph_bucket
from tests.e2e.conftest import build, running, wait_for

pytestmark = pytest.mark.e2e

SOON = {"deadline_seconds = 120": "deadline_seconds = 20", "liveness_seconds = 30": "liveness_seconds = 10"}
"""Settings for a coordinator that starts: it waits for a deadline and a grace period for absent peers."""


def dilocox(*arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "dilocox.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def archive_with(place: str, round: int) -> ArchiveHead | None:
    """Return the archive's head, once it has the data, a state after `round`, and the payloads of `round`."""
    try:
        head = open_archive(place, None).head()
    except (ConfigError, LocalError, RemoteError):  # not started
        head = None
    whole = head is not None and head.data and any(item.round > round for item in head.snapshots)
    return head if head is not None and whole and head.payloads and head.payloads[-1][1] >= round else None


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.thorough)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the location of an archive: in a folder, and in a bucket of a real S3 server."""
    if request.param == "folder":
        yield str(tmp_path / "archive")
        return
    (tmp_path / "ceph").mkdir()
    with ceph_bucket(tmp_path / "ceph") as (bucket, environment):
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        yield f"{bucket}/run"


def test_a_run_goes_on_when_all_peers_and_the_coordinator_are_gone(place: str, tmp_path: Path):
    testnet = build(tmp_path, count=100_000, nodes=2, changes={**SOON, "start_clusters = 3": "start_clusters = 2"})
    link = str(testnet.folder / "link")
    arguments = ["archive", "--join", f"@{link}", "--archive", place, "--every", "2", "--payloads", "--no-dht"]
    keeper = Member("keeper", testnet.folder / "keeper", [*arguments, "--home", str(testnet.folder / "keeper")])
    last = testnet.members.pop()
    testnet.members += [keeper, last, last]  # `running` starts all but the last
    with running(testnet, rounds=3) as swarm:
        wait_for(lambda: archive_with(place, 3), "the archive holds a state after round 3, payloads and data")
        for member in testnet.members[:-1]:
            testnet.kill(member, signal.SIGKILL)
        wait_for(lambda: not testnet.running(), "all are gone")
    head = archive_with(place, 3)
    assert head is not None
    shutil.rmtree(testnet.folder)
    assert "commits are valid" in dilocox("verify", "--archive", place, head.run)

    after = tmp_path / "after"
    after.mkdir()
    (tmp_path / "e2e.key").rename(after / "run.key")
    round, root = next(iter(head.states.items()))
    home = after / "coordinator"
    new = load_identity(home / "identity.key").peer
    said = dilocox("owner", "appoint", new, str(after / "run.toml"), "--archive", place)
    assert f"round {round} starts from the archived state {root.hex()}" in said

    link = str(after / "link")
    arguments = ["coordinator", str(after / "run.chain"), "--home", str(home), "--link-file", link]
    members = [Member("coordinator", home, arguments)]
    for number in (1, 2):
        home = after / f"node-{number}"
        arguments = ["node", "--join", f"@{link}", "--home", str(home), "--archive", place, "--no-dht", "--threads", "1"]
        members.append(Member(f"node-{number}", home, [*arguments, "--step-seconds", "0.03"]))
    home = after / "keeper"
    arguments = ["archive", "--join", f"@{link}", "--archive", place, "--every", "2", "--payloads", "--no-dht"]
    members.append(Member("keeper", home, [*arguments, "--home", str(home)]))
    again = Testnet(after, [*members, members[-1]])
    with running(again, rounds=round + 2) as swarm:
        wake = swarm.round(round)
        assert wake["state"] == root.hex(), "the same hash"
        counted = wait_for(lambda: [n for n in range(round, swarm.open_round()) if swarm.counted(n)], "somebody is counted")
        assert counted
        wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")
        wait_for(lambda: archive_with(place, round + 1), "the archive goes on with the new chain")
        kept = next(item for item in swarm.status("keeper")["archive"]["payloads"] if item[1] > round)
        assert kept[0] <= round, "what stands of the old chain's payloads stays"
    assert "commits are valid" in dilocox("verify", "--archive", place, head.run)
