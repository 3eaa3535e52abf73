"""Appointment bundle: the owner's signed manifest and appointment, with the chain that the appointment names. It makes its
receiver the run's coordinator.

The owner writes all of it to one chain file, which contains no secret. The receiver verifies every commit again.
"""

import os
from pathlib import Path

from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["read_handover", "take_over", "write_handover"]


def write_handover(path: Path, signed: pb.Envelope, appointment: pb.Envelope, chain: ChainFile) -> None:
    """A new file at `path`. Blocking: verifies `chain` up to the commit that the appointment names. Raises FileExistsError, and
    RemoteError where the chain does not hold or has another commit there."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    made = ChainFile(scratch, chain.manifest)
    try:
        made.keep_signed_manifest(signed)
        made.appoint(appointment)
        named = made.appointment
        assert named is not None, "it was just stored"
        _append(made, chain, named.body.round)
        if made.head.term != named.body.term:
            raise RemoteError(pb.REASON_WRONG_HEAD, f"the chain does not have the commit {named.body.round - 1} that it names")
        made.close()
        os.link(scratch, path)
    finally:
        made.close()
        for ending in ("", "-wal", "-shm"):
            scratch.with_name(scratch.name + ending).unlink(missing_ok=True)


def take_over(path: Path, chain: ChainFile) -> bool:
    """Apply an appointment bundle. Return whether it rejects commits here. Blocking. Raises RemoteError if it is invalid."""
    with ChainFile.for_reading(path) as given:
        if given.manifest.run_id != chain.manifest.run_id:
            raise RemoteError(pb.REASON_WRONG_RUN, f"{path} belongs to another run")
        if (signed := given.signed_manifest) is not None:
            chain.keep_signed_manifest(signed)
        gave_up = given.appointment is not None and chain.appoint(given.appointment.envelope)
        last = chain.length - 1
        if 0 <= last < given.length and given.raw(last) != chain.raw(last):  # of another chain than the named one
            chain.give_up_from(0)
            gave_up = True
        _append(chain, given, given.length)
    return gave_up


def _append(chain: ChainFile, source: ChainFile, until: int) -> None:
    for number in range(chain.length, until):
        raw = source.raw(number)
        if raw is None:
            break
        chain.append(pb.Envelope.FromString(raw))


def read_handover(path: Path) -> tuple[Manifest, str]:
    """The run, and the peer id of who signs from here on. Raises ConfigError where it is no handover."""
    with ChainFile.for_reading(path) as given:
        if given.signed_manifest is None:
            raise ConfigError(f"{path} does not contain the signed manifest: pass the file that `dilocox owner appoint` wrote")
        return given.manifest, given.signer
