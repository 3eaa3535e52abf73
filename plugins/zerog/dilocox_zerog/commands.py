"""`dilocox zerog store | restore | disperse | retrieve`: a run's archive on 0G Storage, and its chain on 0G's data availability."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dilocox.cli.common import ArchiveKeyOption, HomeOption, ReadOption, check_place, console
from dilocox.cli.progress import Working, working
from dilocox.cli.sources import reading
from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.ids import several
from dilocox.protocol.run.manifest import open_manifest
from dilocox.transport.archive.archive import open_archive
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from dilocox.transport.store.files import whole_folder
from dilocox.views import json_views
from dilocox_settlement.commands import KeyOption, RpcOption, SendOption

if TYPE_CHECKING:
    from dilocox.transport.archive.storage import Storage
    from dilocox_zerog.dispersed import Dispersed
    from dilocox_zerog.disperser import Disperser
    from dilocox_zerog.network import Network
    from dilocox_zerog.volume import Stored

__all__ = ["app"]

app = typer.Typer(help="A run's archive on 0G Storage, its chain on 0G's data availability.", no_args_is_help=True)

FINAL_SECONDS = 3600
"""After which a blob that is not final yet is given up: it may still become so, and is dispersed again then."""
LOOK_SECONDS = 5.0
HEX = 64

IndexerOption = Annotated[str, typer.Option("--indexer", metavar="URL", help="URL of an indexer of 0G Storage.")]
DaOption = Annotated[str, typer.Option("--da", metavar="URL", help="A disperser: grpcs://HOST:PORT.")]
RecordOption = Annotated[
    Path, typer.Option("--record", metavar="FILE", help="File that records what was stored; created if missing.")
]


def _need_sdk() -> None:
    """Check the SDK. Raises ConfigError if 0G's SDK is not installed."""
    if any(find_spec(name) is None for name in ("Crypto", "web3", "core")):
        raise ConfigError("0G's SDK is not installed: run pip install ./plugins/zerog")


@app.command()
def store(
    archive: Annotated[str, typer.Argument(metavar="ARCHIVE", help="A folder, or s3://BUCKET/PREFIX.")],
    record: RecordOption,
    indexer: IndexerOption,
    rpc: RpcOption,
    key: KeyOption,
    archive_key: ArchiveKeyOption = None,
    send: SendOption = False,
) -> None:
    """Store the objects of an archive that are not stored yet; `restore` needs only the root that it prints. The account of
    --key pays. An encrypted archive stays encrypted."""
    _need_sdk()
    from dilocox_zerog.network import Network
    from dilocox_zerog.record import write_record
    from dilocox_zerog.volume import due

    check_place(record, "--record ")  # before anything is paid for
    opened = open_archive(archive, archive_key)
    stored = _stored(record, opened.run_id)
    sizes = opened.storage.sizes("")
    volumes = due(sizes, stored)
    if not volumes:
        console.print(f"nothing new in {opened.url}; its last volume is {stored.root}", highlight=False, soft_wrap=True)
        return
    count, size = sum(map(len, volumes)), sum(sizes[name] for names in volumes for name in names)
    console.print(f"{count:,} objects, {size:,} bytes, in {len(volumes)} volumes", highlight=False)
    with working("packing") as bar:
        for number, names in enumerate(volumes, 1):
            bar.begin(f"volume {number} of {len(volumes)}")
            if send:
                write_record(record, stored.beginning(names))
            stored = _store(Network(indexer), opened.storage, names, stored, (rpc, key) if send else None)
            if send:
                write_record(record, stored)
    console.print(f"the archive's root is {stored.root}", highlight=False, soft_wrap=True)
    if not send:
        console.print("nothing was sent; use --send to send it", highlight=False)


def _store(
    network: "Network", storage: "Storage", names: list[str], stored: "Stored", paying: tuple[str, Path] | None
) -> "Stored":
    """Store one more volume. `paying`: node of the chain, and key; None: it is only packed. Raises LocalError if an object
    disappears during the read, RemoteError."""
    from dilocox_zerog.network import root_of
    from dilocox_zerog.volume import write_volume

    with tempfile.TemporaryDirectory(prefix="dilocox-zerog-") as folder:
        path = Path(folder) / "volume"
        try:
            write_volume(storage, names, stored.last, path)
        except FileNotFoundError as error:
            raise LocalError(f"{error} disappeared from {storage.url} during the read: run the command again") from error
        root = root_of(path)
        if paying is not None:
            network.put(path, root, *paying)
    return stored.and_volume(root, names)


def _stored(path: Path, run_id: bytes) -> "Stored":
    """Return the record of an archive's run. Raises ConfigError if it is invalid, or another run's."""
    from dilocox_zerog.record import read_record
    from dilocox_zerog.volume import Stored

    if not path.exists():
        return Stored(run=run_id.hex())
    stored = read_record(path, Stored, "what was stored")
    if stored.run != run_id.hex():
        raise ConfigError(f"{path} belongs to the run {stored.run}, the archive to {run_id.hex()}")
    return stored


@app.command()
def restore(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Root of the archive, as `store` printed it last.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the archive.")],
    indexer: IndexerOption,
) -> None:
    """Restore an archive. Any account may do it without payment. A later reader (`verify --archive`, `node --archive`)
    verifies it."""
    _need_sdk()
    from dilocox_zerog.network import Network

    wanted = _root(root)
    if folder.exists():
        raise ConfigError(f"{folder} exists: use a new folder")
    with working("fetching") as bar, whole_folder(folder) as scratch:
        _restore(Network(indexer), wanted, scratch, bar)
    console.print(f"{folder} is the archive", highlight=False, soft_wrap=True)


def _root(text: str) -> bytes:
    """Parse a root. Raises ConfigError."""
    try:
        found = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        found = b""
    if len(found) != HEX // 2:
        raise ConfigError(f"{text} is not a root: use {HEX} hexadecimal digits")
    return found


def _restore(network: "Network", root: bytes, folder: Path, bar: Working) -> None:
    """Restore from the last volume back, because it has the newest of each object. Raises RemoteError."""
    from dilocox_zerog.volume import fill, read_header

    wanted: bytes | None = root
    while wanted is not None:
        bar.begin(f"fetching the volume {wanted.hex()[:16]}…")
        with tempfile.TemporaryDirectory(prefix=".volume.", dir=folder) as scratch:
            path = Path(scratch) / "volume"
            network.get(wanted, path)
            with path.open("rb") as file:
                header = read_header(file, path.stat().st_size)
                fill(file, header, folder)
        wanted = bytes.fromhex(header.before) if header.before is not None else None


@app.command()
def disperse(
    record: RecordOption,
    da: DaOption,
    home: HomeOption = None,
    join: ReadOption = None,
    send: SendOption = False,
) -> None:
    """Disperse the commits of a run that are not dispersed yet, and wait until they are final."""
    from dilocox_zerog.dispersed import Dispersed, waiting
    from dilocox_zerog.record import read_record, write_record

    check_place(record, "--record ")  # before anything is paid for

    async def nothing(_: object) -> int:
        return 0

    with reading(join, home, None, nothing) as (chains, _):
        if len(chains) != 1:
            raise ConfigError(f"{len(chains)} runs on this disk: pass --join LINK, or the --home of its daemon")
        with ChainFile.for_reading(chains[0]) as chain:
            run = chain.manifest.run_id
            said = read_record(record, Dispersed, "what was dispersed") if record.exists() else Dispersed(run=run.hex())
            found = said.of(chain)
            sizes = [(each.count, len(each.blob)) for each in waiting(chain, found)]
            commits, size = sum(count for count, _ in sizes), sum(size for _, size in sizes)
            console.print(f"{commits:,} commits, {size:,} bytes, in {several(len(sizes), 'blob')}", highlight=False)
            if not send:
                console.print("nothing was sent; use --send to send it", highlight=False)
                return

            async def hand_over(disperser: "Disperser", bar: Working) -> None:
                nonlocal found
                for each in bar.each("dispersing", islice(waiting(chain, found), len(sizes)), len(sizes)):
                    found = found.with_batch(each.at(await disperser.disperse(each.blob, _patience())))
                    write_record(record, found)

            asyncio.run(_with_disperser(da, "dispersing", hand_over))
    console.print(f"{found.commits:,} commits are dispersed: store {record}", highlight=False, soft_wrap=True)


async def _with_disperser(url: str, what: str, do: "Callable[[Disperser, Working], Awaitable[None]]") -> None:
    from dilocox_zerog.disperser import opened

    with working(what) as bar:
        async with opened(url) as disperser:
            await do(disperser, bar)


def _patience() -> Callable[[], Awaitable[None]]:
    until = time.monotonic() + FINAL_SECONDS

    async def wait() -> None:
        if time.monotonic() > until:
            raise LocalError(f"a blob is not final after {FINAL_SECONDS} s: check the disperser, and run the command again")
        await asyncio.sleep(LOOK_SECONDS)

    return wait


@app.command()
def retrieve(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="The record that `disperse` wrote.")],
    da: DaOption,
    home: Annotated[Path, typer.Option("--home", metavar="DIR", help="A folder, for `dilocox verify --home DIR`.")],
) -> None:
    """Retrieve a run's chain from its dispersed blobs, every commit verified."""
    from dilocox_zerog.dispersed import Dispersed
    from dilocox_zerog.record import read_record

    found = read_record(record, Dispersed, "what was dispersed")
    if not found.batches:
        raise ConfigError(f"{record} lists nothing that is dispersed")
    folder = DataDirectory(home, None)

    async def fetch(disperser: "Disperser", bar: Working) -> None:
        await _retrieve(disperser, found, folder, bar)

    try:
        asyncio.run(_with_disperser(da, "retrieving", fetch))
    finally:
        folder.close()
    console.print(f"{found.commits:,} commits of the run {found.run} are in {home}", highlight=False, soft_wrap=True)


async def _retrieve(disperser: "Disperser", record: "Dispersed", folder: DataDirectory, bar: Working) -> None:
    """Retrieve the blobs. Raises RemoteError if a download differs, or is invalid."""
    from dilocox_zerog.dispersed import envelopes

    run_id = bytes.fromhex(record.run)
    chain: ChainFile | None = None
    try:
        for batch in bar.each("retrieving", record.batches, len(record.batches)):
            found = envelopes(batch, await disperser.retrieve(batch.place))
            if chain is None:
                manifest, *found = found
                path = folder.run_folder(run_id) / "chain.db"
                chain = ChainFile(path, open_manifest(manifest, run_id), json_views.describe)
                chain.keep_signed_manifest(manifest)
            for envelope in found[max(0, chain.length - batch.first) :]:
                chain.append(envelope)
    finally:
        if chain is not None:
            chain.close()
