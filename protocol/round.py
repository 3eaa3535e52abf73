"""The round machine: `step(state, input, now) -> state, effects`.

Everything that decides whether and when a round closes lives in this file and in rules.py. The machine has no clock, no I/O and no
randomness: a coordinator logs its inputs with their times before it carries out the effects, and a restart that replays the log
stands in exactly the same state.

    round 0         claims ──────────────(start_clusters complete, equal states)──────────────► genesis commit
    round 1…count   collecting ──(all present contributed, or deadline)──► voting ──(all voted, or deadline)──► commit
    round count+1   reports ──(all present reported, or deadline)──► closing commit; finished

While fewer than min_clusters have contributed, absence alone never closes a round: a minority cannot run ahead. With no
contribution at all the machine waits for ever, so an outage of the coordinator's own network costs nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dilocox.protocol import chain, limits, rules
from dilocox.protocol.chain import Gathered, Head
from dilocox.protocol.ids import short
from dilocox.protocol.manifest import Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import ACCEPT, Judgement, Outcome, ignore, reject

__all__ = [
    "Absent",
    "Attested",
    "Differ",
    "Effect",
    "Input",
    "Present",
    "Received",
    "Refused",
    "Relay",
    "Reply",
    "Resumed",
    "RoundState",
    "SealBallot",
    "SealCommit",
    "Tick",
    "next_deadline",
    "start",
    "step",
]


@dataclass(frozen=True)
class Received:
    """A statement with a valid signature for this run."""

    statement: Statement


@dataclass(frozen=True)
class Refused:
    """A message that never became a statement; `peer` is unproven."""

    peer: str
    reason: pb.Reason
    detail: str


@dataclass(frozen=True)
class Absent:
    """The peer was not heard from within the liveness window."""

    peer: str


@dataclass(frozen=True)
class Present:
    peer: str


@dataclass(frozen=True)
class Attested:
    """A peer's evidence holds, by the coordinator's verdict."""

    attestation: pb.Attestation


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Resumed:
    """The coordinator was away and is back: waiting starts afresh, nobody is late for its absence."""


@dataclass(frozen=True)
class Reply:
    """The answer to the sender of the statement just received."""

    judgement: Judgement


@dataclass(frozen=True)
class Relay:
    """Send a peer's statement on to everyone."""

    statement: Statement


@dataclass(frozen=True)
class SealBallot:
    """Sign and send."""

    body: pb.Ballot


@dataclass(frozen=True)
class SealCommit:
    """Sign and send."""

    body: pb.Commit


@dataclass(frozen=True)
class Differ:
    """Peers report different states: all of them should replay."""

    round: int
    peers: tuple[str, ...]


Input = Received | Refused | Absent | Present | Resumed | Attested | Tick
Effect = Reply | Relay | SealBallot | SealCommit | Differ


@dataclass(frozen=True)
class RoundState:
    manifest: Manifest
    head: Head
    opened_at: float
    """Seconds since 1970, of the input that opened this round."""
    claims: Mapping[str, Statement] = field(default_factory=dict)
    """By peer; the newest that builds on the head."""
    leaves: Mapping[str, Statement] = field(default_factory=dict)
    contributions: Mapping[bytes, Statement] = field(default_factory=dict)
    """By digest. Two of one peer are an equivocation; both are kept as its proof."""
    receipts: Mapping[str, Statement] = field(default_factory=dict)
    """By peer. Never of a peer in `voided`."""
    voided: frozenset[str] = frozenset()
    """Peers that signed two receipts for this round: neither counts."""
    reports: Mapping[tuple[str, bool], Statement] = field(default_factory=dict)
    """By peer and whether replayed."""
    refusals: tuple[pb.Exclusion, ...] = ()
    attested: Mapping[str, pb.Attestation] = field(default_factory=dict)
    """By peer: verdicts since the last commit, and of peers that still wait for a place."""
    absent: frozenset[str] = frozenset()
    ballot_at: float | None = None
    """When voting began; None while collecting."""
    collect_history: tuple[float, ...] = ()
    """Seconds from opening to the last contribution, of the last complete rounds."""
    vote_history: tuple[float, ...] = ()


def start(manifest: Manifest, now: float) -> RoundState:
    return RoundState(manifest, chain.initial_head(), opened_at=now)


def step(state: RoundState, event: Input, now: float) -> tuple[RoundState, list[Effect]]:
    """Apply one input. Never raises on anything a peer can cause."""
    effects: list[Effect] = []
    match event:
        case Received(statement):
            state, judgement, effects = _receive(state, statement)
            effects = [Reply(judgement), *effects]
        case Refused(peer, reason, detail):
            state = _refuse(state, peer, reason, detail)
        case Absent(peer):
            state = replace(state, absent=state.absent | {peer})
        case Present(peer):
            state = replace(state, absent=state.absent - {peer})
        case Resumed():
            ballot_at = None if state.ballot_at is None else now
            state = replace(state, opened_at=now, ballot_at=ballot_at, absent=frozenset())
        case Attested(attestation):
            state = _attest(state, attestation)
        case Tick():
            pass
    state, more = _progress(state, now)
    return state, effects + more


def next_deadline(state: RoundState) -> float | None:
    """When a Tick could change something; None when only a statement can."""
    rounds = state.manifest.rounds
    if state.head.finished or state.head.round == 0:
        return None
    if state.head.round > rounds.count:
        return state.opened_at + rounds.vote_seconds
    if state.ballot_at is not None:
        return state.ballot_at + rules.deadline_seconds(state.vote_history, rounds.vote_seconds)
    if not state.contributions:
        return None
    return state.opened_at + rules.deadline_seconds(state.collect_history, rounds.deadline_seconds)


# Receiving: one function per kind, `(state, statement) -> state, judgement, effects`.

Received_ = tuple[RoundState, Judgement, list[Effect]]


def _receive(state: RoundState, statement: Statement) -> Received_:
    if state.head.finished:
        return state, ignore(pb.REASON_RUN_FINISHED, "the run has closed its last round"), []
    state, judgement, effects = _RECEIVERS[statement.kind](state, statement)
    if judgement.outcome is Outcome.REJECT:
        state = _refuse(state, statement.peer, judgement.reason, judgement.detail)
    return state, judgement, effects


def _refuse(state: RoundState, peer: str, reason: pb.Reason, detail: str) -> RoundState:
    entry = pb.Exclusion(peer=peer[: limits.TEXT_CHARACTERS], reason=reason, detail=detail)
    if state.head.finished or len(state.refusals) >= limits.REFUSALS_PER_ROUND or entry in state.refusals:
        return state
    return replace(state, refusals=(*state.refusals, entry))


def _attest(state: RoundState, attestation: pb.Attestation) -> RoundState:
    if len(state.attested) >= limits.ATTESTATIONS and attestation.peer not in state.attested:
        return state
    return replace(state, attested={**state.attested, attestation.peer: attestation})


def _receive_claim(state: RoundState, statement: Statement) -> Received_:
    body: pb.Claim = statement.body
    admission, stages = state.manifest.admission, state.manifest.model.stages
    if admission.policy == "allow-list" and statement.peer not in admission.allow:
        return state, reject(pb.REASON_NOT_ADMITTED, f"{short(statement.peer)} is not on the run's allow-list"), []
    known_evidence = {*state.attested, *state.head.attestations}
    if state.manifest.attestation.kinds and statement.peer not in known_evidence:
        return state, reject(pb.REASON_NOT_ATTESTED, "the run asks for evidence; none of this peer holds"), []
    if state.head.round > state.manifest.rounds.count:
        return state, ignore(pb.REASON_RUN_FINISHED, "the run has closed its last round"), []
    expected = (max(1, state.head.round), state.head.digest)
    if (body.round, body.head) != expected:
        return (
            state,
            ignore(pb.REASON_STALE_ROUND, f"the claim is for round {body.round}; round {expected[0]} is open"),
            [],
        )
    if body.first_stage + body.stage_count > stages:
        return state, reject(pb.REASON_WRONG_STAGES, f"the run has {stages} stages"), []
    agreed = {s.stage: s.digest for r in state.reports.values() for s in r.body.states}
    if any(agreed.get(s.stage, s.digest) != s.digest for s in body.states) and state.head.round:
        return state, reject(pb.REASON_WRONG_BASE, "its state differs from the state the others report"), []
    if (known := state.claims.get(statement.peer)) and known.digest == statement.digest:
        return state, ignore(pb.REASON_UNSPECIFIED, "already claimed"), []
    if len(state.claims) >= limits.CLUSTERS and statement.peer not in state.claims:
        return state, reject(pb.REASON_RATE, f"{limits.CLUSTERS} peers are waiting already"), []
    return replace(state, claims={**state.claims, statement.peer: statement}), ACCEPT, []


def _receive_leave(state: RoundState, statement: Statement) -> Received_:
    here = rules.cluster_of(state.head.roster, statement.peer) or statement.peer in state.claims
    if not here or statement.peer in state.leaves:
        return state, ignore(pb.REASON_NOT_ON_ROSTER, "not here, or already leaving"), []
    claims = {peer: claim for peer, claim in state.claims.items() if peer != statement.peer}
    return replace(state, claims=claims, leaves={**state.leaves, statement.peer: statement}), ACCEPT, []


def _receive_contribution(state: RoundState, statement: Statement) -> Received_:
    head = state.head
    if statement.digest in state.contributions:
        return state, ignore(pb.REASON_UNSPECIFIED, "already received"), []
    judgement = rules.judge_contribution(
        statement, state.manifest, head.round, head.digest, head.roster, head.ledger, head.attestations
    )
    if judgement.outcome is not Outcome.ACCEPT:
        return state, judgement, []
    mine = [digest for digest, other in state.contributions.items() if other.peer == statement.peer]
    if len(mine) > 1:
        return state, ignore(pb.REASON_EQUIVOCATION, "two are proof enough"), []
    if state.ballot_at is not None and not mine:
        return state, ignore(pb.REASON_LATE, f"round {head.round} is being voted on"), []
    state = replace(state, contributions={**state.contributions, statement.digest: statement})
    if mine:
        detail = "it signed two different contributions for one round; neither counts"
        return state, reject(pb.REASON_EQUIVOCATION, detail), [Relay(statement)]
    return state, ACCEPT, [Relay(statement)]


def _receive_receipt(state: RoundState, statement: Statement) -> Received_:
    body: pb.Receipt = statement.body
    if (body.round, body.head) != (state.head.round, state.head.digest):
        return state, ignore(pb.REASON_STALE_ROUND, f"round {state.head.round} is open"), []
    if state.ballot_at is None:
        return state, reject(pb.REASON_FUTURE_ROUND, "voting has not begun"), []
    if statement.peer not in {other.peer for other in state.contributions.values()}:
        return state, reject(pb.REASON_NOT_ON_ROSTER, "only contributors vote"), []
    known = state.receipts.get(statement.peer)
    if statement.peer in state.voided or (known and known.digest == statement.digest):
        return state, ignore(pb.REASON_UNSPECIFIED, "already received"), []
    if known:
        receipts = {peer: receipt for peer, receipt in state.receipts.items() if peer != statement.peer}
        state = replace(state, receipts=receipts, voided=state.voided | {statement.peer})
        return (
            state,
            reject(pb.REASON_EQUIVOCATION, "it signed two different receipts for one round; neither counts"),
            [],
        )
    return replace(state, receipts={**state.receipts, statement.peer: statement}), ACCEPT, []


def _receive_state_report(state: RoundState, statement: Statement) -> Received_:
    body: pb.StateReport = statement.body
    slot = (statement.peer, bool(body.replayed))
    if (body.round, body.head) != (state.head.round, state.head.digest) or slot in state.reports:
        return state, ignore(pb.REASON_STALE_ROUND, f"round {state.head.round} is open, or already reported"), []
    cluster = rules.cluster_of(state.head.roster, statement.peer)
    if cluster is None or [s.stage for s in body.states] != cluster.stages_of(statement.peer):
        return state, reject(pb.REASON_WRONG_STAGES, "its stages are not the ones it claimed"), []
    others = {s.stage: s.digest for r in state.reports.values() for s in r.body.states}
    state = replace(state, reports={**state.reports, slot: statement})
    if any(others.get(s.stage, s.digest) != s.digest for s in body.states):
        return state, ACCEPT, [Differ(state.head.round, tuple(sorted({peer for peer, _ in state.reports})))]
    return state, ACCEPT, []


_RECEIVERS: dict[int, Callable[[RoundState, Statement], Received_]] = {
    pb.KIND_CLAIM: _receive_claim,
    pb.KIND_LEAVE: _receive_leave,
    pb.KIND_CONTRIBUTION: _receive_contribution,
    pb.KIND_RECEIPT: _receive_receipt,
    pb.KIND_STATE_REPORT: _receive_state_report,
}
RECEIVED_KINDS = tuple(_RECEIVERS)


# Progress: does the round close now?


def _progress(state: RoundState, now: float) -> tuple[RoundState, list[Effect]]:
    if state.head.finished:
        return state, []
    if state.head.round == 0:
        groups = chain.genesis_groups(state.manifest, _admitted_claims(state, now))
        return _close(state, now) if groups and len(groups[0]) >= state.manifest.start_clusters else (state, [])
    deadline = next_deadline(state)
    late = deadline is not None and now >= deadline
    if state.head.round > state.manifest.rounds.count:
        reported = {peer for peer, _ in state.reports}
        return _close(state, now) if late or _waiting(state, reported) == set() else (state, [])
    if state.ballot_at is None:
        return _open_ballot(state, now) if late or _all_contributed(state) else (state, [])
    voters = {statement.peer for statement in state.contributions.values()} - state.absent - set(state.leaves)
    return _close(state, now) if late or voters <= {*state.receipts, *state.voided} else (state, [])


def _admitted_claims(state: RoundState, now: float) -> list[Statement]:
    """Claims of peers whose attestation is valid, where the run asks for one."""
    if not state.manifest.attestation.kinds:
        return list(state.claims.values())
    valid = chain.valid_attestations(state.head, state.attested.values(), int(1000 * now))
    return [claim for claim in state.claims.values() if claim.peer in valid]


def _expired(state: RoundState, peers: Iterable[str], now: float) -> list[pb.Exclusion]:
    """Roster peers whose attestation ran out: off the next roster, with the reason."""
    if not state.manifest.attestation.kinds:
        return []
    valid = chain.valid_attestations(state.head, state.attested.values(), int(1000 * now))
    detail = "its attestation expired and was not renewed"
    return [
        pb.Exclusion(peer=peer, reason=pb.REASON_ATTESTATION_EXPIRED, detail=detail)
        for peer in sorted(peers)
        if peer not in valid
    ]


def _waiting(state: RoundState, done: Iterable[str]) -> set[str]:
    """Roster peers that are present, not leaving and not done."""
    peers = {peer for cluster in state.head.roster.values() for peer in cluster.peers}
    return peers - set(done) - state.absent - set(state.leaves)


def _all_contributed(state: RoundState) -> bool:
    done = {statement.peer for statement in state.contributions.values()}
    complete = [c for c in state.head.roster.values() if done.issuperset(c.peers)]
    everyone = len(complete) == len(state.head.roster)
    return bool(complete) and not _waiting(state, done) and (everyone or len(complete) >= state.manifest.rounds.min_clusters)


def _open_ballot(state: RoundState, now: float) -> tuple[RoundState, list[Effect]]:
    ballot = pb.Ballot(round=state.head.round, head=state.head.digest, contributions=sorted(state.contributions))
    state = replace(state, ballot_at=now, collect_history=_remember(state.collect_history, now - state.opened_at))
    state, more = _progress(state, now)  # a lone contributor has nobody to wait for
    return state, [SealBallot(ballot), *more]


def _remember(history: tuple[float, ...], seconds: float) -> tuple[float, ...]:
    return (*history, seconds)[-rules.DEADLINE_HISTORY :]


def _close(state: RoundState, now: float) -> tuple[RoundState, list[Effect]]:
    peers = {peer for cluster in state.head.roster.values() for peer in cluster.peers}
    missing = [
        pb.Exclusion(peer=peer, reason=pb.REASON_ABSENT, detail="not heard from within the liveness window")
        for peer in sorted(peers & state.absent)
    ]
    gathered = Gathered(
        claims=_by_digest(state.claims.values()),
        leaves=_by_digest(state.leaves.values()),
        contributions=_by_digest(state.contributions.values()),
        receipts=_by_digest(state.receipts.values()),
        reports=_by_digest(state.reports.values()),
        refusals=[*state.refusals, *missing, *_expired(state, peers, now)],
        attested=[state.attested[peer] for peer in sorted(state.attested)],
        ballot_at_ms=int(1000 * (state.ballot_at or 0)),
        closed_at_ms=int(1000 * now),
    )
    commit = chain.compose(state.manifest, state.head, gathered)
    body = commit.SerializeToString(deterministic=True)
    envelope = pb.Envelope(kind=pb.KIND_COMMIT, body=body)
    head = chain.advance(state.manifest, Statement(pb.KIND_COMMIT, "", commit, envelope))
    votes = state.vote_history if state.ballot_at is None else _remember(state.vote_history, now - state.ballot_at)
    fresh = RoundState(
        state.manifest,
        head,
        opened_at=now,
        absent=state.absent,
        attested=_still_waiting(state, head, now),
        collect_history=state.collect_history,
        vote_history=votes,
    )
    return fresh, [SealCommit(commit)]


def _still_waiting(state: RoundState, head: Head, now: float) -> dict[str, pb.Attestation]:
    """Valid verdicts of peers that the new roster does not name: they may claim a place in the next round."""
    valid = chain.valid_attestations(state.head, state.attested.values(), int(1000 * now))
    return {peer: item for peer, item in valid.items() if peer not in head.attestations}


def _by_digest(statements: Iterable[Statement]) -> list[Statement]:
    return sorted(statements, key=lambda statement: statement.digest)
