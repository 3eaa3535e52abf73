"""`dilocox export PLACE --every N`: models of a running run, published one after the other."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from dilocox.cli.common import console, errors, fail, find_chain_files, print_json
from dilocox.cli.exit_codes import Exit
from dilocox.cli.model.export import agreed_states, fetch_model, held_stages, write_held
from dilocox.cli.progress import working
from dilocox.cli.sources import fetching, following
from dilocox.node.run_reader import RunReader
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.archive.publishing import Snapshots, due
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.corpus_store import Folders

__all__ = ["publish"]

LOOK_SECONDS = 2.0
"""Interval at which the run is read."""
RETRY_SECONDS = 30.0
"""Before peers who did not serve a state are asked again."""


class Followed(Protocol):
    """Source of a running run."""

    path: Path
    """Path of its chain; fetched files are beside it."""
    manifest: Manifest
    nothing: str
    """Advice for a run that ended without a state."""

    def newest_state(self) -> tuple[int, bool]:
        """The newest state that is to be had, and whether the run has ended."""

    async def have(self, round: int) -> None:
        """Have it beside the chain. Raises LocalError."""

    def done(self, round: int) -> None:
        """It was published."""


class Held:
    """Source: a node's folder."""

    nothing = "pass --home with the folder of a node that has all stages, or --join LINK"

    def __init__(self, path: Path) -> None:
        self.path, self._store = path, BlobStore(path.parent / "blobs")
        self._files: list[tuple[int, int]] = []
        """Files of the chain at the last read: if they are unchanged, the chain is not read again."""
        self._states: dict[int, bytes] = {}
        """Roots of states in it, by round."""
        self._last: Statement[pb.Commit] | None = None
        """That was read."""
        self._finished = False
        with ChainFile.for_reading(path) as chain:
            self.manifest = chain.manifest

    def newest_state(self) -> tuple[int, bool]:
        if (files := list(_files(self.path))) != self._files:
            with ChainFile.for_reading(self.path) as chain:
                self._read(chain)
            self._files = files  # as they were before: what came while it was read is found by the next look
        stages = self.manifest.model.stages
        held = (round for round in sorted(self._states, reverse=True) if held_stages(self._states[round], stages, self._store))
        return next(held, 0), self._finished

    def _read(self, chain: ChainFile) -> None:
        """Read new commits; or all of them, if the run's owner has chosen another chain since."""
        known, here = self._last, chain.commit(self._last.body.round) if self._last is not None else None
        if known is None or here is None or here.digest != known.digest:
            self._states, known = {}, None
        self._states |= agreed_states(chain, known.body.round + 1 if known is not None else 0)
        self._last, self._finished = chain.commit(chain.length - 1), chain.head.finished

    async def have(self, round: int) -> None:
        """The node sees to that."""

    def done(self, round: int) -> None:
        """Do nothing: the node stores what it needs."""


def _files(chain: Path) -> Iterator[tuple[int, int]]:
    """When a chain's file and its log were written, in nanoseconds, and how many bytes they have."""
    for path in (chain, chain.with_name(f"{chain.name}-wal")):
        with suppress(FileNotFoundError):
            found = path.stat()
            yield found.st_mtime_ns, found.st_size


class Read:
    """Source: peers of the run."""

    nothing = "no peer serves one: pass --archive of the run"

    def __init__(self, reader: RunReader, folders: Folders, adapter: bool) -> None:
        self.path, self.manifest = reader.chain.path, reader.manifest
        self._reader, self._folders, self._adapter = reader, folders, adapter

    def newest_state(self) -> tuple[int, bool]:
        return max(self._reader.starts.agreed(), default=0), self._reader.chain.head.finished

    async def have(self, round: int) -> None:
        async with fetching(self._reader):
            await fetch_model(self._reader, round, self._folders, self._adapter)

    def done(self, round: int) -> None:
        root = self._reader.chain.state_before(round)
        self._reader.store.sweep(set(self._reader.store.stage_digests(root)) if root else set())


def publish(url: str, every: int, home: Path | None, join: str | None, folders: Folders, adapter: bool, as_json: bool) -> None:
    """Publish models until the run ends; always publish its last state. `join`: read from peers, not from a node's folder.
    Exits, or raises ConfigError or LocalError, if something is missing."""

    @asynccontextmanager
    async def followed() -> AsyncIterator[Followed]:
        if join is None:
            yield Held(find_chain_files(home)[-1])
            return
        async with following(join, home) as reader:
            yield Read(reader, folders, adapter)

    async def follow() -> None:
        async with followed() as run:
            await _publish(run, url, every, folders, adapter, as_json, patient=join is not None)

    asyncio.run(follow())


async def _publish(run: Followed, url: str, every: int, folders: Folders, adapter: bool, as_json: bool, patient: bool) -> None:
    """`patient`: who does not serve a state now may serve it later."""
    place = await asyncio.to_thread(Snapshots, url, run.manifest.run_id)
    published = await asyncio.to_thread(place.published)
    while True:
        newest, finished = run.newest_state()
        if due(published, newest, every, finished):
            try:
                await run.have(newest)
                await asyncio.to_thread(place.publish, newest, partial(_write, run.path, newest, folders, adapter))
            except (FileNotFoundError, ConfigError, LocalError) as error:
                if run.newest_state()[0] != newest:
                    continue  # the run has advanced, and newer states exist
                if not patient or isinstance(error, ConfigError):
                    raise
                errors.print(f"cannot fetch the state before round {newest} yet: {error}", highlight=False)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            run.done(newest)
            published.add(newest)
            _print_published(place.url, newest, as_json)
        elif finished and not newest:
            fail(f"{run.path.parent} contains no complete state of the run", Exit.USAGE, run.nothing)
        elif finished:
            return
        else:
            await asyncio.sleep(LOOK_SECONDS)


def _write(path: Path, round: int, folders: Folders, adapter: bool, folder: Path) -> None:
    with working(f"writing the state before round {round}") as bar:
        write_held(folder, path, round, folders, bar, adapter=adapter)


def _print_published(url: str, round: int, as_json: bool) -> None:
    if as_json:
        print_json({"place": url, "round": round})
    else:
        console.print(f"published the state before round {round} in {url}", highlight=False)
