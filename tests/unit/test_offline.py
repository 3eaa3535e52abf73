"""Tests of verbs after a run: they read the folder if no daemon runs."""

import hashlib
import json
import os
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dilocox.cli import common
from dilocox.cli.main import app
from dilocox.transport.store.data_directory import DataDirectory, format_identity
from dilocox.views import json_schema
from dilocox.views.json_schema import fields_of
from tests.helpers import identity
from tests.unit.test_explain import Run


def made(home: Path, rounds: int) -> Path:
    """Make the folder of a stopped node that was counted in `rounds` rounds."""
    run = Run(home / "runs" / "ab")
    run.say(*(run.table.claim(number) for number in range(3)))
    for _ in range(rounds):
        run.usual()
    run.log.close()
    run.chain.close()
    (key := home / "identity.key").touch(0o600)
    key.write_bytes(format_identity(hashlib.sha256(b"test identity 1").digest()))
    return home


def said(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_status_says_how_far_it_came(tmp_path: Path):
    home = str(made(tmp_path, 4))
    told = said("status", "--home", home)
    assert told.exit_code == 3
    assert "round 5 was open; 4 of 9 rounds counted a cluster" in told.stdout
    assert re.search(r"^counted +3 of the last 3 rounds$", told.stdout, re.MULTILINE)
    assert re.search(r"^healthy +no: no daemon runs here$", told.stdout, re.MULTILINE)
    assert f"reading {home}" in told.stderr
    document = json.loads(said("status", "--json", "--home", home).stdout)
    assert fields_of(document) == {*json_schema.STOPPED}
    assert (document["peer"], document["round"], document["trained"]) == (identity(1).peer, 5, 4)
    assert said("status", "--check", "--home", home).exit_code == 3


def test_a_daemon_that_is_there_and_says_nothing_is_not_to_be_started_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common, "API_SECONDS", 0.1)  # it never answers
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        silent = said("status", "--home", url)
        assert (silent.exit_code, "does not answer" in silent.stderr) == (3, True), silent.stderr
    nobody = said("status", "--home", url)
    assert (nobody.exit_code, "start one with" in nobody.stderr) == (3, True), nobody.stderr


def test_stages_warn_of_one_replica(tmp_path: Path):
    home = str(made(tmp_path, 2))
    rows = json.loads(said("peers", "--stages", "--json", "--home", home).stdout)
    assert [row["replicas"] for row in rows] == [3, 3]
    assert "only one replica" not in said("peers", "--stages", "--home", home).stdout
    (alone := Run(tmp_path / "alone" / "runs" / "ab", rounds={"min_clusters": 1, "start_clusters": 1})).say(
        alone.table.claim(0)
    )
    alone.log.close()
    alone.chain.close()
    told = said("peers", "--stages", "--home", str(tmp_path / "alone"))
    assert told.stdout.count("only one replica: without it the run stops") == 2, told.output


def test_peers_and_top_tell_who_was_there(tmp_path: Path):
    home = str(made(tmp_path, 2))
    rows = json.loads(said("peers", "--json", "--home", home).stdout)
    assert {row["peer"] for row in rows if row["on_roster"]} == {identity(number).peer for number in range(3)}
    assert {row["present"] for row in rows} == {None}, "nobody is heard"
    assert said("peers", "nobody", "--home", home).exit_code == 2
    screen = said("status", "--watch", "--home", home)
    assert screen.exit_code == 3
    assert "no daemon runs here" in screen.stdout
    assert re.search(r"^ +2 +.*3/3", screen.stdout, re.MULTILINE)
    assert "12D3…" in screen.stdout


def test_who_only_starts_is_waited_for(tmp_path: Path):
    home = made(tmp_path, 1)
    with closing(DataDirectory(home)):
        told = said("status", "--home", str(home))
    assert (told.exit_code, told.stdout) == (3, "")
    assert "is starting" in told.stderr


def test_of_a_testnet_s_nodes_the_one_is_read_that_was_last_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    killed, other = (made(tmp_path / "testnet" / name, rounds) for name, rounds in (("node-1", 2), ("node-2", 5)))
    for folder, seconds in ((killed, 1000), (other, 2000)):
        for path in (folder / "runs" / "ab").iterdir():
            os.utime(path, (seconds, seconds))
    rows = json.loads(said("rounds", "--json").stdout)
    assert rows[-1]["round"] == 5
    assert json.loads(said("status", "--json").stdout)["folder"] == str(other)
    assert "round 5" in said("events").stdout
    made(tmp_path / "node", 1)
    assert json.loads(said("rounds", "--json").stdout)[-1]["round"] == 1, "this machine's own node comes first"
