"""Status of a node, in words: a projection of the member machine and of the workers' state."""

from dataclasses import dataclass

from dilocox.protocol.errors import reason_name
from dilocox.protocol.member.member_state import MemberState

__all__ = ["FEWER_MACHINES", "FINISHED", "REMINDER_SECONDS", "Status", "status"]

FEWER_MACHINES = (
    "start another node; to begin with fewer, the owner sets rounds.start_clusters in the run file, which makes "
    "a new run with a new link"
)
"""Advice for a run that waits for its first clusters."""
FINISHED = (
    "`dilocox export DIR` writes the model, `dilocox leave` ends this node; until then it serves the state to other peers"
)
"""Advice for a run that is over."""
REMINDER_SECONDS = 60.0
"""Seconds between two log lines of a run that waits for its first clusters."""


@dataclass(frozen=True)
class Status:
    name: str
    why: str
    advice: str = ""


def status(state: MemberState, workers: Status | None, pause: str = "") -> Status:
    """Return the node's status: the first row that applies. `workers`: their state; None before they are up. `pause`: why
    it is paused, or will be."""
    head = state.head
    away = state.turned_away
    if head.finished:
        return Status("finished", "the run is finished; serving its state", FINISHED)
    if state.leaving:
        return Status("paused", pause) if pause else Status("leaving", "stop was requested")
    if away is not None and not state.takes_part:
        return Status("refused", f"{reason_name(away[0])}: {away[1]}", "ask the run's owner")
    if state.attestation is not None and not state.attestation.holds and not state.takes_part:
        return Status("refused", f"not attested: {state.attestation.why}")
    if workers is None:
        return Status("starting", "starting the stage workers")
    if workers.name != "training" and workers.name != "waiting":
        return workers
    if state.finishing is not None:
        then = f"it pauses {pause}" if pause else "it leaves"
        return Status("finishing", f"round {state.finishing} still gets this node's contribution and vote; then {then}")
    if head.round == 0:
        return Status("joining", state.manifest.begins, FEWER_MACHINES)
    rest = head.resting.get(state.me)
    if not state.takes_part and rest is not None and head.round < rest.until:
        return Status("resting", f"suspended: too many commits did not count it; commit {rest.until} may seat it again")
    if not state.takes_part:
        return Status("warming up", "not on the roster yet; this phase is not counted")
    if not state.connected and workers.name == "waiting":
        return Status("waiting", "the coordinator is away")
    return workers
