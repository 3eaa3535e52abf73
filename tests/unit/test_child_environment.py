"""Children get what they need of the daemon's environment, and no secret of it."""

import asyncio
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.protocol.errors import LocalError
from dilocox.transport.net import dht_child
from dilocox.transport.net.dht_child import socket_folder
from dilocox.transport.process.child_environment import PROXIES, child_environment
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox.transport.process.processes import end_process, start_process

RUN = bytes(32)
SECRETS = (
    "NVIDIA_API_KEY",
    "NVIDIA_NGC_TOKEN",
    "TORCH_SECRET",
    "PYTHON_KEYRING_PASSWORD",
    "XDG_CREDENTIALS",
    "GRPC_AUTH",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "DILOCOX_ARCHIVE_ARCHIVE",
    "MY_PASSWORD",
)
PRINT = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")


async def printed(**options: object) -> dict[str, str]:
    process = await start_process(sys.executable, "-c", PRINT, stdout=asyncio.subprocess.PIPE, **options)
    try:
        assert process.stdout is not None
        found: dict[str, str] = json.loads(await process.stdout.read())
        return found
    finally:
        await end_process(process)


async def test_start_process_passes_no_secret_and_what_devices_need(tmp_path: Path):
    pipe = ParentPipe(tmp_path)
    try:
        for found in (await printed(), await printed(env=pipe.environment()), await printed(env=child_environment({"A": "b"}))):
            assert not set(SECRETS) & found.keys()
            assert found["CUDA_VISIBLE_DEVICES"] == "1"
            assert found["PATH"]
    finally:
        pipe.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ROCM_PATH", "/opt/rocm"),
        ("UCX_TLS", "rc"),
        ("MIOPEN_USER_DB_PATH", "/tmp/miopen"),
        ("CC", "gcc-12"),
        ("CXX", "g++-12"),
        ("CONDA_PREFIX", "/opt/conda"),
        ("NO_PROXY", "localhost"),
        ("no_proxy", "localhost"),
        ("HTTPS_PROXY", "http://proxy.example:3128"),
        ("https_proxy", "proxy.example:3128"),
        ("TRITON_CACHE_DIR", "/tmp/triton"),
        ("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"),
        ("LIBRARY_PATH", "/usr/lib/x86_64-linux-gnu"),
    ],
)
def test_child_environment_passes_what_devices_compilers_and_proxies_need(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.setenv(name, value)
    assert child_environment()[name] == value


@pytest.mark.parametrize(
    "value", ["http://user:word@proxy.example:3128", "user:word@proxy.example", "http://token@proxy.example", "http://[a@"]
)
def test_child_environment_leaves_out_a_proxy_with_a_password(monkeypatch: pytest.MonkeyPatch, value: str):
    for name in PROXIES:
        monkeypatch.setenv(name, value)
    assert not PROXIES & child_environment().keys()


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Yield the folder for temporary files, and the only one beside it; both have short paths."""
    first, second = (Path(tempfile.mkdtemp(dir="/tmp")) for _ in range(2))
    monkeypatch.setattr("tempfile.tempdir", str(first))
    monkeypatch.setattr(dht_child, "SHORT_FOLDERS", (str(second),))
    yield first, second
    for folder in (first, second):
        shutil.rmtree(folder, ignore_errors=True)


def test_socket_folder_in_a_long_folder_is_made_where_sockets_can_be_bound(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = socket_folder(tmp_path / "home", RUN)
    assert folder.parent == roots[1]
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / f"p2pclient-{secrets.token_urlsafe(8)}.sock"))
    shutil.rmtree(roots[1])
    with pytest.raises(LocalError, match="TMPDIR"):
        socket_folder(tmp_path / "home", RUN)


def test_socket_folder_of_another_run_on_the_same_home_is_another(roots: tuple[Path, Path], tmp_path: Path):
    first = socket_folder(tmp_path / "home", RUN)
    (first / "p2pd-lives.sock").touch()
    assert socket_folder(tmp_path / "home", b"\x01" * 32) != first
    assert (first / "p2pd-lives.sock").exists()


def test_socket_folder_of_one_home_is_private_and_swept(roots: tuple[Path, Path], tmp_path: Path):
    home = tmp_path / "home"
    folder = socket_folder(home, RUN)
    assert folder.parent == roots[0]
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "p2pd-killed.sock").touch()
    (folder / "note").touch()
    assert socket_folder(home, RUN) == folder
    assert [path.name for path in folder.iterdir()] == ["note"]
    assert socket_folder(tmp_path / "another", RUN) != folder


def test_socket_folder_that_is_a_link_is_not_used(roots: tuple[Path, Path], tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "p2pd-theirs.sock").touch()
    folder = socket_folder(tmp_path / "home", RUN)
    folder.rmdir()
    folder.symlink_to(target)
    assert socket_folder(tmp_path / "home", RUN).parent == roots[1]
    assert (target / "p2pd-theirs.sock").exists()


def test_daemon_cannot_be_read_by_another_process_of_its_user():
    """Read /proc/PID/environ, which contains the secrets of an archive."""
    program = """
import ctypes, sys
from dilocox.cli.bootstrap import main
sys.argv = ["dilocox", sys.argv[1], "--help"]
try:
    main()
except SystemExit:
    print("dumpable", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""
    for verb, dumpable in (("node", 0), ("coordinator", 0), ("status", 1)):
        done = subprocess.run([sys.executable, "-P", "-c", program, verb], capture_output=True, text=True, check=True)
        assert done.stdout.endswith(f"dumpable {dumpable}\n")
