"""`dilocox export PLACE --every N`: models of a run that goes on, published one after the other."""

import time
from functools import partial
from pathlib import Path

from dilocox.cli.common import console, fail, find_chain_files, print_json
from dilocox.cli.exits import Exit
from dilocox.cli.export import held_states, write_model
from dilocox.cli.progress import working
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.transport.blobs import BlobStore
from dilocox.transport.chain_file import ChainFile
from dilocox.transport.corpora import Folders
from dilocox.transport.snapshots import Snapshots, due

__all__ = ["publish"]

LOOK_SECONDS = 2.0
"""Between two looks at the node's folder."""


def publish(url: str, every: int, home: Path | None, folders: Folders, adapter: bool, as_json: bool) -> None:
    """Until the run has ended, whose last state is published in any case. Exits, or raises ConfigError or LocalError, where
    something for it is missing."""
    path = find_chain_files(home)[-1]
    store = BlobStore(path.parent / "blobs")

    def look() -> tuple[int, bool]:
        """The newest state that is here, and whether the run has ended."""
        with ChainFile.for_reading(path) as chain:
            return max(held_states(chain, store), default=0), chain.head.finished

    with ChainFile.for_reading(path) as chain:
        place = Snapshots(url, chain.manifest.run_id)
    published = place.published()
    while True:
        newest, finished = look()
        if due(published, newest, every, finished):
            try:
                place.publish(newest, partial(_write, home, newest, folders, adapter))
            except (FileNotFoundError, ConfigError, LocalError):
                if look()[0] == newest:
                    raise
                continue  # the node has gone on, and keeps newer ones
            published.add(newest)
            _tell(place.url, newest, as_json)
        elif finished and not newest:
            fail(
                f"{path.parent} holds no whole state of the run", Exit.USAGE, "name the --home of a node that holds all stages"
            )
        elif finished:
            return
        else:
            time.sleep(LOOK_SECONDS)


def _write(home: Path | None, round: int, folders: Folders, adapter: bool, folder: Path) -> None:
    with working(f"writing the state before round {round}") as bar:
        write_model(folder, home, None, None, round, folders, bar, adapter=adapter)


def _tell(url: str, round: int, as_json: bool) -> None:
    if as_json:
        print_json({"place": url, "round": round})
    else:
        console.print(f"published the state before round {round} in {url}", highlight=False)
