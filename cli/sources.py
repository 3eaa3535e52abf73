"""Sources of export and verify: a daemon's folder, peers (`--join`), or the archive (`--archive`)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

from dilocox.cli.common import find_chain_files, read_link, set_up_logging
from dilocox.cli.progress import Working, working
from dilocox.node.run_reader import RunReader, open_archived, open_reader
from dilocox.protocol.ids import JoinLink
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.process.health import base_folder
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.data_directory import DataDirectory, load_identity

__all__ = ["fetching", "following", "reading"]

READER = "reader"
"""Folder name of the reader, in a daemon's folder or beside those of this machine's daemons."""
LOOK_SECONDS = 0.2
ASKING = "asking the run's peers"

Fetch = Callable[[RunReader], Awaitable[int]]


@contextmanager
def reading(join: str | None, home: Path | None, place: ArchivePlace | None, fetch: Fetch) -> Iterator[tuple[list[Path], int]]:
    """Yield the chain files to read, and the result of `fetch`; without `join` and `place` those of a daemon's folder, and
    0. Fetched files are removed after a success; after a failure the next call continues with them.

    `home`: with `join`, the identity for a run that is not public. `place`: beside `join` for what no peer serves,
    alone for everything.
    """
    if join is None and place is None:
        yield find_chain_files(home), 0
        return
    set_up_logging(verbose=False)  # for whom it waits
    link = read_link(join) if join is not None else None
    with closing(_folder(home)) as folder:
        chain, answer = asyncio.run(_read(link, folder, place, fetch))
        yield [chain], answer
        store = BlobStore(chain.parent / "blobs")
        store.sweep(store.digests())


def _folder(home: Path | None) -> DataDirectory:
    key = home / "identity.key" if home is not None else None
    return DataDirectory((home or base_folder()) / READER, load_identity(key) if key is not None and key.exists() else None)


@asynccontextmanager
async def following(join: str, home: Path | None) -> AsyncIterator[RunReader]:
    """Yield a reader of a running run; `home` as for `reading`."""
    set_up_logging(verbose=False)
    with closing(_folder(home)) as folder:
        async with AsyncExitStack() as opened:
            with working("beginning") as bar:
                reader = await opened.enter_async_context(open_reader(read_link(join), folder, bar.say))
            yield reader


@asynccontextmanager
async def fetching(reader: RunReader) -> AsyncIterator[None]:
    """Show the progress of downloads from the run's peers."""
    with working(ASKING, bytes=True) as bar:
        async with _shown(reader, bar, ASKING):
            yield


@asynccontextmanager
async def _shown(reader: RunReader, bar: Working, asking: str) -> AsyncIterator[None]:
    """Show the bytes received so far, and the total if it is known."""
    before, _ = reader.progress()

    async def look() -> None:
        while True:
            held, total = (each - before for each in reader.progress())
            bar.say(asking)
            bar.at(held, total or None)
            await asyncio.sleep(LOOK_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


async def _read(link: JoinLink | None, folder: DataDirectory, place: ArchivePlace | None, fetch: Fetch) -> tuple[Path, int]:
    with working("beginning", bytes=True) as bar:
        if link is not None:
            opened = open_reader(link, folder, bar.say, place)
        else:
            assert place is not None, "one of them is named"
            opened = open_archived(place, folder, bar.say)
        async with opened as reader, _shown(reader, bar, "reading the archive" if link is None else ASKING):
            return reader.chain.path, await fetch(reader)
