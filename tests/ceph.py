"""Real S3 server: one monitor, one object store in memory, one gateway, of Debian's Ceph. Skips if they are absent."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

__all__ = ["ceph_bucket"]

BINARIES = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
PATIENCE_SECONDS = 120.0
TRIES = 40
BUCKET = "archives"
CONFIG = """[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor}/0]
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
osd objectstore = memstore
memstore device bytes = 1073741824
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
log file = {folder}/$name.log
run dir = {folder}
admin socket =
pid file =
public addr = 127.0.0.1
cluster addr = 127.0.0.1
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""


class Ceph:
    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        with ExitStack() as closing:
            probes = [closing.enter_context(socket.socket()) for _ in range(2)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            self.monitor, self.gateway = (probe.getsockname()[1] for probe in probes)
        self.url = f"http://127.0.0.1:{self.gateway}"
        self.fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (folder / name).mkdir()
        facts = {"fsid": self.fsid, "monitor": self.monitor, "gateway": self.gateway, "folder": folder}
        (folder / "ceph.conf").write_text(CONFIG.format(**facts))

    def run(self, program: str, *arguments: str, fails: bool = False) -> str:
        """Run a program; return its output. `fails`: it may end with an error."""
        command = [program, "-c", str(self.folder / "ceph.conf"), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_SECONDS)
        assert fails or done.returncode == 0, (command, done.stdout)
        return done.stdout

    def start(self, program: str, *arguments: str) -> None:
        command = [program, "-f", "-c", str(self.folder / "ceph.conf"), *arguments]
        with (self.folder / f"{program}.out").open("ab") as out:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=out))

    def up(self) -> None:
        """Start the server with a bucket for the owner of these keys."""
        keyring, places = str(self.folder / "keyring"), str(self.folder / "monmap")
        self.run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self.run(
            "ceph-authtool", keyring, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *"
        )
        place = f"[v1:127.0.0.1:{self.monitor}/0]"
        self.run("monmaptool", "--create", "--fsid", self.fsid, "--addv", "a", place, places)
        self.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", places, "--keyring", keyring)
        self.start("ceph-mon", "-i", "a")
        self._until(lambda: "quorum" in self.run("ceph", "-s", fails=True), "the monitor does not answer")
        self.run("ceph", "osd", "create")
        self.run("ceph-osd", "-i", "0", "--mkfs")
        self._until(self._start_object_store, "the object store does not come up")
        keys = ["--access-key", "tests", "--secret-key", "tests"]
        self.run("radosgw-admin", "-n", "client.admin", "user", "create", "--uid", "tests", "--display-name", "tests", *keys)
        self.start("radosgw", "-n", "client.admin")
        self._make_bucket()

    def _start_object_store(self) -> bool:
        """Start it; return whether it is up: one that started before the monitor was ready sometimes waits for ever."""
        self.start("ceph-osd", "-i", "0")
        for _ in range(TRIES):
            if "1 up" in self.run("ceph", "osd", "stat", fails=True):
                return True
        started = self.processes.pop()
        started.kill()
        started.wait()
        return False

    def _make_bucket(self) -> None:
        store = S3Store(BUCKET, client_options={"allow_http": True}, **self.settings)  # type: ignore[arg-type]
        request = urllib.request.Request(obstore.sign(store, "PUT", "", timedelta(hours=1)), method="PUT")

        def made() -> bool:
            with suppress(urllib.error.URLError), urllib.request.urlopen(request, timeout=PATIENCE_SECONDS):
                return True
            return False

        self._until(made, "the gateway does not answer")

    def _until(self, holds: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if holds():
                return
            time.sleep(0.2)
        pytest.fail(f"{otherwise}: {[path.read_text(errors='replace')[-1000:] for path in self.folder.glob('*.log')]}")

    @property
    def settings(self) -> dict[str, str]:
        return {"endpoint": self.url, "region": "us-east-1", "access_key_id": "tests", "secret_access_key": "tests"}

    @property
    def environment(self) -> dict[str, str]:
        names = {"endpoint": "ENDPOINT_URL"}
        return {f"AWS_{names.get(name, name.upper())}": text for name, text in self.settings.items()}

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@contextmanager
def ceph_bucket(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the bucket's URL, and the environment for its clients."""
    missing = [name for name in BINARIES if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no S3 server of Ceph, {', '.join(missing)}: apt-get install ceph-mon ceph-osd ceph-common radosgw")
    ceph = Ceph(folder)
    try:
        ceph.up()
        yield f"s3://{BUCKET}", ceph.environment
    finally:
        ceph.stop()
