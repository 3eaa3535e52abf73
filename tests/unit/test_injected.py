"""Faults of a machine, injected into every verb at the first file that it touches: a sentence and an exit code, no traceback."""

import builtins
import errno
import io
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dilocox.cli import main as cli
from dilocox.cli.environment import verbs
from dilocox.protocol import events
from dilocox.protocol.ids import JoinLink
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.event_log import EVENTS, EventLog
from dilocox.views import json_views as views
from tests.helpers import COORDINATOR, Table, dilocox, identity, manifest

pytestmark = pytest.mark.usefixtures("any_ports")
MARKET = f"/ip4/127.0.0.1/tcp/1/p2p/{identity(0).peer}"
LINK = JoinLink(bytes(32), COORDINATOR.peer, "127.0.0.1:1", bytes(32), ())
SAID = (
    "init new.toml",
    "check run.toml",
    "coordinator run.toml --home c --no-dht",
    f"node --join {LINK} --home n --no-dht",
    f"relay --join {LINK} --home n --no-dht",
    f"archive --join {LINK} --home n --archive store --no-dht",
    f"owner appoint {identity(0).peer} run.toml --home home/node",
    "pause --home home/node",
    "resume --home home/node",
    "leave --home home/node",
    "id --home n",
    "status --home home/node",
    "peers --home home/node",
    "peers --stages --home home/node",
    "rounds --home home/node",
    "events --home home/node",
    "rounds 2 --why --home home/node",
    "status --watch --home home/node",
    "plan run.toml",
    "verify --home home/node",
    f"shares --join {LINK} --home n",
    "export out --home home/node",
    "generate --prompt x --home home/node",
    f"market offer --home n --market {MARKET}",
    f"market hire run.toml {identity(1).peer}",
    "zerog disperse --record r --da grpc://127.0.0.1:1 --home home/node",
    "data build x text.txt --to built",
    "data train-tokenizer tokenizer.json text.txt",
    "data show stdlib",
    "data free --home home/node",
    "config show node --config node.toml",
    "testnet up --folder t --run run.toml --detach",
    "testnet status --folder testnet",
    "testnet kill node-1 --folder testnet",
    "testnet start node-1 --folder testnet",
    "testnet down --folder testnet",
    f"attest peer {identity(0).peer} --home home/node",
    "attest peer self --simulated --simulated-measurement text.txt",
    "attest verify --kind tdx --blob text.txt",
)
EXTRA = {"zerog store", "zerog restore", "zerog retrieve", "market runs", "market announce"}
EXTRA |= {f"settlement {each}" for each in ("account", "claim", "settle", "stake")}
EXTRA |= {f"settlement contract {each}" for each in ("deploy", "bind", "fund", "veto", "slash", "refund")}
"""Verbs that without an extra read nothing, and report this; and verbs that read nothing of this machine before they find
something."""


def full(kind: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = kind
    return error


FAULTS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "disk full": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file"), True),
    "read-only": (lambda: OSError(errno.EROFS, os.strerror(errno.EROFS), "a file"), True),
    "no permission": (lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a file"), False),
    "too many files": (lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a file"), False),
    "broken disk": (lambda: OSError(errno.EIO, os.strerror(errno.EIO), "a file"), False),
    "no memory": (MemoryError, False),
    "Ctrl-C": (KeyboardInterrupt, False),
}
"""Exception of each fault, and whether only writes raise it."""
ALWAYS = ("disk full", "no permission", "Ctrl-C")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home with a chain and events, a run file with its key and data, and a stopped testnet."""
    folder = tmp_path_factory.mktemp("injected")
    made = CliRunner().invoke(cli.app, ["init", str(folder / "run.toml")], env={"DILOCOX_HOME": str(folder / "home")})
    assert made.exit_code == 0, made.output
    table = Table(manifest()).genesis().train(3)
    run = folder / "home/node/runs/x"
    run.mkdir(parents=True)
    chain, log = ChainFile(run / "chain.db", table.run, views.describe), EventLog(run / EVENTS)
    for commit in table.commits:
        chain.append(commit.envelope)
    log.add(events.RunFinished(3))
    log.close()
    chain.close()
    (folder / "text.txt").write_text("words " * 1000)
    (folder / "node.toml").write_text('hours = "22-06"\n')
    (folder / "testnet").mkdir()
    member = '{"name": "node-1", "home": "n1", "arguments": [], "prefix": [], "needs": ""}'
    (folder / "testnet/testnet.json").write_text(f'{{"network": null, "members": [{member}]}}')
    return folder


class Broken:
    """Fault in every file below a folder, while it is entered."""

    def __init__(self, folder: Path, fault: Callable[[], BaseException], writing: bool, patch: pytest.MonkeyPatch) -> None:
        """Store the fault. `writing`: it occurs only at writes."""
        self._folder, self._fault, self._writing, self._patch, self.met = str(folder), fault, writing, patch, 0

    def _hit(self, path: Any, writes: bool) -> None:
        if isinstance(path, str | os.PathLike) and (writes or not self._writing):
            where = os.path.abspath(os.fspath(path))
            if isinstance(where, str) and where.startswith(self._folder):
                self.met += 1
                raise self._fault()

    def put_in(self) -> None:
        def opening(real: Any) -> Any:
            def fake(file: Any, mode: str = "r", *more: Any, **others: Any) -> Any:
                self._hit(file, any(letter in mode for letter in "wax+"))
                return real(file, mode, *more, **others)

            return fake

        def low(real: Any) -> Any:
            def fake(path: Any, flags: int, *more: Any, **others: Any) -> Any:
                self._hit(path, bool(flags & WRITES))
                return real(path, flags, *more, **others)

            return fake

        def making(real: Any) -> Any:
            def fake(path: Any, *more: Any, **others: Any) -> Any:
                self._hit(path, True)
                return real(path, *more, **others)

            return fake

        def connecting(real: Any) -> Any:
            def fake(path: Any, *more: Any, **others: Any) -> Any:
                if isinstance(self._fault(), OSError):
                    try:
                        self._hit(path, True)
                    except OSError as error:
                        raise full(sqlite3.SQLITE_CANTOPEN) from error
                self._hit(path, True)
                return real(path, *more, **others)

            return fake

        for module, name, wrap in (
            (builtins, "open", opening),
            (io, "open", opening),
            (os, "open", low),
            (os, "mkdir", making),
            (os, "mkfifo", making),
            (sqlite3, "connect", connecting),
        ):
            self._patch.setattr(module, name, wrap(getattr(module, name)))


def test_every_verb_is_said():
    assert {name for name, _ in verbs(get_command(cli.app))} - EXTRA == {
        max((name for name, _ in verbs(get_command(cli.app)) if words.startswith(f"{name} ")), key=len) for words in SAID
    }


@pytest.mark.parametrize("fault", [pytest.param(each, marks=[pytest.mark.thorough] * (each not in ALWAYS)) for each in FAULTS])
@pytest.mark.parametrize("words", SAID, ids=lambda words: " ".join(words.split()[:2]))
def test_a_fault_in_a_verb_is_a_sentence(
    place: Path, words: str, fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(place)
    monkeypatch.setenv("DILOCOX_HOME", str(place / "home"))
    monkeypatch.setattr(sys, "argv", ["dilocox", *words.split()])
    raised, writing = FAULTS[fault]
    with monkeypatch.context() as patch:
        broken = Broken(place, raised, writing, patch)
        broken.put_in()
        try:
            cli.main()
            code: object = 0
        except SystemExit as leaving:
            code = leaving.code
    told = capfd.readouterr()
    assert broken.met or writing, "every verb reads something here"
    assert "Traceback" not in told.err + told.out
    assert code in (None, 0, 1, 2, 3, 5, 130), told
    if broken.met and code in (1, 2):
        assert "rror" in told.err, told
    if fault == "Ctrl-C":
        assert code == 130


class Stranger(BaseHTTPRequestHandler):
    """Another program's server: a page, or no HTTP at all."""

    def do_GET(self) -> None:
        if self.path == "/v1/peers":
            self.wfile.write(b"\x00\x00\x12\x04 no HTTP\r\n\r\n")
            return
        self.send_response(404 if self.path == "/v1/stages" or "follow=yes" in self.path else 200)
        self.end_headers()
        self.wfile.write(b"<html>somebody else</html>")

    def log_message(self, *words: object) -> None:
        pass


@pytest.mark.parametrize("verb", ["status", "peers", "peers --stages", "events", "events -f"])
def test_whatever_answers_where_an_api_was_named_is_a_sentence(
    verb: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Check, for example, a daemon's gRPC port."""
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        code = dilocox(monkeypatch, *verb.split(), "--home", url)
        server.shutdown()
        thread.join()
    assert code == 3
    said = capfd.readouterr().err.replace("\n", "")
    path = "stages" if "--stages" in verb else verb.split()[0]
    assert said.startswith(f"error[not-running]: the server at {url}/v1/{path}")
    assert "is not a dilocox daemon" in said
