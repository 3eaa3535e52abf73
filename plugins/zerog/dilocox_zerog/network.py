"""0G Storage, by 0G's own SDK in a separate process (child.py), because it installs packages named `core`, `utils` and
`config`, and prints. That process ends with this one, however it ends: no record would exist of its later payments.
This module checks its results: the root of data before they are sent, and of downloads before they are read."""

import json
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.process.parent_pipe import ParentPipe
from dilocox_zerog.merkle import file_root

__all__ = ["Network", "root_of"]

CHILD = "dilocox_zerog.child"
SAID = 4096
"""Characters at the end of what the SDK printed, in an error."""


def root_of(path: Path) -> bytes:
    """Return the root of a file. Blocking: reads about 30 MB a second."""
    with path.open("rb") as file:
        return file_root(file, path.stat().st_size)


@dataclass(frozen=True)
class Network:
    indexer: str
    """URL that lists the storage nodes."""

    def put(self, path: Path, root: bytes, rpc: str, key: Path) -> str:
        """Store a file, paid for by the account of a key; return the transaction, empty if it was stored before. `root`:
        of the file; `rpc`: a node of the chain. Blocking. Raises RemoteError."""
        said = self._ask({"do": "put", "path": str(path), "rpc": rpc, "key": str(key), "root": f"0x{root.hex()}"})
        return str(said["transaction"])

    def get(self, root: bytes, path: Path) -> None:
        """Download into a new file. Blocking. Raises RemoteError, also for other content."""
        self._ask({"do": "get", "path": str(path), "root": f"0x{root.hex()}"})
        if path.stat().st_size == 0 or root_of(path) != root:
            path.unlink()
            raise RemoteError(pb.REASON_DIGEST_MISMATCH, f"the bytes received for {root.hex()} have another root")

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="dilocox-zerog-") as folder, closing(ParentPipe(Path(folder))) as pipe:
            done = subprocess.run(
                [sys.executable, "-P", "-m", CHILD],
                input=json.dumps({**task, "indexer": self.indexer}),
                env=pipe.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        try:
            said = json.loads(done.stdout)
        except ValueError:
            last = done.stderr[-SAID:].strip().splitlines()[-1:]
            said = {"error": last[0] if last else f"its process ended with {done.returncode}"}
        if "error" in said:
            raise RemoteError(pb.REASON_UNAVAILABLE, f"0G Storage: {said['error']}")
        return dict(said)
