"""Terms: the coordinator that signs a run's commits. The manifest names the first; the run's owner appoints others.

An appointment names the last valid commit by its digest, and the next commit contains the appointment: so a chain alone
proves its signers. Each appointment begins a new term. Two commits of one round in one term prove a fork by their
signer. The owner's next appointment then chooses the run's commits, and ends the halt. If a run starts again from an
archive, it also names the state that its round starts from.
"""

from dataclasses import replace

from dilocox.protocol.consensus.head import Head
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, open_envelope

__all__ = ["appoint", "coordinator_of", "forked_round", "open_appointment"]


def open_appointment(manifest: Manifest, envelope: pb.Envelope | bytes) -> Statement[pb.Appointment]:
    """Open the owner's appointment. Raises RemoteError if it is not one."""
    appointment: Statement[pb.Appointment] = open_envelope(envelope, manifest.run_id, (pb.KIND_APPOINTMENT,))
    if appointment.peer != manifest.owner:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, f"an appointment by {appointment.peer}, which is not the run's owner")
    return appointment


def coordinator_of(manifest: Manifest, appointment: Statement[pb.Appointment] | None) -> str:
    """Return the peer id of the coordinator under the owner's latest appointment."""
    return str(appointment.body.coordinator) if appointment is not None else manifest.coordinator


def appoint(manifest: Manifest, head: Head, envelope: pb.Envelope) -> Head:
    """Return the head from which the appointed coordinator continues. Raises RemoteError if the appointment is not for
    this head."""
    appointment = open_appointment(manifest, envelope)
    body = appointment.body
    if (body.round, body.head) != (head.round, head.digest):
        raise RemoteError(pb.REASON_WRONG_HEAD, f"the appointment of term {body.term} names another commit {body.round - 1}")
    if body.term <= head.term:
        raise RemoteError(pb.REASON_STALE_ROUND, f"the appointment of term {body.term} arrived in term {head.term}")
    # A state in the chain is final. Otherwise the owner may name one: unknown peers never define a run's model, and its
    # makers may be gone.
    state = head.state or body.state
    return replace(head, coordinator=body.coordinator, term=body.term, appointment=appointment.envelope, state=state)


def forked_round(manifest: Manifest, fork: pb.Fork) -> tuple[int, int]:
    """(round, term) in which one coordinator signed two different commits. Raises RemoteError where these do not prove that."""
    first, second = (open_envelope(envelope, manifest.run_id, (pb.KIND_COMMIT,)) for envelope in (fork.first, fork.second))
    term = first.body.term
    appointment = open_appointment(manifest, fork.appointment) if term else None
    if {first.peer, second.peer} != {coordinator_of(manifest, appointment)}:
        raise RemoteError(pb.REASON_BAD_SIGNATURE, "the coordinator did not sign both commits")
    if appointment is not None and appointment.body.term != term:
        raise RemoteError(pb.REASON_MALFORMED, "the commits are not of the term that they were sent with")
    if (second.body.round, second.body.term) != (first.body.round, term) or first.digest == second.digest:
        raise RemoteError(pb.REASON_MALFORMED, "they are not two commits of one round")
    return int(first.body.round), int(term)
