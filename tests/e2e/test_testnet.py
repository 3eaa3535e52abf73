"""`dilocox testnet up` as a person runs it: to the end, and interrupted; then export."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from bench.texts import stdlib
from dilocox.cli.main import app
from dilocox.protocol.events import NOTABLE
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.testnet.swarm import Testnet
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from tests.e2e.conftest import PATIENCE_SECONDS, RUN, wait_for, wait_until_gone
from tests.helpers import HEARS_CTRL_C

pytestmark = pytest.mark.e2e


def start(
    tmp_path: Path, count: int, *options: str, overlap: str = "rebase", changes: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a testnet. `changes`: replacements in the run file."""
    run_file = tmp_path / "run.toml"
    owner = load_identity(run_file.with_suffix(".key"))
    text = stdlib().into(RUN).replace("{owner}", owner.key.hex()).replace("{count}", str(count))
    for old, new in {"[rounds]": f'[rounds]\noverlap = "{overlap}"', **(changes or {})}.items():
        assert old in text
        text = text.replace(old, new)
    run_file.write_text(text)
    arguments = ["testnet", "up", "--folder", str(tmp_path / "t"), "--run", str(run_file), *options]
    return subprocess.Popen(
        [*HEARS_CTRL_C, sys.executable, "-P", "-m", "dilocox.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def members(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_a_testnet_runs_to_its_end_and_the_model_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for verb in ("NODE", "COORDINATOR"):
        monkeypatch.setenv(f"DILOCOX_{verb}__NOTIFY", f"tee -a {tmp_path / 'told'}")
    process = start(tmp_path, 4, "--devices", "1", "--kill", "node-3@3")
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "kill -9 node-3" in output
    assert "every node has the same state hash after every round" in output
    assert "one node alone" not in output, "it takes longer than the run"
    assert f"next: dilocox generate --home {tmp_path / 't' / 'node-1'}" in output
    assert "held-out loss of the committed model" in output
    told, _ = json.JSONDecoder().raw_decode((tmp_path / "told").read_text())
    assert told["event"] in NOTABLE
    assert told["text"] == f"{told['name']}: {told['line']}"
    home = str(tmp_path / "t" / "node-1")
    exported = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "dilocox.cli.main",
            "export",
            str(tmp_path / "hf"),
            "--home",
            home,
            "--evaluate",
            "--json",
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    loss = json.loads(exported.stdout)["evaluation_loss"]
    rounds = tmp_path / "t" / "node-1"
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "dilocox.cli.main", "verify", "--home", str(rounds)], capture_output=True
    )
    assert verified.returncode == 0
    reported = re.search(r"committed model after \d+ inner steps: ([0-9.]+)", output)
    assert reported is not None
    assert loss == pytest.approx(float(reported[1]), abs=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_the_other_overlaps_train_to_one_state(tmp_path: Path, overlap: str):
    process = start(tmp_path, 5, "--devices", "2", "--no-baseline", overlap=overlap)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "every node has the same state hash after every round" in output
    assert len(re.findall(r" [23]/3 ", output)) == 5, output
    assert " 3/3 " in output


@pytest.mark.thorough
def test_time_boxed_rounds_with_an_adaptive_codec_train_to_one_state(tmp_path: Path):
    codec = '[compression]\nrank = 8\nadapt = "effective-rank"'
    changes = {"[compression]\nrank = 8": codec, "inner_steps = 20\n": "inner_steps = 20\nround_seconds = 1.5\n"}
    process = start(tmp_path, 5, "--devices", "2", "--no-baseline", changes=changes)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "every node has the same state hash after every round" in output
    run = Manifest.from_toml((tmp_path / "t" / "run.toml").read_text())
    (folder,) = (tmp_path / "t" / "node-1" / "runs").iterdir()
    with ChainFile.for_reading(folder / "chain.db") as chain:
        commits = list(chain.verify())
        assert len({commit.body.rank_or_k for commit in commits}) > 1, "the rank follows what the clusters measure"
        steps = {pb.Contribution.FromString(e.body).inner_steps for commit in commits for e in commit.body.contributions}
        assert len(steps) > 1, "every cluster took exactly as many steps: the clock did not decide"
        assert run.rounds.round_seconds == 1.5


@pytest.mark.parametrize("after", [pytest.param("at once", marks=pytest.mark.thorough), "training"])
def test_ctrl_c_at_any_point_leaves_no_process(tmp_path: Path, after: str):
    process = start(tmp_path, 1000, "--devices", "1")
    if after == "training":
        log = tmp_path / "t" / "node-1.log"
        wait_for(lambda: log.exists() and "training" in log.read_text(), "node-1 trains")
    else:
        wait_for(lambda: len(members(process)) >= 3, "processes have started")
    children = members(process)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    wait_until_gone(children)
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_detached_testnet_that_is_interrupted_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    """Check it, because a coordinator without nodes would outlive its starter."""
    started: list[psutil.Process] = []

    def interrupted(testnet: Testnet, link: Path) -> None:
        started.extend(psutil.Process(process.pid) for process in testnet.processes.values())
        os.kill(os.getpid(), number)
        pytest.fail("it goes on")

    monkeypatch.setattr(Testnet, "_wait_for", interrupted)
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        told = CliRunner().invoke(app, ["testnet", "up", "--detach", "--folder", str(tmp_path / "t")])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert told.exit_code == 130
    assert len(started) == 1
    wait_until_gone(started)


def test_killing_the_testnet_itself_leaves_no_process(tmp_path: Path):
    process = start(tmp_path, 1000, "--devices", "1")
    wait_for(lambda: len(members(process)) >= 8, "processes have started")
    children = members(process)
    process.kill()
    process.communicate()
    wait_until_gone(children)
