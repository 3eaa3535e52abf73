"""Tests that no file is deleted or overwritten that we did not make."""

import errno
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dilocox.cli.main import app
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.testnet.swarm import MARKER, MEMBER, Testnet, member_names
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.views.error_codes import code_of


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dilocox(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch):
    """Make `dilocox testnet up` write its folder and start nothing."""
    monkeypatch.setattr(Testnet, "start_all", lambda self, attached=True: None)
    return lambda folder, *options: dilocox("testnet", "up", "--detach", "--folder", folder, *options)


def test_a_testnet_refuses_a_folder_with_anything_in_it_that_no_testnet_made(tmp_path: Path, up):
    thesis = tmp_path / "work" / "chapters" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years")
    (tmp_path / "work-run.toml").write_text("mine")
    before = contents(tmp_path)
    result = up(tmp_path / "work")
    assert contents(tmp_path) == before
    assert isinstance(result.exception, ConfigError)
    assert "--folder" in str(result.exception)


def test_a_testnet_refuses_to_kill_whom_it_will_not_have_before_it_makes_anything(tmp_path: Path, up):
    refused = up(tmp_path / "t", "--kill", "node-9@3")
    assert refused.exit_code == 2
    assert "coordinator, node-1, node-2, node-3" in refused.stderr
    assert not (tmp_path / "t").exists()
    assert up(tmp_path / "t", "--boxes", "2", "--kill", "node-1-box-2@3").exit_code == 0


def test_a_testnet_writes_nothing_beside_its_folder(tmp_path: Path, up):
    (tmp_path / "t-run.toml").write_text("mine")
    assert up(tmp_path / "t").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t-run.toml"]
    assert (tmp_path / "t-run.toml").read_text() == "mine"


def test_a_testnet_replaces_what_an_earlier_one_made_and_nothing_else(tmp_path: Path, up):
    folder = tmp_path / "t"
    folder.mkdir()
    assert up(folder, "--nodes", 4).exit_code == 0
    (folder / "node-4").mkdir()
    for made in ("node-4/identity.key", "node-4.log", "coordinator.log", "link"):
        (folder / made).write_text("old")
    (folder / "notes.txt").write_text("mine")
    (folder / "node-9").mkdir()
    (folder / "node-9" / "notes.txt").write_text("mine")
    assert up(folder, "--nodes", 3).exit_code == 0
    assert [member.name for member in Testnet.load(folder).members] == ["coordinator", "node-1", "node-2", "node-3"]
    kept = contents(folder)
    assert {name for name, text in kept.items() if text == b"mine"} == {"notes.txt", "node-9/notes.txt"}
    assert not {name for name, text in kept.items() if text == b"old"}


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"{}", b"[3]", b'[""]', b'[".."]', b'["/"]', b'["notes"]'])
def test_a_testnet_clears_nothing_where_a_marker_says_what_none_writes(tmp_path: Path, up, damage: bytes):
    folder = tmp_path / "swarm"
    assert up(folder).exit_code == 0
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.tex").write_text("years")
    (folder / MARKER).write_bytes(damage)
    before = contents(tmp_path)
    assert isinstance(up(folder).exception, ConfigError)
    assert contents(tmp_path) == before


def test_a_marker_may_name_every_member():
    assert all(re.fullmatch(MEMBER, name) for name in member_names(12, 12))


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b"[]", b"{}", b'{"members": [{}]}', b'{"members": 3, "network": null}'])
def test_a_testnet_s_damaged_layout_is_a_sentence(tmp_path: Path, up, damage: bytes):
    assert up(tmp_path / "swarm").exit_code == 0
    (tmp_path / "swarm" / "testnet.json").write_bytes(damage)
    for words in (("status",), ("down",), ("kill", "node-1")):
        result = dilocox("testnet", *words, "--folder", tmp_path / "swarm")
        assert isinstance(result.exception, LocalError)
        assert "testnet.json is damaged" in str(result.exception)
    assert up(tmp_path / "swarm").exit_code == 0


def test_init_never_puts_the_key_where_the_run_file_goes(tmp_path: Path):
    result = dilocox("init", tmp_path / "run.key")
    assert result.exit_code == 2
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", ["ü", "my run", "x" * 65])
def test_a_run_file_whose_name_no_run_can_have_says_how_to_name_it(tmp_path: Path, name: str):
    result = dilocox("init", tmp_path / f"{name}.toml")
    assert result.exit_code == 2
    assert f"no run can be called {name}" in result.stderr
    assert "--name NAME" in result.stderr
    assert contents(tmp_path) == {}
    assert dilocox("init", tmp_path / f"{name}.toml", "--name", "mine").exit_code == 0


@pytest.mark.parametrize("arguments", [["--name", "a name with spaces"], ["--preset", "nonsense"]])
def test_a_refused_init_leaves_nothing_behind(tmp_path: Path, arguments: list[str]):
    result = dilocox("init", tmp_path / "run.toml", *arguments)
    assert result.exit_code == 2 or isinstance(result.exception, ConfigError)
    assert contents(tmp_path) == {}


def test_init_keeps_an_owner_key_that_is_there(tmp_path: Path):
    assert dilocox("init", tmp_path / "run.toml").exit_code == 0
    key = (tmp_path / "run.key").read_bytes()
    again = dilocox("init", tmp_path / "run.toml")
    assert again.exit_code == 2
    (tmp_path / "run.toml").unlink()
    assert dilocox("init", tmp_path / "run.toml").exit_code == 0
    assert (tmp_path / "run.key").read_bytes() == key
    assert os.stat(tmp_path / "run.key").st_mode & 0o777 == 0o600


def test_init_into_a_folder_that_is_not_there_says_so(tmp_path: Path):
    result = dilocox("init", tmp_path / "none" / "run.toml")
    assert isinstance(result.exception, ConfigError)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("fits", [0, 1])
def test_init_on_a_full_disk_leaves_nothing_and_is_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int):
    monkeypatch.setenv("DILOCOX_HOME", str(tmp_path / "home"))
    assert dilocox("init", tmp_path / "first.toml").exit_code == 0
    before = contents(tmp_path)
    syncs = iter([None] * 2 * fits)  # of a file, and of its folder

    def fsync(handle: int) -> None:
        if next(syncs, handle) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    result = dilocox("init", tmp_path / "run.toml")
    assert isinstance(result.exception, OSError)
    assert code_of(result.exception) == "disk-full"
    assert contents(tmp_path) == before


def test_a_daemons_folder_keeps_what_others_put_there(tmp_path: Path):
    (tmp_path / "parent-teacher-evening.txt").write_text("mine")
    (tmp_path / "lock").write_text("mine")
    DataDirectory(tmp_path).close()
    assert (tmp_path / "parent-teacher-evening.txt").read_text() == "mine"
    assert (tmp_path / "lock").read_text() == "mine"
