"""Publishing of models of a running run: folders by round, each of which appears complete or not at all. All calls block.

PLACE/run.json            the run; a place of another run is rejected
PLACE/round-000020/…      the state before round 20; in a bucket its LAST object is written last, and read first
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from dilocox.protocol.errors import ConfigError, LocalError, RemoteError
from dilocox.transport.archive.storage import BucketStorage, FolderStorage, open_storage
from dilocox.transport.store.files import whole_folder

__all__ = ["Snapshots", "due"]

MARKER = "run.json"
MARKER_BYTES = 1 << 10
LAST = ("config.json", "adapter_config.json")
"""Without it no tool takes a folder for a model."""
NAMED = re.compile(r"round-(\d{6,})/([^/]+)")


def due(published: set[int], newest: int, every: int, finished: bool) -> bool:
    """Whether the state before round `newest` is to be published: `every` rounds after the last, and what the run ended with."""
    last = max(published, default=0)
    return newest > last and (finished or newest - last >= every)


class Snapshots:
    """Published models of one run, in a folder or a bucket. One process writes."""

    def __init__(self, url: str, run_id: bytes) -> None:
        """Open the place. Raises ConfigError if it is another run's, LocalError if it is unusable."""
        self._storage = open_storage(url, "DIR")
        self.url = self._storage.url
        marker = json.dumps({"run_id": run_id.hex()}).encode()
        try:
            if not self._storage.put_new(MARKER, marker) and self._storage.get(MARKER, MARKER_BYTES) != marker:
                raise ConfigError(f"{self.url} contains models of another run: use another folder or prefix")
        except RemoteError as error:
            raise LocalError(error.detail) from error

    def published(self) -> set[int]:
        """Rounds. Raises LocalError."""
        try:
            names = map(NAMED.fullmatch, self._storage.sizes(""))
        except RemoteError as error:
            raise LocalError(error.detail) from error
        return {int(found[1]) for found in names if found is not None and found[2] in LAST}

    def publish(self, round: int, write: Callable[[Path], None]) -> None:
        """Publish a round. `write`: fills a new folder. A part that an earlier incarnation wrote is written again.
        Raises LocalError."""
        name = f"round-{round:06d}"
        if isinstance(self._storage, FolderStorage):
            with whole_folder(self._storage.folder / name) as scratch:
                write(scratch)
        elif isinstance(self._storage, BucketStorage):
            with tempfile.TemporaryDirectory(prefix="dilocox-export-") as scratch:
                write(Path(scratch))
                self._upload(self._storage, name, Path(scratch))

    @staticmethod
    def _upload(bucket: BucketStorage, name: str, folder: Path) -> None:
        try:
            for path in sorted(folder.iterdir(), key=lambda path: (path.name in LAST, path.name)):
                bucket.upload(f"{name}/{path.name}", path)
        except RemoteError as error:
            raise LocalError(error.detail) from error
