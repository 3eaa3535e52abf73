"""A run that keeps shares: real nodes make and serve them, and who asks for samples is told so."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.transport.blobs import BlobStore
from tests.e2e.conftest import build, running, wait_for

pytest.importorskip("pyeclib", reason="pip install -e '.[availability]'")
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
        swarm.wait_for_round(4)
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
