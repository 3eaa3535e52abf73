"""Children get what they need of the daemon's environment, and no secret of it."""

import asyncio
import json
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dilocox.protocol import market
from dilocox.protocol.errors import LocalError
from dilocox.transport import dht_child
from dilocox.transport.child_environment import child_environment
from dilocox.transport.dht_child import socket_folder
from dilocox.transport.parent_pipe import ParentPipe
from dilocox.transport.processes import end_process, start_process

RUN = bytes(32)
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "DILOCOX_ARCHIVE_ARCHIVE", "MY_PASSWORD")
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


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files with a short path, and no other."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(dht_child, "SHORT_FOLDERS", (str(folder),))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_socket_folder_in_a_long_folder_is_made_where_sockets_can_be_bound(
    tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = socket_folder(tmp_path / "home", RUN)
    assert folder.parent == short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / f"p2pclient-{secrets.token_urlsafe(8)}.sock"))
    shutil.rmtree(short)
    with pytest.raises(LocalError, match="TMPDIR"):
        socket_folder(tmp_path / "home", RUN)


def test_socket_folder_of_another_run_on_the_same_home_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = socket_folder(tmp_path / "home", RUN)
    (first / "p2pd-lives.sock").touch()
    assert socket_folder(tmp_path / "home", market.MARKET) != first
    assert (first / "p2pd-lives.sock").exists()


def test_socket_folder_of_one_home_is_private_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home = tmp_path / "home"
    folder = socket_folder(home, RUN)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "p2pd-killed.sock").touch()
    (folder / "note").touch()
    assert socket_folder(home, RUN) == folder
    assert [path.name for path in folder.iterdir()] == ["note"]
    assert socket_folder(tmp_path / "another", RUN) != folder


def test_socket_folder_that_is_a_link_is_not_used(tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.mkdir()
    (target / "p2pd-theirs.sock").touch()
    folder = socket_folder(tmp_path / "home", RUN)
    folder.rmdir()
    folder.symlink_to(target)
    assert socket_folder(tmp_path / "home", RUN) not in (folder, target)
    assert (target / "p2pd-theirs.sock").exists()
