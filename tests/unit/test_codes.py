"""Exit codes, and codes of errors: each has a sentence, and what the sentences advise exists."""

import ast
import errno
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from typer.main import get_command
from typer.testing import CliRunner

from dilocox.cli import main as cli
from dilocox.cli.bootstrap import DAEMONS, FINE, INTERRUPTED
from dilocox.cli.environment import verbs
from dilocox.cli.exit_codes import Exit
from dilocox.protocol.errors import ConfigError, LocalError, PortError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.wire.attestation import Code
from dilocox.views.api_listener import ApiListener
from dilocox.views.error_codes import FAULTS, code_of
from dilocox.views.http import create_app
from dilocox.views.reasons import REASONS
from tests.helpers import COORDINATOR, HEARS_CTRL_C, no_status

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "transport", "coordinator", "node", "views", "cli")
OTHERS = {
    "--net",
    "--query-gpu",
    "--format",
    "--help",
    "--version",
    "--install-completion",
    "--show-completion",
    "--auto-compaction-retention",
    "--max-request-bytes",
}
"""Options of other programs, and of every verb."""


def trees(*rooms: str) -> Iterator[tuple[Path, ast.AST]]:
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            if path.parent.name != "pb":
                yield path, ast.parse(path.read_text())


def test_every_exit_has_a_number_of_its_own_and_a_sentence():
    assert [each.value for each in Exit] == [0, 1, 2, 3, 4, 5, 6, 130]
    assert all(each.says for each in Exit)


def test_nobody_exits_with_a_bare_number():
    for path, tree in trees("cli"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("fail", "common.fail", "typer.Exit", "sys.exit"):
                said = [*node.args, *(each.value for each in node.keywords)]
                assert not [each for each in said if isinstance(each, ast.Constant) and isinstance(each.value, int)], path


def test_every_reason_and_code_has_its_sentence():
    assert set(REASONS) == set(pb.Reason.values()) - {pb.REASON_UNSPECIFIED}
    for means, do in [*((said.means, said.do) for said in REASONS.values()), *((f.means, f.do) for f in FAULTS.values())]:
        assert means
        assert do
    told = (ROOT / "docs" / "reference" / "codes.md").read_text()
    assert [code.value for code in Code if code is not Code.OK and f"`{code.value}`" not in told] == []


def test_every_problem_of_the_api_is_in_the_map_and_none_is_there_for_nothing():
    used: set[str] = set()
    for _, tree in trees("views", "node", "coordinator"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
                used |= {str(each.value) for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant) and each.value}
            if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
                used.add(str(node.value.value))  # code of a query parameter
    assert used == {code for code, fault in FAULTS.items() if fault.status is not None}


def test_what_is_advised_exists():
    """Check that no message names a missing option or verb."""
    root = get_command(cli.app)
    options = {name for _, verb in verbs(root) for each in verb.params for name in (*each.opts, *each.secondary_opts)}
    seen = 0
    for path, tree in trees(*ROOMS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", node.value)) - OTHERS
                assert named <= options, f"{path}:{node.lineno}"
                words = set(re.findall(r"`dilocox ([a-z-]+)", node.value))
                assert words <= root.commands.keys(), f"{path}:{node.lineno}"  # type: ignore[attr-defined]
                seen += len(named)
    assert seen > 100


def of_sqlite(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite tells it")
    error.sqlite_errorcode = code
    return error


def local_error(cause: Exception) -> LocalError:
    error = LocalError("as we tell it")
    error.__cause__ = cause
    return error


def unavailable(cause: Exception) -> RemoteError:
    error = RemoteError(pb.REASON_UNAVAILABLE, "an archive cannot be used")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "exit"),
    [
        (ConfigError("no"), "usage", 2),
        (LocalError("no"), "ours", 1),
        (RemoteError(pb.REASON_LATE, "no"), "theirs", 1),
        (OSError(errno.ENOSPC, "no space"), "disk-full", 1),
        (OSError(errno.EDQUOT, "quota", "/data/x"), "quota", 1),
        (OSError(errno.EROFS, "read-only"), "read-only", 1),
        (PermissionError(errno.EACCES, "denied", "/data/x"), "no-permission", 2),
        (FileNotFoundError(errno.ENOENT, "not there", "/data/x"), "no-such-file", 1),
        (NotADirectoryError(errno.ENOTDIR, "no folder", "/data/x"), "wrong-kind", 2),
        (OSError(errno.EADDRINUSE, "taken"), "taken-port", 1),
        (OSError(errno.EMFILE, "too many"), "too-many-files", 1),
        (OSError(errno.EIO, "broken", "/data/x"), "ours", 1),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "not-text", 2),
        (MemoryError(), "no-memory", 1),
        (sqlite3.OperationalError("of another kind"), "database", 1),
        (of_sqlite(sqlite3.SQLITE_BUSY), "locked", 1),
        (of_sqlite(sqlite3.SQLITE_FULL), "disk-full", 1),
        (of_sqlite(sqlite3.SQLITE_READONLY), "read-only", 1),
        (local_error(of_sqlite(sqlite3.SQLITE_FULL)), "disk-full", 1),
        (local_error(of_sqlite(sqlite3.SQLITE_CANTOPEN)), "database", 1),
        (local_error(OSError(errno.ENOSPC, "no space")), "ours", 1),
        (local_error(PermissionError(errno.EACCES, "denied")), "no-permission", 2),
        (local_error(unavailable(PermissionError(errno.EACCES, "denied"))), "no-permission", 2),
        (local_error(unavailable(OSError(errno.EIO, "broken"))), "ours", 1),
        (PortError("127.0.0.1:80"), "taken-port", 1),
    ],
)
def test_what_a_machine_can_cause_is_a_sentence(
    error: Exception, code: str, exit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken() -> None:
        raise error

    assert code_of(error) == code
    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == exit
    said = capsys.readouterr().err
    assert said.startswith(f"error[{code}]: ")
    assert len(said.splitlines()) == (1 if code in ("usage", "ours", "theirs") else 2)


def test_our_own_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch):
    for error in (KeyError("x"), AssertionError(), OSError("of nobody's making")):

        def broken(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(cli, "app", broken)
        with pytest.raises(type(error)):
            cli.main()


async def test_what_the_api_has_not_is_a_problem_with_a_code():
    door = ApiListener("127.0.0.1:0")
    await door.show(create_app(CollectorRegistry(), no_status))
    async with aiohttp.ClientSession() as session:
        for method, path, status, code in (
            ("GET", "/v1/nothing", 404, "no-such-path"),
            ("POST", "/livez", 405, "wrong-method"),
        ):
            async with session.request(method, door.url + path) as answer:
                told = await answer.json()
                assert (answer.status, told["status"], told["code"]) == (status, status, code)
                assert told["do"] == FAULTS[code].do
                assert path in told["title"]
    await door.close()


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback(tmp_path: Path):
    """Check the seconds of loading: the interpreter prints each loaded module to stderr."""
    told: list[str] = []
    command = [*HEARS_CTRL_C, sys.executable, "-X", "importtime", "-P", "-m", "dilocox.cli", "status", "--home", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if any("dilocox.cli.bootstrap" in each for each in told[:-3]):  # it has started
                process.send_signal(signal.SIGINT)
                break
        told += process.stderr.readlines()
    assert process.returncode == Exit.INTERRUPTED == INTERRUPTED, "".join(told)
    assert not [line for line in told if "Traceback" in line or "KeyboardInterrupt" in line]
    assert not [line for line in told if line.endswith("dilocox.cli.main\n")], "it was still loading"


@pytest.mark.usefixtures("any_ports")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loaded", ["dilocox.cli.bootstrap", "dilocox.cli.main", "dilocox.cli.signals"])
@pytest.mark.parametrize(
    "said",
    ["node --join {link} --home {home}", "coordinator {home}/run.toml --home {home}/c", "relay --join {link} --home {home}"],
)
def test_a_daemon_that_is_told_to_end_before_it_lives_ends_well(tmp_path: Path, said: str, loaded: str, number: signal.Signals):
    """Reproduce a fault: the exit status was 143, which a supervisor takes for a failure. A coordinator would run for ever
    here, and node and relay soon report that no peer answers."""
    link = JoinLink(bytes(32), COORDINATOR.peer, "127.0.0.1:1", bytes(32), ())
    assert CliRunner().invoke(cli.app, ["init", str(tmp_path / "run.toml")]).exit_code == 0
    words = said.format(link=link, home=tmp_path).split()
    told: list[str] = []
    command = [*HEARS_CTRL_C, sys.executable, "-X", "importtime", "-P", "-m", "dilocox.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            if any(each.endswith(f"{loaded}\n") for each in told[:-3]):
                process.send_signal(number)
                break
        told += process.stderr.readlines()
    assert process.returncode == Exit.FINE == FINE, "".join(line for line in told if not line.startswith("import time"))
    assert not [line for line in told if "Traceback" in line]


@pytest.mark.parametrize("status", [0, 5])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_what_has_ended_does_not_change_how(number: int, status: int):
    """Reproduce a fault: coordinators that received Ctrl-C, and SIGTERM while they ended, exited with 143."""
    program = f"""
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import dilocox.cli.main
from dilocox.cli.bootstrap import main

def run():
    print("all of it", end="")
    atexit.register(os.kill, os.getpid(), {number})
    {f"sys.exit({status})" if status else ""}

dilocox.cli.main.main = run
main()
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, env=buffered)
    assert (done.returncode, done.stdout, done.stderr) == (status, "all of it", "")


@pytest.mark.parametrize("status", [0, 5])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_an_interpreter_that_goes_does_not_change_how(number: int, status: int):
    """Check the tenth of a second in which it unloads its modules without signal handlers: Ctrl-C after a finished `init`
    was a failure."""
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import dilocox.cli.main
from dilocox.cli.bootstrap import main

class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, {number})

def run():
    print("all of it")
    dilocox.cli.main.last = Last()
    {f"sys.exit({status})" if status else ""}

dilocox.cli.main.main = run
main()
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "all of it\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_daemon_whose_loop_is_gone_does_not_end_it_otherwise(number: int):
    """Check the time between the end of the loop and the command's last line."""
    program = f"""
import asyncio, os, signal
from dilocox.cli.signals import live

async def daemon():
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler({number}, stopped.set)
    os.kill(os.getpid(), {number})
    await stopped.wait()

live(daemon())
os.kill(os.getpid(), {number})
print("all of it", end="")
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all of it", "")


def test_every_daemon_lives_in_that_loop():
    calls = ((path.name, node) for path, tree in trees("cli") for node in ast.walk(tree) if isinstance(node, ast.Call))
    runs = {name for name, call in calls if ast.unparse(call.func) == "live"}
    assert runs == {f"{name}.py" for name in DAEMONS}


def test_the_installed_command_begins_there():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"dilocox": "dilocox.cli.bootstrap:main"}


def test_ctrl_c_is_no_error(monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["dilocox"])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == Exit.INTERRUPTED


WITHOUT_ENTRY = ["unshare", "-U", "--map-user=12345", "--map-group=12345", "env", "-u", "HOME"]
"""A user without HOME and without an entry in passwd, as in containers and on batch systems."""


def without_entry(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    if subprocess.run([*WITHOUT_ENTRY, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    command = [*WITHOUT_ENTRY, sys.executable, "-P", "-m", *words]
    inherited = {name: value for name, value in os.environ.items() if name != "DILOCOX_HOME"}
    return subprocess.run(command, capture_output=True, text=True, env={**inherited, **variables})


def test_a_user_without_a_home_names_one_by_dilocox_home(tmp_path: Path):
    done = without_entry("dilocox.cli", "id", DILOCOX_HOME=str(tmp_path))
    assert done.returncode == Exit.FINE, done.stderr
    assert (tmp_path / "node" / "identity.key").exists()


@pytest.mark.parametrize("words", [["id"], ["status"], ["--install-completion", "bash"]])
def test_a_user_without_a_home_is_told_what_to_set(words: list[str]):
    done = without_entry("dilocox.cli", *words)
    assert done.returncode == Exit.USAGE, done.stderr
    assert "DILOCOX_HOME" in done.stderr
    assert "Traceback" not in done.stderr
    probe = without_entry("dilocox.transport.process.health")
    assert probe.returncode == 1
    assert "DILOCOX_HOME" in probe.stderr
    assert "Traceback" not in probe.stderr


@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "12", "012"])
def test_a_closed_standard_stream_is_no_reason_to_fail(closed: str, tmp_path: Path):
    """Check closed streams, with which supervisors start daemons; a file with such a number would receive the output of
    libraries."""
    program = (
        "import os, sys; from dilocox.cli.bootstrap import fill_standard_streams; fill_standard_streams();"
        "print('to nobody', end=''); print('to nobody', file=sys.stderr, end='');"
        "os.write(1, b''); os.write(2, b''); sys.stdin.read(0);"
        "file = open(sys.argv[1], 'w'); sys.exit(file.fileno() < 3)"
    )
    closing = " ".join(f"{number}{'<' if number == '0' else '>'}&-" for number in closed)
    for words in (
        ["-m", "dilocox.cli", "--version"],
        ["-m", "dilocox.cli", "data", "--help"],
        ["-c", program, str(tmp_path / "f")],
    ):
        shell = f'exec "$@" {closing}'
        done = subprocess.run(["bash", "-c", shell, "bash", sys.executable, "-P", *words], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        assert "Traceback" not in done.stderr
