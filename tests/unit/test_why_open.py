"""Tests of the text about an open round: its phase, and the sentence why it is still open."""

from collections.abc import Callable

import pytest

from dilocox.protocol.ids import short
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rounds import round_machine
from tests.helpers import Table, digest, identity, manifest


def names(*numbers: int) -> str:
    """Return the names as a sentence lists them: in the order of the full names."""
    return ", ".join(short(name) for name in sorted(identity(number).peer for number in numbers))


def five() -> Table:
    """Round 1 of five clusters."""
    return Table(manifest(rounds={"start_clusters": 5, "count": 1})).genesis(range(5))


def three() -> Table:
    return Table(manifest(rounds={"count": 1})).genesis()


def empty() -> Table:
    return Table(manifest())


def claimed(*states: str, absent: tuple[int, ...] = ()) -> Table:
    table = empty()
    for number, state in enumerate(states):
        table.submit(table.claim(number, state=digest(state)))
    table.absent(*absent)
    return table


def first_of(*numbers: int) -> str:
    """Return the first names of a roster larger than a sentence lists."""
    shown = sorted(identity(number).peer for number in numbers)[:3]
    return ", ".join(short(name) for name in shown)


def contributed(*numbers: int) -> Table:
    return five().contribute(list(numbers))


def leaving(*numbers: int) -> Table:
    table = five()
    for number in numbers:
        table.submit(table.leave(number))
    return table


def absent(table: Table, *numbers: int) -> Table:
    table.absent(*numbers)
    return table


def sealing() -> Table:
    """Return a table with all contributions, whose ballot is not signed yet."""
    table = three().contribute([0, 1])
    table.state, _ = round_machine.step(table.state, round_machine.Received(table.contribution(2)), table.moment)
    return table


def voting(*voted: int) -> Table:
    return five().contribute(range(5)).vote(list(voted))


def voting_while_one_leaves() -> Table:
    table = voting(0)
    table.submit(table.leave(1))
    return absent(table, 2)


def paused_with_a_layout_that_is_not_whole() -> Table:
    table = absent(three(), 1, 2)
    layout = table.layout(5, [(5, 0, 1, 0), (6, 1, 1, 0)])
    table.submit(layout)
    table.submit(table.claim(5, cluster=layout.digest))
    return table


def resumed(*present: int) -> Table:
    table = five().contribute([0])
    table.feed(round_machine.Resumed())
    table.present(*present)
    return table


def resumed_with_fewer_than_the_run_needs(*present: int) -> Table:
    table = Table(manifest(rounds={"count": 2})).genesis().contribute([0, 1, 2])
    for number in (1, 2):
        table.submit(table.leave(number))
    table.vote([0])
    assert table.roster() == [0]
    table.feed(round_machine.Resumed())
    table.present(*present)
    return table


def resumed_while_voting(*present: int) -> Table:
    table = voting(0, 1)
    table.feed(round_machine.Resumed())
    table.present(*present)
    return table


def a_grace_later(table: Table) -> Table:
    table.wait(table.run.rounds.liveness_seconds)
    return table


def closing(*reported: int) -> Table:
    table = three().train(1)
    for number in reported:
        table.submit(table.report(number))
    return table


BEGINS = "the run begins when 3 clusters are here: "
BELOW = "1 cluster is live and the run needs 2 (rounds.min_clusters): no deadline passes while it waits for "
STARTED = "restarted: waiting until more than half of the roster is live, at least"
WAITS = [
    (empty, "gathering", f"{BEGINS}0 of 3"),
    (lambda: claimed("one"), "gathering", f"{BEGINS}1 of 3"),
    (lambda: claimed("one", "one", "two"), "gathering", f"{BEGINS}2 of 3; 1 more has another initial state"),
    (lambda: claimed("one", "one", absent=(1,)), "gathering", f"{BEGINS}1 of 3"),
    (three, "collecting", f"waiting for the contributions of {names(0, 1, 2)}"),
    (five, "collecting", f"waiting for the contributions of {first_of(*range(5))} and 2 more"),
    (lambda: contributed(0), "collecting", f"waiting for the contributions of {first_of(1, 2, 3, 4)} and 1 more"),
    (lambda: contributed(0, 1), "collecting", f"waiting for the contributions of {names(2, 3, 4)}"),
    (lambda: contributed(0, 1, 2, 3), "collecting", f"waiting for the contributions of {names(4)}"),
    (lambda: leaving(0, 1), "collecting", f"waiting for the contributions of {names(2, 3, 4)}"),
    (lambda: absent(five(), 3, 4), "collecting", f"waiting for the contributions of {names(0, 1, 2)}"),
    (sealing, "collecting", "about to close"),
    (lambda: voting(0, 1), "voting", f"waiting for the votes of {names(2, 3, 4)}"),
    (lambda: voting(0, 1, 2, 3), "voting", f"waiting for the votes of {names(4)}"),
    (voting_while_one_leaves, "voting", f"waiting for the votes of {names(3, 4)}"),
    (lambda: absent(three(), 1, 2), "collecting", f"{BELOW}{names(1, 2)}"),
    (
        paused_with_a_layout_that_is_not_whole,
        "collecting",
        f"{BELOW}{names(1, 2)}; 0 clusters request a seat",
    ),
    (lambda: leaving(0, 1, 2, 3), "collecting", f"{BELOW}{first_of(0, 1, 2, 3)} and 1 more"),
    (lambda: absent(voting(0), 0, 1, 2, 3), "voting", f"{BELOW}{first_of(0, 1, 2, 3)} and 1 more"),
    (resumed, "starting", f"{STARTED} 2 clusters; 0 of 5 are"),
    (lambda: resumed(0, 4), "starting", f"{STARTED} 2 clusters; 2 of 5 are"),
    (resumed_with_fewer_than_the_run_needs, "starting", f"{STARTED} 1 cluster; 0 of 1 are"),
    (lambda: resumed_with_fewer_than_the_run_needs(0), "collecting", f"{BELOW}1 more cluster"),
    (lambda: resumed(0, 1, 2), "collecting", f"waiting for the contributions of {first_of(1, 2, 3, 4)} and 1 more"),
    (lambda: a_grace_later(resumed(0, 1, 2)), "collecting", f"waiting for the contributions of {names(1, 2)}"),
    (lambda: resumed_while_voting(0, 1, 2), "voting", f"waiting for the votes of {names(2, 3, 4)}"),
    (lambda: a_grace_later(resumed_while_voting(0, 1, 2)), "voting", f"waiting for the votes of {names(2)}"),
    (closing, "closing", f"waiting for the last state reports of {names(0, 1, 2)}"),
    (lambda: closing(1), "closing", f"waiting for the last state reports of {names(0, 2)}"),
    (lambda: closing(0, 1, 2), "finished", "the run is finished"),
]


@pytest.mark.parametrize(("table", "phase", "why"), WAITS)
def test_an_open_round_says_what_it_waits_for(table: Callable[[], Table], phase: str, why: str):
    state = table().state
    assert (round_machine.phase_of(state), round_machine.why_open(state)) == (phase, why)


def test_who_equivocates_is_waited_for_no_more():
    table = three()
    for number in range(3):
        table.submit(table.contribution(number))
        if number < 2:
            assert table.submit(table.contribution(number, loss=1.0)).reason == pb.REASON_EQUIVOCATION
    assert round_machine.phase_of(table.state) == "collecting"
    assert round_machine.why_open(table.state) == "about to close"
