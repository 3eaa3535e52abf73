"""Peers of a bench, each in a separate process: they read commands from stdin, line by line, and answer on stdout."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from dilocox.testnet.namespaces import Namespaces
from dilocox.testnet.swarm import WAN

__all__ = ["Peer", "started"]

LOOPBACK = "127.0.0.1"
ROOT = Path(__file__).parents[1]


class Peer:
    def __init__(self, process: "subprocess.Popen[str]", log: IO[str]) -> None:
        self._process, self._log = process, log

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def said(self) -> dict[str, Any]:
        """Return the next line; exits if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"a peer ended:\n{self._log.read()[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        """End the process and all processes that it started: it has a separate session."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            os.killpg(self._process.pid, 9)
        except ProcessLookupError:
            pass
        self._process.wait()


def started(
    closing: ExitStack, module: str, peers: int, network: Namespaces | None, folder: Path, kind: str, *arguments: str
) -> list[Peer]:
    """Start peers: `module` runs as KIND RANK PEERS ADDRESS FOLDER ARGUMENTS, with one thread, in the rank's namespace,
    until `closing` closes."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": WAN if network else "lo"}
    found = []
    for rank in map(str, range(peers)):
        address, prefix = (network.address(rank, WAN), network.prefix(rank)) if network else (LOOPBACK, ())
        log = closing.enter_context((folder / f"{rank}.log").open("w+"))
        process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", module, kind, rank, str(peers), address, str(folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        found.append(Peer(process, log))
        closing.callback(found[-1].end)
    return found
