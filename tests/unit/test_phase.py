"""Tests of the phase machine: every row of its table, and the invariants of any schedule of agreed turns."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol.consensus.data_leases import Lease, Ledger
from dilocox.protocol.consensus.head import Cluster, Head, HostRange, initial_head
from dilocox.protocol.crypto import sha256
from dilocox.protocol.errors import LocalError
from dilocox.protocol.member import phase
from dilocox.protocol.member.phase import Apply, Encode, End, Flags, PhaseState, Stop, Train, Turn, Wait
from dilocox.protocol.run.manifest import Manifest
from tests.helpers import manifest
from tests.sentences import Message

ME = "me"
BATCH = 4


def run_with(overlap: str = "rebase", **rounds: Any) -> Manifest:
    return manifest(rounds={"count": 6, "inner_steps": 4, "max_inner_steps": 8, "overlap": overlap, **rounds})


def head(round: int, member: bool = True, inner_steps: int = 4, counted: int = 0, ahead: int = 1000, joined: int = 1) -> Head:
    """Return the head before `round`, with or without this cluster on its roster."""
    names = [ME, "other"] if member else ["other"]
    leases = {name: Lease(counted, ((10_000, 10_000 + ahead),)) for name in names}
    return Head(
        round=round,
        digest=b"%d" % round,
        coordinator="",
        trained=max(0, round - 1),
        roster={name: Cluster(name, (HostRange(name, 0, 2),), joined) for name in names},
        ledger=Ledger(leases=leases),
        rank_or_k=7,
        inner_steps=inner_steps,
    )


def at(round: int, run: Manifest | None = None, **values: Any) -> PhaseState:
    """Return the first step of a counted phase whose Θ is applied."""
    return replace(phase.begin(run or run_with(), ME, head(round)), **values)


def trained(state: PhaseState, steps: int) -> PhaseState:
    """Take steps without other events, while the background is busy."""
    for _ in range(steps):
        state, actions = phase.step(state, Turn(trained=True))
        assert len(actions) == 1
    return state


def step(state: PhaseState, **turn: Any) -> tuple[PhaseState, tuple[phase.Action, ...]]:
    return phase.step(state, Turn(**turn))


SOURCE = "protocol/member/phase.py"


def waits(*values: object) -> Wait:
    """Return the wait whose reason names these values."""
    return Wait(Message(SOURCE, *values))


# Beginning and waiting


def test_before_the_first_commit_it_waits_and_says_so():
    state = phase.begin(run_with(), ME)
    assert phase.next_action(state) == waits("first commit")
    state, actions = step(state, prepared=head(1), idle=True)
    assert actions == (Apply(keep_private=True), waits("samples"))
    assert step(state)[1] == (Train(tuple(range(10_000, 10_000 + BATCH))),)
    assert (state.round, state.steps) == (1, 0)


def test_positions_follow_the_lease():
    state = trained(at(1), 2)
    assert state.samples_read == 2 * BATCH
    assert phase.next_action(state) == Train(tuple(range(10_008, 10_012)))


def test_a_used_up_lease_is_waited_for():
    state = at(1, head=head(1, ahead=2 * BATCH + 1))
    state = trained(state, 2)
    assert phase.next_action(state) == waits("data lease", 1)


def test_a_phase_takes_at_most_max_inner_steps():
    state = trained(at(3, in_flight=2, head=head(2)), 8)
    why = phase.next_action(state)
    assert why == waits(2, "max_inner_steps", 8)
    with pytest.raises(LocalError, match="commit 2 is late"):
        step(state, trained=True)


def test_a_synchronous_round_waits_for_its_commit():
    run = run_with(synchronous_rounds=2)
    state, actions = step(trained(at(2, run), 4), idle=True)
    assert actions[-1] == waits(2, 2, "synchronous")
    state, actions = step(state, prepared=head(3), idle=True)
    assert actions[0] == Apply(keep_private=True)
    assert isinstance(actions[-1], Train)
    state, actions = step(trained(state, 4), idle=True)
    assert isinstance(actions[-1], Train), "round 3 overlaps"


def test_the_end_of_the_run_is_waited_out():
    state, actions = step(trained(at(6), 4), idle=True)
    assert state.finished
    assert actions[-1] == waits(6, "last phase")
    state, actions = step(state, prepared=head(7), idle=True)
    assert actions == (Apply(keep_private=True), waits("last round"))
    assert step(state, idle=True)[1] == actions[1:]


def test_stop_comes_before_everything():
    state, actions = step(trained(at(2), 3), trained=True, idle=True, stop=True, prepared=head(3))
    assert actions == (Stop(),)
    assert state.steps == 4


# Ending a phase


def test_a_phase_ends_after_h_steps_and_says_what_it_did():
    state = trained(at(2, samples_read=8), 3)
    state, actions = step(state, trained=True, idle=True)
    assert actions[:2] == (End(2, restart=False), Encode(2, 4, samples_read=8 + 4 * BATCH, joined=1, rank_or_k=7, head=b"2"))
    assert isinstance(actions[2], Train)
    assert (state.round, state.steps, state.in_flight) == (3, 0, 2)


def test_it_waits_for_the_background_and_trains_on():
    state = trained(at(2), 6)
    assert state.round == 2
    state, actions = step(state, trained=True, idle=True)
    assert actions[1] == Encode(2, 7, 7 * BATCH, 1, 7, b"2")


def test_a_phase_does_not_end_before_its_own_state_is_in_place():
    state = trained(at(3, in_flight=2, head=head(2)), 5)
    assert step(state, idle=True)[1] == (phase.next_action(state),)
    state, actions = step(state, trained=True, prepared=head(3), idle=True)
    assert [type(action) for action in actions] == [Apply, End, Encode, Train], "commit and end fall into one turn"


def test_the_commit_says_how_long_the_next_phase_is():
    state, actions = step(at(2, head=head(2, inner_steps=1)), trained=True, idle=True)
    assert End(2, restart=False) in actions
    state = trained(at(2, head=head(2, inner_steps=6)), 5)
    assert step(state, idle=True)[0].round == 2


def test_a_time_boxed_phase_ends_with_its_time():
    run = run_with(round_seconds=1.0)
    assert step(at(2, run), idle=True, time_is_up=True)[0].round == 2, "no step, nothing to send"
    state = trained(at(2, run), 6)
    assert step(state, idle=True)[0].round == 2
    assert step(state, idle=True, time_is_up=True)[0].round == 3


def test_a_time_boxed_phase_that_may_not_go_on_ends_early():
    state = trained(at(2, run_with(round_seconds=1.0)), 7)
    assert step(state, trained=True, idle=True)[0].round == 3, "it would wait for its time, which stands still"


def test_only_samples_of_the_lease_are_announced():
    state = at(2, samples_read=10, head=head(2, ahead=12))
    state = replace(trained(state, 0), steps=4)
    assert Encode(2, 4, 10, 1, 7, b"2") in step(state, idle=True)[1]
    assert Encode(2, 4, 12, 1, 7, b"2") in step(replace(state, samples_read=99), idle=True)[1]


# Commits


def test_rebase_moves_onto_a_commit_whenever_it_arrives():
    state = trained(at(3, in_flight=2, head=head(2)), 2)
    state, actions = step(state, trained=True, prepared=head(3))
    assert actions[0] == Apply(keep_private=True)
    assert (state.round, state.steps, state.in_flight) == (3, 3, 0)


def test_delayed_holds_a_commit_back_until_the_phase_is_over():
    run = run_with("delayed")
    state = trained(at(3, run, in_flight=2, head=head(2)), 3)
    held, actions = step(state, prepared=head(3), idle=True)
    assert (held, actions) == (state, (phase.next_action(state),))
    state, actions = step(state, trained=True, prepared=head(3), idle=True)
    assert actions[:3] == (End(3, restart=True), Apply(keep_private=False), Encode(3, 4, 4 * BATCH, 1, 7, b"3"))
    assert (state.round, state.in_flight, state.head.round) == (4, 3, 3)


def test_the_first_delayed_phase_restarts_from_the_committed_state():
    assert End(1, restart=True) in step(trained(at(1, run_with("delayed")), 4), idle=True)[1]


def test_delayed_takes_a_commit_at_once_where_the_phase_will_not_count():
    state = trained(at(3, run_with("delayed"), in_flight=2, head=head(2)), 1)
    state, actions = step(state, prepared=head(3, member=False), idle=True)
    assert actions[0] == Apply(keep_private=True)
    assert not state.on_roster


def test_a_round_that_closes_without_us_is_gone_and_its_work_kept():
    state = trained(at(2), 3)
    state, actions = step(state, prepared=head(3), idle=True)
    assert actions[0] == Apply(keep_private=True)
    assert (state.round, state.steps) == (3, 0)


def test_a_cluster_without_a_place_warms_up_and_drops_its_work():
    state = phase.begin(run_with(), ME, head(2, member=False))
    first = phase.next_action(state)
    assert isinstance(first, Train)
    state = trained(state, 6)
    assert state.samples_read == 0
    assert step(state, idle=True)[0].round == 2, "nothing to contribute"
    assert phase.next_action(trained(state, 2)) == waits(2, "max_inner_steps", 8)
    state, actions = step(state, prepared=head(3, joined=3, counted=0), idle=True)
    assert actions[0] == Apply(keep_private=False)
    assert (state.round, state.steps, state.joined) == (3, 0, 3)


def test_a_new_lease_starts_its_own_count():
    state = phase.onto(at(2, samples_read=40), head(3, joined=3, counted=2))
    assert (state.samples_read, state.joined) == (2, 3)
    state = phase.onto(at(2, samples_read=40), head(3, counted=44))
    assert state.samples_read == 44, "of what was counted nothing is read again"


def test_commits_come_in_order():
    state = at(2)
    for wrong in (2, 4):
        with pytest.raises(LocalError, match="does not follow"):
            step(state, prepared=head(wrong))


@pytest.mark.parametrize(("in_flight", "round", "closes"), [(2, 2, True), (2, 3, False), (0, 2, False), (0, 0, False)])
def test_only_its_own_commit_decides_what_becomes_of_a_payload(in_flight, round, closes):
    assert phase.closes(at(3, in_flight=in_flight), round) is closes


def test_a_last_commit_that_counts_nobody_is_not_the_end():
    state, actions = step(trained(at(6), 4), idle=True)
    assert isinstance(actions[-1], Wait)
    state, actions = step(state, prepared=replace(head(7), trained=5), idle=True)
    assert isinstance(actions[-1], Train), "another round is needed"


# Samples

ON_THEIR_WAY = waits("samples")


def test_no_rank_takes_a_step_whose_samples_another_lacks():
    state, actions = step(trained(at(2), 2), trained=True, lacking=True)
    assert (state.steps, actions) == (3, (ON_THEIR_WAY,))
    assert step(state, lacking=True) == (state, (ON_THEIR_WAY,))
    assert step(state)[1] == (Train(tuple(range(10_012, 10_016))),)


def test_what_is_looked_for_in_a_turn_are_the_samples_of_the_batch_after_it():
    state = trained(at(2), 2)
    assert phase.upcoming(state, trained=False) == [10_008, 10_009, 10_010, 10_011]
    assert phase.upcoming(state, trained=True) == [10_012, 10_013, 10_014, 10_015]
    assert phase.upcoming(at(2, head=head(2, ahead=BATCH)), trained=True) == [], "its lease ends"


def test_a_new_lease_is_looked_for_before_it_is_read():
    elsewhere = replace(head(3), ledger=Ledger(leases={ME: Lease(8, ((70_000, 71_000),))}))
    state, actions = step(trained(at(2), 2), prepared=elsewhere)
    assert actions == (Apply(keep_private=True), ON_THEIR_WAY)
    assert step(state)[1] == (Train(tuple(range(70_000, 70_004))),)


def test_a_phase_that_is_over_ends_whatever_the_next_one_waits_for():
    _, actions = step(trained(at(2), 3), trained=True, lacking=True, idle=True)
    assert actions[0] == End(2, restart=False)
    assert actions[-1] == ON_THEIR_WAY


def test_what_is_read_soon_is_the_lease_or_where_a_guest_reads():
    run = run_with()
    assert phase.reading(run, ME, head(3)) == ((10_000, 11_000),)
    assert phase.reading(run, ME, initial_head("")) == (), "nobody trains before the first commit"
    ((first, end),) = phase.reading(run, ME, head(3, member=False))
    guest = phase.begin(run, ME, head(3, member=False))
    assert phase.upcoming(guest, trained=False)[0] == first
    assert phase.upcoming(trained(guest, 7), trained=False)[-1] == end - 1


# Resuming


def test_a_boundary_is_resumed_where_it_was():
    state = phase.resume(run_with(), ME, head(3), 3, samples_read=16, joined=1)
    assert (state.round, state.steps, state.in_flight, state.samples_read) == (4, 0, 3, 16)
    ahead = phase.onto(state, head(4))
    assert (ahead.round, ahead.in_flight) == (4, 0)
    assert phase.onto(ahead, head(5)).round == 5


def test_a_boundary_older_than_the_state_is_not_in_flight():
    state = phase.resume(run_with(), ME, head(5, counted=20), 3, samples_read=16, joined=1)
    assert (state.round, state.in_flight, state.samples_read) == (5, 0, 20)


# Ranks


def flags(**changes: bool) -> Flags:
    idle = {"preparing": False, "prepared": False, "busy": False, "stop": False, "time_is_up": False, "lacking": False}
    idle |= {"scorable": False, "checkpoint_due": False}
    return Flags(**{**idle, **changes})


def agreed(*ranks: Flags) -> Turn:
    sums = [sum(column) for column in zip(*(rank.numbers() for rank in ranks), strict=True)]
    return phase.agree(sums, len(ranks), True, lambda: head(3))


def test_ranks_agree_on_what_all_of_them_have():
    ready = flags(preparing=True, prepared=True)
    assert agreed(flags(), flags()) == Turn(trained=True, idle=True)
    assert agreed(ready, ready) == Turn(trained=True, prepared=head(3), idle=True)
    assert agreed(ready, flags(preparing=True, busy=True)) == Turn(trained=True)
    assert agreed(flags(busy=True), flags()) == Turn(trained=True)
    assert agreed(flags(stop=True), flags()) == Turn(trained=True, idle=True, stop=True)
    assert agreed(flags(time_is_up=True), flags()) == Turn(trained=True, idle=True, time_is_up=True)
    assert agreed(flags(), flags(lacking=True)) == Turn(trained=True, idle=True, lacking=True)


def test_no_phase_ends_while_one_rank_already_holds_the_next_state():
    """Check it, because otherwise that rank would measure its work from another Θ, and no commit would return its payload."""
    assert not agreed(flags(preparing=True, prepared=True), flags()).idle


def test_nothing_is_idle_while_one_rank_prepares():
    assert agreed(flags(preparing=True), flags()) == Turn(trained=True)
    assert agreed(flags(preparing=True), flags(preparing=True)) == Turn(trained=True)


# Each value whole.


def test_a_phase_begins_with_nothing_done():
    run = run_with()
    assert phase.begin(run, ME) == PhaseState(run, ME, initial_head(""), 1)
    assert phase.begin(run, ME, head(3, counted=8, joined=2)) == PhaseState(
        run, ME, head(3, counted=8, joined=2), 3, 0, 0, 8, 2
    )


def test_a_boundary_is_resumed_with_all_it_knew():
    run = run_with()
    assert phase.resume(run, ME, head(3), 3, 16, 1) == PhaseState(run, ME, head(3), 4, 0, 3, 16, 1)
    assert phase.resume(run, ME, head(4), 3, 16, 1) == PhaseState(run, ME, head(4), 4, 0, 0, 16, 1)
    assert phase.resume(run, ME, head(2), 3, 16, 1) == PhaseState(run, ME, head(2), 4, 0, 0, 16, 1)


@pytest.mark.parametrize("steps", [0, 2])
def test_who_has_no_place_reads_on_from_a_place_of_its_own(steps: int):
    own = int.from_bytes(sha256(ME.encode())[:6], "big")
    state = trained(phase.begin(run_with(), ME, head(2, member=False)), steps)
    assert phase.next_action(state) == Train(tuple(range(own + steps * BATCH, own + (steps + 1) * BATCH)))


@pytest.mark.parametrize(("wrong", "named"), [(2, 1), (4, 3)])
def test_a_commit_out_of_order_is_named(wrong: int, named: int):
    with pytest.raises(LocalError) as caught:
        step(at(2), prepared=head(wrong))
    assert str(caught.value) == Message(SOURCE, named, 2)


def test_a_step_that_nobody_asked_for_is_named():
    with pytest.raises(LocalError) as caught:
        step(phase.begin(run_with(), ME), trained=True)
    assert str(caught.value) == Message(SOURCE, "inner step", "first commit")


def test_the_first_payload_is_decided_by_the_first_commit():
    assert phase.closes(at(2, in_flight=1), 1)


def test_delayed_does_not_hold_back_a_commit_that_closes_its_round_without_it():
    state = trained(at(2, run_with("delayed")), 3)
    state, actions = step(state, prepared=head(3), idle=True)
    assert actions == (Apply(keep_private=True), phase.next_action(state))
    assert (state.round, state.steps, state.head.round) == (3, 0, 3)


def test_a_single_step_fills_a_time_boxed_phase():
    state = trained(at(2, run_with(round_seconds=1.0)), 1)
    assert step(state, idle=True, time_is_up=True)[1][:2] == (End(2, restart=False), Encode(2, 1, BATCH, 1, 7, b"2"))


FLAG = st.booleans()
TURNS = st.lists(
    st.tuples(st.sampled_from(["prepare", "prepare without us", "later"]), FLAG, FLAG, FLAG, st.integers(1, 8)),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(TURNS, st.sampled_from(["none", "delayed", "rebase"]), st.integers(0, 2), st.sampled_from([None, 1.0]))
def test_what_holds_on_any_schedule(turns, overlap, synchronous, seconds):
    """Feed the same turns to two ranks, while the network behaves arbitrarily."""
    run = run_with(overlap, synchronous_rounds=synchronous, round_seconds=seconds)
    ranks = [phase.begin(run, ME), phase.begin(run, ME)]
    action: phase.Action = Wait("it has just started")
    prepared: Head | None = None
    applied, announced = [], []
    for what, idle, time_is_up, lacking, inner_steps in turns:
        state = ranks[0]
        if prepared is None and what != "later" and state.head.round <= run.rounds.count:
            prepared = head(state.head.round + 1, what == "prepare", inner_steps, counted=state.samples_read)
        turn = Turn(isinstance(action, Train), prepared, idle, time_is_up, lacking=lacking)
        upcoming = phase.upcoming(state, turn.trained)
        before = state.steps + turn.trained
        (ranks[0], actions), (ranks[1], others) = (phase.step(rank, turn) for rank in ranks)
        assert (ranks[0], actions) == (ranks[1], others), "ranks that agreed do the same"
        action = actions[-1]
        assert isinstance(action, Train | Wait)
        if isinstance(action, Train):
            assert not lacking
            assert list(action.positions) == upcoming, "every rank has seen that they are here"
        assert not any(isinstance(earlier, Train | Wait | Stop) for earlier in actions[:-1])
        if any(isinstance(item, Apply) for item in actions):
            assert prepared is not None
            applied.append(prepared.round)
            prepared = None
        kinds = [type(item) for item in actions]
        assert kinds.count(End) == kinds.count(Encode) <= 1
        for item in actions:
            if isinstance(item, Encode):
                announced.append(item.round)
                assert idle
                assert ranks[0].head.round == item.round, "its own Θ is in place"
                assert ME in ranks[0].head.roster
                assert 0 < item.inner_steps == before <= run.rounds.max_inner_steps
        state = ranks[0]
        assert state.steps <= run.rounds.max_inner_steps
        assert state.head.round in (state.round, state.round - 1)
        assert state.in_flight in (0, state.head.round)
        assert bool(state.in_flight) == (state.head.round == state.round - 1 > 0)
        if isinstance(action, Wait):
            assert action.why
    assert applied == list(range(1, len(applied) + 1)), "each commit once, in order"
    assert announced == sorted(set(announced))


def test_a_contribution_is_scored_when_every_rank_can():
    state = trained(at(2), 1)
    _, actions = step(state, scorable=True)
    assert actions[0] == phase.Score()
    assert isinstance(actions[-1], phase.Train | phase.Wait)
    assert phase.Score() not in step(state)[1]
    assert agreed(flags(scorable=True), flags(scorable=True)).scorable
    assert not agreed(flags(scorable=True), flags()).scorable
