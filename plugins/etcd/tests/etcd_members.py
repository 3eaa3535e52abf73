"""Members of a real etcd on free loopback ports, each a process with a separate folder. Skips if the binary is absent."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

__all__ = ["EtcdMembers", "etcd_members"]

BINARY = shutil.which("etcd")
PATIENCE_SECONDS = 120.0


def _free_ports(count: int) -> list[int]:
    with ExitStack() as closing:
        probes = [closing.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class EtcdMembers:
    def __init__(self, folder: Path, count: int, options: Sequence[str] = (), scheme: str = "http") -> None:
        assert BINARY is not None, "the fixture skips"
        self.folder, self.count, self.options, self.scheme = folder, count, options, scheme
        ports = _free_ports(2 * count)
        self.clients, self.peers = ports[:count], ports[count:]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * count

    @property
    def at(self) -> str:
        """Return the members as `--store` names them."""
        return ",".join(f"127.0.0.1:{port}" for port in self.clients)

    def start(self, number: int) -> None:
        cluster = ",".join(f"m{each}=http://127.0.0.1:{port}" for each, port in enumerate(self.peers))
        client, peer = f"{self.scheme}://127.0.0.1:{self.clients[number]}", f"http://127.0.0.1:{self.peers[number]}"
        command = [str(BINARY), "--name", f"m{number}", "--data-dir", str(self.folder / f"m{number}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster]
        command += ["--initial-cluster-token", str(self.folder), *self.options]
        with (self.folder / f"m{number}.log").open("ab") as log:
            environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Wait until a member reports a healthy cluster."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for port in self.clients:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                    if b'"true"' in answer.read():
                        return
            time.sleep(0.1)
        pytest.fail(f"etcd does not become healthy: {(self.folder / 'm0.log').read_text()[-2000:]}")

    def signal(self, number: int, what: signal.Signals) -> None:
        process = self.processes[number]
        assert process is not None
        process.send_signal(what)
        if what == signal.SIGKILL:
            process.wait()

    def empty(self, prefix: str) -> None:
        """Delete all keys under the prefix, as in a new store."""
        ends = {"key": f"{prefix}/", "range_end": f"{prefix}0"}
        raw = json.dumps({name: b64encode(key.encode()).decode() for name, key in ends.items()}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.clients[-1]}/v3/kv/deleterange", raw, timeout=30) as answer:
            assert int(json.load(answer)["deleted"])

    def stop(self) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait()


@contextmanager
def etcd_members(folder: Path, count: int, options: Sequence[str] = (), scheme: str = "http") -> Iterator[EtcdMembers]:
    if BINARY is None:
        pytest.skip("no etcd on this machine (Debian: etcd-server)")
    folder.mkdir(exist_ok=True)
    members = EtcdMembers(folder, count, options, scheme)
    try:
        for number in range(count):
            members.start(number)
        if scheme == "http":
            members.wait()
        yield members
    finally:
        members.stop()
