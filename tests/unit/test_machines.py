"""Tests of the number of machines that begin a run: every page for an owner or an operator names it before the start."""

import asyncio
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.cli.run.init import preset_names, render_preset
from dilocox.coordinator import daemon as coordinator_daemon
from dilocox.node import daemon as node_daemon
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.member import member
from dilocox.protocol.member.node_status import Status, status
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import COORDINATOR, Table, identity, manifest, until


def written(folder: Path, *options: str) -> tuple[Manifest, str]:
    """Return the run that init wrote, and its output."""
    told = CliRunner().invoke(app, ["init", str(folder / "run.toml"), *options], env={"DILOCOX_HOME": str(folder / "home")})
    assert told.exit_code == 0, told.output
    return Manifest.from_toml((folder / "run.toml").read_text()), told.stderr


@pytest.mark.parametrize(
    ("options", "start", "least"),
    [([], 2, 2), (["--machines", "1"], 1, 1), (["--machines", "2"], 2, 2), (["--machines", "9"], 9, 2)],
)
def test_init_writes_and_says_how_many_machines_begin(tmp_path: Path, options: list[str], start: int, least: int):
    run, said = written(tmp_path, *options)
    assert (run.rounds.start_clusters, run.rounds.min_clusters) == (start, least)
    assert run.begins in said
    assert "rounds.start_clusters" in said


@pytest.mark.parametrize("said", ["0", "-1", "x", "1000000"])
def test_init_refuses_a_number_that_no_run_begins_with(tmp_path: Path, said: str):
    assert CliRunner().invoke(app, ["init", str(tmp_path / "run.toml"), "--machines", said]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_init_asks_on_a_terminal_until_the_answer_is_a_number(tmp_path: Path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "dilocox.cli.main", "init", str(tmp_path / "run.toml")]
    environment = {**os.environ, "DILOCOX_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as asking:
        os.close(theirs)
        os.write(ours, b"many\n0\n5\n")
        while asking.poll() is None:
            try:
                os.read(ours, 4096)
            except OSError:
                break
        assert asking.wait() == 0
    os.close(ours)
    assert Manifest.from_toml((tmp_path / "run.toml").read_text()).rounds.start_clusters == 5


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_names_the_number(name: str):
    for machines in (None, 1, 4):
        run = Manifest.from_toml(render_preset(name, name, "00" * 32, machines=machines))
        assert run.rounds.start_clusters is not None
        assert machines is None or run.rounds.start_clusters == machines


def test_check_says_when_the_run_begins(tmp_path: Path):
    run, _ = written(tmp_path, "--machines", "4")
    told = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")], env={"DILOCOX_HOME": str(tmp_path / "home")})
    assert run.begins in told.stdout


def test_a_node_that_waits_for_others_says_for_how_many_and_what_to_change():
    run = manifest()
    state = member.start(run, identity(0).peer, initial_head(COORDINATOR.peer))
    found = status(state, Status("training", ""))
    assert (found.name, found.why) == ("joining", run.begins)
    assert "rounds.start_clusters" in found.advice
    assert "new link" in found.advice


async def test_after_a_while_a_waiting_coordinator_logs_what_to_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    table = Table(manifest())
    table.submit(table.claim(0))
    monkeypatch.setattr(coordinator_daemon, "REMINDER_SECONDS", 0.0)
    service = SimpleNamespace(state=table.state)
    reminding = asyncio.create_task(coordinator_daemon.remind(service))  # type: ignore[arg-type]
    await until(lambda: caplog.messages or reminding.done())
    assert "1 of 3" in caplog.messages[0]
    assert "rounds.start_clusters" in caplog.messages[0]
    service.state = Table(manifest()).genesis().state
    await reminding


async def test_after_a_while_a_waiting_node_logs_what_to_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    table = Table(manifest())
    monkeypatch.setattr(node_daemon, "REMINDER_SECONDS", 0.0)
    state = replace(member.start(table.run, identity(0).peer, table.head), connected=True)
    node = SimpleNamespace(machine=SimpleNamespace(state=state), round_why=f"{table.run.begins}: 1 of 3")
    reminding = asyncio.create_task(node_daemon.remind(node))  # type: ignore[arg-type]
    await until(lambda: caplog.messages or reminding.done())
    assert "1 of 3" in caplog.messages[0]
    assert "rounds.start_clusters" in caplog.messages[0]
    node.machine.state = replace(state, head=Table(manifest()).genesis().head)
    await reminding
