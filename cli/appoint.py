"""`dilocox appoint PEER RUN.toml`: the owner gives a run to another coordinator, or says after a fork which chain is the run's."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import HomeOption, console, fail, known_homes, read_run
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.ids import key_of_peer, short
from dilocox.protocol.messages import seal
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.transport.chain_file import ChainFile, find_chains
from dilocox.transport.data_directory import load_identity
from dilocox.transport.handover import write_handover

__all__ = ["appoint"]


def newest_chain(home: Path | None, run_id: bytes) -> Path | None:
    """Of this run, among the folders of daemons on this machine: of the newest term, the longest."""
    found = [path for folder in known_homes(home) for path in find_chains(folder) if path.parent.name == run_id.hex()[:16]]

    def age(path: Path) -> tuple[int, int]:
        with ChainFile.for_reading(path) as chain:
            return chain.term, chain.length

    return max(found, key=age, default=None)


def appoint(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Who signs from now on: `dilocox id --home` there.")],
    run_file: Annotated[Path, typer.Argument(help="The run file, with the owner's key beside it.")],
    home: HomeOption = None,
    round: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, metavar="N", help="The first round that it closes (default: after the newest commit here)."
        ),
    ] = None,
) -> None:
    """Appoint another coordinator, from the chain in a daemon's folder; writes RUN.chain, which makes PEER the coordinator.

    The commits before are the run's; others, such as those of a second chain, are set aside by every node that follows it.
    """
    try:
        key_of_peer(peer)
    except ValueError as error:
        fail(f"{peer}: {error}", 2, "copy what `dilocox id --home FOLDER` prints for the new coordinator's folder")
    manifest = read_run(run_file)
    key = run_file.with_suffix(".key")
    if not key.is_file():
        fail(f"no owner key {key}", 2, "only the run's owner appoints its coordinator")
    owner = load_identity(key)
    if owner.peer != manifest.owner:
        fail(f"{key} is not the key of the owner that {run_file} names", 2)
    handover = run_file.with_suffix(".chain")
    if handover.exists():
        fail(f"{handover} exists already", 2, "move it away: it made somebody the coordinator before")
    path = newest_chain(home, manifest.run_id)
    if path is None:
        fail("no chain of this run is here", 2, "name the --home of a daemon that takes part in it")
    with ChainFile.for_reading(path) as chain:
        length = chain.length
        first = length if round is None else round
        if first > chain.length:
            fail(f"{path} ends with commit {chain.length - 1}", 2, f"--round is at most {chain.length}")
        last = chain.commit(first - 1)
        head = last.digest if last is not None else b""
        body = pb.Appointment(term=max(chain.term + 1, int(time.time())), coordinator=peer, round=first, head=head)
        signed = seal(owner, pb.KIND_MANIFEST, manifest.run_id, manifest.canonical_bytes()).envelope
        appointment = seal(owner, pb.KIND_APPOINTMENT, manifest.run_id, body).envelope
        try:
            write_handover(handover, signed, appointment, chain)
        except RemoteError as error:
            fail(f"{path}: the chain does not hold: {error}")
    console.print(f"from {path}: {first} of its {length} commits stand", highlight=False)
    console.print(f"{short(peer)} signs from round {first} on (term {body.term}): {handover}", highlight=False)
    console.print(f"next, with that file there: dilocox coordinator {handover.name} --home FOLDER", highlight=False)
    console.print("then give the new join link to everybody who takes part: nodes start again with it", highlight=False)
