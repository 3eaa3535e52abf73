"""Who waits on a terminal sees what for; off a terminal nothing but the result is printed."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dilocox.cli import common, data, init, progress, verify
from dilocox.cli.progress import working
from dilocox.cli.testnet import waits_for
from dilocox.transport.chain_file import ChainFile
from dilocox.views import rows as views
from tests.helpers import Table, manifest


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Of a terminal."""
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
    assert "3 commits hold" in capsys.readouterr().out


def test_who_makes_a_run_or_looks_at_data_sees_that_they_are_read(
    tmp_path: Path, screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path))
    init.init(tmp_path / "run.toml")
    assert "reading and checking the data" in screen.getvalue()
    data.show("stdlib")
    assert "reading and checking every file" in screen.getvalue()


def test_why_a_testnet_shows_no_row_yet():
    status: dict[str, Any] = {"round": 0, "why": "waiting for 3 clusters with one initial state; 1 are here"}
    nodes = {
        "node-1": {"state": "starting", "why": "1 of 2 stage workers are up", "on_roster": False},
        "node-2": {"state": "training", "why": "on the roster", "on_roster": True},
    }
    assert waits_for(status, nodes) == (
        "round 0: waiting for 3 clusters with one initial state; 1 are here; node-1 starting, 1 of 2 stage workers are up"
    )
    assert waits_for(None, {}) == "the coordinator does not answer"
