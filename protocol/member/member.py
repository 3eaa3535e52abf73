"""Member machine of a node: `step(state, input, now) -> state, effects`. It decides what a cluster's lead host states in a
round, and when; for a follower host it decides the consent.

A node stores its statements for the open round. It offers them again, on connect and every few seconds, until the
coordinator has acknowledged or finally rejected them. A coordinator behind our head, such as one restored from a
backup, rejects nothing finally. The machine has no clock, no I/O and no key: it requests signatures (`Sign`), and
durable statements return (`Signed`). Drivers are the daemon, the simulation and the tests.

    state before the round is ready     on the roster: report it          else: claim a seat with it
    a phase ended, its payloads stand   on the roster, round still open:  contribute
    a contribution of somebody is seen  own state known:                  have it judged (fetched and checked)
    a check of the run has work for us  not requested yet:                request it
    all on it judged, all checks ready  or three quarters of its time:    vote; the checks add what they found
    "your report differs"               replay from disk
    own state or replay contradicts     start again from an agreed state; who just did that, halts
    the lead laid its boxes out anew    sign the layout, claim a seat with it
    a box of ours is away               no vote: what it could not look at is nobody else's fault
    our lead asks for our consent       claim what it claims; nothing else is ours to say
    asked to leave                      at once, or when the round has our vote: leave; nothing more, until asked to return
    asked to return                     claim a seat; also where the coordinator holds that we leave, and we still have ours
    commit                              everything above begins anew
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dilocox.protocol import events, limits
from dilocox.protocol.consensus import checks
from dilocox.protocol.consensus.head import Head
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.member import voting
from dilocox.protocol.member.member_io import (
    Answered,
    Asked,
    Attestation,
    Away,
    CheckInput,
    Committed,
    Connected,
    Differs,
    Effect,
    Emit,
    Halt,
    Input,
    Judge,
    Judged,
    Laid,
    LeaveRun,
    PhaseEnded,
    Recheck,
    Rechecked,
    Resynchronise,
    Return,
    Seen,
    Sign,
    Signed,
    StateReady,
    Tick,
    Whole,
)
from dilocox.protocol.member.member_state import MemberState, OpenRound
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement

__all__ = ["consent", "next_deadline", "offers", "parted", "start", "step"]

VOTE_SHARE = 0.75
"""Part of a ballot's time after which a voter sends the verdicts that it has."""
HEALED_BY_TIME = frozenset({pb.REASON_RATE, pb.REASON_FUTURE_ROUND, pb.REASON_UNAVAILABLE, pb.REASON_NOT_ATTESTED})
"""Reasons of rejections after which the same statement may be accepted: it is offered again."""
WRONG_SEED = (
    "the run file names the initial state {named}, but its model and seed give {made}: [model] changed after "
    "`dilocox init`. The owner runs `dilocox check RUN.toml`, corrects seed_state, and sends the new link."
)
STATES_KEPT = 64
"""Number of own state roots remembered: more than the rounds that can be in dispute."""


def start(manifest: Manifest, me: str, head: Head, serial: int = 0, lead: str = "", account: bytes = b"") -> MemberState:
    """Return the first state. `serial`: that of the newest claim, layout or departure that any incarnation of this node
    signed. `lead`: lead host of this host's cluster."""
    attestation = Attestation(False, "no evidence was given yet") if manifest.attestation.kinds else None
    return MemberState(manifest, me, head, serial=serial, lead=lead, account=account, attestation=attestation)


def step(state: MemberState, event: Input, now: float) -> tuple[MemberState, list[Effect]]:
    """Apply one input. Never raises on anything that others can cause."""
    effects: list[Effect] = []
    state = _received(state, event)
    match event:
        case Connected():
            state = replace(state, connected=True, open=replace(state.open, held=frozenset(), refused={}))
        case Away():
            state = replace(state, connected=False)
        case Committed(commit, after):
            state, effects = _committed(state, commit.body, after)
        case Seen(statement):
            state = _seen(state, statement, now)
        case StateReady(round, root, loss):
            measured = loss if round == state.head.round else state.open.loss
            state = _in_round(replace(state, roots=_newest(state.roots, round, root)), loss=measured)
            state, effects = _compare(state, round)
            if state.head.round == 0 and state.head.state not in (b"", root):
                effects = [*effects, Halt(WRONG_SEED.format(made=root.hex(), named=state.head.state.hex()))]
        case PhaseEnded():
            effects = _contribute(state, event)
        case Judged(contribution, verdict):
            if contribution in state.open.judging:  # a verdict that was asked for before we started again is on another base
                state = _in_round(state, verdicts={**state.open.verdicts, contribution: verdict})
        case Signed(statement):
            state = _signed(state, statement)
        case Answered():
            state = _answered(state, event)
        case Differs(round):
            if round == state.head.round and round in state.roots and not state.open.rechecking:
                state = _in_round(state, rechecking=True)
                effects = [Recheck(round)]
        case Rechecked(round, root):
            state, effects = _rechecked(state, round, root)
        case Attestation():
            state = replace(state, attestation=event)
        case Laid(hosts):
            if hosts != state.hosts:
                state = replace(_without(state, pb.KIND_CLUSTER, pb.KIND_CLAIM), hosts=hosts)
        case Whole(here):
            if here and not state.whole and state.open.ballot is not None:  # the box that is back has time to look
                again = now + (1 - VOTE_SHARE) * state.open.ballot.body.seconds
                state = _in_round(state, vote_by=max(again, state.open.vote_by or 0.0))
            state = replace(state, whole=here)
        case Asked(claim):
            if claim != state.asked:
                state = replace(_without(state, pb.KIND_CLAIM), asked=claim)
        case LeaveRun(finishing):
            state = replace(state, leaving=state.leaving or not finishing, finishing=state.head.round)
        case Return():
            state = replace(state, leaving=False, finishing=None)
        case Tick() | CheckInput():
            pass
    return _speak(state, effects, now)


def _received(state: MemberState, event: Input | Resynchronise) -> MemberState:
    """Return the state with what the run's checks know after an input."""
    active = checks.of(state.manifest)
    return replace(state, checks={check.name: check.receive(state, event) for check in active}) if active else state


def _committed(state: MemberState, commit: pb.Commit, after: Head) -> tuple[MemberState, list[Effect]]:
    """Close the round: all its statements are over."""
    effects: list[Effect] = []
    if not state.leaving:
        effects += [Emit(told) for told in events.NobodyCounted.by(commit)]
        mine = [item for item in commit.excluded if item.peer == state.me and item.reason != pb.REASON_TOO_FEW_CLUSTERS]
        effects += [Emit(events.NotCounted(commit.round, item.reason, item.detail)) for item in mine]
    if after.finished:
        effects.append(Emit(events.RunFinished(commit.trained)))
    if _left_out(state, commit):
        effects.append(Emit(events.LeftOut(commit.round)))
    state = replace(
        state,
        head=after,
        agreed=_newest(state.agreed, commit.round, commit.state) if commit.state else state.agreed,
        open=OpenRound(),
    )
    state, compared = _compare(state, commit.round)
    return state, [*effects, *compared]


def _in_round(state: MemberState, **changes: Any) -> MemberState:
    """Return the state with these changes of what is of the open round."""
    return replace(state, open=replace(state.open, **changes))


def _left_out(state: MemberState, commit: pb.Commit) -> bool:
    """Whether votes were counted without our contribution, though the coordinator had accepted it."""
    own = state.open.own.get(pb.KIND_CONTRIBUTION)
    if own is None or own.digest not in state.open.held or not commit.HasField("ballot"):
        return False
    return own.envelope.body not in [signed.body for signed in commit.contributions]


def _newest(roots: Mapping[int, bytes], round: int, root: bytes) -> dict[int, bytes]:
    return dict(sorted({**roots, round: root}.items())[-STATES_KEPT:])


def _compare(state: MemberState, round: int) -> tuple[MemberState, list[Effect]]:
    """Our state before a round with the run's, as soon as both are known."""
    mine, agreed = state.roots.get(round), state.agreed.get(round)
    if mine is None or agreed is None:
        return state, []
    if mine == agreed:
        return replace(state, anew=False), []
    return _start_again(state, round, f"memory contains {_short(mine)}, the run {_short(agreed)}")


def _start_again(state: MemberState, round: int, detail: str) -> tuple[MemberState, list[Effect]]:
    """Start again from a state that the run agreed on. A node that has just done so and still differs would always differ."""
    if state.anew:
        why = f"before round {round} {detail}, although this node restarted from a state that the run agreed on"
        return state, [
            Halt(f"{why}: this machine computes other results than the rest of the run, or the run agreed on a false state")
        ]
    own = {kind: statement for kind, statement in state.open.own.items() if kind != pb.KIND_STATE_REPORT}
    again = Resynchronise(round, detail)
    return _in_round(replace(_received(state, again), roots={}, anew=True), own=own, judging=frozenset(), verdicts={}), [again]


def _short(root: bytes) -> str:
    return root.hex()[:12] + "…"


def _seen(state: MemberState, statement: Statement[Any], now: float) -> MemberState:
    head = state.head
    if (statement.body.round, statement.body.head) != (head.round, head.digest):
        return state
    if statement.kind == pb.KIND_CONTRIBUTION and statement.peer in head.roster:
        if statement.peer == state.me:  # an earlier incarnation announced it, and the disk lost it
            return _signed(state, statement) if pb.KIND_CONTRIBUTION not in state.open.own else state
        if len(state.open.seen) < 2 * limits.CLUSTERS:
            return _in_round(state, seen={**state.open.seen, statement.digest: statement})
    if statement.kind == pb.KIND_BALLOT and statement.peer == head.coordinator and state.open.ballot is None:
        state = _in_round(state, ballot=statement, vote_by=now + VOTE_SHARE * statement.body.seconds)
        return state if state.open.voted is None else _signed(state, state.open.voted)
    return state


def _contribute(state: MemberState, phase: PhaseEnded) -> list[Effect]:
    """Contribute. Does nothing if the round is closed: the commit returns the work to the error feedback."""
    head, cluster = state.head, state.head.roster.get(state.me)
    said = pb.KIND_CONTRIBUTION in state.open.own or pb.KIND_CONTRIBUTION in state.open.signing
    if phase.round != head.round or cluster is None or said or head.closing(state.manifest):
        return []
    return [Sign(pb.KIND_CONTRIBUTION, phase.contribution(head, cluster))]


def _is_open(state: MemberState, body: Any) -> bool:
    """Whether a statement of ours is about the open round."""
    head = state.head
    if isinstance(body, pb.Receipt):
        return bool(body.round == head.round and state.open.ballot is not None and body.ballot == state.open.ballot.signing)
    if isinstance(body, (pb.Claim, pb.Cluster, pb.Leave)):
        return head.names(body)
    return bool((body.round, body.head) == (head.round, head.digest))


def _signed(state: MemberState, statement: Statement[Any]) -> MemberState:
    serial = max(state.serial, getattr(statement.body, "serial", 0))
    state = replace(state, serial=serial)
    if statement.kind == pb.KIND_RECEIPT and state.open.ballot is None:
        return _in_round(state, voted=statement)
    if statement.peer != state.me or not _is_open(state, statement.body):
        return state
    refused = {kind: why for kind, why in state.open.refused.items() if kind != statement.kind}
    own = _newest_wish({**state.open.own, statement.kind: statement})
    return _in_round(state, own=own, refused=refused, signing=state.open.signing - {statement.kind})


def _without(state: MemberState, *kinds: pb.Kind) -> MemberState:
    """Withdraw statements of these kinds: a new one needs a higher serial."""
    own = {kind: statement for kind, statement in state.open.own.items() if kind not in kinds}
    refused = {kind: why for kind, why in state.open.refused.items() if kind not in kinds}
    return _in_round(state, own=own, refused=refused, signing=state.open.signing - set(kinds))


def _newest_wish(own: dict[pb.Kind, Statement[Any]]) -> dict[pb.Kind, Statement[Any]]:
    """Return the newer of a claim and a departure in one round: only it counts. A node that left and is back claims again."""
    wishes = sorted((kind for kind in (pb.KIND_CLAIM, pb.KIND_LEAVE) if kind in own), key=lambda kind: own[kind].body.serial)
    return {kind: statement for kind, statement in own.items() if kind not in wishes[:-1]}


def _answered(state: MemberState, answer: Answered) -> MemberState:
    """Record an answer. A rejection is final only from a coordinator at our head, and for a reason that time cannot heal."""
    statement, outcome, reason = answer.statement, answer.outcome, answer.reason
    if state.open.own.get(statement.kind) is None or state.open.own[statement.kind].digest != statement.digest:
        return state
    claim = statement.kind == pb.KIND_CLAIM
    elsewhere = answer.head is not None and answer.head != state.head.digest
    if outcome is Outcome.REJECT and (elsewhere or reason in HEALED_BY_TIME):
        return state
    if outcome is Outcome.REJECT:
        away = (reason, answer.detail) if claim else state.turned_away
        return _in_round(
            replace(state, turned_away=away), refused={**state.open.refused, statement.kind: (reason, answer.detail)}
        )
    gone = statement.kind == pb.KIND_LEAVE and reason == pb.REASON_NOT_ON_ROSTER
    if outcome is not Outcome.ACCEPT and reason != pb.REASON_UNSPECIFIED and not gone:
        return state
    away = None if claim else state.turned_away
    return _in_round(replace(state, turned_away=away), held=state.open.held | {statement.digest})


def _rechecked(state: MemberState, round: int, root: bytes) -> tuple[MemberState, list[Effect]]:
    if round != state.head.round or round not in state.roots:
        return state, []
    if root != state.roots[round]:
        return _start_again(state, round, "replaying the last commit from disk gives another state than the one in memory")
    own = state.open.own.get(pb.KIND_STATE_REPORT)
    if own is not None and own.body.replayed:  # stated already, after a restart from an agreed state
        return state, []
    body = pb.StateReport(round=round, head=state.head.digest, state=root, replayed=True)
    return state, [Sign(pb.KIND_STATE_REPORT, body)] if state.on_roster else []


# Consequences of the state: the same for every input.


def _speak(state: MemberState, effects: list[Effect], now: float) -> tuple[MemberState, list[Effect]]:
    """Ask for what is due and not asked for yet."""
    state = _in_round(state, signing=state.open.signing | {effect.kind for effect in effects if isinstance(effect, Sign)})
    if state.finishing is not None and not _owes(state):
        state = replace(state, leaving=True)
    if state.lead and not state.on_roster:  # a node that led its own cluster leaves that first
        return _ask(state, effects, _consenting(state))
    if state.leaving or state.lead:
        leave = pb.Leave(serial=state.serial + 1, round=max(1, state.head.round), head=state.head.digest)
        return _ask(state, effects, [(pb.KIND_LEAVE, leave)] if _named(state) else [])
    if state.root is None or state.head.finished:
        return state, effects
    unjudged = [digest for digest in state.open.seen if digest not in state.open.judging]
    effects = [*effects, *(Judge(state.open.seen[digest]) for digest in unjudged)]
    state = _in_round(state, judging=state.open.judging | set(unjudged)) if unjudged else state
    for check in checks.of(state.manifest):
        known, requests = check.request(state)
        state = replace(state, checks={**state.checks, check.name: known}) if requests else state
        effects = [*effects, *requests]
    return _ask(state, effects, _due(state, now))


def _ask(state: MemberState, effects: list[Effect], due: list[tuple[pb.Kind, Any]]) -> tuple[MemberState, list[Effect]]:
    for kind, body in due:
        if kind not in state.open.own and kind not in state.open.signing:
            serial = max(state.serial, getattr(body, "serial", 0))
            state = _in_round(replace(state, serial=serial), signing=state.open.signing | {kind})
            effects = [*effects, Sign(kind, body)]
    return state, effects


def _due(state: MemberState, now: float) -> list[tuple[pb.Kind, Any]]:
    due: list[tuple[pb.Kind, Any]] = []
    if state.on_roster:
        due.append((pb.KIND_STATE_REPORT, _report(state)))
        if (receipt := _vote(state, now)) is not None:
            due.append((pb.KIND_RECEIPT, receipt))
    if (not state.seated or pb.KIND_LEAVE in state.open.own) and _may_claim(state):
        if state.hosts and pb.KIND_CLUSTER not in state.open.own:
            due.append((pb.KIND_CLUSTER, _layout(state)))
        else:
            due.append((pb.KIND_CLAIM, _claim(state)))
    return due


def _owes(state: MemberState) -> bool:
    """Whether the round that we finish is open, and waits for something of ours: our vote, or in the closing round our report."""
    if not state.on_roster or state.head.finished or state.head.round != state.finishing:
        return False
    last = pb.KIND_STATE_REPORT if state.head.closing(state.manifest) else pb.KIND_RECEIPT
    said = state.open.own.get(last)
    return said is None or not (said.digest in state.open.held or last in state.open.refused)


def _named(state: MemberState) -> bool:
    """Return whether the coordinator may think that this node takes part: without a claim there is nothing to withdraw."""
    return state.on_roster or pb.KIND_CLAIM in state.open.own or pb.KIND_CLAIM in state.open.signing


def parted(state: MemberState) -> bool:
    """Return whether this node left, and the coordinator has acknowledged it."""
    return state.leaving and (pb.KIND_LEAVE in state.open.own or not _named(state)) and not offers(state)


def _may_claim(state: MemberState) -> bool:
    return state.attestation is None or state.attestation.holds


def _layout(state: MemberState) -> pb.Cluster:
    head = state.head
    hosts = [pb.Host(peer=h.peer, first_stage=h.first_stage, stage_count=h.stage_count, copy=h.copy) for h in state.hosts]
    return pb.Cluster(serial=state.serial + 1, round=max(1, head.round), head=head.digest, hosts=hosts)


def _claim(state: MemberState) -> pb.Claim:
    head, layout = state.head, state.open.own.get(pb.KIND_CLUSTER)
    return pb.Claim(
        serial=state.serial + 1,
        round=max(1, head.round),
        head=head.digest,
        state=state.root or b"",
        cluster=layout.digest if layout else b"",
        account=state.account,
    )


def consent(state: MemberState) -> pb.Claim | None:
    """Return the claim for the other hosts of this cluster, each with its own serial: the lead host's state and layout."""
    waits = state.root is not None and not state.seated and not state.leaving
    if not waits or pb.KIND_CLUSTER not in state.open.own:
        return None
    claim = _claim(state)
    claim.ClearField("serial")
    claim.ClearField("account")  # what a cluster earns is its lead's
    return claim


def _consenting(state: MemberState) -> list[tuple[pb.Kind, Any]]:
    asked = state.asked
    if asked is None or not state.head.names(asked) or state.leaving or not _may_claim(state):
        return []
    claim = pb.Claim(serial=state.serial + 1, round=asked.round, head=asked.head, state=asked.state, cluster=asked.cluster)
    return [(pb.KIND_CLAIM, claim)]


def _report(state: MemberState) -> pb.StateReport:
    measured = state.open.loss is not None
    return pb.StateReport(
        round=state.head.round,
        head=state.head.digest,
        state=state.root or b"",
        replayed=state.anew,
        evaluated=measured,
        evaluation_loss=min(limits.LOSS, state.open.loss or 0.0),
    )


def _vote(state: MemberState, now: float) -> pb.Receipt | None:
    """Return the vote on the ballot: when all verdicts exist, or when time is short. A cluster that is not on the ballot
    has no vote. While a host of this cluster is missing there is no vote, because its missing verdicts prove nothing
    about other clusters."""
    ballot, own = state.open.ballot, state.open.own.get(pb.KIND_CONTRIBUTION)
    said = pb.KIND_RECEIPT in state.open.own or pb.KIND_RECEIPT in state.open.signing
    if ballot is None or own is None or said or not _has_vote(state) or not state.whole:
        return None
    listed = list(ballot.body.contributions)
    pressing = state.open.vote_by is not None and now >= state.open.vote_by
    judged = all(digest in state.open.verdicts for digest in listed if digest != own.digest)
    active = checks.of(state.manifest)
    if not pressing and not (judged and all(check.may_vote(state) for check in active)):
        return None
    rejected = {digest: verdict for check in active for digest, verdict in check.rejects(state).items()}
    receipt = voting.receipt(ballot, own.digest, state.open.verdicts, rejected)
    for check in active:
        check.fill_receipt(state, receipt)
    return receipt


def _has_vote(state: MemberState) -> bool:
    ballot, own = state.open.ballot, state.open.own.get(pb.KIND_CONTRIBUTION)
    return ballot is not None and own is not None and own.digest in ballot.body.contributions


def offers(state: MemberState) -> list[Statement[Any]]:
    """Return statements that the coordinator should have and has not acknowledged: they are sent now, and again until it
    does."""
    return [
        s for kind, s in sorted(state.open.own.items()) if s.digest not in state.open.held and kind not in state.open.refused
    ]


def next_deadline(state: MemberState) -> float | None:
    """When a Tick could change something."""
    waits = state.root is not None and not state.leaving and not state.head.finished and state.on_roster
    return state.open.vote_by if waits and state.whole and _has_vote(state) and pb.KIND_RECEIPT not in state.open.own else None
