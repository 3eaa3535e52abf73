"""Tests of progress: a terminal shows the current work; any other output has the result only."""

import io
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dilocox.cli import common, progress
from dilocox.cli.dev import verify
from dilocox.cli.dev.testnet import waits_for
from dilocox.cli.main import app
from dilocox.cli.model import data
from dilocox.cli.progress import working
from dilocox.cli.run import init
from dilocox.cli.run import seed_state as states
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.run.tensors import trained_count
from dilocox.transport.store.chain_file import ChainFile
from dilocox.views import json_views as views
from tests.helpers import COORDINATOR, Table, manifest


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the screen of a terminal."""
    seen = io.StringIO()
    monkeypatch.setattr(common, "errors", Console(file=seen, force_terminal=True, width=120))
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    return seen


def test_a_line_on_a_terminal_that_goes_again(screen: io.StringIO):
    with working("reading [b]it[/b]") as outer:
        outer.at(1, 4)
        with working("of another", 10, bytes=True) as bar:
            assert list(bar.each("one by one", "abc", 3)) == ["a", "b", "c"]
        outer.begin("writing it", 2)
        outer.more(1)
        outer.say("and the rest")
    for said in ("reading [b]it[/b]", "of another", "and the rest"):
        assert said in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[2K"), "it is wiped away"


def test_nothing_off_a_terminal(monkeypatch: pytest.MonkeyPatch):
    seen = io.StringIO()
    monkeypatch.setattr(common, "errors", Console(file=seen))
    with working("reading") as bar:
        bar.begin("writing", 3)
    assert seen.getvalue() == ""


def test_who_verifies_sees_the_commits_go_by(tmp_path: Path, screen: io.StringIO, capsys: pytest.CaptureFixture[str]):
    table = Table(manifest()).genesis().train(2)
    (tmp_path / "runs" / "x").mkdir(parents=True)
    chain = ChainFile(tmp_path / "runs" / "x" / "chain.db", table.run, views.describe)
    for commit in table.commits:
        chain.append(commit.envelope)
    chain.close()
    verify.verify(home=tmp_path)
    assert "checking the commits" in screen.getvalue()
    assert "3 commits are valid" in capsys.readouterr().out


def test_who_makes_a_run_or_looks_at_data_sees_that_they_are_read(
    tmp_path: Path, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    init.init(tmp_path / "run.toml")
    assert "reading and checking the data" in screen.getvalue()
    data.show("stdlib")
    assert "reading and checking every file" in screen.getvalue()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("check run.toml", "checking the run, this machine and its data"),
        ("data build mine text.txt --to built", "mine"),
        ("data train-tokenizer tokenizer.json text.txt --vocabulary 300", "searching for pairs of tokens"),
        ("verify --replay 2 --home home/node", "checking the commits"),
        ("export out --home home/node", "searching for the state"),
        ("generate --prompt x --home home/node", "loading the model"),
        ("check dilocox://RUN", "asking the coordinator"),
    ],
)
def test_what_may_take_long_says_what_it_does(
    tmp_path: Path, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, words: str, says: str
):
    """Check it also for failures: the work is named before it begins."""
    monkeypatch.chdir(tmp_path)
    environment = {"DILOCOX_HOME": str(tmp_path / "home")}
    assert CliRunner().invoke(app, ["init", "run.toml"], env=environment).exit_code == 0
    (tmp_path / "text.txt").write_text("words and words\n" * 2000)
    table = Table(manifest()).genesis().train(3)
    (tmp_path / "home/node/runs/x").mkdir(parents=True)
    with closing(ChainFile(tmp_path / "home/node/runs/x/chain.db", table.run, views.describe)) as chain:
        for commit in table.commits:
            chain.append(commit.envelope)
    link = JoinLink(bytes(32), COORDINATOR.peer, "127.0.0.1:1", bytes(32), ())
    screen.truncate(0)
    CliRunner().invoke(app, [str(link) if word.startswith("dilocox:") else word for word in words.split()], env=environment)
    assert says in screen.getvalue()


def test_why_a_testnet_shows_no_row_yet():
    status: dict[str, Any] = {"round": 0, "why": "the run begins when 3 clusters are here: 1 of 3"}
    nodes = {
        "node-1": {"state": "starting", "why": "1 of 2 stage workers are up", "on_roster": False},
        "node-2": {"state": "training", "why": "on the roster", "on_roster": True},
    }
    assert waits_for(status, nodes) == (
        "round 0: the run begins when 3 clusters are here: 1 of 3; node-1 starting, 1 of 2 stage workers are up"
    )
    assert waits_for(None, {}) == "the coordinator does not answer"


def test_initial_state_of_a_model_that_takes_long_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(states, "ESTIMATE_SECONDS", 0.0)
    monkeypatch.setattr(states, "LONG_SECONDS", 0.0)
    model = manifest().model
    with working("begins") as bar:
        assert states.compute_with_bar(model, bar) == states.compute_state(model, lambda count: None)
    [line] = capsys.readouterr().err.splitlines()
    assert f"{trained_count(model):,} parameters" in line
