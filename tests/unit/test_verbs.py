"""Tests of mistakes before a verb's work: one sentence, the right exit code, and no traceback."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilocox.cli import main as cli
from dilocox.cli.look import status
from dilocox.cli.run.coordinator import show_link
from dilocox.protocol.ids import JoinLink, is_meant, short
from dilocox.transport.store.data_directory import DataDirectory
from tests.helpers import COORDINATOR, dilocox

pytestmark = pytest.mark.usefixtures("any_ports")
LINK = "dilocox://" + "00" * 32 + "@12D3KooWnobody?at=127.0.0.1:1&cert="
WRONG = [
    "init FILE/x.toml",
    "init NOWHERE/x.toml",
    "init run.toml",
    "init x.toml --preset nosuch",
    "init x.toml --from NOWHERE",
    "init x.toml --from FILE",
    "init x.toml --data nosuch",
    "init x.toml --data a=FILE",
    "coordinator BYTES",
    "coordinator NOWHERE",
    "coordinator FOLDER",
    "coordinator run.toml --api nonsense",
    "coordinator run.toml --api 127.0.0.1:99999",
    "coordinator run.toml --host no/such/host",
    "coordinator run.toml --port 99999",
    "coordinator run.toml --port -1",
    "coordinator run.toml --home FILE",
    "coordinator run.toml --data x=NOWHERE",
    "coordinator run.toml --data nonsense",
    "coordinator run.toml --weights NOWHERE",
    "coordinator run.toml --upload 0",
    "coordinator run.toml --upload fast",
    "coordinator run.toml --upload 20mbit@25-26",
    "coordinator run.toml --notify no-such-command",
    "coordinator run.toml --notify http://",
    "node",
    "node --join nonsense",
    f"node --join {LINK}",
    "node --join @NOWHERE",
    "node --join @BYTES",
    "node --join @FOLDER",
    "node --cluster NOWHERE",
    "node --cluster BYTES",
    "node --join nonsense --devices 0",
    "node --join nonsense --hours 22",
    "node --join nonsense --hours 22-22",
    "node --join nonsense --upload 1kbit",
    "node --join nonsense --download 500kbit",
    "node --join nonsense --notify @NOWHERE",
    "node --join nonsense --notify @BYTES",
    "node --config NOWHERE",
    "node --config BYTES",
    "node --config FOLDER",
    "config show nosuch",
    "config show node --config NOWHERE",
    "config show node --nosuch",
    "config show node --threads many",
    "pause --home NOWHERE",
    "pause --now --home FILE",
    "resume --home NOWHERE",
    "leave --home NOWHERE",
    "leave --home FILE",
    "relay --join nonsense --download fast",
    "market offer --upload 99999999999999999gbit",
    "market offer --price 99999999999999999999",
    "market offer --devices 999999999999",
    "relay --join nonsense",
    "relay --join @FOLDER",
    "init .",
    "init /",
    "init ..",
    "coordinator .",
    "coordinator /",
    "check .",
    "check /",
    "owner appoint 12D3KooWGC9FJPHZMdL8GVfgZZMLTFMvPEoHoyW5P3Y8RkpzjoGC .",
    "testnet up --folder FOLDER --run .",
    "check BYTES",
    "check NOWHERE",
    "check FOLDER",
    "check @NOWHERE",
    "check dilocox://nonsense",
    "check run.toml --as nobody",
    "check run.toml --as relay --devices 2",
    "check run.toml --devices 1025",
    "node --join nonsense --devices 1025",
    "plan --devices 1025",
    "runs --devices 1025",
    "testnet up --folder FOLDER --devices 1025",
    "check run.toml --private NOWHERE",
    "check run.toml --private-epsilon 8",
    "check run.toml --private-delta 1e-5",
    "plan BYTES",
    "plan FOLDER",
    "plan --preset nosuch",
    "plan --bandwidth fast",
    "plan --inner-steps many",
    "status --home FILE",
    "status --home NOWHERE",
    "peers --home FILE",
    "stages --home NOWHERE",
    "rounds --home NOWHERE",
    "verify --home FILE",
    "verify nonsense",
    "verify --replay 3 --home NOWHERE",
    "verify --join nonsense",
    "export out --home NOWHERE",
    "export FILE",
    "export out --join nonsense",
    "generate --prompt x --home NOWHERE",
    "generate FOLDER --prompt x",
    "generate FILE --prompt x",
    "data build x NOWHERE",
    "data build x BYTES",
    "data build ../x run.toml",
    "data build x run.toml --tokenizer BYTES",
    "data build x run.toml --tokenizer NOWHERE",
    "data train-tokenizer out.json NOWHERE",
    "id --home FILE",
    "owner appoint nobody run.toml",
    "owner appoint nobody NOWHERE",
    "attest verify --kind tdx --blob NOWHERE",
    "attest verify --kind tdx --blob run.toml --policy BYTES",
    "attest verify --kind nosuch --blob run.toml",
    "testnet status --folder FILE",
    "testnet status --folder NOWHERE",
    "testnet up --folder FILE",
    "testnet up --folder FOLDER --run NOWHERE",
    "testnet up --folder FOLDER --run BYTES",
    "testnet up --folder FOLDER --preset nosuch",
    "testnet up --folder FOLDER --kill nonsense",
    "testnet up --folder FOLDER --nodes 0",
    "testnet up --folder FOLDER --wan fast",
    "testnet up --folder FOLDER --private-epsilon 8",
    "testnet up --folder FOLDER --private-clip 2",
    "testnet up --folder FOLDER --private-delta 1e-5",
    "testnet down --folder NOWHERE",
    "testnet kill node-9 --folder NOWHERE",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a valid run file, a file, bytes that are no text, and a folder that is not empty."""
    folder = tmp_path_factory.mktemp("verbs")
    made = CliRunner().invoke(cli.app, ["init", str(folder / "run.toml")], env={"DILOCOX_HOME": str(folder / "home")})
    assert made.exit_code == 0, made.output
    (folder / "FILE").write_text("somebody's\n")
    (folder / "BYTES").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "FOLDER").mkdir()
    return folder


@pytest.mark.parametrize("words", WRONG)
def test_a_verb_says_what_is_wrong_in_a_sentence(
    place: Path, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place)
    monkeypatch.setenv("DILOCOX_HOME", str(place / "home"))
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    code = dilocox(monkeypatch, *words.split())
    told = capfd.readouterr()
    assert code in (1, 2, 3), told
    assert "error[" in told.err or code == 2, told
    assert "Traceback" not in told.err
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before, "nothing is written"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("coordinator run.toml --link-file NOWHERE/link", "--link-file NOWHERE/link"),
        ("coordinator run.toml --link-file FOLDER", "--link-file FOLDER"),
        ("data train-tokenizer NOWHERE/out.json FILE", "NOWHERE/out.json"),
        ("data train-tokenizer CLOSED/out.json FILE", "CLOSED/out.json"),
        ("init CLOSED/my.toml", "CLOSED/my.toml"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(
    place: Path, words: str, named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    may = os.access
    (place / "CLOSED").mkdir(exist_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("CLOSED") and may(path, mode))  # also to root
    monkeypatch.chdir(place)
    monkeypatch.setenv("DILOCOX_HOME", str(place / "home"))
    code = dilocox(monkeypatch, *words.split())
    told = capfd.readouterr()
    assert code == 2, told
    assert told.out == ""
    assert told.err.splitlines()[0].startswith(f"error[usage]: {named}: cannot write a file there"), told


@pytest.mark.parametrize("name", ["a\tb", "caf\udce9", "x" * 257])
@pytest.mark.parametrize(
    "words", ["coordinator NOWHERE", "node --join nonsense", "relay --join nonsense", "market offer --upload fast"]
)
def test_a_name_that_others_would_refuse_is_refused_here(
    place: Path, words: str, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Reproduce a fault: a coordinator served under such a name, and no peer accepted its record. A name that is no UTF-8
    was a traceback."""
    monkeypatch.chdir(place)
    code = dilocox(monkeypatch, *words.split(), "--name", name)
    told = capfd.readouterr()
    assert code == 2
    assert told.out == ""
    assert "is not a valid name" in " ".join(told.err.replace("│", "").split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("generate FOLDER --prompt x --seed 4294967296", "--seed"),
        ("generate FOLDER --prompt caf\udce9", "--prompt is not text in UTF-8"),
        ("data train-tokenizer out.json run.toml --vocabulary 99999999999999999999", "--vocabulary"),
    ],
)
def test_what_libraries_could_not_take_is_refused_before_they_are_asked(
    place: Path, words: str, named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place)
    assert dilocox(monkeypatch, *words.split()) == 2
    assert named in capfd.readouterr().err


def test_a_daemon_that_only_starts_is_told_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with closing(DataDirectory(tmp_path)):
        assert dilocox(monkeypatch, "status", "--home", tmp_path) == 3
    assert "is starting" in capfd.readouterr().err
    assert dilocox(monkeypatch, "status", "--home", tmp_path) == 3
    assert "error[not-running]: no daemon runs" in capfd.readouterr().err


def test_an_address_is_no_folder_to_an_operators_verb():
    for verb in ("pause", "resume", "leave"):
        told = CliRunner().invoke(cli.app, [verb, "--home", "http://127.0.0.1:1"])
        assert told.exit_code == 2
        assert "pass the node's folder" in told.stderr


def test_nobody_of_an_id_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status, "api_call", lambda home, path: [{"peer": "12D3KooWx"}])
    told = CliRunner().invoke(cli.app, ["peers", "nobody"])
    assert told.exit_code == 2
    assert told.stderr.startswith("error[no-such-peer]: no peer's id begins with nobody")


@pytest.mark.parametrize("said", ["12D3KooWx", "12D3KooWxabcdefghi", "12D3…fghi", "12D3...fghi", "12D3…"])
def test_a_peer_is_said_as_its_id_begins_or_as_tables_have_it(said: str, monkeypatch: pytest.MonkeyPatch):
    peer = "12D3KooWxabcdefghi"
    monkeypatch.setattr(status, "api_call", lambda home, path: [{"peer": peer}, {"peer": "Qm" + peer}])
    told = CliRunner().invoke(cli.app, ["peers", said, "--json"])
    assert [row["peer"] for row in json.loads(told.stdout)] == [peer]
    assert is_meant(peer, short(peer))
    assert not is_meant(peer, "12D3…fghj")
    assert not is_meant(peer, "12D4…fghi")


def test_a_join_link_in_a_file_overwrites_nothing_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    link = JoinLink(bytes(32), COORDINATOR.peer, "127.0.0.1:1", bytes(32))
    for name in ("link", "run.link", "run.toml"):
        (tmp_path / Path(name).with_suffix(".tmp")).write_text("somebody's")
        show_link(tmp_path / name, link)
        assert (tmp_path / name).read_text() == capsys.readouterr().out == f"{link}\n"
    assert {path.name: path.read_text() for path in tmp_path.glob("*.tmp")} == dict.fromkeys(
        ("link.tmp", "run.tmp"), "somebody's"
    )
    assert len(list(tmp_path.iterdir())) == 5
