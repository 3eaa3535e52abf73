"""Tests of the sources of a daemon's settings: default, file, environment or flag; and of options in groups."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from dilocox.cli.commands import VERBS
from dilocox.cli.environment import long_flag, verbs
from dilocox.cli.main import app
from dilocox.cli.options import PeerOptions, grouped
from dilocox.protocol.errors import ConfigError

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
    found = shown(tmp_path, *options, DILOCOX_NODE__THREADS="3", DILOCOX_NODE__HOURS="1-2", DILOCOX_NODE__PORT="7500")
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
    told = CliRunner().invoke(app, ["config", "show", "node", *options]).stdout
    assert re.search(rf"^hours +22-06 +file {tmp_path}/node.toml +DILOCOX_NODE__HOURS *$", told, re.MULTILINE)


def test_every_option_of_every_verb_has_one_variable():
    root: Any = get_command(app)
    found: dict[str, str] = {}
    for verb, command in verbs(root):
        for option in (each for each in command.params if any(name.startswith("--") for name in each.opts)):
            (flag,) = [name for name in option.opts if name.startswith("--")]
            wanted = "DILOCOX_" + verb.upper().replace(" ", "_").replace("-", "_") + "__" + flag[2:].upper().replace("-", "_")
            assert option.envvar == wanted, (verb, flag)
            found[wanted] = flag
    assert found["DILOCOX_NODE__FROM"] == "--from"
    assert found["DILOCOX_ARCHIVE__ARCHIVE_KEY"] == "--archive-key"
    assert found["DILOCOX_DATA_TRAIN_TOKENIZER__VOCABULARY"] == "--vocabulary"
    assert len(found) > 100
    assert len(found) == sum(long_flag(each) is not None for _, command in verbs(root) for each in command.params), (
        "no two share one"
    )


def test_a_variable_goes_by_its_flag(tmp_path: Path):
    found = shown(tmp_path, DILOCOX_NODE__FROM="model", DILOCOX_NODE__UPLOAD="5mbit@08-22 50mbit", DILOCOX_NODE__DHT="false")
    assert found["from"] == ("model", "environment")
    assert found["upload"] == ("5mbit@08-22, 50mbit", "environment")
    assert found["dht"] == (False, "environment")
    assert found["join"] == (None, "default")
    assert shown(tmp_path, DILOCOX_RELAY__NAME="attic")["name"][1] == "default", "another verb's"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("DILOCOX_NODE__HUORS", "did you mean DILOCOX_NODE__HOURS?"),
        ("DILOCOX_NOED__HOURS", "did you mean DILOCOX_NODE__HOURS?"),
        ("DILOCOX_DATA_BUILD__TOO", "did you mean DILOCOX_DATA_BUILD__TO?"),
        ("DILOCOX_NODE__NOTHING_LIKE_IT_AT_ALL", "--help"),
        ("DILOCOX__", "--help"),
    ],
)
def test_a_variable_that_is_no_option_is_refused_with_the_nearest(name: str, near: str):
    for verb in (["config", "show", "coordinator"], ["status"]):
        told = CliRunner().invoke(app, verb, env={name: "x"})
        assert isinstance(told.exception, ConfigError), told.output
        assert name in str(told.exception)
        assert near in str(told.exception)
    assert CliRunner().invoke(app, ["node", "--help"], env={name: "x"}).exit_code == 0
    assert (
        CliRunner().invoke(app, ["config", "show", "node"], env={"DILOCOX_PARENT_PIPE": "1", "DILOCOX_WORKER_X": ""}).exit_code
        == 0
    )


def test_a_secret_is_not_shown(tmp_path: Path):
    (tmp_path / "hook").write_text("https://chat.example/SECRET")
    for notify in ("https://chat.example/SECRET", f"@{tmp_path / 'hook'}"):
        assert shown(tmp_path, "--notify", notify)["notify"] == ("the webhook at chat.example", "flag")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('huors = "22-06"', "did you mean hours"),
        ("nonsense", "cannot read"),
        ("port = 99999", "port"),
        ('threads = "many"', "threads"),
        ('hours = "22-99"', "wrong.toml: hours: "),
        ('upload = ["fast"]', "--upload"),
        ('download = "fast"', "--download"),
        ('notify = "ftp://x"', ""),
    ],
)
def test_a_wrong_file_is_a_sentence(tmp_path: Path, text: str, says: str):
    (tmp_path / "wrong.toml").write_text(text)
    for verb in (["node", "--join", "x"], ["config", "show", "node"]):
        told = CliRunner().invoke(app, [*verb, "--config", str(tmp_path / "wrong.toml")])
        assert isinstance(told.exception, ConfigError), told.output
        assert str(tmp_path / "wrong.toml") in str(told.exception)
        assert says in str(told.exception)
        assert "DILOCOX" not in str(told.exception), "nobody said it there"


def test_a_group_of_options_is_one_argument():
    found: list[tuple[str, PeerOptions]] = []

    @grouped
    def verb(peer: PeerOptions, other: Annotated[str, typer.Option()] = "x") -> None:
        """Print its options."""
        found.append((other, peer))

    alone = typer.Typer()
    alone.command()(verb)
    told = CliRunner().invoke(
        alone, ["--name", "attic", "--upload", "1mbit", "--upload", "2mbit@1-2", "--other", "y", "--no-dht"]
    )
    assert told.exit_code == 0, told.output
    ((other, peer),) = found
    assert (other, peer.name, peer.upload, peer.dht, peer.port) == ("y", "attic", ["1mbit", "2mbit@1-2"], False, None)
    assert "Print its options." in CliRunner().invoke(alone, ["--help"]).output


def test_a_verb_loads_no_other(tmp_path: Path):
    """Check it, because `status` is called often, and the training libraries double its load time."""
    script = (
        "import sys\nfrom dilocox.cli.main import app\n"
        f"try:\n    app(['status', '--home', {str(tmp_path)!r}])\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('dilocox.cli.') or name.startswith('dilocox.node.daemon')))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], text=True, capture_output=True, check=True)
    loaded = set(done.stdout.split())
    assert "dilocox.cli.look.status" in loaded
    assert not loaded & {f"dilocox.cli.{place.rpartition('.')[0]}" for place in VERBS.values()} - {"dilocox.cli.look.status"}
    assert "dilocox.node.daemon" not in loaded
