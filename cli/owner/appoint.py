"""`dilocox owner appoint PEER RUN.toml`: the owner appoints another coordinator, or chooses one chain after a fork.

If all peers are lost, the run's archive has the chain and the state to continue from.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import (
    ArchiveKeyOption,
    HomeOption,
    archive_place,
    beside,
    check_place,
    console,
    fail,
    known_homes,
    read_run,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.progress import working
from dilocox.protocol import limits
from dilocox.protocol.crypto import Identity
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import key_of_peer, short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, seal, stages_in
from dilocox.transport.archive.archive import Archive, open_archive
from dilocox.transport.archive.chain import archived_manifest, fill_chain, some_head
from dilocox.transport.archive.index import ArchiveHead
from dilocox.transport.archive.source import ArchivePlace
from dilocox.transport.store.appointment_bundle import write_handover
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.files import find_chains

__all__ = ["app", "appoint"]

app = typer.Typer(no_args_is_help=True, help="Control a run as its owner, with the key beside its run file.")
app.callback()(lambda: None)


@dataclass(frozen=True)
class Named:
    """Chain facts that an appointment names."""

    chain: ChainFile
    place: str
    """Source of the chain."""
    round: int
    """The first that the new coordinator closes."""
    state: bytes
    """Root of the state that it starts from; empty: it follows from the chain."""


def newest_chain(home: Path | None, run_id: bytes) -> Path | None:
    """Return the run's chain among the folders of daemons on this machine: the newest term, then the longest."""
    found = [path for folder in known_homes(home) for path in find_chains(folder) if path.parent.name == run_id.hex()[:16]]

    def age(path: Path) -> tuple[int, int]:
        with ChainFile.for_reading(path) as chain:
            return chain.term, chain.length

    return max(found, key=age, default=None)


@app.command()
def appoint(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Peer id of the new coordinator: run `dilocox id --home` there.")],
    run_file: Annotated[
        Path, typer.Argument(help="The run file, with the owner's key beside it; with --archive the key is enough.")
    ],
    home: HomeOption = None,
    archive: Annotated[
        str | None,
        typer.Option(
            "--archive",
            metavar="URL",
            help="All peers are lost: continue from the newest state in the run's archive. Later rounds are lost.",
        ),
    ] = None,
    archive_key: ArchiveKeyOption = None,
    round: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, metavar="N", help="First round that it closes (default: after the newest commit on this disk)."
        ),
    ] = None,
) -> None:
    """Appoint another coordinator, from the chain in a daemon's folder or in the run's archive, and write RUN.chain for it. The
    earlier commits of that chain remain valid. Every node that follows PEER moves other commits aside, such as those of a
    fork."""
    try:
        key_of_peer(peer)
    except ValueError as error:
        fail(
            f"{peer}: {error}",
            Exit.USAGE,
            "pass the id that `dilocox id --home FOLDER` prints for the new coordinator's folder",
        )
    if archive is not None and home is not None:
        fail("--home and --archive", Exit.USAGE, "pass only one of --home and --archive: both have the chain")
    key = beside(run_file, ".key")
    if not key.is_file():
        fail(f"no owner key {key}", Exit.USAGE, "only the run's owner can appoint its coordinator: run this where the key is")
    owner, place = load_identity(key), archive_place(archive, archive_key)
    handover = beside(run_file, ".chain")
    if handover.exists():
        fail(f"{handover} already exists", Exit.USAGE, "move it to another folder: it belongs to an earlier appointment")
    check_place(handover)
    with (
        working("reading the chain"),
        _archived(run_file, place, round) if place is not None else _here(run_file, home, round) as named,
    ):
        manifest, chain = named.chain.manifest, named.chain
        if owner.peer != manifest.owner:
            fail(f"{key} is not the key of the run's owner", Exit.USAGE)
        appointment = _seal(owner, peer, named)
        signed = seal(owner, pb.KIND_MANIFEST, manifest.run_id, manifest.canonical_bytes()).envelope
        try:
            write_handover(handover, signed, appointment.envelope, chain)
        except RemoteError as error:
            fail(f"{named.place}: the chain is not valid: {error}")
        console.print(f"from {named.place}: {named.round} of its {chain.length} commits remain valid", highlight=False)
    if named.state:
        console.print(f"round {named.round} starts from the archived state {named.state.hex()}", highlight=False)
    term = appointment.body.term
    console.print(f"{short(peer)} signs from round {named.round} on (term {term}): {handover}", highlight=False)
    console.print(f"next, on that machine, with that file: dilocox coordinator {handover.name} --home FOLDER", highlight=False)
    console.print("then send the new join link to all operators: nodes must start again with it", highlight=False)
    if place is not None:
        console.print(f"new nodes: dilocox node --join LINK --archive {place.url}", highlight=False)


def _seal(owner: Identity, peer: str, named: Named) -> Statement[pb.Appointment]:
    chain = named.chain
    last = chain.commit(named.round - 1)
    head = last.digest if last is not None else b""
    term = max(chain.term + 1, int(time.time()))
    body = pb.Appointment(term=term, coordinator=peer, round=named.round, head=head, state=named.state)
    return seal(owner, pb.KIND_APPOINTMENT, chain.manifest.run_id, body)


@contextmanager
def _here(run_file: Path, home: Path | None, round: int | None) -> Iterator[Named]:
    """Yield the facts from a daemon's folder."""
    manifest = read_run(run_file)
    path = newest_chain(home, manifest.run_id)
    if path is None:
        fail("no chain of this run on this disk", Exit.USAGE, "pass --home of a daemon of the run, or its --archive")
    with ChainFile.for_reading(path) as chain:
        first = chain.length if round is None else round
        if first > chain.length:
            fail(f"{path} ends with commit {chain.length - 1}", Exit.USAGE, f"use --round {chain.length} or less")
        yield Named(chain, str(path), first, b"")


@contextmanager
def _archived(run_file: Path, place: ArchivePlace, round: int | None) -> Iterator[Named]:
    """Yield the facts from the run's archive. Raises LocalError or RemoteError if it cannot be read."""
    archive = open_archive(place.url, place.key, read_run(run_file).run_id if run_file.is_file() else None)
    head = some_head(archive)
    manifest = archived_manifest(archive, head)
    with tempfile.TemporaryDirectory(prefix="dilocox-appoint-") as scratch:
        chain = ChainFile(Path(scratch) / "chain.db", manifest)
        try:
            fill_chain(archive, head, chain)
            number, state = _newest_whole(archive, head, chain, manifest, round)
            yield Named(chain, archive.url, number, state)
        finally:
            chain.close()


def _newest_whole(
    archive: Archive, head: ArchiveHead, chain: ChainFile, manifest: Manifest, wanted: int | None
) -> tuple[int, bytes]:
    """(round, state root) of the newest archived state, or of that round's. Exits where there is none."""
    agreed = {number: root for number, root in head.states.items() if chain.state_before(number) == root}

    def whole(root: bytes) -> bool:
        digests = stages_in(archive.read(root, limits.LEAVES_BYTES))
        return len(digests) == manifest.model.stages and all(digest in archive for digest in digests)

    found = next(((number, root) for number, root in agreed.items() if wanted in (None, number) and whole(root)), None)
    if found is None:
        have = f"use a state before one of the rounds {sorted(agreed)}" if agreed else "it has none"
        which = "state" if wanted is None else f"state before round {wanted}"
        fail(f"no complete {which} that the run agreed on in the archive {archive.url}", Exit.USAGE, have)
    return found
