"""What a daemon is told, and by whom: default, file, environment or flag; and options in groups."""

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from dilocox.cli.main import app
from dilocox.cli.options import PeerOptions, grouped

FILE = """
hours = "22-06"
upload = ["20mbit@08-22", "50mbit"]
download = "30mbit"
dht = false
port = 7400
threads = 2
from = "hub"
"""


def shown(folder: Path, *arguments: str, **environment: str) -> dict[str, tuple[Any, str]]:
    (folder / "node.toml").write_text(FILE)
    told = CliRunner().invoke(app, ["config", "show", "--json", "node", *arguments], env=environment)
    assert told.exit_code == 0, told.output
    return {row["option"]: (row["value"], row["origin"]) for row in json.loads(told.stdout)}


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path):
    options = ["--config", str(tmp_path / "node.toml"), "--threads", "4", "-v"]
    found = shown(tmp_path, *options, DILOCOX_NODE__THREADS="3", DILOCOX_NODE__HOURS="1-2", DILOCOX_NETWORK__PORT="7500")
    assert found["threads"] == (4, "flag")
    assert found["verbose"] == (True, "flag")
    assert found["hours"] == ("1-2", "environment")
    assert found["port"] == (7500, "environment")
    assert found["upload"] == ("20mbit@08-22, 50mbit", "file")
    assert found["download"] == ("30mbit", "file")
    assert found["dht"] == (False, "file")
    assert found["from"] == ("hub", "file")
    assert found["step-seconds"] == (0.0, "default")
    assert found["notify"] == (None, "default")


def test_a_secret_is_not_shown(tmp_path: Path):
    (tmp_path / "hook").write_text("https://chat.example/SECRET")
    for notify in ("https://chat.example/SECRET", f"@{tmp_path / 'hook'}"):
        assert shown(tmp_path, "--notify", notify)["notify"] == ("the webhook at chat.example", "flag")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('huors = "22-06"', "did you mean hours"),
        ("nonsense", "cannot be read"),
        ("port = 99999", "port"),
        ('threads = "many"', "threads"),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path: Path, text: str, says: str):
    (tmp_path / "wrong.toml").write_text(text)
    told = CliRunner().invoke(app, ["node", "--config", str(tmp_path / "wrong.toml"), "--join", "x"])
    assert told.exit_code != 0
    assert says in f"{told.output}{told.exception}"


def test_a_group_of_options_is_one_argument():
    found: list[tuple[str, PeerOptions]] = []

    @grouped
    def verb(peer: PeerOptions, other: Annotated[str, typer.Option()] = "x") -> None:
        """Says so."""
        found.append((other, peer))

    alone = typer.Typer()
    alone.command()(verb)
    told = CliRunner().invoke(
        alone, ["--name", "attic", "--upload", "1mbit", "--upload", "2mbit@1-2", "--other", "y", "--no-dht"]
    )
    assert told.exit_code == 0, told.output
    ((other, peer),) = found
    assert (other, peer.name, peer.upload, peer.dht, peer.port) == ("y", "attic", ["1mbit", "2mbit@1-2"], False, 0)
    assert "Says so." in CliRunner().invoke(alone, ["--help"]).output
