"""Explorer of random faults on a simulated swarm of the product's machines; it checks the invariants.

Hypothesis draws schedules of faults and shrinks those that break something. `DILOCOX_SCHEDULES=20000 pytest tests/sim
-k whatever` tries more of them.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.consensus import chain
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine as round
from dilocox.protocol.run.manifest import Availability, Manifest
from dilocox.protocol.wire.messages import seal
from tests.helpers import COORDINATOR, digest, identity, manifest
from tests.sim.swarm import Swarm

SCHEDULES = int(os.environ.get("DILOCOX_SCHEDULES", "200"))
PEERS = 5
FAULTS_END = 150.0
"""Seconds from the beginning, after which every peer works that will ever work again."""
PATIENCE = 1500.0
"""Then the run must be over: a few full deadlines of every kind."""
RUN = manifest(
    rounds={
        "count": 8,
        "inner_steps": 8,
        "max_inner_steps": 24,
        "min_clusters": 2,
        "start_clusters": 3,
        "deadline_seconds": 60,
        "vote_seconds": 20,
        "liveness_seconds": 5,
    },
    scoring={"voters": 2},
)
BOUND = RUN.model_copy(update={"model": RUN.model.model_copy(update={"seed_state": digest("initial").hex()})})
"""A run with a manifest that names the initial state."""
SHARES = RUN.model_copy(update={"availability": Availability()})
AUTHOR_CUT_OFF_FROM_A_RESTORED_COORDINATOR: tuple[list[tuple[str, Any, float, float]], list[int], int] = (
    [
        ("cut coordinator", 0, 69.0, 70.0),
        ("crash", [1], 66.0, 20.0),
        ("leave", [0], 30.0, 3.0),
        ("backup of the coordinator", 2, 69.0, 0.5),
        ("crash", [1], 66.0, 20.0),
        ("leave", [3], 37.0, 0.5),
    ],
    [],
    3451,
)
"""The coordinator accepts a contribution, is restored from an older backup, and closes the round before its author is back."""
"""Run in which clusters are drawn to probe others for erasure shards, and report the result."""
LIAR = 1
"""Peer that reports false states: only one, because two thirds of three agreeing clusters are believed."""
NUMBER = st.integers(0, PEERS - 1)
SOME = st.lists(NUMBER, min_size=1, max_size=PEERS, unique=True)
AT = st.integers(1, int(FAULTS_END) - 20).map(float)
LONG = st.sampled_from([0.5, 3.0, 8.0, 20.0, 70.0])
FAULT = st.one_of(
    st.tuples(st.just("crash"), SOME, AT, LONG),
    st.tuples(st.just("cut"), SOME, AT, LONG),
    st.tuples(st.just("cut coordinator"), st.just(0), AT, LONG),
    st.tuples(st.just("crash coordinator"), st.just(0), AT, LONG),
    st.tuples(st.just("backup of the coordinator"), st.integers(1, 6), AT, LONG),
    st.tuples(st.just("failed write"), st.just(0), AT, st.just(0.0)),
    st.tuples(st.just("backup of a peer"), NUMBER, AT, LONG),
    st.tuples(st.just("leave"), SOME, AT, LONG),
    st.tuples(st.just("pause"), SOME, AT, LONG),
    st.tuples(st.just("wall clock"), st.sampled_from([-3600, 3600, 86400]), AT, st.just(0.0)),
    st.tuples(st.just("lurk"), NUMBER, AT, LONG),
    st.tuples(st.just("replay"), NUMBER, AT, st.just(0.0)),
    st.tuples(st.just("equivocate"), NUMBER, AT, st.just(0.0)),
    st.tuples(st.just("stranger claims"), st.integers(100, 140), AT, st.just(0.0)),
    st.tuples(st.just("strangers come and go"), st.integers(150, 190), AT, st.just(0.0)),
    st.tuples(st.just("false report"), st.just(LIAR), AT, st.just(0.0)),
)
SCHEDULE = st.tuples(
    st.lists(FAULT, max_size=6),
    st.lists(NUMBER, max_size=PEERS - 2, unique=True),
    st.integers(0, 2**16),
)
"""Faults; peers that are absent for ever when the faults end, but never so many that too few are left; a seed for delays."""


BOX = PEERS - 1
"""Other host of peer 0's cluster, if a cluster has two hosts."""
WITH_BOXES = st.tuples(
    st.lists(st.one_of(FAULT, st.tuples(st.just("cut boxes"), st.just(0), AT, LONG)), max_size=6),
    st.lists(NUMBER, max_size=2, unique=True),
    st.integers(0, 2**16),
)


def inflict(swarm: Swarm, fault: tuple[str, Any, float, float]) -> None:
    kind, what, at, seconds = fault
    until = min(at + seconds, FAULTS_END)
    match kind:
        case "crash":
            for number in what:
                swarm.crash(number, at, until)
        case "cut":
            swarm.cut_off(what, at, until)
        case "cut coordinator":
            swarm.cut_coordinator(at, until)
        case "crash coordinator":
            swarm.crash_coordinator(at, until)
        case "backup of the coordinator":
            swarm.restore_coordinator(at, until, commits_lost=what)
        case "failed write":
            swarm.at(at, lambda: setattr(swarm, "fail_writes", True))
        case "backup of a peer":
            swarm.restore_peer(what, at, until, backup_at=at / 2)
        case "cut boxes":
            swarm.cut_boxes(what, at, until)
        case "leave":
            swarm.leave(what, at, until + 6)
        case "pause":
            swarm.pause(what, at, until)
        case "wall clock":
            swarm.at(at, lambda: setattr(swarm, "wall_offset_ms", swarm.wall_offset_ms + 1000 * what))
        case "lurk":
            swarm.at(at, lambda: setattr(swarm.peers[what], "phase_ends", swarm.now + seconds))
        case "replay":
            swarm.at(at, lambda: replay(swarm, what))
        case "equivocate":
            swarm.at(at, lambda: equivocate(swarm, what))
        case "stranger claims":
            swarm.at(at, lambda: stranger_claims(swarm, what))
        case "strangers come and go":
            swarm.at(at, lambda: strangers_come_and_go(swarm, what))
        case "false report":
            swarm.at(at, lambda: false_report(swarm, what))


def replay(swarm: Swarm, number: int) -> None:
    """Send again all statements of a peer in the chain."""
    if swarm.coordinator_up:
        for commit in list(swarm.commits):
            for envelope in chain.envelopes(commit.body):
                if envelope.key == swarm.peers[number].identity.key:
                    swarm.feed_envelope(envelope)


def equivocate(swarm: Swarm, number: int) -> None:
    """Sign a second contribution for the open round."""
    peer = swarm.peers[number]
    own = peer.state.open.own.get(pb.KIND_CONTRIBUTION) if peer.up else None
    if swarm.coordinator_up and own is not None:
        other = pb.Contribution.FromString(own.envelope.body)
        other.loss = 7.0
        swarm.feed_envelope(seal(peer.identity, pb.KIND_CONTRIBUTION, swarm.run.run_id, other).envelope)


def stranger_claims(swarm: Swarm, number: int) -> None:
    """Claim a seat from an unknown identity with a false state, and never appear again."""
    head = swarm.state.head
    claim = pb.Claim(serial=1, round=max(1, head.round), head=head.digest, state=digest("mine"))
    if swarm.coordinator_up:
        swarm.feed_envelope(seal(identity(number), pb.KIND_CLAIM, swarm.run.run_id, claim).envelope)
        swarm.feed(round.Absent(identity(number).peer))


def strangers_come_and_go(swarm: Swarm, first: int) -> None:
    """Claim seats from more unknown peers than may wait, and leave again."""
    for number in range(first, first + limits.CLAIMS):
        stranger_claims(swarm, number)
        head = swarm.state.head
        leave = pb.Leave(serial=2, round=max(1, head.round), head=head.digest)
        if swarm.coordinator_up:
            swarm.feed_envelope(seal(identity(number), pb.KIND_LEAVE, swarm.run.run_id, leave).envelope)


def false_report(swarm: Swarm, number: int) -> None:
    head = swarm.state.head
    report = pb.StateReport(round=head.round, head=head.digest, state=digest("false"), replayed=True)
    if swarm.coordinator_up and head.round:
        swarm.feed_envelope(seal(swarm.peers[number].identity, pb.KIND_STATE_REPORT, swarm.run.run_id, report).envelope)


def end_of_faults(swarm: Swarm, gone: list[int]) -> None:
    swarm.cut.clear()
    swarm.coordinator_cut = False
    swarm.start_coordinator()
    for number, peer in enumerate(swarm.peers):
        if number in gone:
            peer.crash()
        elif not peer.up or peer.state.leaving:
            peer.crash()
            peer.start()


@contextmanager
def few_places(clusters: int = 8) -> Iterator[None]:
    """Let fewer peers claim, and fewer clusters take part, than a schedule may bring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CLAIMS", PEERS + 1)
        patch.setattr(limits, "CLUSTERS", clusters)
        yield


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(SCHEDULE)
def test_whatever_happens_the_run_goes_on_with_one_chain(schedule):
    with few_places():
        explore(*schedule)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=SCHEDULES // 2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(WITH_BOXES)
def test_whatever_happens_to_a_cluster_of_boxes_the_run_goes_on_with_one_chain(schedule):
    with few_places():
        faults, gone, seed = schedule
        explore(faults, gone, seed, boxes=True)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=SCHEDULES // 2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(WITH_BOXES, st.booleans())
@example(AUTHOR_CUT_OFF_FROM_A_RESTORED_COORDINATOR, True)
def test_whatever_receipts_say_of_samples_the_run_goes_on_with_one_chain(schedule, boxes):
    with few_places():
        faults, gone, seed = schedule
        explore([fault for fault in faults if boxes or fault[0] != "cut boxes"], gone, seed, boxes, SHARES)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=SCHEDULES // 2, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(SCHEDULE, st.integers(1, 6), st.booleans())
def test_hostile_claims_before_genesis_do_not_stop_the_run(schedule, claims: int, right: bool):
    """Check hostile claims: unknown identities claim first, with another state or with the run's own, and never appear
    again. The coordinator restores no backup here. It would wait for more than half of a roster, which may be theirs,
    rather than sign a round twice."""
    with few_places(clusters=16):
        faults, gone, seed = schedule
        faults = [fault for fault in faults if fault[0] != "backup of the coordinator"]
        state = "initial" if right else "another"
        swarm = explore(faults, gone, seed, run=BOUND, first=lambda swarm: squat(swarm, claims, state))
    assert swarm.commits[0].body.state == BOUND.model.root


def squat(swarm: Swarm, claims: int, state: str) -> None:
    for number in range(200, 200 + claims):
        claim = pb.Claim(serial=1, round=1, state=digest(state))
        swarm.feed_envelope(seal(identity(number), pb.KIND_CLAIM, swarm.run.run_id, claim).envelope)


def test_three_identities_with_a_state_of_their_own_do_not_begin_the_run():
    swarm = explore([], [], 3, run=BOUND, first=lambda swarm: squat(swarm, 3, "another"))
    assert {member.cluster for member in swarm.commits[0].body.roster} <= {peer.name for peer in swarm.peers}


def test_what_receipts_say_of_samples_costs_standing_in_explored_runs():
    swarm = explore([], [], 3, run=SHARES)
    assert any(member.standing.lacking for commit in swarm.commits for member in commit.body.roster)
    assert any(receipt_of(signed).lacking for commit in swarm.commits for signed in commit.body.receipts)


def receipt_of(signed: pb.Signed) -> pb.Receipt:
    return pb.Receipt.FromString(signed.body)


def hosting(swarm: Swarm, round: int) -> int:
    """Return the number of hosts of peer 0's cluster on this round's roster."""
    roster = {member.cluster: member for member in swarm.commits[round].body.roster}
    return len(roster[swarm.peers[0].name].hosts) or 1 if swarm.peers[0].name in roster else 0


@pytest.mark.parametrize("fault", [("crash", [BOX], 20.0, 50.0), ("cut boxes", 0, 20.0, 50.0)])
def test_a_box_that_stays_away_is_gone_around_and_used_again(fault: tuple[str, Any, float, float]):
    swarm = explore([fault], [], 5, boxes=True)
    hosted = [hosting(swarm, number) for number in range(len(swarm.commits))]
    assert [count for count, _ in itertools.groupby(hosted) if count] == [2, 1, 2]


def test_who_left_a_run_that_slept_and_is_back_claims_anew(monkeypatch: pytest.MonkeyPatch):
    """Reproduce a schedule of the explorer: all leave a round that never closes, and come back into it; their departures
    stayed valid for ever."""
    monkeypatch.setattr(limits, "CLAIMS", PEERS + 1)
    left = [("leave", [0, 1, 2, 3], 87.0, 0.5), ("leave", [0, 1, 2, 3, 4], 1.0, 70.0)]
    explore([("crash", [0], 2.0, 0.5), ("cut", [0], 1.0, 0.5), ("failed write", 0, 1.0, 0.0), *left], [], 0)


def test_the_last_one_who_leaves_does_not_say_what_the_model_is(monkeypatch: pytest.MonkeyPatch):
    """Reproduce a schedule of the explorer: all but one had left, its false report alone decided the state, and no peer
    could come back."""
    monkeypatch.setattr(limits, "CLAIMS", PEERS + 1)
    faults = [("replay", 1, 79.0, 0.0), ("crash", [2, 3, 0, 4, 1], 20.0, 8.0), ("false report", 1, 81.0, 0.0)]
    explore([*faults, ("leave", [0, 1, 3, 4, 2], 80.0, 0.5)], [], 2912)


def explore(
    faults: list[tuple[str, Any, float, float]],
    gone: list[int],
    seed: int,
    boxes: bool = False,
    run: Manifest = RUN,
    first: Callable[[Swarm], None] = lambda swarm: None,
) -> Swarm:
    """Explore a schedule. `first`: called before any peer starts."""
    swarm = Swarm(run, PEERS, seed, loss=0.002, delay=0.2)
    first(swarm)
    if boxes:
        swarm.boxes(0, BOX)
    for fault in faults:
        inflict(swarm, fault)
    swarm.at(FAULTS_END + 10, lambda: end_of_faults(swarm, gone))
    swarm.begin()
    swarm.run_for(FAULTS_END + 11)
    alive = swarm.run_for(PATIENCE, swarm.finished)
    where = f"round {swarm.state.head.round}, {swarm.state.head.trained} trained: {round.why_open(swarm.state)}"
    assert alive, f"a dead run: {where}"
    restored = any(kind == "backup of the coordinator" for kind, *_ in faults)  # it lost what it accepted after the backup
    head = initial_head(COORDINATOR.peer, run.model.root)
    for commit in swarm.commits:
        head, _ = chain.extend(swarm.run, head, commit.envelope)
    assert head == swarm.state.head
    for peer in swarm.peers:
        assert not peer.halted
        assert restored or not peer.left_out
        if peer.up:
            assert [c.digest for c in peer.disk.commits] == [c.digest for c in swarm.commits]
            assert peer.fold == head_state(swarm)
    return swarm


def head_state(swarm: Swarm) -> bytes:
    """Return the state that the chain implies."""
    fold = digest("initial")
    for commit in swarm.commits:
        for item in chain.taken(commit.body):
            fold = digest(fold, item.contribution.leaves)
    return fold
