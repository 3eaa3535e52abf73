"""Commands of plugins: listed where they are installed, and a broken one harms no other command."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dilocox.cli import main as cli
from dilocox.cli import verbs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points that are installed; a test adds to them."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry for entry in found if entry.group == group])
    verbs.plugins.cache_clear()
    yield found
    verbs.plugins.cache_clear()


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["dilocox", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, capsys.readouterr().err


def test_help_without_plugins_lists_the_core_alone(installed: list[EntryPoint]):
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    assert "Plugins" not in shown
    assert set(get_command(cli.app).commands) == set(verbs.VERBS)  # type: ignore[attr-defined]


def test_plugin_with_the_name_of_a_core_command_does_not_replace_it(installed: list[EntryPoint]):
    installed.append(EntryPoint("status", "nowhere:app", verbs.PLUGINS))
    assert not verbs.plugins()


def test_plugin_that_cannot_be_loaded_is_a_sentence_and_harms_no_other_command(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    installed.append(EntryPoint("broken", "no_such_module:app", verbs.PLUGINS))
    assert "broken" in CliRunner().invoke(cli.app, ["--help"]).output
    code, error = said(monkeypatch, capsys, "broken")
    assert (code, "cannot be loaded" in error) == (2, True), error
    monkeypatch.setenv("DILOCOX_NODE__THREADS", "2")
    code, error = said(monkeypatch, capsys, "status", "--home", str(tmp_path))
    assert (code, "not-running" in error) == (3, True), error


def test_core_imports_no_plugin():
    for room in ("protocol", "transport", "coordinator", "node", "views", "around", "cli"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) dilocox_", path.read_text(), re.MULTILINE), path
