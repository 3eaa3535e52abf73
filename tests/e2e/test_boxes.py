"""Tests of a cluster of two hosts, each with two devices, beside a node that is a cluster of one host. The tests run in
order."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from dilocox.node.workers.environment import WORKER
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.testnet.swarm import Member
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.files import find_chains
from tests.e2e.conftest import (
    PATIENCE_SECONDS,
    Swarm,
    build,
    listeners,
    names,
    running,
    wait_for,
    wait_until_gone,
)
from tests.helpers import HEARS_CTRL_C

pytestmark = pytest.mark.e2e

LEAD, BOX, OTHER = "node-1", "box-2", "node-2"
CHANGES = {
    "start_clusters = 3": "start_clusters = 2",
    "min_clusters = 2": "min_clusters = 1",
    "microbatches = 2": "microbatches = 4",
    **(
        {"snapshot_every = 4": "snapshot_every = 4\n[availability]"} if find_spec("dilocox_availability") else {}
    ),  # each box codes its own
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Run four workers in two hosts: two copies of a pipeline, whose last stage is in the second host."""
    testnet = build(tmp_path_factory.mktemp("boxes"), count=100_000, nodes=2, changes=CHANGES)
    lead = testnet.member(LEAD)
    lead.arguments.extend(["--cluster-boxes", "2", "--cluster-interface", "lo", "--cluster-patience-seconds", "60"])
    home, link = testnet.folder / BOX, lead.home / "cluster.link"
    options = ["--devices", "2", "--threads", "1", "--step-seconds", "0.03", "--no-dht"]
    arguments = ["node", "--cluster", str(link), "--cluster-interface", "lo", "--home", str(home), "--name", BOX, *options]
    testnet.members.append(Member(BOX, home, arguments))
    with running(testnet, rounds=-1) as swarm:
        wait_for(link.exists, "the lead wrote its cluster link")
        assert link.stat().st_mode & 0o077 == 0
        testnet.start(testnet.member(BOX))
        yield swarm


def test_two_boxes_are_counted_as_one_cluster(swarm: Swarm):
    swarm.wait_until_all_are_counted([LEAD, OTHER], 2)
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")
    shares = [{"peer": swarm.peer(LEAD), "stages": [0, 1]}, {"peer": swarm.peer(BOX), "stages": [2]}]

    def alike() -> bool:
        """Return whether both answers match. The members are asked one after the other: a round may end between the
        answers, or the cluster may form again."""
        one, other = ({key: swarm.status(name).get(key) for key in ("round", "counted", "boxes")} for name in (LEAD, BOX))
        return one == other and one["boxes"] == shares

    wait_for(alike, "both boxes tell of the same rounds and stages")


@pytest.mark.parametrize("name", [LEAD, BOX])
def test_only_the_daemon_listens_and_the_workers_on_the_interface_that_was_named(swarm: Swarm, name: str):
    """Check the interface, here loopback; the store at which the workers of both hosts meet is there, too."""
    facts = swarm.testnet.member(name).facts()
    assert facts is not None
    ports = {("tcp", facts[each]) for each in ("port", "dht_port") if each in facts}
    assert {(kind, port) for process in swarm.processes(name) for kind, port in listeners(process)} == ports


def test_a_box_fetches_and_keeps_its_own_stages_only(swarm: Swarm):
    """Check that a host's WAN traffic is its share only."""
    number = swarm.wait_until_all_are_counted([LEAD, OTHER], swarm.open_round())
    stores = {name: store_of(swarm, name) for name in (LEAD, BOX, OTHER)}
    leaves = payloads(swarm, number)
    theirs, ours = leaves[swarm.peer(OTHER)], leaves[swarm.peer(LEAD)]
    for payload, stage in [*zip(theirs, range(3), strict=True), *zip(ours, range(3), strict=True)]:
        host, elsewhere = (BOX, LEAD) if stage == 2 else (LEAD, BOX)
        assert payload in stores[host]
        assert payload not in stores[elsewhere]
        assert payload in stores[OTHER]


def test_who_has_a_part_of_the_model_or_none_reads_it_from_the_run(swarm: Swarm, tmp_path: Path):
    """Check that the lead host, which has two stages of three, exports all; and that an unknown peer with the link replays
    a round."""
    link = swarm.testnet.folder / "link"
    home = ["--home", str(swarm.testnet.member(LEAD).home)]
    swarm.wait_for_round(5)

    def dilocox(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "dilocox.cli.main", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DILOCOX_HOME": str(tmp_path)})
        return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr}

    assert "on this disk" in dilocox("export", str(tmp_path / "part"), *home)["failed"]
    exported = dilocox("export", str(tmp_path / "model"), "--join", f"@{link}", *home)
    assert exported.get("round"), exported
    weights = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= weights.keys()

    def replayed() -> bool:
        snapshot = 1 + (swarm.open_round() - 3) // 4 * 4  # stored for several rounds: other states are deleted during the check
        found: Any = dilocox("verify", "--join", f"@{link}", "--replay", str(snapshot))
        return isinstance(found, list) and len(found[0]["replayed"]) == 3

    wait_for(replayed, "a stranger replayed a round bit for bit")
    assert not BlobStore(next((tmp_path / "reader" / "runs").iterdir()) / "blobs").digests(), "what was of use has gone"


def test_a_stranger_publishes_the_run_s_models_as_it_goes_on(swarm: Swarm, tmp_path: Path):
    arguments = ["export", str(tmp_path / "models"), "--every", "1", "--join", f"@{swarm.testnet.folder / 'link'}", "--json"]
    with subprocess.Popen(
        [*HEARS_CTRL_C, sys.executable, "-P", "-m", "dilocox.cli.main", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "DILOCOX_HOME": str(tmp_path)},
    ) as publisher:
        try:
            wait_for(
                lambda: len(list((tmp_path / "models").glob("round-*/config.json"))) > 2,
                "two models were published and told, and a third",
            )
        finally:
            publisher.send_signal(signal.SIGINT)
            said = publisher.communicate(timeout=PATIENCE_SECONDS)[0].decode()
    assert said.count('"round"') >= 2
    models = sorted((tmp_path / "models").glob("round-*"))
    first, second = ((each / "model-00001-of-00003.safetensors").read_bytes() for each in models[:2])
    assert len(first) == len(second)
    assert first != second


def store_of(swarm: Swarm, name: str) -> BlobStore:
    (chain,) = find_chains(swarm.testnet.member(name).home)
    return BlobStore(chain.parent / "blobs")


def payloads(swarm: Swarm, round: int) -> dict[str, list[bytes]]:
    """Return the payloads of each counted cluster in a round, in stage order."""
    (path,) = find_chains(swarm.testnet.coordinator.home)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        ((raw,),) = database.execute("SELECT envelope FROM commits WHERE round = ?", (round,)).fetchall()
    commit = pb.Commit.FromString(pb.Envelope.FromString(raw).body)
    store = store_of(swarm, OTHER)
    leaves = {item.cluster: pb.Leaves.FromString(bytes(store.view(item.contribution.leaves))) for item in taken(commit)}
    return {cluster: [leaf.digest for leaf in found.leaves] for cluster, found in leaves.items()}


def workers_of(swarm: Swarm) -> list[psutil.Process]:
    """Return the workers of both hosts."""
    return [p for name in (LEAD, BOX) for p in swarm.processes(name) if names(p, WORKER)]


def test_a_box_that_is_killed_costs_the_other_cluster_no_round(swarm: Swarm):
    before = swarm.open_round()
    workers = wait_for(lambda: found if len(found := workers_of(swarm)) == 4 else None, "four workers run")
    swarm.testnet.kill(swarm.testnet.member(BOX), signal.SIGKILL)
    wait_until_gone(workers)
    swarm.wait_for_round(swarm.open_round() + 2)
    swarm.testnet.start(swarm.testnet.member(BOX))
    back = swarm.wait_until_counted(LEAD, swarm.open_round())
    assert all(swarm.peer(OTHER) in swarm.counted(number) for number in range(before, back))
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")


def test_who_is_left_shares_out_the_stages_of_a_box_that_stays_away(swarm: Swarm):
    """Check a host that stays absent: its stages' state comes from another cluster, and when it is back it hosts them
    again."""
    before = swarm.open_round()
    swarm.testnet.kill(swarm.testnet.member(BOX), signal.SIGKILL)
    alone = [{"peer": swarm.peer(LEAD), "stages": [0, 1, 2]}]
    wait_for(lambda: swarm.status(LEAD).get("boxes") == alone, "the lead hosts all stages")
    counted = swarm.wait_until_counted(LEAD, swarm.open_round())
    assert all(swarm.peer(OTHER) in swarm.counted(number) for number in range(before, counted))
    assert "with earlier payloads of 2 stages" in swarm.log(LEAD), "those that were the lead's own did not move"
    swarm.testnet.start(swarm.testnet.member(BOX))
    wait_for(lambda: len(swarm.status(LEAD).get("boxes", [])) == 2, "it has its stages again")
    swarm.wait_until_counted(LEAD, swarm.open_round())
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")


def test_a_lead_that_is_killed_finds_its_box_again(swarm: Swarm):
    workers = workers_of(swarm)
    swarm.testnet.kill(swarm.testnet.member(LEAD), signal.SIGKILL)
    wait_until_gone(workers)
    swarm.testnet.start(swarm.testnet.member(LEAD))
    swarm.wait_until_counted(LEAD, swarm.open_round())
    wait_for(lambda: swarm.same_states(swarm.open_round()), "all hold one state")
