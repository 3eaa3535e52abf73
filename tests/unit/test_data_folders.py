"""A run reads what the node's operator named, and nothing else on that disk."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.node.data_folders import check_data, parse_folders, source_files
from dilocox.node.training.data import load_dataset
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import Data
from tests.e2e.conftest import RUN
from tests.helpers import manifest

TRICKS = [
    "/etc/passwd",
    "//etc/passwd",
    "",
    "/",
    "~/x.txt",
    "~root/x.txt",
    "../x",
    "a/../b.txt",
    "a/..",
    "./x",
    "a//b",
    "..",
    ".",
]
TRICKS += ["a\\..\\b", "a/\0", "a/b/../../../etc/passwd", "**/../x", "~", "a/~/x"]
NAMES = ["", ".", "..", "~", "a b", "a/../b", "ä", "a:b", "a=b", "*", "a\n"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with a text, beside a secret."""
    (tmp_path / "secret.txt").write_text("secret " * 3000)
    inside = tmp_path / "texts"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a.txt").write_text("hello world " * 1000)
    return inside


def check(folder: Path, **data: Any) -> None:
    check_data(Data(**data), parse_folders([f"texts={folder}"]))


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("key", ["source", "tokenizer"])
def test_a_run_cannot_name_a_path(key: str, trick: str):
    prefix = "text:" if key == "source" else ""
    for text in (prefix + trick, f"{prefix}texts/{trick}"):
        with pytest.raises(ValueError, match="no absolute path"):
            Data.model_validate({key: text})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name(name: str, folder: Path):
    with pytest.raises(ValueError, match="NAME"):
        Data(source=f"text:{name}/*.txt")
    with pytest.raises(ConfigError, match="--data"):
        parse_folders([f"{name}={folder}"])


def test_folders_that_are_not_there_or_named_twice_are_refused(folder: Path):
    for wrong in (["texts"], ["texts="], [f"texts={folder}/none"], [f"texts={folder}", f"texts={folder}"]):
        with pytest.raises(ConfigError, match="--data texts"):
            parse_folders(wrong)


def test_an_unnamed_folder_is_asked_for_by_name(folder: Path):
    with pytest.raises(ConfigError, match=r"--data corpus=DIR"):
        check(folder, source="text:corpus/*.txt")
    with pytest.raises(ConfigError, match=r"--data words=DIR"):
        check(folder, source="text:texts/**/*.txt", tokenizer="words/t.json")
    with pytest.raises(ConfigError, match=r"--data texts=DIR"):
        load_dataset(manifest(data={"source": "text:texts/*.txt"}))


def test_a_link_that_leads_out_refuses_the_run_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    check(folder, source="text:texts/**/*.txt")
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    stories = {"out.txt": folder.parent / "secret.txt", "up": folder.parent, "chain.txt": folder / "out.txt"}
    for name, target in stories.items():
        (folder / name).symlink_to(target)
        pattern = f"{name}/*.txt" if name == "up" else name
        for glob in (pattern, "**/*.txt", "*/*.txt" if name == "up" else "*.txt"):
            run = manifest(data={"source": f"text:texts/{glob}"})
            with pytest.raises(ConfigError, match="leads out of"):
                load_dataset(run, parse_folders([f"texts={folder}"]))
        with pytest.raises(ConfigError, match="leads out of"):
            check(folder, source="text:texts/deep/a.txt", tokenizer=f"texts/{name}" + ("/secret.txt" if name == "up" else ""))
        if name != "out.txt":
            (folder / name).unlink()


def test_links_inside_and_a_folder_that_is_a_link_itself_are_followed(folder: Path, tmp_path: Path):
    (folder / "b.txt").symlink_to(folder / "deep" / "a.txt")
    (tmp_path / "alias").symlink_to(folder)
    found = source_files(Data(source="text:texts/*.txt"), parse_folders([f"texts={tmp_path / 'alias'}"]))
    assert found == [folder / "deep" / "a.txt"]


def test_a_testnet_asks_for_the_folder_before_it_starts_anything(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        RUN.replace("{owner}", "00" * 32).replace("{count}", "9").replace("[data]", '[data]\nsource = "text:t/*"')
    )
    (tmp_path / "run.key").write_text("00" * 32)
    arguments = ["testnet", "up", "--folder", str(tmp_path / "t"), "--run", str(tmp_path / "run.toml")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "--data t=DIR" in str(result.exception)
    assert not (tmp_path / "t").exists()


def test_what_is_no_file_is_not_read(folder: Path):
    os.mkfifo(folder / "pipe.txt")
    (folder / "folder.txt").mkdir()
    with pytest.raises(ConfigError, match="no file matches"):
        check(folder, source="text:texts/*.txt")
