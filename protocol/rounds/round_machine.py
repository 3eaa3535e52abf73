"""Round machine of the coordinator: `step(state, input, moment) -> state, effects`.

This file contains every decision about whether and when a round closes; rules.py decides what is accepted. The machine
has no clock, no I/O and no randomness. A coordinator logs its inputs with their times, and a restart that replays the
inputs since the last commit reaches exactly the same state.

    round 0       claims ────────────────(start_clusters complete, equal states)────────────────► genesis commit
    every round   collecting ──(all heard contributed, or deadline)──► voting ──(all heard voted, or deadline)──► commit
                  collecting ──(fewer than min_clusters heard, but enough with those who claim)─────────────────► roster-only commit
                  collecting ──(deadline, nobody contributed, somebody claims)──────────────────────────────────► roster-only commit
    when trained  reports ───────────────(all heard reported, or deadline)──────────────────────► closing commit; finished

Three rules about time. A deadline is learned from the times at which more than half of the roster, by reputation, had
contributed or voted, in the last rounds and in this one: silent members cannot extend it. Clocks are stopped below
quorum, while fewer than min_clusters are live, and continue with at least one grace left. After one grace claiming
clusters take over: a broken link silences one peer after the other. Clocks start again when no cluster was live; for
one grace the absent clusters then count as expected. After a start nothing is signed before most of the roster is live,
or a deadline passed.
"""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from dilocox.protocol import limits
from dilocox.protocol.consensus import chain, reputation, rules
from dilocox.protocol.consensus.chain import Closing
from dilocox.protocol.consensus.head import Cluster, Head, advance
from dilocox.protocol.consensus.pool import StatementPool
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.ids import several, shortly
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds.deadlines import deadline_seconds, full_deadline, vote_seconds
from dilocox.protocol.rounds.round_io import (
    Absent,
    Attested,
    Close,
    Differ,
    Effect,
    Input,
    Moment,
    Present,
    Received,
    Refused,
    Relay,
    Reply,
    Resumed,
    Returning,
    SealBallot,
    SealCommit,
    Tick,
)
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement, unsigned

__all__ = [
    "Absent",
    "Attested",
    "Close",
    "Differ",
    "Effect",
    "Input",
    "Moment",
    "Present",
    "Received",
    "Refused",
    "Relay",
    "Reply",
    "Resumed",
    "Returning",
    "RoundState",
    "SealBallot",
    "SealCommit",
    "Tick",
    "close",
    "decide",
    "inherited",
    "next_deadline",
    "phase_of",
    "start",
    "step",
    "why_open",
]

LONGEST_MS = (1 << 32) - 1
"""Longest duration in a commit: seven weeks."""


@dataclass(frozen=True)
class Clock:
    """When things happened in the open round, on the monotonic clock, moved on by what the round was paused."""

    opened_at: float
    ballot_at: float | None = None
    """When voting began; None while collecting."""
    contributed_at: float | None = None
    """When more than half of the roster, by standing, had contributed …"""
    voted_at: float | None = None
    """Time at which more than half had voted."""
    paused_at: float | None = None
    """Start of the time below quorum; None: the clock runs."""
    heard_nobody: bool = False
    """During this pause."""
    awaited: bool = False
    """True once every absent member has left or the grace period is over. Before that, more members behind the same outage
    may still drop."""
    measures: bool = True
    """Whether the round's times may teach later deadlines: not when waiting began afresh in it."""
    returning_until: float | None = None
    """After a time without live clusters: until then absent clusters count as expected. Real time, which no pause moves;
    None when all are live."""

    def later(self, seconds: float) -> "Clock":
        def moved(at: float | None) -> float | None:
            return None if at is None else at + seconds

        times = (moved(self.ballot_at), moved(self.contributed_at), moved(self.voted_at))
        return Clock(self.opened_at + seconds, *times, measures=self.measures, returning_until=self.returning_until)


@dataclass(frozen=True)
class RoundState:
    manifest: Manifest
    head: Head
    clock: Clock
    began_at: float
    """When the round was opened, pauses included."""
    gathered: StatementPool = field(default_factory=StatementPool)
    absent: frozenset[str] = frozenset()
    """Peers that are not live, of the roster and of claiming clusters."""
    sealing: bool = False
    """A ballot was asked for and is not signed yet."""
    starting_since: float | None = None
    """Time of the start, until enough of the roster is live: nothing is signed before."""
    healed: bool = False

    @property
    def stands_still(self) -> bool:
        """Too few clusters take part: the round waits for more, however long that is."""
        return self.clock.paused_at is not None and not self.head.finished


def start(manifest: Manifest, head: Head, now: float) -> RoundState:
    """The open round, of which nothing is known yet."""
    return RoundState(manifest, head, Clock(now), now)


def step(state: RoundState, event: Input, moment: Moment) -> tuple[RoundState, list[Effect]]:
    """Apply one input, and close the round where it decides that. Never raises on anything a peer can cause. The same object comes
    back where nothing changed."""
    state, effects = decide(state, event, moment)
    if effects and isinstance(last := effects[-1], Close):
        state, sealing = close(state, last.moment)
        effects[-1] = sealing
    return state, effects


def decide(state: RoundState, event: Input, moment: Moment) -> tuple[RoundState, list[Effect]]:
    """`step`, but for the one thing in it that takes long where many take part: a driver closes aside."""
    effects: list[Effect] = []
    match event:
        case Received(statement, live):
            state, effects = _receive(state, statement)
            state = state if live else _without(state, statement.peer)
        case Refused(peer, reason, detail):
            state = _refuse(state, peer, reason, detail)
        case Absent(peer):
            state = _without(state, peer)
        case Present(peer):
            state = replace(state, absent=state.absent - {peer}) if peer in state.absent else state
        case Resumed(healed):
            everyone = frozenset(state.head.roster) | frozenset(state.gathered.claims)
            state = replace(state, absent=everyone, healed=healed, starting_since=moment.seconds, sealing=False)
            state = replace(state, clock=_afresh(state, moment.seconds))
        case Returning(until):
            state = replace(state, clock=replace(state.clock, returning_until=until))
        case Attested(attestation):
            state = _attest(state, attestation, moment)
        case Tick():
            pass
    state = _keep_time(state, moment.seconds)
    state, more = _progress(state, moment)
    return state, effects + more


def _without(state: RoundState, peer: str) -> RoundState:
    """Return the state in which this peer is absent, where it takes part."""
    newly = _taking_part(state, {peer} - state.absent)
    return replace(state, absent=state.absent | newly) if newly else state


def _receive(state: RoundState, statement: Statement[object]) -> tuple[RoundState, list[Effect]]:
    before = _with_room(state, statement.kind) if statement.kind in (pb.KIND_CLAIM, pb.KIND_CLUSTER) else state.gathered
    judgement, gathered = rules.judge(state.manifest, state.head, before, statement)
    effects: list[Effect] = [Reply(judgement)]
    if judgement.outcome is Outcome.REJECT:
        state = _refuse(state, statement.peer, judgement.reason, judgement.detail)
    if gathered is not before:
        gathered = replace(gathered, refusals=state.gathered.refusals)
        state = replace(_gathering(state, gathered), sealing=state.sealing and gathered.ballot is None)
        if statement.kind == pb.KIND_CONTRIBUTION:
            effects.append(Relay(statement))
        if statement.kind == pb.KIND_STATE_REPORT:
            effects += _differing(state, statement.peer)
    return state, effects


def _taking_part(state: RoundState, peers: Set[str]) -> frozenset[str]:
    """Return the peers whose absence matters. Identities are free, so no state is stored for others."""
    return frozenset(peer for peer in peers if peer in state.head.roster or peer in state.gathered.claims)


def _gathering(state: RoundState, gathered: StatementPool) -> RoundState:
    """The state with this gathered; who claims no longer is not missed."""
    claims = state.gathered.claims
    state = replace(state, gathered=gathered)
    return state if gathered.claims is claims else replace(state, absent=_taking_part(state, state.absent))


def _with_room(state: RoundState, kind: pb.Kind) -> StatementPool:
    """Return the pool with room for a claim (layout) of an unknown peer. Without room, it drops statements of absent peers, or
    of peers without a claim: an open round would store them for ever. Claims of suspended members are kept: they may have
    the current state. With an allow-list no peer is unknown."""
    head, gathered, gone = state.head, state.gathered, set(state.absent)
    full = len(rules.strangers(gathered.claims, head)) >= rules.claims_kept(head)
    if kind == pb.KIND_CLUSTER:
        full = len(rules.strangers(gathered.clusters, head)) >= rules.layouts_kept(head)
        gone |= gathered.clusters.keys() - gathered.claims.keys()
    if not full or state.manifest.admission.policy == "allow-list":
        return gathered
    return gathered.without(set(rules.strangers(gone, head)) - head.resting.keys())


def _differing(state: RoundState, reporter: str) -> list[Effect]:
    """Return requests to replay: to a differing reporter, or to every cluster while no two thirds agree."""
    head, reports = state.head, state.gathered.reports
    known = rules.known_state(state.manifest, head, state.gathered)
    if known:
        slot = reports.get((reporter, True)) or reports[reporter, False]
        return [Differ(head.round, (reporter,))] if slot[0].body.state != known else []
    told = rules.told_states(state.gathered, head.built_by)
    others = {root for name, root in told.items() if name != reporter}
    if reporter not in told or others <= {told[reporter]}:
        return []
    # The first difference notifies every cluster; after that each new reporter is notified alone, not all names per
    # report.
    return [Differ(head.round, tuple(sorted(told)) if len(others) == 1 else (reporter,))]


def _refuse(state: RoundState, peer: str, reason: pb.Reason, detail: str) -> RoundState:
    """Record a rejection once, while there is room."""
    refusals = state.gathered.refusals
    entry = pb.Exclusion(peer=peer[: limits.TEXT_CHARACTERS], reason=reason, detail=detail[: limits.TEXT_CHARACTERS])
    if state.head.finished or len(refusals) >= limits.REFUSALS_PER_ROUND or entry in refusals:
        return state
    return replace(state, gathered=replace(state.gathered, refusals=(*refusals, entry)))


def _attest(state: RoundState, attestation: pb.Attestation, moment: Moment) -> RoundState:
    """Record a verdict. Those on unknown peers have half of the room; expired ones make room, unless a statement needs them."""
    if not state.manifest.attestation.kinds:
        return state  # no chain would take it
    gathered, peer = state.gathered, attestation.peer
    if peer not in gathered.attested and _verdicts_full(state.head, gathered, peer):
        gathered = _with_room(state, pb.KIND_CLAIM)
        needed = gathered.claims.keys() | gathered.clusters.keys()
        valid = {p: item for p, item in gathered.attested.items() if p in needed or item.valid_until_ms > moment.wall_ms}
        gathered = replace(gathered, attested=valid)
        if _verdicts_full(state.head, gathered, peer):
            return state
    return _gathering(state, replace(gathered, attested={**gathered.attested, peer: attestation}))


def _verdicts_full(head: Head, gathered: StatementPool, peer: str) -> bool:
    """Return whether there is no room for another verdict, on this peer."""
    strange = peer not in head.known_peers and len(rules.strangers(gathered.attested, head)) >= limits.ATTESTATIONS // 2
    return strange or len(gathered.attested) >= limits.ATTESTATIONS


# Time.


def _collect_seconds(state: RoundState) -> float:
    """Return the seconds for contributions. A deadline ends the wait for slow clusters; it never closes a round that would
    count no cluster while min_clusters are live."""
    upper, clock = state.manifest.rounds.deadline_seconds, state.clock
    if clock.measures and clock.contributed_at is not None:
        history = [ms / 1000 for ms in state.head.collect_history]
        usual = deadline_seconds(history, upper) if history else 0.0
        return max(usual, deadline_seconds([clock.contributed_at - clock.opened_at], upper))
    contributed = len(state.gathered.contributions)
    return upper if 0 < contributed < state.manifest.rounds.min_clusters else full_deadline(state.head, state.manifest)


def next_deadline(state: RoundState) -> float | None:
    """When, on the monotonic clock, a Tick could change something; None when only another input can."""
    until = None if state.head.finished else state.clock.returning_until
    return min((due for due in (_due(state), until) if due is not None), default=None)


def _due(state: RoundState) -> float | None:
    """Return the time at which the wait ends despite missing clusters; None if it does not end by itself."""
    if state.head.finished:
        return None
    if state.starting_since is not None:
        return None if state.healed else state.starting_since + full_deadline(state.head, state.manifest)
    if state.head.round == 0 or state.sealing:
        return None
    if state.clock.paused_at is not None:
        return None if state.clock.awaited else state.clock.paused_at + _grace(state)
    return _closes_at(state)


def _closes_at(state: RoundState) -> float | None:
    clock, rounds, gathered = state.clock, state.manifest.rounds, state.gathered
    if state.head.closing(state.manifest):
        return clock.opened_at + rounds.vote_seconds
    if clock.ballot_at is not None and gathered.ballot is not None:
        return clock.ballot_at + gathered.ballot.body.seconds
    if not gathered.contributions and not _complete(state):
        return None
    return clock.opened_at + _collect_seconds(state)


def _afresh(state: RoundState, now: float) -> Clock:
    """Waiting begins again: what happened before did so on another clock, or unheard."""
    ballot_at = None if state.clock.ballot_at is None else now
    until = now + _grace(state) if state.starting_since is None else None
    return Clock(now, ballot_at=ballot_at, measures=False, returning_until=until)


def _with_a_grace(state: RoundState, now: float) -> Clock:
    """The clock, with at least one grace left on it."""
    due = _closes_at(state)
    short = 0.0 if due is None else now + _grace(state) - due
    return state.clock.later(short) if short > 0 else state.clock


def _begin(state: RoundState, now: float) -> RoundState:
    """End the start: for one grace nothing is late, and absent clusters count as expected."""
    state = replace(state, starting_since=None, healed=False)
    clock = state.clock if state.clock.paused_at is not None else _with_a_grace(state, now)
    until = now + _grace(state) if len(_live(state)) < len(state.head.roster) else None
    return replace(state, clock=replace(clock, returning_until=until))


def _keep_time(state: RoundState, now: float) -> RoundState:
    """Stop and start the clock, and note when most had contributed or voted."""
    clock, gathered = state.clock, state.gathered
    heard, wanted = len(_live(state)), state.manifest.rounds.min_clusters
    short_of = state.head.round > 0 and len(_staying(state)) < wanted
    if short_of:
        since, nobody = now if clock.paused_at is None else clock.paused_at, clock.heard_nobody or not heard
        silent = set(state.head.roster) - set(_live(state)) - gathered.leaving()
        left = not silent and now >= (clock.returning_until or now)
        awaited = left or now >= since + _grace(state)
        clock = replace(clock, paused_at=since, heard_nobody=nobody, awaited=awaited)
    if not short_of and clock.paused_at is not None:
        clock = _afresh(state, now) if clock.heard_nobody else clock.later(now - clock.paused_at)
        clock = _with_a_grace(replace(state, clock=clock), now)
    if clock.returning_until is not None and (now >= clock.returning_until or heard == len(state.head.roster)):
        clock = replace(clock, returning_until=None)
    if clock.contributed_at is None and _are_most(state, gathered.contributions, wanted):
        clock = replace(clock, contributed_at=now)
    if gathered.ballot is not None and clock.ballot_at is None:
        clock = replace(clock, ballot_at=now)
    if clock.ballot_at is not None and clock.voted_at is None and _are_most(state, gathered.receipts, wanted):
        clock = replace(clock, voted_at=now)
    return state if clock == state.clock else replace(state, clock=clock)


def _are_most(state: RoundState, done: Collection[str], least: int) -> bool:
    """Return whether these are more than half of the roster, by reputation, and at least so many."""
    manifest, standings, roster = state.manifest, state.head.standings, state.head.roster
    if len(done) < least:
        return False
    return 2 * reputation.total(manifest, standings, done) > reputation.total(manifest, standings, roster)


def _grace(state: RoundState) -> float:
    """Return the time left for returning clusters to connect and repeat their statements."""
    return state.manifest.rounds.liveness_seconds


def _live(state: RoundState) -> list[str]:
    return [name for name in state.head.roster if name not in state.absent]


def _staying(state: RoundState) -> set[str]:
    """Return the clusters of the roster that are live and have not left."""
    return set(_live(state)) - state.gathered.leaving()


def _started(state: RoundState, now: float) -> bool:
    """Return whether enough of the last roster is live since the start. A roster below min_clusters must be live as a whole."""
    roster = state.head.roster
    if state.starting_since is None or not roster:
        return True
    enough = _are_most(state, _live(state), min(state.manifest.rounds.min_clusters, len(roster)))
    due = _due(state)
    return enough or (due is not None and now >= due)


# Progress: does the round close now?


def _progress(state: RoundState, moment: Moment) -> tuple[RoundState, list[Effect]]:
    now, gathered = moment.seconds, state.gathered
    if state.head.finished or state.sealing or not _started(state, now):
        return state, []
    if state.starting_since is not None:
        state = _begin(state, now)
    if state.head.round == 0:
        group = chain.genesis_group(state.manifest, _complete(state, moment.wall_ms))
        return state, [Close(moment)] if len(group) >= state.manifest.rounds.start_clusters else []
    due = _due(state)
    late = due is not None and now >= due
    if state.head.closing(state.manifest):
        done = not _waiting(state, {name for name, _ in gathered.reports}) and bool(gathered.reports)
        return state, [Close(moment)] if late or done else []
    if _can_wake(state, moment):
        return replace(state, gathered=replace(state.gathered, ballot=None)), [Close(moment)]
    if gathered.ballot is not None:
        return state, [Close(moment)] if late or not _voteless(state) else []
    if gathered.contributions and (late or _all_contributed(state)):
        return _ask_for_ballot(state)
    return state, [Close(moment)] if late else []


def _waiting(state: RoundState, done: Iterable[str]) -> set[str]:
    """Return roster clusters that are expected: live or returning, not leaving, not done."""
    returning = state.clock.returning_until is not None
    return set(state.head.roster if returning else _live(state)) - set(done) - state.gathered.leaving()


def _voteless(state: RoundState) -> set[str]:
    """Return the clusters that may vote, are waited for, and have not voted. Below quorum a cluster that leaves is waited for too
    while the votes that are here can count nobody: it may return, and closing would waste the work of the others."""
    gathered, clock = state.gathered, state.clock
    voters, paused, least = set(gathered.listed()), clock.paused_at is not None, state.manifest.rounds.min_clusters
    missing = voters - set(gathered.receipts)
    votes = len(voters) - len(missing)
    countable = min(len(voters), len(voters) - 2 + votes) if votes else 0  # a vote counts the others' work, not its author's
    if not paused or countable >= least or least == 1:
        missing -= gathered.leaving()
    return missing if paused or clock.returning_until is not None else missing - state.absent


def _all_contributed(state: RoundState) -> bool:
    done = {name for name, slot in state.gathered.contributions.items() if len(slot) == 1}
    return len(done) >= state.manifest.rounds.min_clusters and not _waiting(state, state.gathered.contributions)


def _complete(state: RoundState, wall_ms: int | None = None) -> Mapping[str, tuple[Cluster, bytes]]:
    """Return complete clusters that claim and are live; at `wall_ms` with valid evidence, if the run requires it."""
    complete = rules.complete_clusters(state.manifest, state.head, state.gathered)
    if state.manifest.attestation.kinds and wall_ms is not None:
        valid = chain.valid_attestations(state.head, state.gathered.attested.values(), wall_ms)
        complete = {name: item for name, item in complete.items() if all(peer in valid for peer in item[0].peers)}
    return {name: item for name, item in complete.items() if name not in state.absent}


def _can_wake(state: RoundState, moment: Moment) -> bool:
    """Return whether a commit that only changes the roster brings a run back to min_clusters clusters that take part."""
    wanted, staying = state.manifest.rounds.min_clusters, _staying(state)
    if len(staying) >= wanted or not state.clock.awaited:
        return False
    attestations = chain.valid_attestations(state.head, state.gathered.attested.values(), moment.wall_ms)
    noted = _noted(state, moment)
    seating = chain.seats(state.manifest, state.head, noted, attestations, state.absent, counting=False, built_on=b"")
    return len(staying | seating.clusters.keys()) >= wanted


def _ask_for_ballot(state: RoundState) -> tuple[RoundState, list[Effect]]:
    alone = sorted(slot[0].digest for slot in state.gathered.contributions.values() if len(slot) == 1)
    seconds = vote_seconds(state.head, state.manifest)
    ballot = pb.Ballot(round=state.head.round, head=state.head.digest, contributions=alone, seconds=seconds)
    return replace(state, sealing=True), [SealBallot(ballot)]


def _noted(state: RoundState, moment: Moment) -> StatementPool:
    """Return the pool with notes on absent clusters and expired evidence."""
    head, notes = state.head, []
    for name in sorted(state.absent & {*head.roster, *state.gathered.claims}):
        notes.append(pb.Exclusion(peer=name, reason=pb.REASON_ABSENT))
    if state.manifest.attestation.kinds:
        valid = chain.valid_attestations(head, state.gathered.attested.values(), moment.wall_ms)
        notes += [
            pb.Exclusion(peer=peer, reason=pb.REASON_ATTESTATION_EXPIRED)
            for peer in sorted(head.cluster_by_peer)
            if peer not in valid
        ]
    return replace(state.gathered, refusals=(*state.gathered.refusals, *notes))


def close(state: RoundState, moment: Moment) -> tuple[RoundState, SealCommit]:
    """The next round, and the commit that closes this one. Pure, and the one step that takes long in a large run."""
    now, clock, head = moment.seconds, state.clock, state.head

    def milliseconds(since: float | None, until: float | None) -> int:
        if since is None or until is None:
            return 0
        return min(LONGEST_MS, max(1, round((until - since) * 1000)))

    def measured(since: float | None, until: float | None) -> int:
        return milliseconds(since, until) if clock.measures else 0

    closing = Closing(
        at_ms=max(moment.wall_ms, head.closed_at_ms),
        open_ms=milliseconds(state.began_at, now) if head.round else 0,
        collect_ms=measured(clock.opened_at, clock.contributed_at),
        vote_ms=measured(clock.ballot_at, clock.voted_at),
    )
    commit = chain.compose(state.manifest, head, _noted(state, moment), closing)
    after = advance(state.manifest, unsigned(pb.KIND_COMMIT, head.coordinator, commit))
    fresh = RoundState(
        state.manifest,
        after,
        Clock(now, returning_until=clock.returning_until),
        now,
        gathered=StatementPool(attested=_still_waiting(state, after, moment)),
        absent=state.absent & after.roster.keys(),
    )
    return _keep_time(fresh, now), SealCommit(commit)


def _still_waiting(state: RoundState, head: Head, moment: Moment) -> dict[str, pb.Attestation]:
    """Return valid verdicts on peers outside the new roster, up to the bound: they may claim in the next round."""
    valid = chain.valid_attestations(state.head, state.gathered.attested.values(), moment.wall_ms)
    waiting, half = sorted(valid.keys() - head.attestations.keys()), limits.ATTESTATIONS // 2
    known = [peer for peer in waiting if peer in head.known_peers]
    return {peer: valid[peer] for peer in (*known[:half], *rules.strangers(waiting, head)[:half])}


def inherited(state: RoundState) -> list[Input]:
    """Return the inputs that recreate a round of `start`, all at the time of the commit before it, for a log."""
    attested = [Attested(item) for item in state.gathered.attested.values()]
    until = state.clock.returning_until
    returning = [] if until is None else [Returning(until)]
    return [Tick(), *attested, *(Absent(peer) for peer in sorted(state.absent)), *returning]


# Views.


def phase_of(state: RoundState) -> str:
    if state.head.finished:
        return "finished"
    if state.starting_since is not None:
        return "starting"
    if state.head.round == 0:
        return "gathering"
    if state.head.closing(state.manifest):
        return "closing"
    return "voting" if state.gathered.ballot is not None else "collecting"


def why_open(state: RoundState) -> str:
    """Why the round is still open, in a sentence."""
    rounds, heard, roster = state.manifest.rounds, len(_live(state)), len(state.head.roster)
    phase = phase_of(state)
    if phase == "finished":
        return "the run is finished"
    if phase == "gathering":
        return _gathering_why(state)
    if phase == "starting":
        least = several(min(rounds.min_clusters, roster), "cluster")
        return f"restarted: waiting until more than half of the roster is live, at least {least}; {heard} of {roster} are"
    if state.stands_still:
        return _below_quorum(state)
    if phase == "closing":
        return _names("waiting for the last state reports of", _waiting(state, {n for n, _ in state.gathered.reports}))
    if phase == "voting":
        return _names("waiting for the votes of", _voteless(state))
    return _names("waiting for the contributions of", _waiting(state, state.gathered.contributions))


def _gathering_why(state: RoundState) -> str:
    complete = _complete(state)
    here, wanted = len(chain.genesis_group(state.manifest, complete)), state.manifest.rounds.start_clusters
    others = len(complete) - here
    differ = f"; {several(others, 'more has', 'more have')} another initial state" if others else ""
    return f"{state.manifest.begins}: {here} of {wanted}{differ}"


def _below_quorum(state: RoundState) -> str:
    """Names the clusters that are away: those that are live can do nothing about it."""
    live, wanted = _staying(state), state.manifest.rounds.min_clusters
    away = sorted(state.head.roster.keys() - live)
    others = wanted - len(live) - len(away)
    waits = [shortly(away)] * bool(away) + [several(others, "more cluster")] * (others > 0)
    asks = f"; {several(len(_complete(state)), 'cluster requests', 'clusters request')} a seat" if state.gathered.claims else ""
    are = several(len(live), "cluster is", "clusters are")
    needs = f"the run needs {wanted} (rounds.min_clusters)"
    return f"{are} live and {needs}: no deadline passes while it waits for {' and '.join(waits)}{asks}"


def _names(what: str, clusters: Iterable[str]) -> str:
    names = sorted(clusters)
    return f"{what} {shortly(names)}" if names else "about to close"
