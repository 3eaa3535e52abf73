"""Tests of a run with erasure shards: real nodes make and serve them, and availability probes reach their askers."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from dilocox.cli.common import read_link
from dilocox.node.run_reader import open_reader
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.data_directory import DataDirectory
from tests.e2e.conftest import Swarm, build, running, wait_for, wait_until_gone

pytest.importorskip("pyeclib", reason="pip install ./plugins/availability")
pytestmark = [pytest.mark.e2e, pytest.mark.thorough]


def dilocox(*arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "dilocox.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nodes_answer_for_their_shares(tmp_path: Path):
    changes = {"snapshot_every = 4": "snapshot_every = 4\n[availability]\nrounds = 100"}
    testnet = build(tmp_path, count=100_000, nodes=4, changes=changes)  # the last does not start
    with running(testnet, rounds=3) as swarm:
        swarm.wait_for_round(10)  # from the fifth on they ask each other
        peers = json.loads(dilocox("peers", "--home", str(testnet.coordinator.home), "--json"))
        assert [peer["standing"]["lacking"] for peer in peers if peer["on_roster"]] == [0, 0, 0]
        link, home = f"@{testnet.folder / 'link'}", str(tmp_path / "reader")

        def sampled() -> dict:
            return json.loads(dilocox("shares", "--join", link, "--home", home, "--sample", "12", "--json"))

        said = wait_for(lambda: (found := sampled())["unanswered"] == [] and found, "all have made their shares")
        assert said["samples"] == 12
        assert 1 <= said["needed"] < said["shares"] == 3
        assert said["chance"]["all"] < said["chance"]["half"] < 1
        (shares,) = testnet.member("node-1").home.glob("runs/*/shares")
        assert BlobStore(shares, ours=False).digests()
        testnet.kill(testnet.member("node-1"))
        shutil.rmtree(shares)
        lost = wait_for(lambda: (found := sampled())["unanswered"] and found, "one that is gone does not answer")
        assert {each["peer"] for each in lost["unanswered"]} == {swarm.peer("node-1")}


STAGES = 3
"""Stages of the run in these tests."""


def run_folder(swarm: Swarm, name: str) -> Path:
    (folder,) = swarm.testnet.member(name).home.glob("runs/*")
    return folder


def shared(swarm: Swarm, name: str) -> Counter[tuple[int, bool]]:
    """Return how many blobs a member stores shards of: by the round that names them, and whether they are of a state.
    Reads beside the running member."""
    proofs = (run_folder(swarm, name) / "shares" / "proofs").glob("*.pb")
    return Counter(
        (share.round, share.state) for path in proofs for share in services.Shares.FromString(path.read_bytes()).shares
    )


def counted(swarm: Swarm, name: str) -> dict[int, int]:
    """Return how many clusters each round counted, by a member's chain."""
    return {row["round"]: row["counted"] for row in swarm.rounds(name) if row["round"]}


def all_is_shared(swarm: Swarm, names: list[str]) -> bool:
    """Return whether each of them stores a shard of everything that its chain counted, and of the newest snapshot."""

    def shares_all(name: str) -> bool:
        found, wanted = shared(swarm, name), counted(swarm, name)
        whole = all(found[number, False] == clusters * (1 + STAGES) for number, clusters in wanted.items())
        return whole and found[newest_snapshot(max(wanted)), True] > 0

    return all(shares_all(name) for name in names)


def newest_snapshot(last: int) -> int:
    """Return the newest round that begins with a snapshot: every second one does."""
    return 1 + (last - 1) // 2 * 2


def is_voted_on(swarm: Swarm, number: int) -> bool:
    """Return whether the coordinator asked for votes on a round. It may then count payloads of which no peer made shards."""
    return any(f"round {number}:" in line and "voting begins" in line for line in swarm.log("coordinator").splitlines())


def stop_where_all_is_shared(swarm: Swarm, names: list[str]) -> int:
    """Kill the coordinator when all rounds that it counted have their shards; return the last round that it closed."""
    coordinator = swarm.testnet.coordinator
    while True:
        wait_for(lambda: all_is_shared(swarm, names), "all made their shares")
        swarm.testnet.kill(coordinator)
        wait_for(lambda: coordinator not in swarm.testnet.running(), "it is gone")
        last = max(row["round"] for row in json.loads(dilocox("rounds", "--home", str(coordinator.home), "--json")))
        if all(max(counted(swarm, name)) == last for name in names) and not is_voted_on(swarm, last + 1):
            wait_for(lambda: all_is_shared(swarm, names), "all made their shares")
            return last
        swarm.testnet.start(coordinator)  # no peer has what its last commit or its open round counts
        swarm.wait_for_round(last + 1)


async def counted_blobs(link: str, home: Path, last: int) -> int:
    """Fetch everything that these rounds counted, by digest, as a reader with the join link; return the number of blobs."""
    found = set()
    with closing(DataDirectory(home)) as folder:
        async with open_reader(read_link(link), folder, lambda text: None) as reader:
            for number in range(1, last + 1):
                commit = reader.chain.commit(number)
                assert commit is not None
                apply = await reader.data.applies.take(commit)
                blobs = {item.contribution.leaves for item in taken(commit.body)}
                blobs |= {payload for take in apply.takes for payload in take.payloads}
                assert all(reader.store.verify(blob) for blob in blobs)
                found |= blobs
    return len(found)


def test_half_of_the_roster_goes_with_its_disks_and_the_run_goes_on_from_shares(tmp_path: Path):
    """Check a restart without any whole blob: payloads of all rounds, and the newest snapshot, are restored from erasure
    shards alone."""
    changes = {
        "snapshot_every = 4": "snapshot_every = 2\n[availability]\nrounds = 100",
        "start_clusters = 3": "start_clusters = 4",
    }
    testnet = build(tmp_path, count=100_000, nodes=5, changes=changes, options=["--devices", "1"])  # the last does not start
    names = [f"node-{number}" for number in range(1, 5)]
    with running(testnet, rounds=4) as swarm:
        last = stop_where_all_is_shared(swarm, names)
        work = sum(counted(swarm, "node-3").values()) * (1 + STAGES)
        folders = {name: run_folder(swarm, name) for name in names}
        processes = [process for name in names for process in swarm.processes(name)]
        for name in names:
            testnet.kill(testnet.member(name))
        wait_until_gone(processes)
        for name in names[:2]:
            shutil.rmtree(testnet.member(name).home)
        for name in names[2:]:
            shutil.rmtree(folders[name] / "blobs")
        testnet.members = [member for member in testnet.members if member.name not in names[:2]]
        testnet.start(testnet.coordinator)
        for name in names[2:]:
            testnet.start(testnet.member(name))
        swarm.wait_for_round(last + 2)
        assert "restored" in swarm.log("node-3") + swarm.log("node-4")
        wait_for(lambda: swarm.same_states(swarm.open_round()), "both hold one state")
        link, home = f"@{testnet.folder / 'link'}", tmp_path / "reader"
        assert asyncio.run(counted_blobs(link, home, last)) == work

        def replayed() -> dict:
            snapshot = str(newest_snapshot(swarm.open_round() - 1))
            arguments = ["--join", link, "--home", str(tmp_path / "verifier"), "--replay", snapshot, "--json"]
            said = subprocess.run([sys.executable, "-P", "-m", "dilocox.cli.main", "verify", *arguments], capture_output=True)
            return json.loads(said.stdout)[0] if not said.returncode else {}

        assert len(wait_for(replayed, "a newcomer replays a round")["replayed"]) == STAGES
