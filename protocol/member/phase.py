"""Phase machine: the next action of every rank of a cluster, `step(state, turn) -> state, actions`.

This file contains every decision about when a cluster trains, waits, moves onto a commit and ends a phase. The machine
has no tensors, no clock and no rank. Between two inner steps the ranks agree on one `Turn` (an all-reduce of flags).
Each feeds it to its copy of this state, so all take the same actions at the same inner step. Workers drive it, and so
does the bench.

A phase belongs to a round. Three values change, each at its own time:

    round      of the running phase; the work since the phase began will be contributed to it
    head       commits 0 … head.round-1 are applied: Θ(head.round) is in place, and the live parameters are on it
    in flight  the round of our payload that no applied commit has closed yet; 0 when there is none

    head.round = round        the phase's own Θ is in place: it may end
    head.round = round - 1    the commit before it is on its way: with `rebase` the cluster trains on and moves onto it whenever it
                              arrives, with `delayed` it holds it back until the phase is over, with `none` it waits for it
    head.round > round        never: where the run goes on without us the next phase begins at once, with the work kept as private
                              progress

One turn, in this order (a commit can arrive and a phase end in one turn):

    when                                                               actions
    a rank was told to stop                                            Stop
    every rank has prepared the next commit, and it is not held back   Apply, private progress is kept …
      and it closes this phase, for whose round we had no place        … or dropped: the phase has warmed up the inner optimizer
    Θ(round) is in place, we are on its roster, the phase is long
      enough and every rank's background is idle                       End, Encode: the next phase begins
      `delayed`: Θ(round) is prepared and held back                    End, Apply (private progress dropped), Encode
    every rank can score the next contribution, and no commit is on
      its way                                                          Score
    then, always, one (Train only where every rank has the samples)     Train, Wait

A phase is long enough after the H that the commit before it names; a time-boxed one when its time is up, or after
max_inner_steps. It never takes more than max_inner_steps. Illegal input raises LocalError and changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from dilocox.protocol.consensus.data_leases import Lease, Span
from dilocox.protocol.consensus.head import Head, initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError
from dilocox.protocol.run.manifest import Manifest

__all__ = [
    "SAMPLES_COMING",
    "Action",
    "Apply",
    "Encode",
    "End",
    "Flags",
    "PhaseState",
    "Score",
    "Stop",
    "Train",
    "Turn",
    "Wait",
    "agree",
    "begin",
    "closes",
    "next_action",
    "onto",
    "reading",
    "resume",
    "samples_read",
    "step",
    "upcoming",
]


SAMPLES_COMING = "waiting for the samples of its next batch"


@dataclass(frozen=True)
class Turn:
    """Facts that all ranks agreed on since the last turn."""

    trained: bool = False
    """They took the inner step that Train asked for."""
    prepared: Head | None = None
    """Head after the next commit, once every rank has applied it to Θ."""
    idle: bool = False
    """No rank has background work, or a prepared commit that another rank lacks: Θ matches the head."""
    time_is_up: bool = False
    """The time of a time-boxed phase is up."""
    stop: bool = False
    """Some rank must stop."""
    lacking: bool = False
    """Some rank has not all samples that were `upcoming`."""
    scorable: bool = False
    """Every rank can score the contribution that is the next to be scored."""
    checkpoint_due: bool = False
    """A complete checkpoint is due."""


@dataclass(frozen=True)
class Flags:
    """Flags of one rank; `agree` reads the sums over all ranks."""

    preparing: bool
    """It has the next commit, prepared or not."""
    prepared: bool
    """Θ, momentum and error feedback match that commit."""
    busy: bool
    """Something runs in the background."""
    stop: bool
    time_is_up: bool
    """Only the first rank's clock counts."""
    lacking: bool
    """Samples that are `upcoming`."""
    scorable: bool
    """It can score the next contribution: Θ matches the head, no commit is being prepared, and the payload is here."""
    checkpoint_due: bool
    """A complete checkpoint is due. Only the first rank's clock counts: the checkpoints of all ranks belong together."""

    def numbers(self) -> list[float]:
        return [float(getattr(self, each.name)) for each in fields(self)]


def agree(sums: Sequence[float], ranks: int, trained: bool, prepared: Callable[[], Head]) -> Turn:
    """The turn that the sums of all ranks' flags mean; `prepared` is asked only when every rank has prepared the next commit."""
    preparing, everywhere = sums[0] > 0, sums[1] == ranks
    return Turn(
        trained,
        prepared() if everywhere else None,
        idle=sums[2] == 0 and (everywhere or not preparing),
        stop=sums[3] > 0,
        time_is_up=sums[4] > 0,
        lacking=sums[5] > 0,
        scorable=sums[6] == ranks,
        checkpoint_due=sums[7] > 0,
    )


@dataclass(frozen=True)
class Train:
    """Take one inner step on the samples at these positions."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    why: str
    """A sentence."""


@dataclass(frozen=True)
class Apply:
    """Move the live parameters onto Θ as the prepared commit left it."""

    keep_private: bool
    """Private progress stays on top of it; else it is dropped."""


@dataclass(frozen=True)
class End:
    """Move the phase's work into the error feedback."""

    round: int
    restart: bool
    """The next phase starts from Θ; else from a share of the private progress."""


@dataclass(frozen=True)
class Encode:
    """Action: give the error feedback to the codec, in the background. Announced facts of the ended phase:"""

    round: int
    inner_steps: int
    samples_read: int
    """Samples read of the lease, since the cluster joined."""
    joined: int
    """The `joined` of that lease."""
    rank_or_k: int
    head: bytes
    """Digest of the commit that opened the round."""
    complete: bool = False
    """Its checkpoint has the inner optimizer's tensors and the live parameters."""


@dataclass(frozen=True)
class Score:
    """Measure what the next contribution does to the loss: all ranks together, at this very inner step."""


@dataclass(frozen=True)
class Stop:
    """Exit."""


Action = Train | Wait | Apply | End | Encode | Score | Stop


@dataclass(frozen=True)
class PhaseState:
    manifest: Manifest
    cluster: str
    head: Head
    """round <= this.round: see above."""
    round: int
    steps: int = 0
    """Inner steps of the phase, at most max_inner_steps."""
    in_flight: int = 0
    """0, or round - 1 = head.round: the commit that closes it is the next one."""
    samples_read: int = 0
    joined: int = 0

    @property
    def on_roster(self) -> bool:
        """Whether the phase that Θ(head) opens is counted."""
        return self.cluster in self.head.roster

    @property
    def lease(self) -> Lease:
        return self.head.ledger.leases.get(self.cluster, Lease())

    @property
    def finished(self) -> bool:
        """Return whether the run's last phase has ended, unless its commit counts no cluster."""
        flying = 1 if self.in_flight else 0
        return self.head.trained + flying >= self.manifest.rounds.count


def begin(manifest: Manifest, cluster: str, head: Head | None = None) -> PhaseState:
    """Return the state at the first step of the phase that `head` opens; default: before the genesis commit."""
    head = head or initial_head("")
    return _follow_lease(PhaseState(manifest, cluster, head, max(1, head.round)))


def resume(manifest: Manifest, cluster: str, head: Head, boundary: int, samples_read: int, joined: int) -> PhaseState:
    """Return the state where phase `boundary` has just ended: its payload is in flight again, unless `head` includes its
    commit."""
    flying = boundary if head.round == boundary else 0
    state = PhaseState(manifest, cluster, head, max(boundary + 1, head.round), 0, flying, samples_read, joined)
    return _follow_lease(state)


def closes(state: PhaseState, round: int) -> bool:
    """Whether the commit of this round decides what becomes of our payload in flight."""
    return state.in_flight == round > 0


def step(state: PhaseState, turn: Turn) -> tuple[PhaseState, tuple[Action, ...]]:
    """One turn: what happens at once, in order, and last what to do until the next turn (Train, Wait or Stop)."""
    if turn.prepared is not None and turn.prepared.round != state.head.round + 1:
        raise LocalError(f"commit {turn.prepared.round - 1} does not follow the state before round {state.head.round}")
    if turn.trained:
        state = _trained(state)
    if turn.stop:
        return state, (Stop(),)
    looked_for = _positions(state)
    actions: list[Action] = []
    if turn.prepared is not None and not _held_back(state, turn.prepared):
        warmed_up = not state.on_roster and state.head.round == state.round
        state = onto(state, turn.prepared)
        actions.append(Apply(keep_private=not warmed_up))
    if turn.idle and _is_over(state, turn):
        state, ending = _end(state, turn)
        actions += ending
    if turn.scorable:
        actions.append(Score())
    action = next_action(state)
    if isinstance(action, Train) and (turn.lacking or list(action.positions) != looked_for):
        action = Wait(SAMPLES_COMING)  # samples of a new lease are not fetched yet
    return state, (*actions, action)


def upcoming(state: PhaseState, trained: bool) -> list[int]:
    """Return the samples to fetch in a turn, for its end: those of the batch after it."""
    return _positions(_trained(state) if trained else state) or []


def reading(manifest: Manifest, cluster: str, head: Head) -> tuple[Span, ...]:
    """Return the cluster's spans of the run's data after this head: those it needs before its steps, or for scores."""
    if manifest.data.private and not manifest.scoring.voters:
        return ()
    if cluster in head.roster:
        return head.ledger.leases.get(cluster, Lease()).spans
    if head.round == 0:
        return ()
    first = _own_positions(cluster)
    return ((first, first + manifest.rounds.max_inner_steps * manifest.training.batch_size),)


def next_action(state: PhaseState) -> Train | Wait:
    """Return the action until the next turn."""
    why = _why_wait(state)
    if why:
        return Wait(why)
    positions = _positions(state)
    if positions is None:
        return Wait(f"its data lease is used up; commit {state.head.round} brings the next one")
    return Train(tuple(positions))


def _why_wait(state: PhaseState) -> str:
    rounds = state.manifest.rounds
    if state.head.round == 0:
        return "the run has not started; waiting for its first commit"
    if state.head.closing(state.manifest):
        return "the run has trained its last round"
    if state.finished:
        return f"waiting for commit {state.head.round}; the last phase has ended"
    if state.in_flight and state.manifest.overlap(state.in_flight) == "none":
        return f"waiting for commit {state.in_flight}; round {state.in_flight} is synchronous"
    if state.steps >= rounds.max_inner_steps:
        return f"commit {state.head.round} is late, and the phase has reached its max_inner_steps ({rounds.max_inner_steps})"
    return ""


def _positions(state: PhaseState) -> list[int] | None:
    """Return the positions of the next batch; None if the lease ends before it. On private data a cluster counts its own
    samples: the lease gives only their number, and a cluster that returns begins elsewhere."""
    batch = state.manifest.training.batch_size
    if state.on_roster:
        leased = state.lease.positions(state.samples_read, batch)
        if leased is None or not state.manifest.data.private:
            return leased
        first = _own_positions(state.cluster, state.joined.to_bytes(4, "big")) + state.samples_read
        return list(range(first, first + batch))
    own = _own_positions(state.cluster)
    return list(range(own + state.steps * batch, own + (state.steps + 1) * batch))


def _own_positions(cluster: str, stay: bytes = b"") -> int:
    """Return the first position of a cluster that is not counted, or reads private text in this stay: any samples serve."""
    return int.from_bytes(sha256(cluster.encode(), stay)[:6], "big")


def _trained(state: PhaseState) -> PhaseState:
    action = next_action(state)
    if isinstance(action, Wait):
        raise LocalError(f"an inner step was reported where none was due: {action.why}")
    return replace(state, steps=state.steps + 1, samples_read=samples_read(state, True))


def samples_read(state: PhaseState, trained: bool) -> int:
    """Samples of its lease, with the inner step that was just taken."""
    return state.samples_read + state.manifest.training.batch_size * (trained and state.on_roster)


def _held_back(state: PhaseState, prepared: Head) -> bool:
    """A commit that travels beside a phase (delayed) waits for its end, if that phase will be counted."""
    beside = state.manifest.overlap(state.head.round) == "delayed" and state.head.round < state.round
    return beside and not state.finished and state.cluster in prepared.roster


def _is_over(state: PhaseState, turn: Turn) -> bool:
    opening = state.head
    if turn.prepared is not None and opening.round < state.round:
        opening = turn.prepared  # held back
    if state.finished or opening.round != state.round or state.cluster not in opening.roster:
        return False
    if state.manifest.rounds.round_seconds is None:
        return state.steps >= opening.inner_steps
    return state.steps > 0 and (turn.time_is_up or state.steps >= state.manifest.rounds.max_inner_steps)


def _end(state: PhaseState, turn: Turn) -> tuple[PhaseState, list[Action]]:
    actions: list[Action] = [End(state.round, restart=state.manifest.overlap(state.round) == "delayed")]
    if state.head.round < state.round:
        assert turn.prepared is not None
        state = onto(state, turn.prepared)
        actions.append(Apply(keep_private=False))
    read = min(state.samples_read, state.lease.end)
    facts = state.round, state.steps, read, state.joined, state.head.rank_or_k, state.head.digest
    actions.append(Encode(*facts, complete=turn.checkpoint_due))
    return replace(state, round=state.round + 1, steps=0, in_flight=state.round), actions


def onto(state: PhaseState, head: Head) -> PhaseState:
    """The next commit is applied. Also how a start replays commits."""
    moved = replace(state, head=head, in_flight=0)
    if head.round > state.round:  # the round of the running phase has closed without us
        moved = replace(moved, round=head.round, steps=0)
    return _follow_lease(moved)


def _follow_lease(state: PhaseState) -> PhaseState:
    """Count samples from the join: another lease starts its own count."""
    member, counted = state.head.roster.get(state.cluster), state.lease.counted
    if member is not None and member.joined != state.joined:
        return replace(state, joined=member.joined, samples_read=counted)
    return replace(state, samples_read=max(state.samples_read, counted))
